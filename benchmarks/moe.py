"""Store the results of comparisons on mixtures of experts, for docs/experiments/moe.md.

    legato compare recipes/compare/moe.toml --gpus 0 --parallel 20 --out runs/moe
    python -m benchmarks.moe runs/moe --bed tiny --machine "one H200, on DATE at commit HASH"

An unfinished comparison can be stored too: a seed counts once every arm has run it. `experiment_page` renders the page.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.mismatch import markdown
from benchmarks.provenance import stored_by
from legato.compare.results import compare_arms
from legato.diagnostics.statistics.paired import share_interval

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "moe.json"
BEDS = {
    "tiny": "A tiny Qwen3-MoE that counts down",
    "upcycled": "SmolLM2-135M made into a mixture",
    "smoke": "The tiny mixture on a CPU, smaller",
}
RUN_FIELDS = ("name", "arm", "seed", "point", "status", "collapsed", "reason", "score", "evaluations", "routing")
"""The fields of a run that are stored."""

MEASURES = {
    "router/flip_mean": "experts changed",
    "last": "at the last update",
    "router/any_flip": "any of K changed",
    "router/mismatch_flip_mean": "engine and trainer",
    "router/shift_mean": "gamma",
    "router/floored": "gamma below 0.8",
    "ratio/token_log_std": "sd of log w",
    "ratio/token_log_max": "max |log w|",
    "ratio/sequence_std": "sd of s",
    "router/flip_token_correlation": "flips with |log w|",
    "router/flip_sequence_correlation": "flips with |log s|",
}
SHARES = {"router/flip_mean", "last", "router/any_flip", "router/mismatch_flip_mean", "router/floored"}


def load_results() -> dict[str, Any]:
    """The stored results by test bed; empty if there are none."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return {bed: with_paired_intervals(comparison) for bed, comparison in results.items()}


