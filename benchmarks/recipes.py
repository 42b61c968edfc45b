"""Which recipes have stored runs: the content of src/legato/config/recipe_runs.json, from the stored results.

Whatever loads a recipe notes from it that no run of it is stored (`legato train`, `legato plan`); docs/claims.md lists them.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OTHERS = {"benchmarks/results/health.json": "recipes/tiny.toml"}
"""Results of scripts that run a recipe and do not name it in their file."""


def record() -> dict[str, dict[str, Any]]:
    """For every recipe the hash of its file and the files that hold runs of it."""
    stored: dict[str, list[str]] = {}
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for recipe in recipes_of_comparisons(json.loads(file.read_text())):
            stored.setdefault(recipe, []).append(str(file.relative_to(ROOT)))
    path = "benchmarks/results/credit.json"
    for environment in json.loads((ROOT / path).read_text()).get("runs", {}):
        stored.setdefault(f"recipes/tiny-{environment}.toml", []).append(path)
    for file in sorted((ROOT / "studies" / "results").glob("*.json")):
        for recipes in json.loads(file.read_text())["beds"].values():
            for recipe in recipes:
                stored.setdefault(recipe, []).append(str(file.relative_to(ROOT)))
    for path, recipe in OTHERS.items():
        stored.setdefault(recipe, []).append(path)
    files = sorted((ROOT / "recipes").glob("*.toml"))
    return {
        f"recipes/{file.name}": {
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "stored": sorted({*stored.get(f"recipes/{file.name}", [])}),
        }
        for file in files
    }


def recipes_of_comparisons(content: Any) -> Iterator[str]:
    """The recipes that the comparisons in a file of results name, wherever in the file they are."""
    if isinstance(content, dict):
        names = content.get("recipes", [])
        yield from names if isinstance(names, list) else []
        for value in content.values():
            yield from recipes_of_comparisons(value)


def record_text() -> str:
    return json.dumps(record(), indent=1) + "\n"
