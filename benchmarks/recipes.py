"""Which recipes have stored runs: the content of src/legato/config/recipe_runs.json, from the stored results.

`legato train` and `legato explain` note from it that no run of a recipe is stored; docs/claims.md lists them.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMPARISONS = ("moe", "adaptive")
"""Files of results that hold comparisons, each with the recipes it ran."""
OTHERS = {"benchmarks/results/health.json": "recipes/tiny.toml"}
"""Results of scripts that run a recipe."""


def record() -> dict[str, dict[str, Any]]:
    """For every recipe the hash of its file and the files that hold runs of it."""
    stored: dict[str, list[str]] = {}
    for name in COMPARISONS:
        path = f"benchmarks/results/{name}.json"
        for comparison in json.loads((ROOT / path).read_text()).values():
            for recipe in comparison["recipes"]:
                stored.setdefault(recipe, []).append(path)
    path = "benchmarks/results/credit.json"
    credit = json.loads((ROOT / path).read_text())
    for recipes in (comparison["recipes"] for comparison in credit["comparisons"].values()):
        for recipe in recipes:
            stored.setdefault(recipe, []).append(path)
    for environment in credit["runs"]:
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


def record_text() -> str:
    return json.dumps(record(), indent=1) + "\n"
