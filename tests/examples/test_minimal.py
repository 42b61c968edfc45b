"""The one-file example computes what the library computes: advantages, loss, and the gradient of both."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import legato
from legato.core.texts import Texts
from legato.policy.policy import Policy
from tests.policy.exact import exact

SOURCE = Path(__file__).parents[2] / "examples" / "minimal.py"
EXACT = {torch.float64: 1e-10, torch.float32: 1e-6}


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_example", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


minimal = load_example()


def close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Equal to the tolerance, in units of the largest entry where that is above 1."""
    return bool((actual - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max())))


def signals(dtype: torch.dtype) -> dict[str, Tensor]:
    """Rows inside the band, clipped on both sides, outside on the side that is not clipped, and without advantage."""
    generator = torch.Generator().manual_seed(0)
    log_s = torch.tensor([0.0, 1e-4, 2e-3, -2e-3, 2e-3, -2e-3, -1e-4, 5e-2], dtype=torch.float64)
    lengths = torch.tensor([4, 1, 3, 2, 4, 3, 1, 4])
    mask = torch.arange(4) < lengths[:, None]
    noise = torch.where(mask, 0.05 * torch.randn(8, 4, generator=generator, dtype=torch.float64), 0.0)
    shift = log_s - noise.sum(1) / lengths
    new = -3 * torch.rand(8, 4, generator=generator, dtype=torch.float64)
    # Padding holds a ratio far off, so that a leak would be seen.
    old = new - torch.where(mask, noise + shift[:, None], 3.0)
    advantages = torch.tensor([1.0, -1.0, 1.5, -1.5, -0.7, 0.7, 0.3, 0.0], dtype=torch.float64)
    return {"new": new.to(dtype), "old": old.to(dtype), "advantage": advantages.to(dtype), "mask": mask}


def test_the_example_imports_nothing_of_the_library() -> None:
    imported = {
        name
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert not any(name.split(".")[0] == "legato" for name in imported)
    assert len(SOURCE.read_text().splitlines()) < 180


def test_advantages_are_the_librarys() -> None:
    rewards = torch.tensor(
        [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.25, 3.0, -1.0, 0.5]]
    ).double()
    ours = legato.advantages("gspo", rewards=rewards.flatten(), group=torch.arange(16) // 4).advantages
    advantages = minimal.advantages(rewards).flatten()
    assert close(advantages, ours, 1e-10)
    assert (advantages[4:12] == 0).all()


@pytest.mark.parametrize("dtype", EXACT)
def test_loss_and_gradient_by_the_log_probs_are_the_librarys(dtype: torch.dtype) -> None:
    inputs = signals(dtype)
    new = inputs.pop("new").requires_grad_()
    loss = minimal.gspo_loss(new, **inputs)
    (gradient,) = torch.autograd.grad(loss, new)
    outcome = legato.loss(
        "gspo",
        logprobs=new.detach(),
        old_logprobs=inputs["old"],
        advantages=inputs["advantage"],
        mask=inputs["mask"],
        group=torch.arange(8) // 4,
    )
    assert close(loss.detach(), outcome.loss, EXACT[dtype])
    assert close(gradient, -outcome.coefficients, EXACT[dtype])
    # Rows 2 and 3 are clipped and row 7 has no advantage; the others pull, two of them from outside the band.
    assert [bool(row.any()) for row in gradient] == [True, True, False, False, True, True, True, False]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("packing", [True, False])
def test_the_gradient_of_every_parameter_is_the_librarys(dtype: torch.dtype, packing: bool) -> None:
    model = minimal.make_model(hidden=32, layers=2, seed=1)
    if dtype == torch.float64:
        # Transformers rounds to float32 inside its norms whatever the weights are; `exact` replaces them.
        model = exact(model)
    generator = torch.Generator().manual_seed(2)
    prompts = torch.tensor([minimal.encode(text) for text in ("12+3=", "98+7=")])
    responses = torch.randint(1, len(minimal.SYMBOLS), (8, minimal.RESPONSE), generator=generator)
    responses[0, 1] = responses[3, 0] = minimal.END
    mask = minimal.response_mask(responses)
    group = torch.arange(8) // 4
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -0.3, -0.8, 0.0], dtype=dtype)
    with torch.no_grad():
        old = minimal.log_probs(model, prompts[group], responses)
        old = old + 1e-3 * torch.randn(old.shape, generator=generator, dtype=torch.float64).to(dtype)

    loss = minimal.gspo_loss(minimal.log_probs(model, prompts[group], responses), old, advantage, mask)
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    texts = Texts(
        prompts=prompts,
        prompt_lengths=torch.full((2,), minimal.PROMPT),
        tokens=responses,
        lengths=mask.sum(1),
        mask=mask,
        group=group,
        temperature=torch.ones(8),
    )
    policy = Policy(model=model, tokenizer=None, name="minimal", packing=packing)
    with policy.accumulate_gradient(texts, torch.arange(8)) as forward:
        for piece in forward.pieces():  # one: the vocabulary is small
            logprobs = piece.channels.logprobs
            outcome = legato.loss("gspo", logprobs=logprobs, old_logprobs=old, advantages=advantage, mask=mask, group=group)
            piece.backward(outcome.field)
    assert close(loss.detach(), outcome.loss.detach(), EXACT[dtype])
    assert any(parameter.grad.abs().max() > 1e-3 for parameter in model.parameters())
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert close(gradient, parameter.grad, EXACT[dtype])


def test_a_step_trains_on_what_it_sampled() -> None:
    """The whole step runs, moves the weights, and rewards the right answer alone."""
    torch.manual_seed(0)
    model = minimal.make_model(hidden=32, layers=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    minimal.warm_up(model, minimal.all_problems(), steps=1)
    assert 0.0 <= minimal.step(model, optimizer, minimal.all_problems()[:4]) <= 1.0
    assert any((a != b).any() for a, b in zip(before, model.parameters(), strict=True))
    assert minimal.reward("15", [*minimal.encode("15$"), 0]) == 1.0
    assert minimal.reward("15", minimal.encode("1500")) == 0.0
    assert minimal.reward("15", minimal.encode("16$_")) == 0.0
