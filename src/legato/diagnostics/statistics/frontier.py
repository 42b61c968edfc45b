"""The largest value of a swept option that a seed survives."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any


def frontier(survived: Mapping[float, bool]) -> dict[str, Any]:
    """{"value", "variance", "censored"}: log2 of the largest value up to which all survived, from whether each did.

    Where none did, half the smallest value. `variance` is that of the grid; `censored` is "low" where none survived and
    "high" where all did, since the truth then lies beyond the sweep.
    """
    values = sorted(survived)
    stable = 0
    while stable < len(values) and survived[values[stable]]:
        stable += 1
    steps = [math.log2(high / low) for low, high in pairwise(values)]
    edge = values[stable - 1] if stable else values[0] / 2 ** (steps[0] if steps else 1)
    # A frontier read off a grid is off by up to one step: the variance of a uniform error.
    variance = (max(steps) if steps else 1.0) ** 2 / 12
    censored = "low" if stable == 0 else "high" if stable == len(values) else None
    return {"value": math.log2(edge), "variance": variance, "censored": censored}
