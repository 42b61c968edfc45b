"""The targets of the GPU benchmarks, and whether the stored results meet them. A missing result is "not measured"."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.measure import GIB
from benchmarks.gpu.work import possible_gain

BOLD = "16384 x 2048 x 151936"
ROUNDED = ("plain torch", "TRL chunked", "TRL on logits", "verl torch")
"""Heads that take the log-softmax of 16-bit logits."""
Sections = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    section: str
    title: str
    required: str
    value: float | None
    met: bool | None
    measured: str

    @classmethod
    def of(cls, section: str, title: str, value: float | None, bound: float, form: str, *, least: bool) -> "Target":
        required = f"at {'least' if least else 'most'} {form.format(bound)}"
        if value is None:
            return cls(section, title, required, None, None, "not measured")
        return cls(section, title, required, value, value >= bound if least else value <= bound, form.format(value))

    @property
    def verdict(self) -> str:
        return {True: "met", False: "**missed**", None: "not measured"}[self.met]


def stored_value(sections: Sections, *path: str) -> Any:
    """The stored value at a path; None if anything on the path is missing or failed."""
    value: Any = sections
    for index, step in enumerate(path):
        if not isinstance(value, dict):
            return None
        value = value.get(step)
        if index == 0 and isinstance(value, dict):
            value = value.get("parts")
    return value


def sort_parts(parts: dict[str, Any]) -> list[tuple[str, Any]]:
    """Parts sorted by shape, ours before the peers', independent of the order of measurement."""
    return sorted(parts.items(), key=lambda part: (part[0].split()[0], "TRL" in part[0], "silent" in part[0]))


def quotient(first: float | None, second: float | None) -> float | None:
    """`first / second`; None if a value is missing or `second` is 0."""
    return None if first is None or not second else first / second


def targets(sections: Sections) -> list[Target]:
    return [*_head(sections), *_update(sections), *_saving_targets(sections), *_decode(sections), *_rest(sections)]


def _head(sections: Sections) -> Iterator[Target]:
    heads = stored_value(sections, "B1", f"{BOLD}, temperature 1", "heads") or {}
    ours, bare = (heads.get(name, {}) for name in ("Legato", "bare product"))
    ratio = quotient(ours.get("seconds"), bare.get("seconds"))
    yield Target.of("B1", f"head forward at {BOLD}, against the bare product", ratio, 1.12, "{:.3f}x", least=False)
    rounded = [heads[name]["max_error"] for name in ROUNDED if "max_error" in heads.get(name, {})]
    smaller = quotient(min(rounded, default=None), ours.get("max_error"))
    yield Target.of(
        "B1", "error against float64, smaller than that of 16-bit-logit heads", smaller, 10, "{:.0f}x", least=True
    )
    heads = stored_value(sections, "B2", BOLD, "heads") or {}
    ours, bare = (heads.get(name, {}) for name in ("Legato", "three bare products"))
    ratio = quotient(ours.get("seconds"), bare.get("seconds"))
    yield Target.of(
        "B2", f"forward and backward at {BOLD}, against three bare products", ratio, 1.15, "{:.2f}x", least=False
    )
    extra = ours.get("extra_gib")
    extra = None if extra is None else extra * GIB / 1e9
    yield Target.of("B2", "memory beyond the gradients", extra, 1.5, "{:.2f} GB", least=False)
    calls, share = (
        stored_value(sections, "B3", "active", "calls") or {},
        stored_value(sections, "B3", "active", "active_tokens") or {},
    )
    if all(calls.get(name, {}).get("seconds") for name in ("1", "0.4", "forward")):
        off = abs(calls["0.4"]["seconds"] / calls["1"]["seconds"] / share["0.4"] - 1)
    else:
        off = None
    yield Target.of(
        "B3", "time follows the share of sequences with a gradient (0.4), off by", off, 0.1, "{:.0%}", least=False
    )


