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


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gspo", {"logprobs": [[0.0]]}, "logprobs is a list; a torch.Tensor is needed"),
        ("gspo", {"old_logprobs": TENSORS.numpy()}, "old_logprobs is a ndarray; a torch.Tensor is needed"),
        ("gspo", {"mask": [[1, 1, 1]]}, "mask is a list; a torch.Tensor is needed"),
        ("gspo", {"advantages": 1.0}, "advantages is a float; a torch.Tensor is needed"),
        ("dapo", {"group": [0, 0]}, "group is a list; a torch.Tensor is needed"),
        ("gspo", {"logprobs": torch.zeros(3)}, "logprobs has shape [3]; [B, T] is needed"),
        ("gspo", {"old_logprobs": torch.zeros(2, 4)}, "old_logprobs has shape [2, 4] but logprobs has shape [2, 3]"),
        ("gspo", {"mask": torch.ones(3, 2)}, "mask has shape [3, 2] but logprobs has shape [2, 3]"),
        ("gspo", {"mask": torch.full((2, 3), 2)}, "mask holds 2; only 0 and 1"),
        ("gspo", {"advantages": torch.ones(3)}, "advantages has shape [3]; [2] (one per response) or [2, 3]"),
        ("gspo", {"advantages": torch.ones(2, 1)}, "advantages has shape [2, 1]; [2] (one per response) or [2, 3]"),
        ("gspo", {"advantages": torch.tensor([1.0, torch.nan])}, "advantages is nan in row 1"),
        ("grpo", {"advantages": torch.tensor([[0.0, torch.inf, 0.0]] * 2)}, "advantages is inf in row 0"),
        ("gspo", {"logprobs": TENSORS.bfloat16()}, "logprobs is torch.bfloat16; float32 or float64 is needed"),
        ("gspo", {"old_logprobs": TENSORS.half()}, "old_logprobs is torch.float16"),
        ("gspo", {"logprobs": TENSORS.long()}, "logprobs is torch.int64"),
        ("gspo", {"old_logprobs": None}, "gspo needs old_logprobs (read by ratio 'geometric'); pass old_logprobs=..."),
        ("gspo", {"old_logprobs": TENSORS.to("meta")}, "old_logprobs is on meta but logprobs is on cpu"),
        ("gspo", {"counts": 4}, "counts is a int; what legato.counts returns"),
        ("gspo", {"keep": torch.tensor([1, 3])}, "keep holds 3; only 0 and 1"),
        ("gspo", {"state": {"a": {"b": 1.0}}}, "gspo keeps state of nothing"),
        ("dapo", {}, "dapo needs group, which its aggregate 'group-token-mean' reads"),
        ("dapo", {"group": torch.zeros(2)}, "group is torch.float32; integer ids are needed"),
        ("dapo", {"group": torch.zeros(3, dtype=torch.long)}, "group has shape [3]; [2], one id per row"),
        ("minirl", {}, "minirl needs sampler_logprobs (read by correction 'tis')"),
        ("ppo", {}, "ppo needs values (read by penalty 'value'), old_values (read by penalty 'value'), returns"),
        ("rspo", {"router_shift": torch.full((2, 3), 2.0)}, "router_shift holds 2 at a token the policy wrote; (0, 1]"),
        ("turn-gspo", {}, "turn-gspo needs turn"),
        ("turn-gspo", {"turn": torch.full((2, 3), -1)}, "turn holds -1 .. -1 at tokens the policy wrote; 0 .. 2"),
        ("turn-gspo", {"turn": torch.zeros(2, 3)}, "turn is torch.float32; integer turn indices are needed"),
        ("gspo", {"rollout": torch.zeros(3, dtype=torch.long)}, "rollout has shape [3]; [2], one id per row"),
        ("gspo", {"advantages": torch.tensor([[1.0, 2.0, 1.0]] * 2)}, "use gspo-token"),
        ("dr-grpo", {}, "give the response budget in tokens"),
        ("fspo", {}, "log_low and log_high must be given"),
    ],
)
def test_a_mistake_in_a_call_of_loss_is_told(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        legato.loss(name, **signals(**changes))
    assert message in str(refusal.value)


def test_counts_that_cannot_be_those_of_the_whole_are_refused() -> None:
    small = legato.counts("gspo", mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="counts know 3 tokens, but this call alone has 6"):
        legato.loss("gspo", **signals(), counts=small)
    no_groups = legato.counts("gspo", mask=torch.ones(4, 3))
    with pytest.raises(ValueError, match="the counts given know no groups"):
        legato.loss("dapo", **signals(group=torch.tensor([0, 1])), counts=no_groups)
    with pytest.raises(ValueError, match="dense over the whole update"):
        legato.counts("dapo", mask=torch.ones(2, 3), group=torch.tensor([0, 10**9]))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gspo", {"rewards": [1.0, 0.0]}, "rewards is a list"),
        ("gspo", {"rewards": torch.ones(2, 1)}, "rewards has shape [2, 1]; [B], one per response"),
        ("gspo", {"rewards": torch.tensor([1.0, torch.nan])}, "rewards holds a value that is not finite"),
        ("gspo", {"group": None}, "compares responses of one group; pass group="),
        ("ppo", {}, "the estimator 'gae' needs mask (read by its formula), values (read by its formula); pass mask="),
        ("group_z", {}, "unknown algorithm or estimator 'group_z'; did you mean 'group-z'?"),
        ("gdpo", {"components": torch.ones(3, 2)}, "components has shape [3, 2]; [2, ...], one row per response"),
        ("pass-at-k", {}, "k = 4 needs groups of at least 4; the smallest has 2"),
        ("pass-at-k", {"rewards": torch.tensor([0.5, 1.0])}, "rewards must be 0 or 1"),
    ],
)
def test_a_mistake_in_a_call_of_advantages_is_told(name: str, changes: dict[str, object], message: str) -> None:
    given = {"rewards": torch.tensor([1.0, 0.0]), "group": torch.tensor([0, 0])} | changes
    with pytest.raises(ValueError) as refusal:
        legato.advantages(name, **given)
    assert message in str(refusal.value)


@pytest.mark.parametrize("wrong", [3, None, ["gspo"]])
def test_what_is_no_algorithm_is_told(wrong: object) -> None:
    with pytest.raises(ValueError, match="an algorithm is a name or a value"):
        legato.algorithm(wrong)
    with pytest.raises(ValueError, match="overrides are a mapping"):
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
