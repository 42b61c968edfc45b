"""Executes a run from its first step to its last: training, evaluation, records and checkpoints."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

import torch

from legato.config.resolved import Resolved, dump
from legato.config.schema import Evaluation
from legato.core.generators import remember_generators
from legato.core.guardian import guardian
from legato.core.importing import place_in_own_code
from legato.core.out_of_memory import explain_out_of_memory, is_out_of_memory
from legato.core.rollout import Problem, Unscorable
from legato.core.user_code import RUN, StoppedAtOnce, StopRequestedError
from legato.core.world import on_first_rank
from legato.errors import InputError, LostRankError, OtherRankError, describe_error
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
from legato.run.pace import Pace
from legato.run.ranks import explain_losses
from legato.run.room import Pause
from legato.run.watcher import GuardedWatcher
from legato.training import checkpoint
from legato.training.ahead import Ahead
from legato.training.evaluate import HELD_OUT_REWARDS, Evaluator, ProblemSet, accuracy_metrics, outside_accuracy
from legato.training.probe import Floor, UnsafeAnchorError
from legato.training.ranks.join import read_launch
from legato.training.report import StepReport
from legato.training.saver import Saver, has_room_for_copies
from legato.training.source import ExhaustedError, NothingScoredError
from legato.training.step import Trainer

_HISTOGRAMS_EVERY = 10
_NUMBER_OF_SETS = 2**30
"""Evaluations of sets are numbered from here: those on held-out problems have two numbers a step."""
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
    sets: Sequence[ProblemSet]
    watcher: GuardedWatcher
    health: Health = field(init=False)
    saver: Saver = field(init=False)
    loggers: Sequence[Logger] = ()
    callback: Callable[[StepReport], None] | None = None
    best: tuple[float, str] | None = None
    """The best value of `evaluation.best_metric` so far and the name of its checkpoint."""
    latest: dict[str, float] | None = None
    """The latest value of each metric of evaluations."""
    evaluated_at: int = -1
    """The step of the last evaluation on the held-out problems."""
    sets_evaluated_at: dict[str, int] = field(default_factory=dict)
    """The step at which each set was evaluated last."""
    saved_at: int = -1
    made_of: Mapping[str, Any] = field(default_factory=dict)
    """Fingerprints of the problems and user files, and names of inputs given in Python; a resumed run must match them."""
    start_record: Mapping[str, Any] = field(default_factory=lambda: {"kind": "start"})
    """The first record of metrics.jsonl, to write again if the file is damaged or deleted."""
    notes_shown: int = 0
    """How many of the policy's notes have been shown. Later notes are shown when they are added."""
    pace: Pace = field(default_factory=Pace)
    shown_verdict: list[str] = field(default_factory=list)
    """What was last said on the numerics; a probe that says the same prints nothing."""
    shown_reasons: set[str] = field(default_factory=set)
    """Reasons of unscorable rollouts that have been shown."""
    before_step: "BeforeStep | None" = None
    """The state before the last step that was begun."""
    noted_printing: bool = False
    noted_range: bool = False
    """Whether it was said that the reward is no accuracy."""
    """Whether the records say that printing stopped."""
    seconds_before: float = 0.0
    """The seconds of training of earlier sessions, up to the checkpoint that was resumed."""
    started: float | None = None
    """When this session began to train, by `time.perf_counter`."""

    def __post_init__(self) -> None:
        config = self.resolved.config
        self.health = Health(
            config.health, self.resolved.algorithm, config.training.warm_up_steps, self.directory, self.watcher.message
        )
        self.saver = Saver(self.trainer.world, background=self._saves_in_background())

    def _saves_in_background(self) -> bool:
        wanted, world = self.resolved.config.output.save_in_background, self.trainer.world
        if wanted == "off" or (wanted == "auto" and world.size == 1 and self.policy.device.type == "cpu"):
            return False
        launch = read_launch()
        copies = has_room_for_copies(checkpoint.expected_bytes(self.policy), 1 if launch is None else launch.local_size)
        enough = not world.agree(int(not copies))
        if not enough:
            self.policy.notes.append(
                "checkpoints are written while the run waits: a copy of one does not fit into host memory"
                " (output.save_in_background)"
            )
        return enough

    def go(self) -> tuple[str, int]:
        """Train to the end; returns (why the run ended, exit code). An error saves what can be saved before it is raised."""
        RUN.say, RUN.rescue = self.watcher.message, self._rescue
        if self.made_of.get("code") or {"problems", "reward"} & {*self.made_of.get("given", ())}:
            RUN.guardian = guardian()
        RUN.own_parts = self.trainer.algorithm.own_parts()
        try:
            return self._go()
        finally:
            RUN.forget()

    def _rescue(self, reason: str, code: int) -> None:
        """Save the last complete step and end the process; called from another thread while the user's code hangs."""
        try:
            if self.trainer.world.size > 1:
                raise RuntimeError("the other ranks cannot save from inside a step")
            if not self.trainer.between_updates:
                raise RuntimeError("the step has changed some of it already")
            if isinstance(self.trainer.source, Ahead):
                self.trainer.source.wait_for_main_thread()
            self.watcher.message(self._end_early(reason, trainer=self._trainer_before_step()))
        except BaseException as error:
            self.watcher.message(f"{reason}; the state is not saved: {describe_error(error)}")
        finally:
            os._exit(code)

    def _go(self) -> tuple[str, int]:
        with Interrupt(self.watcher.message) as interrupt:
            pause = Pause(self.watcher.message, lambda: interrupt.received is not None)
            try:
                with waiting_for_room(pause), explain_losses(self.trainer.world):
                    return self._train(interrupt)
            except DiskFullError as error:
                if interrupt.received is None:
                    raise
                return self._end_on_full_disk(f"stopped by {interrupt.received.name}", error), interrupt.exit_code
            except StopRequestedError as stop:
                # A reward did not return after a signal. Its step or evaluation is given up; the last step is complete.
                self.trainer.world.fail(stop)
                return self._give_up_step(stop.signal)
            except OtherRankError as error:
                if error.signal is not None:
                    return self._give_up_step(Signals(error.signal))
                error.add_note(self._end_by_error(error))
                raise
            except LostRankError as error:
                # Without that rank nothing can be saved: its pieces of the optimizer are gone.
                self.directory.append_metrics(self._end_record(f"stopped by a lost rank: {error}"), sync=True)
                error.add_note(self._newest_checkpoint_words())
                raise
            except NothingScoredError as error:
                self.directory.append_metrics(self._end_record(str(error)), sync=True)
                raise
            except UnsafeAnchorError as refusal:
                step = self.trainer.steps_done
                self._show_floor(refusal.floor, step, "sampler")
                self.directory.append_metrics(self._end_record(str(refusal)), sync=True)
                raise
            except Exception as error:
                self.trainer.world.fail(error)
                error.add_note(self._end_by_error(error))
                raise
            except BaseException as ending:
                place = place_in_own_code(ending)
                if isinstance(ending, StoppedAtOnce) or (place is None and not isinstance(ending, SystemExit)):
                    raise
                fault = InputError(
                    f"expected code that returns, got {_describe_ending(ending)}"
                    f" ({place or 'a task, a callback or an engine of yours'}); correct it"
                )
                self.trainer.world.fail(fault)
                fault.add_note(self._end_by_error(fault))
                raise fault from ending

    def _give_up_step(self, number: Signals) -> tuple[str, int]:
        """Save the last complete step after a signal, without the step or evaluation at hand."""
        if self.trainer.world.agree(int(not self.trainer.between_updates)):
            # A part did not return in an update after the first: the weights are between two steps.
            self.directory.append_metrics(self._end_record(f"stopped by {number.name}"), sync=True)
            return f"stopped by {number.name} in the middle of a step; {self._newest_checkpoint_words()}", 128 + number
        return self._end_early(f"stopped by {number.name}", trainer=self._trainer_before_step()), 128 + number

    def _train(self, interrupt: Interrupt) -> tuple[str, int]:
        steps = self.resolved.config.training.steps
        self.started = time.perf_counter()
        if self.trainer.steps_done == 0 and self.latest is None:
            self._evaluate(keep=True)
            self._evaluate_sets(self.sets)
            warmed_up = self.resolved.config.policy.warm_up is not None
            if (warmed_up and self.resolved.config.output.checkpoint_at_end) or self.health.options.action == "recover":
                # A resumed run does not repeat the warm-up, and a recovery needs a checkpoint to go back to.
                self._save()
        reason = "all steps done"
        while self.trainer.steps_done < steps:
            if self._target_reached():
                reason = "the target was reached"
                break
            if interrupt.reached_any(self.trainer.world):
                break
            until_room(self.saver.poll)
            if interrupt.take_save_request(self.trainer.world):
                self._save_on_request()
            try:
                stopped = self._act(self._agree_on(self._step()), interrupt)
            except ExhaustedError as end:
                reason = str(end)
                break
            if stopped is not None:
                return self._end_early(stopped, {"healthy": self._healthiest()}), STOPPED_BY_WATCH
        if interrupt.reached_any(self.trainer.world) and interrupt.received is not None:
            return self._end_early(f"stopped by {interrupt.received.name}"), interrupt.exit_code
        if self.evaluated_at != self.trainer.steps_done:
            self._evaluate(keep=True)
        at = self.trainer.steps_done
        self._evaluate_sets([each for each in self.sets if self.sets_evaluated_at.get(each.name) != at])
        if self.resolved.config.output.checkpoint_at_end:
            self._save()
        until_room(self.saver.complete)
        self._show_best()
        self.directory.append_metrics({**self._end_record(reason), **self._best_record()}, sync=True)
        return reason, 0

    def _end_record(self, reason: str) -> dict[str, Any]:
        return {"kind": "end", "reason": reason, "step": self.trainer.steps_done, "seconds": self._seconds()}

    def _seconds(self) -> float:
        """The seconds of training so far, those of earlier sessions included."""
        return self.seconds_before + (0.0 if self.started is None else time.perf_counter() - self.started)

    def _healthiest(self) -> int | None:
        """The step of the healthiest earlier checkpoint; None if there is none."""
        step = self.trainer.steps_done
        candidates = self.health.checkpoints_by_health(self.checkpoint_steps(), step)
        return next((each for each in candidates if each < step), None)

    def checkpoint_steps(self) -> list[int]:
        """The steps with a checkpoint, as rank 0 sees them."""
        steps: list[int] = on_first_rank(self.trainer.world, self.directory.checkpoint_steps)
        return steps

    def _end_early(
        self, reason: str, more: Mapping[str, Any] | None = None, *, trainer: Mapping[str, Any] | None = None
    ) -> str:
        saved = "the state is saved"
        try:
            self._save(may_be_best=False, trainer=trainer)
        except checkpoint.NotFiniteError as refusal:
            saved = str(refusal)
        until_room(self.saver.complete)
        self.directory.append_metrics({**self._end_record(reason), **(more or {})}, sync=True)
        return f"{reason}; {saved}"

    def _end_on_full_disk(self, reason: str, error: DiskFullError) -> str:
        """The reason of a run that a signal ended while its disk was full. The state may fit although a record did not."""
        try:
            return self._end_early(reason)
        except DiskFullError:
            return f"{reason} while the disk was full ({error}); {self._newest_checkpoint_words()}"

    def _end_by_error(self, error: Exception) -> str:
        """Save the state of the last finished step, record the end, and return what to do next."""
        try:
            failure = self._save_after_error(error)
        except LostRankError:
            failure = f"the state after step {self.trainer.steps_done} is not saved: the ranks cannot meet any more"
        with suppress(OSError, InputError):  # the disk may be the cause of it all
            self.directory.append_metrics(self._end_record(f"stopped by an error: {error}"), sync=True)
        return self._newest_checkpoint_words() if failure is None else f"{failure}; {self._newest_checkpoint_words()}"

    def _save_after_error(self, error: Exception) -> str | None:
        """Save the last finished step; returns why that was impossible, or None."""
        step = self.trainer.steps_done
        if step == 0 and self.resolved.config.policy.warm_up is None:
            return None  # a new run gets here in no time
        if self.trainer.world.agree(int(not self.trainer.between_updates)):
            # The checkpoint that is being written is a copy from before.
            with suppress(Exception):
                self.saver.complete()
            return f"the state after step {step} is not saved: the error came while it was being changed"
        try:
            self._save(may_be_best=False, trainer=self._trainer_before_step())
            self.saver.complete()
        except Exception as refusal:  # the error that ends the run is the one to tell
            same = str(refusal) == str(error) or (is_out_of_memory(refusal) and is_out_of_memory(error))
            words = explain_out_of_memory(refusal) if is_out_of_memory(refusal) else refusal
            why = "" if same else f": {words}"
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
        from_python = list(self.made_of.get("given", ()))
        if not steps:
            again = restart_advice(self.directory.path, self.resolved, from_python)
            return f"there is no checkpoint to resume from; {again}"
        how = (
            f"from Python with the same {' and '.join(from_python)}"
            if from_python
            else f"with legato resume {self.directory.path}"
        )
        return f"the state after step {steps[-1]} is saved: resume {how}"

    def _save_on_request(self) -> None:
        """Save as SIGUSR2 asks; the best checkpoint stays the one that a run without the signal would have."""
        try:
            self._save(may_be_best=False)
            until_room(self.saver.complete)
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
            until_room(self.saver.complete)
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
            until_room(self.saver.complete)
            self.health.pause(lambda: interrupt.reached_any(self.trainer.world), self.trainer.world)
        return None

    def _step(self) -> Finding | None:
        """Run one training step and write its records; returns the alarm it raised, if any."""
        config = self.resolved.config
        every = config.output.rollout_interval(config.training.steps)
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
            self._store_rollouts(step, rollout_records(report.groups, report.details))
        self._evaluate_sets([each for each in self.sets if each.is_due(step, last=last)])
        left = self.pace.seconds_left(time.perf_counter(), config.training.steps - step)
        self.watcher.step(step, config.training.steps, report.metrics, self.latest, left)
        self._note_printing()
        if self.callback is not None:
            self.callback(report)
        return alarm

    def _show_floor(self, floor: Floor, step: int, anchor: str) -> None:
        bounds = {name: stated.record() for name, stated in floor.bounds.items()}
        words = "; ".join(floor.lines(anchor))
        self.directory.append_metrics({"kind": "probe", "step": step, **floor.metrics(), "bounds": bounds, "words": words})
        verdict = floor.verdict(anchor)
        for line in verdict if verdict != self.shown_verdict else ():
            self.watcher.message(line)
        self.shown_verdict = verdict

    def _show_notes(self) -> None:
        """Show the policy's new notes (fallbacks taken) and store them with the run."""
        notes_by_rank = self.trainer.world.gather(self.policy.notes[self.notes_shown :])
        self.notes_shown = len(self.policy.notes)
        for rank, notes in enumerate(notes_by_rank):
            # All ranks take most fallbacks together: those of rank 0 stand for all.
            for note in notes if rank == 0 else [f"rank {rank}: {each}" for each in notes if each not in notes_by_rank[0]]:
                self.watcher.message(note)
                self.directory.append_metrics({"kind": "note", "step": self.trainer.steps_done, "text": note})

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
        self._show_range(outside_accuracy(sampled))
        self.directory.append_metrics({"kind": "evaluation", "step": step, **metrics})
        for logger in self.loggers:
            logger.log(step, metrics)
        self._show_unscorable([a.score.reason for row in sampled for a in row if isinstance(a.score, Unscorable)])
        self.latest, self.evaluated_at = {**(self.latest or {}), **metrics}, step
        self._show_notes()
        if keep or self._target_reached():
            answers = [
                rollout_record(a.rollout, a.score) | {"held_out": True} for row in sampled[:_STORED_ANSWERS] for a in row[:1]
            ]
            trained = self._stored_rollouts(step) if report is None else rollout_records(report.groups, report.details)
            self._store_rollouts(step, [*answers, *trained])

    def _show_range(self, verdict: float | None) -> None:
        """Say once that the reward leaves 0 to 1, so that its mean is no accuracy."""
        if verdict is None or self.noted_range:
            return
        self.noted_range = True
        self.watcher.message(
            f"the reward judged an answer with {verdict:g}: for accuracy, verdicts above 1 count as 1 and those below 0 as"
            " 0; eval/reward_sampled is the mean reward, and evaluation.best_metric can name it"
        )

    def _store_rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        if not self.directory.writes:
            return
        self.directory.write_rollouts(step, records)
        for logger in self.loggers:
            logger.log_completions(step, records)

    def _evaluate_sets(self, sets: Sequence[ProblemSet]) -> None:
        """Measure evaluation sets, each on its own problems and random stream, and record all of them together."""
        step, metrics = self.trainer.steps_done, dict[str, float]()
        for each in sets:
            number = _NUMBER_OF_SETS + step * len(self.sets) + self.sets.index(each)
            answered = each.answer(self._seed, number)
            metrics |= each.metrics(answered)
            self._show_unscorable([a.score.reason for row in answered for a in row if isinstance(a.score, Unscorable)])
            self.sets_evaluated_at[each.name] = step
        if not sets:
            return
        self.directory.append_metrics({"kind": "evaluation", "step": step, **metrics})
        for logger in self.loggers:
            logger.log(step, metrics)
        self.latest = {**(self.latest or {}), **metrics}
        self._show_notes()

    def _measured_now(self, metric: str) -> float | None:
        """The value of a metric of an evaluation if it was measured after the last step."""
        name = metric.split("/")[1] if metric.count("/") == 2 else None
        at = self.evaluated_at if name is None else self.sets_evaluated_at.get(name)
        return (self.latest or {}).get(metric) if at == self.trainer.steps_done else None

    def _best_record(self) -> dict[str, Any]:
        """The best checkpoint for the record of the end, if it was chosen by the metric of a set or by greedy accuracy."""
        metric = self.resolved.config.evaluation.best_metric
        if self.best is None or metric == Evaluation().best_metric:
            return {}
        return {"best": {"checkpoint": self.best[1], "metric": metric, "value": self.best[0]}}

    def _show_best(self) -> None:
        for best in self._best_record().values():
            value = f"{best['value']:.4g}" if best["metric"] in HELD_OUT_REWARDS else f"{best['value']:.1%}"
            self.watcher.message(f"the best checkpoint is {best['checkpoint']}: {best['metric']} = {value}")

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
        value = self._measured_now(self.resolved.config.evaluation.best_metric)
        if may_be_best and value is not None and (self.best is None or value > self.best[0]):
            self.best = (value, name)
        folder = self.directory.checkpoint_path(step)
        if record:
            self.directory.append_metrics({"kind": "checkpoint", "step": step, "seconds": self._seconds()}, sync=True)
        snapshot = checkpoint.take_snapshot(
            self.policy,
            self.trainer.optimizer,
            self.state(trainer),
            self.trainer.sampler_state(),
            dump(self.resolved),
            world=self.trainer.world,
            copy=self.saver.background,
        )
        until_room(lambda: self.saver.save(folder, snapshot, lambda: self._purge(step)))
        self.saved_at = step

    def _purge(self, step: int) -> None:
        """Delete the checkpoints that are not needed any more after the one of `step` was written."""
        healthy = self.health.checkpoints_to_keep(self.checkpoint_steps(), step)
        protected = [checkpoint.name_of(each) for each in healthy]
        protected += [] if self.best is None else [self.best[1]]
        if self.directory.writes:
            checkpoints = self.directory.checkpoint_path(step).parent
            checkpoint.purge(checkpoints, self.resolved.config.output.keep_last, protected)
        if isinstance(self.trainer.source, Ahead):
            self.trainer.source.on_saved(on_first_rank(self.trainer.world, self._source_states))

    def _source_states(self) -> list[dict[str, Any]]:
        """Where sampling ahead stood in each of the newest checkpoints, which a resumed run may begin with."""
        newest = self.directory.checkpoint_steps()[-self.resolved.config.output.keep_last :]
        states = [checkpoint.read_state(self.directory.checkpoint_path(each)) for each in newest]
        return [{"ahead": each["trainer"]["collector"].get("ahead", {})} for each in states]

    def save_again(self, *, record: bool = True) -> None:
        """Overwrite the checkpoint of the current step. `record`: as for `_save`."""
        self.saved_at = -1
        self._save(may_be_best=False, record=record)
        until_room(self.saver.complete)

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
            "best_metric": self.resolved.config.evaluation.best_metric,
            "latest": self.latest,
            "evaluated_at": self.evaluated_at,
            "sets_evaluated_at": dict(self.sets_evaluated_at),
            "metrics_position": self.directory.metrics_file.position(),
            "made_of": dict(self.made_of),
            "threads": torch.get_num_threads() if self.policy.device.type == "cpu" else None,
            "health": self.health.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.trainer.load_state_dict(state["trainer"])
        self.best = None if state["best"] is None else (float(state["best"][0]), str(state["best"][1]))
        if state.get("best_metric", Evaluation().best_metric) != self.resolved.config.evaluation.best_metric:
            self.best = None  # values of another metric cannot be compared
        self.latest, self.evaluated_at = state["latest"], int(state["evaluated_at"])
        self.sets_evaluated_at = {str(name): int(step) for name, step in state.get("sets_evaluated_at", {}).items()}
        self.saved_at = self.trainer.steps_done
        self.health.load_state(state.get("health", {}))
        self.tighten(self.health.clip_scale)


def _describe_ending(ending: BaseException) -> str:
    return f"sys.exit({ending.code!r})" if isinstance(ending, SystemExit) else describe_error(ending)


def newest_model(directory: RunDirectory) -> Path | None:
    """The model folder of the newest checkpoint."""
    steps = directory.checkpoint_steps()
    return directory.checkpoint_path(steps[-1]) / "model" if steps else None
