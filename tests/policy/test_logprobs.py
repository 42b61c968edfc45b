"""Log-probs and entropies from logits: the numbers and their slopes, where logits are extreme too."""

import pytest
import torch

from legato.policy.head.logprobs import token_logprobs


def plainly(logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = (logits / temperature[:, None]).log_softmax(1)
    return found[torch.arange(len(targets)), targets], -(found.exp() * found).sum(1)


def example(seed: int = 0, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 9, (6,), generator=generator), 0.3 + torch.rand(6, generator=generator).double()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -2.0)])
def test_the_slope_is_that_of_autograd(weights: tuple[float, float], scale: float) -> None:
    logits, targets, temperature = example(scale=scale)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    slopes = []
    for function in (plainly, lambda *x: token_logprobs(*x, with_entropy=True)):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = function(leaf, targets, temperature)
        loss = weights[0] * (upstream[0] * logprobs).sum() + weights[1] * (upstream[1] * entropy).sum()
        loss.backward()
        slopes.append(leaf.grad)
    assert float((slopes[0] - slopes[1]).abs().max()) < 1e-12


def test_a_slope_towards_one_channel_alone_is_right() -> None:
    logits, targets, temperature = example()
    for which in (0, 1):
        slopes = []
        for function in (plainly, lambda *x: token_logprobs(*x, with_entropy=True)):
            leaf = logits.clone().requires_grad_()
            function(leaf, targets, temperature)[which].sum().backward()
            slopes.append(leaf.grad)
        assert float((slopes[0] - slopes[1]).abs().max()) < 1e-12


def test_the_logits_given_are_not_written_over() -> None:
    logits, targets, temperature = example()
    ones = torch.ones_like(temperature)
    for tau in (temperature, ones):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = token_logprobs(leaf, targets, tau, with_entropy=True)
        (logprobs.sum() + entropy.sum()).backward()
        assert torch.equal(leaf.detach(), logits)


def test_a_token_that_cannot_be_has_no_weight_and_no_slope() -> None:
    logits, targets, temperature = example()
    targets[:] = 2
    logits[:, 5] = -torch.inf
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(leaf, targets, temperature, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    logprobs, entropy = logprobs.detach(), entropy.detach()
    left = [column for column in range(9) if column != 5]
    expected = plainly(logits[:, left], targets, temperature)
    assert float((logprobs - expected[0]).abs().max()) < 1e-12
    assert float((entropy - expected[1]).abs().max()) < 1e-12
    assert leaf.grad is not None and bool(torch.isfinite(leaf.grad).all()) and float(leaf.grad[:, 5].abs().max()) == 0.0


def test_16_bit_logits_are_lifted_before_anything_is_computed() -> None:
    logits, targets, temperature = example()
    half = logits.bfloat16()
    logprobs, entropy = token_logprobs(half, targets, temperature.float(), with_entropy=True)
    expected = plainly(half.double(), targets, temperature.float().double())
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert float((logprobs - expected[0]).abs().max()) < 1e-5 and float((entropy - expected[1]).abs().max()) < 1e-5


def test_a_certain_token_has_log_prob_0_and_entropy_0() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]), torch.ones(1), with_entropy=True)
    assert logprobs.item() == 0.0 and entropy.item() == 0.0
