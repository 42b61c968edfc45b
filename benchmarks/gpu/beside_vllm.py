"""B12: decoding beside vLLM, the same requests on both sides, with the log-prob of every sampled token and without.

    fixed    32 prompts of 256 tokens x 8 responses of 512
    ragged   the same with the prompt and response lengths of `lengths.json`
    nano     the benchmark of nano-vLLM: 256 different prompts of 100 to 1,024 tokens, responses of 100 to 1,024,
             temperature 0.6

vLLM runs in a process of its own. Its packages are found in the folder that LEGATO_VLLM_PACKAGES names (they may be of other
versions than Legato's), or beside this Python. Every repeat has new prompts, so that no side answers from a cache.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import work as work
from benchmarks.gpu.decode import limit_responses, make_engine
from benchmarks.gpu.measure import Bench, Part
from legato.rollouts.engine import Limits, Request
from legato.rollouts.sampling import Sampling

PACKAGES = "LEGATO_VLLM_PACKAGES"
REPEATS = 2
NANO_SEQUENCES, NANO_SHORTEST, NANO_LONGEST, NANO_VOCABULARY, NANO_TEMPERATURE = 256, 100, 1024, 10_000, 0.6
SIDE = Path(__file__).with_name("vllm_side.py")
SECONDS = 400.0
"""How long vLLM may take for all works of a shape, its start of about 70 s included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt and the responses asked for: `samples` of `tokens` each."""

    prompt: list[int]
    samples: int
    tokens: int
    temperature: float


def make_requests(kind: str, repeat: int, bench: Bench, vocabulary: int) -> list[Asked]:
    """The requests of one repeat. `nano` at repeat 1 has the very tokens of nano-vLLM's script."""
    if kind == "nano":
        source = random.Random(repeat - 1)
        count, shortest, longest = (6, 2, 9) if bench.tiny else (NANO_SEQUENCES, NANO_SHORTEST, NANO_LONGEST)
        most = min(NANO_VOCABULARY, vocabulary - 1)
        prompts = [[source.randint(0, most) for _ in range(source.randint(shortest, longest))] for _ in range(count)]
        lengths = [source.randint(shortest, longest) for _ in range(count)]
        return [
            Asked(prompt=prompt, samples=1, tokens=length, temperature=NANO_TEMPERATURE)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
    source = random.Random(f"{kind} {repeat}")

    def text(length: int) -> list[int]:
        return [source.randrange(3, vocabulary) for _ in range(length)]

    if kind == "fixed":
        count, samples, prompt, new = (2, 3, 6, 5) if bench.tiny else (work.PROMPTS, work.SAMPLES, 256, 512)
        return [Asked(prompt=text(prompt), samples=samples, tokens=new, temperature=1.0) for _ in range(count)]
    stored = work.stored_lengths(bench.tiny)
    return [
        Asked(prompt=prompt, samples=1, tokens=tokens, temperature=1.0)
        for prompt, row in zip(map(text, stored["prompts"]), stored["responses"], strict=True)
        for tokens in row
    ]


KINDS = {"0.6B": ("fixed", "ragged", "nano"), "1.7B": ("fixed", "ragged")}


def our_requests(asked: Sequence[Asked]) -> tuple[list[Request], list[int]]:
    """Our requests, one for neighbours with the same prompt, and the length of each response by its seed."""
    requests: list[Request] = []
    lengths: list[int] = []
    for each in asked:
        seeds = tuple(range(len(lengths), len(lengths) + each.samples))
        lengths += [each.tokens] * each.samples
        prompt = torch.tensor(each.prompt)
        if requests and torch.equal(requests[-1].prompt, prompt):
            requests[-1] = Request(prompt=prompt, seeds=requests[-1].seeds + seeds)
        else:
            requests.append(Request(prompt=prompt, seeds=seeds))
    return requests, lengths


def our_part(shape: str, kind: str) -> Part:
    def part(bench: Bench) -> dict[str, Any]:
        policy = work.make_policy(bench, shape)
        engine = make_engine(bench, policy, fused=True)
        times, tokens = [], 0
        for repeat in range(1 + (1 if bench.tiny else REPEATS)):
            asked = make_requests(kind, repeat, bench, policy.vocabulary)
            requests, lengths = our_requests(asked)
            uneven = len(set(lengths)) > 1
            if uneven and not bench.cuda:
                raise RuntimeError("responses of different lengths need the engine with slots, which needs a GPU")
            # No model writes this end token, so every response has its full length.
            limits = Limits(max_response_tokens=max(lengths), end_tokens=(policy.vocabulary,))
            sampling = Sampling(temperature=asked[0].temperature)
            with limit_responses(lengths, bench.device) if uneven else nullcontext():
                responses: list[Any] = []
                call = lambda: responses.extend(engine.generate(requests, sampling, limits))  # noqa: B023, E731
                times.append(bench.wall_seconds(call))
            counted = [len(response.tokens) for group in responses for response in group]
            if counted != lengths:
                raise RuntimeError(f"expected {sum(lengths)} tokens, got {sum(counted)}")
            tokens = sum(lengths)
        return {"side": "Legato", "shape": shape, "kind": kind, **rates(tokens, times)}

    return part


def rates(tokens: int, times: Sequence[float]) -> dict[str, Any]:
    """The first call, which compiles and captures, is kept apart; the rate is that of the best repeat."""
    best = min(times[1:])
    return {
        "tokens": tokens,
        "first_seconds": times[0],
        "samples": list(times[1:]),
        "seconds": best,
        "tokens_per_second": tokens / best,
    }


def vllm_part(shape: str) -> Part:
    def part(bench: Bench) -> dict[str, Any]:
        sizes = {**work.SHAPES[shape], **work.HEADS}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            works = {
                kind: [
                    [asdict(each) for each in make_requests(kind, repeat, bench, sizes["vocab_size"])]
                    for repeat in range(1 + REPEATS)
                ]
                for kind in KINDS[shape]
            }
            document = {"sizes": sizes, "folder": str(folder / "model"), "works": works}
            (folder / "work.json").write_text(json.dumps(document))
            result = run_side(folder)
        measured = {
            name: rates(each["tokens"], [each["first_seconds"], *each["samples"]]) for name, each in result["works"].items()
        }
        return {"side": f"vLLM {result['version']}", "shape": shape, **result, "works": measured}

    return part


def run_side(folder: Path) -> dict[str, Any]:
    """Run vLLM's side on folder/work.json; works that were measured before an error or the deadline are kept."""
    path, log = folder / "result.json", ""
    packages = os.environ.get(PACKAGES)
    environment = {**os.environ, **({"PYTHONPATH": packages} if packages else {})}
    try:
        ended = subprocess.run(
            [sys.executable, str(SIDE), str(folder / "work.json"), str(path)],
            check=False,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment,
        )
        log = ended.stderr
    except subprocess.TimeoutExpired:
        log = f"vLLM took longer than {SECONDS:.0f} s"
    if not path.is_file():
        raise RuntimeError(f"vLLM measured nothing: {log[-1500:]}")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


B12: dict[str, Part] = {}
for _shape, _kinds in KINDS.items():
    for _kind in _kinds:
        B12[f"{_shape} {_kind} Legato"] = our_part(_shape, _kind)
    B12[f"{_shape} vLLM"] = vllm_part(_shape)
