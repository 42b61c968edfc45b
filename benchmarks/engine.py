"""Our `LocalEngine` beside `model.generate` on the same work on a CPU: tokens per second. Part of `make bench`.

    python -m benchmarks.engine            # the tiny model and SmolLM2, 32 prompts x 8 responses of 24 tokens
    python -m benchmarks.engine --quick    # 4 prompts, one call each; nothing is stored

Both sample from the very same module, in turn. Before timing, their greedy tokens are compared, and the engine's log-probs
with a plain forward over the finished text.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from benchmarks import step_work as work
from benchmarks.step_page import engine_section
from torch import Tensor

from legato.core.rollout import Problem
from legato.policy.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.local import LocalEngine
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling

RESULTS = Path(__file__).parent / "results" / "engine.json"
PROMPTS, SAMPLES, TOKENS = 32, 8, 24
MODELS = {"tiny": "tiny, one character a token", "smollm2": "SmolLM2-135M"}
REPEATS = {"tiny": 15, "smollm2": 3}


def by_engine(engine: LocalEngine, prompts: Sequence[Tensor], *, samples: int, temperature: float, seed: int) -> Any:
    requests = [
        Request(prompt=prompt, seeds=tuple(seed + number * samples + k for k in range(samples)))
        for number, prompt in enumerate(prompts)
    ]
    # An end token that no model writes: every response has its full length.
    limits = Limits(max_response_tokens=TOKENS, end_tokens=(engine.policy.vocabulary,))
    return engine.generate(requests, Sampling(temperature=temperature), limits)


def by_generate(policy: Policy, prompts: Tensor, *, samples: int, temperature: float) -> Tensor:
    """[rows, T]"""
    sampled: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        found: Tensor = policy.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=TOKENS,
            num_return_sequences=samples,
            eos_token_id=policy.vocabulary,
            pad_token_id=0,
            **(sampled if temperature else {"do_sample": False}),
        )
    return found[:, prompts.shape[1] :]


def check(policy: Policy, prompts: Tensor) -> float:
    """The share of greedy tokens that are equal; the engine's log-probs are held to a plain forward."""
    engine = LocalEngine(policy)
    rows = by_engine(engine, list(prompts), samples=1, temperature=0.0, seed=0)
    tokens = torch.stack([responses[0].tokens for responses in rows])
    equal = (tokens == by_generate(policy, prompts, samples=1, temperature=0.0)).all(1).double().mean().item()
    # A tie in float32 may fall either way and everything after it is another text.
    assert equal >= 0.9, f"greedy responses of engine and generate differ in {100 * (1 - equal):.0f} % of the rows"
    drawn = by_engine(engine, list(prompts[:4]), samples=2, temperature=1.0, seed=0)
    for prompt, responses in zip(prompts, drawn, strict=False):
        for response in responses:
            assert len(response.tokens) == TOKENS
            with torch.no_grad():
                logits = policy.model(input_ids=torch.cat([prompt, response.tokens])[None]).logits[0, len(prompt) - 1 : -1]
            plain = logits.log_softmax(-1).gather(1, response.tokens[:, None])[:, 0]
            gap = float((plain - response.logprobs).abs().max())
            assert gap <= 1e-4, f"the engine's log-probs differ from a plain forward by {gap:.1e}"
    return equal


def measure(calls: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, interleaved, after one of each to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(1 + repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call(repeat)
            if repeat:
                taken[name].append(time.perf_counter() - started)
    return taken


def row(name: str, *, quick: bool) -> dict[str, Any]:
    """One model: checked, then both ways in turn."""
    policy = load_policy(name, Loading(device="cpu"))
    count, repeats = (4, 1) if quick else (PROMPTS, REPEATS[name])
    rendering = Rendering(tokenizer=policy.tokenizer)
    # All of one length, so that neither side has padding to carry.
    prompts = torch.stack([rendering.prompt(Problem(prompt=text)) for text in work.questions(count)])
    equal = check(policy, prompts)
    engine = LocalEngine(policy)
    taken = measure(
        {
            "generate": lambda _: by_generate(policy, prompts, samples=SAMPLES, temperature=1.0),
            "engine": lambda turn: by_engine(engine, list(prompts), samples=SAMPLES, temperature=1.0, seed=turn * 10**6),
        },
        repeats,
    )
    tokens = count * SAMPLES * TOKENS
    sides = {
        side: {"seconds": seconds, "tokens_per_second": tokens / statistics.median(seconds)}
        for side, seconds in taken.items()
    }
    print(", ".join(f"{side} {found['tokens_per_second']:.0f} tokens/s" for side, found in sides.items()), f"({name})")
    return {"model": MODELS[name], "prompts": count, "prompt_tokens": prompts.shape[1], "greedy_equal": equal, **sides}


def run(models: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """All measurements."""
    torch.set_num_threads(work.THREADS)
    load = os.getloadavg()
    rows, skipped = [], {}
    for name in models:
        try:
            rows.append(row(name, quick=quick))
        except (ValueError, ImportError) as error:
            if name != "smollm2":
                raise
            skipped[MODELS[name]] = str(error)
            print(f"{name}: left out: {error}")
    return {
        "prompts": rows[0]["prompts"],
        "samples": SAMPLES,
        "tokens": TOKENS,
        "dtype": "float32",
        "threads": work.THREADS,
        "machine": f"{platform.machine()}, {platform.system()}, CPU",
        "load": {"before": load[0], "after": os.getloadavg()[0]},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "rows": rows,
        "skipped": skipped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 prompts and one call a side, nothing stored")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--output", type=Path, help="where to store the JSON; with --quick nowhere unless given")
    asked = parser.parse_args()
    found = run(asked.models, quick=asked.quick)
    print(engine_section(found))
    output = asked.output or (None if asked.quick else RESULTS)
    if output is not None:
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {output}")


if __name__ == "__main__":
    main()
