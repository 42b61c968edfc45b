"""Can the engine equal the trainer to the bit? python -m benchmarks.gpu.exact --output exact.json --seconds 170

Runs the parts of `trial.py` for each shape and prints the verdict of `verdict.py`. Results are written after every part.
Ways of multiplying need settings of their own, so each runs in a process of its own. `--tiny` runs everything on a CPU
under Triton's interpreter at toy shapes; there is nothing to time there, so the verdict can only say what is equal.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, str]] = {
    "default": {},
    "lt": {},
    "lt small workspace": {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"},
    "triton": {},
}
"""Ways of multiplying and the environment that each needs before torch starts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=170.0, help="no part starts after this many seconds")
    parser.add_argument("--shapes", nargs="+", help="default: 0.6B and 1.7B")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", help="only for the processes that this command starts")
    options = parser.parse_args()
    shapes = ["tiny"] if options.tiny else options.shapes or ["0.6B", "1.7B"]
    if options.part:
        print(json.dumps(run_part(options.part, shapes[0], tiny=options.tiny)))
        return
    deadline = time.monotonic() + options.seconds
    document: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "shapes": {}, "errors": {}}
    # What decides comes first, so that a cut-off command still answers.
    parts = [
        "products:default",
        "products:lt",
        "attention",
        "products:lt small workspace",
        "heads",
        "head",
        "products:triton",
        "agreement",
    ]
    for part in parts:
        for shape in shapes:
            if time.monotonic() > deadline:
                document["errors"][f"{shape} {part}"] = "no time left"
                continue
            measured = run_in_process(part, shape, tiny=options.tiny)
            if isinstance(measured, str):
                document["errors"][f"{shape} {part}"] = measured
            else:
                place = document["shapes"].setdefault(shape, {})
                name = part.split(":")[0]
                place[name] = {**place.get(name, {}), **measured["result"]}
                document["machine"] = measured["machine"]
            options.output.write_text(json.dumps(document, indent=1))
            print(f"{shape} {part}: {'failed' if isinstance(measured, str) else 'done'}", flush=True)
    from benchmarks.gpu.exact.verdict import decide

    whole = {shape: each for shape, each in document["shapes"].items() if {"products", "attention"} <= each.keys()}
    document["verdict"] = decide(whole)
    options.output.write_text(json.dumps(document, indent=1))
    print(json.dumps(document["verdict"], indent=1))
    for name, error in document["errors"].items():
        print(f"{name}: {error}")


def run_in_process(part: str, shape: str, *, tiny: bool) -> dict[str, Any] | str:
    """The result of a part in a fresh process; its error as text if it failed."""
    way = part.partition(":")[2]
    command = [sys.executable, "-m", "benchmarks.gpu.exact", "--part", part, "--output", os.devnull]
    command += ["--tiny"] if tiny else ["--shapes", shape]
    try:
        ended = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=180,
            env={**os.environ, **WAYS.get(way, {}), **({"TRITON_INTERPRET": "1"} if tiny else {})},
        )
    except subprocess.TimeoutExpired:
        return "took longer than 180 s"
    if ended.returncode:
        return ended.stderr[-2000:]
    measured: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return measured


def run_part(part: str, shape: str, *, tiny: bool) -> dict[str, Any]:
    """The result of a part, and the machine that it ran on."""
    import torch

    from benchmarks.gpu.exact import trial

    name, _, way = part.partition(":")
    lab = trial.Lab(device=torch.device("cpu" if tiny else "cuda"))
    sizes = trial.TINY if tiny else trial.SHAPES[shape]
    if name == "products":
        if lab.cuda:
            trial.configure(way)
        result = trial.products(lab, sizes, way)
    elif name == "agreement":
        if lab.cuda:
            trial.configure("lt")
        result = trial.products_agree(lab, sizes)
    else:
        result = {"attention": trial.attention, "heads": trial.heads, "head": trial.head}[name](lab, sizes)
    machine = torch.cuda.get_device_name() if lab.cuda else "CPU, Triton interpreted"
    return {"result": result, "machine": {"device": machine, "torch": torch.__version__}}


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
