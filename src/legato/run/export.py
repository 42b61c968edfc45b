"""Exports a checkpoint as a plain Hugging Face folder; LoRA is merged into the weights or left as an adapter."""

import shutil
from pathlib import Path

from legato.errors import InputError
from legato.run.target import Target


def export(target: Target, folder: Path, *, merge: bool = True, allow_older: bool = False) -> None:
    """Write the model folder. InputError if the folder exists and is not empty, or if the newest checkpoint is damaged.

    With `allow_older` the newest undamaged checkpoint is exported instead of a damaged one.
    """
    if target.warnings and not allow_older:
        raise InputError(
            f"expected the newest checkpoint whole, got a damaged one ({'; '.join(target.warnings)}); add --allow-older to"
            " export the older one, or name one with --step"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"expected a new or empty folder, got {folder}, which has content and is never overwritten")
    if target.saved is not None and (target.resolved.config.policy.lora is None or not merge):
        shutil.copytree(target.saved, folder, dirs_exist_ok=True)
        return
    policy = target.policy()
    model = policy.model.merge_and_unload() if hasattr(policy.model, "merge_and_unload") and merge else policy.model
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
