"""Credit over tokens and turns: GAE over a mask with holes, turn returns, states shared between episodes."""

import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import legato
from tests.proof.batches import examples, masks
from tests.reference import advantages as reference

some = examples(25)


def estimate(part: str, fields: dict[str, Any], **keywords: Any) -> Any:
    """`legato.advantages` of an estimator by its name, with the given fields; lists become float64 tensors."""
    overrides = {"advantage": part, **{f"advantage.{name}": value for name, value in fields.items()}}
    tensors = {
        name: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
        for name, value in keywords.items()
    }
    return legato.advantages(legato.algorithm("gspo", overrides), **tensors)


@pytest.mark.parametrize(
    ("gamma", "mask", "printed"),
    [
        (1.0, [1, 1, 0, 1, 1], [0.71845, 0.651, 0.58, 0.4]),
        (0.99, [1, 1, 0, 1, 1], [0.69165285055, 0.6322731, 0.5702, 0.4]),
        (1.0, [1, 1, 1, 1, 1], [0.7160275, 0.64845, 0.051, 0.58, 0.4]),
    ],
)
def test_gae_gives_the_printed_numbers(gamma: float, mask: list[int], printed: list[float]) -> None:
    counted = torch.tensor([mask]).bool()
    result = estimate(
        "gae", {"gamma": gamma, "lam": 0.95, "whiten": False}, rewards=[1.0], values=[[0.2, 0.3, 0.9, 0.4, 0.6]],
        mask=counted,
    )  # fmt: skip
    assert result.advantages[counted].tolist() == pytest.approx(printed, abs=1e-12)


def test_gae_returns_are_advantages_plus_values() -> None:
    result = estimate(
        "gae", {"whiten": False}, rewards=[1.0], values=[[0.2, 0.3, 0.9, 0.4, 0.6]], mask=torch.ones(1, 5).bool()
    )
    assert result.returns[0].tolist() == pytest.approx([0.9160275, 0.94845, 0.951, 0.98, 1.0], abs=1e-12)


def random_scores(mask: list[list[bool]], seed: int) -> tuple[list[float], list[list[float]]]:
    """A score per row, a value per token, NaN outside the mask."""
    numbers = random.Random(seed)
    values = [[numbers.gauss(0, 1) if counted else float("nan") for counted in row] for row in mask]
    return [numbers.gauss(0, 1) for _ in mask], values


@some
@given(mask=masks(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.95, 1.0]), seed=st.integers(0, 999))
def test_gae_equals_its_reference_on_any_mask(mask: list[list[bool]], gamma: float, lam: float, seed: int) -> None:
    scores, values = random_scores(mask, seed)
    result = estimate(
        "gae", {"gamma": gamma, "lam": lam, "whiten": False}, rewards=scores, values=values, mask=torch.tensor(mask)
    )
    for row, counted in enumerate(mask):
        rewards = reference.token_rewards(scores[row], counted)
        expected = reference.gae(rewards, values[row], counted, gamma, lam)
        for t in range(len(counted)):
            if counted[t]:
                assert result.advantages[row, t].item() == pytest.approx(expected[t], abs=1e-10)
                assert result.returns[row, t].item() == pytest.approx(expected[t] + values[row][t], abs=1e-10)


@some
@given(mask=masks(), seed=st.integers(0, 999))
def test_whitening_changes_advantages_and_leaves_returns(mask: list[list[bool]], seed: int) -> None:
    assume(sum(map(sum, mask)) >= 3)
    scores, values = random_scores(mask, seed)
    counted = torch.tensor(mask)
    plain = estimate("gae", {"whiten": False}, rewards=scores, values=values, mask=counted)
    white = estimate("gae", {"whiten": True}, rewards=scores, values=values, mask=counted)
    assert white.returns[counted].tolist() == pytest.approx(plain.returns[counted].tolist(), abs=1e-12)
    expected = torch.tensor(reference.whiten(plain.advantages.tolist(), mask), dtype=torch.float64)
    assert white.advantages[counted].tolist() == pytest.approx(expected[counted].tolist(), rel=1e-4, abs=1e-5)


