"""Runs environments of verifiers against a server: `legato_additions`, with the client for evaluation and for training, and
`legato_rounds`.

python verifiers_client.py URL MODEL TOKENIZER_FOLDER       the key is in LEGATO_SERVER_KEY; prints JSON
"""

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment


async def traces(client: Any, model: str, name: str) -> list[Any]:
    """verifiers' traces of all tasks of an environment."""
    agent = vf.AgentConfig(harness={"id": name}, runtime=vf.SubprocessConfig())
    environment = load_environment(vf.SingleAgentEnvConfig(taskset=vf.TasksetConfig(id=name), agent=agent))
    context = vf.ModelContext(model=model, client=client, sampling=vf.Sampling(temperature=0.8, max_tokens=16))
    async with environment.serving():
        episodes = await asyncio.gather(*[environment.run_episode(task, context) for task in environment.taskset])
    found = []
    for episode in episodes:
        assert episode.ok, episode.errors
        (trace,) = episode.traces
        assert not trace.errors, trace.errors
        found.append(trace)
    return found


async def play(client: Any, model: str) -> list[dict[str, Any]]:
    """The sampled messages of all additions, with tokens and log-probs where the client has them."""
    results = []
    for trace in await traces(client, model, "legato_additions"):
        record = json.loads(trace.model_dump_json())
        question, answer = record["nodes"]
        results.append({"prompt": question["token_ids"], "answer": answer, "rewards": record["rewards"]})
    return results


async def main() -> None:
    url, model, tokenizer = sys.argv[1:]
    common = {"base_url": f"{url}/v1", "api_key_var": "LEGATO_SERVER_KEY"}
    evaluated = await play(vf.EvalClientConfig(**common), model)
    trained = await play(vf.TrainClientConfig(**common, renderer_model_name=tokenizer), model)
    rounds = [
        [trace.num_turns, trace.reward] for trace in await traces(vf.EvalClientConfig(**common), model, "legato_rounds")
    ]
    print(json.dumps({"evaluated": evaluated, "trained": trained, "rounds": rounds}))


if __name__ == "__main__":
    asyncio.run(main())
