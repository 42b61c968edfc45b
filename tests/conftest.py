"""Shapes are checked at run time here and only here: the hook must come before the first import of what it checks."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

# Kernels run in Triton's interpreter where there is no GPU; it must be told before Triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings
from jaxtyping import install_import_hook

import legato
import tests.shape_check  # noqa: F401  found by name below

# The doors take whatever people hand in and speak for themselves; behind them everything is checked.
DOORS = {"legato.api", "legato.algorithms.override", "legato.cli.main", "legato.run.train"}
HOME = Path(legato.__file__).parent
# Found as files: walking the packages would import them before the hook is there.
MODULES = {".".join(("legato", *path.relative_to(HOME).with_suffix("").parts)) for path in HOME.glob("*/**/[!_]*.py")}
# Triton reads kernels as source, and the cost of the health watch is measured: neither takes checks.
MODULES = {name for name in MODULES if not name.startswith(("legato.policy.kernels.", "legato.health."))}

if find_spec("tomli_w") is None or find_spec("typer") is None:
    # A machine without them runs everything up to `training`; the rooms above stay unopened there.
    MODULES = {name for name in MODULES if name.split(".")[1] not in ("config", "run", "compare", "cli", "lab")}
    DOORS = {name for name in DOORS if name.split(".")[1] not in ("config", "run", "compare", "cli", "lab")}

with install_import_hook(sorted(MODULES - DOORS), "tests.shape_check.check"):
    for name in sorted(MODULES | DOORS):
        import_module(name)

# Two workers share two cores; threads of tiny tensors would only spin against each other.
torch.set_num_threads(1)

settings.register_profile("fast", max_examples=5, deadline=None, derandomize=True)
settings.register_profile("test", max_examples=40, deadline=None, derandomize=True)
settings.register_profile("slow", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("LEGATO_TEST_PROFILE", "test"))
