"""One product for projections that read the same input: queries, keys and values of a layer; gate and up of its MLP.

Decoding few rows is bound by launches, and one product of three weights is one launch instead of three. There is no copy of
the weights: `lay_side_by_side` moves the parameters of such projections next to each other into one block of memory, once.
They stay parameters of their own, so training, saving and optimizers see what they saw before. `project_joined` looks at the
addresses each time: weights that were moved since (to another device, dtype or rank) give separate products.

The bits of a joined product may differ from those of separate ones. An exact engine joins only where they were measured to
be equal (`project_joined_alike`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from legato.policy.layers import products
from legato.policy.layers.layer import has_hooks, is_swiglu


def lay_side_by_side(model: nn.Module) -> int:
    """Move weights that are read together next to each other; returns how many projections can be joined now."""
    count = 0
    for module in list(model.modules()):
        for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            together = [module._modules.get(name) for name in names]
            if (len(names) == 2 and not is_swiglu(module)) or not _fit(together):
                continue
            with torch.no_grad():
                for kind in ("weight", "bias"):
                    _move(kind, together)
            count += 1
    return count


def project_joined(modules: Sequence[Any], x: Tensor) -> tuple[Tensor, ...]:
    """The outputs [R, outputs] of projections of x [R, inputs]: columns of one product if their weights lie side by side."""
    weight = joined_weight(modules)
    if weight is None:
        return tuple(module(x) for module in modules)
    sizes = [module.out_features for module in modules]
    return torch.split(linear(x, weight, joined_bias(modules)), sizes, 1)


def project_joined_alike(modules: Sequence[Any], x: Tensor) -> tuple[Tensor, ...]:
    """The same outputs with the bits of separate products in any batch (`products.project_alike`)."""
    weight = joined_weight(modules)
    if weight is not None:
        sizes, bias = tuple(module.out_features for module in modules), joined_bias(modules)
        least = products.least_rows_joined(weight, sizes, bias is not None)
        if least is not None and len(x) >= least:
            return torch.split(linear(x, weight, bias), list(sizes), 1)
    return tuple(products.project_alike(module, x) for module in modules)


def joined_weight(modules: Sequence[Any]) -> Tensor | None:
    """The weights of plain linear layers as one matrix [outputs, inputs] without a copy; None if they are not adjacent."""
    if not _fit(modules):
        return None
    if modules[0].bias is not None and joined_bias(modules) is None:
        return None
    return _beside([module.weight for module in modules])


def joined_bias(modules: Sequence[Any]) -> Tensor | None:
    """The biases of layers that have a `joined_weight`, as one vector; None if they have none."""
    return _beside([module.bias for module in modules])


def _fit(modules: Sequence[Any]) -> bool:
    """Whether some modules are plain linear layers that could be one."""
    if not all(type(module) is nn.Linear and not has_hooks(module) for module in modules):
        return False
    for kind in ("weight", "bias"):
        each = [module._parameters[kind] for module in modules]
        if kind == "bias" and all(one is None for one in each):
            continue
        first = each[0]
        for one in each:
            if type(one) is not nn.Parameter or not one.is_contiguous() or one.is_meta:
                return False
            if (one.dtype, one.device, one.shape[1:]) != (first.dtype, first.device, first.shape[1:]):
                return False
    return True


def _beside(tensors: Sequence[Any]) -> Tensor | None:
    """Tensors that follow each other in one storage as one tensor; None if they do not."""
    first = tensors[0]
    if first is None:
        return None
    place, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for one in tensors:
        if one.untyped_storage().data_ptr() != storage or one.storage_offset() != place:
            return None
        place += one.numel()
    rows = sum(len(one) for one in tensors)
    joined: Tensor = first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    return joined


def _move(kind: str, modules: Sequence[Any]) -> None:
    each = [module._parameters[kind] for module in modules]
    if each[0] is None or _beside(each) is not None:
        return
    joined = torch.cat([one.detach() for one in each])
    for one, part in zip(each, torch.split(joined, [len(one) for one in each]), strict=True):
        one.data = part
