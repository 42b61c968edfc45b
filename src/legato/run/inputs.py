"""The inputs of a run beside its checkpoints: hashes of them are stored in each checkpoint and checked by a resumed run.

A checkpoint's state holds them as `made_of`:

    problems    fingerprint of the training problems
    given       names of the inputs that were Python objects
    code        SHA-256 of the user's files by reference: parts, tasks, rewards, environment, engine
    files       SHA-256 of the files that options of tasks and rewards name, by option
    base        the weights a resumed run takes from `policy.model`: fingerprint, dtype, SHA-256 of the folder's other files
    reference   SHA-256 of reference/manifest.json, if there is one
    date        the day on which the run was started, if its chat template writes the date into prompts
The configuration is a file of the checkpoint: config.toml. Runs made by older versions have neither files, base, reference
nor config.toml.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from legato.config.load import load
from legato.config.resolved import Resolved, dump
from legato.errors import InputError
from legato.policy.policy import Policy
from legato.records.directory import RunDirectory
from legato.run import wire
from legato.training import checkpoint
from legato.training.ahead import Ahead
from legato.training.collect import Collector


def config_of_checkpoint(folder: Path, now: Resolved) -> Resolved:
    """The configuration that the run had at a checkpoint; `now` if they are equal or the checkpoint does not hold it."""
    path = folder / "config.toml"
    if not path.is_file() or path.read_text(encoding="utf-8") == dump(now):
        return now
    try:
        return load([path])
    except InputError as error:
        raise InputError(
            f"config.toml or a file it names has changed since {folder.name}, and the configuration of that checkpoint"
            f" cannot be loaded any more; put the old files back\n{error}"
        ) from None


def restore_config(directory: RunDirectory) -> list[str]:
    """Write config.toml again if it was deleted and a checkpoint holds it; a sentence that says so."""
    if directory.config_path.is_file():
        return []
    folder, _ = checkpoint.latest(directory.path / "checkpoints")
    if not (folder / "config.toml").is_file():
        raise InputError(f"expected a run directory, got {directory.path}: config.toml missing; put it back")
    directory.write_config((folder / "config.toml").read_text(encoding="utf-8"))
    return [f"config.toml was missing and is written again, as it was at {folder.name}"]


def option_files(resolved: Resolved, objects: wire.PythonObjects) -> dict[str, str]:
    """The SHA-256 of each file that an option of a task or a reward names, those of evaluation sets included."""
    task, reward = resolved.config.task, resolved.config.reward
    options: dict[str, Any] = {}
    if objects.problems is None:
        options |= {f"task.{name}": value for name, value in task.options.items()}
        second = {} if task.second is None else task.second.options
        options |= {f"task.second.{name}": value for name, value in second.items()}
    if objects.reward is None:
        options |= {f"reward.{name}": value for name, value in reward.options.items()}
        for component, each in reward.components.items():
            options |= {f"reward.components.{component}.{name}": value for name, value in each.options.items()}
    for name, one in resolved.config.evaluation.sets.items():
        options |= {f"evaluation.sets.{name}.task.{key}": value for key, value in one.task.options.items()}
        of_reward = {} if one.reward is None else one.reward.options
        options |= {f"evaluation.sets.{name}.reward.{key}": value for key, value in of_reward.items()}
    named = {option: Path(value) for option, value in options.items() if isinstance(value, str) and "\0" not in value}
    return {option: checkpoint.file_sha256(path) for option, path in named.items() if _is_file(path)}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the text of a prompt, say, is too long for a path
        return False


def base_weights(
    resolved: Resolved, objects: wire.PythonObjects, policy: Policy, fingerprint: str | None = None
) -> dict[str, Any]:
    """Fingerprint of the weights that are loaded from `policy.model`: all weights of `policy` but its adapters.

    `fingerprint` is the policy's `base_fingerprint` where it is known.
    """
    model = resolved.config.policy.model
    folder = None if objects.model is not None or not _is_folder(model) else Path(model).expanduser()
    files = [] if folder is None else [path for path in sorted(folder.iterdir()) if path.is_file()]
    # The weights are hashed as they were loaded. What else is in the folder is small.
    small = [path for path in files if path.suffix in (".json", ".jinja", ".model", ".txt") and path.name[0] != "."]
    return {
        "weights": wire.base_fingerprint(policy) if fingerprint is None else fingerprint,
        "dtype": str(policy.dtype).removeprefix("torch."),
        "files": {path.name: checkpoint.file_sha256(path) for path in small},
    }


def _is_folder(model: str) -> bool:
    return Path(model).expanduser().is_dir()


def reads_base(resolved: Resolved, directory: RunDirectory) -> bool:
    """Whether a resumed run takes weights from `policy.model`: under adapters, or for a reference that was not saved."""
    if resolved.config.policy.lora is not None:
        return True
    return wire.wants_reference(resolved) and not (directory.path / "reference").exists()


def check_files(before: Mapping[str, str], now: Mapping[str, str], resolved: Resolved, allowed: bool) -> list[str]:
    """One sentence per file of an option that changed since the checkpoint; InputError without --allow-changes."""
    options = [option for option, sha256 in now.items() if before.get(option, sha256) != sha256]
    changed = [f"{resolved.values.get(option, 'file')} ({option})" for option in options]
    if changed and not allowed:
        raise InputError(
            f"expected the files of the run as they were, got changes in {' and '.join(changed)}; put the old file back, or"
            " --allow-changes to go on with the new one"
        )
    return [f"changed: the file {each}" for each in changed]


def check_base(before: Mapping[str, Any] | None, now: Mapping[str, Any], model: str, allowed: bool) -> list[str]:
    """Compare `base_weights` with those at the start of the run; InputError without --allow-changes if they differ."""
    if before is None:
        return []
    sentences = []
    files = sorted({*before["files"], *now["files"]})
    # A run that was moved may name its model otherwise than by a folder: then there are no files to compare.
    both = bool(before["files"]) and bool(now["files"])
    changed = [name for name in files if both and before["files"].get(name) != now["files"].get(name)]
    if before["dtype"] != now["dtype"]:
        sentences.append(f"the weights of {model} are {now['dtype']}, they were {before['dtype']}: they cannot be compared")
    elif before["weights"] != now["weights"]:
        changed.insert(0, "weights")
    if changed and not allowed:
        raise InputError(
            f"expected the model as it was when the run was started, got other {' and '.join(changed)} (policy.model ="
            f" {model!r}); put the old model back, or --allow-changes to go on with this one"
        )
    return [*sentences, *(f"changed: {name} of the model {model}" for name in changed)]


def check_reference(directory: RunDirectory, resolved: Resolved, before: Mapping[str, Any]) -> None:
    """InputError if reference/ is missing, damaged or another than the run wrote."""
    folder = directory.path / "reference"
    needed = resolved.config.policy.warm_up is not None or "model" in before["given"]
    if resolved.config.policy.lora is not None or not (needed or "reference" in before):
        return
    if not folder.is_dir():
        raise InputError(
            f"expected the model that the KL term compares with, got no folder {folder}; put it back: without it the run"
            " would train otherwise"
        )
    if "reference" not in before:
        return
    try:
        checkpoint.verify_reference(folder)
        if checkpoint.file_sha256(folder / "manifest.json") != before["reference"]:
            raise checkpoint.DamagedError(f"{folder / 'manifest.json'} is not the one that was written")
    except checkpoint.DamagedError as damage:
        raise InputError(
            f"expected the model that the KL term compares with as it was written, got a damaged one: {damage}; put the"
            f" folder {folder} back, or start a new run"
        ) from None


def date_note(date: str | None) -> str:
    """A note on a chat template that writes the date into prompts."""
    if date is None:
        return "the chat template writes the date into prompts: they differ from those of another day"
    return f"the chat template writes the date into prompts: it is {date} throughout the run, also after a resume"


def unchecked(folder: Path, made_of: Mapping[str, Any], from_base: bool, wants_reference: bool) -> list[str]:
    """A note on the inputs for which a checkpoint of an older version holds no hashes."""
    missing = {
        "config.toml": not (folder / "config.toml").is_file(),
        "your own files": "code" not in made_of,
        "data files": "files" not in made_of,
        "the model folder": from_base and "base" not in made_of,
        "reference/": wants_reference and not from_base and "reference" not in made_of,
    }
    names = [name for name, lacks in missing.items() if lacks]
    if not names:
        return []
    return [
        f"{folder.name} was saved by an older version without hashes: whether {', '.join(names)} changed since could not be"
        " checked"
    ]


def describe_threads(policy: Policy, state: Mapping[str, Any], environment: Mapping[str, Any]) -> list[str]:
    """A note if a run on a CPU is resumed with another number of threads, which rounds otherwise."""
    before, now = state.get("threads", environment.get("threads")), torch.get_num_threads()
    if policy.device.type != "cpu" or not isinstance(before, int) or before == now:
        return []
    return [
        f"this process computes with {now} threads, the run did so with {before}: sums are rounded otherwise, and the result"
        f" will not equal the uninterrupted run to the bit (OMP_NUM_THREADS={before} gives the same number)"
    ]


def read_journal(collector: Collector, *, goes_back: bool, changed: bool) -> list[str]:
    """Read the groups that were sampled after the checkpoint, if the run goes on as it did then; what to tell of them.

    A run that goes back to an earlier step, or on with changed options, asks for them again.
    """
    if not isinstance(collector, Ahead) or collector.journal is None:
        return []
    if changed:
        collector.forget_sampled()
        return ["groups that were sampled ahead with the old options are not used, but asked for again"]
    if goes_back:
        return []  # loading the checkpoint deletes the journal
    collector.journal.read()
    return list(collector.journal.notes)
