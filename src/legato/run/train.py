"""Starts and resumes runs: `legato train`, `legato resume`, and `legato.train(...)` from Python."""

import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from legato.algorithms.catalogue import is_published
from legato.config import changes, lora_lr
from legato.config.absolute import absolute_paths
from legato.config.from_trl import distinct_names, read_trl
from legato.config.load import load
from legato.config.resolved import Resolved, dump
from legato.config.unusual import unusual_values
from legato.core.generators import seed_generators
from legato.core.importing import OwnCode, code_at, imported_modules, is_import_path, search_beside
from legato.core.rollout import Problem
from legato.core.world import World, on_first_rank, wait_for_all
from legato.diagnostics.words import count, show_bytes
from legato.errors import InputError, OtherRankError
from legato.health.goback import find_checkpoint, give_up, positions_at
from legato.pages.report import write_report
from legato.pages.summary import seconds_of_training
from legato.policy.model.reference import Reference
from legato.policy.policy import Policy
from legato.records.begun import begun_steps, clear_begun
from legato.records.directory import RunDirectory, unused_name
from legato.records.lines import Lines, RunDirectoryError
from legato.records.lock import hold_lock
from legato.records.repair import mend
from legato.records.room import DiskFullError, waiting_for_room
from legato.rewards.scoring import Component, WeightedSum
from legato.rewards.separate import SeparateReward
from legato.rewards.trl import reads_a_column
from legato.run import inputs, ranks, wire
from legato.run.again import restart_advice
from legato.run.display import for_terminal
from legato.run.execute import Execution, newest_model
from legato.run.from_trl import resolve_trl
from legato.run.interrupt import ImmediateInterrupt, Interrupt
from legato.run.loggers import Logger, TensorBoardLogger, TrackioLogger, WandbLogger
from legato.run.memory import decide_checkpointing
from legato.run.origin import prepare
from legato.run.plan import checkpoint_moments, describe_plan
from legato.run.room import Pause
from legato.run.sampler import EngineVoice, closing_engine
from legato.run.sizes import check_sizes
from legato.run.watcher import DisplaySettings, GuardedWatcher, Silent, Watcher
from legato.tasks.source import Source
from legato.training import checkpoint
from legato.training.ranks.join import DEADLINE_SECONDS, joined, read_launch
from legato.training.report import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of a run."""

    directory: Path
    accuracy: float | None
    """Accuracy of sampled responses on held-out problems, at the end."""
    accuracy_greedy: float | None
    model_folder: Path | None
    """A plain Hugging Face folder; under LoRA the adapter (`legato export` merges it)."""
    reason: str
    """Why the run ended."""
    exit_code: int
    rank: int = 0
    """The rank of this process; rank 0 shows and writes what a run shows and writes."""


def train(
    model: Any = None,
    problems: Sequence[Problem | Mapping[str, Any]] | Any = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | str | None = None,
    algorithm: Any = None,
    *,
    recipe: str | Path | Sequence[str | Path] = (),
    trl: Any = None,
    tokenizer: Any = None,
    callback: Callable[[StepReport], None] | None = None,
    watcher: Watcher | None = None,
    resume_if_exists: bool = False,
    allow_changes: bool = False,
    progress: bool = True,
    **options: Any,
) -> Run:
    """Train a model by reinforcement learning; the same path as `legato train`.

    model       a folder, a hub name, "tiny", "smollm2", or a module of transformers
    problems    a list of problems, or of mappings with "prompt" and "answer" (other keys become fields); or a task, an
                object with `problem(random)` or `load()` as the classes of `legato.tasks` have
    reward      a callable of one rollout, or of TRL's (prompts, completions, **columns); a list of such, of which one
                judges the answer: the first that names a column of the data, such as `answer`, else the first of all; or
                the name of a reward ("number", "math-verify", "module:name")
    algorithm   a name, or a value made by `legato.algorithm` or as `legato.Algorithm(name="mine", ...)`
    recipe      TOML files, read from left to right
    trl         a configuration of TRL to start from: a GRPOConfig, a mapping, or a JSON or YAML file (docs/migrating.md)
    options     any path of the configuration: **{"training.lr": 1e-6}
    callback    called with the report of each step
    resume_if_exists    whether the run of that `output.name` goes on if it is there; `allow_changes`: also with options that
                train differently
    progress    print progress as `legato train` does: a panel on a terminal, a line now and then in notebooks and files
                (output.log_every_seconds, output.log_every_steps); False: nothing. A `watcher` shows it in its own way

    >>> run = train(problems=[{"prompt": "2+3=", "answer": "5"}, ...], reward=fn)        # doctest: +SKIP
    """
    given_model = model if isinstance(model, torch.nn.Module) else None
    overrides = dict(options)
    if model is not None and given_model is None:
        overrides["policy.model"] = str(model)
    if algorithm is not None:
        overrides["algorithm"] = algorithm
    if isinstance(reward, str):
        overrides["reward.kind"] = reward
    translation = None if trl is None else read_trl(trl)
    if translation is not None and isinstance(reward, list | tuple):
        translation = translation.for_rewards(_reward_names(reward))
    weights = None if translation is None else translation.reward_weights
    objects = wire.PythonObjects(
        model=given_model,
        tokenizer=tokenizer,
        problems=_as_problems(problems),
        reward=None if isinstance(reward, str) else _as_reward(reward, weights),
    )
    files = [Path(file) for file in ([recipe] if isinstance(recipe, str | Path) else recipe)]
    notes: list[str] = []
    if translation is None:
        resolved = load(files, (), overrides)
    else:
        resolved, notes = resolve_trl(translation, files, (), overrides, objects)
    notes += _note_of_judge(objects.reward)
    begin = partial(start_or_resume, allow_changes=allow_changes) if resume_if_exists else start
    if watcher is not None or not progress:
        return begin(resolved, objects, watcher or Silent(), callback, notes=notes)
    display = for_terminal()
    try:
        return begin(resolved, objects, display, callback, notes=notes)
    finally:
        with suppress(Exception):  # a lost log is no fault of the run
            display.close()  # an error before the first step leaves no panel on the terminal


def _as_reward(reward: Any, weights: Sequence[float] | None) -> Any:
    """A reward unchanged, or a list of rewards by name with their weights, 1 by default. One of them judges the answer."""
    if reward is None or callable(reward):
        return reward
    if not isinstance(reward, list | tuple) or not reward or not all(map(callable, reward)):
        raise InputError(
            f"expected a callable of one rollout, a list of callables or the name of a reward, got {reward!r} (reward)"
        )
    if weights is not None and len(weights) != len(reward):
        raise InputError(f"expected {len(reward)} reward_weights, one for each reward of the list, got {len(weights)}")
    names = _reward_names(reward)
    values = [1.0] * len(reward) if weights is None else [float(weight) for weight in weights]
    judge = next((name for name, each in zip(names, reward, strict=True) if reads_a_column(each)), names[0])
    parts = zip(names, reward, values, strict=True)
    return {name: Component(reward=each, weight=weight, judges=name == judge) for name, each, weight in parts}


def _note_of_judge(reward: Any) -> list[str]:
    """Which of several rewards judges the answer, as a sentence; none for one reward."""
    if not isinstance(reward, Mapping) or len(reward) < 2:
        return []
    judge = next(name for name, each in reward.items() if each.judges)
    return [
        f"the reward {judge} decides whether an answer is right, so accuracy is its mean; the others shape"
        " (reward.components.NAME.judges in a recipe)"
    ]


def _reward_names(rewards: Sequence[Any]) -> list[str]:
    """The component names of a list of rewards, in its order."""
    return distinct_names([str(getattr(each, "__name__", type(each).__name__)) for each in rewards])


def _as_problems(problems: Any) -> Any:
    """A task unchanged, or the items of a list converted to problems."""
    if problems is None or hasattr(problems, "problem") or hasattr(problems, "load"):
        return problems
    if not isinstance(problems, Iterable):
        raise InputError(
            f"expected a list of problems or a task with problem(random) or load(), got {problems!r} (problems of train)"
        )
    return [_as_problem(number, each) for number, each in enumerate(problems)]


def _as_problem(number: int, item: Problem | Mapping[str, Any]) -> Problem:
    if isinstance(item, Problem):
        return item
    if not isinstance(item, Mapping) or "prompt" not in item:
        raise InputError(f"problems[{number}] = {item!r}: a Problem, or a mapping with 'prompt' (and 'answer'), is needed")
    prompt = item["prompt"]
    if not isinstance(prompt, str | list | tuple) or not prompt:
        raise InputError(f"problems[{number}]: prompt = {prompt!r}; text, or a list of chat messages, is needed")
    answer = item.get("answer")
    # A reward of TRL gets the column as it is: a number stays a number.
    hidden = ("prompt", "answer") if answer is None or isinstance(answer, str) else ("prompt",)
    rest = {key: value for key, value in item.items() if key not in hidden}
    return Problem(prompt=item["prompt"], answer=None if answer is None else str(answer), fields=rest)


def start(
    resolved: Resolved,
    objects: wire.PythonObjects,
    watcher: Watcher,
    callback: Callable[[StepReport], None] | None = None,
    *,
    notes: Sequence[str] = (),
    begin_again: bool = False,
    dry_run: bool = False,
) -> Run:
    """Start a new run. All input is checked before the run directory is created; a dry run ends there and shows its plan.

    `notes` are told and recorded first. A directory of the same name that was begun and has recorded no step is used again.
    With `begin_again`, so is one that has recorded steps and has no checkpoint: its records move to given-up/.
    """
    with joined(deadline=resolved.config.training.rank_deadline_seconds, say=watcher.message) as world:
        if (begun := ranks.find_restarted(world, Path(resolved.config.output.directory))) is not None:
            return resume(begun, watcher=watcher, objects=objects, callback=callback, wanted=resolved)
        if world.rank:
            watcher, callback = Silent(), None
        return _start(world, resolved, objects, watcher, callback, notes=notes, begin_again=begin_again, dry_run=dry_run)


def _start(
    world: World,
    resolved: Resolved,
    objects: wire.PythonObjects,
    watcher: Watcher,
    callback: Callable[[StepReport], None] | None,
    *,
    notes: Sequence[str],
    begin_again: bool,
    dry_run: bool,
) -> Run:
    watcher = GuardedWatcher(watcher)
    resolved = absolute_paths(resolved)
    config = resolved.config
    ranks.compare_configurations(world, resolved)
    check_sizes(resolved, own_model=objects.model is not None, own_problems=objects.problems is not None)
    seed_generators(config.training.seed)
    reward = wire.reward_of(config, objects)
    source = wire.source_of(config, objects)
    policy = wire.policy_of(resolved, objects)
    policy.notes += [*notes, *wire.reward_notes(reward), *ranks.describe(world, config)]
    decide_checkpointing(resolved, policy, world)
    if objects.problems is None:
        wire.check_answers(source, reward)
    today = on_first_rank(world, lambda: time.strftime("%Y-%m-%d"))
    collector = wire.collector_of(config, policy, source, reward, date=today, world=world)
    if collector.runner.rendering.asks_for_date:
        policy.notes.append(inputs.date_note(today))
    held_out = wire.held_out_of(config, source, collector.runner.rendering, policy.notes)
    sets = wire.sets_of(config, policy, collector.evaluation or collector.runner, collector.judge, world)
    wire.check_training(resolved, policy, collector)
    ranks.compare_inputs(world, policy, source)
    ranks.compare_evaluations(world, held_out, sets)
    if config.policy.lora is not None and config.policy.warm_up is not None and wire.wants_reference(resolved):
        raise InputError(
            "expected at most two of policy.lora, policy.warm_up and a KL term, got all three; drop one of them:"
            " the reference of adapters is the model without them, which was not warmed up"
        )
    if dry_run:
        return replace(_show_plan(resolved, objects, policy, source, held_out, watcher), rank=world.rank)
    with _directory_of(world, resolved, objects, begin_again) as directory, closing_engine(collector):
        ranks.observe(world, config, directory)
        wire.open_journal(collector, directory)
        _record_environment(directory, resolved, policy.device)  # first: it marks the folder as a run's (`records/begun.py`)
        directory.write_config(dump(resolved))
        told, notes_shown = [*_notes(resolved, policy.notes), _checkpoint_note(resolved, policy)], len(policy.notes)
        code = _own_files(resolved, objects, reward)
        made_of = _made_of(resolved, objects, source, code)
        if collector.runner.rendering.asks_for_date:
            made_of["date"] = today
        loggers = _loggers(resolved, directory, watcher, 0)
        start_record = _start_record(resolved, objects, directory, policy.name, told, code)
        start_record["started"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        directory.append_metrics(start_record)
        voice = EngineVoice(directory, watcher)
        voice.begin(lambda: 0)
        watcher.configure(_display_settings(resolved))
        shown = [*told, *_deviation_lines(resolved), *_early_end(resolved)]
        watcher.start(f"{directory.name}: {resolved.algorithm.name} on {policy.name}", shown)
        with ImmediateInterrupt(watcher.message) as interrupt:
            pause = Pause(watcher.message, lambda: interrupt.received is not None)
            try:
                with waiting_for_room(pause):
                    collector.runner.engine.open(voice.place_of(collector))
                    reference, hashes = prepare(resolved, objects, policy, source, collector, directory, watcher)
            except (KeyboardInterrupt, OtherRankError) as error:
                if not ranks.is_interrupted(world, interrupt, error):
                    raise
                return _end_before_first_step(resolved, objects, directory, watcher, loggers, interrupt, world.rank)
        execution = Execution(
            resolved=resolved,
            directory=directory,
            policy=policy,
            trainer=wire.trainer_of(resolved, policy, collector, reference),
            evaluator=wire.evaluator_of(collector),
            held_out=held_out,
            sets=sets,
            watcher=watcher,
            loggers=loggers,
            callback=callback,
            made_of={**made_of, **hashes},
            start_record=start_record,
            notes_shown=notes_shown,
        )
        voice.begin(lambda: execution.trainer.steps_done)
        return _finish(execution)


@contextmanager
def _directory_of(
    world: World, resolved: Resolved, objects: wire.PythonObjects, begin_again: bool
) -> Iterator[RunDirectory]:
    """The run directory: rank 0 makes it, holds its lock and writes to it."""
    if world.rank:
        yield RunDirectory(Path(on_first_rank(world, str)), writes=False)
        return
    with _own_directory(Path(resolved.config.output.directory), _run_name(resolved, objects), begin_again) as directory:
        on_first_rank(world, lambda: str(directory.path.absolute()))
        yield directory


@contextmanager
def _own_directory(parent: Path, name: str, begin_again: bool) -> Iterator[RunDirectory]:
    """A new run directory and its lock. An error before the first evaluation deletes the directory: it holds nothing yet."""
    there = RunDirectory(parent / name)
    steps = begun_steps(there) if Path(name).name == name else None
    again = steps is not None and (steps == 0 or begin_again)
    directory = there if again else RunDirectory.create(parent, name)
    with hold_lock(directory):
        if again:
            clear_begun(directory)
        try:
            yield directory
        except Exception:
            if {path.name for path in directory.path.iterdir()} <= _BEFORE_TRAINING and not _has_trained(directory):
                shutil.rmtree(directory.path, ignore_errors=True)
            raise


def _has_trained(directory: RunDirectory) -> bool:
    """Whether there is a record of the training itself: an evaluation, a step or an end."""
    return any(record.get("kind") in ("evaluation", "step", "end") for record in directory.metrics_file.readable())


_BEFORE_TRAINING = {
    *(".lock", "config.toml", "environment.json", "metrics.jsonl", "reference"),
    *("tensorboard", "wandb", "tracker.json", "servers"),
}
"""What a run writes before its first evaluation."""


def start_or_resume(
    resolved: Resolved,
    objects: wire.PythonObjects,
    watcher: Watcher,
    callback: Callable[[StepReport], None] | None = None,
    *,
    notes: Sequence[str] = (),
    allow_changes: bool = False,
) -> Run:
    """Resume the run `output.name` if it has a checkpoint, else start it: the same command serves a job that is requeued.

    The options are those given now. One that differs from the run's is treated as by `resume`.
    """
    output = resolved.config.output
    if output.name is None:
        raise InputError(
            "expected output.name with --resume-if-exists, got none: each start would be a run of its own; set"
            " output.name=NAME"
        )
    directory = RunDirectory(Path(output.directory) / output.name)
    with joined(deadline=resolved.config.training.rank_deadline_seconds, say=watcher.message) as world:
        if on_first_rank(world, lambda: directory.path.is_dir() and begun_steps(directory) is None):
            return resume(
                directory.path,
                watcher=watcher,
                allow_changes=allow_changes,
                objects=objects,
                callback=callback,
                wanted=resolved,
            )
        return start(resolved, objects, watcher, callback, notes=notes, begin_again=True)


def _show_plan(
    resolved: Resolved,
    objects: wire.PythonObjects,
    policy: Policy,
    source: Source,
    held_out: Sequence[Problem],
    watcher: Watcher,
) -> Run:
    """Show what the run would do. Nothing is written."""
    directory = Path(resolved.config.output.directory) / _run_name(resolved, objects)
    lines = [
        *describe_plan(resolved, policy, source, held_out, str(directory)),
        *_notes(resolved, policy.notes),
        _checkpoint_note(resolved, policy),
        *_deviation_lines(resolved),
        *_early_end(resolved),
    ]
    watcher.start(f"{directory.name}: {resolved.algorithm.name} on {policy.name}, a dry run", lines)
    watcher.close()
    return Run(
        directory=directory,
        accuracy=None,
        accuracy_greedy=None,
        model_folder=None,
        reason="a dry run: nothing was trained or written",
        exit_code=0,
    )


def _start_record(
    resolved: Resolved,
    objects: wire.PythonObjects,
    directory: RunDirectory,
    model: str,
    notes: Sequence[str],
    code: Sequence[OwnCode],
) -> dict[str, Any]:
    """The first record of metrics.jsonl, but for the time."""
    return {
        "kind": "start",
        "name": directory.name,
        "model": model,
        "algorithm": resolved.algorithm.name,
        "deviations": list(resolved.deviations),
        "notes": list(notes),
        "given": _object_names(objects),
        "bounds": {name: stated.record() for name, stated in resolved.algorithm.objective.bounds().items()},
        "code": [dataclasses.asdict(each) for each in code],
    }


def _end_before_first_step(
    resolved: Resolved,
    objects: wire.PythonObjects,
    directory: RunDirectory,
    watcher: Watcher,
    loggers: Sequence[Logger],
    interrupt: Interrupt,
    rank: int,
) -> Run:
    """The result of a run interrupted before its first step. Nothing is saved: a warm-up cannot be resumed."""
    assert interrupt.received is not None
    watcher.close()
    for logger in loggers:
        logger.close()
    when = "before the first step" if resolved.config.policy.warm_up is None else "during the warm-up"
    reason = f"stopped by {interrupt.received.name} {when}"
    with suppress(DiskFullError):
        directory.append_metrics({"kind": "end", "reason": reason, "step": 0}, sync=True)
    again = restart_advice(directory.path, resolved, _object_names(objects))
    return Run(
        directory=directory.path,
        accuracy=None,
        accuracy_greedy=None,
        model_folder=None,
        reason=f"{reason}: there is no checkpoint to resume from; {again}",
        exit_code=interrupt.exit_code,
        rank=rank,
    )


def resume(
    path: Path,
    words: Sequence[str] = (),
    *,
    watcher: Watcher | None = None,
    allow_changes: bool = False,
    step: int | None = None,
    objects: wire.PythonObjects | None = None,
    callback: Callable[[StepReport], None] | None = None,
    wanted: Resolved | None = None,
) -> Run:
    """Continue a run from its newest complete checkpoint, with the same results as the uninterrupted run.

    With `step`, continue from the checkpoint of that step; later records move to given-up/ in the run directory.
    `wanted` is a whole configuration in place of `words`.
    """
    shown = watcher or Silent()
    with joined(deadline=_deadline_of(path, words, wanted), say=shown.message) as world:
        if world.rank:
            shown, callback = Silent(), None
        return _resume(world, path, words, shown, allow_changes, step, objects or wire.PythonObjects(), callback, wanted)


def _deadline_of(path: Path, words: Sequence[str], wanted: Resolved | None) -> float:
    """How long ranks of a run that goes on may wait for one another: torch's own limit follows from it.

    A configuration that cannot be read is told once the ranks have joined.
    """
    if read_launch() is None:
        return DEADLINE_SECONDS
    try:
        resolved = wanted or _load_with_words(RunDirectory(path), words)
    except (InputError, OSError):
        return DEADLINE_SECONDS
    return resolved.config.training.rank_deadline_seconds


def _resume(
    world: World,
    path: Path,
    words: Sequence[str],
    shown: Watcher,
    allow_changes: bool,
    step: int | None,
    objects: wire.PythonObjects,
    callback: Callable[[StepReport], None] | None,
    wanted: Resolved | None,
) -> Run:
    watcher = GuardedWatcher(shown)
    with _directory_to_resume(world, path) as (directory, restored), ExitStack() as engines:
        _check_files(directory)
        search_beside(directory.code())
        before = load([directory.config_path])
        if wanted:
            before = absolute_paths(before)  # a run of an older version has relative paths to the same files
            resolved = _with_lr_of(before, absolute_paths(wanted))
        else:
            resolved = _load_with_words(directory, words) if words else before
        changes.check(before, resolved, allow_changes)  # before the checkpoint is hashed, which may take long
        ranks.compare_configurations(world, resolved)
        ranks.observe(world, resolved.config, directory)
        check_sizes(resolved, own_model=objects.model is not None, own_problems=objects.problems is not None)
        folder = Path(on_first_rank(world, lambda: str(_checkpoint_to_resume(directory, before, watcher, step))))
        state = _read_state(folder)
        saved = inputs.config_of_checkpoint(folder, before)
        changed = changes.check(absolute_paths(saved) if wanted else saved, resolved, allow_changes)
        config = resolved.config
        seed_generators(config.training.seed)  # for objects built before the checkpoint restores the generators
        _check_objects(state["made_of"], objects)
        reward, source = wire.reward_of(config, objects), wire.source_of(config, objects)
        code = _own_files(resolved, objects, reward)
        made_of = _made_of(resolved, objects, source, code)
        changed += _check_code(state["made_of"].get("code", {}), made_of["code"], allow_changes)
        changed += inputs.check_files(state["made_of"].get("files", {}), made_of["files"], resolved, allow_changes)
        if made_of["problems"] != state["made_of"]["problems"]:
            if not allow_changes:
                raise InputError(
                    f"expected the problems that {directory.path} was trained on, got others (their fingerprint differs);"
                    " give the same data, or --allow-changes to go on with these"
                )
            changed.append("changed: the problems")
        wants_reference = wire.wants_reference(resolved)
        if wants_reference:
            inputs.check_reference(directory, resolved, state["made_of"])
        policy = wire.policy_of(resolved, objects, folder / "model")
        policy.notes += ranks.describe(world, config)
        ranks.compare_inputs(world, policy, source)
        decide_checkpointing(resolved, policy, world)
        date = state["made_of"].get("date")
        collector = wire.collector_of(config, policy, source, reward, date=date, world=world)
        engines.enter_context(closing_engine(collector))
        if collector.runner.rendering.asks_for_date:
            policy.notes.append(inputs.date_note(date))
        reference = _rebuild_reference(resolved, objects, policy, directory) if wants_reference else None
        reads_base = inputs.reads_base(resolved, directory)
        if reads_base:
            base_policy = policy if reference is None else reference.policy
            made_of["base"] = inputs.base_weights(resolved, objects, base_policy)
            with checkpoint.explain_contents(folder):
                changed += inputs.check_base(state["made_of"].get("base"), made_of["base"], policy.name, allow_changes)
        made_of |= {name: state["made_of"][name] for name in ("reference", "date") if name in state["made_of"]}
        unchecked = inputs.unchecked(folder, state["made_of"], reads_base, wants_reference)
        environment = directory.readable_environment()
        if environment is None:
            _record_environment(directory, resolved, policy.device)
            restored.append("environment.json was missing or damaged and is written again, as of now")
        threads = inputs.describe_threads(policy, state, environment or {})
        trainer = wire.trainer_of(resolved, policy, collector, reference)
        wire.open_journal(collector, directory)
        with checkpoint.explain_contents(folder):
            checkpoint.restore(folder, policy, trainer.optimizer, state, world)
            trainer.load_sampler(checkpoint.sampler_state(folder))
            replayed = inputs.read_journal(collector, goes_back=step is not None, changed=allow_changes and bool(changed))
        notes = _notes(resolved, policy.notes)
        start_record = _start_record(resolved, objects, directory, policy.name, notes, code)
        positions, lost = dict[Lines, int](), list[str]()
        if directory.writes:
            with checkpoint.explain_contents(folder):
                positions, lost = positions_at(directory, state, start_record)
        # What may be refused comes before anything of the run is changed.
        held_out = wire.held_out_of(config, source, collector.runner.rendering, policy.notes)
        sets = wire.sets_of(config, policy, collector.evaluation or collector.runner, collector.judge, world)
        ranks.compare_evaluations(world, held_out, sets)
        voice = EngineVoice(directory, watcher)
        collector.runner.engine.open(voice.place_of(collector))
        loggers = _loggers(resolved, directory, watcher, int(state["trainer"]["steps_done"]))
        moved: list[str] = []
        if directory.writes:
            given_up = None if step is None else give_up(directory, step, positions)
            moved = [] if given_up is None else [f"records after step {step} were moved to {given_up}"]
            checkpoint.set_aside(directory.path / "checkpoints", folder)
        for file, position in positions.items():
            file.truncate(position)
        execution = Execution(
            resolved=resolved,
            directory=directory,
            policy=policy,
            trainer=trainer,
            evaluator=wire.evaluator_of(collector),
            held_out=held_out,
            sets=sets,
            watcher=watcher,
            loggers=loggers,
            callback=callback,
            made_of=made_of,
            start_record=start_record,
            seconds_before=seconds_of_training(directory.metrics()) if directory.writes else 0.0,
        )
        voice.begin(lambda: execution.trainer.steps_done)
        with checkpoint.explain_contents(folder):
            execution.load_state(state)
        if words or wanted:
            directory.write_config(dump(resolved))
        if world.agree(int(bool(lost or (allow_changes and changed)))):
            # Killed before its next checkpoint, the run must not ask for the same permission or repair again.
            execution.save_again(record=bool(lost))
        for note in threads:
            directory.append_metrics({"kind": "note", "step": trainer.steps_done, "text": note})
        notes = [
            *(*restored, *resolved.notes, *changed, *unchecked, *threads, *moved, *lost, *replayed),
            *policy.notes,
            *_early_end(resolved),
        ]
        watcher.configure(_display_settings(resolved))
        watcher.start(f"{directory.name}: resumed at step {trainer.steps_done} from {folder.name}", notes)
        execution.notes_shown = len(policy.notes)
        return _finish(execution)


def _with_lr_of(before: Resolved, wanted: Resolved) -> Resolved:
    """The wanted configuration with the learning rate of the run where nobody wants another one.

    The default for adapters was that of full training in older versions.
    """
    if wanted.provenance.get("training.lr") != lora_lr.ORIGIN:
        return wanted
    training = dataclasses.replace(wanted.config.training, lr=before.config.training.lr)
    return dataclasses.replace(wanted, config=dataclasses.replace(wanted.config, training=training))


def _load_with_words(directory: RunDirectory, words: Sequence[str]) -> Resolved:
    """The configuration of a run with changes. Only paths of the words become absolute: an old run has relative ones."""
    resolved = load([directory.config_path], words)
    return absolute_paths(resolved, lambda path: resolved.provenance.get(path, "").startswith("word "))


def _read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint; InputError if it has not the form that `Execution.state` writes."""
    state = checkpoint.read_state(folder)
    kinds = {"given": list, "problems": str, "code": dict, "files": dict, "base": dict, "reference": str, "date": str}
    with checkpoint.explain_contents(folder):
        for name in ("metrics_position", "optimizer", "generators"):
            state[name]
        int(state["trainer"]["steps_done"])
        for name, value in {"given": None, "problems": None, **state["made_of"]}.items():
            if name in kinds and not isinstance(value, kinds[name]):
                raise TypeError(f"made_of.{name} of trainer.json is {value!r}")
    return state