def test_the_divergence_from_the_reference_model_enters_each_token_of_gae() -> None:
    mask, nan = [True, True, False, True], float("nan")
    old, ref, values = [-0.5, -0.2, nan, -1.0], [-0.7, -0.1, nan, -0.4], [0.1, 0.2, nan, 0.3]
    result = estimate(
        "gae", {"whiten": False, "reward_kl": 0.1}, rewards=[1.0], values=[values], mask=torch.tensor([mask]),
        old_logprobs=[old], ref_logprobs=[ref],
    )  # fmt: skip
    expected = reference.gae(reference.token_rewards(1.0, mask, old, ref, 0.1), values, mask)
    assert result.advantages[0, [0, 1, 3]].tolist() == pytest.approx([expected[0], expected[1], expected[3]], abs=1e-12)


def test_gae_over_turns_takes_one_turn_as_one_action() -> None:
    turn = torch.tensor([[0, 0, -1, 1, 1, 2]])
    result = estimate(
        "gae", {"whiten": False, "level": "turn", "gamma": 0.9}, rewards=[1.0],
        values=[[0.2, 0.2, float("nan"), 0.5, 0.5, 0.6]], mask=turn >= 0, turn=turn,
    )  # fmt: skip
    expected = reference.gae([0.0, 0.0, 1.0], [0.2, 0.5, 0.6], [True] * 3, gamma=0.9)
    first, second, third = expected
    computed = result.advantages[0, [0, 1, 3, 4, 5]].tolist()
    assert computed == pytest.approx([first, first, second, second, third], abs=1e-12)


TURN = [[0, 0, -1, 1, 2], [0, -1, 1, 2, 2], [0, 1, 1, -1, -1]]
TURN_REWARDS = [[0.2, 0.0, 1.0], [0.0, 0.2, 0.0], [0.2, 0.2, 0.0]]


@pytest.mark.parametrize(
    ("normalise", "printed"),
    [
        ("centre", [[0.6, 0.533333333333, 0.5], [-0.4, -0.266666666667, -0.5], [-0.2, -0.266666666667]]),
        (
            "z",
            [
                [1.388730149659, 1.414213562373, 1],
                [-0.925820099773, -0.707106781187, -1],
                [-0.462910049886, -0.707106781187],
            ],
        ),
    ],
)
def test_turn_returns_have_a_baseline_per_turn(normalise: str, printed: list[list[float]]) -> None:
    turn = torch.tensor(TURN)
    result = estimate(
        "turn-return", {"normalise": normalise}, rewards=[1.2, 0.2, 0.4], turn_rewards=TURN_REWARDS, turn=turn,
        mask=turn >= 0, group=torch.tensor([0, 0, 0]),
    ).advantages  # fmt: skip
    for row, turns in enumerate(TURN):
        for t, index in enumerate(turns):
            expected = printed[row][index] if index >= 0 else 0.0
            assert result[row, t].item() == pytest.approx(expected, abs=1e-5 if normalise == "z" else 1e-10)


def test_a_turn_reached_by_one_rollout_alone_has_no_advantage() -> None:
    turn = torch.tensor([[0, 1], [0, -1]])
    result = estimate(
        "turn-return", {"normalise": "centre"}, rewards=[1.5, 0.2], turn_rewards=[[1.0, 0.5], [0.2, 0.0]], turn=turn,
        mask=turn >= 0, group=torch.tensor([0, 0]),
    ).advantages  # fmt: skip
    assert result[:, 0].tolist() == pytest.approx([0.65, -0.65], abs=1e-10)
    assert result[0, 1].item() == 0.0


def test_states_shared_between_episodes_give_credit_to_steps() -> None:
    turn = torch.tensor([[0, 0, 1], [0, 1, 1]])
    result = estimate(
        "gigpo", {"omega": 1.0, "gamma": 0.95, "normalise": "none"}, rewards=[1.0, 0.0],
        turn_rewards=[[0.0, 1.0], [0.0, 0.0]], turn_states=torch.tensor([[0, 1], [0, 2]]), turn=turn, mask=turn >= 0,
        group=torch.tensor([0, 0]),
    ).advantages  # fmt: skip
    assert result[0].tolist() == pytest.approx([0.975, 0.975, 0.5], abs=1e-10)
    assert result[1].tolist() == pytest.approx([-0.975, -0.5, -0.5], abs=1e-10)
