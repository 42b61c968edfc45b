"""Compiles the head's kernel for a GPU on machines without one: Triton's interpreter accepts code its compiler refuses.

In its own process, since the other tests run kernels in the interpreter.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json
from itertools import product
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from legato.policy.kernels import head

kernel, sizes = head._project, {}
pointers = {"targets": "*i64"} | dict.fromkeys(("scales", "best_out", "total_out", "moment_out", "chosen_out"), "*fp32")
for keep, softcap, even in product((True, False), (0.0, 30.0), (True, False)):
    rows, step, tile = head._ROWS, head._STEP, head.TILE
    constants = {"BM": rows, "TILE": tile, "BK": step, "GROUP": head._GROUP, "PROGRAMS": 132}
    constants |= {"SOFTCAP": softcap, "KEEP": keep}
    block_shapes = {"hidden": (rows, step), "weight": (tile, step), "distances": (rows, tile if keep else step)}
    types, divisible = {}, {}
    for place, name in enumerate(kernel.arg_names):
        types[name] = "constexpr" if name in constants else pointers.get(name, "fp32" if name == "multiplier" else "i32")
        if name in block_shapes:
            types[name] = f"tensordesc<bf16[{block_shapes[name][0]}, {block_shapes[name][1]}]>"
        if name in pointers or even and name in ("stride", "N", "V", "H"):
            divisible[(place,)] = [["tt.divisibility", 16]]
    source, form = ASTSource(kernel, types, constants, divisible), f"keep {keep}, soft cap {softcap:g}, even {even}"
    try:
        kernel_binary = compile(source, target=GPUTarget("cuda", 90, 32), options=head._LAUNCH)
        sizes[form] = kernel_binary.metadata.shared
    except Exception as error:
        sizes[form] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps(sizes))
"""
MOST_SHARED = 227 * 1024
"""Bytes of shared memory a block may have on compute capability 9.0."""


def test_the_heads_kernel_compiles_in_every_form_and_fits_shared_memory() -> None:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=clean, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    sizes = json.loads(run.stdout)
    assert len(sizes) == 8
    assert {form: size for form, size in sizes.items() if not isinstance(size, int) or size > MOST_SHARED} == {}