@contextmanager
def _directory_to_resume(world: World, path: Path) -> Iterator[tuple[RunDirectory, list[str]]]:
    """The run directory and what had to be restored in it. Rank 0 holds its lock and writes to it."""
    if world.rank:
        wait_for_all(world)
        yield replace(RunDirectory.open_to_mend(path), writes=False), []
        return
    directory = RunDirectory.open_to_mend(path)
    with hold_lock(directory):
        checkpoint.put_back(directory.path / "checkpoints")
        restored = inputs.restore_config(directory)
        wait_for_all(world)
        yield directory, restored


def _checkpoint_to_resume(directory: RunDirectory, resolved: Resolved, watcher: Watcher, step: int | None) -> Path:
    return _newest_checkpoint(directory, resolved, watcher) if step is None else find_checkpoint(directory, step)


def _newest_checkpoint(directory: RunDirectory, resolved: Resolved, watcher: Watcher) -> Path:
    """The newest complete checkpoint; warns about damaged ones."""
    try:
        folder, warnings = checkpoint.latest(directory.path / "checkpoints")
    except InputError as error:
        raise InputError(f"{error}; {restart_advice(directory.path, resolved, directory.python_parts())}") from None
    for warning in warnings:
        watcher.message(warning)
    return folder


def _made_of(resolved: Resolved, objects: wire.PythonObjects, source: Source, code: Sequence[OwnCode]) -> dict[str, Any]:
    """The inputs of a run beside its configuration: objects given in Python, the problems, the user's own files."""
    return {
        "problems": wire.fingerprint(source),
        "given": _object_names(objects),
        "code": {each.reference: each.sha256 for each in code},
        "files": inputs.option_files(resolved, objects),
    }


