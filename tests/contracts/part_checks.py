"""The contract of each slot. Every function raises AssertionError if a part breaks it."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch

import legato
from legato.advantages.filters import Filter, Samples
from legato.core.parts import Part
from legato.core.scope import Scope
from legato.errors import InputError
from legato.health.tighten import clip_bounds, tighten_clip
from tests.proof.batches import build, channels, reorder_rows
from tests.proof.bridge import Evaluation, assert_rows_close, assert_silent_outside, count, evaluate, loss, signals
from tests.reference.batch import Batch

MASK = [
    [True] * 5,
    [True, False, True, True, False],
    [True] * 3 + [False] * 2,
    [False] * 5,
    [True] * 4 + [False],
    [True] + [False] * 4,
]
GROUP = [0, 0, 1, 1, 1, 0]
SLOTS = {
    "ratio": "objective.ratio",
    "trust": "objective.trust",
    "correction": "objective.corrections",
    "penalty": "objective.penalties",
    "aggregate": "aggregate",
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A part to check: its class, what a configuration calls it, and values for fields that have no usable default."""

    cls: type[Part]
    reference: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    detaches: bool = False

    def algorithm(self) -> Any:
        """An algorithm that holds the part and as little else as possible."""
        slot = SLOTS[self.cls.kind]
        single = self.cls.kind in ("ratio", "aggregate")
        path = slot if single else f"{slot}.{self.cls.name}"
        own = {slot: self.reference if single else [self.reference]}
        own |= {f"{path}.{name}": value for name, value in self.fields.items()}
        refusals = []
        for ratio in ({}, {"objective.ratio": "geometric-weight"}):
            try:
                return legato.algorithm("gspo", {"objective.trust": [], **ratio, **own})
            except InputError as refusal:
                refusals.append(refusal)
        raise refusals[0]


def batch_of(seed: int, *, garbage: int = 0, drift: float = 0.3) -> Batch:
    """An update with holes, an empty row and two groups. `garbage` changes what stands outside the mask, and that alone."""
    numbers = random.Random(seed)
    batch = build(MASK, GROUP, set(), drift, 0.0, "sequence", numbers)
    if not garbage:
        return batch
    others = random.Random(garbage)
    changed = {
        name: [
            [
                value if counted else others.choice((math.nan, math.inf, -7.0))
                for value, counted in zip(row, mask, strict=True)
            ]
            for row, mask in zip(rows, batch.mask, strict=True)
        ]
        for name, rows in channels(batch).items()
        if name not in ("mask", "group", "turn")
    }
    return replace(batch, **changed)


def check_gradient(candidate: Candidate) -> None:
    """The coefficients are the derivative of the loss, by finite differences, where nothing is detached."""
    algorithm = candidate.algorithm()
    if candidate.detaches or algorithm.objective.ratio.gradient != "through":
        pytest.skip("the gradient is not meant to be the derivative of the loss")
    for seed in range(2):
        keywords = signals(batch_of(seed))
        mask = keywords["mask"]
        full = torch.where(mask, keywords.pop("logprobs"), torch.zeros((), dtype=torch.float64))

        def loss_of(tokens: torch.Tensor, full: torch.Tensor = full, keywords: Any = keywords) -> torch.Tensor:
            return loss(algorithm, logprobs=full.masked_scatter(keywords["mask"], tokens), **keywords, metrics=False).loss

        tokens = full[mask].clone().requires_grad_()
        assert torch.autograd.gradcheck(loss_of, (tokens,), eps=1e-7, atol=1e-6, rtol=1e-5)


