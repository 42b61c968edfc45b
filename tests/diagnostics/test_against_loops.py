"""Every metric against loops over responses and tokens, with advantages per response, expanded, and per token."""

import math
import random
import statistics

import pytest
import torch
from torch import Tensor

import legato

ROWS, WIDTH = 7, 9
LENGTHS = (9, 1, 4, 0, 6, 2, 9)
LOW, HIGH = 0.02, 0.03


def make_batch(form: str, drift: float = 0.05) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)

    def normal() -> Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    old = -normal().abs() - 0.1
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
    mask[4, 2] = False
    per_response = torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5, 1.5, -2.0], dtype=torch.float64)
    advantages = {
        "response": per_response,
        "spread": per_response.unsqueeze(1).expand(ROWS, WIDTH).masked_fill(~mask, torch.nan),
        "token": normal().masked_fill(~mask, torch.nan),
    }[form]
    return {
        "logprobs": (old + drift * normal()).masked_fill(~mask, torch.nan),
        "old_logprobs": old,
        "sampler_logprobs": old + 0.4 * normal(),
        "ref_logprobs": old + 0.1 * normal(),
        "entropy": normal().abs(),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "router_shift": (-0.3 * normal().abs()).exp(),
        "advantages": advantages,
        "mask": mask,
    }


def tokens_of(signals: dict[str, Tensor], *names: str) -> list[list[tuple[float, ...]]]:
    """For each non-empty response, the named signals of each token."""
    rows = []
    for row in range(ROWS):
        positions = [t for t in range(WIDTH) if signals["mask"][row, t]]
        if positions:
            columns = [signals[n] if signals[n].dim() == 2 else signals[n].unsqueeze(1).expand(ROWS, WIDTH) for n in names]
            rows.append([tuple(float(column[row, t]) for column in columns) for t in positions])
    return rows


