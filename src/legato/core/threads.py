"""How many threads torch uses on the host."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch works on the calling thread alone; also as a decorator.

    For tables of indices: their operations are just large enough to be shared out, and waiting for the other threads takes
    longer than the work. Where something else has the cores it takes a hundred times as long (the tables of 14,000 tokens:
    216 ms on two threads of a busy machine with two cores, 2.6 ms on one).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
