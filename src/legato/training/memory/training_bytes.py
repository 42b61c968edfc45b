"""The bytes training needs for gradients and optimizer, which an engine must leave free."""

from collections.abc import Mapping

from torch import Tensor

from legato.training.memory.model import EIGHT_BIT_MOMENT

_FLOAT32 = 4


def training_bytes(
    parameters: Mapping[str, Tensor], *, eight_bit: bool, offload: bool, ranks: int = 1, layers: bool = False
) -> int:
    """The bytes of gradients, float32 masters of 16-bit weights and optimizer moments; if offloaded, of gradients only.

    `parameters` are the trained ones: not the base model under LoRA. Several ranks divide masters and moments; with `layers`
    also the gradients of layers, whose whole 16-bit weights are given up for float32 shards.
    """
    total = 0.0
    for name, weight in parameters.items():
        exact = max(weight.element_size(), _FLOAT32)
        masters = exact if weight.element_size() < exact else 0
        moments = 2 * (EIGHT_BIT_MOMENT if eight_bit else exact)
        state = 0 if offload else masters + moments
        if layers and ".layers." in name and ".lora_" not in name:
            total += weight.numel() * ((exact + max(state, exact)) / ranks - weight.element_size())
        else:
            total += weight.numel() * (exact + state / ranks)
    return max(0, int(total))
