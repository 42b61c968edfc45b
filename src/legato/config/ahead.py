"""What follows from `rollouts.ahead`: the old policy is recomputed, and a correction stands between it and the sampler.

Responses that are sampled ahead come from older weights. The clip compares the new policy with the old one, so a weight
old / sampler has to account for the rest. It has the level of the ratio: of a response, a product over its tokens would
grow with length, so the weight is their geometric mean.
"""

import dataclasses

from legato.algorithms.algorithm import Algorithm
from legato.objectives.corrections import TruncatedImportance

CAP = 2.0
ORIGIN = "rollouts.ahead"
"""The origin of options that follow from it."""
_LEVELS = {"token": "token", "sequence": "sequence", "turn": "match"}
_UNITS = {
    "token": "each token",
    "turn": "each turn by the geometric mean over its tokens",
    "sequence": "each response by the geometric mean over its tokens",
}


def add_correction(algorithm: Algorithm) -> tuple[Algorithm, str]:
    """The algorithm with the default correction, and a note that says so."""
    level = algorithm.objective.ratio.level
    part = TruncatedImportance(cap=CAP, level=_LEVELS[level])
    corrections = (*algorithm.objective.corrections, part)
    objective = dataclasses.replace(algorithm.objective, corrections=corrections)
    note = (
        f"a correction is added, since responses may be older than the policy: tis weighs {_UNITS[level]} with old policy /"
        f" sampler, at most {CAP:g}; set algorithm.objective.corrections for another one, or to [] for none"
    )
    return dataclasses.replace(algorithm, objective=objective), note


def corrects_sampler(algorithm: Algorithm) -> bool:
    """Whether the algorithm itself accounts for a sampler that is not the old policy."""
    objective = algorithm.objective
    if getattr(objective.ratio, "anchor", "old") == "sampler":
        return True  # the ratio is new / sampler: a weight would count the sampler twice
    return any("sampler_logprobs" in part.needs() for part in objective.corrections)
