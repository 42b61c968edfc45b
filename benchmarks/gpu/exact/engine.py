"""The exact engine against the trainer, to the bit, and its cost: python -m benchmarks.gpu.exact.engine --output FILE

    bits     log-probs of sampled tokens against the trainer's for the same tokens: in packs of 16k tokens, each response
             alone, with a gradient, prompts once per response; few and many rows, ragged lengths, refilled slots
    least    rows to which each product is padded
    times    decoding with `exact` off and on, and off without joined projections, in turn: fixed lengths, and the ragged
             ones of `lengths.json`

One process per shape, so that one that fails ends alone. Results are written after every shape. If a token is unequal, the
walk (`legato/rollouts/gpu/walk.py`) says in which operation.

    --cases     only these cases, and no times unless --times is given as well; `--cases none`: no bits
    --merge     store what earlier commands measured: files of this one, of `run_at_zero`, and of B8 (`benchmarks.gpu`)
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import work
from benchmarks.gpu.decode import limit_responses, ragged_lengths
from benchmarks.gpu.measure import Bench
from legato.core.texts import Texts
from legato.policy.layers.products import least_rows
from legato.policy.model.load import Loading, load_policy
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request, Response
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.gpu.walk import first_difference
from legato.rollouts.prompts import prompt_texts
from legato.rollouts.sampling import Sampling

RESULTS = Path(__file__).parents[2] / "results" / "exact-engine.json"
CONFIGS: dict[str, dict[str, Any]] = {
    "0.6B": {"model_type": "qwen3", **work.SHAPES["0.6B"], **work.HEADS, "tie_word_embeddings": True},
    "1.7B": {"model_type": "qwen3", **work.SHAPES["1.7B"], **work.HEADS, "tie_word_embeddings": True},
    "Llama-1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Mistral-7B, 4 layers": {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768,
        "sliding_window": None, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Responses to sample: so many prompts with so many responses each."""

    prompts: int
    samples: int
    prompt: int
    tokens: int
    rows_at_once: int = 512
    temperature: float = 1.0
    ragged: bool = False
    """Lengths from 1 to `tokens`, and prompts of different lengths; slots are refilled if `rows_at_once` is small."""


