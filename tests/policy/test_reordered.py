"""Reordered copies of weights give the same products, and only plain layers are copied."""

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


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rows", [1, 3, 32, 70])
@pytest.mark.parametrize("sizes", [(16,), (12, 20), (16, 8, 8)])
@torch.no_grad()
def test_a_copied_product_is_the_product_of_the_layers(sizes: tuple[int, ...], rows: int) -> None:
    linears, x, other = layers(*sizes), normal(rows, 24), normal(rows, sum(sizes))
    copied, called = product(*linears, copied=True), product(*linears, copied=False)
    expected = torch.cat([layer(x) for layer in linears], 1)
    assert isinstance(copied, ReorderedProduct) and not isinstance(called, ReorderedProduct)
    for side in (copied, called):
        torch.testing.assert_close(side(x), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(side.silu_of(x), silu(expected), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(side.times(x, other), expected * other, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(side.plus(x, other), expected + other, rtol=1e-5, atol=1e-6)


def layer_with_hook() -> nn.Linear:
    layer = nn.Linear(24, 8)
    layer.register_forward_hook(lambda _module, _inputs, output: output + 1)
    return layer


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", ["hooked", "subclass", "float64", "identity"])
@torch.no_grad()
def test_a_layer_that_is_not_a_plain_matrix_is_called_as_a_module(kind: str) -> None:
    odd: dict[str, Any] = {
        "hooked": layer_with_hook(),
        "subclass": Doubled(24, 8),
        "float64": nn.Linear(24, 8, dtype=torch.float64),
        "identity": nn.Identity(),
    }
    x = normal(4, 24).to(torch.float64 if kind == "float64" else torch.float32)
    result = product(odd[kind], copied=True)
    assert not isinstance(result, ReorderedProduct) and torch.equal(result(x), odd[kind](x))
    # If one of several layers is not plain, none is copied.
    assert not isinstance(product(*layers(8), odd[kind], copied=True), ReorderedProduct)


def model(**shape: Any) -> Any:
    return tiny_model(TinyShape(hidden=32, heads=2, **shape), vocabulary=50, seed=0, mixture="experts" in shape)


def test_layers_with_adapters_are_called_and_the_others_copied() -> None:
    adapted = with_lora(model(), Lora(rank=4, targets=("q_proj",)))
    body = Unrolled(adapted.get_base_model())
    assert [isinstance(layer.heads, ReorderedProduct) for layer in body.layers] == [False, False]
    assert [isinstance(layer.out, ReorderedProduct) for layer in body.layers] == [True, True]
    assert isinstance(body.head.linear, ReorderedProduct)


def test_copies_take_the_bytes_of_the_weights_and_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
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
