"""Hand-made runs for the doctor."""

import math
from pathlib import Path
from typing import Any

from legato.config.load import dump, load
from legato.records.directory import RunDirectory
from legato.run.doctor import Examination


def wave(step: int) -> float:
    return 1 + 0.1 * math.sin(1.7 * step)


def make_records(steps: int = 100, sick_from: int | None = None) -> list[dict[str, Any]]:
    """Records of a run whose reward rises. From step `sick_from` on the learning rate is 5 times higher and it collapses."""
    records = []
    for step in range(1, steps + 1):
        ill = sick_from is not None and step >= sick_from
        late = 0 if sick_from is None else step - sick_from
        reward = (0.4 + 0.002 * step) * wave(step) if not ill else max(0.02, 0.4 - 0.08 * late)
        records.append(
            {
                "kind": "step",
                "step": step,
                "reward/mean": reward,
                "accuracy/mean": reward,
                "drift/k3": 0.006 * wave(step) * (15 if ill else 1),
                "optimizer/lr": 1e-4 * (5 if ill else 1),
                "clip/tokens": 0.3,
                "groups/zero_variance": 0.3,
                "loss/total": 0.01,
            }
        )
    return records


def write_run(folder: Path, records: list[dict[str, Any]], words: list[str] | None = None, end: bool = True) -> Path:
    directory = RunDirectory.create(folder, "run")
    directory.write_config(dump(load([], words or [])))
    directory.append_metrics({"kind": "start", "name": "run", "model": "tiny", "algorithm": "gspo"})
    for record in records:
        (directory.health if record["kind"] in ("finding", "recovery") else directory.metrics_file).append(record)
    if end:
        directory.append_metrics({"kind": "end", "reason": "all steps done"})
    return directory.path


def finding_names(examined: Examination) -> list[str]:
    return [each.name for each in examined.found]
