"""Checkpoints: a plain Hugging Face folder, the trainer's state beside it, and a manifest of hashes over both.

    step-000120/
      model/                  what AutoModelForCausalLM loads; under LoRA the adapter
      optimizer.safetensors   masters and moments by parameter name
      value_head.safetensors  where the algorithm has one
      sampler.safetensors     where the engine samples from past weights
      random.safetensors      torch's generator; Python's and numpy's are in trainer.json
      trainer.json            steps, place in the data, part state, choices, metrics position, hashes of the run's inputs
      config.toml             the configuration that the run had; absent in checkpoints of older versions
      manifest.json           format, size and SHA-256 of every file
A checkpoint is written to a temporary folder, flushed to disk and renamed, so it is complete or absent. Safetensors, JSON
and TOML only.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from legato.errors import InputError
from legato.policy.policy import Policy
from legato.records.room import DiskFullError, is_full, os_error_of, reason
from legato.training.optimizer import Optimizer

FORMAT = 1
_BEFORE = ".before.partial"
"""The suffix of an old checkpoint while a new one with the same name is written."""
_REQUIRED = ("trainer.json", "optimizer.safetensors", "random.safetensors")
_READ_IF_PRESENT = ("value_head.safetensors", "sampler.safetensors", "config.toml")
_MODEL_SUFFIXES = {".json", ".safetensors", ".bin", ".pt", ".pth", ".py", ".jinja", ".model", ".txt", ".gguf", ".h5"}
"""Suffixes of the files in a model folder that transformers and peft may read."""


class DamagedError(Exception):
    """A checkpoint whose files differ from its manifest."""


class NotFiniteError(InputError):
    """Weights or optimizer state that are not finite and so are not saved."""


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def save(
    folder: Path,
    policy: Policy,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    sampler: Mapping[str, Tensor] | None = None,
    config: str | None = None,
) -> None:
    """Write a checkpoint, or raise InputError (state not finite; DiskFullError: no room) and leave nothing behind."""
    tensors, numbers = optimizer.state()
    sampler = sampler or {}
    _check_finite(policy, tensors)
    folder.parent.mkdir(parents=True, exist_ok=True)
    expected = sum(
        t.numel() * t.element_size() for t in [*policy.model.state_dict().values(), *tensors.values(), *sampler.values()]
    )
    free = shutil.disk_usage(folder.parent).free
    if free < 2 * expected:
        raise DiskFullError(
            f"no room for a checkpoint in {folder.parent}: {free / 1e6:.0f} MB are free, {2 * expected / 1e6:.0f} MB are"
            " wanted (twice its size)"
        )
    write_folder(folder, lambda partial: _write(partial, policy, tensors, {"optimizer": numbers, **state}, sampler, config))


def save_reference(policy: Policy, folder: Path) -> str:
    """Write the model of a reference policy with a manifest; returns the SHA-256 of the manifest."""
    write_folder(folder, lambda partial: save_model(policy, partial))
    return file_sha256(folder / "manifest.json")


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, add a manifest, flush it to disk and give it its name."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        write(partial)
        _write_manifest(partial)
        for path in sorted(partial.rglob("*")):
            _flush(path)
        _flush(partial)
        # A recovery writes its checkpoint again: the old one stays until the new one has its name.
        before = folder.with_name(f".{folder.name}{_BEFORE}")
        shutil.rmtree(before, ignore_errors=True)
        if folder.exists():
            folder.rename(before)
        partial.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(before, ignore_errors=True)
    except Exception as error:
        cause = os_error_of(error)
        if cause is None:
            raise
        kind = DiskFullError if is_full(cause) else InputError
        raise kind(f"the checkpoint {folder} could not be written: {reason(cause)}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(
    folder: Path,
    policy: Policy,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    sampler: Mapping[str, Tensor],
    config: str | None,
) -> None:
    save_model(policy, folder / "model")
    for file, contents in (("optimizer", tensors), ("sampler", sampler)):
        if contents or file == "optimizer":
            on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in contents.items()}
            save_file(on_host, folder / f"{file}.safetensors")
    if policy.value_head is not None:
        save_file({n: t.cpu() for n, t in policy.value_head.state_dict().items()}, folder / "value_head.safetensors")
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    save_file(states, folder / "random.safetensors")
    kind, keys, *rest = numpy.random.get_state()
    version, internal, gauss = random.getstate()
    generators = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, [int(key) for key in keys], *[float(x) if isinstance(x, float) else int(x) for x in rest]],
    }
    (folder / "trainer.json").write_text(json.dumps({**state, "generators": generators}, sort_keys=True))
    if config is not None:
        (folder / "config.toml").write_text(config, encoding="utf-8")


def _write_manifest(folder: Path) -> None:
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True))


def save_model(policy: Policy, folder: Path) -> None:
    """Write a folder that transformers (or, for adapters, peft) loads."""
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest; DamagedError names the first that differs."""
    _verify(folder, folder / "model", _REQUIRED)