def _own_files(resolved: Resolved, objects: wire.PythonObjects, reward: WeightedSum) -> list[OwnCode]:
    """The user's files that the parts, tasks and rewards of the configuration come from, and the modules they import."""
    task, rewards = resolved.config.task, resolved.config.reward
    kinds = [] if objects.problems is not None else [task.kind, *([] if task.second is None else [task.second.kind])]
    paths = [("task", kind) for kind in kinds]
    # A reward in its own process is never imported in this one.
    separate = [each.reward for each in reward.components.values() if isinstance(each.reward, SeparateReward)]
    if objects.reward is None and not rewards.separate_process:
        paths += [("reward", kind) for kind in (rewards.kind or "", *(each.kind for each in rewards.components.values()))]
    for each in resolved.config.evaluation.sets.values():
        paths.append(("task", each.task.kind))
        if each.reward is not None and not rewards.separate_process:
            paths.append(("reward", each.reward.kind))
    paths += [("environment", task.environment or ""), ("engine", resolved.config.rollouts.engine)]
    imported = [code_at(what, kind) for what, kind in paths if is_import_path(kind)]
    files = [*resolved.code, *(code for code in imported if code is not None)]
    elsewhere = [code for each in separate for code in each.code]
    return list({code.reference: code for code in [*files, *imported_modules(files), *elsewhere]}.values())


