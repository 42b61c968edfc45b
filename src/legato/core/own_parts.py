"""Calls that run parts of an algorithm (ratio, trust region, estimator ...), which may be the user's.

In a run with parts of the user's (`RUN.own_parts`), a part that does not return is interrupted after `DEFAULT_SECONDS`, and
given up soon after a signal, like a reward. Whatever a part raises passes through; `place_in_own_code` says whose it is.
Everywhere else the call is a plain call.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from legato.core.protection import settings_restored
from legato.core.user_code import DEFAULT_SECONDS, RUN, CallFailedError, OverdueError, UserCode
from legato.errors import InputError, describe_value

_T = TypeVar("_T")


def call_parts(function: Callable[..., _T], *arguments: Any) -> _T:
    """What a function that calls parts returns."""
    if not RUN.own_parts:
        return function(*arguments)
    names = ", ".join(RUN.own_parts)
    with settings_restored(), UserCode(f"the part {names}", DEFAULT_SECONDS) as code:
        try:
            return code.call(function, *arguments)
        except CallFailedError as failed:
            cause = failed.__cause__
            if cause is None or isinstance(cause, OverdueError):
                raise InputError(f"expected a part that returns, got one that {failed} ({names}); correct it") from None
            raise cause from cause.__cause__


def check_returned(part: Any, method: str, value: Any, rows: int, *widths: int, required: bool = False) -> None:
    """Check a tensor that a part returned: [rows, width] for one of the widths; [rows] for the width 0.

    None passes unless a tensor is required.

    A tensor of another shape may still broadcast, and would then train on numbers of other rows.
    """
    if value is None and not required:
        return
    shapes = [(rows, width) if width else (rows,) for width in dict.fromkeys(widths)]
    if not isinstance(value, torch.Tensor) or tuple(value.shape) not in shapes:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else describe_value(value)
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise InputError(
            f"expected a tensor of shape {allowed}, got {got} ({part.kind} '{part.name}', {method}); correct it"
        )


def check_returned_type(part: Any, method: str, value: Any, wanted: type) -> None:
    """Check the type of what a part returned."""
    if not isinstance(value, wanted):
        got = describe_value(value)
        raise InputError(
            f"expected a {wanted.__name__}, got {got} ({part.kind} '{part.name}', {method}); return the one it was given,"
            " changed with dataclasses.replace, or a new one"
        )
