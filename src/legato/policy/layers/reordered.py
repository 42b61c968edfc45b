"""Products with a layer's matrices on a CPU, the matrices copied into the order in which the processor reads them.

At the few dozen rows of a decoding batch the general product leaves a third of one core unused and half of two. oneDNN's
product over reordered weights uses them. Matrices that read the same input are one product.

A copy lives for one burst of requests: it is dropped when the engine is idle or new weights are published, so it never goes
stale. It uses the memory of the gradients, which do not exist at that time. A layer that is not plain float32 (LoRA, hooks,
another dtype) is called as it is.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

MOST_BYTES = 4 * 2**30
"""Copies above this size in all are not made."""

_ROWS = 32
"""The layout is for about so many rows; it was the fastest or near it from 4 to 512."""


class Product(nn.Module):
    """The outputs of some layers side by side, with the operations that often follow."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = tuple(layers)

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = [layer(x) for layer in self.layers]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def activated(self, x: Tensor) -> Tensor:
        """silu of the product."""
        found: Tensor = silu(self(x))
        return found

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times another table, elementwise."""
        found: Tensor = self(x) * factor
        return found

    def plus(self, x: Tensor, term: Tensor) -> Tensor:
        """The product plus another table."""
        found: Tensor = self(x) + term
        return found


class ReorderedProduct(Product):
    """The same from a reordered copy of the matrices; oneDNN fuses the operation that follows."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(())
        weights = [layer.weight.detach() for layer in layers]
        together = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.matrix: Any = torch.ops.mkldnn._reorder_linear_weight(together, _ROWS)
        self.offset = _joined_bias(layers)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.offset, "none", [], "")
        return found

    def activated(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.offset, "swish", [], "")
        return found

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.matrix, self.offset, "mul")
        return found

    def plus(self, x: Tensor, term: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, term, self.matrix, self.offset, "add")
        return found


def product(*layers: nn.Module, copied: bool) -> Product:
    """The product with some layers; `copied`: from a reordered copy, if every layer allows it."""
    plain = [layer for layer in layers if isinstance(layer, nn.Linear) and _is_plain(layer)]
    return ReorderedProduct(plain) if copied and len(plain) == len(layers) else Product(layers)


def bytes_of_copies(model: nn.Module) -> int:
    """The bytes that reordered copies of a model's matrices take; 0 if this processor has no oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    plain = (layer for layer in model.modules() if isinstance(layer, nn.Linear) and _is_plain(layer))
    return sum(layer.weight.nbytes for layer in plain)


def _is_plain(layer: nn.Linear) -> bool:
    weight, hooked = layer.weight, bool(layer._forward_hooks or layer._forward_pre_hooks)
    return type(layer) is nn.Linear and not hooked and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    return torch.cat(
        [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
    )