def effective_size(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def expected_drift(signals: dict[str, Tensor]) -> dict[str, float]:
    rows = tokens_of(signals, "logprobs", "old_logprobs")
    logs = [[new - old for new, old in row] for row in rows]
    flat = [x for row in logs for x in row]
    s = [math.exp(mean(row)) for row in logs]
    return {
        "ratio/sequence_mean": mean(s),
        "ratio/sequence_std": statistics.pstdev(s),
        "ratio/sequence_min": min(s),
        "ratio/sequence_max": max(s),
        "ratio/token_log_std": statistics.pstdev(flat),
        "ratio/token_log_max": max(map(abs, flat)),
        "drift/k1": mean([-x for x in flat]),
        "drift/k3": mean([math.expm1(x) - x for x in flat]),
        "drift/sequence_effective_size": effective_size(s),
        "drift/token_effective_size": effective_size([math.exp(x) for x in flat]),
        "equivalence/perplexity_old": mean([math.exp(-mean([old for _, old in row])) for row in rows]),
        "equivalence/perplexity_new": mean([math.exp(-mean([new for new, _ in row])) for row in rows]),
        "equivalence/entropy_change": mean(s),
        "length/mean": len(flat) / len(rows),
        "length/max": max(len(row) for row in rows),
        "length/empty": 1 / ROWS,
    }


def expected_clip(signals: dict[str, Tensor], level: str) -> dict[str, float]:
    rows = tokens_of(signals, "logprobs", "old_logprobs", "advantages")
    clipped_rows, clipped, outside, signs = [], [], [], []
    for row in rows:
        logs = [new - old for new, old, _ in row]
        ratios = [math.exp(mean(logs))] * len(row) if level == "sequence" else [math.exp(x) for x in logs]
        hits = [(a > 0 and r > 1 + HIGH) or (a < 0 and r < 1 - LOW) for r, (_, _, a) in zip(ratios, row, strict=True)]
        clipped += [(hit, a) for hit, (_, _, a) in zip(hits, row, strict=True)]
        outside += [r > 1 + HIGH or r < 1 - LOW for r in ratios]
        clipped_rows.append(all(hits))
        signs.append(mean([a for _, _, a in row]))
    expected = {
        "clip/tokens": mean([float(hit) for hit, _ in clipped]),
        "clip/tokens_positive": mean([float(hit) for hit, a in clipped if a > 0]),
        "clip/tokens_negative": mean([float(hit) for hit, a in clipped if a < 0]),
        "clip/sequences": mean([float(hit) for hit in clipped_rows]),
        "clip/sequences_positive": mean([float(hit) for hit, a in zip(clipped_rows, signs, strict=True) if a > 0]),
        "clip/sequences_negative": mean([float(hit) for hit, a in zip(clipped_rows, signs, strict=True) if a < 0]),
        "clip/outside_tokens": mean([float(x) for x in outside]),
        "clip/band_low": LOW,
        "clip/band_high": HIGH,
        "advantage/absolute": mean([mean([abs(a) for _, _, a in row]) for row in rows]),
        "advantage/zero": mean([float(all(a == 0 for _, _, a in row)) for row in rows]),
    }
    if level == "sequence":
        s = [math.exp(mean([new - old for new, old, _ in row])) for row in rows]
        expected["clip/outside_sequences"] = mean([float(r > 1 + HIGH or r < 1 - LOW) for r in s])
    return expected


def expected_sides(signals: dict[str, Tensor]) -> dict[str, float]:
    gaps = [[old - roll for old, roll in row] for row in tokens_of(signals, "old_logprobs", "sampler_logprobs")]
    flat = [x for row in gaps for x in row]
    rho = [math.exp(x) for x in flat]
    ref = [r - new for row in tokens_of(signals, "ref_logprobs", "logprobs") for r, new in row]
    values = [x for row in tokens_of(signals, "values", "old_values", "returns") for x in row]
    residual, returns = [r - v for v, _, r in values], [r for _, _, r in values]
    gamma = [x for row in tokens_of(signals, "router_shift") for (x,) in row]
    return {
        "mismatch/k1": mean([-x for x in flat]),
        "mismatch/k3": mean([math.expm1(x) - x for x in flat]),
        "mismatch/absolute": mean([abs(x) for x in flat]),
        "mismatch/max": max(map(abs, flat)),
        "mismatch/chi2_token": mean([x * x for x in rho]) - 1,
        "mismatch/chi2_sequence": mean([math.exp(2 * sum(row)) for row in gaps]) - 1,
        "mismatch/effective_size": effective_size(rho),
        "mismatch/above_two": mean([float(x > 2) for x in rho]),
        "mismatch/below_half": mean([float(x < 0.5) for x in rho]),
        "reference/k1": mean([-x for x in ref]),
        "reference/k3": mean([math.expm1(x) - x for x in ref]),
        "entropy/mean": mean([x for row in tokens_of(signals, "entropy") for (x,) in row]),
        "value/explained": 1 - statistics.pvariance(residual) / statistics.pvariance(returns),
        "value/moved": mean([abs(v - o) for v, o, _ in values]),
        "router/shift_mean": mean(gamma),
        "router/floored": mean([float(x < 0.8) for x in gamma]),
    }


BAND = {"objective.trust.clip.low": LOW, "objective.trust.clip.high": HIGH}


@pytest.mark.parametrize(
    ("name", "level", "form"),
    [
        ("gspo", "sequence", "response"),
        ("gspo", "sequence", "spread"),
        ("gspo-token", "sequence", "response"),
        ("gspo-token", "sequence", "spread"),
        ("gspo-token", "sequence", "token"),
        ("grpo", "token", "response"),
        ("grpo", "token", "spread"),
        ("grpo", "token", "token"),
    ],
)
def test_the_metrics_equal_their_loops(name: str, level: str, form: str) -> None:
    signals = make_batch(form)
    metrics = legato.loss(legato.algorithm(name, BAND), **signals).metrics
    expected = expected_drift(signals) | expected_clip(signals, level) | expected_sides(signals)
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1e-3])
def test_k3_is_accurate_in_float32_at_the_scale_of_the_gspo_band(scale: float) -> None:
    signals = make_batch("response", drift=scale)
    single = {key: x.float() if x.is_floating_point() else x for key, x in signals.items()}
    k3 = legato.loss("gspo", **single).metrics["drift/k3"]
    exact = [
        (float(n) - float(o)) for n, o in zip(single["logprobs"].flatten(), single["old_logprobs"].flatten(), strict=True)
    ]
    exact = [x for x, inside in zip(exact, single["mask"].flatten(), strict=True) if inside]
    assert k3 == pytest.approx(mean([math.expm1(x) - x for x in exact]), rel=0.05)
    assert k3 > 0


