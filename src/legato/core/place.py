"""Where a relative path was meant to start."""

from pathlib import Path


def advice_from_above(path: Path) -> str:
    """Words for the end of an error: the folder above this one in which the path exists; empty if there is none.

    Recipes name files relative to the directory in which legato starts, and people start it inside the folder of the recipe.
    """
    if path.is_absolute():
        return ""
    here = Path.cwd()
    above = next((folder for folder in here.parents if (folder / path).exists()), None)
    return "" if above is None else f"; {above / path} exists: start legato in {above}, or give that path"
