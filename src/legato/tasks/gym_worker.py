"""Reasoning Gym as it runs in a worker (`workers/pool.py`) that makes problems.

In a process of its own because some of its data sets draw from the global random state, execute code that comes with them,
or depend on the order of sets; there the hash seed is fixed and the random states are ours.
"""

import json
import random
from typing import Any


def prepare() -> None:
    """Import Reasoning Gym before the first problem."""
    import reasoning_gym  # type: ignore[import-untyped, unused-ignore]  # noqa: F401


def entry(dataset: str, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """One problem, a pure function of the arguments. `whole` is the full entry in the form that scoring reads.

    For an unknown data set, `known` lists the names of all data sets.
    """
    import numpy
    import reasoning_gym
    from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped, unused-ignore]

    if dataset not in DATASETS:
        return {"known": sorted(DATASETS)}

    random.seed(seed)
    numpy.random.seed(seed)
    problem = reasoning_gym.create_dataset(dataset, seed=seed, size=1, **settings)[0]
    return {
        "question": problem["question"],
        "answer": problem["answer"],
        "metadata": json.loads(json.dumps(problem["metadata"], default=str)),
        "whole": json.dumps(_tag_types(problem)),
    }


def _tag_types(value: Any) -> Any:
    """Encode tuples as {"tuple": [...]} and mappings as {"mapping": pairs}: some data sets compare tuples, JSON has none."""
    if isinstance(value, tuple):
        return {"tuple": [_tag_types(item) for item in value]}
    if isinstance(value, list):
        return [_tag_types(item) for item in value]
    if isinstance(value, dict):
        return {"mapping": [[_tag_types(key), _tag_types(item)] for key, item in value.items()]}
    return value