def check_splitting(candidate: Candidate) -> None:
    """With the counts of the whole, the pieces of an update add up to it, cut as finely as the scope of the part allows."""
    algorithm = candidate.algorithm()
    if algorithm.scope is Scope.UPDATE:
        pytest.skip("the part needs the whole update at once")
    owners = [GROUP] if algorithm.scope is Scope.GROUP else [GROUP, list(range(len(GROUP))), [0, 1, 0, 1, 0, 1]]
    for seed, owner in enumerate(owners):
        batch = batch_of(seed)
        whole = evaluate(algorithm, batch)
        cuts = [[row for row in range(len(owner)) if owner[row] == piece] for piece in sorted(set(owner))]
        pieces = [reorder_rows(batch, rows) for rows in cuts]
        counts = reduce(add, [count(algorithm, piece) for piece in pieces])
        total, coefficients = 0.0, {}
        for rows, piece in zip(cuts, pieces, strict=True):
            evaluation = evaluate(algorithm, piece, counts=counts)
            total += evaluation.loss
            coefficients.update(zip(rows, evaluation.coefficients, strict=True))
        assert total == pytest.approx(whole.loss, abs=1e-10 * max(1.0, abs(whole.loss)))
        assert_rows_close([coefficients[row] for row in range(len(owner))], whole.coefficients)


def check_mask(candidate: Candidate) -> None:
    """What stands outside the mask is never read, and nothing there has a coefficient."""
    algorithm = candidate.algorithm()
    one, other = (evaluate(algorithm, batch_of(3, garbage=garbage)) for garbage in (1, 2))
    assert (one.loss, one.coefficients) == (other.loss, other.coefficients)
    assert_finite(one)
    assert_silent_outside(one, batch_of(3))


def check_extremes(candidate: Candidate) -> None:
    """Loss and coefficients stay finite in float32 where a token became e^40 times as likely, or as unlikely."""
    batch = batch_of(4)
    low, high = ([[value if counted else 0.0 for counted in row] for row in batch.mask] for value in (-40.5, -0.5))
    for new, old in ((low, high), (high, low)):
        for sign in (1.0, -1.0):
            extreme = replace(batch, new=new, old=old, roll=old, advantages=[[sign] * len(row) for row in batch.mask])
            assert_finite(evaluate(candidate.algorithm(), extreme, dtype=torch.float32))


def assert_finite(evaluation: Evaluation) -> None:
    assert math.isfinite(evaluation.loss)
    assert all(math.isfinite(entry) for row in evaluation.coefficients for entry in row)


def check_state(candidate: Candidate) -> None:
    """The state of a part survives JSON, as a checkpoint writes it, and advancing it keeps its names."""
    algorithm = candidate.algorithm()
    state = algorithm.initial()
    for _ in range(3):
        written = {part: {name: float(value) for name, value in fields.items()} for part, fields in state.items()}
        read = json.loads(json.dumps(written))
        one, other = (evaluate(algorithm, batch_of(5), **({"state": each} if each else {})) for each in (state, read))
        assert (one.loss, one.coefficients) == (other.loss, other.coefficients)
        after = algorithm.advance(state, one.outcome.sums, first=False)
        assert {part: set(fields) for part, fields in after.items()} == {part: set(f) for part, f in state.items()}
        again = algorithm.advance(read, other.outcome.sums, first=False)
        assert {p: {n: float(v) for n, v in f.items()} for p, f in again.items()} == {
            p: {n: float(v) for n, v in f.items()} for p, f in after.items()
        }
        state = after


def check_bounds(candidate: Candidate) -> None:
    """Beyond a stated bound nothing pushes further out, inside it everything does; its fields scale it."""
    algorithm = candidate.algorithm()
    stated = algorithm.objective.bounds(algorithm.initial() or None).get(candidate.cls.name)
    if stated is None:
        pytest.skip("the part states no bounds")
    assert stated.lower <= 0 <= stated.upper
    for bound, advantage in ((stated.upper, 1.0), (stated.lower, -1.0)):
        if math.isfinite(bound):
            assert coefficient_at(algorithm, 1.01 * bound + math.copysign(1e-6, bound), advantage) == 0.0
            assert coefficient_at(algorithm, 0.99 * bound, advantage) != 0.0
    if stated.fields:
        paths = clip_bounds(algorithm)
        assert {path.rpartition(".")[2] for path in paths} == set(stated.fields)
        half = tighten_clip(algorithm, 0.5).objective.bounds()[candidate.cls.name]
        assert 0 >= half.lower > stated.lower or stated.lower in (0.0, -math.inf)
        assert 0 <= half.upper < stated.upper or stated.upper in (0.0, math.inf)


