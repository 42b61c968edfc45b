"""Copies of matrices laid out for the processor: the same products, made of plain layers only."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from legato.policy.layers import unrolled
from legato.policy.layers.reordered import ReorderedProduct, bytes_of_copies, product
from legato.policy.layers.unrolled import Unrolled
from legato.policy.model.adapters import Lora, with_lora
from legato.policy.model.tiny import TinyShape, tiny_model


def layers(*sizes: int, inputs: int = 24, biases: bool = False) -> list[nn.Linear]:
    torch.manual_seed(len(sizes))
    return [nn.Linear(inputs, size, bias=biases or (number == 1)) for number, size in enumerate(sizes)]


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rows", [1, 3, 32, 70])
@pytest.mark.parametrize("sizes", [(16,), (12, 20), (16, 8, 8)])
@torch.no_grad()
def test_a_copied_product_is_that_of_the_layers(sizes: tuple[int, ...], rows: int) -> None:
    made, x, other = layers(*sizes), some(rows, 24), some(rows, sum(sizes))
    copied, called = product(*made, copied=True), product(*made, copied=False)
    right = torch.cat([layer(x) for layer in made], 1)
    assert isinstance(copied, ReorderedProduct) and not isinstance(called, ReorderedProduct)
    for side in (copied, called):
        torch.testing.assert_close(side(x), right, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(side.silu_of(x), silu(right), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(side.times(x, other), right * other, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(side.plus(x, other), right + other, rtol=1e-5, atol=1e-6)


def hooked() -> nn.Linear:
    layer = nn.Linear(24, 8)
    layer.register_forward_hook(lambda _module, _inputs, output: output + 1)
    return layer


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["hooked", "subclass", "float64", "identity"])
@torch.no_grad()
def test_a_layer_that_is_more_than_its_matrix_is_called(kind: str) -> None:
    odd: dict[str, Any] = {
        "hooked": hooked(),
        "subclass": Doubled(24, 8),
        "float64": nn.Linear(24, 8, dtype=torch.float64),
        "identity": nn.Identity(),
    }
    x = some(4, 24).to(torch.float64 if kind == "float64" else torch.float32)
    found = product(odd[kind], copied=True)
    assert not isinstance(found, ReorderedProduct) and torch.equal(found(x), odd[kind](x))
    # One such among several: none of them is copied.
    assert not isinstance(product(*layers(8), odd[kind], copied=True), ReorderedProduct)


def model(**shape: Any) -> Any:
    return tiny_model(TinyShape(hidden=32, heads=2, **shape), vocabulary=50, seed=0, mixture="experts" in shape)


def test_adapted_layers_are_called_and_the_others_copied() -> None:
    adapted = with_lora(model(), Lora(rank=4, targets=("q_proj",)))
    found = Unrolled(adapted.get_base_model())
    assert [isinstance(layer.heads, ReorderedProduct) for layer in found.layers] == [False, False]
    assert [isinstance(layer.out, ReorderedProduct) for layer in found.layers] == [True, True]
    assert isinstance(found.head.linear, ReorderedProduct)


def test_copies_take_as_much_as_the_matrices_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    body = model()
    matrices = [p for name, p in body.named_parameters() if "proj" in name] + [body.lm_head.weight]
    assert bytes_of_copies(body) == Unrolled(body).copied_bytes == 4 * sum(p.numel() for p in matrices)
    monkeypatch.setattr(unrolled, "MOST_BYTES", bytes_of_copies(body) - 1)
    small = Unrolled(body)
    assert small.copied_bytes == 0
    assert not any(
        isinstance(part, ReorderedProduct) for layer in small.layers for part in (layer.heads, layer.out, *layer.mlp)
    )
    assert not isinstance(small.head.linear, ReorderedProduct)


def test_other_devices_dtypes_and_families_are_not_served() -> None:
    assert Unrolled.serves(model()) and Unrolled.serves(model().double()) and Unrolled.serves(model(experts=4))
    assert not Unrolled.serves(model().bfloat16()) and not Unrolled.serves(model().to("meta"))
