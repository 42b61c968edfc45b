"""Value checks of a caller's arguments, in the public functions and at collation, never inside an update.

Every message says what is wrong, the value, and what is allowed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from legato.errors import InputError

LOWEST_PRECISION = (torch.float32, torch.float64)


def tensor(name: str, value: Any) -> Tensor:
    """Return the value if it is a torch tensor; InputError for a list or an array."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name} is a {type(value).__name__}; a torch.Tensor is needed")
    return value


def same_device(values: Mapping[str, Any], like: Tensor, like_name: str = "logprobs") -> None:
    """Check that all values are tensors on one device. The other checks rely on this."""
    for name, value in values.items():
        if value is not None and tensor(name, value).device != like.device:
            raise InputError(f"{name} is on {value.device} but {like_name} is on {like.device}; move one of them")


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"


def per_token(name: str, tensor: Tensor, like: Tensor, like_name: str = "logprobs") -> Tensor:
    """Return the tensor if it is float32 or float64 and has the shape of `like`; else InputError."""
    if tensor.shape != like.shape:
        raise InputError(f"{name} has shape {_shape(tensor)} but {like_name} has shape {_shape(like)}; they must be equal")
    return _float(name, tensor)


def _float(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in LOWEST_PRECISION:
        reason = ""
        if tensor.dtype in (torch.bfloat16, torch.float16):
            reason = (
                ": in half precision 0.9997, 1 and 1.0004 are one number and a sequence clip dies. Compute the"
                " log-softmax in float32 (casting the result up does not bring the digits back)"
            )
        raise InputError(f"{name} is {tensor.dtype}; float32 or float64 is needed{reason}")
    return tensor


def channel(name: str, tensor: Tensor) -> Tensor:
    """Return the `[B, T]` tensor that fixes shape, device and dtype of a call; InputError for another shape or dtype."""
    if tensor.dim() != 2:
        raise InputError(f"{name} has shape {_shape(tensor)}; [B, T] is needed")
    return _float(name, tensor)


def zero_one(name: str, tensor: Tensor) -> Tensor:
    """Convert a bool or 0/1 tensor to bool; InputError for other values."""
    if tensor.dtype == torch.bool:
        return tensor
    ones = tensor == 1
    wrong = ~(ones | (tensor == 0))
    if bool(wrong.any()):
        value = tensor[wrong].reshape(-1)[0].item()
        raise InputError(f"{name} holds {value:g}; only 0 and 1 (or a bool tensor) are allowed")
    return ones


def mask(value: Any, like: Tensor, like_name: str = "logprobs") -> Tensor:
    tensor_ = tensor("mask", value)
    if tensor_.shape != like.shape:
        raise InputError(f"mask has shape {_shape(tensor_)} but {like_name} has shape {_shape(like)}; they must be equal")
    return zero_one("mask", tensor_)


def per_row_or_token(name: str, tensor: Tensor, like: Tensor, like_name: str = "logprobs") -> Tensor:
    """[B, 1] from [B], or [B, T] as it is; InputError for other shapes."""
    rows, width = like.shape
    if tensor.dim() == 1 and len(tensor) == rows:
        return tensor.unsqueeze(1)
    if tensor.shape == like.shape:
        return tensor
    raise InputError(
        f"{name} has shape {_shape(tensor)}; [{rows}] (one per response) or [{rows}, {width}] (one per token) is needed"
        f" beside {like_name} of shape {_shape(like)}"
    )


def ids(name: str, tensor: Tensor, rows: int) -> Tensor:
    """[B] integer ids as int64; InputError for other shapes or dtypes."""
    if tensor.dim() != 1 or len(tensor) != rows:
        raise InputError(f"{name} has shape {_shape(tensor)}; [{rows}], one id per row, is needed")
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise InputError(f"{name} is {tensor.dtype}; integer ids are needed")
    return tensor.long()


MOST_GROUPS = 2**22


def dense_ids(name: str, tensor: Tensor, rows: int) -> tuple[Tensor, int]:
    """Ids that index a table shared by all micro-batches: from 0, without large gaps. Returns them and the table size."""
    checked = ids(name, tensor, rows)
    lowest, highest = (int(checked.min()), int(checked.max())) if rows else (0, -1)
    if lowest < 0 or highest >= MOST_GROUPS:
        raise InputError(
            f"{name} holds the id {lowest if lowest < 0 else highest}; counts that are added over micro-batches need ids"
            f" that are dense over the whole update: 0, 1, 2 ... (below {MOST_GROUPS})"
        )
    return checked, highest + 1


def turns(tensor: Tensor, tokens: Tensor) -> Tensor:
    """[B, T] turn indices: -1 outside turns, 0 .. T - 1 inside; every mask token belongs to one."""
    if tensor.shape != tokens.shape:
        raise InputError(f"turn has shape {_shape(tensor)} but mask has shape {_shape(tokens)}; they must be equal")
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise InputError(f"turn is {tensor.dtype}; integer turn indices are needed")
    inside = tensor[tokens]
    if len(inside) and (int(inside.min()) < 0 or int(inside.max()) >= tokens.shape[1]):
        raise InputError(
            f"turn holds {int(inside.min())} .. {int(inside.max())} at tokens the policy wrote;"
            f" 0 .. {tokens.shape[1] - 1} is allowed there (-1 is for tool and template tokens, which have mask 0)"
        )
    return tensor.long()


def require_signals(who: str, needs: Mapping[str, Iterable[str]], signals: Mapping[str, Tensor | None]) -> None:
    """Check that every signal a part needs is present. `needs` maps a part's description to signal names."""
    missing = {name: reader for reader, read in needs.items() for name in read if signals.get(name) is None}
    if missing:
        reasons = ", ".join(f"{name} (read by {reader})" for name, reader in missing.items())
        raise InputError(f"{who} needs {reasons}; pass {', '.join(f'{name}=...' for name in missing)}")


def finite(name: str, values: Tensor, where: Tensor) -> None:
    """Check that there is no NaN and no infinity `where` the mask is set."""
    wrong = where & ~torch.isfinite(values)
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0, 0])
        raise InputError(f"{name} is {float(values[row][wrong[row]][0])} in row {row}; finite numbers are needed")


def no_nan(values: Mapping[str, Tensor | None], where: Tensor) -> None:
    """Check that no tensor holds NaN `where` the mask is set. Infinite log-probs are allowed: a ratio may be 0.

    On a GPU there is one wait for all tensors.
    """
    tensors = {name: tensor.detach() for name, tensor in values.items() if tensor is not None}
    if not tensors or not bool(torch.stack([(where & tensor.isnan()).any() for tensor in tensors.values()]).any()):
        return
    name, tensor = next((name, tensor) for name, tensor in tensors.items() if bool((where & tensor.isnan()).any()))
    row = int((where & tensor.isnan()).any(1).nonzero()[0, 0])
    raise InputError(f"{name} is nan in row {row} at a token with mask 1; numbers are needed (outside the mask NaN is fine)")


def within_unit(name: str, values: Tensor, where: Tensor) -> None:
    """Check that numbers are in (0, 1] `where` the mask is set."""
    wrong = where & ~((values > 0) & (values <= 1))
    if bool(wrong.any()):
        raise InputError(f"{name} holds {float(values[wrong][0]):g} at a token the policy wrote; (0, 1] is allowed")
