"""Compiles kernels for a GPU on machines without one: Triton's interpreter accepts code its compiler refuses.

In its own process, since the other tests run kernels in the interpreter.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")

HEAD = """
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
EXPERTS = """
import json
from triton import next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from legato.policy.kernels import experts

POINTERS = dict.fromkeys(("x", "weight", "bias", "out", "logits", "gates"), "*bf16") | {"order": "*i32", "counts": "*i32"}
SHAPES = {"OLMoE": (64, 8, 2048, 1024, False), "Qwen3-30B": (128, 8, 2048, 768, False), "gpt-oss": (32, 4, 2880, 2880, True)}
sizes = {}

def build(name, kernel, numbers, constants, warps, stages, **types):
    # As the launcher specialises: 1 is a constant, multiples of 16 are marked.
    constants, types, divisible = dict(constants), POINTERS | types, {}
    for place, argument in enumerate(kernel.arg_names):
        number = numbers.get(argument)
        if number == 1:
            constants[argument] = 1
        types[argument] = "constexpr" if argument in constants else types.get(argument, "i32")
        if argument not in constants and (types[argument][0] == "*" or number is not None and number % 16 == 0):
            divisible[(place,)] = [["tt.divisibility", 16]]
    types = {argument: types[argument] for argument in kernel.arg_names}
    try:
        source, options = ASTSource(kernel, types, constants, divisible), {"num_warps": warps, "num_stages": stages}
        binary = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        fast = "wgmma.mma_async" in binary.asm["ptx"] and "cp.async.cg" in binary.asm["ptx"]
        sizes[name] = {"shared": binary.metadata.shared, "fast": fast}
    except Exception as error:
        sizes[name] = {"error": f"{type(error).__name__}: {error}"[:300]}

for name, pairs, stages in (("OLMoE", 2048, 4), ("OLMoE", 16384, 4), ("gpt-oss", 1024, 4), ("Qwen3-30B", 2048, 4)):
    count, active, width, inner, clamped = SHAPES[name]
    tiles = experts.Tiles.for_hopper(pairs, count)
    form = {"EP": next_power_of_2(count), "BM": tiles.pairs, "BN": tiles.outputs, "BK": tiles.step, "BIAS": clamped}
    numbers = {"capacity": pairs // active, "active": active, "H": width, "F": inner, "E": count}
    for product, outputs, inputs in (("gate and up", 2 * inner, width), ("down", width, inner)):
        first = product == "gate and up"
        strides = (outputs * inputs, 1, outputs) if clamped else (outputs * inputs, inputs, 1)
        sized = numbers | dict(zip(("stride_e", "stride_n", "stride_k"), strides))
        own = form | {"FULL": outputs % tiles.outputs == 0, "EVEN": inputs % tiles.step == 0}
        own |= {"INTERLEAVED": clamped, "CLAMP": clamped} if first else {}
        kernel = experts._gate_up if first else experts._down
        label = f"{name}, {product}, {pairs} pairs, {stages} stages"
        build(label, kernel, sized, own, tiles.warps, stages, alpha="fp32", limit="fp32")
constants = {"KIND": 1, "K": 8, "KP": 8, "EP": 128}
build("route", experts._route, {"E": 128}, constants, 1, 3, experts="*i64")
build("order", experts._order, {"pairs": 2048, "capacity": 256}, {"CHUNK": 1024}, 4, 3, experts="*i64")
build("combine", experts._combine, {"H": 2880}, {"K": 4, "BLOCK": 1024, "ROUND": True}, 4, 3, parts="*bf16")
print(json.dumps(sizes))
"""
MOST_SHARED = 227 * 1024
"""Bytes of shared memory a block may have on compute capability 9.0."""


def run_apart(program: str) -> Any:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


def test_the_heads_kernel_compiles_in_every_form_and_fits_shared_memory() -> None:
    sizes = run_apart(HEAD)
    assert len(sizes) == 8
    assert {form: size for form, size in sizes.items() if not isinstance(size, int) or size > MOST_SHARED} == {}


def test_the_kernels_of_grouped_experts_compile_for_published_shapes_and_fit_shared_memory() -> None:
    """Two programs with as many rows as decode at once must fit a multiprocessor, and loads must overlap products."""
    sizes = run_apart(EXPERTS)
    assert len(sizes) == 11
    assert {form: size for form, size in sizes.items() if "error" in size or size["shared"] > MOST_SHARED} == {}
    products = {form: size for form, size in sizes.items() if "stages" in form}
    assert len(products) == 8 and all(size["fast"] for size in products.values()), products
    usual = {form: size["shared"] for form, size in products.items() if "16384 pairs" not in form}
    assert all(2 * size <= MOST_SHARED for size in usual.values()), usual
