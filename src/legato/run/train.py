"""`legato train` and `legato resume`, and the same from Python: `legato.train(...)`."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from legato.config import changes
from legato.config.load import load
from legato.config.resolved import Resolved, dump
from legato.core.generators import seed_generators
from legato.core.rollout import Problem
from legato.diagnostics.words import count
from legato.errors import InputError
from legato.health.goback import checkpoint_of, give_up, recorded_at
from legato.pages.report import write_report
from legato.policy.model.reference import Reference
from legato.records.directory import RunDirectory, unused_name
from legato.records.lock import locked
from legato.run import wire
from legato.run.again import begin_again
from legato.run.execute import Execution, newest_model
from legato.run.interrupt import AtOnce, Interrupt
from legato.run.loggers import Logger, TensorBoardLogger, WandbLogger
from legato.run.memory import decide_checkpointing
from legato.run.origin import prepare
from legato.run.watcher import Silent, Watcher
from legato.tasks.source import Source
from legato.training import checkpoint
from legato.training.step import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run left behind."""

    directory: Path
    accuracy: float | None
    """Of sampled responses on held-out problems, at the end."""
    accuracy_greedy: float | None
    model_folder: Path | None
    """A plain Hugging Face folder; under LoRA the adapter (`legato export` merges it)."""
    reason: str
    """Why it ended."""
    exit_code: int


def train(
    model: Any = None,
    problems: Sequence[Problem | Mapping[str, Any]] | None = None,
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
    problems    a list of problems, or of mappings with "prompt" and "answer" (other keys become fields)
    reward      a callable of one rollout, or the name of a reward ("number", "math-verify", "module:name")
    algorithm   a name or a value made by `legato.algorithm`
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
        raise InputError(f"reward = {reward!r}; a callable of one rollout, or the name of a reward, is needed")
    given = wire.Given(
        model=given_model,
        tokenizer=tokenizer,
        problems=None if problems is None else [_problem(number, each) for number, each in enumerate(problems)],
        reward=None if isinstance(reward, str) else reward,
    )
    files = [recipe] if isinstance(recipe, str | Path) else list(recipe)
    return start(load([Path(file) for file in files], (), overrides), given, watcher or Silent(), callback)


def _problem(number: int, given: Problem | Mapping[str, Any]) -> Problem:
    if isinstance(given, Problem):
        return given
    if not isinstance(given, Mapping) or "prompt" not in given:
        raise InputError(f"problems[{number}] = {given!r}: a Problem, or a mapping with 'prompt' (and 'answer'), is needed")
    prompt = given["prompt"]
    if not isinstance(prompt, str | list | tuple) or not prompt:
        raise InputError(f"problems[{number}]: prompt = {prompt!r}; text, or a list of chat messages, is needed")
    rest = {key: value for key, value in given.items() if key not in ("prompt", "answer")}
    answer = given.get("answer")
    return Problem(prompt=given["prompt"], answer=None if answer is None else str(answer), fields=rest)


def start(
    resolved: Resolved, given: wire.Given, watcher: Watcher, callback: Callable[[StepReport], None] | None = None
) -> Run:
    """A new run. Everything that can be wrong with its input is found before its directory is made."""
    config = resolved.config
    seed_generators(config.training.seed)
    reward = wire.reward_of(config, given)
    source = wire.source_of(config, given)
    policy = wire.policy_of(resolved, given)
    decide_checkpointing(resolved, policy)
    collector = wire.collector_of(config, policy, source, reward)
    held_out = wire.held_out_of(config, source, collector, policy.notes)
    wire.check_training(resolved, policy, collector)
    if config.policy.lora is not None and config.policy.warm_up is not None and wire.wants_reference(resolved):
        raise InputError(
            "policy.lora with policy.warm_up and a KL term: the reference would be the model before the warm-up; drop one"
        )
    directory = RunDirectory.create(Path(config.output.directory), _name(resolved))
    with locked(directory):
        directory.write_config(dump(resolved))
        _record_environment(directory, resolved, policy.device)
        notes, noted = _notes(resolved, policy.notes), len(policy.notes)
        made_of = _made_of(given, source)
        loggers = _loggers(resolved, directory, watcher, 0)
        directory.append_metrics(
            {
                "kind": "start",
                "name": directory.name,
                "model": policy.name,
                "algorithm": resolved.algorithm.name,
                "deviations": list(resolved.deviations),
                "notes": notes,
                "given": made_of["given"],
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
        )
        watcher.start(f"{directory.name}: {resolved.algorithm.name} on {policy.name}", [*notes, *_told(resolved)])
        with AtOnce() as interrupt:
            try:
                reference = prepare(resolved, given, policy, source, collector, directory, watcher)
            except KeyboardInterrupt:
                if interrupt.received is None:
                    raise
                return _ended_before_the_first_step(resolved, given, directory, watcher, loggers, interrupt)
        execution = Execution(
            resolved=resolved,
            directory=directory,
            policy=policy,
            trainer=wire.trainer_of(resolved, policy, collector, reference),
            held_out=held_out,
            watcher=watcher,
            loggers=loggers,
            callback=callback,
            made_of=made_of,
            noted=noted,
        )
        return _finish(execution)


def _ended_before_the_first_step(
    resolved: Resolved,
    given: wire.Given,
    directory: RunDirectory,
    watcher: Watcher,
    loggers: Sequence[Logger],
    interrupt: Interrupt,
) -> Run:
    """There is nothing to save: what the warm-up has done so far cannot be gone on with."""
    assert interrupt.received is not None
    watcher.close()
    for logger in loggers:
        logger.close()
    when = "before the first step" if resolved.config.policy.warm_up is None else "during the warm-up"
    reason = f"stopped by {interrupt.received.name} {when}"
    directory.append_metrics({"kind": "end", "reason": reason, "step": 0}, sync=True)
    again = begin_again(directory.path, resolved, _given(given))
    return Run(
        directory=directory.path,
        accuracy=None,
        accuracy_greedy=None,
        model_folder=None,
        reason=f"{reason}: nothing is saved yet that could be resumed; {again}",
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
    """Continue a run from its newest whole checkpoint, to results that equal the uninterrupted run's.

    From that of a `step`: what came after it is moved to given-up/ in the run directory.
    """
    watcher = watcher or Silent()
    given = given or wire.Given()
    directory = RunDirectory.open(path)
    before = load([directory.config_path])
    resolved = load([directory.config_path], words) if words else before
    sentences = changes.check(before, resolved, allow_changes)
    with locked(directory):
        checkpoint.put_back(directory.path / "checkpoints")
        folder = _newest(directory, before, watcher) if step is None else checkpoint_of(directory, step)
        memory = checkpoint.read_memory(folder)
        config = resolved.config
        seed_generators(config.training.seed)  # for what is built before the checkpoint brings its own states
        _same_things(memory["made_of"], given)
        reward, source = wire.reward_of(config, given), wire.source_of(config, given)
        made_of = _made_of(given, source)
        if made_of["problems"] != memory["made_of"]["problems"] and not allow_changes:
            raise InputError(
                f"the problems of {directory.path} are not those it was trained on (their fingerprint differs); give the"
                " same data, or --allow-changes to go on with these"
            )
        policy = wire.policy_of(resolved, given, folder / "model")
        decide_checkpointing(resolved, policy)
        collector = wire.collector_of(config, policy, source, reward)
        reference = _reference_again(resolved, given, policy, directory) if wire.wants_reference(resolved) else None
        trainer = wire.trainer_of(resolved, policy, collector, reference)
        checkpoint.restore(folder, policy, trainer.optimizer, memory)
        trainer.load_sampler(checkpoint.sampler_state(folder))
        positions = recorded_at(directory, memory)
        kept = None if step is None else give_up(directory, step, positions)
        if kept is not None:
            sentences.append(f"what came after step {step} is kept in {kept}")
        checkpoint.set_aside(directory.path / "checkpoints", folder)
        for file, position in positions.items():
            file.truncate(position)
        execution = Execution(
            resolved=resolved,
            directory=directory,
            policy=policy,
            trainer=trainer,
            held_out=wire.held_out_of(config, source, collector, policy.notes),
            watcher=watcher,
            loggers=_loggers(resolved, directory, watcher, int(memory["trainer"]["steps_done"])),
            callback=callback,
            made_of=made_of,
        )
        execution.remember(memory)
        if words:
            directory.write_config(dump(resolved))
        notes = [*sentences, *policy.notes]
        watcher.start(f"{directory.name}: resumed at step {trainer.steps_done} from {folder.name}", notes)
        execution.noted = len(policy.notes)
        return _finish(execution)


def _newest(directory: RunDirectory, resolved: Resolved, watcher: Watcher) -> Path:
    """The newest whole checkpoint; damaged ones are told."""
    try:
        folder, warnings = checkpoint.latest(directory.path / "checkpoints")
    except InputError as error:
        raise InputError(f"{error}; {begin_again(directory.path, resolved, directory.given())}") from None
    for warning in warnings:
        watcher.message(warning)
    return folder


def _made_of(given: wire.Given, source: Source) -> dict[str, Any]:
    """What a run was made of beside its configuration: which things came from Python, and which problems they are."""
    return {
        "problems": wire.fingerprint(source),
        "given": _given(given),
    }


def _given(given: wire.Given) -> list[str]:
    return [name for name in ("model", "problems", "reward") if getattr(given, name) is not None]


def _same_things(made_of: Mapping[str, Any], given: wire.Given) -> None:
    lacking = [name for name in made_of["given"] if getattr(given, name) is None]
    if lacking:
        raise InputError(
            f"this run was given its {' and '.join(lacking)} in Python, which its config.toml does not hold; resume it from"
            f" Python with the same: resume(path, given=Given({', '.join(f'{name}=...' for name in lacking)}))"
        )


def _finish(execution: Execution) -> Run:
    directory, watcher = execution.directory, execution.watcher
    try:
        reason, code = execution.go()
    finally:
        watcher.close()
        for logger in execution.loggers:
            logger.close()
    write_report(directory)
    latest = execution.latest or {}
    return Run(
        directory=directory.path,
        accuracy=latest.get("eval/accuracy_sampled"),
        accuracy_greedy=latest.get("eval/accuracy_greedy"),
        model_folder=newest_model(directory),
        reason=reason,
        exit_code=code,
    )


def _reference_again(resolved: Resolved, given: wire.Given, policy: Any, directory: RunDirectory) -> Reference:
    """The reference of a resumed run: the policy as it was before the first step, not as the checkpoint has it."""
    if resolved.config.policy.lora is not None:
        return Reference.of(policy)
    kept = directory.path / "reference"
    first = wire.policy_of(resolved, given, kept if kept.is_dir() else None)
    first.model.requires_grad_(False)
    return Reference(policy=first, adapters=False)


def _name(resolved: Resolved) -> str:
    config = resolved.config
    if config.output.name is not None:
        return config.output.name
    stem = f"{config.task.kind.rpartition(':')[2]}-{resolved.algorithm.name}-seed{config.training.seed}"
    return unused_name(Path(config.output.directory), stem, 1)


def _notes(resolved: Resolved, loading: Sequence[str]) -> list[str]:
    config = resolved.config
    training = config.training
    notes = [
        f"{training.prompts_per_step} prompts x {config.rollouts.samples_per_prompt} samples a step,"
        f" {count(training.updates_per_step, 'update')}, lr {training.lr:g}, seed {training.seed}",
        *loading,
    ]
    if training.shortens_warm_up:
        notes.append(
            f"the run has {count(training.total_updates, 'update')}: training.warm_up_updates = {training.warm_up_updates}"
            f" is shortened to {training.warm_up(training.total_updates)}"
        )
    for path, kind in (("task.kind", config.task.kind), ("reward.kind", config.reward.kind or "")):
        if ":" in kind:
            notes.append(f"{path} = {kind!r} is code of yours, imported from {os.getcwd()} or the Python path")
    return notes


def _told(resolved: Resolved) -> list[str]:
    return [f"deviates from {resolved.algorithm.name} as published: {each}" for each in resolved.deviations]


def _record_environment(directory: RunDirectory, resolved: Resolved, device: torch.device) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    directory.write_environment(
        {"seed": resolved.config.training.seed, "threads": torch.get_num_threads(), "hardware": {"device": name}}
    )


def _loggers(resolved: Resolved, directory: RunDirectory, watcher: Watcher, first_step: int) -> list[Logger]:
    output = resolved.config.output
    found: list[Logger] = []
    if output.tensorboard:
        found.append(TensorBoardLogger(directory.path / "tensorboard", say=watcher.message, first_step=first_step))
    if output.wandb:
        found.append(
            WandbLogger(
                project=output.project,
                name=directory.name,
                tags=output.tags,
                config=resolved.values,
                folder=directory.path,
                say=watcher.message,
            )
        )
    return found
