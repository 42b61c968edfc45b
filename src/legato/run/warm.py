"""The cache of warm-ups: runs that would warm up the same weights in the same way do it once between them."""

import dataclasses
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from legato.errors import InputError
from legato.policy.policy import Policy
from legato.records.room import DiskFullError, is_full, os_error_of, until_room


def warm_up_once(policy: Policy, folder: Path, key: str, warm_up: Callable[[], None]) -> bool:
    """Call `warm_up` and store the weights, or load the weights that another run stored. True if they were loaded.

    A run that finds another at work on the same key waits for it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"expected a folder that can be written, got {folder} (policy.warm_up.cache): {error.strerror}"
        ) from None
    weights = folder / f"{key}.safetensors"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if weights.exists():
            with torch.no_grad():
                for name, tensor in load_file(weights).items():
                    policy.model.get_parameter(name).copy_(tensor)
            return True
        warm_up()
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in policy.model.named_parameters()}
        until_room(lambda: _store(tensors, weights))
    return False


def _store(tensors: dict[str, torch.Tensor], weights: Path) -> None:
    """Write the weights under their name once they are complete; DiskFullError if there is no room for them."""
    partial = weights.with_suffix(".partial")
    try:
        save_file(tensors, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(weights)
    except Exception as error:
        partial.unlink(missing_ok=True)
        if is_full(os_error_of(error)):
            raise DiskFullError(f"no room for {weights} (policy.warm_up.cache): the disk is full") from error
        raise


def warm_up_key(weights: str, problems: str, stage: Any, first_examples: list[Any], device: torch.device) -> str:
    """A hash of everything the weights after a warm-up depend on."""
    tokens = [(prompt.tolist(), response.tolist()) for prompt, response in first_examples]
    fields = {name: value for name, value in dataclasses.asdict(stage).items() if name != "cache"}
    machine = (device.type, torch.get_num_threads() if device.type == "cpu" else 0, torch.__version__)
    return hashlib.blake2b(repr((weights, problems, fields, tokens, machine)).encode(), digest_size=16).hexdigest()
