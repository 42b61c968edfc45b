"""Exports a checkpoint as a plain Hugging Face folder; LoRA is merged into the weights or left as an adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from legato.errors import InputError
from legato.records.room import os_error_of, reason
from legato.run.target import Target
from legato.training.checkpoint import share_as_folder

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that weights can be exported in."""

_PARTIAL = ".legato-export.partial"
"""The folder within the target that an export is written to. It is on the same disk, whatever is mounted where."""


def export(target: Target, folder: Path, *, merge: bool = True, allow_older: bool = False, dtype: str | None = None) -> None:
    """Write the model folder. InputError if it has content or cannot be written; a failed export leaves nothing behind.

    `dtype` is one of DTYPES. None: 16 bits if the model that was trained is published in 16 bits, else as in the checkpoint.

    A damaged newest checkpoint is an InputError too; with `allow_older` the newest undamaged one is exported instead.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"expected {', '.join(DTYPES)}, got {dtype!r} (--dtype)")
    if target.warnings and not allow_older:
        raise InputError(
            f"expected the newest checkpoint whole, got a damaged one ({'; '.join(target.warnings)}); add --allow-older to"
            " export the older one, or name one with --step"
        )
    partial = folder / _PARTIAL
    is_new = not folder.exists()
    # The partial folder of an export that was killed is not content.
    if not is_new and (not folder.is_dir() or any(path != partial for path in folder.iterdir())):
        raise InputError(f"expected a new or empty folder, got {folder}, which has content and is never overwritten")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(target, partial, merge, dtype)
        share_as_folder(partial)
        for path in sorted(partial.iterdir()):
            path.rename(folder / path.name)
        partial.rmdir()
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        cause = os_error_of(error)
        if cause is None or isinstance(error, InputError):
            raise
        raise InputError(
            f"cannot write the model to {folder}: {reason(cause)}; choose another folder or make room"
        ) from error


def _write(target: Target, folder: Path, merge: bool, dtype: str | None) -> None:
    lora = target.resolved.config.policy.lora is not None
    if dtype is None and (merge or not lora):
        dtype = _published_dtype(target)
    if target.saved is not None and (not lora or not merge):
        shutil.copytree(target.saved, folder, dirs_exist_ok=True)
        if dtype is not None:
            _convert(folder, dtype)
        return
    policy = target.policy()
    model = policy.model.merge_and_unload() if hasattr(policy.model, "merge_and_unload") and merge else policy.model
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def _published_dtype(target: Target) -> str | None:
    """The 16-bit dtype that the config of the trained model names; None if it is another one or cannot be read."""
    name = target.resolved.config.policy.model
    if "model" in target.python_inputs or name in ("tiny", "tiny-moe", "smollm2"):
        return None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(Path(name).expanduser() if Path(name).exists() else name, local_files_only=True)
    except Exception:  # neither here nor in the cache any more, or with code of its own
        return None
    dtype = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16") else None


def _convert(folder: Path, dtype: str) -> None:
    """Convert the weights of a model folder, file by file."""
    wanted = getattr(torch, dtype)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        if any(tensor.is_floating_point() and tensor.dtype != wanted for tensor in tensors.values()):
            converted = {name: each.to(wanted) if each.is_floating_point() else each for name, each in tensors.items()}
            save_file(converted, path, metadata=metadata)
    _edit(folder / "config.json", lambda config: {**config, "dtype": dtype})
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    _edit(
        folder / "model.safetensors.index.json",
        lambda index: {**index, "metadata": {**index.get("metadata", {}), "total_size": sum(sizes)}},
    )


def _edit(path: Path, change: Any) -> None:
    if path.is_file():
        path.write_text(json.dumps(change(json.loads(path.read_text(encoding="utf-8"))), indent=2) + "\n", encoding="utf-8")
