"""Speed and memory of the objectives on this machine: `make bench`.

B = 512, T = 2048, float32, as ratios to one plain pass `(new - old).exp().sum()` over the same tensors in the same run.
Calls are interleaved (A-B-A-B), medians with the 20th and 80th percentile. Before timing, each member is checked against
float64. The C library is told to keep freed memory: by default it returns megabytes to the system after each call, and every
measurement, including the plain pass, then depends on page faults.
"""

import contextlib
import ctypes
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import legato

RESULTS = Path(__file__).parent / "results" / "objectives.json"
ROWS, WIDTH = 512, 2048
MEMBERS = ("gspo", "luspo", "gspo-token", "gmpo", "grpo", "dapo", "cispo", "sapo")
TARGETS = {"gspo": 2.5, "luspo": 2.5, "loss": 5.0, "metrics": 8.0}
SAMPLES, WARM_UPS = 60, 10


def batch(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Arguments of `legato.loss`: ragged responses with drift as in a run, a bool mask, padding at the end of rows."""
    generator = torch.Generator().manual_seed(0)
    new = -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    old = new + 0.003 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
    return {
        "logprobs": new.to(dtype),
        "old_logprobs": old.to(dtype),
        "advantages": torch.randn(ROWS, generator=generator, dtype=torch.float64).to(dtype),
        "mask": torch.arange(WIDTH) < lengths,
        "group": torch.arange(ROWS) // 8,
    }


def keep_freed_memory() -> None:
    """Set glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD to 1 GB; does nothing with other C libraries."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(-1, 2**30)
        library.mallopt(-3, 2**30)


def float64_error(name: str) -> float:
    """Largest error of the float32 coefficients against float64, relative to the largest coefficient."""
    exact = legato.loss(name, **batch(torch.float64), metrics=False).coefficients
    coefficients = legato.loss(name, **batch(), metrics=False).coefficients.double()
    # A ratio very close to its bound may be clipped on one side only; such rows are left out of the comparison.
    same = ((exact == 0) == (coefficients == 0)).all(1)
    assert same.double().mean() > 0.97, name
    return float(((exact - coefficients).abs().max(1).values / exact.abs().max())[same].max())


def measure(calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Median, 20th and 80th percentile of each call in milliseconds, interleaved."""
    times_by_name: dict[str, list[float]] = {name: [] for name in calls}
    for sample in range(WARM_UPS + SAMPLES):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if sample >= WARM_UPS:
                times_by_name[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: {
            "median_ms": statistics.median(times),
            "p20_ms": statistics.quantiles(times, n=5)[0],
            "p80_ms": statistics.quantiles(times, n=5)[3],
        }
        for name, times in times_by_name.items()
    }


def extra_memory(name: str, metrics: bool) -> float:
    """Peak memory of one call above its inputs, in units of one [B, T] tensor, in a new process. NaN if not on Linux."""
    if not Path("/proc/self/clear_refs").exists():
        return math.nan
    program = f"""
import ctypes, re, torch, legato
from benchmarks.objectives import batch
def kilobytes(what):
    return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
torch.set_num_threads(2)
signals = batch()
legato.loss({name!r}, **{{key: value[:8] for key, value in signals.items()}}, metrics={metrics})
ctypes.CDLL("libc.so.6").malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")
before = kilobytes("VmRSS")
legato.loss({name!r}, **signals, metrics={metrics})
print(kilobytes("VmHWM") - before)
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(child.stdout) * 1024 / (ROWS * WIDTH * 4)


def run() -> dict[str, Any]:
    """Measure all members."""
    torch.set_num_threads(2)
    errors = {name: float64_error(name) for name in MEMBERS}
    keep_freed_memory()
    signals = batch()
    new, old = signals["logprobs"], signals["old_logprobs"]
    rows = {}
    for name in MEMBERS:
        # One member at a time beside the plain pass, as a training loop calls it.
        timings = measure(
            {
                "plain": lambda: (new - old).exp().sum(),
                "loss": lambda name=name: legato.loss(name, **signals, metrics=False),  # type: ignore[misc]
                "metrics": lambda name=name: legato.loss(name, **signals),  # type: ignore[misc]
            }
        )
        plain = timings["plain"]["median_ms"]
        rows[name] = {
            "error_against_float64": errors[name],
            "extra_memory": {"loss": extra_memory(name, False), "metrics": extra_memory(name, True)},
            **{
                kind: {**timings[kind], "ratio": timings[kind]["median_ms"] / plain} for kind in ("plain", "loss", "metrics")
            },
        }
        print(
            f"{name:12s} plain {plain:6.2f} ms   loss and coefficients {rows[name]['loss']['ratio']:5.2f}x   "
            f"with all metrics {rows[name]['metrics']['ratio']:5.2f}x"
        )
    return {
        "shape": [ROWS, WIDTH],
        "dtype": "float32",
        "threads": 2,
        "samples": SAMPLES,
        "machine": f"{platform.machine()}, {platform.system()}, CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "members": rows,
    }


def performance_page(results: dict[str, Any]) -> str:
    """The text of `docs/performance.md`."""
    rows, width = results["shape"]
    lines = [
        "# Performance",
        "",
        "Generated by `make bench` from `benchmarks/results/objectives.json`; do not edit.",
        "",
        "## Objectives on a CPU",
        "",
        f"B = {rows}, T = {width}, {results['dtype']}, {results['threads']} threads, torch {results['torch']}; medians of"
        f" {results['samples']} interleaved calls,",
        "as ratios to one plain pass `(new - old).exp().sum()` over the same tensors in the same run.",
        "Targets: loss and coefficients 2.5x for gspo and luspo and 5x for token members, 8x with all metrics.",
        "The C library was set to keep freed memory (`mallopt`) in all calls, including the plain pass: by default it",
        "returns megabytes to the system after each call, and the ratios then depend on page faults.",
        "The error is the largest of the float32 coefficients against float64, relative to the largest coefficient.",
        "Memory is the peak of one call above its inputs, in tensors of the size of `logprobs`. The coefficients are one",
        "such tensor.",
        "",
        "| member | plain, ms | loss and coefficients | with all metrics | error | memory | with metrics | within targets |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results["members"].items():
        target = TARGETS.get(name, TARGETS["loss"])
        within = row["loss"]["ratio"] <= target and row["metrics"]["ratio"] <= TARGETS["metrics"]
        memory = row["extra_memory"]
        cells = (
            f"`{name}`",
            f"{row['plain']['median_ms']:.2f}",
            f"{row['loss']['ratio']:.2f}x",
            f"{row['metrics']['ratio']:.2f}x",
            f"{row['error_against_float64']:.1e}",
            f"{memory['loss']:.1f}",
            f"{memory['metrics']:.1f}",
            "yes" if within else "no",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    results = run()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    (Path(__file__).parents[1] / "docs" / "performance.md").write_text(performance_page(results))
    print(f"wrote {RESULTS.name} and docs/performance.md")
