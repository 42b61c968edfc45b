"""The learning rates of studies/efficiency.toml, from the stored study of the frontier: `python -m benchmarks.rates`.

The rule stands in that file: of the rates at which no run of the arm collapsed on the mixture, nor at their double, the one
with the largest mean accuracy over sampled tokens; the lowest rate if there is none.
"""

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from legato.compare.analysis import area

STORED = Path(__file__).parents[1] / "studies" / "results" / "frontier.json"
ARMS = {"grpo": "token-wide", "gspo": "sequence-narrow"}
"""Arms of the study of efficiency, and what they are called in that of the frontier."""


def best_rate(results: Mapping[str, Any], arm: str, bed: str = "mixture") -> tuple[float, dict[float, float]]:
    """The rate that the rule chooses, and the mean accuracy over sampled tokens at every rate it chose from."""
    rates = sorted(results["sweep"]["training.lr"])
    at = {
        rate: [run for run in results["runs"] if (run["arm"], run["bed"], run["point"]["training.lr"]) == (arm, bed, rate)]
        for rate in rates
    }
    stable = {rate: all(run["status"] == "done" for run in runs) for rate, runs in at.items()}
    # The largest rate has no double in the sweep: whether it has room is not known.
    allowed = [rate for rate, double in pairwise(rates) if stable[rate] and stable[double]] or rates[:1]
    areas = {rate: math.fsum(area(run["evaluations"]) for run in at[rate]) / len(at[rate]) for rate in allowed}
    return max(areas, key=lambda rate: areas[rate]), areas


def main() -> None:
    results = json.loads(STORED.read_text())
    for arm, named in ARMS.items():
        rate, areas = best_rate(results, named)
        print(f"{arm}: {rate:g} of {', '.join(f'{each:g} ({value:.3f})' for each, value in areas.items())}")


if __name__ == "__main__":
    main()
