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
"""The names used here (of each token, multiplied over the response, length-normalised) to the level of a part."""


def corrections() -> dict[str, Correction]:
    """Every correction at its published threshold, at every level it has."""
    found: dict[str, Correction] = {}
    for word, level in LEVELS.items():
        found |= {
            f"{word} uncapped": Decoupled(level=level),
            f"{word} TIS": TruncatedImportance(level=level),
            f"{word} MIS": MaskedImportance(level=level),
            f"{word} IcePop": IcePop(level=level),
        }
    return found | {"geo rejection": GeometricRejection(), "k3 rejection": K3Rejection(), "veto": Veto()}


def score_groups(policy: Policy, groups: Sequence[Group], tokens_per_pack: int) -> Tables:
    """The tables of some groups with the trainer's own log-probs, computed in packs as in an update."""
    batch = collate(groups, policy.dtype)
    updates = plan(batch.texts, updates=1, epochs=1, tokens_per_pack=tokens_per_pack, seed=0, packing=policy.packing)
    return anchor(Tables.from_batch(batch, policy.device), policy, None, updates, choice="recompute", skip_first=False)


def study(algorithm: Algorithm, signals: Signals) -> dict[str, Any]:
    """All figures of a batch, by name, from old and sampler log-probs; the new ones are taken to be the old."""
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
                "cut": {name: each.cut(mask, _among(member, mask)) for name, each in corrected.items()},
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
    """The same before any cap or bound; ones where responses are only rejected."""
    exact: Tensor
    """The importance weights of the same units."""

    def counted(self, mask: Mask, rows: Tensor) -> Tensor:
        """Mask of the numbers that belong to some rows [B] and count."""
        inside = mask.tokens if self.of_tokens else mask.lengths > 0
        return inside & rows.unsqueeze(1)

    def cut(self, mask: Mask, rows: Tensor) -> float:
        """The share of the units of some rows that the correction changed."""
        return float((self.weights != self.uncut)[self.counted(mask, rows)].double().mean())

    def effect(self, mask: Mask) -> dict[str, Any]:
        counted = self.counted(mask, torch.ones_like(mask.tokens[:, 0]))
        found = correction_effect(self.weights[counted], self.uncut[counted], self.exact[counted])
        return {"unit": "tokens" if self.of_tokens else "responses", **found}


def _apply_correction(part: Correction, context: Context) -> _Corrected:
    found, level = part.apply(context), getattr(part, "level", "product")
    weights = found.keep if found.weight is None else found.weight
    assert weights is not None
    of_tokens = level == "token"
    return _Corrected(
        of_tokens=of_tokens,
        weights=weights,
        uncut=torch.ones_like(weights) if found.weight is None else _uncapped(level, context),
        exact=_uncapped("token" if of_tokens else "product", context),
    )


def _uncapped(level: str, context: Context) -> Tensor:
    weight = Decoupled(level=level).apply(context).weight
    assert weight is not None
    return weight


def _among(member: Tensor, mask: Mask) -> Tensor:
    """[B] from a choice among the responses that have a token."""
    chosen = (mask.lengths > 0).squeeze(1)
    return chosen.index_put((chosen.nonzero().squeeze(1),), member)
