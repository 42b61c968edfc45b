"""The cost of router taps and Routing Replay on the tiny mixture of experts and, on a GPU, on one of 1.3 billion weights.

    python -m benchmarks.routing                  # part of `make bench`
    python -m benchmarks.routing --device cuda    # on a GPU; stored in its own file
    python -m benchmarks.routing --quick          # a few rounds; nothing is stored

Measured are one update (forward, coefficients, backward, metrics) without router taps, with taps, and with taps and R2; and
one engine call without and with its record of experts. The sides take turns in one process; ratios are taken within a round.
On a CPU, times are CPU time of one thread, so that other work on the machine matters little.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import legato
from legato.core.batch import Batch
from legato.core.texts import Texts
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import TinyShape, character_tokenizer
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.select import local_engine
from legato.rollouts.sampling import Sampling
from legato.training.anchor import anchor
from legato.training.plan import Update, plan
from legato.training.tables import Tables
from legato.training.update import count_update, update_gradient

RESULTS = {
    device: Path(__file__).parent / "results" / f"routing{end}.json" for device, end in (("cpu", ""), ("cuda", "-gpu"))
}
TARGETS = {"taps": 0.03, "taps and R2": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The size of one update; all responses have one length."""

    prompts: int
    samples: int
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """A mixture of experts and the workloads it is measured on."""

    name: str
    model: Callable[[], Any]
    """Builds the model argument of `load_policy`."""
    works: tuple[Work, ...]


