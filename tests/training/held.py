"""What is held in memory at once, counted."""

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(act: Callable[[], object]) -> int:
    """The most bytes that were held at once of those that `act` asked for."""
    # Rubbish of other tests would be counted as given back, whenever the collector happens to come by.
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
