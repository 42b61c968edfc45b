"""Compiles the kernels of exact decoding for a GPU on machines without one, in a process without the interpreter."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from legato.policy.kernels import exact
from legato.policy.kernels.gradients import rotation_blocks

SHAPES = {"Qwen3": (16, 8, 128), "Llama": (32, 8, 64), "Qwen2": (12, 2, 128)}
TYPES = {"epsilon": "fp32", "scale": "fp32"} | dict.fromkeys(("states", "stats"), "*fp32")
TYPES |= dict.fromkeys(("query key value cosine sine query_norm key_norm query_out keys values out").split(), "*bf16")
TYPES |= dict.fromkeys(("slots", "slot_length", "block_prompt", "block_rows", "prompt_length"), "*i64")
sizes = {}
for name, (heads, key_heads, width) in SHAPES.items():
    half, block = rotation_blocks(width)
    padded = 1 << (heads // key_heads - 1).bit_length()
    attention = {"H": heads, "K": key_heads, "REPEAT": heads // key_heads, "REPEAT_PAD": padded, "D": width}
    attention |= {"ROWS": exact.LANES // padded, "M": exact.LANES, "SLICE": width, "BLOCK": exact.BLOCK}
    rotation = {"H": heads, "K": key_heads, "D": width, "HALF": half, "BLOCK": block, "NORM": name == "Qwen3"}
    for kernel, values in ((exact._prefix, attention), (exact._suffix, attention), (exact._rotate_into_slots, rotation)):
        # The rotation has a number of rows under the name of a constant of the attention.
        constants = {key: value for key, value in values.items() if key in kernel.arg_names}
        types, divisible = {}, {}
        for place, argument in enumerate(kernel.arg_names):
            types[argument] = "constexpr" if argument in constants else TYPES.get(argument, "i32")
            if types[argument].startswith("*"):
                divisible[(place,)] = [["tt.divisibility", 16]]
        try:
            made = compile(ASTSource(kernel, types, constants, divisible), target=GPUTarget("cuda", 90, 32),
                           options={"num_warps": exact.WARPS})
            sizes[f"{name} {kernel.__name__}"] = made.metadata.shared
        except Exception as error:
            sizes[f"{name} {kernel.__name__}"] = f"{type(error).__name__}: {error}"[:300]
print(json.dumps(sizes))
"""


def test_the_exact_kernels_compile_for_a_hopper_gpu() -> None:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=clean, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    sizes = json.loads(run.stdout)
    assert len(sizes) == 9
    assert {form: size for form, size in sizes.items() if not isinstance(size, int) or size > 227 * 1024} == {}
