"""A run starts agents that own their loop: their rollouts hold the tokens that the engine read and wrote, and no others."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import legato
from examples.own_agent import play as play_example
from legato.config.kinds import make
from legato.config.load import load
from legato.core.rollout import Problem, Rollout, StopReason, Unscorable
from legato.environments.adapt import adapt_environment, is_agent
from legato.environments.agents import Endpoint
from legato.environments.tools import tools_of
from legato.errors import InputError
from legato.rollouts.engine import Limits, Request
from legato.rollouts.episodes import EpisodeSettings, Runner, Start
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.run import wire
from legato.serve.agents import AgentRunner
from tests.rollouts.chat_families import FAMILIES, Family
from tests.rollouts.test_tools import Doubles, Saying, calls, check_tokens
from tests.rollouts.test_tools import play as play_in_white_box
from tests.serve.running import chat_policy, make_served, plain_engine, running

families = pytest.mark.parametrize("family", FAMILIES, ids=[each.name for each in FAMILIES])
GAME = Problem(prompt="game 7:", answer="3", fields={"largest": 4})


@contextmanager
def agents(function: Any, **more: Any) -> Iterator[AgentRunner]:
    """A runner of agents on a tiny model."""
    policy = chat_policy()
    options: dict[str, Any] = {
        "rendering": Rendering(tokenizer=policy.tokenizer, chat="never"),
        "limits": Limits(max_response_tokens=60, end_tokens=(1,)),
        "longest_prompt": 40,
    }
    runner = AgentRunner(agent=adapt_environment(function), policy=policy, engine=plain_engine(policy), **options | more)
    try:
        yield runner
    finally:
        runner.close()


def start_of(runner: Runner, problem: Problem = GAME, seeds: tuple[int, ...] = (11, 12, 13, 14)) -> Start:
    return Start(problem=problem, prompt=runner.rendering.prompt(problem), seeds=seeds, ids=range(5, 5 + len(seeds)))


def play(function: Any, sampling: Sampling | None = None, **more: Any) -> list[Rollout]:
    with agents(function, **more) as runner:
        (rollouts,) = runner.play([start_of(runner)], sampling or Sampling())
    return rollouts


def guess(problem: Problem, endpoint: Endpoint) -> list[float]:
    return play_example(problem, endpoint, guesses=3)


async def guess_async(problem: Problem, endpoint: Endpoint) -> list[float]:
    return await asyncio.to_thread(guess, problem, endpoint)


def same_rollout(own: Rollout, other: Rollout) -> None:
    assert (own.rollout_id, own.turn_rewards, own.fault) == (other.rollout_id, other.turn_rewards, other.fault)
    for name in ("prompt_tokens", "tokens", "version", "mask", "turn", "author"):
        assert torch.equal(getattr(own, name), getattr(other, name)), name
    # Which requests decode together depends on when they arrive, and rounding on that.
    assert torch.allclose(own.sampler_logprobs, other.sampler_logprobs, atol=1e-5)
    assert (own.dialogue, own.text) == (other.dialogue, other.text) or own.dialogue is None


@pytest.mark.parametrize("function", [guess, guess_async])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.9)])
def test_an_agent_gets_the_rollouts_of_the_environment_that_it_plays(function: Any, sampling: Sampling) -> None:
    ends = Limits(max_response_tokens=60, end_tokens=(1, *range(20, 40)))  # so that the random model comes to an end
    limits = EpisodeSettings(max_turn_tokens=8)
    with agents(function, episodes=limits, limits=ends) as runner:
        runner.publish(4)
        (own,) = runner.play([start_of(runner)], sampling)
        white = Runner(
            engine=plain_engine(runner.policy),
            rendering=runner.rendering,
            limits=runner.limits,
            environment=make("environment", "guess", {"guesses": 3}),
            episodes=limits,
        )
        white.publish(4)
        (other,) = white.play([start_of(white)], sampling)
        (again,) = runner.play([start_of(runner)], sampling)
    assert any(len(rollout.turn_rewards or ()) > 1 and not rollout.stop.truncated for rollout in other)
    for mine, theirs, twice in zip(own, other, again, strict=True):
        if theirs.stop is StopReason.LENGTH:
            # The environment ends with a turn that a limit cut; an agent may go on.
            kept = slice(0, len(theirs.tokens))
            assert torch.equal(mine.tokens[kept], theirs.tokens)
        else:
            same_rollout(mine, theirs)
            if sampling.truncates:
                assert mine.kept_logmass is not None and theirs.kept_logmass is not None
                assert torch.allclose(mine.kept_logmass, theirs.kept_logmass, atol=1e-5)
        same_rollout(mine, twice)


def tool_agent(problem: Problem, endpoint: Endpoint) -> float:
    """The usual loop of an agent with tools."""
    messages: list[Any] = [dict(each) for each in problem.prompt]  # type: ignore[arg-type]
    while True:
        answer = endpoint.ask("/chat/completions", messages=messages, tools=list(tools_of(Doubles())), temperature=0.3)
        (choice,) = answer["choices"]
        messages.append(choice["message"])
        asked = choice["message"].get("tool_calls")
        assert choice["finish_reason"] == ("tool_calls" if asked else "stop")
        if not asked:
            return float(choice["message"]["content"].endswith("it is 8"))
        for call in asked:
            number = json.loads(call["function"]["arguments"])["a"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": "double", "content": str(2 * number)})


def play_saying(function: Any, family: Family, turns: Sequence[tuple[str, str]]) -> tuple[Rollout, Saying]:
    words = family.tokenizer()
    engine = Saying(words, turns, family)
    policy = replace(chat_policy(), tokenizer=words)  # only its tokenizer is used
    ends = tuple(sorted(words.convert_tokens_to_ids(list({family.end, family.call_end}))))
    runner = AgentRunner(
        agent=adapt_environment(function),
        policy=policy,
        engine=engine,
        rendering=Rendering(tokenizer=words, date="2026-01-01"),
        limits=Limits(max_response_tokens=4000, end_tokens=ends),
        longest_prompt=2000,
    )
    problem = Problem(prompt=[{"role": "user", "content": "double 4"}])
    try:
        ((rollout,),) = runner.play([Start(problem=problem, prompt=torch.tensor([5]), seeds=(1,), ids=(7,))], Sampling())
    finally:
        runner.close()
    return rollout, engine


@families
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_chat_with_tools_continues_the_tokens_that_were_sampled(family: Family, count: int) -> None:
    turns = calls(family, count)
    rollout, engine = play_saying(tool_agent, family, turns)
    _, white, _ = play_in_white_box(family, turns, Doubles())
    assert rollout.fault is None and rollout.turn_rewards == (*[0.0] * count, 1.0)
    check_tokens(rollout, engine)
    assert engine.read == white.read and rollout.earlier == ()


@pytest.mark.parametrize("stream", [False, True])
def test_any_client_of_the_server_gets_tool_calls(stream: bool) -> None:
    (family,) = [each for each in FAMILIES if each.name == "qwen"]
    words = family.tokenizer()
    engine = Saying(words, [*calls(family, 1), ("<tool_call>{", family.end)], family)
    served = make_served(replace(chat_policy(), tokenizer=words), engine=engine, context_tokens=2000)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "double 4"}], "tools": list(tools_of(Doubles()))}
    with running(served) as server:
        if stream:
            events = server.events("/v1/chat/completions", {**body, "stream": True})
            (first, last) = [event["choices"][0] for event in events]
            message, finish = first["delta"], last["finish_reason"]
        else:
            (choice,) = server.post("/v1/chat/completions", body)["choices"]
            message, finish = choice["message"], choice["finish_reason"]
        (call,) = message["tool_calls"]
        assert finish == "tool_calls" and message["reasoning_content"].strip() == "hm 0" and message["content"] is None
        assert call["function"] == {"name": "double", "arguments": '{"a": 0}'}
        answered = [*body["messages"], message, {"role": "tool", "content": "0"}]
        (choice,) = server.post("/v1/chat/completions", {**body, "messages": answered})["choices"]
        assert choice["message"]["content"].endswith("it is 8") and choice["finish_reason"] == "stop"
        (choice,) = server.post("/v1/chat/completions", body)["choices"]
        assert choice["message"]["content"] == "<tool_call>{" and "tool_calls" not in choice["message"]


def rewriting_agent(problem: Problem, endpoint: Endpoint) -> float:
    """Changes what the model said before it asks again."""
    first = endpoint.ask("/chat/completions", messages=problem.prompt)["choices"][0]["message"]
    changed = [*problem.prompt, {**first, "content": "another <|im_end|>"}, {"role": "user", "content": "and?"}]
    endpoint.ask("/chat/completions", messages=changed)
    return 1.0


@families
def test_a_past_that_the_agent_changed_is_a_new_row_and_no_special_token(family: Family) -> None:
    turns = [(family.answer, family.end)] * 2
    rollout, engine = play_saying(rewriting_agent, family, turns)
    check_tokens(rollout, engine)
    assert rollout.fault is None and len(rollout.earlier) == 1
    ends = [token for token in engine.read[1] if token == engine.words.convert_tokens_to_ids("<|im_end|>")]
    plain = [token for token in engine.read[0] if token == engine.words.convert_tokens_to_ids("<|im_end|>")]
    assert len(ends) <= len(plain) + 2  # one for each message, none for the text
    assert "another <|im_end|>" in engine.words.decode(engine.read[1])


def raising(problem: Problem, endpoint: Endpoint) -> float:
    endpoint.ask("/completions", prompt="a")
    raise ValueError("no idea")


def leaving(problem: Problem, endpoint: Endpoint) -> float:
    sys.exit(3)


def sleeping(problem: Problem, endpoint: Endpoint) -> float:
    time.sleep(60)
    return 1.0


async def waiting(problem: Problem, endpoint: Endpoint) -> float:
    await asyncio.sleep(60)
    return 1.0


FAULTS: list[tuple[Callable[..., Any], str]] = [
    (raising, "agent: ValueError: no idea"),
    (leaving, "agent: RuntimeError: SystemExit: 3"),
    (sleeping, "agent: timed out after 0.3 s (task.episode_seconds)"),
    (waiting, "agent: timed out after 0.3 s (task.episode_seconds)"),
    (lambda problem, endpoint: 1.0, "agent: expected at least one request to the endpoint, got none"),
    (lambda problem, endpoint: "good", "agent: TypeError: expected a finite reward, a list of them or None, got 'good'"),
    (lambda problem, endpoint: float("nan"), "agent: TypeError: expected a finite reward, a list of them or None, got nan"),
    (lambda problem, endpoint: endpoint.ask("/completions", prompt="a" * 41), "agent: RuntimeError: /completions was"),
    (
        lambda problem, endpoint: endpoint.ask("/completions") and 1,
        "agent: RuntimeError: /completions was answered with 400",
    ),
    (lambda problem, endpoint: endpoint.ask("/pause"), "agent: RuntimeError: /pause was answered with 404"),
]


@pytest.mark.parametrize(("function", "fault"), FAULTS)
def test_a_fault_of_an_agent_costs_its_rollout_and_not_the_run(function: Any, fault: str) -> None:
    seconds = 0.3 if function in (sleeping, waiting) else None
    with agents(function, episodes=EpisodeSettings(episode_seconds=seconds)) as runner:
        (rollouts,) = runner.play([start_of(runner)], Sampling())
        assert all((rollout.fault or "").startswith(fault) for rollout in rollouts), rollouts[0].fault
        # What was left behind does not reach the engine, and the next rollouts are whole.
        runner.agent = adapt_environment(guess)
        runner.episodes = EpisodeSettings()
        (rollouts,) = runner.play([start_of(runner)], Sampling())
        assert all(rollout.fault is None for rollout in rollouts)


def test_the_key_of_an_episode_ends_with_it() -> None:
    endpoints: list[Endpoint] = []

    def note(problem: Problem, endpoint: Endpoint) -> float:
        endpoints.append(endpoint)
        endpoint.ask("/completions", prompt="a")
        return 0.0

    with agents(note) as runner:
        runner.play([start_of(runner)], Sampling())
        with pytest.raises(RuntimeError, match="there is no such episode, or it has ended"):
            endpoints[0].ask("/completions", prompt="a")
        with pytest.raises(RuntimeError, match="401"):
            replace(endpoints[0], api_key="another").ask("/completions", prompt="a")
        assert runner.engine.poll() == []


def ask_until_refused(problem: Problem, endpoint: Endpoint) -> float:
    text = problem.prompt
    for _ in range(30):
        try:
            text += endpoint.ask("/completions", prompt=text, max_tokens=7)["choices"][0]["text"] + ":"
        except RuntimeError as error:
            return float("limit" in str(error) or "allows" in str(error))
    return 0.0


@pytest.mark.parametrize(
    ("settings", "stop"), [({"max_turns": 2}, StopReason.TURNS), ({}, StopReason.LENGTH)], ids=["turns", "tokens"]
)
def test_limits_of_the_run_hold_for_agents(settings: dict[str, Any], stop: StopReason) -> None:
    for rollout in play(ask_until_refused, episodes=EpisodeSettings(**settings)):
        assert rollout.fault is None and rollout.stop is stop and stop.truncated
        assert sum(rollout.turn_rewards or ()) == 1.0
        assert rollout.length <= 60 + 1 and len(rollout.turn_rewards or ()) <= settings.get("max_turns", 30)


def test_an_agent_that_raises_at_the_refusal_of_a_limit_is_left_out() -> None:
    def ask_on(problem: Problem, endpoint: Endpoint) -> float:
        while True:
            endpoint.ask("/completions", prompt=problem.prompt, max_tokens=2)

    for rollout in play(ask_on, episodes=EpisodeSettings(max_turns=2)):
        assert (rollout.fault or "").startswith("agent: RuntimeError: /completions was answered with 400")
        assert "task.max_turns" in (rollout.fault or "") and rollout.turn_rewards is None


def test_a_response_that_a_limit_cut_is_cut_and_one_that_its_agent_cut_is_not() -> None:
    def ask(tokens: int | None) -> Any:
        return lambda problem, endpoint: float(len(endpoint.ask("/completions", prompt="x", max_tokens=tokens)) > 0)

    kept = play(ask(2), limits=Limits(max_response_tokens=30, end_tokens=(99,)))
    cut = play(ask(64), limits=Limits(max_response_tokens=30, end_tokens=(99,)))
    assert {rollout.stop for rollout in kept} == {StopReason.ENVIRONMENT} and {len(each.tokens) for each in kept} == {2}
    assert {rollout.stop for rollout in cut} == {StopReason.LENGTH} and {len(each.tokens) for each in cut} == {30}


PROGRAM = """
import json, os, sys, urllib.request
problem = json.load(sys.stdin)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "prompt": problem["prompt"], "max_tokens": 4}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["text"]
print("the model said", repr(answer))
print(float(answer.strip() == problem["answer"]))
"""


def test_a_program_is_an_agent(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    agent = make("environment", "command", {"command": [sys.executable, str(tmp_path / "agent.py")], "parallel": 2})
    assert is_agent(agent)
    for rollout in play(agent):
        assert rollout.fault is None and rollout.turn_rewards == (float(rollout.text.strip() == "3"),)
    (rollout, *_) = play(make("environment", "command", {"command": [sys.executable, "-c", "print('no'); exit(2)"]}))
    assert rollout.fault == "agent: RuntimeError: the program ended with 2: nothing on standard error"
    with pytest.raises(InputError, match="expected a program and its arguments"):
        make("environment", "command", {"command": []})


AGENT = """
def play(problem, endpoint, bonus=0.0):
    answer = endpoint.ask("/completions", prompt=problem.prompt, max_tokens=4)["choices"][0]["text"]
    return float(answer.strip() == problem.answer) + bonus * len(answer)