def test_quantiles_lie_in_the_range_of_the_values() -> None:
    metrics = legato.loss("gspo", **make_batch("response")).metrics
    assert metrics["length/tokens_p99"] <= metrics["length/max"]
    signed = [metrics[f"ratio/signed_log_p{share}"] for share in ("01", "05", "10", "50", "95", "99")]
    assert signed == sorted(signed)


def test_signed_log_has_the_sign_of_the_advantage() -> None:
    old = torch.full((2, 3), -1.0)
    drift = torch.tensor([[0.1], [-0.1]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    metrics = legato.loss(
        "gspo", logprobs=old + drift, old_logprobs=old, advantages=torch.tensor([1.0, -1.0]), mask=mask
    ).metrics
    assert metrics["ratio/signed_log_p01"] == pytest.approx(0.1, rel=1e-3)


def test_the_soft_gate_is_measured() -> None:
    old = torch.full((1, 4), -1.0, dtype=torch.float64)
    ratios = torch.tensor([[1.0, 1.5, 4.0, 10.0]], dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    metrics = legato.loss(
        "sapo", logprobs=old + ratios.log(), old_logprobs=old, advantages=torch.ones(1, dtype=torch.float64), mask=mask
    ).metrics
    gates = [1 / math.cosh((r - 1) / 2) ** 2 for r in ratios.flatten().tolist()]
    assert metrics["gate/mean"] == pytest.approx(mean(gates))
    assert metrics["gate/closed"] == mean([float(g < 0.5) for g in gates])


def test_a_cap_below_one_is_counted_inside_the_mask_only() -> None:
    old = torch.full((1, 10), -1.0, dtype=torch.float64)
    mask = torch.arange(10).unsqueeze(0) < 2
    signals = {"logprobs": old, "old_logprobs": old, "mask": mask, "group": torch.zeros(1, dtype=torch.long)}
    value = legato.algorithm("cispo", {"objective.trust.weight-clip.cap": 0.5})
    metrics = legato.loss(value, **signals, advantages=torch.ones(1, dtype=torch.float64)).metrics
    assert metrics["clip/tokens"] == 1
    assert metrics["clip/sequences"] == 1


@pytest.mark.parametrize("name", ["gspo", "grpo", "gspo-token", "seq-product", "ppo"])
def test_padding_changes_no_metric(name: str) -> None:
    """Responses of one token in rows of width 1 and in padded rows."""
    random.seed(0)
    narrow = {key: x[:, :1] if x.dim() == 2 else x for key, x in make_batch("response").items()}
    wide = {
        key: torch.cat([x, torch.full_like(x, False if x.dtype == torch.bool else math.nan)], 1) if x.dim() == 2 else x
        for key, x in narrow.items()
    }
    metrics, expected = legato.loss(name, **wide).metrics, legato.loss(name, **narrow).metrics
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, nan_ok=True), key


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", ["gspo", "grpo", "gspo-token", "gmpo", "sapo", "cispo", "bapo"])
def test_empty_batches_give_empty_metrics(name: str, shape: tuple[int, int]) -> None:
    """A rank without rows still takes part in an update."""
    empty = torch.zeros(shape)
    signals = {
        "logprobs": empty,
        "old_logprobs": empty,
        "mask": empty.bool(),
        "group": torch.zeros(shape[0], dtype=torch.long),
    }
    for advantages in (torch.ones(shape[0]), torch.ones(shape)):
        outcome = legato.loss(name, **signals, advantages=advantages)
        assert outcome.loss.item() == 0
        assert outcome.coefficients.shape == shape
