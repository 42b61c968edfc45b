"""The GPU section of `docs/performance.md`: targets, tables, where a peer is faster, and what was not measured."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.targets import losses, quotient, sort_parts, targets
from benchmarks.gpu.work import possible_gain

RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"
TITLES = {
    "B1": "B1. The head forward: log-probs and entropies",
    "B2": "B2. The head forward and backward: a GSPO loss over 64 sequences",
    "B3": "B3. The head where only some sequences have a gradient",
    "B4": "B4. The update phase on fixed rollouts",
    "B5": "B5. A group's prompt computed once",
    "B6": "B6. Rows without a gradient are skipped",
    "B7": "B7. Decoding",
    "B8": "B8. The whole step",
    "B10": "B10. Numerics at a learning rate of 0",
    "B11": "B11. Memory",
    "B12": "B12. Decoding beside vLLM",
}
Parts = dict[str, Any]


def load_results() -> dict[str, Any] | None:
    """The stored results, or None if no GPU has been measured yet."""
    result: dict[str, Any] | None = json.loads(RESULTS.read_text()) if RESULTS.is_file() else None
    return result


EXPERTS = RESULTS.with_name("experts-gpu.json")


def experts_block(path: Path = EXPERTS) -> str:
    """Decoding of mixtures, own experts beside grouped ones (`benchmarks.gpu.experts`), for docs/experts.md."""
    if not path.is_file():
        return "Not measured yet: `python -m benchmarks.gpu.experts --output benchmarks/results/experts-gpu.json`."
    stored = json.loads(path.read_text())
    cells = []
    for shape, result in stored["shapes"].items():
        for side in result.get("decode", []):
            rate, first = side["tokens_per_second"], result["decode"][0]["tokens_per_second"]
            layers, experts = ("fused" if side["fused"] else "own"), ("grouped" if side["grouped"] else "own")
            cells.append([shape, layers, experts, f"{rate:,.0f}", f"{rate / first:.2f}x"])
        if "error" in result:
            cells.append([shape, "-", "-", result["error"], "-"])
    machine = stored["machine"]
    return "\n".join(
        [
            *table_lines("shape | layers | experts | tokens/s | beside the first", cells),
            "",
            f"{stored['rows']} responses of {stored['new']} tokens to prompts of {stored['prompt']} tokens, random"
            f" weights, so experts are used evenly. {machine['gpu']}, torch {machine['torch']}, {machine['time']}.",
        ]
    )


def table_lines(header: str, cells: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table. `header` holds the column names, separated by bars."""
    columns = header.count("|") + 1
    return [f"| {header} |", "|" + "---|" * columns, *(f"| {' | '.join(row)} |" for row in cells)]


