"""How many threads torch uses on the host."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch use the calling thread only: a context manager, also usable as a decorator.

    For tables of indices. Their operations are just large enough for torch to split them among threads, but waiting for the
    threads takes longer than the work, and a hundred times as long if the cores are busy (the tables of 14,000 tokens:
    216 ms on two threads of a busy machine with two cores, 2.6 ms on one).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