def _check_files(directory: RunDirectory) -> None:
    """InputError if a file of the user's that the run started with is missing."""
    for code in directory.code():
        place = Path(code["reference"].rpartition(":")[0])
        if place.suffix == ".py" and not place.is_file():
            here = "" if place.is_absolute() else ", or resume in the directory in which the run was started"
            raise InputError(
                f"expected the file that {directory.path} was started with, got no file {place.resolve()} (it was"
                f" {code['file']}); put it back{here}"
            )


def _check_code(before: Mapping[str, str], now: Mapping[str, str], allowed: bool) -> list[str]:
    """One sentence per user file that changed since the checkpoint; InputError without --allow-changes."""
    # A part's reference is relative in runs of older versions.
    before = {_absolute_reference(reference): sha256 for reference, sha256 in before.items()}
    hashes = {reference: before.get(_absolute_reference(reference), sha256) for reference, sha256 in now.items()}
    changed = [_name_code(reference) for reference, sha256 in now.items() if hashes[reference] != sha256]
    if changed and not allowed:
        raise InputError(
            f"expected the files of the run as they were, got changes in {' and '.join(changed)} (SHA-256 differs); put the"
            " old file back, or --allow-changes to go on with the new one"
        )
    if changed:
        return [f"changed: the file of {name}" for name in changed]
    new = [_name_code(reference) for reference in now if reference not in before and ":" not in reference]
    # A checkpoint without "code" is spoken of elsewhere, as one of an older version.
    return [f"the checkpoint holds no hash of {' and '.join(new)}: not checked for changes"] if before and new else []


