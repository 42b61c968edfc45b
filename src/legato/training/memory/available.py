"""How much memory a run may use on a device."""

import os
from pathlib import Path

import torch

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The files with a container's limit; "max", or a number above the machine's memory, means no limit."""


def available(device: torch.device, processes: int = 1) -> int | None:
    """Bytes a process may use on a device, including what it holds already; None if the system does not tell.

    On a GPU the memory of other processes is subtracted. On a CPU it is not: it varies, and decisions that depend on it
    would differ from run to run. There the `processes` of a run on this machine get equal parts.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    try:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    limits = [limit for path in _LIMITS if (limit := _number(Path(path))) is not None]
    return min([machine, *limits]) // processes


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
