"""The contract of a part. Without `--part` it is run on every part of Legato's own.

python -m pytest tests/contracts --part my_clip.py:MyClip
"""

from pathlib import Path
from typing import Any

import pytest

from legato.advantages.estimator import Estimator
from legato.advantages.filters import Filter
from legato.core.parts import Part, lookup, part_at
from legato.objectives.slots import Trust
from tests.contracts import part_checks as checks
from tests.contracts.part_checks import SLOTS, Candidate
from tests.proof.parts import own_part_names

LOSS = (
    checks.check_gradient,
    checks.check_splitting,
    checks.check_mask,
    checks.check_extremes,
    checks.check_state,
)
OPEN = {
    "log-clip": {"log_low": 0.05, "log_high": 0.06},
    "sequence-sum-over-constant": {"constant": 8.0},
    "pass-at-k": {"k": 2},
    "pass-at-k-reward": {"k": 2},
}
"""Fields without a usable default."""
DETACH = {"kl-straight-through", "geometric-weight"}
"""Parts that stop gradients on purpose."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "candidate" not in metafunc.fixturenames:
        return
    reference = metafunc.config.getoption("--part", default=None)
    if reference is not None:
        cls = part_at(reference)
        candidates = [
            Candidate(cls=cls, reference=reference, detaches=metafunc.config.getoption("--detaches", default=False))
        ]
    else:
        candidates = [
            Candidate(cls=lookup(kind, name), reference=name, fields=OPEN.get(name, {}), detaches=name in DETACH)
            for kind in (*SLOTS, "advantage", "filter")
            for name in own_part_names(kind)
        ]
    cases = [(each, check) for each in candidates for check in checks_of(each.cls)]
    ids = [f"{each.cls.kind}-{each.cls.name}-{check.__name__.removeprefix('check_')}" for each, check in cases]
    metafunc.parametrize(("candidate", "check"), cases, ids=ids)


def checks_of(cls: type[Part]) -> tuple[Any, ...]:
    if issubclass(cls, Estimator | Filter):
        return (checks.check_estimator,) if issubclass(cls, Estimator) else (checks.check_filter,)
    states_bounds = issubclass(cls, Trust) and cls.bounds is not Trust.bounds
    return LOSS + (checks.check_bounds,) * states_bounds


def test_the_part_keeps_its_contract(candidate: Candidate, check: Any) -> None:
    check(candidate)


BROKEN = '''
import torch
from dataclasses import replace
from legato.parts import Bounds, Estimate, Estimator, Penalty, Trust, by_sign, number

class Dishonest(Trust):
    """States a band that it does not keep."""
    role = "clip"
    under: float = number(default=0.2, says="", minimum=0.0)
    over: float = number(default=0.2, says="", minimum=0.0)
    def bounds(self, state):
        return Bounds(low=self.under, high=self.over, fields=("under", "over"))
    def apply(self, region, context):
        return replace(region, log_value=by_sign(region.log_value, context.signals.advantages, -0.5, 0.5))

class Unscaled(Dishonest):
    """Names fields that do not scale its band."""
    def bounds(self, state):
        return Bounds(low=0.5, high=0.5, logarithmic=True, fields=("under", "over"))

class OfTheBatch(Penalty):
    """Depends on the other rows of its micro-batch, and says nothing of it."""
    def apply(self, context):
        logprobs = context.signals.mask.select(context.signals.logprobs)
        return logprobs * logprobs.detach().mean()

class Overflowing(Penalty):
    """Takes exp twice."""
    def apply(self, context):
        return context.signals.mask.select((context.signals.log_ratio("old")).exp().exp())

class Greedy(Penalty):
    """Reads what stands outside the mask."""
    def apply(self, context):
        return context.signals.logprobs.sum(1, keepdim=True)

class ByPlace(Estimator):
    """Depends on the order of the rows."""
    def estimate(self, scores):
        return Estimate(advantages=scores.rewards * torch.arange(len(scores.rewards)))
'''


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("Dishonest", checks.check_bounds),
        ("Unscaled", checks.check_bounds),
        ("OfTheBatch", checks.check_splitting),
        ("OfTheBatch", checks.check_gradient),
        ("Overflowing", checks.check_extremes),
        ("Greedy", checks.check_mask),
        ("ByPlace", checks.check_estimator),
    ],
)
def test_a_part_that_breaks_its_contract_fails(name: str, check: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    reference = f"{tmp_path}/broken.py:{name}"
    with pytest.raises((AssertionError, RuntimeError)):
        check(Candidate(cls=part_at(reference), reference=reference))