def large_model() -> Any:
    """A Qwen3-MoE of 24 layers of 32 experts, 4 active, with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    shape: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 64}
    shape |= {"num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    config = Qwen3MoeConfig(vocab_size=len(character_tokenizer()), norm_topk_prob=True, tie_word_embeddings=True, **shape)
    automatic: Any = AutoModelForCausalLM
    with torch.device("cuda"):
        return automatic.from_config(config, dtype=torch.bfloat16)


TINY = Bed(
    name="tiny Qwen3-MoE (2 layers, 8 experts, 2 active)",
    model=lambda: "tiny-moe",
    works=(
        Work(prompts=8, samples=8, prompt_tokens=6, tokens=6),
        Work(prompts=8, samples=8, prompt_tokens=16, tokens=128),
    ),
)
LARGE = Bed(
    name="Qwen3-MoE of 1.3 billion weights (24 layers, 32 experts, 4 active)",
    model=large_model,
    works=(Work(prompts=8, samples=8, prompt_tokens=256, tokens=512),),
)
BEDS = {"cpu": (TINY,), "cuda": (TINY, LARGE)}


def random_batch(work: Work, vocabulary: int) -> Batch:
    """A batch of random texts with random rewards."""
    source = torch.Generator().manual_seed(0)
    rows = work.prompts * work.samples
    rewards = torch.rand(rows, generator=source, dtype=torch.float64)
    return Batch(
        texts=Texts(
            prompts=torch.randint(2, vocabulary, (work.prompts, work.prompt_tokens), generator=source),
            prompt_lengths=torch.full((work.prompts,), work.prompt_tokens),
            tokens=torch.randint(2, vocabulary, (rows, work.tokens), generator=source),
            lengths=torch.full((rows,), work.tokens),
            mask=torch.ones(rows, work.tokens, dtype=torch.bool),
            group=torch.arange(work.prompts).repeat_interleave(work.samples),
            temperature=torch.ones(rows),
        ),
        turn=torch.zeros(rows, work.tokens, dtype=torch.int64),
        version=torch.zeros(rows, work.tokens, dtype=torch.int64),
        sampler_logprobs=torch.full((rows, work.tokens), -4.0),
        kept_logmass=None,
        rewards=rewards,
        accuracy=rewards,
        components={},
        truncated=torch.zeros(rows, dtype=torch.bool),
        rollout_id=torch.arange(rows),
    )


def update_sides(policy: Policy, work: Work) -> tuple[dict[str, Callable[[], None]], Tables]:
    """A call of one update for each side, and the tables of the R2 side. The policy is moved a little first."""
    algorithm, batch = legato.algorithm("grpo"), random_batch(work, policy.vocabulary)
    (update,) = plan(batch.texts, updates=1, epochs=1, tokens_per_pack=16384, seed=0, packing=True)
    tables = {}
    for replay in ("off", "R2"):
        fresh = Tables.from_batch(batch, policy.device).with_routes(policy.routers, replay)
        anchor_tables = anchor(fresh, policy, None, [update], choice="recompute", skip_first=False, replay=replay)
        tables[replay] = anchor_tables.with_advantages(algorithm)
    with torch.no_grad():
        source = torch.Generator(policy.device).manual_seed(1)
        for parameter in policy.parameters().values():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=source, device=policy.device))
    sides = {
        "neither": _update(policy, algorithm, replace(tables["off"], routers=None), update),
        "taps": _update(policy, algorithm, tables["off"], update),
        "taps and R2": _update(policy, algorithm, tables["R2"], update),
    }
    return sides, tables["R2"]


def _update(policy: Policy, algorithm: Any, tables: Tables, update: Update) -> Callable[[], None]:
    def run() -> None:
        for parameter in policy.parameters().values():
            parameter.grad = None
        counts = count_update(algorithm, tables, update)
        update_gradient(policy, algorithm, tables, update, counts, {}, passes=1, silent=None)

    return run


def engine_sides(policy: Policy, work: Work) -> dict[str, Callable[[], None]]:
    prompts = random_batch(work, policy.vocabulary).texts.prompts
    requests = [
        Request(prompt=prompt, seeds=tuple(range(number * work.samples, (number + 1) * work.samples)))
        for number, prompt in enumerate(prompts)
    ]
    limits = Limits(max_response_tokens=work.tokens, end_tokens=(policy.vocabulary,))

    def side(record: bool) -> Callable[[], None]:
        engine = local_engine(policy, work.prompts * work.samples, record_routes=record)
        return lambda: engine.generate(requests, Sampling(), limits) and None

    return {"without": side(False), "recording": side(True)}


def time_call(run: Callable[[], None], device: str) -> float:
    """Seconds of one call: CPU seconds on a CPU; on a GPU, wall seconds until the device is done."""
    if device == "cpu":
        started = time.process_time()
        run()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def time_sides(sides: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each side in each round. The sides take turns, and the order rotates from round to round."""
    for run in sides.values():
        run()
        run()
    names, times = list(sides), {name: list[float]() for name in sides}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(time_call(sides[name], device))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Median milliseconds of each side, and its extra time relative to the first side in the same round.

    `more` is the median over all rounds; `more_by_parts` the smallest and largest median over five consecutive parts. Ratios
    are taken within a round, because neighbours in time share the other load of the machine.
    """
    base = times[next(iter(times))]
    rows: dict[str, Any] = {}
    for name, seconds_taken in times.items():
        more = [mine / other - 1 for mine, other in zip(seconds_taken, base, strict=True)]
        fifth = max(1, len(more) // 5)
        parts = [statistics.median(more[i : i + fifth]) for i in range(0, fifth * 5, fifth)]
        rows[name] = {
            "milliseconds": 1000 * statistics.median(seconds_taken),
            "more": statistics.median(more),
            "more_by_parts": [min(parts), max(parts)],
        }
    return rows


def bytes_per_token(policy: Policy, tables: Tables, work: Work) -> dict[str, float]:
    """Bytes per token that the tables of a step hold for routing."""
    assert tables.replay is not None and tables.old_experts is not None and tables.old_router_logprobs is not None
    assert policy.routers is not None
    layers, active = policy.routers.shape
    responses = work.prompts * work.samples * work.tokens
    return {
        "layers": layers,
        "active": active,
        "replay": tables.replay.experts.nbytes / len(tables.replay.tokens),
        "measured_experts": tables.old_experts.nbytes / responses,
        "measured_logprobs": tables.old_router_logprobs.nbytes / responses,
    }


def measure(rounds: int, device: str) -> dict[str, Any]:
    rows = []
    for bed, work in [(one, work) for one in BEDS[device] for work in one.works]:
        loading = Loading(device=device, tiny=TinyShape(experts=8, experts_per_token=2))
        policy = load_policy(bed.model(), loading, tokenizer=character_tokenizer())
        sides, tables = update_sides(policy, work)
        count = rounds if work.tokens > 32 else 3 * rounds
        rows.append(
            {
                "bed": bed.name,
                "work": {name: getattr(work, name) for name in ("prompts", "samples", "prompt_tokens", "tokens")},
                "update": summary(time_sides(sides, count, device)),
                "engine": summary(time_sides(engine_sides(policy, work), count if device == "cpu" else 5, device)),
                "memory": bytes_per_token(policy, tables, work),
            }
        )
        del policy, sides, tables
    machine = f"{platform.machine()}, one thread" if device == "cpu" else torch.cuda.get_device_name()
    return {"machine": f"{machine}, torch {torch.__version__}", "device": device, "rounds": rounds, "rows": rows}


def routing_section(results: dict[str, Any]) -> str:
    """The section of `docs/performance.md`."""
    on_gpu = results.get("device") == "cuda"
    option, clock = (" --device cuda", "wall time") if on_gpu else ("", "CPU time of one thread")
    lines = [
        f"## Router taps and Routing Replay on a {'GPU' if on_gpu else 'CPU'}",
        "",
        f"`python -m benchmarks.routing{option}`: one update of 64 responses with GRPO in one pass, metrics included.",
        f"The sides take turns; times are {clock}. Ratios are medians over rounds, taken within a round; brackets hold",
        f"the smallest and largest median over five parts of the rounds. {results['machine']}.",
        "",
        "| mixture | responses | side | update, ms | more than without | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        words = f"{row.get('bed', TINY.name)} | {row['work']['tokens']} tokens"
        for name, result in row["update"].items():
            target, more = TARGETS.get(name), _percent(result)
            verdict = "" if target is None else "met" if result["more"] <= target else "missed"
            target_words = "" if target is None else f"{100 * target:.0f} %"
            lines.append(f"| {words} | {name} | {result['milliseconds']:.1f} | {more} | {target_words} | {verdict} |")
    lines += ["", "| mixture | responses | engine | call, ms | more than without |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        words = f"{row.get('bed', TINY.name)} | {row['work']['tokens']} tokens"
        for name, result in row["engine"].items():
            lines.append(f"| {words} | {name} | {result['milliseconds']:.0f} | {_percent(result)} |")
    result = results["rows"][-1]["memory"]
    lines += [
        "",
        f"Memory, with M = {result['layers']} layers of experts and K = {result['active']} active experts: a record for",
        f"replay holds M K = {result['replay']:.0f} bytes per token of prompt or response (8 bits per expert, 16 with more",
        "than 256 experts), and so does the engine's record. During a step, the metrics hold"
        f" {result['measured_experts']:.0f} bytes of experts and",
        f"{result['measured_logprobs']:.0f} bytes of their log-probs (4 M K) per response token. For Qwen3-30B-A3B",
        "(M = 48, K = 8) that is 384 bytes per token for replay and 1,920 for metrics.",
    ]
    return "\n".join(lines) + "\n"


def _percent(row: dict[str, Any]) -> str:
    if row["more"] == 0:
        return "-"
    low, high = row["more_by_parts"]
    return f"{100 * row['more']:+.1f} % ({100 * low:+.1f} .. {100 * high:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", choices=BEDS, default="cpu")
    parser.add_argument("--output", type=Path, help="default under benchmarks/results, by device")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(5 if options.quick else options.rounds, options.device)
    print(routing_section(results))
    if not options.quick:
        (options.output or RESULTS[options.device]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
