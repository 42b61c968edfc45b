"""One page of several runs. Runs that differ only in the seed are one arm, drawn as a mean with a band."""

import html
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from legato.diagnostics.statistics.seeds import mean
from legato.pages.comparison_figures import ARMS, cost_bars, over_seeds
from legato.pages.curves import points
from legato.pages.legible import legible, shorten
from legato.pages.page import page, plotly_library
from legato.pages.summary import Record, number
from legato.pages.traces import Figure, axis, figure, logarithmic, shares
from legato.records.directory import RunDirectory
from legato.records.lines import RunDirectoryError
from legato.records.tail import open_plain_file

_DEEPEST = 32
"""Levels of tables and lists in a config; a recipe has six."""

OF_A_RUN = ("training.seed", "output.name", "output.directory")
"""Options that may differ between seeds of one arm."""

_FLIPS = "router/flip_mean"
_CURVES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Held-out accuracy", "evaluation", "eval/accuracy_sampled", shares("accuracy")),
    ("Reward", "step", "reward/mean", axis("reward")),
    ("Length of responses", "step", "length/mean", axis("tokens", least=0)),
    ("Entropy", "step", "entropy/mean", axis("nats", least=0)),
    ("Clipped tokens", "step", "clip/tokens", logarithmic("share")),
    ("Gradient norm", "step", "gradient/norm", axis("norm", least=0)),
    ("Experts that changed", "step", _FLIPS, shares("share of experts", whole=False)),
)
_LONGEST_NAME = 36
_SEED = re.compile(r"-?seed\d+(-\d+)?$")
"""The end of a run's name that tells its seed and, where the name was taken, a number."""
_PHASES = ("rollouts", "anchor", "update")


