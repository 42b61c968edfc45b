"""Algorithms whose ratio is one number per token: w_it = exp(new_it - old_it).

CLIP(r, A) = min(r A, clamp(r, 1 - low, 1 + high) A).
"""

from legato.advantages.batch import GroupCentreBatchStandard
from legato.advantages.filters import ZeroVariance
from legato.advantages.gae import GeneralisedAdvantage
from legato.advantages.group import GroupCentre, GroupCentreBatchDeviation, GroupStandard, LeaveOneOut
from legato.algorithms.algorithm import Algorithm
from legato.algorithms.catalogue import register_algorithm
from legato.objectives.aggregates import (
    GroupTokenMean,
    SequenceMean,
    SequenceSum,
    SequenceSumOverConstant,
    TokenMean,
)
from legato.objectives.clips import BalancedClip, Clip, PredicateMask, WeightClip
from legato.objectives.corrections import TruncatedImportance
from legato.objectives.gates import SoftGate
from legato.objectives.masks import DivergenceMask
from legato.objectives.objective import Objective
from legato.objectives.penalties import ValueLoss
from legato.objectives.ratios import Geometric, GeometricWeight, NoRatio

_ONE_UPDATE = {"training.updates_per_step": 1}
_FOUR_UPDATES = {"training.updates_per_step": 4}
_DYNAMIC_SAMPLING = {"training.updates_per_step": 16, "task.resampling": "dynamic"}


def _token_ratio() -> Geometric:
    return Geometric(level="token", limit=20.0)


def _ppo_clip() -> Clip:
    return Clip(low=0.2, high=0.2)


