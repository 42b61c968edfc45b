"""Engine-trainer mismatch: the gap of log-probs, its noise beside the clip band, and the effect of each correction.

`study` reads rollouts with the sampler's log-probs and the trainer's, and returns plain numbers. Truncation (top-p, top-k,
min-p) is part of the gap, as the behaviour density has it; the noise floor is without it, as the anchor would be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.algorithms.algorithm import Algorithm
from legato.core.batch import collate
from legato.core.counts import Counts, Tally
from legato.core.mask import Mask
from legato.core.rollout import Group
from legato.core.signals import Signals
from legato.diagnostics.gaps import correction_effect, distribution, effective_share, length_bins, per_response
from legato.diagnostics.metrics.measure import measure
from legato.objectives.aggregates import TokenMean
from legato.objectives.corrections import (
    Decoupled,
    GeometricRejection,
    IcePop,
    K3Rejection,
    MaskedImportance,
    TruncatedImportance,
    Veto,
)
from legato.objectives.evaluate import evaluate
from legato.objectives.objective import Objective
from legato.objectives.ratios import NoRatio
from legato.objectives.slots import Context, Correction
from legato.policy.policy import Policy
from legato.training.anchor import anchor
from legato.training.plan import plan
from legato.training.probe import band, is_within, measure_gap
from legato.training.tables import Tables

LEVELS = {"token": "token", "product": "product", "geo": "sequence"}
"""The names used here to the `level` of a part: each token, their product over the response, their geometric mean."""


def corrections() -> dict[str, Correction]:
    """Every correction at its published threshold, at every level it has."""
    by_name: dict[str, Correction] = {}
    for word, level in LEVELS.items():
        by_name |= {
            f"{word} uncapped": Decoupled(level=level),
            f"{word} TIS": TruncatedImportance(level=level),
            f"{word} MIS": MaskedImportance(level=level),
            f"{word} IcePop": IcePop(level=level),
        }
    return by_name | {"geo rejection": GeometricRejection(), "k3 rejection": K3Rejection(), "veto": Veto()}


def score_groups(policy: Policy, groups: Sequence[Group], tokens_per_pack: int) -> Tables:
    """The tables of some groups with the trainer's own log-probs, computed in packs as in an update."""
    batch = collate(groups, policy.dtype)
    updates = plan(batch.texts, updates=1, epochs=1, tokens_per_pack=tokens_per_pack, seed=0, packing=policy.packing)
    return anchor(Tables.from_batch(batch, policy.device), policy, None, updates, choice="recompute", skip_first=False)


def study(algorithm: Algorithm, signals: Signals) -> dict[str, Any]:
    """All figures of a batch, by name, from old and sampler log-probs; new log-probs equal the old ones."""
    context = _context(signals)
    gap, mask = signals.behaviour_log_ratio(), signals.mask
    responses = per_response(gap, mask)
    tokens, geometric = gap[mask.tokens], responses.log_geometric
    corrected = {name: _apply_correction(part, context) for name, part in corrections().items()}
    return {
        "responses": len(geometric),
        "tokens": len(tokens),
        "length": distribution(responses.lengths),
        "token_gap": distribution(tokens),
        "token_size": distribution(tokens.abs()),
        "response_gap": distribution(geometric),
        "response_size": distribution(geometric.abs()),
        "divergence": _divergence(signals, context) | {"effective_sequence": effective_share(responses.log_product.exp())},
        "floor": _floor(algorithm, signals),
        "corrections": {name: each.effect(mask) for name, each in corrected.items()},
        "by_length": [
            {
                "shortest": low,
                "longest": high,
                "responses": int(member.sum()),
                "gap_deviation": float(geometric[member].std(correction=0)),
                "effective_product": effective_share(responses.log_product[member].exp()),
                "cut": {name: each.share_changed(mask, _rows_of_members(member, mask)) for name, each in corrected.items()},
            }
            for low, high, member in length_bins(responses.lengths)
        ],
    }


