"""Calibrates the bands of studies/exponent.toml: `python -m benchmarks.exponent`, about five minutes of one core.

For each exponent of the length the band (3e-4, 4e-4) is multiplied by a factor, so that the share of tokens without a
gradient in the first step equals that of GSPO (exponent 1). Pilot seeds only. The factors stand in the study file.
"""

import math
import tempfile
from pathlib import Path

import legato
from legato.records.directory import RunDirectory

SEEDS = (100, 101)
EXPONENTS = (0.75, 0.5, 0.25, 0.0)
LOW, HIGH = 3e-4, 4e-4
OPTIONS = {
    "training.steps": 1,
    "training.prompts_per_step": 8,
    "training.updates_per_step": 8,
    "training.lr": 1e-4,
    "training.warm_up_updates": 8,
    "evaluation.every_steps": 0,
    "output.checkpoint_every_steps": 0,
}
ROUNDS = 6


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted = first_clip_fraction(Path(folder), 1.0, 1.0)
        print(f"exponent 1: clip fraction {wanted:.4f} of the first step at {LOW:g}, {HIGH:g}", flush=True)
        for exponent in EXPONENTS:
            # The spread of log r grows as L^(1 - exponent); about 60 tokens.
            factor, low, high = 60.0 ** (1 - exponent), 0.0, math.inf
            for _ in range(ROUNDS):
                share = first_clip_fraction(Path(folder), exponent, factor)
                print(f"  exponent {exponent:g}: factor {factor:.4g} clips {share:.4f}", flush=True)
                low, high = (factor, high) if share > wanted else (low, factor)
                factor = math.sqrt(low * high) if low and high < math.inf else factor * (1.5 if share > wanted else 1 / 1.5)
            print(f"exponent {exponent:g}: low = {factor * LOW:.3g}, high = {factor * HIGH:.3g}", flush=True)


def first_clip_fraction(folder: Path, exponent: float, factor: float) -> float:
    """The mean over the pilot seeds of `clip/tokens` in the first step."""
    shares = []
    for seed in SEEDS:
        run = legato.train(
            recipe="recipes/tiny-counting.toml",
            progress=False,
            **{
                **OPTIONS,
                "training.seed": seed,
                "algorithm.objective.ratio": "length-power",
                "algorithm.objective.ratio.exponent": exponent,
                "algorithm.objective.trust.clip.low": LOW * factor,
                "algorithm.objective.trust.clip.high": HIGH * factor,
                "policy.warm_up.cache": str(folder / "warm"),
                "output.directory": str(folder),
                "output.name": f"{exponent}-{factor:.6g}-{seed}",
            },
        )
        records = RunDirectory.open(run.directory).metrics()
        shares.append(next(record["clip/tokens"] for record in records if record.get("kind") == "step"))
    return math.fsum(shares) / len(shares)


if __name__ == "__main__":
    main()
