"""Names of models: a folder, or a name on the hub. Standard library only, so that a missing folder is told in a moment."""

from pathlib import Path

from legato.errors import InputError


def means_a_folder(name: str) -> bool:
    """Whether a name is a path and no hub name, whose form is NAME or OWNER/NAME, even if nothing is there.

    OWNER may be a folder here: then NAME is looked for in that folder and not on the hub, unless models of OWNER are there.
    """
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~", "runs/")) or len(path.parts) > 2:
        return True
    return len(path.parts) == 2 and path.parent.exists() and next(path.parent.glob("*/config.json"), None) is None


def check_folder(path: Path) -> None:
    """InputError if there is no folder at a path."""
    where = f"policy.model = {str(path)!r}"
    if not path.exists():
        raise InputError(f"{where}: there is no such folder; a folder with config.json, weights and tokenizer is needed")
    if not path.is_dir():
        raise InputError(f"{where} is a file; the folder that holds config.json, weights and tokenizer is needed")