def _update(sections: Sections) -> Iterator[Target]:
    for shape, mfu in (("0.6B", 0.45), ("1.7B", 0.5)):
        ours, plain = (stored_value(sections, "B4", f"{shape} Legato{way}") or {} for way in ("", ", one pass"))
        for side, factor in (("defaults", 3.0), ("strong", 1.8)):
            theirs = stored_value(sections, "B4", f"{shape} TRL {side}") or {}
            times = quotient(ours.get("useful_per_second"), theirs.get("useful_per_second"))
            yield Target.of("B4", f"{shape}: useful tokens per second of TRL {side}", times, factor, "{:.2f}x", least=True)
            times = quotient(plain.get("useful_per_second"), theirs.get("useful_per_second"))
            title = f"{shape}: the same in one pass, no row skipped, of TRL {side}"
            yield Target.of("B4", title, times, factor, "{:.2f}x", least=True)
        memory = quotient(ours.get("peak_gib"), (stored_value(sections, "B4", f"{shape} TRL strong") or {}).get("peak_gib"))
        yield Target.of("B4", f"{shape}: peak memory of TRL strong", memory, 0.5, "{:.2f}x", least=False)
        yield Target.of("B4", f"{shape}: MFU of the updates", ours.get("mfu_updates"), mfu, "{:.0%}", least=True)
        title = f"{shape}: MFU of the updates in one pass, no row skipped"
        yield Target.of("B4", title, plain.get("mfu_updates"), mfu, "{:.0%}", least=True)


def _saving_targets(sections: Sections) -> Iterator[Target]:
    shares = dict[str, list[float]](r=[], products=[])
    for result in (stored_value(sections, "B5") or {}).values():
        times = quotient(result.get("apart", {}).get("seconds"), result.get("shared", {}).get("seconds"))
        if times is not None:
            shares["r"].append(times / result["ideal"])
            shares["products"].append(times / possible_gain(result["prompt"], result["response"], result["group"]))
    worst = {name: min(result, default=None) for name, result in shares.items()}
    yield Target.of("B5", "gain of shared prompts, of r, worst case", worst["r"], 0.85, "{:.2f}", least=True)
    title = "the same, of what the products allow (the head's are not shared)"
    yield Target.of("B5", title, worst["products"], 0.85, "{:.2f}", least=True)
    yield Target.of(
        "B6", "two passes against the cost table, largest distance", _worst_cost(sections), 0.05, "{:.0%}", least=False
    )


def _worst_cost(sections: Sections) -> float | None:
    distances = []
    for name, part in (stored_value(sections, "B6") or {}).items():
        base = stored_value(sections, "B6", name.replace("two passes", "one pass"), "seconds", "update")
        if name.endswith("two passes") and base and "seconds" in part:
            distances.append(abs(part["seconds"]["update"] / base / ((4 - 3 * part["token_share"]) / 3) - 1))
    return max(distances, default=None)


def _decode(sections: Sections) -> Iterator[Target]:
    def fixed(name: str, key: str) -> float | None:
        value: float | None = stored_value(sections, "B7", f"0.6B fixed {name}", key)
        return value

    def rate(name: str) -> float | None:
        return fixed(name, "tokens_per_second")

    apart = fixed("Legato, prompts apart", "of_roofline")
    yield Target.of("B7", "0.6B, prompts apart, of the roofline", apart, 0.6, "{:.0%}", least=True)
    shared = rate("Legato, shared prompts")
    yield Target.of("B7", "0.6B, shared prompts", shared, 50_000, "{:,.0f} tokens/s", least=True)
    yield Target.of("B7", "0.6B, shared prompts (stretch)", shared, 65_000, "{:,.0f} tokens/s", least=True)
    plain = rate("Legato, plain body, shared prompts")
    yield Target.of("B7", "0.6B, the model's own layers", plain, 30_000, "{:,.0f} tokens/s", least=True)
    others = [value for name in ("generate, dynamic", "generate, static") if (value := rate(name))]
    best = quotient(shared, max(others, default=None))
    yield Target.of("B7", "0.6B, against the faster `generate`", best, 6, "{:.1f}x", least=True)
    ragged = [
        stored_value(sections, "B7", f"0.6B ragged {name}", "tokens_per_second")
        for name in ("Legato, shared prompts", "generate, dynamic")
    ]
    yield Target.of("B7", "0.6B, ragged lengths, against `generate`", quotient(*ragged), 8, "{:.1f}x", least=True)


