"""From lists to tensors, through `legato.loss`, and back to lists."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import legato
from tests.reference.batch import Batch, Result, Rows

KEYWORDS = {
    "old": "old_logprobs",
    "roll": "sampler_logprobs",
    "kept_logmass": "kept_logmass",
    "ref": "ref_logprobs",
    "turn": "turn",
    "gamma": "router_shift",
    "entropy": "entropy",
    "uniform": "uniform",
    "values": "values",
    "old_values": "old_values",
    "returns": "returns",
}
ANCHOR_SIDE = ("old", "roll", "kept_logmass", "turn", "gamma")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the package says of a batch: the loss, its gradient by backward, and the coefficients."""

    loss: float
    gradient: Rows
    coefficients: Rows
    outcome: Any


def tensor(batch: Batch, field: str, dtype: torch.dtype) -> torch.Tensor:
    """One channel as a tensor [B, T]; turns are integers."""
    return torch.tensor(getattr(batch, field), dtype=torch.long if field == "turn" else dtype)


def advantage_tensor(batch: Batch, unit: str, dtype: torch.dtype) -> torch.Tensor:
    """[B] where the unit is the sequence, else [B, T]. An empty row has an advantage too: it must not matter."""
    if unit != "sequence":
        return tensor(batch, "advantages", dtype)
    filled = set(batch.filled_rows())
    values = [batch.advantage(row) if row in filled else -1.3 for row in range(len(batch.mask))]
    return torch.tensor(values, dtype=dtype)


def signals(batch: Batch, unit: str = "sequence", dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """The keywords of `legato.loss` for a batch; fields that are None are not passed."""
    present = [field for field in KEYWORDS if getattr(batch, field) is not None]
    keywords = {KEYWORDS[field]: tensor(batch, field, dtype) for field in present}
    return {
        **keywords,
        "logprobs": tensor(batch, "new", dtype),
        "advantages": advantage_tensor(batch, unit, dtype),
        "mask": torch.tensor(batch.mask),
        "group": torch.tensor(batch.group),
    }


def count(algorithm: Any, batch: Batch, dtype: torch.dtype = torch.float64, **further: Any) -> Any:
    """`legato.counts` of a batch."""
    present = [field for field in ANCHOR_SIDE if getattr(batch, field) is not None]
    keywords = {KEYWORDS[field]: tensor(batch, field, dtype) for field in present}
    return legato.counts(algorithm, mask=torch.tensor(batch.mask), group=torch.tensor(batch.group), **keywords, **further)


def loss(algorithm: Any, **keywords: Any) -> Any:
    """`legato.loss`, with the first state of parts that adapt unless another is given."""
    return legato.loss(algorithm, **{"state": legato.algorithm(algorithm).initial() or None, **keywords})


def evaluate(
    algorithm: Any, batch: Batch, unit: str = "sequence", dtype: torch.dtype = torch.float64, **further: Any
) -> Evaluation:
    """Loss, gradient and coefficients of a member on a batch."""
    keywords = {**signals(batch, unit, dtype), **further}
    logprobs = keywords.pop("logprobs").requires_grad_()
    outcome = loss(algorithm, logprobs=logprobs, **keywords)
    outcome.loss.backward()
    return Evaluation(
        loss=outcome.loss.item(),
        gradient=logprobs.grad.tolist(),
        coefficients=outcome.coefficients.tolist(),
        outcome=outcome,
    )


def assert_rows_close(computed: Rows, expected: Rows, relative: float = 1e-10, absolute: float = 1e-12) -> None:
    """Every entry, row by row."""
    assert len(computed) == len(expected)
    for left, right in zip(computed, expected, strict=True):
        assert left == pytest.approx(right, rel=relative, abs=absolute)


def assert_agrees(evaluation: Evaluation, expected: Result, relative: float = 1e-10, absolute: float = 1e-12) -> None:
    """Loss and gradient as the reference says, and coefficients minus the gradient."""
    size = max(1.0, *(abs(entry) for row in expected.gradient for entry in row))
    assert evaluation.loss == pytest.approx(expected.loss, rel=relative, abs=absolute * 100 * size)
    assert_rows_close(evaluation.gradient, expected.gradient, relative, absolute)
    assert_rows_close(evaluation.coefficients, negate(expected.gradient), relative, absolute)


def assert_same(left: Evaluation, right: Evaluation, relative: float = 1e-10, absolute: float = 1e-12) -> None:
    """Two evaluations with equal loss and coefficients."""
    assert_agrees(left, Result(right.loss, negate(right.coefficients)), relative, absolute)


def assert_silent_outside(evaluation: Evaluation, batch: Batch) -> None:
    """Exactly 0 wherever the mask is 0."""
    for row, mask in enumerate(batch.mask):
        for position, counted in enumerate(mask):
            if not counted:
                assert evaluation.gradient[row][position] == 0.0
                assert evaluation.coefficients[row][position] == 0.0


def negate(rows: Rows) -> Rows:
    """Minus each entry."""
    return [[-entry for entry in row] for row in rows]
