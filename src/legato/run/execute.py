"""Executes a run from its first step to its last: training, evaluation, records and checkpoints."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from legato.config.resolved import Resolved, dump
from legato.core.generators import remember_generators
from legato.core.rollout import Problem, Unscorable
from legato.core.user_code import RUN, StoppedAtOnce, StopRequestedError
from legato.errors import InputError, describe_error
from legato.health.actions import Health
from legato.health.explain import STOPPED
from legato.health.recovery import NoRecoveryError, recover
from legato.health.rule import Finding
from legato.health.tighten import tighten_clip
from legato.policy.policy import Policy
from legato.records.directory import RunDirectory
from legato.records.rollouts import rollout_record, rollout_records
from legato.records.room import DiskFullError, until_room, waiting_for_room
from legato.rollouts.sampling import Sampling
from legato.run.again import restart_advice
from legato.run.interrupt import Interrupt
from legato.run.loggers import Logger
from legato.run.room import Pause
from legato.run.watcher import GuardedWatcher
from legato.training import checkpoint
from legato.training.evaluate import Evaluator, accuracy_metrics
from legato.training.probe import Floor, UnsafeAnchorError
from legato.training.report import StepReport
from legato.training.source import ExhaustedError, NothingScoredError
from legato.training.step import Trainer

_HISTOGRAMS_EVERY = 10
STOPPED_BY_WATCH = 3
"""The exit code of a run that the health watch ended."""
_STORED_ANSWERS = 16
"""Held-out answers stored with the first and the last rollouts, so that a report can show before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeStep:
    """What a step changes before its first update: the trainer's numbers and the random generators."""

    trainer: dict[str, Any]
    restore_generators: Callable[[], None]

    @property
    def steps_done(self) -> int:
        return int(self.trainer["steps_done"])


