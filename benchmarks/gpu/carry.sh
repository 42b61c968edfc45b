#!/bin/sh
# Gathers what the GPU benchmarks need beside what their machine has, into .carry/site-packages (git-ignored; the folder must
# have that name, or dill pickles pyarrow by value). What lies there already is kept. Run from the root of the repository.
set -eu

carry=.carry/site-packages
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
python=${PYTHON:-.venv/bin/python}
mkdir -p "$carry"

"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$wheels" \
    trl==1.16.0 datasets==5.2.0 liger-kernel==0.8.5 cut-cross-entropy==25.1.1 \
    jaxtyping==0.3.11 beartype==0.23.1 wadler-lindig==0.1.8 verl==0.9.1 bitsandbytes==0.50.2
# These two come as a wheel per Python version, equal but for their tests: the machine's is asked for.
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --python-version 3.12 \
    --dest "$wheels" dill==0.4.1 multiprocess==0.70.19

"$python" - "$wheels" "$carry" <<'PYTHON'
import sys, zipfile
from pathlib import Path

wheels, carry = map(Path, sys.argv[1:])
# Of verl only three files are used: importing the package would ask for ray, tensordict and hydra.
OF_VERL = ("kernel/kernels.py", "kernel/linear_cross_entropy.py", "experimental/torch_functional.py")
for wheel in sorted(wheels.glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if wheel.name.startswith("verl-"):
            names = [f"verl/utils/{name}" for name in OF_VERL]
        if wheel.name.startswith("bitsandbytes-"):
            # Of its libraries only the one for the machine's CUDA: all of them are more than may travel.
            names = [name for name in names if not name.endswith(".so") or name.endswith(("_cpu.so", "_cuda130.so"))]
        archive.extractall(carry, [name for name in names if "/tests/" not in name])
PYTHON
du -sh "$carry"
