"""Parts that need the whole update, denominators that follow what was kept, and parts that carry state."""

import math

import pytest
import torch
from torch import Tensor

import legato
from legato.core.scope import Scope

ROWS, WIDTH = 6, 5


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    old = -normal().abs() - 0.2
    return {
        "logprobs": old + 0.1 * normal(),
        "old_logprobs": old,
        "sampler_logprobs": old + 0.05 * normal(),
        "entropy": normal().abs(),
        "uniform": torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0], dtype=torch.float64),
        "mask": torch.arange(WIDTH) < torch.tensor([5, 2, 4, 1, 3, 5]).unsqueeze(1),
        "group": torch.tensor([0, 0, 1, 1, 2, 2]),
    }


UPDATE_SCOPE = {
    "bapo": legato.algorithm("bapo"),
    "clip-cov": legato.algorithm("grpo", {"objective.trust.clip-cov.low": 0.0, "objective.trust.clip-cov.fraction": 0.2}),
    "kl-cov": legato.algorithm("grpo", {"objective.trust": [], "objective.penalties.kl-cov.fraction": 0.3}),
    "high-entropy": legato.algorithm("dapo", {"objective.trust.high-entropy.fraction": 0.4}),
    "opsm, kept": legato.algorithm(
        "grpo",
        {"objective.trust.opsm.threshold": 0.01, "objective.trust.opsm.anchor": "old", "aggregate.denominator": "kept"},
    ),
}


@pytest.mark.parametrize("case", UPDATE_SCOPE)
def test_coefficients_computed_once_and_sliced_give_the_gradient_of_the_whole(case: str) -> None:
    """The two-pass route: log-probs of the whole update without gradient, coefficients once, then micro-batches."""
    value, signals = UPDATE_SCOPE[case], batch()
    assert value.scope is Scope.UPDATE
    leaf = signals["logprobs"].clone().requires_grad_()
    legato.loss(value, **{**signals, "logprobs": leaf}).loss.backward()

    outcome = legato.loss(value, **signals)
    again = signals["logprobs"].clone().requires_grad_()
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        outcome.field.rows(rows).tie(torch.zeros((), dtype=torch.float64), logprobs=again[rows]).backward()
    torch.testing.assert_close(again.grad, leaf.grad, rtol=0, atol=0)


@pytest.mark.parametrize("case", UPDATE_SCOPE)
def test_a_part_of_the_update_is_refused_with_the_way_out(case: str) -> None:
    value, signals = UPDATE_SCOPE[case], batch()
    whole = legato.counts(value, **{name: signals[name] for name in ("mask", "group", "old_logprobs")})
    with pytest.raises(ValueError, match="slice them"):
        legato.loss(value, **{name: tensor[:3] for name, tensor in signals.items()}, counts=whole)


def test_gspo_and_gepo_need_less_than_the_update() -> None:
    assert legato.algorithm("gspo").scope is Scope.ROW
    assert legato.algorithm("gepo").scope is Scope.GROUP


def test_rejected_responses_leave_the_denominator_only_when_asked() -> None:
    signals = batch()
    signals["sampler_logprobs"] = signals["old_logprobs"].clone()
    signals["sampler_logprobs"][1] -= 1.0
    everything = legato.algorithm("gspo", {"objective.corrections.geo-rejection.cap": 1.1})
    survivors = legato.algorithm(everything, {"aggregate.denominator": "kept"})
    kept, shrunk = legato.loss(everything, **signals), legato.loss(survivors, **signals)
    torch.testing.assert_close(shrunk.coefficients, kept.coefficients * 6 / 5)
    assert kept.metrics["keep/sequences"] == pytest.approx(5 / 6)
    assert shrunk.metrics["length/mean"] == kept.metrics["length/mean"]


def test_penalties_follow_the_mask_and_not_what_was_kept() -> None:
    signals = batch()
    signals["ref_logprobs"] = signals["old_logprobs"] - 0.3
    signals["keep"] = torch.zeros(ROWS, dtype=torch.bool)
    value = legato.algorithm("gspo", {"objective.penalties.kl.beta": 0.1})
    dropped = legato.loss(value, **signals)
    assert dropped.metrics["loss/policy"] == 0
    whole = legato.loss(value, **{k: v for k, v in signals.items() if k != "keep"})
    assert dropped.metrics["loss/kl"] == whole.metrics["loss/kl"] > 0


def test_a_correction_beside_a_kernel_enters_its_ratio() -> None:
    """VESPO: W times the product of the token weights, and no second factor."""
    signals = batch()
    value = legato.algorithm("vespo", {"objective.corrections.tis.level": "token", "objective.corrections.tis.cap": 1.02})
    coefficients = legato.loss(value, **signals).coefficients
    mask = signals["mask"]
    for row in range(ROWS):
        inside = mask[row]
        drift = (signals["logprobs"] - signals["old_logprobs"])[row][inside]
        gap = (signals["old_logprobs"] - signals["sampler_logprobs"])[row][inside]
        product = math.exp(float(drift.sum())) * float(gap.exp().clamp(max=1.02).prod())
        advantage = float(signals["advantages"][row])
        power, rate = (2, 3) if advantage >= 0 else (3, 2)
        expected = product**power * math.exp(rate * (1 - product)) * advantage / float(mask.sum())
        assert coefficients[row][inside].tolist() == pytest.approx([expected] * int(inside.sum()))


def adaptive_entropy(target: float) -> legato.Algorithm:
    return legato.algorithm("gspo", {"objective.penalties.adaptive-entropy.target": target})


def test_the_adaptive_bonus_rises_below_its_target_and_rests_above_it() -> None:
    signals = batch()
    entropy = legato.loss("gspo", **signals).metrics["entropy/mean"]
    low, high = adaptive_entropy(entropy + 0.1), adaptive_entropy(entropy - 0.1)
    state = low.initial()
    assert state == {"adaptive-entropy": {"coefficient": 0.0, "active": 0.0}}
    first = legato.loss(low, **signals, state=state)
    assert (first.entropy_coefficients == 0).all()
    for expected in (0.005, 0.010, 0.015):
        state = low.advance(state, first.sums)
        assert state["adaptive-entropy"]["coefficient"] == pytest.approx(expected)
    later = legato.loss(low, **signals, state=state)
    tokens = float(signals["mask"].sum())
    assert later.entropy_coefficients[signals["mask"]].tolist() == pytest.approx([0.015 / tokens] * int(tokens))
    resting = high.advance(state, first.sums)
    assert resting["adaptive-entropy"] == {"coefficient": pytest.approx(0.010), "active": 0.0}
    assert (legato.loss(high, **signals, state=resting).entropy_coefficients == 0).all()


def test_the_coefficient_stays_between_nothing_and_its_cap() -> None:
    signals = batch()
    sums = legato.loss("gspo", **signals).sums
    value = legato.algorithm(adaptive_entropy(100.0), {"objective.penalties.adaptive-entropy.cap": 0.008})
    state = value.initial()
    for _ in range(5):
        state = value.advance(state, sums)
    assert state["adaptive-entropy"]["coefficient"] == 0.008
    value = adaptive_entropy(0.0)
    assert value.advance(value.initial(), sums)["adaptive-entropy"]["coefficient"] == 0.0


def test_an_algorithm_without_adaptive_parts_has_no_state() -> None:
    value = legato.algorithm("gspo")
    assert value.initial() == {}
    assert value.advance({}, legato.loss(value, **batch()).sums) == {}
