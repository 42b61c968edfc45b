"""How the reference computes each of the 39 vectors."""

from collections.abc import Callable

from tests.reference import corrections, factors, family, objectives, penalties, ratios, selections
from tests.reference.aggregation import group_token_mean, sequence_mean, times, token_mean
from tests.reference.batch import Batch, Result, Rows
from tests.reference.examples import batch_v


def dapo_with(batch: Batch, weight: Rows) -> Result:
    """DAPO's token clip under an extra weight, token mean."""
    return objectives.clipped_tokens(
        batch, times(batch, token_mean(batch), weight), ratios.token_log_ratios(batch), 0.2, 0.28
    )


def geo_rejection(batch: Batch, shrink: bool) -> Result:
    """DAPO less the rows whose geometric rho is outside [.9, 1.1], with all tokens or the surviving ones below."""
    survivors = corrections.geometric_survivors(batch, 0.9, 1.1)
    weight = times(batch, token_mean(batch, survivors if shrink else None), corrections.keep_rows(batch, survivors))
    return objectives.clipped_tokens(batch, weight, ratios.token_log_ratios(batch), 0.2, 0.28)


def gspo_token(batch: Batch, aggregate: Callable[[Batch], Rows]) -> Result:
    """GSPO-token under either aggregation."""
    return objectives.carried_sequences(batch, aggregate(batch), ratios.token_log_ratios(batch, limit=None), 3e-4, 4e-4)


def router_shifted_gspo(batch: Batch) -> Result:
    """GSPO on log s + mean log gamma."""
    log_ratio = ratios.with_router_shift(batch, ratios.token_log_ratios(batch, limit=None))
    return objectives.clipped_segments(batch, sequence_mean(batch), log_ratio, 3e-4, 4e-4)


def router_shifted_grpo(batch: Batch) -> Result:
    """GRPO on w * gamma."""
    log_ratio = ratios.with_router_shift(batch, ratios.token_log_ratios(batch))
    return objectives.clipped_tokens(batch, sequence_mean(batch), log_ratio, 0.2, 0.2)


def router_shifted_gmpo_after_clip(batch: Batch) -> Result:
    """GMPO times the geometric mean of gamma."""
    weight = times(batch, sequence_mean(batch), ratios.router_shift_weights(batch, "sequence"))
    return objectives.log_clipped_tokens_then_mean(batch, weight, ratios.token_log_ratios(batch))


def opsm(batch: Batch) -> Result:
    """GRPO less the rows that OPSM drops, old in place of roll."""
    keep = corrections.keep_rows(batch, selections.off_policy_survivors(batch, 0.05, "old"))
    weight = times(batch, sequence_mean(batch), keep)
    return objectives.clipped_tokens(batch, weight, ratios.token_log_ratios(batch), 0.2, 0.2)


def kl_cov(batch: Batch) -> Result:
    """Unclipped policy gradient plus |new - old| on the two tokens of largest covariance."""
    selected = selections.top_covariance_tokens(batch, 2)
    policy = objectives.unclipped_tokens(batch, token_mean(batch), ratios.token_log_ratios(batch))
    return policy + penalties.kl_cov(batch, token_mean(batch), selected)


def clip_cov(batch: Batch) -> Result:
    """Clip 1/1, every token with covariance in (.5, 2) left out."""
    dropped = selections.covariance_candidates(batch, 1.0, 1.0, 0.5, 2.0)
    weight = times(batch, token_mean(batch), selections.drop_tokens(batch, dropped))
    return objectives.clipped_tokens(batch, weight, ratios.token_log_ratios(batch), 1.0, 1.0)


def dppo_against_old(batch: Batch) -> Result:
    """DPPO with old in place of roll."""
    factor = factors.divergence_masked_ratios(batch, anchor="old")
    return objectives.weighted_log_probs(batch, token_mean(batch), factor)


def bypass(batch: Batch) -> Result:
    """The clip on new / roll, no weight."""
    return objectives.clipped_tokens(batch, token_mean(batch), ratios.token_log_ratios(batch, "sampler"), 0.2, 0.28)


def member_on_batch_v(name: str) -> Callable[[], Result]:
    """A member with its own defaults on batch V."""
    return lambda: family.FAMILY[name](batch_v())