@register_algorithm(
    paper="DeepSeekMath, arXiv 2402.03300",
    cautions=(
        "1/L_i under-weights the tokens of long answers, right or wrong; 1/std over-weights nearly solved prompts.",
        "Where A < 0 a ratio far above 1 pulls without limit: add dual-clip.",
        "The paper's KL is one override away: objective.penalties.kl.beta = 0.04 (its gradient is that of the forward KL).",
    ),
)
def grpo() -> Algorithm:
    """Group Relative Policy Optimization.

    J = (1/N) sum_i (1/L_i) sum_t CLIP(w_it, A_i)
    dJ/dnew_it = (1/N) (1/L_i) w_it A_i where not clipped, else 0
    """
    return Algorithm(
        name="grpo",
        advantage=GroupStandard(),
        objective=Objective(ratio=_token_ratio(), trust=(_ppo_clip(),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="Group Sequence Policy Optimization, arXiv 2507.18071 (its baseline)",
    cautions=(
        "The paper tuned this band for its own model; on a mixture it adds Routing Replay (training.routing_replay = 'R2').",
        "1/L_i under-weights the tokens of long answers, right or wrong; 1/std over-weights nearly solved prompts.",
    ),
)
def grpo_baseline() -> Algorithm:
    """GRPO as the GSPO paper ran it beside GSPO: `grpo` with a clip of 0.2 below and 0.27 above.

    J = (1/N) sum_i (1/L_i) sum_t CLIP(w_it, A_i; 0.2, 0.27)
    """
    return Algorithm(
        name="grpo-baseline",
        advantage=GroupStandard(),
        objective=Objective(ratio=_token_ratio(), trust=(Clip(low=0.2, high=0.27),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="Understanding R1-Zero-Like Training, arXiv 2503.20783",
    cautions=("The constant must not vary between steps: the padded width of a batch is not one.",),
)
def dr_grpo() -> Algorithm:
    """GRPO done right: no division by the length or by the standard deviation.

    J = (1/N) sum_i (1/C) sum_t CLIP(w_it, A_i),  A_i = r_i - mean of the group

    C is the response budget; any constant only rescales the learning rate.
    """
    return Algorithm(
        name="dr-grpo",
        advantage=GroupCentre(),
        objective=Objective(ratio=_token_ratio(), trust=(_ppo_clip(),)),
        aggregate=SequenceSumOverConstant(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2503.14476",
    cautions=(
        "The paper's token mean is taken per group; libraries divide by all tokens of the batch (aggregate = 'token-mean').",
        "Filter groups on accuracy, not on the shaped reward: a length penalty would revive dead groups.",
    ),
)
def dapo() -> Algorithm:
    """Decoupled Clip and Dynamic Sampling Policy Optimization.

    J = (1/groups) sum_g (1/tokens of g) sum_{i in g} sum_t CLIP(w_it, A_i; 0.2, 0.28)

    With dynamic sampling (groups without variance are replaced) and the soft overlong punishment.
    """
    return Algorithm(
        name="dapo",
        advantage=GroupStandard(),
        filters=(ZeroVariance(),),
        objective=Objective(ratio=_token_ratio(), trust=(Clip(low=0.2, high=0.28),)),
        aggregate=GroupTokenMean(),
        settings={**_DYNAMIC_SAMPLING, "reward.overlong.cache_share": 0.2},
    )


@register_algorithm(
    paper="MiniMax-M1, arXiv 2506.13585 (cap 5 as in ScaleRL, arXiv 2510.13786)",
    cautions=(
        "The loss value has no meaning: it contains log pi as the carrier of the gradient.",
        "The paper does not print its upper bound; 5 is ScaleRL's, verl's example uses 1.2.",
    ),
)
def cispo() -> Algorithm:
    """Clipped IS-weight Policy Optimization: the weight is clipped, no token is dropped.

    J = (1/groups) sum_g (1/tokens of g) sum_{i in g} sum_t sg[min(w_it, cap)] A_i new_it
    """
    return Algorithm(
        name="cispo",
        advantage=GroupStandard(),
        filters=(ZeroVariance(),),
        objective=Objective(ratio=GeometricWeight(level="token"), trust=(WeightClip(cap=5.0),)),
        aggregate=GroupTokenMean(),
        settings=_DYNAMIC_SAMPLING,
    )


@register_algorithm(
    paper="arXiv 2511.20347",
    cautions=("The gate is not monotone: tokens with a ratio near 2 are amplified by up to 1.57.",),
)
def sapo() -> Algorithm:
    """Soft Adaptive Policy Optimization: a smooth gate in place of the clip.

    J = (1/N) sum_i (1/L_i) sum_t (4/tau) sigmoid(tau (w_it - 1)) A_i,  tau = 1.0 where A > 0, 1.05 elsewhere
    dJ/dnew_it = (1/N) (1/L_i) w_it sech^2(tau (w_it - 1) / 2) A_i
    """
    return Algorithm(
        name="sapo",
        advantage=GroupStandard(),
        objective=Objective(ratio=_token_ratio(), trust=(SoftGate(),)),
        aggregate=SequenceMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2504.14286",
    cautions=("Read from the abstract and secondary texts; the clip is PPO's, not printed there.",),
    verified=False,
)
def srpo() -> Algorithm:
    """SRPO's objective: GRPO's clip under a token mean.

    J = (1/tokens) sum_it CLIP(w_it, A_i)

    With history resampling: prompts whose responses were all right last epoch rest; two stages of data.
    """
    return Algorithm(
        name="srpo",
        advantage=GroupStandard(),
        objective=Objective(ratio=_token_ratio(), trust=(_ppo_clip(),)),
        aggregate=TokenMean(),
        settings={**_FOUR_UPDATES, "task.resampling": "history", "task.stages": 2},
    )


@register_algorithm(
    paper="arXiv 1707.06347",
    cautions=(
        "Needs a value per token. Returns come from the unwhitened advantages.",
        "The end of a cut response is treated as terminal.",
    ),
)
def ppo() -> Algorithm:
    """Proximal Policy Optimization with a token ratio, GAE and a clipped value loss.

    J = (1/tokens) sum_it CLIP(w_it, A_it) - 0.5 L_v
    L_v = 0.5 * token mean of max((v - R)^2, (v_clip - R)^2),  v_clip = v_old + clamp(v - v_old, -0.5, 0.5)
    """
    return Algorithm(
        name="ppo",
        advantage=GeneralisedAdvantage(),
        objective=Objective(ratio=_token_ratio(), trust=(_ppo_clip(),), penalties=(ValueLoss(),)),
        aggregate=TokenMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="Williams 1992, with the group mean as baseline",
    cautions=("No ratio: right for one update per rollout only. The gradient norm grows with length.",),
)
def reinforce() -> Algorithm:
    """REINFORCE with a group baseline.

    J = (1/N) sum_i sum_t A_i new_it,  A_i = r_i - mean of the group
    """
    return Algorithm(
        name="reinforce",
        advantage=GroupCentre(),
        objective=Objective(ratio=NoRatio()),
        aggregate=SequenceSum(),
        settings=_ONE_UPDATE,
    )


@register_algorithm(
    paper="Back to Basics, arXiv 2402.14740",
    cautions=("No ratio: right for one update per rollout only. TRL's RLOOTrainer computes seq-product instead.",),
)
def rloo() -> Algorithm:
    """REINFORCE with the mean of the other responses as baseline.

    J = (1/N) sum_i sum_t A_i new_it,  A_i = r_i - mean of the other responses of the group
    """
    return Algorithm(
        name="rloo",
        advantage=LeaveOneOut(),
        objective=Objective(ratio=NoRatio()),
        aggregate=SequenceSum(),
        settings=_ONE_UPDATE,
    )


@register_algorithm(
    paper="arXiv 2501.03262, the baseline form",
    cautions=("In token units (advantage.unit = 'token') a group without signal gets a nonzero advantage.",),
)
def reinforce_plus_plus() -> Algorithm:
    """REINFORCE++: PPO's clip with advantages centred per group and normalised over the batch.

    J = (1/tokens) sum_it CLIP(w_it, A_i),  A = z-score over the batch of (r - mean of the group)
    """
    return Algorithm(
        name="reinforce++",
        advantage=GroupCentreBatchStandard(),
        objective=Objective(ratio=_token_ratio(), trust=(_ppo_clip(),)),
        aggregate=TokenMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="Tricks or Traps?, arXiv 2508.08221",
    cautions=("Taken from descriptions of it; the paper itself was not read.",),
    verified=False,
)
def lite_ppo() -> Algorithm:
    """Lite PPO: group mean, batch standard deviation, token mean.

    J = (1/tokens) sum_it CLIP(w_it, A_i),  A_i = (r_i - mean of the group) / std of the batch
    """
    return Algorithm(
        name="lite-ppo",
        advantage=GroupCentreBatchDeviation(),
        objective=Objective(ratio=_token_ratio(), trust=(_ppo_clip(),)),
        aggregate=TokenMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="Stabilizing Reinforcement Learning with LLMs, arXiv 2512.01374",
    cautions=(
        "Needs sampler_logprobs. The loss value has no meaning: it contains log pi as the carrier of the gradient.",
        "The cap on rho is not printed in what was read; 5 is a choice.",
    ),
    verified=False,
)
def minirl() -> Algorithm:
    """MiniRL: the plain policy gradient with a mask where PPO would clip, weighted from the sampler to the policy.

    J = (1/N) sum_i sum_t M_it sg[w_it min(rho_it, cap)] A_i new_it
    M = 0 where (A > 0 and w > 1.27) or (A < 0 and w < 0.8), rho = old / sampler
    """
    return Algorithm(
        name="minirl",
        advantage=GroupCentre(),
        objective=Objective(
            ratio=GeometricWeight(level="token"),
            trust=(PredicateMask(low=0.2, high=0.27),),
            corrections=(TruncatedImportance(cap=5.0),),
        ),
        aggregate=SequenceSum(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="arXiv 2602.04879",
    cautions=(
        "Anchored on the sampler: the authors report that the recomputed anchor fails.",
        "The loss value has no meaning: it contains log pi as the carrier of the gradient.",
    ),
)
def dppo() -> Algorithm:
    """DPPO: tokens are dropped by the divergence of their probability, not by their ratio.

    J = (1/tokens) sum_it M_it sg[min(w_it, cap)] A_i new_it,  w = new / sampler
    M = 0 where |p - q| > 0.15 and (A > 0 and p > q, or A < 0 and p < q)
    """
    return Algorithm(
        name="dppo",
        advantage=GroupCentre(),
        objective=Objective(
            ratio=GeometricWeight(level="token", anchor="sampler"),
            trust=(WeightClip(cap=20.0), DivergenceMask(threshold=0.15)),
        ),
        aggregate=TokenMean(),
        settings=_FOUR_UPDATES,
    )


@register_algorithm(
    paper="the authors' code",
    cautions=(
        "Start, steps and ends of the search are read from code that varies between scripts.",
        "With contributions as that code counts them, a higher floor adds to the negative side: the floor alone cannot reach"
        " the target, and the search then ends in the cap.",
    ),
    verified=False,
)
def bapo() -> Algorithm:
    """Balanced Policy Optimization: clip bounds searched per update until positive terms weigh enough.

    J = (1/tokens) sum_it min-clip of w_it to [floor, cap] by the sign of A_i
    floor rises from 0.2 to 0.8, then cap from 1.2 to 2, until sum_{A>0} min(w, cap) A >= 0.5 sum_{A<0} max(w, floor) |A|
    """
    return Algorithm(
        name="bapo",
        advantage=GroupStandard(),
        objective=Objective(ratio=_token_ratio(), trust=(BalancedClip(),)),
        aggregate=TokenMean(),
        settings=_FOUR_UPDATES,
    )
