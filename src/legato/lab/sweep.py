"""The clip sweep: arms over epsilon through `legato compare`, all from the same weights, and the results of each run."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from legato.compare.compare import compare
from legato.compare.definition import Definition
from legato.compare.processes import Machine
from legato.config.sources import read_word
from legato.diagnostics.statistics.clipping import predicted_clip_fraction
from legato.errors import InputError
from legato.lab.constructed import SHARE, quintiles
from legato.lab.recorder import Say, split_target
from legato.lab.replay import restore_recorder
from legato.pages.summary import number
from legato.records.directory import RunDirectory
from legato.records.lines import finite
from legato.run.target import find
from legato.training.checkpoint import save_model

EPSILONS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 0.2)
TOKEN_EPSILONS = (3e-4, 1e-2, 0.2)
"""The same bands on token ratios, to show the effect of granularity."""
FURTHER_STEPS = 6
"""Further steps that are recorded after a run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One band on one kind of ratio."""

    name: str
    algorithm: str
    low: float
    high: float

    @property
    def options(self) -> dict[str, Any]:
        path = "algorithm.objective.trust.clip"
        return {"algorithm": self.algorithm, f"{path}.low": self.low, f"{path}.high": self.high}


def arms(epsilons: Sequence[float]) -> list[Arm]:
    """Return the arms: published GSPO, each epsilon on the sequence ratio, some on the token ratio (the last is GRPO)."""
    listed = [Arm(name="gspo", algorithm="gspo", low=3e-4, high=4e-4)]
    listed += [Arm(name=f"sequence-{e:g}", algorithm="gspo", low=e, high=e) for e in epsilons]
    listed += [Arm(name=f"token-{e:g}" if e != 0.2 else "grpo", algorithm="grpo", low=e, high=e) for e in TOKEN_EPSILONS]
    return listed


def read_epsilons(text: str) -> list[float]:
    """Parse `1e-4,1e-3` into ascending half-widths; InputError if one is not in (0, 1)."""
    try:
        widths = sorted({float(word) for word in text.split(",")})
    except ValueError:
        widths = []
    if not widths or not all(0 < each < 1 for each in widths):
        raise InputError(f"expected numbers above 0 and below 1, as in 1e-4,1e-3, got {text!r} (--epsilons)")
    return widths


def train_arms(
    words: Sequence[str],
    listed: Sequence[Arm],
    *,
    folder: Path,
    seeds: Sequence[int],
    steps: int | None,
    parallel: int,
    say: Say,
) -> dict[str, Any]:
    """Train every arm with every seed and return the content of compare.json. Finished runs in `folder` are reused."""
    definition = define_comparison(words, listed, folder=folder, seeds=seeds, steps=steps, say=say)
    compared = compare(definition, folder=folder / "sweep", machine=Machine(parallel=parallel), say=say)
    if compared.exit_code:
        raise SystemExit(compared.exit_code)  # that of the signal which stopped the runs
    return compared.results


def define_comparison(
    words: Sequence[str], listed: Sequence[Arm], *, folder: Path, seeds: Sequence[int], steps: int | None, say: Say
) -> Definition:
    """Define the comparison of the arms."""
    recipes, options = prepare_start(words, folder, say)
    if steps is not None:
        options["training.steps"] = steps
    # The prediction is for responses with an advantage, so only those may be measured.
    options["training.skip_silent_rows"] = True
    return Definition(recipes=recipes, arms={arm.name: arm.options for arm in listed}, seeds=tuple(seeds), options=options)


def prepare_start(words: Sequence[str], folder: Path, say: Say) -> tuple[tuple[Path, ...], dict[str, Any]]:
    """Return recipes and options that start every run from the same weights. A warm-up is done once and saved."""
    name, words_given = split_target(words)
    options: dict[str, Any] = dict(read_word(word) for word in words_given)
    target = find(name, words_given)
    if Path(name).suffix == ".toml":
        recipes: tuple[Path, ...] = (Path(name),)
    elif target.saved is not None:
        recipes = (RunDirectory.open(Path(name)).config_path,)
        options |= {"policy.model": str(target.saved.resolve()), "policy.warm_up": False}
    else:
        recipes, options = (), {"policy.model": name, **options}
    if target.saved is None and target.resolved.config.policy.warm_up is not None:
        weights = folder / "start"
        if not (weights / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            save_model(target.prepare(say)[0], weights)
        options |= {"policy.model": str(weights.resolve()), "policy.warm_up": False}
    return recipes, options


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Clipping and training results of one run."""

    clipped: float
    """Of responses with an advantage, over the updates after the first of each step."""
    clipped_tokens: float
    """Share of all tokens over all updates, to compare token and sequence ratios."""
    predicted: float
    """By the formula, with the spread of s measured in each of these updates."""
    by_update: tuple[float, ...]
    reward: float
    """Mean over the last fifth of the steps."""
    reward_start: float
    """Over the first fifth."""
    rewards: tuple[tuple[float, float], ...]
    k3: float
    spread: float
    """Of s, mean over the updates after the first."""
    furthest: float
    """The largest |lw| of a token."""
    gradient: float
    entropy: float
    length: float


