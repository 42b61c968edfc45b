"""Shapes are checked at run time here and only here: the import hook must come before the first import of legato."""

import os

import torch
from hypothesis import settings
from jaxtyping import install_import_hook

with install_import_hook("legato", "shape_check.check"):
    pass

# Two workers share two cores; threads of tiny tensors would only spin against each other.
torch.set_num_threads(1)

settings.register_profile("fast", max_examples=5, deadline=None, derandomize=True)
settings.register_profile("test", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("slow", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("LEGATO_TEST_PROFILE", "test"))