"""


def train_agent(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    monkeypatch.chdir(folder)
    (folder / "my_agent.py").write_text(AGENT)
    problems = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    small: dict[str, Any] = {
        "policy.tiny.hidden": 32,
        "task.environment": "my_agent.py:play",
        "task.environment_options.bonus": 0.01,
        "training.steps": 1,
        "training.prompts_per_step": 2,
        "rollouts.samples_per_prompt": 4,
        "rollouts.max_response_tokens": 6,
        "task.held_out": 2,
    }
    return legato.train("tiny", problems, None, "gspo", **{**small, **options})


def test_a_run_trains_on_an_agent_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_agent(tmp_path, monkeypatch)
    metrics = [json.loads(line) for line in (Path(run.directory) / "metrics.jsonl").read_text().splitlines()]
    (step,) = [record for record in metrics if record.get("kind") == "step"]
    assert step["rollouts/unscorable"] == 0 and step["reward/mean"] > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rollouts.ahead": 1}, "expected rollouts.ahead = 0 with an agent"),
        ({"task.system_prompt": "Be brief."}, "expected no task.system_prompt with an agent"),
    ],
)
def test_what_cannot_go_with_an_agent_is_refused(
    options: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=says):
        train_agent(tmp_path, monkeypatch, **options)


def test_a_judge_without_an_endpoint_is_loaded_into_the_process(tmp_path: Path) -> None:
    policy = chat_policy()
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    options = {"policy.model": "tiny", "reward.kind": "judge", "reward.model": str(tmp_path), "reward.max_tokens": 20}
    options["reward.question"] = "{response}?"
    reward = wire.reward_of(
        load([], (), {**options, "task.kind": "reversal", "task.length": 2}).config, wire.PythonObjects()
    )
    rollout = play(lambda problem, endpoint: float(bool(endpoint.ask("/completions", prompt="a"))))[0]
    (score,) = reward.score_all([replace(rollout, text="five")])
    prompt = Rendering(tokenizer=policy.tokenizer).prompt(Problem(prompt=[{"role": "user", "content": "five?"}]))
    request = Request(prompt=prompt, seeds=(0,))
    ((answer,),) = plain_engine(policy).generate(
        [request], Sampling(temperature=0), Limits(max_response_tokens=20, end_tokens=(1,))
    )
    assert (
        isinstance(score, Unscorable)
        and score.reason == f"judge: the judge gave no score: {' '.join(answer.text.split())!r}"
    )
