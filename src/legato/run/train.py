"""Starts and resumes runs: `legato train`, `legato resume`, and `legato.train(...)` from Python."""

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from legato.algorithms.catalogue import is_published
from legato.config import changes
from legato.config.load import load
from legato.config.resolved import Resolved, dump
from legato.config.unusual import unusual_values
from legato.core.generators import seed_generators
from legato.core.importing import OwnCode, code_at, is_import_path
from legato.core.rollout import Problem
from legato.diagnostics.words import count
from legato.errors import InputError
from legato.health.goback import find_checkpoint, give_up, positions_at
from legato.pages.report import write_report
from legato.policy.model.reference import Reference
from legato.records.directory import RunDirectory, unused_name
from legato.records.lines import RunDirectoryError
from legato.records.lock import hold_lock
from legato.records.repair import mend
from legato.run import inputs, wire
from legato.run.again import restart_advice
from legato.run.execute import Execution, newest_model
from legato.run.interrupt import ImmediateInterrupt, Interrupt
from legato.run.loggers import Logger, TensorBoardLogger, WandbLogger
from legato.run.memory import decide_checkpointing
from legato.run.origin import prepare
from legato.run.sizes import check_sizes
from legato.run.watcher import GuardedWatcher, Silent, Watcher
from legato.tasks.source import Source
from legato.training import checkpoint
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


