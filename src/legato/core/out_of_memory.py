"""Errors over the memory of a GPU: to recognise them, and to say who holds it and what to do."""

import re

import torch

_ASKED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
_NOTABLE_SHARE = 0.05
"""Of the memory of a GPU: what other processes hold beyond this share is worth ending them."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out. An error inside a graph capture is hidden by a second one, so causes are searched too."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def explain_out_of_memory(error: BaseException) -> str:
    """What ran out, who holds it, and what to do. Words that are ours already stay."""
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