@dataclass(slots=True, kw_only=True)
class Execution:
    """The state of a run beside its trainer."""

    resolved: Resolved
    directory: RunDirectory
    policy: Policy
    trainer: Trainer
    evaluator: Evaluator
    held_out: Sequence[Problem]
    watcher: GuardedWatcher
    health: Health = field(init=False)
    loggers: Sequence[Logger] = ()
    callback: Callable[[StepReport], None] | None = None
    best: tuple[float, str] | None = None
    """The best sampled accuracy so far and the name of its checkpoint."""
    latest: dict[str, float] | None = None
    """Metrics of the last evaluation."""
    evaluated_at: int = -1
    saved_at: int = -1
    made_of: Mapping[str, Any] = field(default_factory=dict)
    """Fingerprints of the problems and user files, and names of inputs given in Python; a resumed run must match them."""
    start_record: Mapping[str, Any] = field(default_factory=lambda: {"kind": "start"})
    """The first record of metrics.jsonl, to write again if the file is damaged or deleted."""
    notes_shown: int = 0
    """How many of the policy's notes have been shown. Later notes are shown when they are added."""
    steps_run: int = 0
    """Steps done by this process, including those that a recovery discarded; for the estimate of time left."""
    shown_reasons: set[str] = field(default_factory=set)
    """Reasons of unscorable rollouts that have been shown."""
    before_step: "BeforeStep | None" = None
    """The state before the last step that was begun."""
    noted_printing: bool = False
    """Whether the records say that printing stopped."""

    def __post_init__(self) -> None:
        config = self.resolved.config
        self.health = Health(
            config.health, self.resolved.algorithm, config.training.warm_up_steps, self.directory, self.watcher.message
        )

    def go(self) -> tuple[str, int]:
        """Train to the end; returns (why the run ended, exit code). An error saves what can be saved before it is raised."""
        RUN.say, RUN.rescue = self.watcher.message, self._rescue
        try:
            return self._go()
        finally:
            RUN.forget()

    def _rescue(self, reason: str, code: int) -> None:
        """Save the last complete step and end the process, called from another thread while a reward does not return."""
        try:
            self.watcher.message(self._end_early(reason, trainer=self._trainer_before_step()))
        except BaseException as error:
            self.watcher.message(f"{reason}; the state is not saved: {describe_error(error)}")
        finally:
            os._exit(code)

    def _go(self) -> tuple[str, int]:
        with Interrupt(self.watcher.message) as interrupt:
            pause = Pause(self.watcher.message, lambda: interrupt.received is not None)
            try:
                with waiting_for_room(pause):
                    return self._train(interrupt)
            except DiskFullError as error:
                if interrupt.received is None:
                    raise
                return self._end_on_full_disk(f"stopped by {interrupt.received.name}", error), interrupt.exit_code
            except StopRequestedError as stop:
                # A reward did not return after a signal. Its step or evaluation is given up; the last step is complete.
                reason = f"stopped by {stop.signal.name}"
                return self._end_early(reason, trainer=self._trainer_before_step()), 128 + stop.signal
            except NothingScoredError as error:
                end = {"kind": "end", "reason": str(error), "step": self.trainer.steps_done}
                self.directory.append_metrics(end, sync=True)
                raise
            except UnsafeAnchorError as refusal:
                step = self.trainer.steps_done
                self._show_floor(refusal.floor, step, "sampler")
                self.directory.append_metrics({"kind": "end", "reason": str(refusal), "step": step}, sync=True)
                raise
            except Exception as error:
                error.add_note(self._end_by_error(error))
                raise
            except SystemExit as ending:
                if isinstance(ending, StoppedAtOnce):
                    raise
                fault = InputError(
                    f"expected code that returns, got sys.exit({ending.code!r}) (a task, a callback or an engine of yours)"
                )
                fault.add_note(self._end_by_error(fault))
                raise fault from ending

    def _train(self, interrupt: Interrupt) -> tuple[str, int]:
        steps = self.resolved.config.training.steps
        started = time.perf_counter()
        if self.trainer.steps_done == 0 and self.latest is None:
            self._evaluate(keep=True)
            if self.resolved.config.policy.warm_up is not None or self.health.options.action == "recover":
                # A resumed run does not repeat the warm-up, and a recovery needs a checkpoint to go back to.
                self._save()
        reason = "all steps done"
        while self.trainer.steps_done < steps:
            if self._target_reached():
                reason = "the target was reached"
                break
            if interrupt.reached_any(self.trainer.world):
                break
            if interrupt.take_save_request(self.trainer.world):
                self._save_on_request()
            try:
                stopped = self._act(self._agree_on(self._step(started)), interrupt)
            except ExhaustedError as end:
                reason = str(end)
                break
            if stopped is not None:
                return self._end_early(stopped, {"healthy": self._healthiest()}), STOPPED_BY_WATCH
        if interrupt.reached_any(self.trainer.world) and interrupt.received is not None:
            return self._end_early(f"stopped by {interrupt.received.name}"), interrupt.exit_code
        if self.evaluated_at != self.trainer.steps_done:
            self._evaluate(keep=True)
        self._save()
        seconds = time.perf_counter() - started
        self.directory.append_metrics(
            {"kind": "end", "reason": reason, "step": self.trainer.steps_done, "seconds": seconds}, sync=True
        )
        return reason, 0

    def _healthiest(self) -> int | None:
        """The step of the healthiest earlier checkpoint; None if there is none."""
        step = self.trainer.steps_done
        candidates = self.health.checkpoints_by_health(self.directory.checkpoint_steps(), step)
        return next((each for each in candidates if each < step), None)

    def _end_early(
        self, reason: str, more: Mapping[str, Any] | None = None, *, trainer: Mapping[str, Any] | None = None
    ) -> str:
        saved = "the state is saved"
        try:
            self._save(may_be_best=False, trainer=trainer)
        except checkpoint.NotFiniteError as refusal:
            saved = str(refusal)
        end = {"kind": "end", "reason": reason, "step": self.trainer.steps_done}
        self.directory.append_metrics({**end, **(more or {})}, sync=True)
        return f"{reason}; {saved}"

    def _end_on_full_disk(self, reason: str, error: DiskFullError) -> str:
        """The reason of a run that a signal ended while its disk was full. The state may fit although a record did not."""
        try:
            return self._end_early(reason)
        except DiskFullError:
            return f"{reason} while the disk was full ({error}); {self._newest_checkpoint_words()}"

    def _end_by_error(self, error: Exception) -> str:
        """Save the state of the last finished step, record the end, and return what to do next."""
        failure = self._save_after_error(error)
        with suppress(OSError, InputError):  # the disk may be the cause of it all
            end = {"kind": "end", "reason": f"stopped by an error: {error}", "step": self.trainer.steps_done}
            self.directory.append_metrics(end, sync=True)
        return self._newest_checkpoint_words() if failure is None else f"{failure}; {self._newest_checkpoint_words()}"

    def _save_after_error(self, error: Exception) -> str | None:
        """Save the last finished step; returns why that was impossible, or None."""
        step = self.trainer.steps_done
        if step == 0 and self.resolved.config.policy.warm_up is None:
            return None  # a new run gets here in no time
        if not self.trainer.between_updates:
            return f"the state after step {step} is not saved: the error came while it was being changed"
        try:
            self._save(may_be_best=False, trainer=self._trainer_before_step())
        except Exception as refusal:  # the error that ends the run is the one to tell
            why = "" if str(refusal) == str(error) else f": {refusal}"
            return f"the state after step {step} is not saved{why}"
        return None

    def _trainer_before_step(self) -> Mapping[str, Any] | None:
        """The trainer's state before the step at hand, with the generators set back to it; None between two steps."""
        before = self.before_step
        if before is None or before.steps_done != self.trainer.steps_done:
            return None
        before.restore_generators()
        return before.trainer

    def _newest_checkpoint_words(self) -> str:
        """The newest checkpoint and how to go on from it, or that there is none."""
        steps = self.directory.checkpoint_steps()
        given = list(self.made_of.get("given", ()))
        if not steps:
            again = restart_advice(self.directory.path, self.resolved, given)
            return f"there is no checkpoint to resume from; {again}"
        how = f"from Python with the same {' and '.join(given)}" if given else f"with legato resume {self.directory.path}"
        return f"the state after step {steps[-1]} is saved: resume {how}"

    def _save_on_request(self) -> None:
        """Save as SIGUSR2 asks; the best checkpoint stays the one that a run without the signal would have."""
        try:
            self._save(may_be_best=False)
            self.watcher.message(f"saved step {self.trainer.steps_done}; going on")
        except checkpoint.NotFiniteError as refusal:
            self.watcher.message(str(refusal))

    def _agree_on(self, alarm: Finding | None) -> Finding | None:
        """The alarm of the first rank that has one, so that all ranks act on it together."""
        alarms = self.trainer.world.gather(None if alarm is None else asdict(alarm))
        first = next((each for each in alarms if each is not None), None)
        return None if first is None else Finding(**first)

    def _act(self, alarm: Finding | None, interrupt: Interrupt) -> str | None:
        """Act on an alarm, then save a checkpoint if due; returns why the run must end, or None."""
        action = self.health.options.action
        if alarm is not None and action == "recover":
            self.trainer.between_updates = False  # until all of the checkpoint is loaded
            try:
                recover(self, alarm)
            except NoRecoveryError as reason:
                return f"{STOPPED}: {reason}"
            self.trainer.between_updates = True
            return None
        if alarm is not None and action == "stop":
            return f"{STOPPED}: {alarm.words}"
        step, every = self.trainer.steps_done, self.resolved.config.output.checkpoint_every_steps
        paused = alarm if action == "pause" else None
        try:
            if every and step % every == 0:
                self._save()
            if paused is not None:
                self._save(may_be_best=False)
        except checkpoint.NotFiniteError:
            if paused is None:
                raise
            return f"{STOPPED}: {paused.words}"
        if paused is not None:
            self.health.pause(lambda: interrupt.reached_any(self.trainer.world), self.trainer.world)
        return None

    def _step(self, started: float) -> Finding | None:
        """Run one training step and write its records; returns the alarm it raised, if any."""
        config = self.resolved.config
        every = config.output.rollouts_every_steps
        step = self.trainer.steps_done + 1
        last = step == config.training.steps
        due = bool(every) and (step % every == 0 or last)
        self.before_step = BeforeStep(trainer=self.trainer.state_dict(), restore_generators=remember_generators())
        report = self.trainer.step(config.output.rollout_tokens if due else None)
        if report.floor is not None:
            assert self.trainer.anchor_choice is not None
            self._show_floor(report.floor, step - 1, self.trainer.anchor_choice)
        self._show_unscorable(report.unscorable)
        line: dict[str, Any] = {"kind": "step", "step": step, **report.metrics}
        if step == 1 or step % _HISTOGRAMS_EVERY == 0:
            line["histograms"] = report.histograms()
        self.directory.append_metrics(line)
        alarm = self.health.observe(report)
        for logger in self.loggers:
            logger.log(step, report.metrics)
        evaluate = bool(config.evaluation.every_steps) and (step % config.evaluation.every_steps == 0 or last)
        if evaluate:
            self._evaluate(report if every else None, keep=due or last)
        elif due:
            self.directory.write_rollouts(step, rollout_records(report.groups, report.details))
        self.steps_run += 1
        left = (time.perf_counter() - started) / self.steps_run * (config.training.steps - step)
        self.watcher.step(step, config.training.steps, report.metrics, self.latest, left)
        self._note_printing()
        if self.callback is not None:
            self.callback(report)
        return alarm

    def _show_floor(self, floor: Floor, step: int, anchor: str) -> None:
        lines = floor.lines(anchor)
        bounds = {name: stated.record() for name, stated in floor.bounds.items()}
        record = {"kind": "probe", "step": step, **floor.metrics(), "bounds": bounds, "words": "; ".join(lines)}
        self.directory.append_metrics(record)
        for line in lines:
            self.watcher.message(line)

    def _show_notes(self) -> None:
        """Show the policy's new notes (fallbacks taken) and store them with the run."""
        for note in self.policy.notes[self.notes_shown :]:
            self.watcher.message(note)
            self.directory.append_metrics({"kind": "note", "step": self.trainer.steps_done, "text": note})
        self.notes_shown = len(self.policy.notes)

    def _note_printing(self) -> None:
        """Record once that nothing is printed any more, and why."""
        note = self.watcher.guard.note
        if note is not None and not self.noted_printing:
            self.noted_printing = True
            self.directory.append_metrics({"kind": "note", "step": self.trainer.steps_done, "text": note})

    def _show_unscorable(self, reasons: Iterable[str]) -> None:
        for reason in reasons:
            if reason not in self.shown_reasons and len(self.shown_reasons) < 20:
                self.shown_reasons.add(reason)
                self.watcher.message(f"a rollout could not be scored and is left out: {reason} (shown once)")

    def _evaluate(self, report: StepReport | None = None, keep: bool = False) -> None:
        """Measure held-out accuracy, sampled and greedy, on the same problems and seeds every time."""
        config = self.resolved.config.evaluation
        step, answer = self.trainer.steps_done, self.evaluator.answer
        sampling = Sampling(temperature=config.temperature)
        sampled = answer(self.held_out, sampling, config.samples_per_problem, self._seed, 2 * step)
        metrics = accuracy_metrics("sampled", sampled)
        if config.greedy:
            greedy = answer(self.held_out, Sampling(temperature=0), 1, self._seed, 2 * step + 1)
            metrics |= accuracy_metrics("greedy", greedy)
        metrics["eval/problems"] = float(len(self.held_out))
        self.directory.append_metrics({"kind": "evaluation", "step": step, **metrics})
        for logger in self.loggers:
            logger.log(step, metrics)
        self._show_unscorable([a.score.reason for row in sampled for a in row if isinstance(a.score, Unscorable)])
        self.latest, self.evaluated_at = metrics, step
        self._show_notes()
        if keep or self._target_reached():
            answers = [
                rollout_record(a.rollout, a.score) | {"held_out": True} for row in sampled[:_STORED_ANSWERS] for a in row[:1]
            ]
            trained = self._stored_rollouts(step) if report is None else rollout_records(report.groups, report.details)
            self.directory.write_rollouts(step, [*answers, *trained])

    def _stored_rollouts(self, step: int) -> list[dict[str, Any]]:
        """The training rollouts that a step has already written."""
        stored = self.directory.read_rollouts(step) if step in self.directory.rollout_steps() else []
        return [each for each in stored if not each.get("held_out")]

    @property
    def _seed(self) -> int:
        return self.resolved.config.training.seed

    def _target_reached(self) -> bool:
        config = self.resolved.config.evaluation
        wanted = {"eval/accuracy_sampled": config.target, "eval/accuracy_greedy": config.target_greedy}
        targets = {key: target for key, target in wanted.items() if target is not None}
        latest = self.latest or {}
        return bool(targets) and all(latest.get(key, 0.0) >= target for key, target in targets.items())

    def _save(self, *, may_be_best: bool = True, record: bool = True, trainer: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint and delete old ones. An interrupted run (`may_be_best` False) never updates the best one.

        With `record` False, metrics.jsonl already ends with the record of this checkpoint.
        `trainer` is the trainer's state if the trainer itself is in the middle of a step.
        """
        step = self.trainer.steps_done
        if self.saved_at == step:
            return
        name = checkpoint.name_of(step)
        accuracy = (self.latest or {}).get("eval/accuracy_sampled")
        if (
            may_be_best
            and self.evaluated_at == step
            and accuracy is not None
            and (self.best is None or accuracy > self.best[0])
        ):
            self.best = (accuracy, name)
        folder = self.directory.checkpoint_path(step)
        if record:
            self.directory.append_metrics({"kind": "checkpoint", "step": step}, sync=True)
        state, sampler, config = self.state(trainer), self.trainer.sampler_state(), dump(self.resolved)
        until_room(lambda: checkpoint.save(folder, self.policy, self.trainer.optimizer, state, sampler, config))
        self.saved_at = step
        healthy = self.health.checkpoints_to_keep(self.directory.checkpoint_steps(), step)
        protected = [checkpoint.name_of(each) for each in healthy]
        protected += [] if self.best is None else [self.best[1]]
        checkpoint.purge(folder.parent, self.resolved.config.output.keep_last, protected)

    def save_again(self, *, record: bool = True) -> None:
        """Overwrite the checkpoint of the current step. `record`: as for `_save`."""
        self.saved_at = -1
        self._save(may_be_best=False, record=record)

    @property
    def trust_remote_code(self) -> bool:
        return self.resolved.config.policy.trust_remote_code

    def tighten(self, scale: float) -> None:
        """Multiply the clip bounds of the algorithm by `scale`."""
        self.health.clip_scale = scale
        self.trainer.algorithm = tighten_clip(self.resolved.algorithm, scale)

    def state(self, trainer: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The state of a checkpoint beside weights, optimizer and generators; `trainer` in place of the trainer's own."""
        return {
            "trainer": self.trainer.state_dict() if trainer is None else dict(trainer),
            "best": self.best,
            "latest": self.latest,
            "evaluated_at": self.evaluated_at,
            "metrics_position": self.directory.metrics_file.position(),
            "made_of": dict(self.made_of),
            "threads": torch.get_num_threads() if self.policy.device.type == "cpu" else None,
            "health": self.health.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.trainer.load_state_dict(state["trainer"])
        self.best = None if state["best"] is None else (float(state["best"][0]), str(state["best"][1]))
        self.latest, self.evaluated_at = state["latest"], int(state["evaluated_at"])
        self.saved_at = self.trainer.steps_done
        self.health.load_state(state.get("health", {}))
        self.tighten(self.health.clip_scale)


def newest_model(directory: RunDirectory) -> Path | None:
    """The model folder of the newest checkpoint."""
    steps = directory.checkpoint_steps()
    return directory.checkpoint_path(steps[-1]) / "model" if steps else None