def train(
    model: Any = None,
    problems: Sequence[Problem | Mapping[str, Any]] | Any = None,
    reward: Callable[..., Any] | str | None = None,
    algorithm: Any = None,
    *,
    recipe: str | Path | Sequence[str | Path] = (),
    tokenizer: Any = None,
    callback: Callable[[StepReport], None] | None = None,
    watcher: Watcher | None = None,
    **options: Any,
) -> Run:
    """Train a model by reinforcement learning; the same path as `legato train`.

    model       a folder, a hub name, "tiny", "smollm2", or a module of transformers
    problems    a list of problems, or of mappings with "prompt" and "answer" (other keys become fields); or a task, an
                object with `problem(random)` or `load()` as the classes of `legato.tasks` have
    reward      a callable of one rollout, or the name of a reward ("number", "math-verify", "module:name")
    algorithm   a name, or a value made by `legato.algorithm` or as `legato.Algorithm(name="mine", ...)`
    recipe      TOML files, read from left to right
    options     any path of the configuration: **{"training.lr": 1e-6}
    callback    called with the report of each step

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
    if reward is not None and not isinstance(reward, str) and not callable(reward):
        raise InputError(f"expected a callable of one rollout or the name of a reward, got {reward!r} (reward)")
    given = wire.Given(
        model=given_model,
        tokenizer=tokenizer,
        problems=_as_problems(problems),
        reward=None if isinstance(reward, str) else reward,
    )
    files = [recipe] if isinstance(recipe, str | Path) else list(recipe)
    return start(load([Path(file) for file in files], (), overrides), given, watcher or Silent(), callback)


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
    rest = {key: value for key, value in item.items() if key not in ("prompt", "answer")}
    answer = item.get("answer")
    return Problem(prompt=item["prompt"], answer=None if answer is None else str(answer), fields=rest)


def start(
    resolved: Resolved, given: wire.Given, watcher: Watcher, callback: Callable[[StepReport], None] | None = None
) -> Run:
    """Start a new run. All input is checked before the run directory is created."""
    watcher = GuardedWatcher(watcher)
    config = resolved.config
    check_sizes(resolved, own_model=given.model is not None, own_problems=given.problems is not None)
    seed_generators(config.training.seed)
    reward = wire.reward_of(config, given)
    source = wire.source_of(config, given)
    policy = wire.policy_of(resolved, given)
    decide_checkpointing(resolved, policy)
    collector = wire.collector_of(config, policy, source, reward)
    held_out = wire.held_out_of(config, source, collector.runner.rendering, policy.notes)
    wire.check_training(resolved, policy, collector)
    if config.policy.lora is not None and config.policy.warm_up is not None and wire.wants_reference(resolved):
        raise InputError(
            "expected at most two of policy.lora, policy.warm_up and a KL term, got all three; drop one of them:"
            " the reference of adapters is the model without them, which was not warmed up"
        )
    directory = RunDirectory.create(Path(config.output.directory), _run_name(resolved))
    with hold_lock(directory):
        directory.write_config(dump(resolved))
        _record_environment(directory, resolved, policy.device)
        notes, notes_shown = _notes(resolved, policy.notes), len(policy.notes)
        made_of = _made_of(resolved, given, source)
        loggers = _loggers(resolved, directory, watcher, 0)
        start_record = _start_record(resolved, given, directory, policy.name, notes)
        start_record["started"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        directory.append_metrics(start_record)
        watcher.start(f"{directory.name}: {resolved.algorithm.name} on {policy.name}", [*notes, *_deviation_lines(resolved)])
        with ImmediateInterrupt(watcher.message) as interrupt:
            try:
                reference, hashes = prepare(resolved, given, policy, source, collector, directory, watcher)
            except KeyboardInterrupt:
                if interrupt.received is None:
                    raise
                return _end_before_first_step(resolved, given, directory, watcher, loggers, interrupt)
        execution = Execution(
            resolved=resolved,
            directory=directory,
            policy=policy,
            trainer=wire.trainer_of(resolved, policy, collector, reference),
            evaluator=wire.evaluator_of(collector),
            held_out=held_out,
            watcher=watcher,
            loggers=loggers,
            callback=callback,
            made_of={**made_of, **hashes},
            start_record=start_record,
            notes_shown=notes_shown,
        )
        return _finish(execution)


def _start_record(
    resolved: Resolved, given: wire.Given, directory: RunDirectory, model: str, notes: Sequence[str]
) -> dict[str, Any]:
    """The first record of metrics.jsonl, but for the time."""
    return {
        "kind": "start",
        "name": directory.name,
        "model": model,
        "algorithm": resolved.algorithm.name,
        "deviations": list(resolved.deviations),
        "notes": list(notes),
        "given": _given_names(given),
        "bounds": {name: stated.record() for name, stated in resolved.algorithm.objective.bounds().items()},
        "code": [dataclasses.asdict(each) for each in _own_files(resolved, given)],
    }


def _end_before_first_step(
    resolved: Resolved,
    given: wire.Given,
    directory: RunDirectory,
    watcher: Watcher,
    loggers: Sequence[Logger],
    interrupt: Interrupt,
) -> Run:
    """The result of a run interrupted before its first step. Nothing is saved: a warm-up cannot be resumed."""
    assert interrupt.received is not None
    watcher.close()
    for logger in loggers:
        logger.close()
    when = "before the first step" if resolved.config.policy.warm_up is None else "during the warm-up"
    reason = f"stopped by {interrupt.received.name} {when}"
    directory.append_metrics({"kind": "end", "reason": reason, "step": 0}, sync=True)
    again = restart_advice(directory.path, resolved, _given_names(given))
    return Run(
        directory=directory.path,
        accuracy=None,
        accuracy_greedy=None,
        model_folder=None,
        reason=f"{reason}: there is no checkpoint to resume from; {again}",
        exit_code=interrupt.exit_code,
    )


def resume(
    path: Path,
    words: Sequence[str] = (),
    *,
    watcher: Watcher | None = None,
    allow_changes: bool = False,
    step: int | None = None,
    given: wire.Given | None = None,
    callback: Callable[[StepReport], None] | None = None,
) -> Run:
    """Continue a run from its newest complete checkpoint, with the same results as the uninterrupted run.

    With `step`, continue from the checkpoint of that step; later records move to given-up/ in the run directory.
    """
    watcher = GuardedWatcher(watcher or Silent())
    given = given or wire.Given()
    directory = RunDirectory.open_to_mend(path)
    with hold_lock(directory):
        checkpoint.put_back(directory.path / "checkpoints")
        restored = inputs.restore_config(directory)
        _check_files(directory)
        before = load([directory.config_path])
        resolved = load([directory.config_path], words) if words else before
        changes.check(before, resolved, allow_changes)  # before the checkpoint is hashed, which may take long
        check_sizes(resolved, own_model=given.model is not None, own_problems=given.problems is not None)
        folder = _newest_checkpoint(directory, before, watcher) if step is None else find_checkpoint(directory, step)
        state = _read_state(folder)
        changed = changes.check(inputs.config_of_checkpoint(folder, before), resolved, allow_changes)
        config = resolved.config
        seed_generators(config.training.seed)  # for objects built before the checkpoint restores the generators
        _check_given(state["made_of"], given)
        reward, source = wire.reward_of(config, given), wire.source_of(config, given)
        made_of = _made_of(resolved, given, source)
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
        policy = wire.policy_of(resolved, given, folder / "model")
        decide_checkpointing(resolved, policy)
        collector = wire.collector_of(config, policy, source, reward)
        reference = _rebuild_reference(resolved, given, policy, directory) if wants_reference else None
        reads_base = inputs.reads_base(resolved, directory)
        if reads_base:
            base_policy = policy if reference is None else reference.policy
            made_of["base"] = inputs.base_weights(resolved, given, base_policy)
            with checkpoint.explain_contents(folder):
                changed += inputs.check_base(state["made_of"].get("base"), made_of["base"], policy.name, allow_changes)
        if "reference" in state["made_of"]:
            made_of["reference"] = state["made_of"]["reference"]
        unchecked = inputs.unchecked(folder, state["made_of"], reads_base, wants_reference)
        environment = directory.readable_environment()
        if environment is None:
            _record_environment(directory, resolved, policy.device)
            restored.append("environment.json was missing or damaged and is written again, as of now")
        threads = inputs.describe_threads(policy, state, environment or {})
        trainer = wire.trainer_of(resolved, policy, collector, reference)
        with checkpoint.explain_contents(folder):
            checkpoint.restore(folder, policy, trainer.optimizer, state)
            trainer.load_sampler(checkpoint.sampler_state(folder))
        start_record = _start_record(resolved, given, directory, policy.name, _notes(resolved, policy.notes))
        with checkpoint.explain_contents(folder):
            positions, lost = positions_at(directory, state, start_record)
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
            held_out=wire.held_out_of(config, source, collector.runner.rendering, policy.notes),
            watcher=watcher,
            loggers=_loggers(resolved, directory, watcher, int(state["trainer"]["steps_done"])),
            callback=callback,
            made_of=made_of,
            start_record=start_record,
        )
        with checkpoint.explain_contents(folder):
            execution.load_state(state)
        if words:
            directory.write_config(dump(resolved))
        if lost or (allow_changes and changed):
            # Killed before its next checkpoint, the run must not ask for the same permission or repair again.
            execution.save_again(record=bool(lost))
        for note in threads:
            directory.append_metrics({"kind": "note", "step": trainer.steps_done, "text": note})
        notes = [*restored, *changed, *unchecked, *threads, *moved, *lost, *policy.notes]
        watcher.start(f"{directory.name}: resumed at step {trainer.steps_done} from {folder.name}", notes)
        execution.notes_shown = len(policy.notes)
        return _finish(execution)


def _read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint; InputError if it has not the form that `Execution.state` writes."""
    state = checkpoint.read_state(folder)
    kinds = {"given": list, "problems": str, "code": dict, "files": dict, "base": dict, "reference": str}
    with checkpoint.explain_contents(folder):
        for name in ("metrics_position", "optimizer", "generators"):
            state[name]
        int(state["trainer"]["steps_done"])
        for name, value in {"given": None, "problems": None, **state["made_of"]}.items():
            if name in kinds and not isinstance(value, kinds[name]):
                raise TypeError(f"made_of.{name} of trainer.json is {value!r}")
    return state


