"""Every registered part of Legato equals an independent reference. A new part without a reference fails here."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import legato
from legato.algorithms.catalogue import algorithm_names
from legato.algorithms.override import parts_of
from tests.proof.batches import batches, examples, keep_fields
from tests.proof.bridge import assert_agrees, assert_silent_outside, evaluate
from tests.proof.members import MEMBERS
from tests.proof.parts import CREDITS, GROUP, LENGTHS, REWARDS, own_part_names, proof_of

KINDS = ("ratio", "trust", "correction", "penalty", "aggregate")


def test_every_algorithm_is_compared_with_a_reference() -> None:
    assert set(algorithm_names()) == set(MEMBERS)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in own_part_names(kind)])
@examples(8)
@given(data=st.data())
def test_every_part_of_a_loss_equals_a_reference(kind: str, name: str, data: st.DataObject) -> None:
    proof = proof_of(kind, name)
    assert proof is not None, f"{kind} {name!r} has no reference: write one and add a case to tests/proof/parts.py"
    algorithm = proof.algorithm()
    assert (kind, name) in [(part.kind, part.name) for _, part in parts_of(algorithm)]
    batch = keep_fields(data.draw(batches(proof.unit, wild=proof.wild, filled=True)), *proof.needs)
    evaluation = evaluate(algorithm, batch, proof.unit, **proof.further)
    assert_agrees(evaluation, proof.reference(batch))
    assert_silent_outside(evaluation, batch)


@pytest.mark.parametrize("name", own_part_names("advantage"))
def test_every_estimator_equals_a_reference(name: str) -> None:
    assert name in CREDITS, f"advantage {name!r} has no reference: write one and add a case to tests/proof/parts.py"
    case = CREDITS[name]
    inputs: dict[str, Any] = {"rewards": REWARDS, "group": GROUP, **case.inputs}
    whole = ("group", "turn", "turn_states")
    types = {key: torch.long if key in whole else torch.float64 for key in inputs}
    keywords = {key: torch.tensor(value, dtype=types[key]) for key, value in inputs.items()}
    mask = torch.arange(6) < torch.tensor(LENGTHS[: len(keywords["rewards"])])[:, None]
    keywords["mask"] = keywords["turn"] >= 0 if "turn" in keywords else mask
    overrides = {"advantage": name, **{f"advantage.{field}": value for field, value in case.fields.items()}}
    result = legato.advantages(legato.algorithm("gspo", overrides), **keywords).advantages
    expected = torch.tensor(case.expected, dtype=torch.float64)
    if result.dim() == 2 and expected.dim() == 1:
        expected = expected[:, None] * keywords["mask"]
    inside = keywords["mask"] if result.dim() == 2 else torch.ones_like(expected).bool()
    assert result[inside].tolist() == pytest.approx(expected[inside].tolist(), abs=case.tolerance)
