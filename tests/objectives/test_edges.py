"""Edge cases in which a wrong number would look right."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import legato
from legato.advantages.filters import Overlong, Samples, ZeroVariance
from legato.objectives.clips import WeightClip
from legato.objectives.corrections import GeometricRejection, IcePop
from legato.objectives.masks import ClipCovariance


def signals(rows: int = 2, width: int = 4, drift: float = 0.0, **changes: Tensor) -> dict[str, Tensor]:
    old = torch.full((rows, width), -1.0, dtype=torch.float64)
    base = {
        "logprobs": old + drift,
        "old_logprobs": old,
        "advantages": torch.tensor([1.0, -1.0] * (rows // 2), dtype=torch.float64),
        "mask": torch.ones(rows, width, dtype=torch.bool),
    }
    return base | changes


@pytest.mark.parametrize(
    ("name", "path", "limit"),
    [("grpo", "objective.ratio.limit", 2000.0), ("seq-product", "objective.ratio.limit", 3000.0), ("gspo", "", 0.0)],
)
def test_without_advantage_there_is_no_gradient_at_any_ratio(name: str, path: str, limit: float) -> None:
    value = legato.algorithm(name, {path: limit} if path else None)
    outcome = legato.loss(value, **signals(drift=900.0, advantages=torch.zeros(2, dtype=torch.float64)))
    assert outcome.loss.item() == 0
    assert (outcome.coefficients == 0).all()


def test_a_weight_clip_needs_a_weight() -> None:
    with pytest.raises(ValueError, match="would lose their gradient"):
        legato.algorithm("grpo", {"objective.trust": ["weight-clip"]})


def test_the_default_level_beside_vespo_is_the_product_of_token_weights() -> None:
    arguments = signals(width=50)
    arguments["sampler_logprobs"] = arguments["old_logprobs"] - 0.02
    matched = legato.loss(legato.algorithm("vespo", {"objective.corrections.tis.cap": 2.0}), **arguments)
    assert matched.trace.log_ratio.flatten().tolist() == pytest.approx([1.0, 1.0])
    by_token = legato.algorithm("vespo", {"objective.corrections.tis.level": "token"})
    torch.testing.assert_close(matched.coefficients, legato.loss(by_token, **arguments).coefficients)


def test_several_advantages_for_one_ratio_are_refused() -> None:
    within_turn = torch.tensor([[1.0, -1.0, 1.0, -1.0]] * 2, dtype=torch.float64)
    turn = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="one advantage per turn, but row 0"):
        legato.loss("turn-gspo", **signals(advantages=within_turn), turn=turn)
    with pytest.raises(ValueError, match="one advantage per sequence, but row 0"):
        legato.loss("gspo", **signals(), rollout=torch.tensor([3, 3]))
    by_turn = torch.tensor([[1.0, 1.0, -1.0, -1.0]] * 2, dtype=torch.float64)
    turns = torch.tensor([[0, 0, 1, 1]] * 2)
    assert legato.loss("turn-gspo", **signals(advantages=by_turn), turn=turns).loss.item() == 0


def test_tying_some_channels_only_is_refused() -> None:
    value = legato.algorithm("gspo", {"objective.penalties.entropy.coefficient": 0.1})
    arguments = signals(entropy=torch.ones(2, 4, dtype=torch.float64))
    field = legato.loss(value, **arguments).field
    with pytest.raises(ValueError, match="pass entropy= to tie"):
        field.tie(torch.zeros((), dtype=torch.float64), logprobs=arguments["logprobs"])


def test_counts_of_another_algorithm_are_refused_in_words() -> None:
    arguments = signals(group=torch.tensor([0, 0]))
    mask, group = arguments["mask"], arguments["group"]
    counts_kept = legato.algorithm("gspo", {"aggregate.denominator": "kept"})
    with pytest.raises(ValueError, match="made for another algorithm"):
        legato.loss(counts_kept, **arguments, counts=legato.counts("gspo", mask=mask))
    with pytest.raises(ValueError, match="made for another algorithm"):
        legato.loss("gepo", **arguments, counts=legato.counts("dapo", mask=mask, group=group))
    with pytest.raises(ValueError, match="cannot be added"):
        legato.counts("gspo", mask=mask) + legato.counts("dapo", mask=mask, group=group)
    with pytest.raises(ValueError, match="gepo needs old_logprobs"):
        legato.counts("gepo", mask=mask, group=group)


def test_counts_do_not_depend_on_the_precision_at_hand() -> None:
    arguments = signals(group=torch.tensor([0, 0]))
    value = legato.algorithm("gepo", {"objective.trust.high-entropy.fraction": 0.5})
    counts = legato.counts(value, mask=arguments["mask"], group=arguments["group"], old_logprobs=arguments["old_logprobs"])
    single = arguments | {"logprobs": arguments["logprobs"].float()}
    assert torch.isfinite(legato.loss(value, **single, entropy=torch.rand(2, 4), counts=counts).loss)


def test_a_channel_of_another_precision_is_converted() -> None:
    value = legato.algorithm("gspo", {"objective.penalties.entropy.coefficient": 0.1})
    entropy = torch.ones(2, 4, requires_grad=True)
    legato.loss(value, **signals(entropy=entropy)).loss.backward()
    assert entropy.grad.flatten().tolist() == pytest.approx([-0.1 / 8] * 8)


def test_inference_mode_is_refused_but_its_tensors_are_accepted() -> None:
    with torch.inference_mode():
        arguments = signals(drift=0.01)
        with pytest.raises(ValueError, match=r"outside torch\.inference_mode"):
            legato.loss("gspo", **arguments)
    assert legato.loss("gspo", **arguments).coefficients.shape == (2, 4)
    with torch.no_grad():
        assert (legato.loss("gspo", **signals()).coefficients != 0).all()


def test_backward_twice_gives_the_gradient_twice() -> None:
    leaf = torch.full((2, 4), -1.0, dtype=torch.float64, requires_grad=True)
    outcome = legato.loss("grpo", **signals(logprobs=leaf))
    outcome.loss.backward(retain_graph=True)
    once = leaf.grad.clone()
    outcome.loss.backward()
    torch.testing.assert_close(leaf.grad, 2 * once)
    torch.testing.assert_close(once, -outcome.coefficients)


@pytest.mark.parametrize(
    "make",
    [
        lambda: IcePop(floor=6, cap=5),
        lambda: WeightClip(floor=6, cap=5),
        lambda: GeometricRejection(floor=2, cap=1),
        lambda: ClipCovariance(low=6, high=5),
    ],
)
def test_bounds_out_of_order_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="is above"):
        make()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective.trust.clip.low": 0.1, "objective.trust.clip": None}, "removed and set in one call"),
        ({"objective.trust.clip.": 0.1}, "is not a dotted path"),
        ({3: 0.1}, "is not a dotted path"),
        ({"trust.clip.low": 0.1}, "did you mean 'objective.trust.clip.low'"),
    ],
)
def test_overrides_that_contradict_or_are_no_paths_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        legato.algorithm("gspo", changes)


def test_numbers_of_numpy_are_numbers() -> None:
    """In a process of its own: the shape checker of the tests would speak first."""
    program = """
