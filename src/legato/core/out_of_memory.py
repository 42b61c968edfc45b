"""Errors over the memory of a GPU: to recognise them, and to say who holds it and what to do."""

import re

import torch

_ASKED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
_OUTSIDE_ALLOCATOR = re.compile(
    r"CUDA (driver )?error: out of memory|Error \[CUDA\]: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
"""Out of memory where torch's allocator has no part: a context, a library or a kernel that is loaded on a full GPU."""
_NOTABLE_SHARE = 0.05
"""Of the memory of a GPU: what other processes hold beyond this share is worth ending them."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the memory of a GPU ran out."""
    return _cause_in_memory(error) is not None


def _cause_in_memory(error: BaseException | None) -> BaseException | None:
    """The error over memory that an error is or reports; None if it is of another kind.

    An error inside a graph capture is hidden by a second one of torch, a RuntimeError. An error of any other kind that was
    raised while memory had run out, by a save for instance, is told as what it is.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        if isinstance(error, RuntimeError) and _OUTSIDE_ALLOCATOR.search(str(error)):
            return error
        hidden = error.__context__ if isinstance(error, RuntimeError) and not error.__suppress_context__ else None
        error = error.__cause__ or hidden
    return None


def explain_out_of_memory(error: BaseException) -> str:
    """What ran out, who holds it, and what to do. Words that are ours already stay."""
    error = _cause_in_memory(error) or error
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) and "CUDA out of memory" not in text:
        return text
    asked = _ASKED.search(text)
    wanted = f"expected room for {asked[1]} more on the GPU" if asked else "expected more room on the GPU"
    advice = (
        "a smaller training.tokens_per_pack or rollouts.rows_at_once needs less (docs/troubleshooting.md, Out of memory)"
    )
    held = _held()
    if held is None:
        return f"{wanted}, got out of memory; {advice}"
    ours, others, total = held
    gib = 2**30
    if others > _NOTABLE_SHARE * total:
        advice = f"end what else runs there; or {advice}"
    return (
        f"{wanted}, got out of memory: this process holds {ours / gib:.1f} of {total / gib:.1f} GiB, others hold"
        f" {others / gib:.1f} GiB; {advice}"
    )


def _held() -> tuple[int, int, int] | None:
    """Bytes of this process, of other processes, and of the whole GPU; None where there is none to ask."""
    if not torch.cuda.is_available():
        return None
    try:
        free, total = torch.cuda.mem_get_info()
        ours = torch.cuda.memory_reserved()
    except RuntimeError:  # the device may answer nothing any more
        return None
    return ours, max(0, total - free - ours), total