def _name_code(reference: str) -> str:
    return reference if ":" in reference else f"the module {reference}"


def _absolute_reference(reference: str) -> str:
    file, _, name = reference.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else reference


def _object_names(objects: wire.PythonObjects) -> list[str]:
    """The names of the inputs that were given as Python objects."""
    return [name for name in ("model", "problems", "reward") if getattr(objects, name) is not None]


def _check_objects(made_of: Mapping[str, Any], objects: wire.PythonObjects) -> None:
    """InputError if an object that the run was given in Python is not given again."""
    missing = [name for name in made_of["given"] if getattr(objects, name) is None]
    if missing:
        raise InputError(
            f"this run was given its {' and '.join(missing)} in Python, which its config.toml does not hold; resume it from"
            " Python with the same arguments: legato.train(..., resume_if_exists=True)"
        )


def _finish(execution: Execution) -> Run:
    directory, watcher = execution.directory, execution.watcher
    try:
        reason, code = execution.go()
        if directory.writes:
            _mend(execution)
    finally:
        execution.trainer.source.close()
        watcher.close()
        for logger in execution.loggers:
            logger.close()
    try:
        if directory.writes:
            write_report(directory)
    except RunDirectoryError as error:
        reason = f"{reason}; {error}"  # the run is complete without its report, which `legato report` writes again
    latest = execution.latest or {}
    return Run(
        directory=directory.path,
        accuracy=latest.get("eval/accuracy_sampled"),
        accuracy_greedy=latest.get("eval/accuracy_greedy"),
        model_folder=newest_model(directory),
        reason=reason,
        exit_code=code,
        rank=execution.trainer.world.rank,
    )


