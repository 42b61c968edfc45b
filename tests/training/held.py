"""The peak of allocated bytes on the CPU."""

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(act: Callable[[], object]) -> int:
    """The largest number of bytes that `act` had allocated at any time."""
    # Garbage of other tests, if collected during `act`, would count as freed.
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            act()
    finally:
        gc.enable()
    recorded: Any = watched.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert sizes
    return max(accumulate(sizes))