import numpy, legato
value = legato.algorithm("gspo", {"objective.trust.clip.low": numpy.float32(0.5), "advantage.ddof": numpy.int64(1)})
assert (value.objective.trust[0].low, value.advantage.ddof) == (0.5, 1)
assert type(value.advantage.ddof) is int
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_filters_take_any_ids_and_whole_numbers() -> None:
    samples = Samples(accuracy=torch.tensor([1.0, 0.0, 1.0]), group=torch.tensor([7, 7, 900]))
    assert ZeroVariance().keep(samples).tolist() == [True, True, False]
    cut = Samples(accuracy=torch.zeros(2), group=torch.zeros(2, dtype=torch.long), truncated=torch.tensor([True, False]))
    assert Overlong().keep(cut).tolist() == [False, True]


REWARDS = torch.tensor([0.3, 0.3, 0.3, 0.3], dtype=torch.float64)
GROUP = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    "name", ["group-z", "group-centre", "leave-one-out", "length-weighted", "group-centre-batch-z", "batch-z"]
)
def test_equal_rewards_give_exactly_nothing(name: str) -> None:
    noise = REWARDS + 1e-9 * torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]])
    assert (legato.advantages(name, rewards=noise, group=GROUP, mask=mask).advantages == 0).all()


def test_a_flat_batch_without_epsilon_is_no_division_by_zero() -> None:
    value = legato.algorithm("lite-ppo", {"advantage.epsilon": 0.0})
    assert (legato.advantages(value, rewards=REWARDS, group=GROUP).advantages == 0).all()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("turn-return", {"turn_rewards": torch.tensor([[1.0, math.nan], [0.0, 1.0]])}, "turn_rewards holds"),
        ("gae", {"values": torch.tensor([[1.0, math.nan], [0.0, 1.0]])}, "values is nan in row 0"),
    ],
)
def test_nan_is_refused_wherever_it_is_read(name: str, changes: dict[str, Tensor], message: str) -> None:
    turn = torch.tensor([[0, 1], [0, 1]])
    with pytest.raises(ValueError, match=message):
        legato.advantages(
            name, rewards=torch.ones(2), group=torch.zeros(2, dtype=torch.long), mask=torch.ones(2, 2), turn=turn, **changes
        )


def test_the_divergence_inside_the_reward_reaches_turns_too() -> None:
    """GAE over turns with gamma and lambda 1 and no values: what is left of the reward after its divergence."""
    estimator = legato.algorithm("ppo", {"advantage.level": "turn", "advantage.lam": 1.0, "advantage.whiten": False})
    estimator = legato.algorithm(estimator, {"advantage.reward_kl": 0.5})
    old = torch.tensor([[-1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    result = legato.advantages(
        estimator,
        rewards=torch.tensor([2.0], dtype=torch.float64),
        mask=torch.ones(1, 4),
        turn=torch.tensor([[0, 0, 1, 1]]),
        values=torch.zeros(1, 4, dtype=torch.float64),
        old_logprobs=old,
        ref_logprobs=old - 0.2,
    ).advantages
    assert result.flatten().tolist() == pytest.approx([1.6, 1.6, 1.8, 1.8])


def test_the_ratio_weighted_divergence_is_limited_on_both_sides() -> None:
    value = legato.algorithm(
        "grpo", {"objective.trust": [], "objective.penalties.kl-ratio-weighted.beta": 1.0, "aggregate": "token-mean"}
    )
    arguments = signals(drift=30.0, advantages=torch.zeros(2, dtype=torch.float64))
    outcome = legato.loss(value, **arguments, ref_logprobs=arguments["logprobs"] - 1.0)
    k3 = math.expm1(-1.0) + 1.0
    assert outcome.loss.item() == pytest.approx(math.exp(20.0) * k3)
    # Beyond the limit the ratio is a constant: only the gradient of k3 is left.
    assert outcome.coefficients.flatten().tolist() == pytest.approx([-math.exp(20.0) * (1 - math.exp(-1.0)) / 8] * 8)