CASES: dict[str, Case] = {
    "one row": Case(prompts=1, samples=1, prompt=37, tokens=300),
    "3 rows": Case(prompts=3, samples=1, prompt=100, tokens=130, temperature=0.7),
    "64 rows": Case(prompts=8, samples=8, prompt=64, tokens=256),
    "256 rows": Case(prompts=32, samples=8, prompt=256, tokens=128),
    "512 rows": Case(prompts=64, samples=8, prompt=50, tokens=128),
    "ragged, refilled": Case(prompts=24, samples=8, prompt=200, tokens=300, rows_at_once=96, ragged=True),
}
LONG = Case(prompts=8, samples=8, prompt=64, tokens=4096)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def make_policy(shape: str, device: str = "cuda") -> Policy:
    """A model with random weights on the device. The last norm is scaled up, so that texts differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {name: value for name, value in CONFIGS[shape].items() if name != "model_type"}
    special = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "max_position_embeddings": 8192}
    config = AutoConfig.for_model(CONFIGS[shape]["model_type"], **values, **special)
    torch.manual_seed(0)
    automatic: Any = AutoModelForCausalLM
    with torch.device(device):
        model = automatic.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(4.0)
        for name, bias in model.named_parameters():
            if name.endswith("bias"):
                bias.normal_(0, 0.1)
    return load_policy(model.eval(), Loading(device=device, dtype="bfloat16"), tokenizer=work.tokenizer())


def make_requests(case: Case, vocabulary: int) -> tuple[list[Request], list[int]]:
    """Requests, and the length of the response with each seed."""
    source = random.Random(f"{case}")
    requests, lengths = [], []
    for number in range(case.prompts):
        size = source.randint(1, case.prompt) if case.ragged else case.prompt
        prompt = torch.tensor([source.randrange(3, vocabulary) for _ in range(size)])
        requests.append(Request(prompt=prompt, seeds=tuple(range(number * case.samples, (number + 1) * case.samples))))
        lengths += [source.randint(1, case.tokens) if case.ragged else case.tokens for _ in range(case.samples)]
    return requests, lengths


def make_texts(requests: Sequence[Request], responses: Sequence[Sequence[Response]], temperature: float) -> Texts:
    rows = [response.tokens for group in responses for response in group]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    group = torch.repeat_interleave(torch.tensor([len(each) for each in responses]))
    texts = prompt_texts([request.prompt for request in requests])
    return Texts(
        prompts=texts.prompts,
        prompt_lengths=texts.prompt_lengths,
        tokens=tokens,
        lengths=lengths,
        mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        group=group,
        temperature=torch.full((len(rows),), temperature),
    )


def packs_of(texts: Texts, most: int) -> list[Tensor]:
    """Rows in packs of about `most` tokens."""
    packs, tokens = [list[int]()], 0
    for row, length in enumerate((texts.lengths + texts.prompt_lengths[texts.group]).tolist()):
        if packs[-1] and tokens + length > most:
            packs.append([])
            tokens = 0
        packs[-1].append(row)
        tokens += length
    return [torch.tensor(pack) for pack in packs]


def score(policy: Policy, texts: Texts, packs: Sequence[Tensor], *, gradient: bool = False) -> Tensor:
    table = torch.zeros(texts.tokens.shape)
    for rows in packs:
        if gradient:
            with policy.accumulate_gradient(texts, rows) as forward:
                for piece in forward.pieces():
                    table[piece.rows, : piece.channels.logprobs.shape[1]] = piece.channels.logprobs.cpu()
        else:
            logprobs = policy.score(texts, rows).logprobs.cpu()
            table[rows, : logprobs.shape[1]] = logprobs
    return table


def generate(policy: Policy, case: Case, *, graphs: bool = True) -> tuple[list[Request], list[list[Response]]]:
    requests, lengths = make_requests(case, policy.vocabulary)
    engine = GraphedEngine(policy, case.rows_at_once, graphs=graphs)
    limits = Limits(max_response_tokens=case.tokens, end_tokens=(policy.vocabulary,))
    with limit_responses(lengths, policy.device) if case.ragged else nullcontext():
        responses = engine.generate(requests, Sampling(temperature=case.temperature), limits)
    engine.forget()
    return requests, responses


def compare(policy: Policy, case: Case) -> dict[str, Any]:
    """How many tokens differ between engine and trainer, for every way of scoring."""
    requests, responses = generate(policy, case)
    texts = make_texts(requests, responses, case.temperature)
    sampled = torch.zeros(texts.tokens.shape)
    for row, response in enumerate(response for group in responses for response in group):
        sampled[row, : len(response.logprobs)] = response.logprobs
    whole, few = packs_of(texts, 16384), torch.randperm(len(texts.tokens), generator=torch.Generator().manual_seed(1))[:8]
    tables = {"packs": (score(policy, texts, whole), torch.arange(len(sampled)))}
    tables["each alone"] = (score(policy, texts, [row.reshape(1) for row in few]), few)
    tables["with a gradient"] = (score(policy, texts, whole[:2], gradient=True), torch.cat(whole[:2]))
    policy.shared_prompts = False
    tables["prompts once per response"] = (
        score(policy, texts, packs_of(texts, 8192)[:2]),
        torch.cat(packs_of(texts, 8192)[:2]),
    )
    policy.shared_prompts = True
    unequal = {name: int((table[rows] != sampled[rows])[texts.mask[rows]].sum()) for name, (table, rows) in tables.items()}
    gap = torch.where(texts.mask, tables["packs"][0].double() - sampled.double(), 0.0)
    result: dict[str, Any] = {"tokens": int(texts.mask.sum()), "unequal": unequal, "largest": float(gap.abs().max())}
    if case.tokens >= max(LENGTHS):
        result["ratios"] = {str(length): ratio_of(gap[:, :length]) for length in LENGTHS}
    if any(unequal.values()):
        row = int((gap != 0).any(1).int().argmax())
        prompt, tokens = requests[int(texts.group[row])].prompt, texts.tokens[row, : int(texts.lengths[row])][:64]
        found = first_difference(policy, prompt, tokens, rows=min(case.prompts * case.samples, 256))
        result["first difference"] = "none found by the walk" if found is None else str(found)
    return result


def ratio_of(gap: Tensor) -> dict[str, float]:
    """max |s - 1| over the responses, and the share that GSPO's band clips."""
    ratio = gap.mean(1).exp()
    outside = (ratio > 1 + work.CLIP_HIGH) | (ratio < 1 - work.CLIP_LOW)
    return {"max": float((ratio - 1).abs().max()), "outside": float(outside.double().mean())}


