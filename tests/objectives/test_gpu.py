"""The family on a GPU: the same numbers as on a CPU, the same bits twice."""

import pytest
import torch
from torch import Tensor

import legato
from tests.proof.bridge import loss
from tests.proof.members import MEMBERS
from tests.proof.waits import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHANGES = {
    "dr-grpo": {"aggregate.constant": 64.0},
    "fspo": {"objective.trust.log-clip.log_low": 0.05, "objective.trust.log-clip.log_high": 0.06},
}


def batch(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(64, 40, generator=generator, dtype=torch.float64)

    old = -normal().abs() - 0.1
    mask = torch.arange(40) < torch.randint(0, 41, (64, 1), generator=generator)
    signals = {
        "logprobs": (old + 0.05 * normal()).masked_fill(~mask, torch.nan),
        "old_logprobs": old,
        "sampler_logprobs": old + 0.02 * normal(),
        "router_shift": (-normal().abs()).exp(),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "advantages": torch.randn(64, generator=generator, dtype=torch.float64),
    }
    return {name: tensor.to(dtype) for name, tensor in signals.items()} | {
        "mask": mask,
        "group": torch.arange(64) // 4,
        "turn": (torch.arange(40) // 8).expand(64, 40),
    }


@pytest.mark.parametrize("name", MEMBERS)
def test_a_gpu_gives_the_numbers_of_a_cpu_and_the_same_bits_twice(name: str) -> None:
    value, signals = legato.algorithm(name, CHANGES.get(name)), batch(torch.float64)
    there = {key: tensor.cuda() for key, tensor in signals.items()}
    expected, result = loss(value, **signals), loss(value, **there)
    torch.testing.assert_close(result.coefficients.cpu(), expected.coefficients, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(result.loss.cpu(), expected.loss, rtol=1e-9, atol=1e-13)
    for key, number in expected.metrics.items():
        assert result.metrics[key] == pytest.approx(number, rel=1e-6, abs=1e-9, nan_ok=True), key
    assert torch.equal(result.coefficients, loss(value, **there).coefficients)


def test_an_objective_does_not_wait_for_the_device() -> None:
    """Value checks belong to the public function; evaluating signals must not synchronise."""
    from legato.algorithms.catalogue import algorithm_names
    from legato.core.mask import Mask
    from legato.core.signals import Signals
    from legato.diagnostics.metrics.measure import measure

    signals = {key: tensor.cuda() for key, tensor in batch(torch.float32).items()}
    mask, advantages = signals.pop("mask"), signals.pop("advantages").unsqueeze(1)
    for name in algorithm_names():
        value = legato.algorithm(name, CHANGES.get(name))
        gathered = Signals(mask=Mask(mask, torch.float32), advantages=advantages, **signals)
        counts = value.count(gathered, groups=16)
        torch.cuda.synchronize()
        with no_waiting():
            outcome = value.evaluate(gathered, counts)
            if value.initial():
                value.advance(value.initial(), measure(gathered, outcome), first=False)
