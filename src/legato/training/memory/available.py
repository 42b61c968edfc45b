"""How much memory there is: the other side of the question that `memory.py` answers."""

import os
from pathlib import Path

import torch

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where a container's limit is written; the word "max", or a number beyond the machine's, is none."""


def available(device: torch.device) -> int | None:
    """Bytes a run may use on a device, its own included; None where the system does not say.

    On a GPU what other processes hold is taken off. On a CPU it is not: that memory comes and goes, and a choice that
    followed it would differ from run to run.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    return min([machine, *(limit for path in _LIMITS if (limit := _number(Path(path))) is not None)])


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
