"""Recording a step as a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch


def graph_pool() -> Any:
    """A memory pool that graphs share: only one of them runs at a time."""
    return torch.cuda.graph_pool_handle()


def capture(step: Callable[[], None], pool: Any) -> Any:
    """Capture the step as a CUDA graph, after two warm-up runs that compile kernels and allocate buffers."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph
