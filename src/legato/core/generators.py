"""The process-wide random generators. Our own draws name their seed; these serve rewards, tasks and libraries."""

import random

import numpy
import torch


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (all devices) with the seed of a run."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)