def _newest_checkpoint(directory: RunDirectory, resolved: Resolved, watcher: Watcher) -> Path:
    """The newest complete checkpoint; warns about damaged ones."""
    try:
        folder, warnings = checkpoint.latest(directory.path / "checkpoints")
    except InputError as error:
        raise InputError(f"{error}; {restart_advice(directory.path, resolved, directory.python_parts())}") from None
    for warning in warnings:
        watcher.message(warning)
    return folder


def _made_of(resolved: Resolved, given: wire.Given, source: Source) -> dict[str, Any]:
    """The inputs of a run beside its configuration: objects given in Python, the problems, the user's own files."""
    return {
        "problems": wire.fingerprint(source),
        "given": _given_names(given),
        "code": {code.reference: code.sha256 for code in _own_files(resolved, given)},
        "files": inputs.option_files(resolved, given),
    }


def _own_files(resolved: Resolved, given: wire.Given) -> list[OwnCode]:
    """The user's files that the parts, tasks and rewards of the configuration come from."""
    task, reward = resolved.config.task, resolved.config.reward
    tasks = [] if given.problems is not None else [task.kind, *([] if task.second is None else [task.second.kind])]
    rewards = [] if given.reward is not None else [reward.kind or "", *(each.kind for each in reward.components.values())]
    paths = [("task", kind) for kind in tasks] + [("reward", kind) for kind in rewards]
    paths += [("environment", task.environment or ""), ("engine", resolved.config.rollouts.engine)]
    imported = [code_at(what, kind) for what, kind in paths if is_import_path(kind)]
    return [*resolved.code, *(code for code in imported if code is not None)]


