"""Values that parts refuse, and their error messages."""

import subprocess
import sys

import pytest

from legato.core.parts import lookup, names
from legato.objectives.clips import BalancedClip, Clip

REFUSED = {
    "Clip(low=-1e-9)": "trust 'clip'.low: expected a number >= 0, got -1e-09",
    "Clip(low=math.nan)": "trust 'clip'.low: expected a number >= 0, got nan",
    "Clip(low='0.2')": "trust 'clip'.low: expected a number >= 0, got '0.2'",
    "Clip(low=None)": "trust 'clip'.low: expected a number >= 0, got None",
    "Clip(low=True)": "trust 'clip'.low: expected a number >= 0, got True",
    "TruncatedImportance(limit=math.inf)": "correction 'tis'.limit: expected a finite number > 0, got inf",
    "Geometric(level='word')": 'ratio \'geometric\'.level: expected one of "token", "turn", "sequence", got \'word\'',
    "GroupStandard(ddof=0.5)": "advantage 'group-z'.ddof: expected a whole number >= 0 and <= 1, got 0.5",
    "GeneralisedAdvantage(whiten=1)": "advantage 'gae'.whiten: expected true or false, got 1",
}


def test_a_refusal_names_the_field_the_value_and_the_allowed_values() -> None:
    """In a process of its own: the shape checker of the tests would speak first."""
    program = f"""
import math
from legato.advantages.gae import GeneralisedAdvantage
from legato.advantages.group import GroupStandard
from legato.objectives.clips import Clip
from legato.objectives.corrections import TruncatedImportance
from legato.objectives.ratios import Geometric
for call in {list(REFUSED)!r}:
    try:
        eval(call)
    except ValueError as error:
        print(error)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == list(REFUSED.values())


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"floor = 0\.9 is above floor_max"):
        BalancedClip(floor=0.9)


def test_parts_are_frozen_and_compare_by_value() -> None:
    assert Clip(low=1) == Clip(low=1.0)
    with pytest.raises(AttributeError):
        Clip().low = 0.3


def test_an_unknown_part_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"unknown trust 'dual_clip'; did you mean 'dual-clip'\?"):
        lookup("trust", "dual_clip")


def test_every_part_has_a_sentence_for_itself_and_for_each_field() -> None:
    import dataclasses

    for kind in ("ratio", "trust", "correction", "penalty", "aggregate", "advantage", "filter"):
        assert names(kind), kind
        for name in names(kind):
            part = lookup(kind, name)
            assert part.__doc__, name
            for field in dataclasses.fields(part):
                assert field.metadata["says"], f"{name}.{field.name}"
