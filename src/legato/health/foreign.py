"""Reads logs of other trainers as Legato records: trainer_state.json of TRL, JSON lines, CSV, and the console of verl.

Standard library only.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from legato.errors import InputError
from legato.health.explain import rules_with_metrics
from legato.health.rules import RULES

TRL: dict[str, str] = {
    "reward/mean": "reward",
    "reward/deviation": "reward_std",
    "groups/zero_variance": "frac_reward_zero_std",
    "length/mean": "completions/mean_length",
    "length/max": "completions/max_length",
    "length/truncated": "completions/clipped_ratio",
    "entropy/mean": "entropy",
    "clip/tokens": "clip_ratio/region_mean",
    "gradient/norm": "grad_norm",
    "loss/total": "loss",
    "optimizer/lr": "learning_rate",
    "reference/k3": "kl",
    "mismatch/absolute": "sampling/sampling_logp_difference/mean",
}
"""Legato's keys -> those of TRL's GRPOTrainer (1.16.0). A mapping of the user comes first; Legato's own keys are kept."""

VERL: dict[str, str] = {
    "reward/mean": "critic/score/mean",
    "length/mean": "response_length/mean",
    "length/max": "response_length/max",
    "length/truncated": "response_length/clip_ratio",
    "entropy/mean": "actor/entropy",
    "clip/tokens": "actor/pg_clipfrac",
    "gradient/norm": "actor/grad_norm",
    "loss/total": "actor/pg_loss",
    "optimizer/lr": "actor/lr",
    "reference/k3": "actor/kl_loss",
}
"""The same for verl (0.9.1)."""

_READ = {
    key.partition("@")[0]
    for rule in RULES
    if rule.test != "together"
    for key in (*rule.metrics, *rule.beside, *([] if rule.unless is None else rule.unless[:1]))
} | set(TRL)
"""Keys that a rule or the explanation reads."""

OPTIONS: dict[str, str] = {
    "training.lr": "learning_rate",
    "training.updates_per_step": "steps_per_generation / gradient_accumulation_steps, num_iterations",
    "updates a step": "steps_per_generation / gradient_accumulation_steps, num_iterations",
    "training.gradient_clip": "max_grad_norm",
    "rollouts.max_response_tokens": "max_completion_length",
    "rollouts.samples_per_prompt": "num_generations",
    "rollouts.temperature": "temperature",
    "reward.overlong": "mask_truncated_completions, get_soft_overlong_punishment",
    "policy.dtype": "bf16, fp16",
    "objective.trust.clip.high above low": "epsilon_high above epsilon",
    "objective.corrections.tis": "vllm_importance_sampling_correction",
    "a wider band": "epsilon, epsilon_high",
    "clip.low": "epsilon",
    "clip.high": "epsilon_high",
    "aggregate = 'sequence-mean'": "loss_type = 'grpo'",
    "luspo": "loss_type = 'luspo'",
}
"""Settings named in advice, with the settings of TRL's GRPOConfig that do the same."""

_OPTION = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}(?![\w.])" for name in sorted(OPTIONS, key=len, reverse=True)))

OURS = ("start", "origin", "warm-up", "evaluation", "checkpoint", "probe", "note", "end", "finding", "recovery")
"""Kinds of Legato records that are no steps, in case a Legato file is read here."""

STEPS = ("step", "global_step", "_step", "Step", "iteration", "iter")
_PREFIX = "train/"
"""The prefix that Weights & Biases and TensorBoard put before the trainer's keys."""
_LARGEST = 500_000_000


def find_log(path: Path) -> Path | None:
    """Return the log file at a path or in a folder of another trainer; None if there is none."""
    if path.is_file():
        return path
    direct = path / "trainer_state.json"
    if direct.is_file():
        return direct
    numbered = [p for p in path.glob("checkpoint-*/trainer_state.json") if p.parent.name.rpartition("-")[2].isdigit()]
    return max(numbered, key=lambda p: int(p.parent.name.rpartition("-")[2]), default=None)


def add_trl_names(sentence: str) -> str:
    """Add the TRL name after each setting in a sentence that TRL calls differently."""
    return _OPTION.sub(lambda match: f"{match[0]} (TRL: {OPTIONS[match[0]]})", sentence)


