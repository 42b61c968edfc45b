"""The sections of `docs/performance.md` on whole steps and on the engine, from stored results."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
SPEED_TARGET = 0.5
NAMES = {"tiny": "tiny, 7.1M", "smollm2": "SmolLM2-135M"}


def stored(name: str) -> dict[str, Any] | None:
    """`step` or `engine`; None where it has not been measured yet."""
    path = FOLDER / f"{name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def table(results: dict[str, Any]) -> list[str]:
    """A line a side, beside TRL's on the same work."""
    lines = [
        "| model | rewards | side | step, s | of TRL | rollouts, s | old log-probs, s | updates, s | rows skipped |"
        " peak memory, MB | of TRL | after the first step, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        base = row["sides"]["trl"]
        for side, found in row["sides"].items():
            phases = found["phases"]
            cells = (
                NAMES[row["model"]],
                row["work"],
                "TRL" if side == "trl" else side.replace("legato", "Legato"),
                f"{found['step_seconds']:.2f}",
                f"{found['step_seconds'] / base['step_seconds']:.2f}",
                *(f"{phases[name]:.2f}" for name in ("rollouts", "anchor", "update")),
                f"{100 * found['skipped']:.0f} %",
                f"{found['peak_mb']:.0f}",
                f"{found['peak_mb'] / base['peak_mb']:.2f}",
                f"{found['later_peak_mb']:.0f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _verdicts(results: dict[str, Any]) -> list[str]:
    """Whether the two targets are met, a line for each work."""
    lines = []
    for row in results["rows"]:
        base, ours = row["sides"]["trl"], row["sides"]["legato"]
        share, memory = ours["step_seconds"] / base["step_seconds"], ours["peak_mb"] / base["peak_mb"]
        what = f"{NAMES[row['model']]}, {row['work']}"
        speed = "no target" if row["silent_share"] else "met" if share <= SPEED_TARGET else "missed"
        lines.append(
            f"- {what}: {share:.2f} of TRL's time ({speed}), {memory:.2f} of its memory"
            f" ({'met' if memory <= 1 else 'missed'})."
        )
    return lines


def step_section(results: dict[str, Any]) -> str:
    """Whole steps beside TRL."""
    first = results["rows"][0]
    versions = first["sides"]["trl"]["versions"]
    anchors = {row["sides"]["legato"]["anchor"] for row in results["rows"]}
    lines = [
        "## Whole steps beside TRL",
        "",
        "Generated from `benchmarks/results/step.json` (`python -m benchmarks.step`).",
        "",
        f"TRL {versions['trl']}'s `GRPOTrainer` in sequence mode and Legato's trainer, each in its own process, in turn,",
        f"on {results['threads']} CPU cores ({results['machine']}; torch {results['torch']}, transformers"
        f" {versions['transformers']}, {results['dtype']}, no gradient checkpointing).",
        f"A step is {results['prompts']} prompts x {results['samples']} responses of exactly {results['tokens']} tokens,"
        f" then {results['updates']} updates; the same weights, prompts, learning rate,",
        "clip and a fixed 0/1 table of rewards. Medians over the measured steps of all repeats, after one step of warm-up.",
        "Targets: half of TRL's time where every response counts, and no more memory.",
        "",
        *table(results),
        "",
        *_verdicts(results),
        "",
    ]
    for model, check in results["checks"].items():
        lines.append(
            f"- Before timing, one fixed batch through both on {NAMES[model]}: the losses differ by"
            f" {check['loss_difference']:.0e}, the gradients by {check['gradient_difference']:.0e} of their norm."
        )
    lines += [
        "- Every process saw the same prompts, rewards, tokens and updates in every step; this is asserted.",
        f"- `Legato` runs on its defaults: the anchor is chosen by the probe ({', '.join(sorted(anchors))} here), rows"
        " without a gradient are skipped where that pays.",
        "  `no skipping` is `training.update_passes = one` with `training.skip_silent_rows = false`; `nothing saved` also",
        "  recomputes the old log-probs, as TRL does.",
        "- The probe of the noise floor (once in 100 steps) is in the warm-up step and not in the medians.",
        "- TRL deals single responses to the updates, Legato whole groups: with whole groups silent, whole updates are.",
        "- Peak memory is that of the whole process: libraries, loading and the first step (with the probe) included.",
        "  The last column is the peak of the measured steps alone.",
    ]
    lines += [f"- {NAMES[model]} was left out: {reason}" for model, reason in results["skipped"].items()]
    return "\n".join(lines) + "\n"


def engine_section(results: dict[str, Any]) -> str:
    """The local engine beside `model.generate`."""
    lines = [
        "## The local engine beside `model.generate`",
        "",
        "Generated from `benchmarks/results/engine.json` (`python -m benchmarks.engine`).",
        "",
        f"{results['prompts']} prompts x {results['samples']} responses of exactly {results['tokens']} tokens at temperature"
        f" 1, {results['dtype']}, {results['threads']} CPU cores",
        f"({results['machine']}; torch {results['torch']}, transformers {results['transformers']}); medians of interleaved"
        " calls on the same module.",
        "The engine also returns the log-prob of every token. Before timing, the greedy tokens of both are compared.",
        "",
        "| model | prompt tokens | `model.generate`, tokens/s | engine, tokens/s | times as fast | greedy tokens equal |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        cells = (
            row["model"],
            str(row["prompt_tokens"]),
            f"{row['generate']['tokens_per_second']:.0f}",
            f"{row['engine']['tokens_per_second']:.0f}",
            f"{row['engine']['tokens_per_second'] / row['generate']['tokens_per_second']:.2f}",
            f"{100 * row['greedy_equal']:.1f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{model} was left out: {reason}" for model, reason in results["skipped"].items()]
    return "\n".join(lines) + "\n"
