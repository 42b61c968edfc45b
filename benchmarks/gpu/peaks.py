"""Compares the memory that `legato plan` calculates with every peak that was measured on a GPU.

`check_rows` returns a row for each measured peak of our trainer in `benchmarks/results`, and `missing_shapes` what has none
and why. A measured peak is that of allocated tensors, so it is compared with the estimate without the reserve.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.gpu import factors
from benchmarks.gpu.plan import RESULTS as PLAN_RESULTS
from benchmarks.gpu.plan import SHAPES, demand_of_result, load_results
from legato.capacity.memory import LOGITS_AT_ONCE
from legato.training.memory.model import Demand

GIB = 2**30
ALLOWED = 0.10
"""How far a calculated peak of training may be off, as a share of the measured one."""
SEEDS = range(24)
"""Plans of a step over which the size of its largest pack is averaged: the files do not hold the seed of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured peak and the calculated one, in GiB."""

    what: str
    measured: float
    calculated: float
    source: str
    date: str
    training: bool = True
    """False: nothing is trained. Passes of the engine are not part of the estimate."""

    @property
    def error(self) -> float:
        """How far the calculated peak is off, as a share of the measured one."""
        return self.calculated / self.measured - 1


def check_rows() -> list[Row]:
    """All measured peaks, beside what the memory model says."""
    gpu = factors.load("gpu.json")["sections"]
    return [*_packs_of_one_size(gpu), *_updates(gpu), *_whole_step(gpu), *_sampling(), *_planned_rows()]


def missing_shapes() -> dict[str, str]:
    """The shapes of `benchmarks/gpu/plan.py` without a measured peak, and why: not tried, left out, or failed."""
    stored = load_results(PLAN_RESULTS)["shapes"]
    reasons = {}
    for name, shape in SHAPES.items():
        result = stored.get(name, {})
        if "peak_gib" not in result:
            failed = "error" in result
            why = " ".join(str(result.get("error") or result.get("skipped") or "").split())
            reasons[shape.title] = f"{'failed' if failed else 'not measured'}{f': {why:.160}' if why else ''}"
    return reasons


def dense_demand(shape: str, tokens: int, **more: Any) -> Demand:
    """The demand of a pack of one of the benchmarks' shapes in bfloat16, with fused layers."""
    sizes = factors.dense_shape(shape)
    return replace(
        Demand(
            shape=sizes,
            size=2,
            tokens_per_pack=tokens,
            head_tokens=min(tokens, LOGITS_AT_ONCE // sizes.vocabulary),
            logit_bytes=2,
            fused=True,
        ),
        **more,
    )


def _row(what: str, measured: float, demand: Demand, source: str, date: str, *, checkpointing: bool = False) -> Row:
    calculated = demand.memory(checkpointing=checkpointing).peak / GIB
    return Row(what=what, measured=measured, calculated=calculated, source=source, date=date[:10])


def _packs_of_one_size(gpu: dict[str, Any]) -> list[Row]:
    part = gpu["B11"]["parts"]["Legato"]
    return [
        _row(
            f"1.7B, one pack of {tokens:,} tokens",
            measured,
            # Rows of 1,024 tokens: four fit into the logits that may exist together.
            dense_demand("1.7B", tokens, several_packs=False, head_tokens=4 * 1024),
            "gpu.json, B11",
            part["run"],
        )
        for tokens, measured in part["points"]
    ]


def largest_pack(tokens_per_pack: int, *, first: bool, repeated: bool = False) -> tuple[int, bool]:
    """(mean tokens of the largest pack of a step of B4, whether its update has several packs).

    `first`: only the first update is computed whole, as with two passes. `repeated`: every row has its own prompt.
    """
    sizes, several = [], []
    for seed in SEEDS:
        updates = factors.pack_sizes(tokens_per_pack, seed, repeated=repeated)
        packs = [(size, len(update) > 1) for update in (updates[:1] if first else updates) for size in update]
        largest = max(packs)
        sizes.append(largest[0])
        several.append(largest[1])
    return round(statistics.mean(sizes)), any(several)


def _updates(gpu: dict[str, Any]) -> list[Row]:
    """B4 and B6: parts by name -> tokens per pack, whether only the first update has all rows, changes of the demand."""
    cases: dict[str, dict[str, Any]] = {
        "0.6B Legato": {},
        "0.6B Legato, sampler's log-probs as anchor": {},
        "0.6B Legato, one pass": {"first": False},
        "0.6B Legato, shared prompts off": {"first": False, "repeated": True},
        "0.6B Legato, layers part by part": {"demand": {"by_parts": True}},
        "0.6B Legato, fused parts off": {"demand": {"fused": False}},
        "0.6B Legato, gradient checkpointing": {"checkpointing": True},
        "0.6B Legato, 8k tokens a pack": {"tokens": 8192},
        "0.6B Legato, 32k tokens a pack": {"tokens": 32768},
        "0.6B 40 % silent, skipping off": {"first": False},
        "clipped 0, one pass": {"first": False, "tokens": 32768},
        "clipped 0, gradient checkpointing": {"first": False, "tokens": 32768, "checkpointing": True},
        "1.7B Legato": {},
        "1.7B Legato, sampler's log-probs as anchor": {},
        "1.7B Legato, one pass": {"first": False},
        "1.7B Legato, 32k tokens a pack": {"tokens": 32768},
        "1.7B 40 % silent, skipping off": {"first": False},
    }
    rows = []
    for name, case in cases.items():
        section = "B4" if name in gpu["B4"]["parts"] else "B6"
        part = gpu[section]["parts"][name]
        tokens, several = largest_pack(
            case.get("tokens", 16384), first=case.get("first", True), repeated=case.get("repeated", False)
        )
        shape = name.split()[0] if section == "B4" else "0.6B"
        demand = dense_demand(shape, tokens, several_packs=several, **case.get("demand", {}))
        checkpointing = case.get("checkpointing", False)
        what = name if section == "B4" else f"0.6B, 32k tokens a pack, {name}"
        source = f"gpu.json, {section}"
        rows.append(_row(what, part["peak_gib"], demand, source, part["run"], checkpointing=checkpointing))
    return rows


def _whole_step(gpu: dict[str, Any]) -> list[Row]:
    """B8: 8 groups of 256 + 8 x 512 tokens in each update, three to a pack, beside the engine's KV cache."""
    part, prompts, rows, prompt, response = gpu["B8"]["parts"]["Legato"], 32, 256, 256, 512
    tokens = 3 * (prompt + 8 * (response - 1))
    cached = prompts * prompt + (rows + 1) * response
    demand = dense_demand("0.6B", tokens, cached_tokens=cached)
    return [_row("0.6B, a whole step with its engine", part["peak_gib"], demand, "gpu.json, B8", part["run"])]


def _sampling() -> list[Row]:
    """The 8B shape that only samples: weights and KV cache."""
    large = factors.load("large.json")
    each = large["load"]
    rows = each["prompts"] * each["samples"]
    shape = factors.large_shape()
    cached = each["prompts"] * each["prompt_tokens"] + (rows + 1) * each["new_tokens"]
    demand = Demand(shape=shape, size=2, tokens_per_pack=1, trained=0, fused=True, cached_tokens=cached)
    memory = demand.memory(checkpointing=False)
    return [
        Row(
            what="8B, sampling only",
            measured=large["peak_gib"],
            calculated=(memory.weights + memory.kv_cache) / GIB,
            source="large.json",
            date=large["date"],
            training=False,
        )
    ]


def _planned_rows() -> list[Row]:
    """The peaks that `benchmarks/gpu/plan.py` has measured."""
    stored = load_results(PLAN_RESULTS)
    rows = []
    for name, result in stored["shapes"].items():
        if "peak_gib" in result:
            demand = demand_of_result(name, result)
            rows.append(
                _row(
                    SHAPES[name].title,
                    result["peak_gib"],
                    demand,
                    "plan.json",
                    result.get("date", stored["date"]),
                    checkpointing=result["checkpointing"],
                )
            )
            if demand.offload and "host_gib" in result:
                calculated = demand.memory(checkpointing=result["checkpointing"]).host / GIB
                rows.append(
                    replace(rows[-1], what=f"{rows[-1].what}: host", measured=result["host_gib"], calculated=calculated)
                )
    return rows