def _mend(execution: Execution) -> None:
    """Write files again that were deleted or damaged during the run: a finished training must not end as an error."""
    directory = execution.directory
    sentences = mend(directory, execution.trainer.steps_done, execution.start_record)
    if not directory.config_path.is_file():
        directory.write_config(dump(execution.resolved))
        sentences.append("config.toml was deleted during the run and is written again")
    if directory.readable_environment() is None:
        _record_environment(directory, execution.resolved, execution.policy.device)
        sentences.append("environment.json was deleted or damaged during the run and is written again")
    for sentence in sentences:
        execution.watcher.message(sentence)


def _rebuild_reference(resolved: Resolved, objects: wire.PythonObjects, policy: Any, directory: RunDirectory) -> Reference:
    """The reference policy of a resumed run: the policy before the first step, not that of the checkpoint."""
    if resolved.config.policy.lora is not None or wire.teacher_is_reference(resolved.config):
        return wire.reference_of(resolved, policy)
    saved = directory.path / "reference"
    first = wire.policy_of(resolved, objects, saved if saved.is_dir() else None)
    first.model.requires_grad_(False)
    return Reference(policy=first, adapters=False, original=policy)


def _run_name(resolved: Resolved, objects: wire.PythonObjects) -> str:
    config = resolved.config
    if config.output.name is not None:
        return config.output.name
    algorithm = re.sub(r"[^\w.+-]+", "-", resolved.algorithm.name)  # the name of an algorithm made in Python is free text
    task = config.task.kind.rpartition(":")[2] if objects.problems is None else "problems"
    stem = f"{task}-{algorithm}-seed{config.training.seed}"
    return unused_name(Path(config.output.directory), stem, 1)


