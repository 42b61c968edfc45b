"""One batch for two systems, and the loss and gradient that each computes from it.

    B rows, T columns; x[b, t] belongs to token t of response b.

The rows are built so that at GSPO's clip (3e-4 / 4e-4) and at GRPO's (.2 / .2) every case occurs: inside the band,
clipped high, clipped low, and out of the band on the side that is not clipped. Masked positions (padding, and tool
tokens inside row 3) hold log-ratios far off, so that a leak would show.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import legato

LENGTHS = (12, 7, 5, 9, 3, 10, 1, 8)
ADVANTAGES = (1.0, -1.0, 0.6, -0.6, 1.4, -0.5, 0.3, -1.2)
LOG_S = (1e-4, -2e-2, 3e-2, 5e-2, -4e-2, -1.5e-4, 2e-3, 0.15)
"""Mean log-ratio of each row: inside, clipped low, clipped high, out of band twice (not clipped), inside, high, out."""
TOOL_ROW, TOOL_TOKENS = 3, slice(2, 5)
DUAL_ROW, DUAL_LOG_RATIO = 7, 1.3
"""A negative advantage with a token ratio of e^1.3 = 3.67: beyond a dual clip of 3."""
LEAK = 2.5
"""Log-ratio at masked positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    logprobs: Tensor  # [B, T]
    old_logprobs: Tensor  # [B, T]
    ref_logprobs: Tensor  # [B, T]
    advantages: Tensor  # [B]
    mask: Tensor  # [B, T] bool
    group: Tensor  # [B]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    loss: float
    gradient: Tensor
    """Derivative of the loss by the log-probs [B, T], or by the model's parameters, flattened."""
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    loss: float
    gradient: float
    """Greatest absolute difference, in units of the greatest absolute entry of either side."""


def response_mask() -> Tensor:
    """[B, T] bool; tool tokens inside row 3 are out."""
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    mask[TOOL_ROW, TOOL_TOKENS] = False
    return mask


def log_ratios(mask: Tensor) -> Tensor:
    """new - old [B, T] in float64: noise wide enough to cross .2, each row's mean over its mask set to LOG_S."""
    noise = 0.25 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    noise[DUAL_ROW, 0] = DUAL_LOG_RATIO
    # The dual-clip token stays where it is; the other tokens of its row carry the shift of the mean.
    movable = mask.clone()
    movable[DUAL_ROW, 0] = False
    excess = torch.where(mask, noise, 0.0).sum(1) - torch.tensor(LOG_S, dtype=torch.float64) * mask.sum(1)
    shifted = noise - (excess / movable.sum(1))[:, None] * movable
    return torch.where(mask, shifted, LEAK)


def fixed_batch() -> Batch:
    """The seeded batch of every [B, T] comparison, in float64."""
    mask = response_mask()
    generator = torch.Generator().manual_seed(7)
    old = -2.0 * torch.rand(mask.shape, generator=generator, dtype=torch.float64) - 1.5
    ref = old + 0.3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    return Batch(
        logprobs=old + log_ratios(mask),
        old_logprobs=old,
        ref_logprobs=ref,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        mask=mask,
        group=torch.arange(len(LENGTHS)) // 4,
    )


def rows(batch: Batch, index: slice) -> Batch:
    """The batch cut to some of its rows."""
    return Batch(**{name: getattr(batch, name)[index] for name in Batch.__slots__})


def with_empty_row(batch: Batch) -> Batch:
    """The batch with one more response in its last group, of which no token counts."""
    longer = {name: torch.cat([getattr(batch, name), getattr(batch, name)[-1:]]) for name in Batch.__slots__}
    longer["mask"][-1] = False
    return Batch(**longer)


def ours(
    batch: Batch, algorithm: str, overrides: Mapping[str, object] | None = None, **signals: Tensor | legato.Counts
) -> Side:
    """The loss and gradient of `legato.loss` on the batch."""
    logprobs = batch.logprobs.clone().requires_grad_()
    outcome = legato.loss(
        legato.algorithm(algorithm, dict(overrides or {})),
        logprobs=logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=batch.mask,
        group=batch.group,
        **signals,
    )
    outcome.loss.backward()
    return Side(loss=outcome.loss.item(), gradient=logprobs.grad, metrics=outcome.metrics)


def difference(left: Side, right: Side) -> Difference:
    scale = max(left.gradient.abs().max().item(), right.gradient.abs().max().item(), 1e-300)
    gap = (left.gradient - right.gradient).abs().max().item()
    return Difference(loss=abs(left.loss - right.loss), gradient=gap / scale)


def agree(left: Side, right: Side, *, tolerance: float) -> bool:
    """True where loss and gradient are the same to `tolerance` (the loss relative to its size, at least 1)."""
    gap = difference(left, right)
    return gap.loss <= tolerance * max(1.0, abs(right.loss)) and gap.gradient <= tolerance


def scaled(side: Side, factor: float) -> Side:
    """The side with loss and gradient multiplied by `factor`."""
    return replace(side, loss=side.loss * factor, gradient=side.gradient * factor)