def coefficient_at(algorithm: Any, log_ratio: float, advantage: float) -> float:
    """The coefficient of a response of one token with this log-ratio."""
    row, width = batch_of(6), len(MASK[0])
    one = [[index == 0 for index in range(width)]]
    rows = {name: [value[0]] for name, value in channels(row).items()}
    only = replace(
        row,
        **{
            **rows,
            "mask": one,
            "old": [[-2.0] * width],
            "roll": [[-2.0] * width],
            "new": [[-2.0 + log_ratio] * width],
            "advantages": [[advantage] * width],
            "group": [0],
        },
    )
    return evaluate(algorithm, only).coefficients[0][0]


def check_estimator(candidate: Candidate) -> None:
    """Advantages are finite, one per response or token, follow their rows, and read nothing outside the mask."""
    overrides = {"advantage": candidate.reference, **{f"advantage.{n}": v for n, v in candidate.fields.items()}}
    algorithm = legato.algorithm("gspo", overrides)
    mask = torch.tensor([[True] * 4, [True, True, False, True], [True, False, False, False], [True] * 3 + [False]])
    turn = torch.where(mask, torch.tensor([0, 0, 1, 1]), -1)
    numbers = torch.Generator().manual_seed(0)
    wide = {
        key: torch.rand(4, 4, generator=numbers, dtype=torch.float64) for key in ("values", "old_logprobs", "ref_logprobs")
    }
    keywords: dict[str, Any] = {
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
        "group": torch.tensor([0, 0, 1, 1]),
        "mask": mask,
        "turn": turn,
        "turn_rewards": torch.rand(4, 2, generator=numbers, dtype=torch.float64),
        "turn_states": torch.tensor([[0, 1], [0, 2], [0, 0], [0, 1]]),
        "components": torch.rand(4, 2, generator=numbers, dtype=torch.float64),
        **{key: value.masked_fill(~mask, math.nan) for key, value in wide.items()},
    }
    result = legato.advantages(algorithm, **keywords).advantages
    assert result.shape in ((4,), (4, 4))
    inside = mask if result.dim() == 2 else torch.ones(4).bool()
    assert torch.isfinite(result[inside]).all()
    order = [2, 0, 3, 1]
    moved = legato.advantages(algorithm, **{key: value[order] for key, value in keywords.items()}).advantages
    assert moved[inside[order]].tolist() == pytest.approx(result[order][inside[order]].tolist(), abs=1e-9)
    other = {key: keywords[key].masked_fill(~mask, -7.0) for key in wide}
    assert torch.equal(legato.advantages(algorithm, **{**keywords, **other}).advantages[inside], result[inside])


def check_filter(candidate: Candidate) -> None:
    """A decision per response, which changes places with its row."""
    part = candidate.cls(**candidate.fields)
    assert isinstance(part, Filter)
    samples = Samples(
        accuracy=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        group=torch.tensor([0, 0, 1, 1]),
        truncated=torch.tensor([False, True, False, False]),
        version_lag=torch.tensor([0, 1, 5, 9]),
    )
    keep = part.keep(samples)
    assert keep.shape == (4,) and set(keep.tolist()) <= {True, False}
    order = torch.tensor([2, 0, 3, 1])
    moved = Samples(**{name: getattr(samples, name)[order] for name in ("accuracy", "group", "truncated", "version_lag")})
    assert torch.equal(part.keep(moved), keep[order])