def _notes(resolved: Resolved, loading: Sequence[str]) -> list[str]:
    config = resolved.config
    training = config.training
    notes = [
        f"{training.prompts_per_step} prompts x {config.rollouts.samples_per_prompt} samples a step,"
        f" {count(training.updates_per_step, 'update')}, lr {training.lr:g}, seed {training.seed}",
        *resolved.notes,
        *loading,
        *unusual_values(resolved),
    ]
    if resolved.provenance["training.lr"] == lora_lr.ORIGIN:
        notes.append(
            f"training.lr = {training.lr:g}: adapters need about ten times the learning rate of all weights, so the default"
            " is ten times as high with policy.lora; set training.lr to choose it"
        )
    if training.shortens_warm_up:
        notes.append(
            f"the run has {count(training.total_updates, 'update')}: training.warm_up_updates = {training.warm_up_updates}"
            f" is shortened to {training.warm_up(training.total_updates)}"
        )
    rewards = {"reward.kind": config.reward.kind}
    rewards |= {f"reward.components.{name}.kind": each.kind for name, each in config.reward.components.items()}
    named = [(path, kind) for path, kind in rewards.items() if kind is not None]
    if config.task.environment is not None and all(kind != "environment" for _, kind in named):
        notes.append(
            f"{named[0][0]} = {named[0][1]!r} scores finished rollouts: the rewards that the environment gives its turns are"
            " not used; reward.kind=environment uses them"
        )
    kinds = {"task.kind": config.task.kind, "task.environment": config.task.environment, "reward.kind": config.reward.kind}
    for path, kind in kinds.items():
        if kind is not None and ":" in kind:
            where = "" if os.path.isabs(kind) else f", imported from {os.getcwd()} or the Python path"
            notes.append(f"{path} = {kind!r} is your own code{where}")
    notes += [f"the part {code.reference!r} is your own code, SHA-256 {code.sha256[:12]}" for code in resolved.code]
    return notes


