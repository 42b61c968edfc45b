"""Every metric by its definition, on the shared batch and on small examples computed by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import legato
from legato.core.mask import Mask
from legato.core.signals import RouterSignals, Signals
from legato.diagnostics.metrics.definitions import METRICS, definition
from legato.diagnostics.metrics.measure import measure
from legato.diagnostics.metrics.routing import router_shift

INPUTS = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())["inputs"]
WIDTH = 6


def table(rows: list[list[float]], filler: float = math.nan) -> Tensor:
    return torch.tensor([row + [filler] * (WIDTH - len(row)) for row in rows], dtype=torch.float64)


def shared_batch() -> dict[str, Tensor]:
    """Batch V, with NaN outside the mask."""
    old = table(INPUTS["old"])
    return {
        "logprobs": old + table(INPUTS["delta_new_minus_old"]),
        "old_logprobs": old,
        "sampler_logprobs": old - table(INPUTS["log_old_minus_rollout"]),
        "ref_logprobs": old + table(INPUTS["ref_minus_old"]),
        "router_shift": table(INPUTS["gamma"]),
        "advantages": torch.tensor(INPUTS["A"], dtype=torch.float64),
        "mask": ~old.isnan(),
        "group": torch.zeros(4, dtype=torch.long),
    }


V = {
    "ratio/sequence_mean": (1.000250031253 + 0.895834135297 + 1.105170918076 + 1.268709192825) / 4,
    "ratio/sequence_min": 0.895834135297,
    "ratio/sequence_max": 1.268709192825,
    "ratio/token_log_max": 1.2,
    "clip/sequences": 2 / 4,
    "clip/tokens": 5 / 14,
    "clip/outside_sequences": 3 / 4,
    "clip/band_low": 3e-4,
    "clip/band_high": 4e-4,
    "equivalence/perplexity_old": (2.5857096593 + 2.3009758909 + 1.9155408290 + 2.8292170144) / 4,
    "equivalence/perplexity_new": (2.5850633127 + 2.5685289277 + 1.7332530179 + 2.2299964644) / 4,
    "mismatch/k1": -0.11214286,
    "mismatch/k3": 0.25103944,
    "mismatch/chi2_token": 2.28970147,
    "mismatch/effective_size": 0.5648737385,
    "mismatch/max": 1.7,
    "reference/k3": 0.034903567895,
    "length/mean": 3.5,
    "length/max": 5.0,
    "length/empty": 0.0,
    "advantage/zero": 0.0,
    "coefficient/sequences": 2 / 4,
}


@pytest.mark.parametrize("key", V)
def test_the_metric_has_its_printed_value_on_the_shared_batch(key: str) -> None:
    assert legato.loss("gspo", **shared_batch()).metrics[key] == pytest.approx(V[key], rel=1e-7)


def test_token_level_algorithms_clip_two_of_fourteen_tokens_on_the_shared_batch() -> None:
    for name in ("grpo", "dapo"):
        assert legato.loss(name, **shared_batch()).metrics["clip/tokens"] == pytest.approx(2 / 14)


@pytest.mark.parametrize(("part", "expected"), [("tis", 0.883402), ("icepop", 0.781929)])
def test_the_effective_size_after_a_correction_is_the_printed_one(part: str, expected: float) -> None:
    value = legato.algorithm("dapo", {f"objective.corrections.{part}.level": "token"})
    assert legato.loss(value, **shared_batch()).metrics["weight/effective_size"] == pytest.approx(expected, abs=1e-6)


def test_effective_size_of_the_product_weights_is_the_printed_one() -> None:
    value = legato.algorithm("dapo", {"objective.corrections.decoupled.level": "product", "aggregate": "sequence-mean"})
    weight = legato.loss(value, **shared_batch()).trace.weight
    assert float(weight.sum() ** 2 / weight.square().sum()) == pytest.approx(2.294870572729)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_ratio_is_the_quotient_of_perplexities(dtype: torch.dtype, most: float) -> None:
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(64, 500, generator=generator, dtype=dtype) * 3
    new = old + 0.05 * torch.randn(64, 500, generator=generator, dtype=dtype)
    mask = torch.arange(500) < torch.randint(1, 501, (64, 1), generator=generator)
    advantages = torch.randn(64, generator=generator, dtype=dtype)
    metrics = legato.loss("gspo", logprobs=new, old_logprobs=old, advantages=advantages, mask=mask).metrics
    assert metrics["equivalence/error"] < most
    assert metrics["equivalence/entropy_change"] == pytest.approx(metrics["ratio/sequence_mean"], rel=most)


def test_a_rollout_of_several_rows_counts_once() -> None:
    signals = shared_batch()
    signals["rollout"] = torch.tensor([5, 5, 9, 2])
    metrics = legato.loss("gspo-token", **signals).metrics
    assert metrics["length/mean"] == pytest.approx(14 / 3)
    assert metrics["length/max"] == 7
    assert metrics["ratio/sequence_min"] == pytest.approx(math.exp((0.001 - 0.33) / 7))


def routed_example() -> dict[str, float]:
    """Metrics of the worked example: one token, two layers, two of four experts active. The engine chose as old did."""
    old = torch.tensor([[1.0, 0.5, 0.0, -0.5], [0.2, 0.9, -0.3, 0.4]], dtype=torch.float64)
    new = torch.tensor([[0.8, 0.7, 0.1, -0.5], [0.5, 0.6, -0.3, 0.4]], dtype=torch.float64)
    before, after = (logits.topk(2).indices[None, None] for logits in (old, new))
    shift = router_shift(*(logits.log_softmax(-1)[None, None].gather(-1, before) for logits in (old, new)))
    entropy = -(new.softmax(-1) * new.log_softmax(-1)).sum(-1).mean().reshape(1, 1)
    signals = Signals(
        mask=Mask(torch.ones(1, 1, dtype=torch.bool), torch.float64),
        logprobs=torch.full((1, 1), -1.0, dtype=torch.float64),
        old_logprobs=torch.full((1, 1), -1.1, dtype=torch.float64),
        advantages=torch.ones(1, 1, dtype=torch.float64),
        router_shift=shift,
        router=RouterSignals(
            experts=after.to(torch.uint8),
            entropy=entropy,
            count=4,
            old=before.to(torch.uint8),
            sampler=before.to(torch.uint8),
            trainer=after.to(torch.uint8),
        ),
    )
    algorithm = legato.algorithm("gspo")
    outcome = algorithm.evaluate(signals, algorithm.count(signals, None), {})
    return measure(signals, outcome).report()


def test_the_worked_example_of_flips_and_router_shift() -> None:
    metrics = routed_example()
    for prefix in ("router/", "router/mismatch_"):
        assert [metrics[f"{prefix}flip_layer{layer}"] for layer in (0, 1)] == [0.0, 0.5]
        assert (metrics[f"{prefix}flip_mean"], metrics[f"{prefix}any_flip"]) == (0.25, 0.5)
        assert metrics[f"{prefix}jaccard"] == pytest.approx(1 / 3, abs=1e-7)
    assert metrics["router/shift_mean"] == pytest.approx(0.839457020769, abs=1e-12)
    assert metrics["router/load_max"] == 2.0 and metrics["router/load_unused"] == 0.5


def test_every_reported_key_is_defined_and_every_definition_is_reported() -> None:
    signals = shared_batch()
    generator = torch.Generator().manual_seed(0)

    def random() -> Tensor:
        return torch.rand(4, WIDTH, generator=generator, dtype=torch.float64)

    extra = {"entropy": random(), "values": random(), "old_values": random(), "returns": random()}
    penalties = {"objective.penalties.kl.beta": 0.04, "objective.corrections.tis.cap": 2.0}
    reported: set[str] = set()
    for name, changes in (
        ("gspo", penalties),
        ("sapo", {}),
        ("ppo", {}),
        ("gspo", {"objective.corrections.veto.floor": 1e-4}),
        ("gspo-auto", {}),
    ):
        value = legato.algorithm(name, changes)
        reported |= legato.loss(value, **signals, **extra, state=value.initial() or None).metrics.keys()
    reported |= routed_example().keys()
    defined = {definition(key).key for key in reported}
    assert defined == {metric.key for metric in METRICS}


def test_an_undefined_metric_is_an_error() -> None:
    with pytest.raises(KeyError, match="clip/teapots"):
        definition("clip/teapots")