def flatten_config(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the options of a config by dotted path."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        inner = flatten_config(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
        values |= inner
    return values


def arms(options: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Group runs by arm. An arm is named after its algorithm and the options in which it differs from other arms."""
    runs_by_settings: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, config in options.items():
        settings = tuple(sorted((path, repr(value)) for path, value in config.items() if path not in OF_A_RUN))
        runs_by_settings.setdefault(settings, []).append(name)
    values: dict[str, set[str | None]] = {}
    for path in {path for settings in runs_by_settings for path, _ in settings}:
        values[path] = {dict(settings).get(path) for settings in runs_by_settings}
    by_label: dict[str, list[str]] = {}
    for settings, names in runs_by_settings.items():
        config = options[names[0]]
        # Options that an algorithm sets are implied by its name.
        differs = [p for p, _ in settings if len(values[p]) > 1 and not p.startswith("algorithm.")]
        words = [str(config.get("algorithm.name", names[0])), *(f"{path}={config[path]}" for path in differs)]
        label = ", ".join(words)
        by_label[label if label not in by_label else f"{label} ({names[0]})"] = names
    return by_label


def write_several(directories: Sequence[RunDirectory], path: Path) -> Path:
    """Write the page of these runs and return its path."""
    by_path = {str(directory.path): directory for directory in directories}
    options = {name: flatten_config(read_config(directory)) for name, directory in by_path.items()}
    records = {name: directory.metrics() for name, directory in by_path.items()}
    groups = _label_arms(arms(options), by_path)
    drawn = _figures({word: [records[name] for name in names] for word, (_, names) in groups.items()})
    listed = "".join(
        f"<li><b>{_safe(word)}</b>: {_safe(arm)}; {', '.join(_safe(by_path[name].name) for name in names)}</li>"
        for word, (arm, names) in groups.items()
    )
    text = page(
        title=f"{len(by_path)} runs - Legato",
        head=f"<header><h1>{len(by_path)} runs</h1></header>",
        body=f'<section><h2>Which runs</h2><div class="card"><ul>{listed}</ul></div></section>',
        drawn=drawn,
        plotly=plotly_library(),
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _label_arms(
    groups: Mapping[str, Sequence[str]], by_path: Mapping[str, RunDirectory]
) -> dict[str, tuple[str, Sequence[str]]]:
    """Name each arm for a legend, in which its options may be too long: `grpo, 3 seeds` for grpo-seed0 to grpo-seed2."""
    labels: dict[str, tuple[str, Sequence[str]]] = {}
    for arm, paths in groups.items():
        names = [by_path[path].name for path in paths]
        stems = {_SEED.sub("", name) for name in names}
        # Runs whose names tell nothing in common are named after the arm's options, or its algorithm.
        stem = names[0] if len(names) == 1 else stems.pop() if len(stems) == 1 else arm
        several = f", {len(names)} seeds" if len(names) > 1 else ""
        word, number = shorten(stem, _LONGEST_NAME) + several, 2
        while word in labels:
            word, number = f"{shorten(stem, _LONGEST_NAME)} ({number}){several}", number + 1
        labels[word] = arm, paths
    return labels


def _figures(runs: Mapping[str, Sequence[Sequence[Record]]]) -> list[Figure]:
    colours = dict(zip(runs, cycle(ARMS), strict=False))
    lasts = {arm: max(map(_last_step, seeds), default=0.0) or None for arm, seeds in runs.items()}
    drawn: list[Figure | None] = []
    for title, kind, key, layout in _CURVES:
        data = []
        for arm, seeds in runs.items():
            courses = [dict(zip(*points([r for r in seed if r.get("kind") == kind], key), strict=True)) for seed in seeds]
            data += over_seeds([course for course in courses if course], arm, colours[arm], lasts[arm])
        caption = "Mean over seeds, and its 95 % interval where there are several."
        drawn.append(figure(title, caption, data, layout, wide=not drawn, keys=[key]))
    phases = {arm: seconds for arm, seeds in runs.items() if (seconds := _phases(seeds))}
    caption = (
        "Seconds of a step by where they go, mean over steps and seeds. Replaying routes shows under anchor and update."
    )
    drawn.append(cost_bars(phases, "Cost of a step", caption, "seconds of a step") if phases else None)
    drawn.append(_routing(runs))
    return [each for each in drawn if each is not None]


def _last_step(records: Sequence[Record]) -> float:
    return max((number(each, "step") or 0.0 for each in records if each.get("kind") in ("step", "evaluation")), default=0.0)


def _routing(runs: Mapping[str, Sequence[Sequence[Record]]]) -> Figure | None:
    """Draw the cost per thousand tokens of recording and replaying experts; None if no run is a mixture."""
    if not any(number(record, _FLIPS) is not None for seeds in runs.values() for seed in seeds for record in seed):
        return None
    costs = {arm: each for arm, seeds in runs.items() if (each := _phases(seeds, _seconds_per_thousand_tokens))}
    caption = (
        "Seconds for a thousand tokens, so that arms whose responses differ in length can be laid side by side: sampled"
        " ones under rollouts, those of responses that were trained on under anchor and update. Recording routes in the"
        " engine (rollouts.record_routes) costs under rollouts, replay (R2, R3) under anchor and update; routers are"
        " measured in every arm. What else two arms differ in costs too."
    )
    return cost_bars(costs, "Cost of routing", caption, "seconds of 1,000 tokens") if costs else None


def _seconds_per_thousand_tokens(record: Record, phase: str) -> float | None:
    """Return the seconds per thousand tokens of a phase. Rows without an advantage are sampled but not trained on."""
    seconds, tokens = number(record, f"time/{phase}_seconds"), number(record, "tokens/response") or 0.0
    tokens *= 1 - (0.0 if phase == "rollouts" else number(record, "update/silent_rows") or 0.0)
    return 1000 * seconds / tokens if seconds is not None and tokens > 0 else None


def _seconds_of_a_step(record: Record, phase: str) -> float | None:
    return number(record, f"time/{phase}_seconds")


def _phases(
    seeds: Sequence[Sequence[Record]], cost: Callable[[Record, str], float | None] = _seconds_of_a_step
) -> dict[str, float]:
    """Return mean seconds by phase, without the first step, which includes the setup, if there are more."""
    means = {}
    for phase in _PHASES:
        each = []
        for seed in seeds:
            seconds = [value for record in seed if (value := cost(record, phase)) is not None]
            each += [mean(seconds[1:] or seconds)] if seconds else []
        means[phase] = mean(each) if each else math.nan
    return {} if any(map(math.isnan, means.values())) else means


def read_config(directory: RunDirectory) -> dict[str, Any]:
    """Return the resolved recipe; empty if it cannot be read."""
    try:
        with open_plain_file(directory.config_path) as file:
            tree = tomllib.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return {} if _is_deep(tree) else tree


def _is_deep(tree: Any) -> bool:
    """Whether a tree is nested deeper than any config of a run. Functions that call themselves would fail on it."""
    level = [tree]
    for _ in range(_DEEPEST):
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _safe(text: str) -> str:
    return html.escape(legible(text, one_line=True))
