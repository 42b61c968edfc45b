"""Algorithms whose ratio is one number per response or turn.

N responses, L_i tokens of response i, lw_it = new - old, s_i = exp(mean_t lw_it), W_i = exp(sum_t lw_it).
CLIP(r, A) = min(r A, clamp(r, 1 - low, 1 + high) A).
"""

from legato.advantages.group import GroupStandard
from legato.algorithms.algorithm import Algorithm
from legato.algorithms.catalogue import register_algorithm
from legato.objectives.adaptive import AutoClip
from legato.objectives.aggregates import SequenceMean, SequenceSum, TokenMean
from legato.objectives.clips import Clip, LogClip, TokenLogClip
from legato.objectives.corrections import RouterShift
from legato.objectives.gates import Kernel
from legato.objectives.objective import Objective
from legato.objectives.ratios import (
    Geometric,
    GeometricCarrier,
    GroupExpectation,
    Product,
    ProductWeight,
)

_FOUR_UPDATES = {"training.updates_per_step": 4}


def _gspo_clip() -> Clip:
    return Clip(low=3e-4, high=4e-4)


@register_algorithm(
    paper="arXiv 2507.18071",
    cautions=(
        "The band is about as wide as bf16 noise: log-probs must be float32 and the anchor computed as the new ones are.",
        "A clipped response is lost as a whole; short responses are clipped more, since log s averages over fewer tokens.",
        "The weight of a token is 1 / L_i, which pulls towards short responses (see luspo).",
    ),
)
def gspo() -> Algorithm:
    """Group Sequence Policy Optimization.

    J = (1/N) sum_i CLIP(s_i, A_i)
    log s_i = (1/L_i) sum_t (new_it - old_it)
    dJ/dnew_it = (1/N) (1/L_i) s_i A_i where not clipped, else 0

    Only A and old are detached. The band bounds the length-normalised likelihood change, not the product over tokens.
    """
    return Algorithm(
        name="gspo",
        advantage=GroupStandard(),
        objective=Objective(ratio=Geometric(level="sequence"), trust=(_gspo_clip(),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="our proposal: the clip range of GSPO calibrated while it trains; not in a paper",
    cautions=(
        "It holds a share of clipped responses, which is not a law of learning: a fixed band may learn better on your task.",
        "Updates per step, learning rate and length all move the drift; here they move the band instead of the share.",
        "With one update a step every ratio is 1 and the band never moves.",
    ),
)
def gspo_auto() -> Algorithm:
    """GSPO with a clip range that adapts.

    J = (1/N) sum_i CLIP(s_i, A_i), clipped where sgn(A_i) log s_i > b_high (A_i > 0) or b_low (A_i < 0)
    log b <- log b + rate (f - target) after every update but the first of a step; b_high / b_low stays
    f: share of responses with A_i != 0 that were clipped, under the band of the update before

    Starts as gspo, and is gspo where the band does not move. b stays between three noise floors, as the run's probe measures
    them, and the ceiling. Variants by override: follows = 'perplexity', sides = 'apart', scale = 'sqrt-length'.
    """
    return Algorithm(
        name="gspo-auto",
        advantage=GroupStandard(),
        objective=Objective(ratio=Geometric(level="sequence"), trust=(AutoClip(),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2507.18071, section 4.3",
    cautions=("With advantages of mixed sign in a response, part of it can be clipped and the rest not.",),
)
def gspo_token() -> Algorithm:
    """GSPO-token: the sequence ratio, with advantages that may differ per token.

    J = (1/N) sum_i (1/L_i) sum_t CLIP(s_it, A_it)
    s_it = sg[s_i] pi_it / sg[pi_it]
    dJ/dnew_it = (1/N) (1/L_i) s_i A_it where not clipped, else 0

    Equal to gspo where A_it = A_i. s_i, A and old are detached; the clip follows the sign of A_it.
    """
    return Algorithm(
        name="gspo-token",
        advantage=GroupStandard(),
        objective=Objective(ratio=GeometricCarrier(level="sequence"), trust=(_gspo_clip(),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="our generalisation of GSPO to turns; not in a paper",
    cautions=("Turns are shorter than responses and are clipped more at one band; scale = 'sqrt-length' widens it.",),
)
def turn_gspo() -> Algorithm:
    """GSPO with one ratio per turn.

    J = (1/N) sum_i (1/L_i) sum_u n_u CLIP(s_iu, A_iu)
    log s_iu = (1/n_u) sum over the tokens of turn u of (new - old)

    One turn per response is gspo; turns of one token are grpo.
    """
    return Algorithm(
        name="turn-gspo",
        advantage=GroupStandard(),
        objective=Objective(ratio=Geometric(level="turn"), trust=(_gspo_clip(),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2507.20673",
    cautions=("Sequence advantages only: the clip of every token follows the sign of A_i.",),
)
def gmpo() -> Algorithm:
    """Geometric-Mean Policy Optimization.

    J = (1/N) sum_i A_i exp((1/L_i) sum_t l~_it)
    l~ = lw bounded above by log_high where A_i > 0, below by -log_low where A_i < 0

    Tokens are clipped before the mean; the mean keeps the true length. A and old are detached.
    """
    return Algorithm(
        name="gmpo",
        advantage=GroupStandard(),
        objective=Objective(ratio=Geometric(level="sequence", limit=20.0), trust=(TokenLogClip(),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2510.23027, version 2",
    cautions=(
        "Needs the router-shift ratio gamma of a mixture-of-experts policy; a dense one has none.",
        "Under routing replay gamma must come from the router logits as they would be without replay.",
        "Version 1 of the paper multiplies gamma after the clip: objective.corrections.router-shift.placement.",
    ),
    verified=False,
)
def rspo() -> Algorithm:
    """Router-Shift Policy Optimization: GMPO whose tokens count less the more their experts moved.

    J = (1/N) sum_i A_i exp((1/L_i) sum_t l~_it),  l~ the clip of gmpo applied to lw + log gamma~
    gamma~ = sg[max(gamma, floor)]
    """
    return Algorithm(
        name="rspo",
        advantage=GroupStandard(),
        objective=Objective(
            ratio=Geometric(level="sequence", limit=20.0), trust=(TokenLogClip(),), corrections=(RouterShift(),)
        ),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2602.05261",
    cautions=("The gradient norm grows with length: watch it, and clip gradients.",),
)
def luspo() -> Algorithm:
    """Length-Unbiased Sequence Policy Optimization: GSPO without the 1/L_i weight of a token.

    J = (1/N) sum_i L_i CLIP(s_i, A_i)
    """
    return Algorithm(
        name="luspo",
        advantage=GroupStandard(),
        objective=Objective(ratio=Geometric(level="sequence"), trust=(Clip(low=2e-3, high=2.5e-3),)),
        aggregate=SequenceSum(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2509.09177",
    cautions=("The constants of the band were not found in the paper's text: they must be given.",),
    verified=False,
)
def fspo() -> Algorithm:
    """Fair Sequence Policy Optimization: the product ratio with a band that grows with sqrt(L).

    J = (1/N) sum_i min(W_i A_i, exp(clamp(log W_i, -c_low sqrt(L_i), c_high sqrt(L_i))) A_i)

    Equivalent to clipping log s_i at c / sqrt(L_i).
    """
    return Algorithm(
        name="fspo",
        advantage=GroupStandard(),
        objective=Objective(ratio=Product(), trust=(LogClip(scale="sqrt-length"),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2508.17850",
    cautions=(
        "On-policy the ratio is not 1: a band of 0.2 clips by rank of likelihood inside the group, not by drift.",
        "The denominator needs the whole group: pass the counts of the whole update.",
    ),
)
def gepo() -> Algorithm:
    """Group Expectation Policy Optimization: one denominator for the group.

    J = (1/N) sum_i CLIP(p_i / E_g, A_i)
    p_i = exp(mean_t new), q_i = exp(mean_t old), E_g = sum_j q_j^2 / sum_j q_j over the group
    """
    return Algorithm(
        name="gepo",
        advantage=GroupStandard(),
        objective=Objective(ratio=GroupExpectation(), trust=(Clip(low=0.2, high=0.2),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2602.10693",
    cautions=("The loss value has no meaning: it contains log pi as the carrier of the gradient.",),
)
def vespo() -> Algorithm:
    """VESPO: a smooth kernel on the product ratio, as a detached weight.

    J = (1/tokens) sum_it sg[phi(W_i)] A_i new_it
    phi(W) = W^k exp(rate (1 - W)), (k, rate) = (2, 3) where A >= 0, (3, 2) where A < 0

    W is bounded to [1e-8, e^20]. Weights of a correction multiply W.
    """
    return Algorithm(
        name="vespo",
        advantage=GroupStandard(),
        objective=Objective(ratio=ProductWeight(), trust=(Kernel(),)),
        aggregate=TokenMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="what TRL's RLOOTrainer computes; a baseline that shows why 1/L matters",
    cautions=("The spread of log W grows with length: long responses leave any band at once.",),
)
def seq_product() -> Algorithm:
    """The unnormalised product ratio with PPO's clip.

    J = (1/N) sum_i CLIP(W_i, A_i)
    """
    return Algorithm(
        name="seq-product",
        advantage=GroupStandard(),
        objective=Objective(ratio=Product(), trust=(Clip(low=0.2, high=0.2),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )
