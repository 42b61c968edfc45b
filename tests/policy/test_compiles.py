"""The head's product is compiled for a GPU where there is none: Triton's interpreter takes what its compiler refuses.

In a process of its own, since the tests' own kernels are the interpreter's.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILED = """
import json
from itertools import product
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from legato.policy.kernels import head

kernel, found = head._project, {}
pointers = {"targets": "*i64"} | dict.fromkeys(("scales", "best_out", "total_out", "moment_out", "chosen_out"), "*fp32")
for keep, softcap, even in product((True, False), (0.0, 30.0), (True, False)):
    rows, step, tile = head._ROWS, head._STEP, head.TILE
    constants = {"BM": rows, "TILE": tile, "BK": step, "GROUP": head._GROUP, "PROGRAMS": 132}
    constants |= {"SOFTCAP": softcap, "KEEP": keep}
    described = {"hidden": (rows, step), "weight": (tile, step), "distances": (rows, tile if keep else step)}
    types, divisible = {}, {}
    for place, name in enumerate(kernel.arg_names):
        types[name] = "constexpr" if name in constants else pointers.get(name, "fp32" if name == "multiplier" else "i32")
        if name in described:
            types[name] = f"tensordesc<bf16[{described[name][0]}, {described[name][1]}]>"
        if name in pointers or even and name in ("stride", "N", "V", "H"):
            divisible[(place,)] = [["tt.divisibility", 16]]
    source, said = ASTSource(kernel, types, constants, divisible), f"keep {keep}, soft cap {softcap:g}, even {even}"
    try:
        made = compile(source, target=GPUTarget("cuda", 90, 32), options=head._LAUNCH)
        found[said] = made.metadata.shared
    except Exception as error:
        found[said] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps(found))
"""
MOST_SHARED = 227 * 1024
"""Bytes of shared memory a block may have on compute capability 9.0."""


def test_the_heads_product_compiles_in_every_form_and_fits() -> None:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILED], env=clean, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert len(found) == 8
    assert {said: size for said, size in found.items() if not isinstance(size, int) or size > MOST_SHARED} == {}