def _checkpoint_note(resolved: Resolved, policy: Policy) -> str:
    """How large a checkpoint is, and how many are kept."""
    output, size = resolved.config.output, checkpoint.expected_bytes(policy)
    healthy = int(resolved.config.health.action != "say")
    kept = min(output.keep_last + 1 + healthy, resolved.config.training.steps)
    also = "the best one and a healthy one" if healthy else "the best one"
    return (
        f"a checkpoint is about {show_bytes(size)}, written {checkpoint_moments(output)}; the newest {output.keep_last} are"
        f" kept (output.keep_last), and {also}: at most {show_bytes(kept * size)}"
    )


def _display_settings(resolved: Resolved) -> DisplaySettings:
    output = resolved.config.output
    return DisplaySettings(
        log_every_steps=output.log_every_steps,
        log_every_seconds=output.log_every_seconds,
        may_end_early=bool(_early_end(resolved)),
    )


def _early_end(resolved: Resolved) -> list[str]:
    """What may end the run before its last step, as a line for the terminal."""
    config = resolved.config
    targets = {"evaluation.target": config.evaluation.target, "evaluation.target_greedy": config.evaluation.target_greedy}
    goals = [f"{path} = {target:g}" for path, target in targets.items() if target is not None]
    ways = [f"when {' and '.join(goals)} {'are' if goals[1:] else 'is'} reached"] if goals else []
    ways += ["on an alarm of the health watch"] if config.health.action in ("stop", "recover") else []
    if not ways or config.training.steps == 1:
        return []
    return [f"may end before step {config.training.steps}, {' or '.join(ways)}: the time left is that of all steps"]


def _deviation_lines(resolved: Resolved) -> list[str]:
    """The deviations from the published algorithm, as lines for the terminal."""
    name = resolved.algorithm.name
    if not is_published(name):
        return [f"{name}: {each}" for each in resolved.deviations]
    return [f"deviates from {name} as published: {each}" for each in resolved.deviations]


def _record_environment(directory: RunDirectory, resolved: Resolved, device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    directory.write_environment(
        {
            "seed": resolved.config.training.seed,
            "threads": torch.get_num_threads(),
            "hardware": {"device": name},
            **ranks.environment(),
        }
    )


def _loggers(resolved: Resolved, directory: RunDirectory, watcher: Watcher, first_step: int) -> list[Logger]:
    output = resolved.config.output
    loggers: list[Logger] = []
    if not directory.writes:
        return loggers
    if output.tensorboard:
        loggers.append(TensorBoardLogger(directory.path / "tensorboard", say=watcher.message, first_step=first_step))
    if output.wandb:
        loggers.append(
            WandbLogger(
                project=output.project,
                name=directory.name,
                tags=output.tags,
                config=resolved.values,
                folder=directory.path,
                say=watcher.message,
            )
        )
    if output.trackio:
        loggers.append(
            TrackioLogger(
                project=output.project,
                name=directory.name,
                config=resolved.values,
                folder=directory.path,
                say=watcher.message,
            )
        )
    return loggers
