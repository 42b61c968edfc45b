"""The health watch in a run: reports and records findings, and does what `health.action` says at an alarm.

It reads the metrics of a finished step, plain numbers that are already on the host. Every checkpoint stores its state, so a
resumed run finds what an uninterrupted run finds and acts on alarms that nobody has acted on.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from legato.algorithms.algorithm import Algorithm
from legato.core.fields import choice, flag, integer, number, texts
from legato.core.scope import Scope
from legato.core.settings import settings
from legato.core.world import World
from legato.health.evidence import Evidence
from legato.health.rule import Finding
from legato.health.rules import MARGIN
from legato.health.watch import REST, Watch, worst
from legato.records.directory import RunDirectory
from legato.training.report import StepReport

GO_ON = "continue"
"""The file in the run directory that ends a pause."""
_CHECK_EVERY_SECONDS = 0.5


def inapplicable_rules(algorithm: Algorithm) -> tuple[str, ...]:
    """Return the names of the rules that have no meaning for an algorithm."""
    names = []
    if not algorithm.objective.ratio.reads_anchor:
        names.append("anchor-off")  # a ratio beside that of its siblings (gepo) is not 1 before anything is trained
    if any(part.scope is Scope.UPDATE and not part.reads_ratio for part in algorithm.objective.trust):
        names += ["anchor-off", "clip-half"]  # tokens left out for their entropy or covariance count as clipped
    return tuple(names)


@settings(resume="free")
class HealthSettings:
    """What the health watch does (docs/health.md has its rules)."""

    action: str = choice(
        "say",
        "pause",
        "stop",
        "recover",
        default="say",
        says="At an alarm: say so; wait for a person; end with exit code 3; or go back to a healthy checkpoint and go on.",
    )
    ignored: tuple[str, ...] = texts(default=(), says="Names of rules that are not checked.")
    evidence_steps: int = integer(
        default=3,
        says="An alarm stores rollouts, tensors and metrics of this many steps in evidence/; 0: none.",
        minimum=0,
    )
    recoveries: int = integer(
        default=3, says="The most recoveries of a run; at the next alarm it ends with exit code 3.", minimum=1
    )
    lr_factor: float = number(
        default=0.5, says="What the learning rate is multiplied by at each recovery.", above=0.0, maximum=1.0
    )
    clip_factor: float = number(
        default=1.0, says="What the bounds of the clip are multiplied by at each recovery.", above=0.0, maximum=1.0
    )
    skip_data: bool = flag(
        default=True,
        says="Whether the problems of the steps given up are left out after a recovery, and others drawn.",
    )


class Health:
    """The health watch of one run, and the recoveries it has made."""

    def __init__(
        self,
        options: HealthSettings,
        algorithm: Algorithm,
        warm_up_steps: int,
        directory: RunDirectory,
        say: Callable[[str], None],
    ) -> None:
        self.options = options
        self.watch = Watch(settled=warm_up_steps, ignored=[*options.ignored, *inapplicable_rules(algorithm)])
        self.evidence = Evidence(directory, options.evidence_steps)
        self.directory, self.say = directory, say
        self.recoveries: list[dict[str, Any]] = []
        """A record of each recovery, in order."""
        self.clip_scale = 1.0
        self.answered: set[str] = set()
        """Alarms from whose pause a person let the run go on."""

    def observe(self, report: StepReport) -> Finding | None:
        """Report and record the findings of a step, with evidence; return the gravest alarm that begins with it."""
        self.evidence.hold(report)
        findings = self.watch.observe(report.step, report.metrics)
        self.answered &= {*self.watch.active}
        alarm = worst(finding for finding in findings if finding.level == "alarm")
        folder = None if alarm is None else self.evidence.write(self.evidence_folder(report.step), findings)
        for finding in findings:
            record: dict[str, Any] = {"kind": "finding", **asdict(finding)}
            if finding.level == "alarm" and folder is not None:
                record["evidence"] = str(folder.relative_to(self.directory.path))
            self.directory.health.append(record, sync=True)
            if finding.level != "note":
                self.say(f"{finding.level} at step {finding.step}: {finding.words} ({finding.rule})")
        if folder is not None:
            self.say(f"evidence: {folder}")
        return alarm

    def evidence_folder(self, step: int) -> Path:
        """Return the evidence folder of an alarm at this step."""
        return self.directory.evidence_path(step, len(self.recoveries) + 1)

    def _healthy_before(self, step: int) -> int:
        """Return the newest step whose checkpoint counts as healthy, seen from `step`."""
        signs = [self.watch.since[name] for name in self.watch.active if self._is_grave(name, step)]
        return min([step, *signs]) - (MARGIN << len(self.recoveries))

    def _is_grave(self, name: str, step: int) -> bool:
        """Whether an active rule belongs to the present trouble. Notes and rules that have long held do not."""
        level = next(rule.level for rule in self.watch.rules if rule.name == name)
        return level != "note" and self.watch.since[name] > step - REST

    def checkpoints_to_keep(self, steps: Sequence[int], step: int) -> list[int]:
        """Return the checkpoints that must not be purged: the newest healthy one, if the run may go back to it.

        A run that ends or pauses at an alarm saves once more; that checkpoint must not displace the healthy one.
        """
        if self.options.action == "say":
            return []
        return self.checkpoints_by_health(steps, step)[:1]

    def checkpoints_by_health(self, steps: Sequence[int], step: int) -> list[int]:
        """Order checkpoint steps (ascending) by how good they are to go back to from `step`: healthy ones from the newest
        on, then the too new ones from the oldest on."""
        limit = self._healthy_before(step)
        return [*reversed([each for each in steps if each <= limit]), *(each for each in steps if each > limit)]

    def pause(self, interrupted: Callable[[], bool], world: World) -> None:
        """Wait until a person creates the file `continue` or the run is interrupted."""
        file = self.directory.path / GO_ON
        if self.directory.writes:
            file.unlink(missing_ok=True)
        self.say(f"paused, with the state saved: `touch {file}` goes on, SIGINT ends the run")
        # Ranks check at different moments, so they agree on what any of them has seen.
        while not (answered := bool(world.agree(int(file.exists())))) and not interrupted():
            time.sleep(_CHECK_EVERY_SECONDS)
        if answered:
            if self.directory.writes:
                file.unlink(missing_ok=True)
            self.answered |= self.watch.alarms()
            self.say("going on")

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {
            "watch": self.watch.state(),
            "recoveries": list(self.recoveries),
            "clip_scale": self.clip_scale,
            "answered": sorted(self.answered),
            "position": self.directory.health.position(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state()` returned. An empty mapping, from a run older than the watch, changes nothing."""
        if not state:
            return
        self.watch.load(state["watch"])
        if self.options.action != "say":
            # An alarm is reported once, when it begins. Without `renew`, an alarm that ended the run or was only reported
            # so far would stay active in silence and never be acted on.
            self.answered = {*state.get("answered", ())}
            self.watch.renew(self.answered)
        self.recoveries, self.clip_scale = list(state["recoveries"]), float(state["clip_scale"])