def read_log(path: Path, columns: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Read step records with Legato's keys. `columns` maps a key of Legato to a column of the file.

    Lines with the same step are merged; the last value wins. Some trainers log a step in several lines, and resumed ones
    log steps again.
    """
    given_columns = {key: column.removeprefix(_PREFIX) for key, column in (columns or {}).items()}
    mappings = [VERL, TRL, given_columns]
    rows = [row for row in _rows(path) if row.get("kind") not in OURS]
    if not rows:
        raise InputError(f"{path} holds no step")
    names = {str(name) for row in rows for name in row}
    for key, column in (columns or {}).items():
        if not _is_read(key):
            raise InputError(
                f"--column {key}={column}: no rule reads {key!r}; those that are read: {', '.join(sorted(_READ))}"
            )
        if not {given_columns[key], _PREFIX + given_columns[key]} & names:
            raise InputError(
                f"--column {key}={column}: {path} has no column {column!r}; it has {', '.join(sorted(names)[:30])}"
            )
    merged: dict[int, dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        record = _record(row, number, mappings)
        if len(record) > 2:
            merged.setdefault(record["step"], {}).update(record)
    records = [merged[step] for step in sorted(merged)]
    if not rules_with_metrics(records):
        raise InputError(
            f"{path}: no rule reads any of its columns, which are {', '.join(sorted(names)[:30])}; say which is which, as in"
            " --column reward/mean=COLUMN --column entropy/mean=COLUMN --column length/mean=COLUMN (all keys:"
            " docs/metrics.md)"
        )
    return records


def _is_read(key: str) -> bool:
    return key.partition("@")[0] in _READ


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        if path.stat().st_size > _LARGEST:
            raise InputError(f"{path} is larger than {_LARGEST:,} bytes; a log of metrics is needed")
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".csv":
            return list(csv.DictReader(io.StringIO(text, newline="")))
        if path.suffix in (".jsonl", ".ndjson"):
            # The text after the last line break is still being written.
            lines = text[: text.rfind("\n") + 1].split("\n") if "\n" in text else [text]
            return [_flat(row) for line in lines if line.strip() and isinstance(row := json.loads(line), dict)]
        console = [_console_row(line) for line in text.splitlines() if _CONSOLE.search(line)]
        if console:
            return console
        tree = json.loads(text)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    history = tree.get("log_history") if isinstance(tree, dict) else tree
    if not isinstance(history, list):
        raise InputError(f"{path} has no list log_history; trainer_state.json, a JSONL or a CSV file is needed")
    return [row for row in history if isinstance(row, dict)]


_CONSOLE = re.compile(r"(?<!\S)step:\d+ - \S+:")
"""A line that verl prints for a step, maybe behind the name of a process: step:3 - actor/entropy:0.5 - ..."""

_NUMPY = re.compile(r"np\.\w+\((.*)\)")


def _console_row(line: str) -> dict[str, str]:
    pairs = (each.rpartition(":") for each in line[line.index("step:") :].split(" - "))
    return {name.strip(): _NUMPY.sub(r"\1", value.strip()) for name, _, value in pairs}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the keys of its table `data` beside the others, which verl's file logger writes."""
    data = row.get("data")
    return {**{key: value for key, value in row.items() if key != "data"}, **data} if isinstance(data, dict) else row


def _record(row: Mapping[str, Any], number: int, mappings: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """A step record. Of several mappings that have a value for one key, the last wins."""
    plain = {str(key).removeprefix(_PREFIX): value for key, value in row.items()}
    step = next((value for key in STEPS if (value := _number(plain.get(key))) is not None), None)
    record: dict[str, Any] = {"kind": "step", "step": number if step is None or not math.isfinite(step) else int(step)}
    pairs = [pair for mapping in mappings for pair in mapping.items()]
    columns = {column for _, column in pairs}
    for key, value in plain.items():
        if _is_read(key) and key not in columns and (known := _number(value)) is not None:
            record[key] = known
    for key, column in pairs:
        if (known := _number(plain.get(column))) is not None:
            record[key] = known
    return record


def _number(value: Any) -> float | None:
    """Return a value as a number (NaN and infinity included); None if it is not one."""
    if isinstance(value, bool) or value is None or value == "":
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
