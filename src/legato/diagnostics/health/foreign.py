"""Logs of other trainers as records of ours: trainer_state.json of TRL, JSON lines, CSV. Standard library only."""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
"""Our key to the one of TRL's GRPOTrainer (1.16.0). A mapping that is given comes before it; keys of ours are taken as they
are."""

STEPS = ("step", "global_step", "_step", "train/global_step")
_PREFIX = "train/"
"""Weights & Biases and TensorBoard put it before what the trainer logs."""
_LARGEST = 500_000_000


def find(path: Path) -> Path | None:
    """The log in a file or folder that is none of our run directories; None where there is none."""
    if path.is_file():
        return path
    direct = path / "trainer_state.json"
    if direct.is_file():
        return direct
    numbered = [p for p in path.glob("checkpoint-*/trainer_state.json") if p.parent.name.rpartition("-")[2].isdigit()]
    return max(numbered, key=lambda p: int(p.parent.name.rpartition("-")[2]), default=None)


def read(path: Path, columns: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Step records in our keys. `columns` maps a key of ours to a column of the file."""
    mapping = {**TRL, **(columns or {})}
    rows = list(_rows(path))
    if not rows:
        raise ValueError(f"{path} holds no step")
    for key, column in (columns or {}).items():
        if not any(column in row or _PREFIX + column in row for row in rows):
            there = ", ".join(sorted({str(name) for row in rows for name in row})[:30])
            raise ValueError(f"--column {key}={column}: {path} has no column {column!r}; it has {there}")
    records = [_record(row, number, mapping) for number, row in enumerate(rows, start=1)]
    kept = [record for record in records if len(record) > 2]
    if not kept:
        raise ValueError(
            f"{path}: none of its columns is known; name them, as in --column reward/mean=my_reward (keys: docs/metrics.md)"
        )
    return sorted(kept, key=lambda record: int(record["step"]))


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path} is larger than {_LARGEST:,} bytes; a log of metrics is needed")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            return list(csv.DictReader(text.splitlines()))
        if path.suffix in (".jsonl", ".ndjson"):
            return [row for line in text.splitlines() if line.strip() and isinstance(row := json.loads(line), dict)]
        tree = json.loads(text)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    history = tree.get("log_history") if isinstance(tree, dict) else tree
    if not isinstance(history, list):
        raise ValueError(f"{path} has no list log_history; trainer_state.json, a JSONL or a CSV file is needed")
    return [row for row in history if isinstance(row, dict)]


def _record(row: Mapping[str, Any], number: int, mapping: Mapping[str, str]) -> dict[str, Any]:
    plain = {str(key).removeprefix(_PREFIX): value for key, value in row.items()}
    step = next((value for key in STEPS if (value := _number(plain.get(key))) is not None), None)
    record: dict[str, Any] = {"kind": "step", "step": number if step is None or not math.isfinite(step) else int(step)}
    for key, value in plain.items():
        if "/" in key and key not in mapping.values() and (known := _number(value)) is not None:
            record[key] = known
    for key, column in mapping.items():
        if (known := _number(plain.get(column))) is not None:
            record[key] = known
    return record


def _number(value: Any) -> float | None:
    """A number, NaN and infinity among them; None where there is none."""
    if isinstance(value, bool) or value is None or value == "":
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