def with_paired_intervals(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """A stored comparison with the intervals of today, from the scores of each seed; old ones were bootstrapped."""
    points = []
    # The stored runs do not hold their number of held-out problems; their recipes do.
    problems = tomllib.loads((ROOT / comparison["recipes"][0]).read_text())["task"]["held_out"]
    for point in comparison["points"]:
        arms = {
            arm: {**summary, "mean_interval": share_interval(summary["scores"]), "iqm_interval": None}
            for arm, summary in point["arms"].items()
        }
        runs = {
            arm: [{"score": score, "problems": problems} for score in summary["scores"]] for arm, summary in arms.items()
        }
        comparisons = max(1, (len(comparison["arms"]) - 1) * len(comparison["points"]))
        pairs = {arm: compare_arms(runs[arm], runs[comparison["against"]], comparisons) for arm in point["pairs"]}
        points.append({**point, "arms": arms, "pairs": pairs})
    return {**comparison, "points": points}


def summarise(comparison: Mapping[str, Any], machine: str) -> dict[str, Any]:
    """The content of a compare.json without the curves that the page does not show."""
    runs = [{key: run[key] for key in RUN_FIELDS} for run in comparison["runs"]]
    for run in runs:
        # Remove the absolute path of the comparison.
        run["reason"] = re.sub(r"\S*/runs/", "runs/", run["reason"] or "")
    return {**{key: value for key, value in comparison.items() if key != "runs"}, "runs": runs, "on": machine}


def figures(results: Mapping[str, Any]) -> dict[str, str]:
    """SVG text by path: learning curves and changed experts by depth, for each test bed."""
    from legato.pages.comparison_figures import ARMS, learning
    from legato.pages.drawing import draw_svg
    from legato.pages.traces import figure, line, shares

    files = {}
    for bed, comparison in results.items():
        colours = dict(zip(comparison["arms"], ARMS, strict=False))
        depths = []
        for arm, colour in colours.items():
            flips = _by_depth(arm, comparison["runs"])
            depths += [line([float(layer) for layer in flips], list(flips.values()), arm, colour)]
        seeds = f"means of {len(comparison['seeds'])} seeds"
        layout = shares("experts changed", whole=False) | {"xaxis": {"title": {"text": f"layer ({seeds})"}}}
        course = learning(comparison["runs"], colours, "", wide=False)
        if course is not None:
            # Figures are quoted without their pages, so that they say themselves what the bands are.
            title = {"title": {"text": f"step ({seeds}, bands: 95 % intervals)"}}
            course = replace(course, layout=course.layout | {"xaxis": course.layout["xaxis"] | title})
        for name, drawing in {
            "learning": course,
            "depth": figure("Experts changed by depth", "", depths, layout),
        }.items():
            if drawing is not None:
                files[f"docs/figures/moe-{bed}-{name}.svg"] = draw_svg(drawing)
    return files


def _by_depth(arm: str, runs: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The share of experts that changed in each layer, averaged over seeds."""
    layers: dict[int, list[float]] = {}
    for run in runs:
        for key, value in (run["routing"] or {}).items():
            if run["arm"] == arm and key.startswith("router/flip_layer") and value is not None:
                layers.setdefault(int(key.removeprefix("router/flip_layer")), []).append(value)
    return {layer: sum(rates) / len(rates) for layer, rates in sorted(layers.items())}


def experiment_page(results: Mapping[str, Any]) -> str:
    """The text of docs/experiments/moe.md."""
    lines = [
        "# Experts that flip: token ratios, sequence ratios and Routing Replay",
        "",
        "Generated by `make docs` from `benchmarks/results/moe.json` (`python -m benchmarks.moe`); do not edit. All",
        "results are here, whether they favour GSPO or not. The statistics are explained in [compare.md](../compare.md),",
        "the router metrics in [metrics.md](../metrics.md).",
        f"{stored_by('moe')} Each comparison below says when it was run.",
        "",
        "## The test bed",
        "",
        "`recipes/tiny-moe-long.toml`: a Qwen3-MoE of 6 layers with 32 experts, 4 of them active, counts down by a step",
        "until none is left (`-3: 110 ` -> `107 104 ... 2`). Answers have 103 to 202 tokens. Each token is easy, but all",
        "must be right: a supervised stage ends when about a quarter of the whole answers are right, and reinforcement",
        "learning has to raise that share. How many experts flip is measured below. The test bed is close to instability:",
        "[frontier.md](frontier.md) has the learning rates that each arm survives on it, and those of a dense twin.",
        "",
        "```",
        "legato compare recipes/compare/moe.toml --gpus 0 --parallel 20  # grpo, grpo+R2, gspo, rspo; five seeds",
        "legato compare recipes/compare/upcycled.toml --gpus 0           # SmolLM2 as a mixture; three seeds",
        "legato compare recipes/compare/moe-smoke.toml                   # on a CPU: two seeds, smaller",
        "```",
        "",
        "How to read the results: R2 uses the experts of the old policy in every forward of an update. If `grpo+R2` ends",
        "like `grpo`, flips did not cause the failure; the arms also differ in their clip. Only one learning rate was",
        "measured: an arm that collapses here may be stable at a lower one.",
    ]
    for bed, title in BEDS.items():
        if bed in results:
            lines += ["", f"## {title}", "", *_section(results[bed])]
            lines += [
                "",
                f"![learning](../figures/moe-{bed}-learning.svg)",
                "",
                f"![by depth](../figures/moe-{bed}-depth.svg)",
            ]
        else:
            lines += ["", f"## {title}", "", "Not measured yet."]
    return "\n".join(lines) + "\n"


def _section(comparison: Mapping[str, Any]) -> list[str]:
    from legato.pages.comparison_tables import sentences, tables

    arms = "; ".join(f"`{arm}`: {changes(comparison['changes'][arm])}" for arm in comparison["arms"])
    lines = [f"{', '.join(f'`{recipe}`' for recipe in comparison['recipes'])} on {comparison['on']}. {arms}.", ""]
    lines += [f"- {sentence}" for sentence in sentences(comparison)]
    for table in tables(comparison):
        lines += ["", f"**{table.title}.** {table.note}", "", *markdown(table.headings, table.rows)]
    for point in comparison["points"]:
        here = [run for run in comparison["runs"] if run["point"] == point["point"] and run["routing"]]
        if here:
            lines += _routing(comparison["arms"], here)
        lines += curves(comparison["arms"], [run for run in comparison["runs"] if run["point"] == point["point"]])
    return lines


def changes(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {value}" for path, value in options.items())


def _routing(arms: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of changed experts and ratios by arm, averaged over steps and seeds."""
    by_arm = {arm: [_with_last(run["routing"]) for run in runs if run["arm"] == arm] for arm in arms}
    rows = [
        [arm, *(_cell(key, [each.get(key) for each in runs_of_arm]) for key in MEASURES)]
        for arm, runs_of_arm in by_arm.items()
    ]
    return [
        "",
        "**Routers and ratios.** Means over steps and seeds; correlations are over tokens and over responses.",
        "",
        *markdown(("arm", *MEASURES.values()), rows),
    ]


def _with_last(routing: Mapping[str, float | None]) -> dict[str, float | None]:
    """The same metrics plus `last`: the share of changed experts at the last update of a step."""
    updates = [int(key.rpartition("@")[2]) for key in routing if key.startswith("router/flip_mean@")]
    return {**routing, "last": routing[f"router/flip_mean@{max(updates)}"] if updates else None}


def _cell(key: str, values: Sequence[float | None]) -> str:
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    mean = sum(present) / len(present)
    return f"{mean:.1%}" if key in SHARES else f"{mean:.3g}"


def curves(arms: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of held-out accuracy by step: mean over seeds, lowest and highest."""
    steps = sorted({each["step"] for run in runs for each in run["evaluations"]})
    rows = []
    for step in steps:
        cells = [str(step)]
        for arm in arms:
            values = [
                each["sampled"] for run in runs if run["arm"] == arm for each in run["evaluations"] if each["step"] == step
            ]
            mean = sum(values) / len(values) if values else None
            cells.append("-" if mean is None else f"{mean:.1%} ({min(values):.1%} to {max(values):.1%})")
        rows.append(cells)
    title = "**Learning.** Sampled accuracy on held-out problems by step: mean over seeds, lowest and highest."
    return ["", title, "", *markdown(("step", *arms), rows)] if rows else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, help="The folder of a comparison.")
    parser.add_argument("--bed", choices=BEDS, default="tiny")
    parser.add_argument(
        "--machine", required=True, help='On what it ran, when and with which code: "one H200, on DATE at commit HASH".'
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.is_file() else {}
    results[options.bed] = summarise(json.loads((options.comparison / "compare.json").read_text()), options.machine)
    options.output.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
