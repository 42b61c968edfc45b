"""Evidence of an alarm: the rollouts, tensors and metrics of the last steps, in a folder of the run.

evidence/step-000057/
  finding.json                  the rules that held, with values and sentences
  metrics.jsonl                 the steps before, as the run recorded them
  rollouts-000057.jsonl.gz      rollouts, one per line
  tensors-000057.safetensors    tokens, mask, group, rewards, advantages, log-probs of sampler and anchor; rows as above
  abandoned*                    after a recovery: what was recorded of the steps that were given up (`recovery.py`)
"""

import json
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from legato.core.rollout import Group
from legato.health.rule import Finding
from legato.records.directory import RunDirectory
from legato.records.lines import explain_os_errors, parse_line, write_records
from legato.records.rollouts import rollout_records
from legato.records.room import until_room
from legato.training.report import StepReport

METRICS_KEPT = 60
"""Steps whose metrics are stored: as many as the rules look back."""
MOST = 20
"""Evidence folders of a run at most, so that a run in constant alarm does not fill the disk."""


@dataclass(frozen=True, slots=True)
class _Step:
    step: int
    groups: tuple[Group, ...]
    tensors: Mapping[str, Tensor]


class Evidence:
    """The last steps, held in memory so that an alarm can write them to disk."""

    def __init__(self, directory: RunDirectory, steps: int) -> None:
        self.directory = directory
        self._steps: deque[_Step] = deque(maxlen=steps)

    def hold(self, report: StepReport) -> None:
        """Hold a step and drop the oldest one."""
        if self._steps.maxlen and self.directory.writes:
            groups = tuple(_without_routes(group) for group in report.groups)
            # On the host: the next step may need the device memory that these tensors occupy.
            tensors = {name: tensor.detach().cpu() for name, tensor in report.tensors.items()}
            self._steps.append(_Step(report.step, groups, tensors))

    def write(self, folder: Path, findings: Sequence[Finding]) -> Path | None:
        """Write the held steps and return the folder; None if evidence is off or the run has enough folders."""
        full = not folder.exists() and _count_entries(folder.parent) >= MOST
        if not self._steps.maxlen or not self.directory.writes or full:
            return None
        until_room(lambda: self._write(folder, findings))
        return folder

    def _write(self, folder: Path, findings: Sequence[Finding]) -> None:
        with explain_os_errors(folder, "write"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "finding.json").write_text(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
            (folder / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in self._last_step_lines()))
            for held in self._steps:
                write_records(folder / f"rollouts-{held.step:06d}.jsonl.gz", rollout_records(held.groups))
                tensors = {name: tensor.contiguous().clone() for name, tensor in held.tensors.items()}
                save_file(tensors, folder / f"tensors-{held.step:06d}.safetensors")

    def _last_step_lines(self) -> list[bytes]:
        """Return the lines of the last steps in metrics.jsonl, including steps before the run was resumed."""
        lines: list[bytes] = []
        for line in reversed(self.directory.metrics_file.after(0).splitlines()):
            if len(lines) == METRICS_KEPT:
                break
            if (record := parse_line(line)) is not None and record.get("kind") == "step":
                lines.append(line)
        return lines[::-1]

    def forget(self) -> None:
        """Drop the held steps: the run continues from another checkpoint."""
        self._steps.clear()


def _without_routes(group: Group) -> Group:
    """Copy a group without its expert routes, which are large and not needed as evidence."""
    routes = [member.rollout.routes for member in group.members]
    if not any(routes):
        return group
    members = tuple(replace(member, rollout=replace(member.rollout, routes=None)) for member in group.members)
    return replace(group, members=members)


def _count_entries(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
