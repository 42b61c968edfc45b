"""Recording a step as a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch


def graph_pool() -> Any:
    """Memory that graphs share: only one of them runs at a time."""
    return torch.cuda.graph_pool_handle()


def captured(step: Callable[[], None], pool: Any) -> Any:
    """A graph of the step; it is run twice before, so that kernels are compiled and what they keep is allocated."""
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
