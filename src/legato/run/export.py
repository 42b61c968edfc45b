"""Exports a checkpoint as a plain Hugging Face folder; LoRA is merged into the weights or left as an adapter."""

import shutil
from pathlib import Path

from legato.errors import InputError
from legato.records.room import os_error_of, reason
from legato.run.target import Target

_PARTIAL = ".legato-export.partial"
"""The folder within the target that an export is written to. It is on the same disk, whatever is mounted where."""


def export(target: Target, folder: Path, *, merge: bool = True, allow_older: bool = False) -> None:
    """Write the model folder. InputError if it has content or cannot be written; a failed export leaves nothing behind.

    A damaged newest checkpoint is an InputError too; with `allow_older` the newest undamaged one is exported instead.
    """
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
        _write(target, partial, merge)
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


def _write(target: Target, folder: Path, merge: bool) -> None:
    if target.saved is not None and (target.resolved.config.policy.lora is None or not merge):
        shutil.copytree(target.saved, folder, dirs_exist_ok=True)
        return
    policy = target.policy()
    model = policy.model.merge_and_unload() if hasattr(policy.model, "merge_and_unload") and merge else policy.model
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