def verify_reference(folder: Path) -> None:
    """Like `verify`, for a folder that `save_reference` wrote."""
    _verify(folder, folder, ("config.json",))


def _verify(folder: Path, model: Path, required: Sequence[str]) -> None:
    """Compare a folder with its manifest. Files beside the manifest's are harmless unless a resumed run would read them."""
    files = _manifest(folder / "manifest.json")
    for name in required:
        if name not in files:
            raise DamagedError(f"{folder / 'manifest.json'} does not list {name}")
    if not any(Path(folder, name).parent == model and name.endswith(".safetensors") for name in files):
        raise DamagedError(f"{folder / 'manifest.json'} does not list the weights of {model}")
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"manifest.json"}
    for name, (size, digest) in files.items():
        path = folder / name
        if name not in present:
            raise DamagedError(f"{path} is missing, and manifest.json lists it")
        if path.stat().st_size != size or file_sha256(path) != digest:
            raise DamagedError(f"{path} is not what was written: its SHA-256 differs from the manifest")
    for name in sorted(present - set(files)):
        if name in _READ_IF_PRESENT or _is_read_with_model(folder / name, model):
            raise DamagedError(f"{folder / name} is not in the manifest, and a resumed run would read it")


def _is_read_with_model(path: Path, model: Path) -> bool:
    """Whether loading the model folder may read a file. Hidden files (.DS_Store, ._config.json) are not read."""
    if not path.is_relative_to(model):
        return False
    return path.suffix in _MODEL_SUFFIXES and not any(part.startswith(".") for part in path.relative_to(model).parts)


