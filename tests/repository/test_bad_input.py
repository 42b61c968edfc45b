"""Mistakes people make with the public functions: one message each, that says what, the value and what is allowed."""

import copy
import pickle

import pytest
import torch

import legato


def signals(**changes: object) -> dict[str, object]:
    base = {
        "logprobs": torch.full((2, 3), -1.0),
        "old_logprobs": torch.full((2, 3), -1.0),
        "advantages": torch.tensor([1.0, -1.0]),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    }
    return base | changes


TENSORS = torch.full((2, 3), -1.0)
NAN = torch.tensor([[-1.0] * 3, [-1.0, torch.nan, -1.0]])


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gspo", {"logprobs": [[0.0]]}, ["logprobs", "list", "torch.Tensor"]),
        ("gspo", {"old_logprobs": TENSORS.numpy()}, ["old_logprobs", "ndarray", "torch.Tensor"]),
        ("gspo", {"mask": [[1, 1, 1]]}, ["mask", "list", "torch.Tensor"]),
        ("gspo", {"advantages": 1.0}, ["advantages", "float", "torch.Tensor"]),
        ("dapo", {"group": [0, 0]}, ["group", "list", "torch.Tensor"]),
        ("gspo", {"logprobs": torch.zeros(3)}, ["logprobs", "[3]", "[B, T]"]),
        ("gspo", {"old_logprobs": torch.zeros(2, 4)}, ["old_logprobs", "[2, 4]", "[2, 3]"]),
        ("gspo", {"mask": torch.ones(3, 2)}, ["mask", "[3, 2]", "[2, 3]"]),
        ("gspo", {"mask": torch.full((2, 3), 2)}, ["mask", "2", "0 and 1"]),
        ("gspo", {"advantages": torch.ones(3)}, ["advantages", "[3]", "[2]", "[2, 3]"]),
        ("gspo", {"advantages": torch.ones(2, 1)}, ["advantages", "[2, 1]", "[2]", "[2, 3]"]),
        ("gspo", {"advantages": torch.tensor([1.0, torch.nan])}, ["advantages", "nan", "row 1"]),
        ("grpo", {"advantages": torch.tensor([[0.0, torch.inf, 0.0]] * 2)}, ["advantages", "inf", "row 0"]),
        ("gspo", {"logprobs": TENSORS.bfloat16()}, ["logprobs", "torch.bfloat16", "float32", "float64"]),
        ("gspo", {"old_logprobs": TENSORS.half()}, ["old_logprobs", "torch.float16"]),
        ("gspo", {"logprobs": TENSORS.long()}, ["logprobs", "torch.int64"]),
        ("gspo", {"old_logprobs": None}, ["gspo", "ratio 'geometric'", "old_logprobs="]),
        ("gspo", {"old_logprobs": TENSORS.to("meta")}, ["old_logprobs", "meta", "cpu"]),
        ("gspo", {"counts": 4}, ["counts", "int", "legato.counts"]),
        ("gspo", {"keep": torch.tensor([1, 3])}, ["keep", "3", "0 and 1"]),
        ("gspo", {"state": {"a": {"b": 1.0}}}, ["gspo", "state"]),
        ("gspo", {"state": 5}, ["gspo", "state holds 5", "algorithm.initial()"]),
        ("gspo", {"state": {"a": 1}}, ["gspo", "state", "algorithm.initial()"]),
        ("gspo", {"mask": None}, ["mask", "NoneType", "torch.Tensor"]),
        ("gspo", {"advantages": None}, ["advantages", "NoneType", "torch.Tensor"]),
        ("gspo", {"logprobs": NAN}, ["logprobs", "nan", "row 1", "mask"]),
        ("gspo", {"old_logprobs": NAN}, ["old_logprobs", "nan", "row 1"]),
        ("gspo", {"sampler_logprobs": NAN}, ["sampler_logprobs", "nan", "row 1"]),
        ("dapo", {}, ["dapo", "group", "aggregate 'group-token-mean'"]),
        ("dapo", {"group": torch.zeros(2)}, ["group", "torch.float32", "integer"]),
        ("dapo", {"group": torch.zeros(3, dtype=torch.long)}, ["group", "[3]", "[2]"]),
        ("minirl", {}, ["minirl", "sampler_logprobs", "correction 'tis'"]),
        ("ppo", {}, ["ppo", "values", "old_values", "returns", "penalty 'value'"]),
        ("rspo", {"router_shift": torch.full((2, 3), 2.0)}, ["router_shift", "2", "(0, 1]"]),
        ("turn-gspo", {}, ["turn-gspo", "turn="]),
        ("turn-gspo", {"turn": torch.full((2, 3), -1)}, ["turn", "-1 .. -1", "0 .. 2"]),
        ("turn-gspo", {"turn": torch.zeros(2, 3)}, ["turn", "torch.float32", "integer"]),
        ("gspo", {"rollout": torch.zeros(3, dtype=torch.long)}, ["rollout", "[3]", "[2]"]),
        ("gspo", {"advantages": torch.tensor([[1.0, 2.0, 1.0]] * 2)}, ["gspo-token"]),
        ("dr-grpo", {}, ["budget", "tokens"]),
        ("fspo", {}, ["log_low", "log_high"]),
    ],
)
def test_loss_refuses_a_wrong_argument_by_name_and_value(name: str, changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        legato.loss(name, **signals(**changes))
    assert [word for word in words if word not in str(refusal.value)] == []


def test_counts_smaller_than_the_call_are_refused() -> None:
    small = legato.counts("gspo", mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"counts.*3 tokens.* 6"):
        legato.loss("gspo", **signals(), counts=small)
    no_groups = legato.counts("gspo", mask=torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"counts.*groups"):
        legato.loss("dapo", **signals(group=torch.tensor([0, 1])), counts=no_groups)
    with pytest.raises(ValueError, match="dense"):
        legato.counts("dapo", mask=torch.ones(2, 3), group=torch.tensor([0, 10**9]))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gspo", {"rewards": [1.0, 0.0]}, ["rewards", "list"]),
        ("gspo", {"rewards": torch.ones(2, 1)}, ["rewards", "[2, 1]", "[B]"]),
        ("gspo", {"rewards": torch.tensor([1.0, torch.nan])}, ["rewards", "not finite"]),
        ("gspo", {"group": None}, ["group="]),
        ("ppo", {}, ["'gae'", "values", "mask="]),
        ("group_z", {}, ["'group_z'", "'group-z'"]),
        ("gdpo", {"components": torch.ones(3, 2)}, ["components", "[3, 2]", "[2, ...]"]),
        ("gdpo", {"components": {"a": torch.ones(2), "b": torch.ones(3)}}, ["components", "[2]", "b [3]"]),
        ("gdpo", {"components": {"a": [1.0, 2.0]}}, ["a", "list", "torch.Tensor"]),
        ("gdpo", {"components": {}}, ["components", "no component"]),
        ("gspo", {"turn_rewards": [[1.0], [2.0]]}, ["turn_rewards", "list", "torch.Tensor"]),
        ("gspo", {"rewards": None}, ["rewards", "NoneType"]),
        ("pass-at-k", {}, ["k = 4", "at least 4", "has 2"]),
        ("pass-at-k", {"rewards": torch.tensor([0.5, 1.0])}, ["rewards", "0 or 1"]),
    ],
)
def test_advantages_refuses_a_wrong_argument_by_name_and_value(
    name: str, changes: dict[str, object], words: list[str]
) -> None:
    arguments = {"rewards": torch.tensor([1.0, 0.0]), "group": torch.tensor([0, 0])} | changes
    with pytest.raises(ValueError) as refusal:
        legato.advantages(name, **arguments)
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize("wrong", [3, None, ["gspo"]])
def test_a_value_that_is_no_algorithm_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=rf"algorithm.*{type(wrong).__name__}"):
        legato.algorithm(wrong)
    with pytest.raises(ValueError, match=r"overrides.*list"):
        legato.algorithm("gspo", [("a", 1)])


def test_adaptive_parts_ask_for_their_state() -> None:
    value = legato.algorithm("gspo", {"objective.penalties.adaptive-entropy.target": 1.0})
    with pytest.raises(ValueError, match=r"pass state=algorithm.initial\(\)"):
        legato.loss(value, **signals(entropy=torch.ones(2, 3)))
    outcome = legato.loss("gspo", **signals())
    with pytest.raises(ValueError, match="follows entropy/mean"):
        value.advance(value.initial(), outcome.sums)


@pytest.mark.parametrize("name", ["gspo", "gspo-auto", "dapo", "ppo", "srpo"])
def test_an_algorithm_is_a_value_that_travels(name: str) -> None:
    value = legato.algorithm(name)
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert other == value
        assert hash(other) == hash(value)
    assert {value: 1}[legato.algorithm(name)] == 1


def test_an_advantage_of_an_empty_response_is_never_read() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    outcome = legato.loss("gspo", **signals(mask=mask, advantages=torch.tensor([1.0, torch.nan])))
    assert outcome.loss.item() == -1.0
    assert repr(outcome).startswith("Outcome(loss=-1, coefficients=[2, 3]")
