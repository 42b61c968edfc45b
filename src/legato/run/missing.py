"""Refuses targets that do not exist. Loads no torch, so that a mistyped name is told in a moment."""

from pathlib import Path

from legato.errors import InputError
from legato.policy.model.folder import means_a_folder


def check_target(name: str) -> None:
    """InputError if the target of `eval`, `sample`, `export` ... is a folder that does not exist."""
    if not name.endswith(".toml") and means_a_folder(name) and not Path(name).expanduser().exists():
        raise InputError(
            f"expected a run directory, a recipe (.toml) or a model (a folder or a hub name), got {name}: there is no such"
            " folder"
        )


def check_log(path: Path) -> None:
    """InputError if the target of `doctor` does not exist."""
    if not path.exists():
        raise InputError(
            f"expected a run directory or a log (trainer_state.json, .jsonl, .csv), got {path}, which does not exist"
        )
