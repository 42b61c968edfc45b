"""Calibrates the bands of studies/exponent.toml or another study of the exponent, on its pilot seeds:

    python -m benchmarks.exponent studies/exponent-2.toml --gpus 0 --parallel 16

For each exponent of the length the band (3e-4, 4e-4) is multiplied by a factor, so that the share of tokens without a
gradient in the first step equals that of GSPO (exponent 1). Every factor is tried in runs of one step; the one wanted is
read off between two that lie around it, and a second round looks closer. The factors stand in the study file.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from legato.cli.comparison import chosen_machine
from legato.compare.compare import compare
from legato.compare.processes import Machine
from legato.compare.registration import read_study

SEEDS = (100, 101)
EXPONENTS = (0.75, 0.5, 0.25, 0.0)
LOW, HIGH = 3e-4, 4e-4
TYPICAL_LENGTH = 80.0
"""The spread of log r grows about as the length to 1 - exponent: where the search begins."""
STEPS = (0.3, 0.55, 1.0, 1.8, 3.2)
CLOSER = (0.85, 1.0, 1.18)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, nargs="?", default=Path("studies/exponent.toml"))
    parser.add_argument("--gpus", default="")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--output", type=Path, help="A file for everything that was measured.")
    options = parser.parse_args()
    machine = chosen_machine(options.parallel, options.gpus)
    factors = {exponent: TYPICAL_LENGTH ** (1 - exponent) for exponent in EXPONENTS}
    measured: dict[float, dict[float, float]] = {exponent: {} for exponent in EXPONENTS}
    with tempfile.TemporaryDirectory() as folder:
        for number, steps in enumerate((STEPS, CLOSER)):
            tried = {exponent: [factor * step for step in steps] for exponent, factor in factors.items()}
            wanted, shares = clip_fractions(options.study, tried, Path(folder) / str(number), Path(folder) / "warm", machine)
            for exponent in EXPONENTS:
                measured[exponent] |= shares[exponent]
                factors[exponent] = factor_of_share(measured[exponent], wanted)
    for exponent, factor in factors.items():
        print(f"exponent {exponent:g}: low = {factor * LOW:.3g}, high = {factor * HIGH:.3g}", flush=True)
    if options.output is not None:
        content = {"wanted": wanted, "factors": factors, "measured": measured}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


def clip_fractions(
    file: Path, factors: Mapping[float, Sequence[float]], folder: Path, warm: Path, machine: Machine
) -> tuple[float, dict[float, dict[float, float]]]:
    """The share of tokens clipped in the first step at exponent 1, and at each exponent and factor; means over the seeds."""
    study = read_study(file)
    arms: dict[str, dict[str, Any]] = {"a1": _arm(1.0, 1.0)}
    names = {(exponent, factor): f"a{exponent:g}-x{factor:.5g}" for exponent, row in factors.items() for factor in row}
    arms |= {name: _arm(*key) for key, name in names.items()}
    (bed,) = study.definition.beds.values()
    options = {**study.definition.options, **bed.options, "policy.warm_up.cache": str(warm)}
    options |= {"training.steps": 1, "evaluation.every_steps": 0, "task.held_out": 4}
    definition = replace(study.definition, recipes=bed.recipes, beds={}, arms=arms, seeds=SEEDS, options=options)
    runs = compare(definition, folder=folder, machine=machine, keep_checkpoints=False).results["runs"]

    def share(arm: str) -> float:
        values = [run["clip_mean"] for run in runs if run["arm"] == arm]
        return math.fsum(values) / len(values)

    print(f"exponent 1: clip fraction {share('a1'):.4f} of the first step at {LOW:g}, {HIGH:g}", flush=True)
    shares: dict[float, dict[float, float]] = {exponent: {} for exponent in factors}
    for (exponent, factor), name in names.items():
        shares[exponent][factor] = share(name)
        print(f"  exponent {exponent:g}: factor {factor:.4g} clips {share(name):.4f}", flush=True)
    return share("a1"), shares


def factor_of_share(shares: Mapping[float, float], wanted: float) -> float:
    """The factor at which the wanted share is clipped: between the two measured around it, else the nearest."""
    ordered = sorted(shares.items())
    for (low, above), (high, below) in pairwise(ordered):
        if above >= wanted >= below and above > below:
            weight = (above - wanted) / (above - below)
            return math.exp(math.log(low) + weight * math.log(high / low))
    return min(shares, key=lambda factor: abs(shares[factor] - wanted))


def _arm(exponent: float, factor: float) -> dict[str, Any]:
    return {
        "algorithm.name": "gspo",
        "algorithm.objective.ratio": "length-power",
        "algorithm.objective.ratio.exponent": exponent,
        "algorithm.objective.trust.clip.low": LOW * factor,
        "algorithm.objective.trust.clip.high": HIGH * factor,
    }


if __name__ == "__main__":
    main()