def signals_of(tables: Tables) -> Signals:
    """The signals that `study` reads, in float64; the tables must have old log-probs."""
    assert tables.old_logprobs is not None
    old = tables.old_logprobs.double()
    return Signals(
        mask=Mask(tables.mask, torch.float64),
        logprobs=old,
        old_logprobs=old,
        sampler_logprobs=tables.sampler_logprobs.double(),
        kept_logmass=None if tables.kept_logmass is None else tables.kept_logmass.double(),
        advantages=torch.zeros(len(old), 1, dtype=torch.float64, device=old.device),
        turn=tables.turn,
    )


def _context(signals: Signals) -> Context:
    lengths = signals.mask.lengths
    tally = Tally(tokens=lengths.sum(), sequences=(lengths > 0).sum().double())
    return Context(signals=signals, segments=signals.segments("token"), counts=Counts(all=tally), state={})


def _divergence(signals: Signals, context: Context) -> dict[str, float]:
    """The mismatch metrics of a run, under the same names."""
    outcome = evaluate(Objective(ratio=NoRatio()), TokenMean(), signals, context.counts)
    metrics = measure(signals, outcome).report()
    return {key.removeprefix("mismatch/"): value for key, value in metrics.items() if key.startswith("mismatch/")}


def _floor(algorithm: Algorithm, signals: Signals) -> dict[str, Any]:
    """The probe's own measures of engine against trainer."""
    mask, width, turn = signals.mask, band(algorithm), signals.turn
    assert turn is not None
    gap = measure_gap(algorithm, mask, turn, mask.difference(signals.logprobs, signals.tensor("sampler_logprobs")))
    return {
        "max": gap.max,
        "rms": gap.rms,
        "bounded": gap.bounded,
        "band": width,
        "clipped": gap.clipped,
        "safe": None if width is None else is_within(gap, width),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corrected:
    """The weights of a correction, one number for each token or for each response."""

    of_tokens: bool
    weights: Tensor
    uncut: Tensor
    """The weights before any cap or bound; ones if the correction only rejects responses."""
    exact: Tensor
    """The exact importance weights of the same tokens or responses."""

    def units_of(self, mask: Mask, rows: Tensor) -> Tensor:
        """Bool mask of the tokens or responses that belong to the rows [B]; empty responses are left out."""
        inside = mask.tokens if self.of_tokens else mask.lengths > 0
        return inside & rows.unsqueeze(1)

    def share_changed(self, mask: Mask, rows: Tensor) -> float:
        """The share of the units of some rows that the correction changed."""
        return float((self.weights != self.uncut)[self.units_of(mask, rows)].double().mean())

    def effect(self, mask: Mask) -> dict[str, Any]:
        units = self.units_of(mask, torch.ones_like(mask.tokens[:, 0]))
        effect = correction_effect(self.weights[units], self.uncut[units], self.exact[units])
        return {"unit": "tokens" if self.of_tokens else "responses", **effect}


def _apply_correction(part: Correction, context: Context) -> _Corrected:
    adjustment, level = part.apply(context), getattr(part, "level", "product")
    weights = adjustment.keep if adjustment.weight is None else adjustment.weight
    assert weights is not None
    of_tokens = level == "token"
    return _Corrected(
        of_tokens=of_tokens,
        weights=weights,
        uncut=torch.ones_like(weights) if adjustment.weight is None else _uncapped_weights(level, context),
        exact=_uncapped_weights("token" if of_tokens else "product", context),
    )


def _uncapped_weights(level: str, context: Context) -> Tensor:
    weight = Decoupled(level=level).apply(context).weight
    assert weight is not None
    return weight


def _rows_of_members(member: Tensor, mask: Mask) -> Tensor:
    """[B] bool, from a bool for each response that has a token."""
    present = (mask.lengths > 0).squeeze(1)
    return present.index_put((present.nonzero().squeeze(1),), member)
