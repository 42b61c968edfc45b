"""The generated tables of docs/exact.md, from exact.json (the experiment) and exact-engine.json (the engine)."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "results"
LAYOUT = "64 queries, 4 warps, 1 slices"
"""The layout of attention that was chosen."""


def exact_blocks() -> dict[str, str]:
    """The tables by the names of their blocks in docs/exact.md."""
    trial = json.loads((RESULTS / "exact.json").read_text())
    engine = json.loads((RESULTS / "exact-engine.json").read_text())
    return {
        "bits": bits_table(engine),
        "cost": cost_table(engine),
        "joined": joined_table(engine),
        "step": step_table(engine["step"]["off"]["seconds"], engine["step"]["on"]["seconds"]),
        "runs": runs_table(engine.get("runs")),
        "experiment": experiment_table(trial),
    }


def bits_table(engine: dict[str, Any]) -> str:
    lines = [
        "| shape | rows | tokens | packs | alone | with a gradient | prompt per response |",
        "|---|---|---|---|---|---|---|",
    ]
    early = False
    for shape, result in engine["shapes"].items():
        for name, case in result["bits"].items():
            early = early or "before_correction" in case
            star = " \\*" if "before_correction" in case else ""
            counts = " | ".join(str(count) for count in case["unequal"].values())
            lines.append(f"| {shape} | {name}{star} | {case['tokens']:,} | {counts} |")
    lines.append("")
    if early:
        lines += [
            "\\* Before the head's last sum was corrected (the last line of the table under How); not measured again.",
            "",
        ]
    machine, ratios = engine["machine"], engine["shapes"]["0.6B"]["bits"]["4096 tokens"]["ratios"]
    worst, outside = (max(each[name] for each in ratios.values()) for name in ("max", "outside"))
    lines += [
        f"{machine['device']}, torch {machine['torch']}, {engine['date']}. B10 between engine and trainer, responses of"
        f" {min(map(int, ratios))} to {max(map(int, ratios)):,} tokens (0.6B): largest |s - 1| {worst:g},"
        f" {100 * outside:g} % of responses outside GSPO's band.",
    ]
    return "\n".join(lines)


def cost_table(engine: dict[str, Any]) -> str:
    lines = ["| shape | rows | off | on | slower by |", "|---|---|---|---|---|"]
    for shape, result in engine["shapes"].items():
        for rows, each in result.get("times", {}).items():
            slower = 100 * (each["slower"] - 1)
            lines.append(f"| {shape} | {rows} | {each['off']:,.0f} | {each['on']:,.0f} | {slower:.1f} % |")
    return "\n".join(lines)


def joined_table(engine: dict[str, Any]) -> str:
    """Decoding with separate and with joined projections."""
    cells = [
        f"| {shape} | {rows} | {each['separate']:,.0f} | {each['off']:,.0f} |"
        f" {100 * (each['off'] / each['separate'] - 1):+.1f} % |"
        for shape, result in engine["shapes"].items()
        for rows, each in result.get("times", {}).items()
        if "separate" in each
    ]
    if not cells:
        return "Not measured yet: `python -m benchmarks.gpu.exact.engine --shapes 0.6B --cases none --times 8 64 256`."
    return "\n".join(["| shape | rows | separate | joined | tokens a second more |", "|---|---|---|---|---|", *cells])


def step_table(off: dict[str, float], on: dict[str, float]) -> str:
    lines = ["| exact | step, s | rollouts, s | old log-probs, s | updates, s |", "|---|---|---|---|---|"]
    for name, each in (("off", off), ("on", on)):
        lines.append(
            f"| {name} | {each['step']:.2f} | {each['rollouts']:.2f} | {each['anchor']:.2f} | {each['update']:.2f} |"
        )
    shorter, longer, updates = (100 * (on[name] / off[name] - 1) for name in ("step", "rollouts", "update"))
    lines += ["", f"On beside off: step {shorter:+.1f} %, rollouts {longer:+.1f} %, updates {updates:+.1f} %."]
    return "\n".join(lines)


def runs_table(runs: dict[str, Any] | None) -> str:
    """The unequal ratios of whole runs: of the first update of every step, and of the later ones."""
    if runs is None:
        return "Not measured yet."
    lines = [
        "| run | updates | sampled tokens | ratio not exactly 1 | responses clipped, at most |",
        "|---|---|---|---|---|",
    ]
    for name, each in ((name, each) for name, each in runs.items() if name != "date"):
        for which, part in each["summary"].items():
            lines.append(
                f"| {name} | {part['updates']} ({which} of a step) | {part['tokens']:,} | {part['unequal']:,} |"
                f" {100 * part['clipped']:.3g} % |"
            )
    anchors = sorted({each["anchor"] for name, each in runs.items() if name != "date"})
    lines += ["", f"Old log-probs: {', '.join(anchors)}. {runs['date']}."]
    return "\n".join(lines)


def experiment_table(trial: dict[str, Any]) -> str:
    verdict = trial["verdict"]
    attention = {shape: each["attention"] for shape, each in trial["shapes"].items()}
    rows = sorted({int(count) for each in attention.values() for count in each["today"]})
    lines = [
        f"Its answer ({trial['date']}): **{'go' if verdict['go'] else 'no'}**. Products that met the rule:"
        f" {', '.join(verdict['good products']) or 'none'}. Layouts of attention that met it:"
        f" {', '.join(verdict['good attention']) or 'none'}. The chosen one has training's bits. Its time"
        " beside that of the engine without it:",
        "",
        "| shape | " + " | ".join(f"{count} {'row' if count == 1 else 'rows'}" for count in rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    for shape, each in attention.items():
        ratios = [each[LAYOUT][str(count)]["seconds"] / each["today"][str(count)]["seconds"] for count in rows]
        lines.append(f"| {shape} | " + " | ".join(f"{ratio:.2f}x" for ratio in ratios) + " |")
    return "\n".join(lines)
