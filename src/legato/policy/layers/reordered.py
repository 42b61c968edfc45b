"""Matrix products on a CPU from reordered copies of a layer's weights, laid out as the processor reads them.

At the few dozen rows of a decode batch, the general matrix product leaves a third of one core unused, and half of two cores.
oneDNN's product over reordered weights uses them. Layers that read the same input become one product.

A copy lives for one burst of requests: the engine drops it when idle or when new weights are published, so it cannot go
stale. It takes the bytes of the gradients, which do not exist at that time. A layer that is not plain float32 (LoRA, hooks,
another dtype) is called as a module.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

MOST_BYTES = 4 * 2**30
"""No weights are copied if the copies of a model would take more bytes than this."""

_ROWS = 32
"""The number of input rows that oneDNN lays the weights out for. 32 was the fastest or close to it from 4 to 512 rows."""


class Product(nn.Module):
    """The outputs of some layers side by side, and the operations that often follow."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = tuple(layers)

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = [layer(x) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def silu_of(self, x: Tensor) -> Tensor:
        """silu of the product."""
        output: Tensor = silu(self(x))
        return output

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The product times another table, elementwise."""
        output: Tensor = self(x) * factor
        return output

    def plus(self, x: Tensor, term: Tensor) -> Tensor:
        """The product plus another table."""
        output: Tensor = self(x) + term
        return output


class ReorderedProduct(Product):
    """The same product from a reordered copy of the weights; oneDNN fuses the operation that follows."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(())
        weights = [layer.weight.detach() for layer in layers]
        joined_weights = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.matrix: Any = torch.ops.mkldnn._reorder_linear_weight(joined_weights, _ROWS)
        self.offset = _joined_bias(layers)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.offset, "none", [], "")
        return output

    def silu_of(self, x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.matrix, self.offset, "swish", [], "")
        return output

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, factor, self.matrix, self.offset, "mul")
        return output

    def plus(self, x: Tensor, term: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, term, self.matrix, self.offset, "add")
        return output


def product(*layers: nn.Module, copied: bool) -> Product:
    """A `Product` of some layers; with `copied` a `ReorderedProduct`, if every layer is plain float32."""
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