def _rest(sections: Sections) -> Iterator[Target]:
    step = {name: stored_value(sections, "B8", name, "seconds", "step") for name in ("Legato", "TRL defaults")}
    yield Target.of(
        "B8", "whole step, against TRL defaults", quotient(step["TRL defaults"], step["Legato"]), 5, "{:.1f}x", least=True
    )
    sync = stored_value(sections, "B8", "Legato", "weight_sync_seconds")
    yield Target.of(
        "B8",
        "weights copied from trainer to engine (they are the same tensors)",
        None if sync is None else 1e3 * sync,
        0,
        "{:.0f} ms",
        least=False,
    )
    lengths = (stored_value(sections, "B10", "Legato", "lengths") or {}).values()
    same = max((gaps["same path"]["max"] for gaps in lengths), default=None)
    yield Target.of("B10", "same path: largest distance of s from 1", same, 0, "{:.1g}", least=False)
    times = min((_times_lower(lengths, way) for way in ("different packs", "engine")), default=None) if lengths else None
    yield Target.of("B10", "clipped by numerics, lower than with 16-bit logits", times, 5, "{:.1f}x", least=True)
    fits = [stored_value(sections, "B11", side, "fits_tokens", "80") for side in ("Legato", "TRL strong")]
    yield Target.of("B11", "tokens a micro-batch in 80 GiB, of TRL strong", quotient(*fits), 1.5, "{:.1f}x", least=True)
    each = [stored_value(sections, "B11", side, "tokens_per_response") for side in ("Legato", "TRL strong")]
    rows = [quotient(tokens, apiece) for tokens, apiece in zip(fits, each, strict=True)]
    yield Target.of(
        "B11", "the same in responses of 1,024 tokens, prompts of 256", quotient(*rows), 1.5, "{:.1f}x", least=True
    )


def _times_lower(lengths: Iterable[dict[str, Any]], way: str) -> float:
    """How many times fewer rows are clipped than with 16-bit logits; 1 if neither side clips any."""
    ours, theirs = (sum(gaps[name]["clipped"] for gaps in lengths) for name in (way, f"16-bit logits, {way}"))
    return theirs / ours if ours else float("inf") if theirs else 1.0


def losses(sections: Sections) -> list[str]:
    """A sentence for each measurement in which a peer is ahead."""
    sentences = []
    for section in ("B1", "B2"):
        for name, part in (stored_value(sections, section) or {}).items():
            heads = part.get("heads", {})
            for key, adjective in (("seconds", "faster"), ("peak_gib", "smaller in memory")):
                ours = heads.get("Legato", {}).get(key)
                ahead = [
                    f"{peer} ({ours / row[key]:.2f}x)"
                    for peer, row in heads.items()
                    if "bare" not in peer and peer != "Legato" and ours and row.get(key) and row[key] < ours
                ]
                if ahead:
                    sentences.append(f"{section}, {name}: {adjective} than our head: {', '.join(ahead)}.")
    for shape in ("0.6B", "1.7B"):
        ours = stored_value(sections, "B4", f"{shape} Legato") or {}
        for side in ("strong", "defaults"):
            theirs = stored_value(sections, "B4", f"{shape} TRL {side}") or {}
            if ours.get("peak_gib") and theirs.get("peak_gib") and theirs["peak_gib"] < ours["peak_gib"]:
                sentences.append(f"B4, {shape}: TRL {side} has the smaller peak, {theirs['peak_gib']:.1f} GiB.")
            if ours.get("useful_per_second") and theirs.get("useful_per_second", 0) > ours["useful_per_second"]:
                sentences.append(f"B4, {shape}: TRL {side} is faster.")
    return sentences
