"""Generated updates: ragged, empty and fully masked rows, holes, singletons, dead groups, huge ratios, garbage outside.

Hypothesis draws the structure (it shrinks well); the numbers come from a seeded generator, so that none of them stands
on a kink.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st

from tests.reference.batch import Batch, Rows

GARBAGE = (math.nan, math.inf, -math.inf, 1e38, -1e38, 0.7)
DRIFTS = (2e-4, 0.03, 0.3, 1.0)


def examples(count: int) -> settings:
    """`count` examples where the profile of the run asks for 40, and in proportion where it asks for more or fewer."""
    return settings(deadline=None, max_examples=max(2, round(count * settings.default.max_examples / 40)))


@st.composite
def masks(draw: st.DrawFn, max_rows: int = 6, max_width: int = 6) -> list[list[bool]]:
    """Rows of one width: full, ragged, with holes, of one token, or empty."""
    width = draw(st.integers(1, max_width))
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        kind = draw(st.sampled_from(["full", "prefix", "holes", "single", "empty"]))
        if kind == "full":
            rows.append([True] * width)
        elif kind == "prefix":
            length = draw(st.integers(1, width))
            rows.append([position < length for position in range(width)])
        elif kind == "holes":
            rows.append(draw(st.lists(st.booleans(), min_size=width, max_size=width)))
        elif kind == "single":
            token = draw(st.integers(0, width - 1))
            rows.append([position == token for position in range(width)])
        else:
            rows.append([False] * width)
    return rows


@st.composite
def batches(draw: st.DrawFn, advantages: str = "sequence", wild: bool = True, filled: bool = False) -> Batch:
    """An update with every channel. `advantages`: per sequence, turn or token; `filled`: at least one token."""
    mask = draw(masks())
    if filled and not any(any(row) for row in mask):
        mask[0][0] = True
    group = renumber_groups(draw(st.lists(st.integers(0, 2), min_size=len(mask), max_size=len(mask))))
    dead = {g for g in set(group) if draw(st.integers(0, 4)) == 0}
    drift = draw(st.sampled_from(DRIFTS))
    wildness = draw(st.sampled_from([0.0, 0.15])) if wild else 0.0
    numbers = random.Random(draw(st.integers(0, 2**32 - 1)))
    return build(mask, group, dead, drift, wildness, advantages, numbers)


def build(
    mask: list[list[bool]],
    group: list[int],
    dead: set[int],
    drift: float,
    wildness: float,
    advantages: str,
    numbers: random.Random,
) -> Batch:
    """Fill the structure with numbers; `wildness` is the chance that a log-ratio is up to 30 in size."""

    def change(scale: float) -> float:
        if numbers.random() < wildness:
            return numbers.choice([-1, 1]) * numbers.uniform(5, 30)
        return numbers.gauss(0.0, scale)

    def rows(make: Callable[[int, int], float]) -> Rows:
        return [
            [make(row, t) if counted else numbers.choice(GARBAGE) for t, counted in enumerate(mask[row])]
            for row in range(len(mask))
        ]

    highest = rows(lambda row, t: -numbers.uniform(0.03, 3))
    shift = rows(lambda row, t: change(drift))
    # The larger of the two log-probs is below 0, so that both are probabilities.
    old = rows(lambda row, t: highest[row][t] - max(shift[row][t], 0.0))
    new = rows(lambda row, t: old[row][t] + shift[row][t])
    turn = turns(mask, numbers)
    signs = [0.0 if group[row] in dead else 1.0 for row in range(len(mask))]
    return Batch(
        new=new,
        old=old,
        mask=mask,
        advantages=rows(advantage_rule(advantages, signs, turn, numbers)),
        group=group,
        roll=rows(lambda row, t: sampler(old[row][t], numbers.gauss(0.0, 0.6))),
        kept_logmass=rows(lambda row, t: -numbers.uniform(0.0, 0.3)),
        ref=rows(lambda row, t: new[row][t] + change(0.3)),
        turn=turn,
        gamma=rows(lambda row, t: numbers.uniform(0.5, 1.0)),
        entropy=rows(lambda row, t: numbers.uniform(0.0, 3.0)),
        uniform=rows(lambda row, t: numbers.random()),
        values=rows(lambda row, t: numbers.gauss(0.0, 1.0)),
        old_values=rows(lambda row, t: numbers.gauss(0.0, 1.0)),
        returns=rows(lambda row, t: numbers.gauss(0.0, 1.0)),
    )


def advantage_rule(
    unit: str, signs: list[float], turn: list[list[int]], numbers: random.Random
) -> Callable[[int, int], float]:
    """A number for each row, for each turn of a row, or for each token; 0 in a group without variance."""
    drawn: dict[tuple[int, int], float] = {}

    def rule(row: int, t: int) -> float:
        key = {"sequence": (row, 0), "turn": (row, turn[row][t]), "token": (row, t)}[unit]
        if key not in drawn:
            drawn[key] = numbers.choice([-1, 1]) * numbers.uniform(0.2, 2.0) * signs[row]
        return drawn[key]

    return rule


def turns(mask: list[list[bool]], numbers: random.Random) -> list[list[int]]:
    """Turn ids that rise along a row; -1 outside the mask."""
    result = []
    for row in mask:
        current, ids = 0, []
        for counted in row:
            ids.append(current if counted else -1)
            current += numbers.random() < 0.4
        result.append(ids)
    return result


def sampler(old: float, gap: float) -> float:
    """old - gap, the gap turned round where the sampler's log-prob would be above 0."""
    return old - gap if old - gap < -0.01 else old - abs(gap)


def renumber_groups(labels: list[int]) -> list[int]:
    """Group ids 0, 1, 2 ... in order of appearance."""
    names: dict[int, int] = {}
    return [names.setdefault(label, len(names)) for label in labels]


def reorder_rows(batch: Batch, order: list[int]) -> Batch:
    """The rows of a batch in another order, or a part of them."""
    return replace(batch, **{name: [value[row] for row in order] for name, value in channels(batch).items()})


def channels(batch: Batch) -> dict[str, list]:
    """The lists of a batch that are not None, by field name."""
    return {name: value for name, value in vars(batch).items() if value is not None}


def keep_fields(batch: Batch, *fields: str) -> Batch:
    """The batch with only the fields that every member reads (new, old, mask, advantages, group) and these `fields`."""
    always = ("new", "old", "mask", "advantages", "group")
    return replace(batch, **{name: None for name in vars(batch) if name not in (*always, *fields)})