def _check_files(directory: RunDirectory) -> None:
    """InputError if a file of the user's that the run started with is missing."""
    for code in directory.code():
        place = Path(code["reference"].rpartition(":")[0])
        if place.suffix == ".py" and not place.is_file():
            raise InputError(
                f"expected the file that {directory.path} was started with, got no file {place.resolve()} (it was"
                f" {code['file']}); put it back, or resume in the directory in which the run was started"
            )


def _check_code(before: Mapping[str, str], now: Mapping[str, str], allowed: bool) -> list[str]:
    """One sentence per user file that changed since the checkpoint; InputError without --allow-changes."""
    changed = [reference for reference, sha256 in now.items() if before.get(reference, sha256) != sha256]
    if changed and not allowed:
        raise InputError(
            f"expected the files of the run as they were, got a changed {' and '.join(changed)} (SHA-256 differs); put the"
            " old file back, or --allow-changes to go on with the new one"
        )
    return [f"changed: the file of {reference}" for reference in changed]


def _given_names(given: wire.Given) -> list[str]:
    """The names of the inputs that were given as Python objects."""
    return [name for name in ("model", "problems", "reward") if getattr(given, name) is not None]


def _check_given(made_of: Mapping[str, Any], given: wire.Given) -> None:
    """InputError if an object that the run was given in Python is not given again."""
    missing = [name for name in made_of["given"] if getattr(given, name) is None]
    if missing:
        raise InputError(
            f"this run was given its {' and '.join(missing)} in Python, which its config.toml does not hold; resume it from"
            f" Python with the same: resume(path, given=Given({', '.join(f'{name}=...' for name in missing)}))"
        )


def _finish(execution: Execution) -> Run:
    directory, watcher = execution.directory, execution.watcher
    try:
        reason, code = execution.go()
        _mend(execution)
    finally:
        watcher.close()
        for logger in execution.loggers:
            logger.close()
    try:
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


def _rebuild_reference(resolved: Resolved, given: wire.Given, policy: Any, directory: RunDirectory) -> Reference:
    """The reference policy of a resumed run: the policy before the first step, not that of the checkpoint."""
    if resolved.config.policy.lora is not None:
        return Reference.from_policy(policy)
    saved = directory.path / "reference"
    first = wire.policy_of(resolved, given, saved if saved.is_dir() else None)
    first.model.requires_grad_(False)
    return Reference(policy=first, adapters=False)


def _run_name(resolved: Resolved) -> str:
    config = resolved.config
    if config.output.name is not None:
        return config.output.name
    algorithm = re.sub(r"[^\w.+-]+", "-", resolved.algorithm.name)  # the name of an algorithm made in Python is free text
    stem = f"{config.task.kind.rpartition(':')[2]}-{algorithm}-seed{config.training.seed}"
    return unused_name(Path(config.output.directory), stem, 1)


def _notes(resolved: Resolved, loading: Sequence[str]) -> list[str]:
    config = resolved.config
    training = config.training
    notes = [
        f"{training.prompts_per_step} prompts x {config.rollouts.samples_per_prompt} samples a step,"
        f" {count(training.updates_per_step, 'update')}, lr {training.lr:g}, seed {training.seed}",
        *loading,
        *unusual_values(resolved),
    ]
    if training.shortens_warm_up:
        notes.append(
            f"the run has {count(training.total_updates, 'update')}: training.warm_up_updates = {training.warm_up_updates}"
            f" is shortened to {training.warm_up(training.total_updates)}"
        )
    kinds = {"task.kind": config.task.kind, "task.environment": config.task.environment, "reward.kind": config.reward.kind}
    for path, kind in kinds.items():
        if kind is not None and ":" in kind:
            notes.append(f"{path} = {kind!r} is your own code, imported from {os.getcwd()} or the Python path")
    notes += [f"the part {code.reference!r} is your own code, SHA-256 {code.sha256[:12]}" for code in resolved.code]
    return notes


def _deviation_lines(resolved: Resolved) -> list[str]:
    """The deviations from the published algorithm, as lines for the terminal."""
    name = resolved.algorithm.name
    if not is_published(name):
        return [f"{name}: {each}" for each in resolved.deviations]
    return [f"deviates from {name} as published: {each}" for each in resolved.deviations]


def _record_environment(directory: RunDirectory, resolved: Resolved, device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    directory.write_environment(
        {"seed": resolved.config.training.seed, "threads": torch.get_num_threads(), "hardware": {"device": name}}
    )


def _loggers(resolved: Resolved, directory: RunDirectory, watcher: Watcher, first_step: int) -> list[Logger]:
    output = resolved.config.output
    loggers: list[Logger] = []
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
    return loggers
