"""Log-probs and entropies from logits: values and gradients, for extreme logits too."""

import pytest
import torch

from legato.policy.head.logprobs import token_logprobs


def plain_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = (logits / temperature[:, None]).log_softmax(1)
    return logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(1)


def example(seed: int = 0, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 9, (6,), generator=generator), 0.3 + torch.rand(6, generator=generator).double()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -2.0)])
def test_the_gradient_is_that_of_autograd(weights: tuple[float, float], scale: float) -> None:
    logits, targets, temperature = example(scale=scale)
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    gradients = []
    for function in (plain_logprobs, lambda *x: token_logprobs(*x, with_entropy=True)):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = function(leaf, targets, temperature)
        loss = weights[0] * (upstream[0] * logprobs).sum() + weights[1] * (upstream[1] * entropy).sum()
        loss.backward()
        gradients.append(leaf.grad)
    assert float((gradients[0] - gradients[1]).abs().max()) < 1e-12


def test_the_gradient_of_one_channel_alone_is_that_of_autograd() -> None:
    logits, targets, temperature = example()
    for which in (0, 1):
        gradients = []
        for function in (plain_logprobs, lambda *x: token_logprobs(*x, with_entropy=True)):
            leaf = logits.clone().requires_grad_()
            function(leaf, targets, temperature)[which].sum().backward()
            gradients.append(leaf.grad)
        assert float((gradients[0] - gradients[1]).abs().max()) < 1e-12


def test_the_input_logits_are_not_overwritten() -> None:
    logits, targets, temperature = example()
    ones = torch.ones_like(temperature)
    for tau in (temperature, ones):
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = token_logprobs(leaf, targets, tau, with_entropy=True)
        (logprobs.sum() + entropy.sum()).backward()
        assert torch.equal(leaf.detach(), logits)


def test_a_token_of_probability_0_has_no_weight_and_no_gradient() -> None:
    logits, targets, temperature = example()
    targets[:] = 2
    logits[:, 5] = -torch.inf
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(leaf, targets, temperature, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    logprobs, entropy = logprobs.detach(), entropy.detach()
    left = [column for column in range(9) if column != 5]
    expected = plain_logprobs(logits[:, left], targets, temperature)
    assert float((logprobs - expected[0]).abs().max()) < 1e-12
    assert float((entropy - expected[1]).abs().max()) < 1e-12
    assert leaf.grad is not None and bool(torch.isfinite(leaf.grad).all()) and float(leaf.grad[:, 5].abs().max()) == 0.0


def test_16_bit_logits_are_converted_to_float32_first() -> None:
    logits, targets, temperature = example()
    half = logits.bfloat16()
    logprobs, entropy = token_logprobs(half, targets, temperature.float(), with_entropy=True)
    expected = plain_logprobs(half.double(), targets, temperature.float().double())
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert float((logprobs - expected[0]).abs().max()) < 1e-5 and float((entropy - expected[1]).abs().max()) < 1e-5


def test_a_certain_token_has_log_prob_0_and_entropy_0() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]), torch.ones(1), with_entropy=True)
    assert logprobs.item() == 0.0 and entropy.item() == 0.0