SIDES: dict[str, dict[str, bool]] = {
    "separate": {"exact": False, "joined": False},
    "off": {"exact": False, "joined": True},
    "on": {"exact": True, "joined": True},
}
"""What is timed in turn: `exact` off without joined projections (`policy/layers/joined.py`), off, and on."""


def measure_times(policy: Policy, bench: Bench, cases: dict[str, Case], *, graphs: bool = True) -> dict[str, Any]:
    """Tokens per second of decoding on each of `SIDES`, in turn; the best of two repeats (ragged: of one)."""
    times: dict[str, Any] = {}
    before = policy.exact
    for name, case in cases.items():
        lengths = ragged_lengths(bench) if case.ragged else [case.tokens] * (case.prompts * case.samples)
        limits = Limits(max_response_tokens=max(lengths), end_tokens=(policy.vocabulary,))
        requests, _ = make_requests(replace(case, ragged=False), policy.vocabulary)
        engines = {
            side: GraphedEngine(policy, case.rows_at_once, graphs=graphs, joined=settings["joined"])
            for side, settings in SIDES.items()
        }
        samples: dict[str, list[float]] = {side: [] for side in SIDES}
        with limit_responses(lengths, policy.device) if case.ragged else nullcontext():
            for repeat in range(2 if case.ragged else 3):
                for side, engine in engines.items():
                    policy.exact = SIDES[side]["exact"]
                    engine.prefixes.clear()
                    seconds = bench.wall_seconds(lambda: engine.generate(requests, Sampling(), limits))  # noqa: B023
                    if repeat:
                        samples[side].append(seconds)
        policy.exact = before
        for engine in engines.values():
            engine.forget()
        best = {side: min(each) for side, each in samples.items()}
        rates = {side: sum(lengths) / seconds for side, seconds in best.items()}
        times[name] = {**rates, "slower": best["on"] / best["off"], "samples": samples}
        print(name, times[name], file=sys.stderr, flush=True)
    return times