def course(records: Sequence[Mapping[str, Any]], arm: Arm) -> Course:
    """Compute the results of a run from the records of metrics.jsonl."""
    steps = [record for record in records if record.get("kind") == "step"]
    indices = sorted({int(key.rpartition("@")[2]) for record in steps for key in record if "@" in key})
    by_update = tuple(_mean(steps, f"clip/sequences@{index}") for index in indices)
    later = [
        (clipped, spread)
        for record in steps
        for index in indices[1:]
        if (clipped := number(record, f"clip/sequences@{index}")) is not None
        and (spread := number(record, f"ratio/sequence_std@{index}")) is not None
    ]
    fifth = max(1, len(steps) // 5)
    first, last = steps[:fifth], steps[-fifth:]
    rewards = [(number(record, "step"), number(record, "reward/mean")) for record in steps]
    return Course(
        clipped=_average([clipped for clipped, _ in later]),
        clipped_tokens=_mean(steps, "clip/tokens"),
        predicted=_average([predicted_clip_fraction(arm.low, arm.high, spread) for _, spread in later if spread > 0]),
        by_update=by_update,
        reward=_mean(last, "reward/mean"),
        reward_start=_mean(first, "reward/mean"),
        rewards=tuple((step, reward) for step, reward in rewards if step is not None and reward is not None),
        k3=_mean(steps, "drift/k3"),
        spread=_average([spread for _, spread in later]),
        furthest=max((number(record, "ratio/token_log_max") or 0.0 for record in steps), default=math.nan),
        gradient=_mean(steps, "gradient/norm"),
        entropy=_mean(last, "entropy/mean"),
        length=_mean(last, "length/mean"),
    )


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    return _average([value for record in records if (value := number(record, key)) is not None])


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def inspect_run(run: Path, file: Path, say: Say) -> dict[str, Any]:
    """Train a few more steps of a finished run and measure clipping by length. The result is cached in `file`."""
    if file.is_file():
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result
    directory = RunDirectory.open(run)
    recorder = restore_recorder(directory, directory.checkpoint_steps()[-1])
    say(f"measuring clipping of {run.name}")
    for _ in range(FURTHER_STEPS):
        recorder.step()
    later = [each for each in recorder.observed if each.index > 0]
    moved = [each.advantages != 0 for each in later]
    if not any(bool(each.any()) for each in moved):
        return {"responses": 0, "quintiles": []}
    lengths, clipped, log_s, advantages = (
        torch.cat([values[keep] for values, keep in zip(column, moved, strict=True)])
        for column in (
            [each.lengths for each in later],
            [each.clipped for each in later],
            [each.log_s for each in later],
            [each.advantages for each in later],
        )
    )
    order = lengths.argsort(stable=True)
    quintile_rows = [
        {
            "shortest": int(lengths[part].min()),
            "longest": int(lengths[part].max()),
            "responses": len(part),
            "clipped": float(clipped[part].double().mean()),
        }
        for part in order.tensor_split(5)
        if len(part)
    ]
    fair = quintiles(log_s, advantages, lengths, SHARE)
    result = {
        "responses": len(lengths),
        "quintiles": quintile_rows,
        "calibrated": [{"one_band": each.one_band, "by_length": each.by_length} for each in fair],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(finite(result), indent=1) + "\n", encoding="utf-8")
    return result
