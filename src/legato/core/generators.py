"""The process-wide random generators. Our own draws name their seed; these serve rewards, tasks and libraries."""

import random
from collections.abc import Callable

import numpy
import torch


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (all devices) with the seed of a run."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)


def remember_generators() -> Callable[[], None]:
    """Return a function that puts the global generators back into their present state."""
    python, of_numpy, of_torch = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def restore() -> None:
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_cuda is not None:
            torch.cuda.set_rng_state(of_cuda)

    return restore
