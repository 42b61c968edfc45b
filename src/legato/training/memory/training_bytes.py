"""The bytes training needs for gradients and optimizer, which an engine must leave free."""

from collections.abc import Iterable

from torch import Tensor

from legato.training.memory.model import EIGHT_BIT_MOMENT

_FLOAT32 = 4


def training_bytes(parameters: Iterable[Tensor], *, eight_bit: bool, offload: bool) -> int:
    """The bytes of gradients, float32 masters of 16-bit weights and optimizer moments; if offloaded, of gradients only.

    `parameters` are the trained ones: not the base model under LoRA.
    """
    total = 0.0
    for weight in parameters:
        exact = max(weight.element_size(), _FLOAT32)
        masters = exact if weight.element_size() < exact else 0
        moments = 2 * (EIGHT_BIT_MOMENT if eight_bit else exact)
        total += weight.numel() * (exact + (0 if offload else masters + moments))
    return int(total)
