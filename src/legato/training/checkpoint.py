"""Checkpoints: a plain Hugging Face folder, the trainer's state beside it, and a manifest of hashes over both.

    step-000120/
      model/                  what AutoModelForCausalLM loads; under LoRA the adapter
      optimizer.safetensors   masters and moments by parameter name; of several ranks optimizer-00001-of-00008.safetensors
                              and so on, each with the pieces of a rank
      value_head.safetensors  where the algorithm has one
      sampler.safetensors     where the engine samples from past weights
      random.safetensors      torch's generator; Python's and numpy's are in trainer.json. Of several ranks a file each,
                              with all three
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
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from legato.core.world import OneProcess, World
from legato.errors import InputError
from legato.policy.policy import Policy, local_part
from legato.records.room import DiskFullError, is_full, os_error_of, reason
from legato.training.optimizer import Optimizer
from legato.training.pieces import Exchange
from legato.training.saved import SavedTensors

Result = TypeVar("Result")

FORMAT = 1
_BEFORE = ".before.partial"
"""The suffix of an old checkpoint while a new one with the same name is written."""
_DIVIDED = ("optimizer.safetensors", "random.safetensors")
_REQUIRED = ("trainer.json", *_DIVIDED)
_SHARE = re.compile(r"(optimizer|random)-(\d{5})-of-(\d{5})\.safetensors")
_READ_IF_PRESENT = ("value_head.safetensors", "sampler.safetensors", "config.toml")
_MODEL_SUFFIXES = {".json", ".safetensors", ".bin", ".pt", ".pth", ".py", ".jinja", ".model", ".txt", ".gguf", ".h5"}
"""Suffixes of the files in a model folder that transformers and peft may read."""


class DamagedError(Exception):
    """A checkpoint whose files differ from its manifest."""


class NotFiniteError(InputError):
    """Weights or optimizer state that are not finite and so are not saved."""


def name_of(step: int) -> str:
    return f"step-{step:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a rank writes of a checkpoint. Weights and state may be those of the run itself, or copies on the host."""

    policy: Policy
    optimizer: Mapping[str, Tensor]
    weights: Mapping[str, Tensor] | None
    """Copies of the weights; None: the model's own are written."""
    value_head: Mapping[str, Tensor] | None
    sampler: Mapping[str, Tensor]
    state: Mapping[str, Any]
    generators: Mapping[str, Any]
    """States of the random generators: tensors of torch's, lists of Python's and numpy's."""
    config: str | None
    rank: int
    size: int

    @property
    def bytes(self) -> int:
        """About how many bytes the checkpoint has, all ranks together."""
        weights = self.policy.model.state_dict() if self.weights is None else self.weights
        tensors = [*weights.values(), *self.sampler.values()]
        return _bytes_of(tensors) + self.size * _bytes_of(self.optimizer.values())