def _manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Size and hash of each file; DamagedError if the manifest cannot be read."""
    try:
        record = json.loads(path.read_text())
        version = record["format"]
        files = {str(name): (int(known["bytes"]), str(known["sha256"])) for name, known in record["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
    if version != FORMAT:
        raise DamagedError(f"{path}: format {version!r}, this version reads {FORMAT}")
    return files


def check(folder: Path) -> None:
    """Like `verify`, but raises InputError: for a checkpoint that the user named."""
    try:
        verify(folder)
    except DamagedError as damage:
        raise InputError(f"the checkpoint {folder} is damaged: {damage}") from None


def latest(checkpoints: Path) -> tuple[Path, list[str]]:
    """The newest undamaged checkpoint, and a warning for each newer one that cannot be used."""
    warnings: list[str] = []
    half_renamed = {each.with_name(_name_of_before(each)) for each in checkpoints.glob(f".step-*{_BEFORE}")}
    for folder in sorted({*_checkpoints_in(checkpoints), *half_renamed}, key=_step, reverse=True):
        try:
            if folder.is_dir():
                verify(folder)
                return folder, [f"{warning}; {folder.name} is used instead" for warning in warnings]
            # `resume` puts it back (`put_back`); readers must not touch a folder that a run may be writing.
            warnings.append(
                f"checkpoint {folder.name} is not used: saving it again was interrupted; `legato resume` mends it"
            )
        except DamagedError as damage:
            warnings.append(f"checkpoint {folder.name} is damaged and is not used: {damage}")
    raise InputError("\n".join([f"{checkpoints} holds no whole checkpoint to resume from", *warnings]))


def put_back(checkpoints: Path) -> None:
    """Rename old checkpoints back if a process was killed between the two renames of `save`.

    Only the holder of the run's lock may call this: another reader may see `save` between its renames.
    """
    for before in checkpoints.glob(f".step-*{_BEFORE}"):
        folder = before.with_name(_name_of_before(before))
        if not folder.exists():
            before.rename(folder)


def _name_of_before(before: Path) -> str:
    return before.name.removeprefix(".").removesuffix(_BEFORE)


def read_state(folder: Path) -> dict[str, Any]:
    """The contents of trainer.json: the `state` that `save` wrote, and the random generators."""
    with explain_contents(folder):
        state = json.loads((folder / "trainer.json").read_text())
        if not isinstance(state, dict):
            raise TypeError(f"trainer.json holds {type(state).__name__}, not an object")
        return state


@contextmanager
def explain_contents(folder: Path) -> Iterator[None]:
    """Raise errors over the contents of a checkpoint as InputError: its files are whole, but not what `save` wrote."""
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
        OSError,
        SafetensorError,
    ) as error:
        raise InputError(
            f"expected a checkpoint as Legato writes it, got {folder}, whose files match its manifest but cannot be used"
            f" ({type(error).__name__}: {' '.join(str(error).split())[:300]}); `legato resume --step N` takes an earlier one"
        ) from error


def restore(folder: Path, policy: Policy, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restore optimizer, value head and random generators; the policy itself was loaded from `model/`."""
    optimizer.load(load_file(folder / "optimizer.safetensors"), state["optimizer"])
    if policy.value_head is not None:
        policy.value_head.load_state_dict(load_file(folder / "value_head.safetensors"))
    states = load_file(folder / "random.safetensors")
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    version, internal, gauss = state["generators"]["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["generators"]["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def sampler_state(folder: Path) -> dict[str, Tensor]:
    """The engine's saved tensors; empty for most engines."""
    path = folder / "sampler.safetensors"
    return load_file(path) if path.is_file() else {}


def set_aside(checkpoints: Path, newest: Path) -> None:
    """Rename the damaged checkpoints newer than the one in use, so that they do not count among the `keep_last` newest.

    Also removes half-written checkpoints of a killed process.
    """
    for partial in checkpoints.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    for folder in _checkpoints_in(checkpoints):
        if _step(folder) > _step(newest):
            target = folder.with_name(f"damaged-{folder.name}")
            shutil.rmtree(target, ignore_errors=True)
            folder.rename(target)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _checkpoints_in(checkpoints: Path) -> list[Path]:
    """All checkpoint folders, oldest first."""
    folders = [p for p in checkpoints.glob("step-*") if p.is_dir() and p.name.removeprefix("step-").isdigit()]
    return sorted(folders, key=_step)


def purge(checkpoints: Path, keep_last: int, kept: Collection[str]) -> None:
    """Delete all checkpoints but the newest `keep_last` and those named in `kept`; failing to delete is harmless."""
    folders = _checkpoints_in(checkpoints)
    for folder in folders[: max(0, len(folders) - keep_last)]:
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def give_up(checkpoints: Path, last: Path, best: str | None) -> Path | None:
    """Delete checkpoints newer than `last`, to which a run was rolled back; the best one is renamed instead and returned."""
    aside = None
    for folder in _checkpoints_in(checkpoints):
        if _step(folder) <= _step(last):
            continue
        if folder.name == best:
            aside = folder.with_name(f"given-up-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return aside


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_finite(policy: Policy, state: Mapping[str, Tensor]) -> None:
    for what, tensors in (("weights of", policy.parameters()), ("optimizer state", state)):
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise NotFiniteError(f"the {what} {name} are not finite; such a state is not saved")
