"""Sequence estimators against the reference and the numbers of the specification."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import legato
from legato.advantages.estimator import Scores
from tests.proof.batches import examples
from tests.reference import advantages as reference

REWARDS = [1, 0, 0, 0.5, 1, 1, 1, 1]
GROUP = [0, 0, 0, 0, 1, 1, 1, 1]
LENGTHS = [4, 3, 2, 5, 2, 2, 3, 3]
some = examples(25)


def lengths_mask(lengths: list[int]) -> torch.Tensor:
    """A mask of rows with the given lengths, one column wider than the longest."""
    return torch.arange(max(lengths) + 1) < torch.tensor(lengths)[:, None]


def estimate(part: str, fields: dict[str, Any] | None = None, **keywords: Any) -> Any:
    """`legato.advantages` of an estimator by its name, with the given fields."""
    overrides = {"advantage": part, **{f"advantage.{name}": value for name, value in (fields or {}).items()}}
    tensors = {
        name: torch.tensor(value, dtype=torch.float64) if name == "rewards" else value for name, value in keywords.items()
    }
    return legato.advantages(legato.algorithm("gspo", overrides), **tensors)


def per_row(part: str, fields: dict[str, Any] | None = None, lengths: list[int] = LENGTHS, **keywords: Any) -> list[float]:
    """The advantage of each row."""
    keywords = {"rewards": REWARDS, "group": torch.tensor(GROUP), "mask": lengths_mask(lengths), **keywords}
    result = estimate(part, fields, **keywords).advantages
    return (result if result.dim() == 1 else result[:, 0]).tolist()


NUMBERS: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "z, population": ("group-z", {}, [1.507553086534, -0.904531851920, -0.904531851920, 0.301510617307, 0, 0, 0, 0]),
    "z, ddof 1": ("group-z", {"ddof": 1}, [1.305579692401, -0.783347815440, -0.783347815440, 0.261115938480, 0]),
    "z, ddof 1, 1e-4": ("group-z", {"ddof": 1, "epsilon": 1e-4}, [1.305309749354, -0.783185849612]),
    "centre": ("group-centre", {}, [0.625, -0.375, -0.375, 0.125, 0, 0, 0, 0]),
    "leave one out": ("leave-one-out", {}, [0.833333333333, -0.5, -0.5, 0.166666666667, 0, 0, 0, 0]),
    "group mean, batch std": (
        "group-centre-batch-std",
        {"ddof": 1},
        [1.364144249949, -0.818486549969, -0.818486549969, 0.272828849990, 0, 0, 0, 0],
    ),
    "group mean, then z, sequences": (
        "group-centre-batch-z",
        {"unit": "sequence"},
        [2.132007163556, -1.279204298134, -1.279204298134, 0.426401432711, 0, 0, 0, 0],
    ),
    "group mean, then z, tokens": (
        "group-centre-batch-z",
        {"unit": "token"},
        [1.859339360403, -1.386052977755, -1.386052977755, 0.236643191324, *[-0.169030850946] * 4],
    ),
    "length-weighted": (
        "length-weighted",
        {},
        [0.535714285714, -0.464285714286, -0.464285714286, 0.035714285714, 0, 0, 0, 0],
    ),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_the_estimator_gives_the_printed_numbers(case: str) -> None:
    part, fields, printed = NUMBERS[case]
    assert per_row(part, fields)[: len(printed)] == pytest.approx(printed, abs=1e-10)


def test_batch_z_over_tokens_with_ddof_one() -> None:
    # The printed numbers carry verl's 1e-8 under the square root.
    printed = [1.820190897593, -1.356869578206, -1.356869578206, 0.231660659694, *[-0.165471899781] * 4]
    assert per_row("group-centre-batch-z", {"unit": "token", "ddof": 1}) == pytest.approx(printed, abs=1e-6)


ESTIMATORS: dict[str, tuple[str, dict[str, Any], Callable[[list[float], list[int], list[int]], list[float]]]] = {
    "group-z": ("group-z", {}, lambda r, g, n: reference.group_z(r, g)),
    "group-z, epsilon 1e-4": ("group-z", {"epsilon": 1e-4}, lambda r, g, n: reference.group_z(r, g, 0, 1e-4)),
    "group-centre": ("group-centre", {}, lambda r, g, n: reference.group_centre(r, g)),
    "leave-one-out": ("leave-one-out", {}, lambda r, g, n: reference.leave_one_out(r, g)),
    "group-centre-batch-std": ("group-centre-batch-std", {}, lambda r, g, n: reference.group_centre_batch_std(r, g)),
    "batch-z": ("batch-z", {"unit": "sequence"}, lambda r, g, n: reference.batch_z(r, n)),
    "batch-z over tokens": ("batch-z", {"unit": "token"}, lambda r, g, n: reference.batch_z(r, n, "token")),
    "group-centre-batch-z": (
        "group-centre-batch-z",
        {"unit": "sequence"},
        lambda r, g, n: reference.batch_z(reference.group_centre(r, g), n),
    ),
    "length-weighted": ("length-weighted", {}, reference.length_weighted),
}


@st.composite
def random_groups(draw: st.DrawFn) -> tuple[list[float], list[int], list[int]]:
    """Rewards, groups (some of one member, some without variance), lengths."""
    rows = draw(st.integers(1, 8))
    group = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    names = {label: position for position, label in enumerate(dict.fromkeys(group))}
    choices = draw(st.sampled_from([[0.0, 1.0], [0.25, 0.5, 1.0], [-3.0, 0.1, 7.5]]))
    rewards = draw(st.lists(st.sampled_from(choices), min_size=rows, max_size=rows))
    lengths = draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows))
    return rewards, [names[label] for label in group], lengths


@pytest.mark.parametrize("case", ESTIMATORS)
@some
@given(sample=random_groups())
def test_the_estimator_equals_its_reference(case: str, sample: tuple[list[float], list[int], list[int]]) -> None:
    part, fields, rule = ESTIMATORS[case]
    rewards, group, lengths = sample
    if "batch-z" in part:
        base = reference.group_centre(rewards, group) if "centre" in part else rewards
        assume(max(base) - min(base) > 1e-3)
    computed = per_row(part, fields, lengths, rewards=rewards, group=torch.tensor(group))
    assert computed == pytest.approx(rule(rewards, group, lengths), abs=1e-6 if "batch-z" in part else 1e-10)


@pytest.mark.parametrize("part", ["group-z", "group-centre", "leave-one-out"])
def test_a_group_of_one_has_no_advantage(part: str) -> None:
    assert per_row(part, lengths=[2], rewards=[0.7], group=torch.tensor([0])) == [0.0]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize(
    "part", ["group-z", "group-centre", "leave-one-out", "group-centre-batch-std", "group-centre-batch-z"]
)
def test_equal_rewards_give_exactly_zero(part: str, reward: float) -> None:
    advantages = per_row(part, lengths=[1, 2, 3, 2, 1, 2, 3], rewards=[reward] * 7, group=torch.tensor([0] * 7))
    assert advantages == [0.0] * 7


def test_a_zero_variance_group_beside_a_live_one_gets_exactly_zero() -> None:
    assert per_row("group-z", rewards=[1, 0, 0, 0.5, 0.1, 0.1, 0.1, 0.1])[4:] == [0.0] * 4


def test_rounding_noise_is_not_variance() -> None:
    assert per_row("group-z", lengths=[1] * 3, rewards=[0.3, 0.1 + 0.2, 0.3], group=torch.tensor([0] * 3)) == [0.0] * 3


def test_adding_a_constant_to_all_rewards_of_a_group_changes_nothing() -> None:
    shifted = [reward + (5.0 if group else -2.0) for reward, group in zip(REWARDS, GROUP, strict=True)]
    for part in ("group-z", "group-centre", "leave-one-out", "length-weighted"):
        assert per_row(part, rewards=shifted) == pytest.approx(per_row(part), abs=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["group-z", "group-centre", "leave-one-out", "batch-z"])
def test_a_reward_that_is_not_a_number_is_refused(part: str, bad: float) -> None:
    with pytest.raises(ValueError, match=r"(?i)nan|finite|number"):
        per_row(part, rewards=[bad, *REWARDS[1:]])


def test_rewards_one_and_zero_give_plus_and_minus_one() -> None:
    four = {"lengths": [1] * 4, "rewards": [1, 0, 1, 0], "group": torch.tensor([0] * 4)}
    assert per_row("group-z", {"epsilon": 0.0}, **four) == pytest.approx([1, -1, 1, -1])
    assert per_row("group-z", {"epsilon": 0.0, "ddof": 1}, **four) == pytest.approx([0.8660254, -0.8660254] * 2)


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(8, 2, 1), (8, 2, 4), (8, 1, 4), (8, 5, 4), (8, 0, 4), (8, 8, 2), (4, 3, 2)]
)
def test_pass_at_k_advantages(samples: int, correct: int, k: int) -> None:
    rewards = [1.0] * correct + [0.0] * (samples - correct)
    _, right, wrong = reference.pass_at_k(samples, correct, k)
    keywords = {"lengths": [1] * samples, "rewards": rewards, "group": torch.tensor([0] * samples)}
    expected = [right] * correct + [wrong] * (samples - correct)
    assert per_row("pass-at-k", {"k": k}, **keywords) == pytest.approx(expected, abs=1e-10)


def test_pass_at_k_rewards() -> None:
    keywords = {"lengths": [1] * 8, "rewards": [1, 1, 0, 0, 0, 0, 0, 0], "group": torch.tensor([0] * 8)}
    advantages = per_row("pass-at-k-reward", {"k": 4}, **keywords)
    assert advantages == pytest.approx([0.5] * 2 + [0.357142857143] * 6, abs=1e-10)


def test_several_rewards_are_scored_apart() -> None:
    components = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    advantages = per_row(
        "gdpo", {"ddof": 1, "epsilon": 1e-6}, [1] * 4, rewards=[1, 0, 2, 0], group=torch.tensor([0] * 4),
        components=components,
    )  # fmt: skip
    printed = [0.206078237368, -0.769094095256, 1.332109953144, -0.769094095256]
    assert advantages == pytest.approx(printed, abs=1e-10)


def test_a_reward_that_does_not_apply_is_left_out_of_its_group() -> None:
    """NaN is what TRL's nan-aware mean and deviation leave out: the response gets 0 for that component."""
    nan, weights = torch.nan, [1.0, 0.5, 2.0]
    first, second = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0.5, nan, -1.0, 2.0, nan, nan, 3.0, nan]
    table = torch.tensor([first, second, [nan] * 8], dtype=torch.float64).T
    scores = Scores(rewards=table[:, 0], group=torch.tensor(GROUP), components=table)
    fields = {"advantage": "gdpo", "advantage.weights": weights, "advantage.ddof": 1, "advantage.epsilon": 1e-4}
    advantages = legato.algorithm("gspo", fields).advantage.estimate(scores).advantages
    one = reference.group_z(first, GROUP, 1, 1e-4)
    present = reference.group_z([0.5, -1.0, 2.0], [0] * 3, 1, 1e-4)
    two = [present[0], 0.0, present[1], present[2], 0.0, 0.0, 0.0, 0.0]
    summed = [weights[0] * a + weights[1] * b for a, b in zip(one, two, strict=True)]
    assert advantages.tolist() == pytest.approx(reference.z_scores(summed, 1, 1e-4), abs=1e-10)