def format_number(value: float | None, form: str = "{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def _failure_lines(parts: Parts) -> list[str]:
    """A line per part that could not be measured, with the error."""
    return [f"- {name}: not measured. {part['error']}" for name, part in parts.items() if "error" in part]


def _runs(parts: Parts) -> list[str]:
    """Lines that say when each part was measured. Runs of different times measured different states of the code."""
    by_run: dict[str, list[str]] = {}
    for name, part in parts.items():
        if "error" not in part:
            by_run.setdefault(part["run"], []).append(name)
    if len(by_run) == 1:
        return [f"- Measured in the run of {next(iter(by_run))}."]
    return [f"- Run of {run}: {'; '.join(names)}." for run, names in sorted(by_run.items())]


def _heads(parts: Parts, bare: str, *, backward: bool) -> list[str]:
    lines = []
    for name, part in parts.items():
        if "error" in part:
            continue
        base = part["heads"].get(bare, {}).get("seconds")
        table = []
        for head, result in sorted(part["heads"].items(), key=lambda item: item[1].get("seconds", 1e9)):
            if "seconds" not in result:
                continue
            accuracy = f"{result['max_error']:.1e}" if "max_error" in result else "-"
            if backward:
                accuracy = ", ".join(f"{1 - cosine:.0e}" for cosine in result["cosines"]) if "cosines" in result else "-"
            table.append(
                (
                    head,
                    f"{1e3 * result['seconds']:.2f} ({1e3 * result['p20']:.2f} to {1e3 * result['p80']:.2f})",
                    format_number(result["seconds"] / base if base else None),
                    format_number(result.get("extra_gib" if backward else "peak_gib")),
                    accuracy,
                    str(result["count"]),
                )
            )
        heading = "1 - cosine of dX, dW" if backward else "largest error"
        memory = "beyond the gradients, GiB" if backward else "peak, GiB"
        lines += [
            "",
            f"N x H x V = {name}:",
            "",
            *table_lines(f"head | ms (p20 to p80) | of bare | {memory} | {heading} against float64 | samples", table),
        ]
        lines += [
            f"- {head}: not measured. {result['error']}" for head, result in part["heads"].items() if "error" in result
        ]
    return lines


def _active(parts: Parts) -> list[str]:
    part = parts.get("active", {})
    calls = part.get("calls", {})
    if "seconds" not in calls.get("1", {}):
        return []
    whole = calls["1"]["seconds"]
    table = [
        (name, f"{share:.0%}", f"{1e3 * calls[name]['seconds']:.2f}", f"{calls[name]['seconds'] / whole:.2f}")
        for name, share in part["active_tokens"].items()
        if "seconds" in calls[name]
    ]
    return table_lines("sequences with a gradient | their tokens | forward and backward, ms | of the whole", table)


def _updates(parts: Parts) -> list[str]:
    table = []
    for name, result in sort_parts(parts):
        if "seconds" not in result:
            continue
        seconds = result["seconds"]
        clipped = result.get("clipped", 0.0)
        clipped = sum(clipped) / max(1, len(clipped)) if isinstance(clipped, list) else clipped
        table.append(
            (
                name
                + (
                    f" (micro-batch {result['micro']}{', Liger layers' if result['liger'] else ''})"
                    if "micro" in result
                    else ""
                ),
                *(f"{seconds[key]:.2f}" for key in ("anchor", "update", "phase")),
                f"{result['useful_per_second']:,.0f}",
                f"{result['mfu_updates']:.0%}",
                f"{result['mfu_phase']:.0%}",
                format_number(result.get("peak_gib"), "{:.1f}"),
                format_number(result.get("static_gib"), "{:.1f}"),
                f"{clipped:.0%}",
                format_number(result.get("skipped_rows"), "{:.0%}"),
                str(len(result["samples"])),
            )
        )
    header = (
        "side | old log-probs, s | updates, s | phase, s | useful tokens/s | MFU of updates | MFU of the phase |"
        " peak, GiB | held between steps, GiB | clipped | rows skipped | steps"
    )
    lines = table_lines(header, table)
    lines += [f"- {name}: {note}." for name, result in parts.items() for note in result.get("notes", [])]
    return lines + ablation(parts)


def ablation(parts: Parts) -> list[str]:
    """The table of our side with one factor changed, relative to the defaults."""
    base = parts.get("0.6B Legato", {}).get("seconds", {}).get("phase")
    if not base:
        return []
    table = []
    for name, result in parts.items():
        if not name.startswith("0.6B Legato, ") or "seconds" not in result:
            continue
        phase = result["seconds"]["phase"]
        memory = format_number(result["peak_gib"] - parts["0.6B Legato"]["peak_gib"], "{:+.1f}")
        table.append((name.removeprefix("0.6B Legato, "), f"{phase:.2f}", f"{phase / base:.2f}", memory))
    for first, second in (("0.6B 40 % silent, skipping off", "0.6B 40 % silent, defaults"),):
        if all("seconds" in parts.get(name, {}) for name in (first, second)):
            off, on = (parts[name]["seconds"]["phase"] for name in (first, second))
            table.append(("skipping off, 40 % of groups silent (against skipping on)", f"{off:.2f}", f"{off / on:.2f}", "-"))
    factors = table_lines("factor changed, 0.6B | phase, s | of the defaults | peak, GiB more", table)
    return ["", "Ablation: one factor changed at a time. Above 1, the default saves time.", "", *factors]


def _shared(parts: Parts) -> list[str]:
    table = []
    for result in parts.values():
        if "ideal" not in result or "seconds" not in result["shared"] or "seconds" not in result["apart"]:
            continue
        times = result["apart"]["seconds"] / result["shared"]["seconds"]
        possible = possible_gain(result["prompt"], result["response"], result["group"])
        table.append(
            (
                *(str(result[key]) for key in ("prompt", "response", "group")),
                f"{1e3 * result['shared']['seconds']:.1f}",
                f"{1e3 * result['apart']['seconds']:.1f}",
                f"{times:.2f}",
                f"{result['ideal']:.2f}",
                f"{times / result['ideal']:.2f}",
                f"{possible:.2f}",
                f"{times / possible:.2f}",
                f"{result['logprob_gap']:.1e}",
            )
        )
    header = (
        "prompt | response | group | shared, ms | apart, ms | gain | r | gain / r | possible by products | gain / possible"
        " | largest log-prob difference"
    )
    return table_lines(header, table)


def _skipping_table(parts: Parts) -> list[str]:
    table = []
    for name, result in parts.items():
        if "seconds" not in result:
            continue
        kind, way = name.split(", ")
        base = parts.get(f"{kind}, {'one pass' if kind.startswith('clipped') else 'skipping off'}", {}).get("seconds", {})
        share = result["token_share"]
        clipped = kind.startswith("clipped")
        predicted = {"one pass": 1.0 if clipped else 1 - share, "two passes": (4 - 3 * share) / 3, "skipping off": 1.0}
        cost = {**predicted, "gradient checkpointing": 4 / 3}[way]
        measured = result["seconds"]["update"] / base["update"] if base else None
        table.append(
            (kind, f"{share:.0%}", way, f"{result['seconds']['update']:.2f}", format_number(measured), f"{cost:.2f}")
        )
    return table_lines("forced share of rows | of tokens | way | updates, s | of the base | by the cost table", table)


def _decode(parts: Parts) -> list[str]:
    table = []
    for name, result in parts.items():
        if "seconds" not in result:
            continue
        table.append(
            (
                name,
                f"{result['tokens_per_second']:,.0f}",
                f"{result['seconds']:.2f}",
                f"{result['floor_seconds']:.2f}",
                f"{result['of_roofline']:.0%}",
                format_number(result.get("peak_gib"), "{:.1f}"),
                f"{result['first_seconds']:.1f}",
                str(len(result["samples"])),
            )
        )
    header = (
        "way | tokens/s | best, s | roofline, s | of the roofline | memory over the weights, GiB | first call, s | repeats"
    )
    return table_lines(header, table)


def _step(parts: Parts) -> list[str]:
    table = []
    base = parts.get("TRL defaults", {}).get("seconds", {}).get("step")
    for result in parts.values():
        if "seconds" not in result:
            continue
        seconds = result["seconds"]
        table.append(
            (
                result["side"],
                f"{seconds['step']:.2f}",
                format_number(base / seconds["step"] if base else None, "{:.1f}x"),
                *(f"{seconds[key]:.2f}" for key in ("rollouts", "anchor", "update")),
                format_number(result.get("peak_gib"), "{:.1f}"),
                result.get("anchor") or "recompute",
            )
        )
    header = "side | step, s | against TRL defaults | rollouts, s | old log-probs, s | updates, s | peak, GiB | anchor"
    return [
        *table_lines(header, table),
        "",
        "Weight sync is 0 ms: the engine samples from the tensors being trained. vLLM was not measured.",
    ]


def _numerics(parts: Parts) -> list[str]:
    merged: dict[str, dict[str, Any]] = {}
    for part in parts.values():
        for length, result in part.get("lengths", {}).items():
            merged.setdefault(length, {}).update(result)
    ways = list(dict.fromkeys(way for result in merged.values() for way in result))
    table = []
    for length, result in merged.items():
        cells = [length]
        for way in ways:
            gap = result.get(way)
            cells.append("-" if gap is None or "error" in gap else f"{gap['max']:.1e}, {gap['clipped']:.1%}")
        table.append(cells)
    return [
        "Each cell: largest |s - 1|, and the share of rows clipped for it at 3e-4 / 4e-4.",
        "",
        *table_lines(" | ".join(["tokens", *ways]), table),
    ]


def _memory(parts: Parts) -> list[str]:
    table = []
    for result in parts.values():
        if "points" not in result:
            continue
        points = ", ".join(f"{tokens}: {gib:.1f}" for tokens, gib in result["points"])
        fits = [format_number(result["fits_tokens"][room], "{:,.0f}") for room in ("80", "139")]
        fits.append(format_number(quotient(result["fits_tokens"]["80"], result.get("tokens_per_response")), "{:.0f}"))
        table.append((result["side"], points, f"{result['gib_per_thousand_tokens']:.2f}", *fits))
    header = "side | tokens of a micro-batch: peak, GiB | GiB per thousand tokens | tokens in 80 GiB | tokens in 139 GiB"
    words = (
        "The last three columns come from a straight line through the measured points. A response has 1,024 tokens after a"
        " prompt of 256; our side computes the prompt once for 8 responses. No side recomputes layers."
    )
    return [*table_lines(f"{header} | responses in 80 GiB", table), "", words]


def _beside_vllm(parts: Parts) -> list[str]:
    theirs = {part["shape"]: part for part in parts.values() if str(part.get("side", "")).startswith("vLLM")}
    table = []
    for part in parts.values():
        if part.get("side") != "Legato":
            continue
        works = theirs.get(part["shape"], {}).get("works", {})
        known, plain = (
            works.get(f"{part['kind']} {way}", {}).get("tokens_per_second")
            for way in ("with log-probs", "without log-probs")
        )
        ours = part["tokens_per_second"]
        table.append(
            (
                part["shape"],
                part["kind"],
                f"{ours:,.0f}",
                format_number(known, "{:,.0f}"),
                format_number(plain, "{:,.0f}"),
                format_number(quotient(ours, max((each for each in (known, plain) if each), default=None)), "{:.2f}x"),
                f"{len(part['samples'])}",
            )
        )
    header = "shape | work | Legato, tokens/s | vLLM with log-probs | vLLM without | Legato of vLLM's faster | repeats"
    settings = [f"- {shape}: {part['side']}; {part['settings']}." for shape, part in theirs.items()]
    return [*table_lines(header, table), *(["", *settings] if settings else [])]


def section_lines(section: str, parts: Parts) -> list[str]:
    lines = {
        "B1": lambda: _heads(parts, "bare product", backward=False),
        "B2": lambda: _heads(parts, "three bare products", backward=True),
        "B3": lambda: _active(parts),
        "B4": lambda: _updates(parts),
        "B5": lambda: _shared(parts),
        "B6": lambda: _skipping_table(parts),
        "B7": lambda: _decode(parts),
        "B8": lambda: _step(parts),
        "B10": lambda: _numerics(parts),
        "B11": lambda: _memory(parts),
        "B12": lambda: _beside_vllm(parts),
    }[section]()
    return [*lines, *_failure_lines(parts), *_runs(parts)]


def section_table(section: str, result: dict[str, Any]) -> str:
    """The text of one section, as a command prints it at its end."""
    return "\n".join([f"### {TITLES[section]}", "", *section_lines(section, result["parts"])])


NOTES = {
    "B1": "Whole sequences, as many at once as the policy holds logits for. Every head is checked against float64 before it"
    " is timed.",
    "B2": "The band is 0.2 here, so that rounding clips no row. Heads that take only rectangles get the same number of"
    " tokens in sequences of one length, so that they pay for no padding. Liger's Hopper head (CuTe) needs packages too"
    " large to bring to the machine and was not measured.",
    "B4": "32 prompts x 8, prompts of 200 to 312 tokens, responses log-normal with mean 405 and at most 1024 tokens, 4"
    " updates, gspo at its published band, rewards from a fixed table. Useful tokens: response tokens of all rows."
    " MFU: executed model FLOPs (2 per matmul parameter and token forward, 4 backward, attention by query-key pairs; the"
    " forward of a first pass counts as a forward; no padding, no recomputed layers), divided by the time and the product"
    " ceiling of the same run. Tokens of skipped rows count as useful too; one pass skips no row. Peak memory is that of the"
    " micro-batch each side chose: 16k tokens on our side, rows padded to the longest on TRL's. Both sides recompute the old"
    " log-probs unless the table says otherwise. Our side keeps float32 master weights and moments; TRL's strong setting"
    " keeps everything in bfloat16.",
    "B5": "Forward and backward of 64 rows, 0.6B shape, packs of 32k tokens, as in the recipes of this size."
    " r = G (P + R) / (P + G R) is how many times fewer tokens the body reads. The head reads every response on both sides,"
    " and so does attention over the prompt: `possible by products` counts these too.",
    "B6": "0.6B shape, packs of 32k tokens, learning rate 0, old log-probs set so that exactly these rows are clipped. The"
    " cost table: one pass 3, two passes 1 + 3 (1 - c), checkpointing 4, where c is the share of skipped tokens.",
    "B7": "32 prompts x 8, prompts of 256 tokens, temperature 1, no end token; 512 new tokens, or the ragged lengths of B4."
    " Best of the repeats. The roofline uses the ceilings of the same run: the slower of reading the weights and computing"
    " the products, plus reading the KV cache of the rows still being decoded. vLLM was not measured.",
    "B8": "32 prompts x 8, prompts of 256 tokens, 512 new tokens, 4 updates; our side on its defaults, with anchor and"
    " passes chosen by the run.",
    "B3": "Time of the head, forward and backward, over the sequences that have a gradient, as in a second pass.",
    "B10": "0.6B shape with random weights, 64 responses sampled by the engine and cut to each length. Same path: with and"
    " without a gradient in the same packs. Different packs: packs of 16k tokens and every row alone. Engine: its own"
    " log-probs. 16-bit logits: the same, with logits rounded to bfloat16 before the log-softmax. Clipped: half of the rows"
    " outside the band, since the sign of the advantage decides whether the clip acts. TRL: its old log-probs and its"
    " new ones, rows shuffled, without an update between. The remaining gap between engine and trainer comes from the body:"
    " its bfloat16 sums run in another order, and the rounding of logits is small compared with that.",
    "B11": "1.7B shape; weights, gradients and optimizer state included.",
    "B12": "The same requests on both sides, in one command; best of the repeats after a warm-up. Our side always returns"
    " the log-prob of every token. fixed: 32 prompts of 256 tokens x 8 responses of 512; ragged: the lengths of B4; nano:"
    " the benchmark of nano-vLLM, 256 different prompts of 100 to 1,024 tokens and as many new ones, temperature 0.6.",
}


def gpu_section(document: dict[str, Any]) -> str:
    """The section of the page with all GPU measurements."""
    sections, machine = document["sections"], document["machine"]
    parts = [part for section in sections.values() for part in section["parts"].values()]
    ceilings = [part["ceilings"] for part in parts if part.get("ceilings")]
    lines = [
        "## On a GPU",
        "",
        "Generated from `benchmarks/results/gpu.json` (`python -m benchmarks.gpu`). Below each table is the time of its run;"
        " runs of different times measured different states of the code.",
        "",
        f"One {machine['device']}; torch {machine['torch']}, transformers {machine['transformers']},"
        f" Python {machine['python']}; Qwen3 shapes with random weights, bfloat16.",
        "Kernels are called in rounds, each in its own order, with the host ahead of the device; times are medians with"
        " the 20th and 80th percentile (before 2026-11-15 19:30: A-B-A-B, the host not ahead). Steps are medians after"
        " one warm-up step. Peak memory includes the pools of CUDA graphs (since 2026-11-16).",
        f"Ceilings of the runs: {_range(ceilings, 'tflops', '{:.0f}')} TFLOP/s (8192^3, bfloat16),"
        f" {_range(ceilings, 'terabytes_per_second', '{:.2f}')} TB/s (copy, read and write counted).",
    ]
    if any(part.get("tiny") for part in parts):
        lines += ["", "**Toy shapes: a rehearsal of the page, not a measurement.**"]
    lines += ["", "### Targets", ""]
    reached = [(t.section, t.title, t.required, t.measured, t.verdict) for t in targets(sections)]
    lines += table_lines("section | what | target | measured | verdict", reached)
    lost = losses(sections)
    lines += ["", "Where a peer is ahead:", "", *(f"- {line}" for line in lost)] if lost else []
    for section in TITLES:
        if section not in sections:
            continue
        lines += ["", f"### {TITLES[section]}", "", *([NOTES[section], ""] if section in NOTES else [])]
        lines += section_lines(section, sections[section]["parts"])
        lines += [f"\n![]({path})" for path in _pictures(section, sections)]
    return "\n".join(lines) + "\n"


def _pictures(section: str, sections: dict[str, Any]) -> list[str]:
    from benchmarks.gpu.figures import figures

    names = {"B4": "figures/gpu-update.svg", "B7": "figures/gpu-decode.svg"}
    return [names[section]] if section in names and f"docs/{names[section]}" in figures(sections) else []


def _range(ceilings: list[dict[str, float]], key: str, form: str) -> str:
    values = sorted(form.format(ceiling[key]) for ceiling in ceilings)
    return "-" if not values else values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