TIMED: dict[str, Case] = {
    **{str(rows): Case(prompts=rows // 8, samples=8, prompt=256, tokens=256, rows_at_once=rows) for rows in (8, 64, 256)},
    "256, ragged": Case(prompts=32, samples=8, prompt=256, tokens=1024, rows_at_once=256, ragged=True),
}
"""What is timed. The ragged lengths are those of B7 (mean 405, at most 1,024)."""


def measure(
    shape: str, cases: Sequence[str], times: Sequence[str], save: Callable[[dict[str, Any]], Any] = lambda result: None
) -> dict[str, Any]:
    """Rows that products need, unequal bits of these cases, and times of those of `TIMED` that are named.

    `save` is called after each of them, so that a command that runs out of time loses only the last.
    """
    policy = make_policy(shape)
    policy.exact = True
    bench = Bench(device=torch.device("cuda"), tiny=False, deadline=time.monotonic() + 600)
    layer = policy.body.get_decoder().layers[0]
    modules = {**dict(layer.self_attn.named_children()), **dict(layer.mlp.named_children())}
    started = time.monotonic()
    least = {
        name: least_rows(module.weight, module.bias is not None)
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear)
    }
    result: dict[str, Any] = {"least rows": least, "seconds to measure them": time.monotonic() - started, "bits": {}}
    for name in cases:
        started = time.monotonic()
        result["bits"][name] = compare(policy, {**CASES, "4096 tokens": LONG}[name])
        save(result)
        print(f"{shape} {name} ({time.monotonic() - started:.1f} s)", result["bits"][name], file=sys.stderr, flush=True)
    for name in times:
        result.setdefault("times", {}).update(measure_times(policy, bench, {name: TIMED[name]}))
        save(result)
    return result


def merge_results(document: dict[str, Any], measured: dict[str, Any]) -> None:
    """Store the results of one command in the document: a case, a time or a part replaces the one of the same name."""
    for shape, result in measured.get("shapes", {}).items():
        if "error" in result:
            raise SystemExit(f"{shape} failed: {result['error']}")
        stored = document["shapes"].setdefault(shape, {"bits": {}})
        stored["bits"] |= {name: case | {"date": measured["date"]} for name, case in result["bits"].items()}
        stored["least rows"] = result["least rows"]
        if "times" in result:
            stored["times"] = stored.get("times", {}) | result["times"]
    if "runs" in measured:
        document["runs"] = {"date": measured["date"], **measured["runs"]}
    if "sections" in measured:
        parts = measured["sections"]["B8"]["parts"]
        document["step"] = {"off": parts["Legato"], "on": parts["Legato exact"]}
    document["date"] = time.strftime("%Y-%m-%d", time.gmtime())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--shapes", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--seconds", type=float, default=300.0, help="no shape starts after this many seconds")
    parser.add_argument("--cases", nargs="+", choices=(*CASES, "4096 tokens", "none"), help="default: all (4096: 0.6B only)")
    parser.add_argument("--times", nargs="*", choices=TIMED, help="default: all without --cases, else none")
    parser.add_argument("--merge", nargs="+", type=Path, help="files to store in --output; nothing is measured")
    parser.add_argument("--commit", default="", help="stored with the results; the GPU's machine has no history")
    parser.add_argument("--child", choices=CONFIGS, help="measure this shape in this process")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.merge:
        document = json.loads(options.output.read_text())
        for path in options.merge:
            merge_results(document, json.loads(path.read_text()))
        options.output.write_text(json.dumps(document, indent=1) + "\n")
        return
    if options.child:
        every = (*CASES, "4096 tokens") if options.child == "0.6B" else tuple(CASES)
        cases = [name for name in options.cases or every if name != "none"]
        times = options.times if options.times is not None else [] if options.cases else list(TIMED)
        result = measure(options.child, cases, times, lambda result: options.output.write_text(json.dumps(result)))
        options.output.write_text(json.dumps(result))
        return
    deadline = time.monotonic() + options.seconds
    document = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": options.commit, "shapes": {}}
    document["machine"] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for shape in options.shapes:
        if time.monotonic() > deadline:
            document["shapes"][shape] = {"error": "no time left"}
            continue
        part = options.output.with_suffix(".part")
        command = [sys.executable, "-m", "benchmarks.gpu.exact.engine", "--child", shape, "--output", str(part)]
        command += [] if options.cases is None else ["--cases", *options.cases]
        command += [] if options.times is None else ["--times", *options.times]
        ended = subprocess.run(command, check=False)
        result = {"error": f"exit code {ended.returncode}"} if ended.returncode else json.loads(part.read_text())
        document["shapes"][shape] = result
        options.output.write_text(json.dumps(document, indent=1) + "\n")
        part.unlink(missing_ok=True)
    for shape, result in document["shapes"].items():
        print(shape, json.dumps({name: result.get(name) for name in ("error", "least rows", "times")}))


if __name__ == "__main__":
    main()