@pytest.mark.parametrize("part", ["group-centre", "leave-one-out"])
def test_the_divergence_from_the_reference_model_can_enter_the_reward(part: str) -> None:
    generator = torch.Generator().manual_seed(3)
    old, ref = (-torch.rand((8, 6), generator=generator, dtype=torch.float64) for _ in range(2))
    mask = lengths_mask(LENGTHS)
    shaped = [
        reference.reward_less_kl(REWARDS[row], old[row].tolist(), ref[row].tolist(), list(range(LENGTHS[row])), 0.05)
        for row in range(8)
    ]
    rule = reference.group_centre if part == "group-centre" else reference.leave_one_out
    outside = torch.where(mask, torch.zeros((), dtype=torch.float64), torch.nan)
    computed = per_row(part, {"reward_kl": 0.05}, old_logprobs=old + outside, ref_logprobs=ref + outside)
    assert computed == pytest.approx(rule(shaped, GROUP), abs=1e-10)


def test_a_named_algorithm_brings_its_own_estimator() -> None:
    keywords = {"rewards": torch.tensor(REWARDS, dtype=torch.float64), "group": torch.tensor(GROUP)}
    for name, rule in [
        ("gspo", reference.group_z),
        ("dr-grpo", reference.group_centre),
        ("rloo", reference.leave_one_out),
        ("reinforce", reference.group_centre),
        ("minirl", reference.group_centre),
        ("lite-ppo", reference.group_centre_batch_std),
    ]:
        assert legato.advantages(name, **keywords).advantages.tolist() == pytest.approx(rule(REWARDS, GROUP), abs=1e-10)
