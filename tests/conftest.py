"""Check tensor shapes at run time in tests. The import hook must be installed before the checked modules are imported."""

import os
import signal
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

# `nohup` starts processes with SIGHUP ignored, which a run respects; tests send that signal.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without a GPU, kernels run in Triton's interpreter. The variable must be set before Triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings
from jaxtyping import install_import_hook

import legato
import tests.shape_check  # noqa: F401  the hook below imports it by name

# Entry points take arguments of any type and report wrong ones themselves. All other modules are checked.
ENTRY_POINTS = {"legato.api", "legato.algorithms.override", "legato.cli.main", "legato.run.train"}
PACKAGE = Path(legato.__file__).parent
# Listed as files: walking the packages would import them before the hook is installed.
MODULES = {".".join(("legato", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in PACKAGE.glob("*/**/[!_]*.py")}
# Triton reads kernels as source, tests measure the cost of the health watch, and planning has no tensors but many small
# functions: none of them is checked.
UNCHECKED = ("legato.policy.kernels.", "legato.health.", "legato.capacity.")
MODULES = {name for name in MODULES if not name.startswith(UNCHECKED)}

ABOVE_TRAINING = ("config", "run", "capacity", "compare", "cli", "lab")

if find_spec("tomli_w") is None or find_spec("typer") is None:
    # Without these packages, only the packages up to `training` can be imported.
    MODULES = {name for name in MODULES if name.split(".")[1] not in ABOVE_TRAINING}
    ENTRY_POINTS = {name for name in ENTRY_POINTS if name.split(".")[1] not in ABOVE_TRAINING}

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "orjson")):
    MODULES = {name for name in MODULES if name.split(".")[1] != "serve"}

# `make test` runs whole runs without these checks, which double their time; `make slow` runs everything with them.
if os.environ.get("LEGATO_SHAPE_CHECKS", "on") != "off":
    with install_import_hook(sorted(MODULES - ENTRY_POINTS), "tests.shape_check.check"):
        for name in sorted(MODULES | ENTRY_POINTS):
            import_module(name)

# Two test workers share two cores; more threads would only compete for them.
torch.set_num_threads(1)

settings.register_profile("fast", max_examples=5, deadline=None, derandomize=True)
settings.register_profile("test", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("slow", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("LEGATO_TEST_PROFILE", "test"))