def take_snapshot(
    policy: Policy,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    sampler: Mapping[str, Tensor] | None = None,
    config: str | None = None,
    *,
    world: World | None = None,
    copy: bool = False,
) -> Snapshot:
    """All that a checkpoint holds; with `copy` the run may go on while it is written. NotFiniteError comes on all ranks."""
    world = OneProcess() if world is None else world
    tensors, numbers = optimizer.state()
    for told in world.gather(_find_not_finite(policy, tensors)):
        if told is not None:
            raise NotFiniteError(told)

    def copy_or_hold(contents: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return copy_to_host(contents) if copy else dict(contents)

    weights: Mapping[str, Tensor] | None = None
    adapters = hasattr(policy.model, "merge_and_unload")
    if policy.divided:
        weights = _gather_model(policy, world, adapters)
    elif copy and world.rank == 0:
        weights = copy_or_hold(
            {name: each for name, each in policy.model.state_dict().items() if not adapters or "lora_" in name}
        )
    return Snapshot(
        policy=policy,
        optimizer=copy_or_hold(tensors),
        weights=weights,
        value_head=None if policy.value_head is None else copy_or_hold(policy.value_head.state_dict()),
        sampler=copy_or_hold(sampler or {}),
        state={"optimizer": numbers, **state},
        generators=_generator_states(),
        config=config,
        rank=world.rank,
        size=world.size,
    )


def _gather_model(policy: Policy, world: World, adapters: bool) -> dict[str, Tensor] | None:
    """The whole weights on the host of rank 0, tensor by tensor; None on the other ranks."""
    from legato.training.ranks.layers import gather_weights

    whole = {}
    assert isinstance(world, Exchange)
    for name, tensor in gather_weights(policy, world, trained=adapters):
        if world.rank == 0:
            whole[name] = tensor.to("cpu", copy=True)
    if world.rank:
        return None
    # Buffers and tied names, which are no parameters.
    others = {name: each for name, each in policy.model.state_dict().items() if name not in whole and not adapters}
    return whole | copy_to_host({name: each for name, each in others.items() if type(each) is Tensor})


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host. Names that share a tensor (a head tied to the embedding) share its copy, or it is saved twice."""
    copies: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    held = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in copies or not tensor.numel():
            copies[key] = tensor.detach().to("cpu", copy=True)
        held[name] = copies[key]
    return held


def save(
    folder: Path,
    policy: Policy,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    sampler: Mapping[str, Tensor] | None = None,
    config: str | None = None,
    world: World | None = None,
) -> None:
    """Write a checkpoint, or raise InputError (state not finite; DiskFullError: no room) and leave nothing behind."""
    write(folder, take_snapshot(policy, optimizer, state, sampler, config, world=world), world)


def write(folder: Path, snapshot: Snapshot, world: World | None = None) -> None:
    """Write a checkpoint of which every rank has a snapshot. An error of one rank is raised on all, and nothing is left."""
    world = OneProcess() if world is None else world
    together(world, lambda: begin_writing(folder, snapshot) if world.rank == 0 else None)
    try:
        files = together(world, lambda: write_share(folder, snapshot))
        finish_writing(folder, files, world)
    except BaseException:
        give_up_writing(folder, world)
        raise


def give_up_writing(folder: Path, world: World) -> None:
    """Remove what was written of a checkpoint."""
    if world.rank == 0:
        shutil.rmtree(_partial(folder), ignore_errors=True)


def begin_writing(folder: Path, snapshot: Snapshot) -> None:
    """Make the temporary folder of a checkpoint (rank 0 does)."""
    expected, partial = snapshot.bytes, _partial(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < 2 * expected:
        raise DiskFullError(
            f"no room for a checkpoint in {folder.parent}: {free / 1e6:.0f} MB are free, {2 * expected / 1e6:.0f} MB are"
            " wanted (twice its size)"
        )
    shutil.rmtree(partial, ignore_errors=True)
    with _explain_writing(folder):
        partial.mkdir()


def write_share(folder: Path, snapshot: Snapshot) -> dict[str, Any]:
    """Write the files of one rank into the temporary folder and flush them; their sizes and hashes by name."""
    partial = _partial(folder)
    with _explain_writing(folder):
        paths = _write(partial, snapshot)
        _share(paths, partial)
        for path in paths:
            _flush(path)
        return {str(path.relative_to(partial)): _fingerprint(path) for path in paths}


def finish_writing(folder: Path, files: Mapping[str, Any], world: World | None = None) -> None:
    """Add the manifest of all ranks' files and give the checkpoint its name."""
    world = OneProcess() if world is None else world
    everything = {name: each for told in world.gather(files) for name, each in told.items()}

    def finish() -> None:
        partial = _partial(folder)
        with _explain_writing(folder):
            manifest = partial / "manifest.json"
            manifest.write_text(json.dumps({"format": FORMAT, "files": everything}, indent=1, sort_keys=True))
            for path in (manifest, *(each for each in sorted(partial.rglob("*")) if each.is_dir()), partial):
                _flush(path)
            _rename(partial, folder)

    together(world, lambda: finish() if world.rank == 0 else None)


def together(world: World, function: Callable[[], Result]) -> Result:
    """What the function returns. If it raises an error of the disk or the user on any rank, all ranks raise that error."""
    if world.size == 1:
        return function()
    error: InputError | None = None
    result: Any = None
    try:
        result = function()
    except InputError as refusal:
        error = refusal
    told = [None if error is None else [isinstance(error, DiskFullError), str(error)]]
    for rank, each in enumerate(world.gather(told[0])):
        if each is not None:
            kind = DiskFullError if each[0] else InputError
            raise kind(each[1] if rank == world.rank else f"rank {rank}: {each[1]}")
    return cast(Result, result)


def expected_bytes(policy: Policy) -> int:
    """The size of a checkpoint of a policy: its weights (only adapters if it has some), two moments, masters of 16 bits."""
    trained = policy.parameters()
    saved = trained if hasattr(policy.model, "merge_and_unload") else policy.model.state_dict()
    # Tied weights count once.
    weights = {local_part(tensor).data_ptr(): tensor.numel() * tensor.element_size() for tensor in saved.values()}
    state = sum(each.numel() * (8 if each.element_size() >= 4 else 12) for each in trained.values())
    return sum(weights.values()) + state


def save_reference(policy: Policy, folder: Path) -> str:
    """Write the model of a reference policy with a manifest; returns the SHA-256 of the manifest."""
    write_folder(folder, lambda partial: save_model(policy, partial))
    return file_sha256(folder / "manifest.json")


def share_as_folder(folder: Path) -> None:
    """Give every file the permissions that its folder has: safetensors writes files that only their owner may read."""
    _share([path for path in folder.rglob("*") if path.is_file()], folder)


def _share(paths: Iterable[Path], folder: Path) -> None:
    """Give files the permissions that their folder has."""
    mode = folder.stat().st_mode & 0o666
    for path in paths:
        path.chmod(mode)


def write_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, add a manifest, flush it to disk and give it its name."""
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with _explain_writing(folder):
            write(partial)
            share_as_folder(partial)
            _write_manifest(partial)
            for path in sorted(partial.rglob("*")):
                _flush(path)
            _flush(partial)
            _rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _rename(partial: Path, folder: Path) -> None:
    """Give a temporary folder its name. A recovery writes its checkpoint again: the old one stays until then."""
    before = folder.with_name(f".{folder.name}{_BEFORE}")
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        folder.rename(before)
    partial.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def _explain_writing(folder: Path) -> Iterator[None]:
    """Raise errors of the disk as InputError, a full one as DiskFullError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        cause = os_error_of(error)
        if cause is None:
            raise
        kind = DiskFullError if is_full(cause) else InputError
        raise kind(f"the checkpoint {folder} could not be written: {reason(cause)}") from None


def name_of_share(kind: str, rank: int, size: int) -> str:
    """The file of a rank: optimizer.safetensors, or optimizer-00001-of-00008.safetensors where there are several."""
    return f"{kind}.safetensors" if size == 1 else f"{kind}-{rank + 1:05d}-of-{size:05d}.safetensors"


def _write(folder: Path, snapshot: Snapshot) -> list[Path]:
    """Write the files of one rank; their paths. Other ranks write into the same folder meanwhile."""
    rank, size = snapshot.rank, snapshot.size
    if rank == 0:
        save_model(snapshot.policy, folder / "model", snapshot.weights)
    shares: dict[str, Mapping[str, Tensor]] = {name_of_share("optimizer", rank, size): snapshot.optimizer}
    if rank == 0 and snapshot.sampler:
        shares["sampler.safetensors"] = snapshot.sampler
    for file, contents in shares.items():
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in contents.items()}
        save_file(on_host, folder / file)
    if rank == 0 and snapshot.value_head is not None:
        save_file({n: t.cpu() for n, t in snapshot.value_head.items()}, folder / "value_head.safetensors")
        shares["value_head.safetensors"] = snapshot.value_head
    generators = snapshot.generators
    torch_states = dict(generators["torch"])
    if size > 1:
        text = json.dumps(generators["plain"], sort_keys=True).encode()
        torch_states["python and numpy"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(torch_states, folder / name_of_share("random", rank, size))
    names = [*shares, name_of_share("random", rank, size)]
    if rank == 0:
        state = {**snapshot.state, "generators": generators["plain"]}
        (folder / "trainer.json").write_text(json.dumps(state, sort_keys=True))
        names.append("trainer.json")
        if snapshot.config is not None:
            (folder / "config.toml").write_text(snapshot.config, encoding="utf-8")
            names.append("config.toml")
    model = [path for path in (folder / "model").rglob("*") if path.is_file()] if rank == 0 else []
    return sorted([*model, *(folder / name for name in names)])


def _generator_states() -> dict[str, Any]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    kind, keys, *rest = numpy.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": states,
        "plain": {
            "python": [version, list(internal), gauss],
            "numpy": [kind, [int(key) for key in keys], *[float(x) if isinstance(x, float) else int(x) for x in rest]],
        },
    }


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _write_manifest(folder: Path) -> None:
    files = {str(path.relative_to(folder)): _fingerprint(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True))