COMPUTED: dict[str, Callable[[], Result]] = {
    "reinforce": member_on_batch_v("reinforce"),
    "ppo_token_adv": lambda: family.token_clip(batch_v("A_tok"), token_mean),
    "grpo": member_on_batch_v("grpo"),
    "grpo_kl": lambda: family.FAMILY["grpo"](batch_v()) + penalties.kl(batch_v(), sequence_mean(batch_v())),
    "dr_grpo": member_on_batch_v("dr-grpo"),
    "dapo": member_on_batch_v("dapo"),
    "dual_clip": lambda: objectives.clipped_tokens(
        batch_v(), group_token_mean(batch_v()), ratios.token_log_ratios(batch_v()), 0.2, 0.28, dual_cap=3.0
    ),
    "gspo": member_on_batch_v("gspo"),
    "gspo_token_uniform": member_on_batch_v("gspo-token"),
    "gspo_token_tokenmean": lambda: gspo_token(batch_v(), token_mean),
    "gspo_token_A_tok": lambda: gspo_token(batch_v("A_tok"), sequence_mean),
    "turn_gspo": lambda: family.segment_clip(batch_v("A_turn"), sequence_mean, 0.05, 0.06, "turn"),
    "gmpo": member_on_batch_v("gmpo"),
    "rspo_v2": member_on_batch_v("rspo"),
    "rspo_v1": lambda: router_shifted_gmpo_after_clip(batch_v()),
    "rs_gspo": lambda: router_shifted_gspo(batch_v()),
    "rs_grpo": lambda: router_shifted_grpo(batch_v()),
    "cispo_hi0.2": lambda: family.cispo(batch_v(), 1.2),
    "cispo_cap5": member_on_batch_v("cispo"),
    "sapo": member_on_batch_v("sapo"),
    "luspo": member_on_batch_v("luspo"),
    "fspo_c.05_.06": member_on_batch_v("fspo"),
    "seq_product": member_on_batch_v("seq-product"),
    "gepo": member_on_batch_v("gepo"),
    "vespo": member_on_batch_v("vespo"),
    "opsm_d.05": lambda: opsm(batch_v()),
    "dppo_tv_.15": lambda: dppo_against_old(batch_v()),
    "kl_cov_k2": lambda: kl_cov(batch_v()),
    "clip_cov_.5_2": lambda: clip_cov(batch_v()),
    "tis_token_C2": lambda: dapo_with(batch_v(), corrections.truncated(batch_v(), "token", 2.0)),
    "mis_token_C2": lambda: dapo_with(batch_v(), corrections.masked_above(batch_v(), "token", 2.0)),
    "icepop_.5_5": lambda: dapo_with(batch_v(), corrections.masked_outside(batch_v(), "token", 0.5, 5.0)),
    "tis_seq_C2": lambda: dapo_with(batch_v(), corrections.truncated(batch_v(), "product", 2.0)),
    "mis_seq_C2": lambda: dapo_with(batch_v(), corrections.masked_above(batch_v(), "product", 2.0)),
    "geo_rs_keepdenom": lambda: geo_rejection(batch_v(), shrink=False),
    "geo_rs_shrinkdenom": lambda: geo_rejection(batch_v(), shrink=True),
    "decoupled_ppo": lambda: dapo_with(batch_v(), corrections.uncapped(batch_v(), "token")),
    "bypass_ppo_clip": lambda: bypass(batch_v()),
    "mask_form_pg": member_on_batch_v("minirl"),
}


def gspo_with_geometric_tis(batch: Batch, cap: float) -> Result:
    """GSPO times min(Geo_i, cap)."""
    weight = times(batch, sequence_mean(batch), corrections.truncated(batch, "sequence", cap))
    return objectives.clipped_segments(batch, weight, ratios.token_log_ratios(batch, limit=None), 3e-4, 4e-4)


def mask_form(batch: Batch) -> Result:
    """-sg[w M] A new with DAPO's band: the gradient of the clip, another value."""
    return objectives.weighted_log_probs(batch, token_mean(batch), factors.masked_ratios(batch, 0.2, 0.28))


def reinforce_under(batch: Batch, weight: Rows) -> Result:
    """REINFORCE with another aggregation: c = 1."""
    return objectives.weighted_log_probs(batch, weight, factors.ones(batch))
