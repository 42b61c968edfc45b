"""Which of our recipes have stored runs. `recipe_runs.json` is generated from the stored results (`make docs`)."""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")


def untested_notes(files: Sequence[Path]) -> list[str]:
    """A note for each of our recipes of which no run is stored. A file that was changed is the user's own and has none."""
    notes = []
    for file in filter(Path.is_file, files):  # a pipe cannot be read twice
        entry = _by_hash().get(hashlib.sha256(file.read_bytes()).hexdigest())
        if entry is not None and not entry["stored"]:
            notes.append(
                f"no run of {entry['recipe']} is stored: what it reaches is not known (docs/claims.md has the list)"
            )
    return notes


@cache
def _by_hash() -> dict[str, dict[str, Any]]:
    recipes = json.loads(_FILE.read_text(encoding="utf-8"))
    return {entry["sha256"]: {"recipe": recipe, **entry} for recipe, entry in recipes.items()}