def save_model(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a folder that transformers (or, for adapters, peft) loads; `weights` in place of the model's own."""
    policy.model.save_pretrained(folder, **({} if weights is None else {"state_dict": dict(weights)}))
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
        if not (_shares_of(name.removesuffix(".safetensors"), files) if name in _DIVIDED else name in files):
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


def _shares_of(kind: str, files: Collection[str]) -> list[str]:
    """The files of all ranks that hold the optimizer or the generators, in the order of ranks; empty if one is missing."""
    if f"{kind}.safetensors" in files:
        return [f"{kind}.safetensors"]
    matches = [match for name in sorted(files) if (match := _SHARE.fullmatch(name)) is not None and match[1] == kind]
    whole = bool(matches) and len(matches) == int(matches[0][3]) and len({match[3] for match in matches}) == 1
    return [match[0] for match in matches] if whole else []


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
    when = (
        "; a run writes one every output.checkpoint_every_steps steps, and when it ends if output.checkpoint_at_end = true"
    )
    when = "" if warnings else when
    raise InputError("\n".join([f"{checkpoints} holds no whole checkpoint{when}", *warnings]))


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


def restore(
    folder: Path, policy: Policy, optimizer: Optimizer, state: Mapping[str, Any], world: World | None = None
) -> None:
    """Restore optimizer, value head and random generators; the policy itself was loaded from `model/`.

    Each rank reads its own pieces of the optimizer, whatever ranks wrote them.
    """
    world = OneProcess() if world is None else world
    files = list(_manifest(folder / "manifest.json"))
    saved = [folder / name for name in _shares_of("optimizer", files)]
    optimizer.load(SavedTensors(files=saved), state["optimizer"])
    if policy.value_head is not None:
        policy.value_head.load_state_dict(load_file(folder / "value_head.safetensors"))
    generators = _shares_of("random", files)
    states = load_file(folder / generators[min(world.rank, len(generators) - 1)])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    plain = states.get("python and numpy")
    numbers = state["generators"] if plain is None else json.loads(bytes(plain.tolist()))
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = numbers["numpy"]
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


def _find_not_finite(policy: Policy, state: Mapping[str, Tensor]) -> str | None:
    """Why a state must not be saved; None if all of it is finite."""
    for what, tensors in (("weights of", policy.parameters()), ("optimizer state", state)):
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(local_part(tensor)).all()):
                return f"the {what} {name} are not finite; such a state is not saved"
    return None


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
