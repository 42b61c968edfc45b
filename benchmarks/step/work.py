"""The workload of both sides of `benchmarks/step`: prompts, the table of rewards, the sizes of a step.

Imports the standard library only, because our environment and the peers' both import this module. Only `fingerprint` imports
torch.
"""

import contextlib
import hashlib
import json
import random
import re
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, UPDATES, TOKENS = 4, 8, 4, 24
LEARNING_RATE, CLIP_LOW, CLIP_HIGH = 1e-6, 3e-4, 4e-4
THREADS = 2
SILENT = (2, 1, 2, 1, 2)
"""Number of groups with equal rewards in each of five steps: 8 of 20, which is 40 % of the responses."""

CHECK_ADVANTAGES = (1.0, -1.0, 0.6, -0.6, 1.4, -0.5, 0.3, -1.2)
CHECK_LOG_S = (1e-4, -2e-2, 3e-2, 5e-2, -4e-2, -1.5e-4, 2e-3, 0.15)
"""log s of the batch on which both losses are compared: inside the band, clipped on both sides, outside but not clipped."""


def questions(count: int) -> list[str]:
    """`count` different sums, differences and products of one-digit numbers, all with the same number of characters."""
    sums = [f"What is {a} {sign} {b}?" for a in range(10) for b in range(10) for sign in "+-*"]
    random.Random("questions").shuffle(sums)
    return sums[:count]


def rewards(steps: int, *, silent: bool) -> list[list[float]]:
    """Rewards of 0 or 1 by prompt and sample, `PROMPTS` rows per step. With `silent`, some rows have equal rewards."""
    source = random.Random("rewards")
    table = []
    for step in range(steps):
        flat = set(source.sample(range(PROMPTS), SILENT[step % len(SILENT)])) if silent else set()
        for place in range(PROMPTS):
            if place in flat:
                table.append([float(source.random() < 0.5)] * SAMPLES)
                continue
            row = [float(source.random() < 0.5) for _ in range(SAMPLES - 2)] + [0.0, 1.0]
            source.shuffle(row)
            table.append(row)
    return table


def silent_share(table: Sequence[Sequence[float]]) -> float:
    """The share of responses whose group has equal rewards."""
    return sum(min(row) == max(row) for row in table) / len(table)


def digest(rows: Iterable[Sequence[int]]) -> str:
    """A hash of token rows, to compare the prompts of both sides."""
    return hashlib.blake2b(json.dumps([list(row) for row in rows]).encode(), digest_size=8).hexdigest()


def memory_megabytes() -> dict[str, float]:
    """The peak and the current resident set of this process, in megabytes.

    On Linux, `ru_maxrss` inherits the peak of the parent process; VmHWM starts with the program itself.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_mb": peak / (2**20 if sys.platform == "darwin" else 2**10), "now_mb": float("nan")}
    sizes = dict(re.findall(r"(VmHWM|VmRSS):\s+(\d+) kB", status.read_text()))
    return {"peak_mb": int(sizes["VmHWM"]) / 1024, "now_mb": int(sizes["VmRSS"]) / 1024}


def reset_peak() -> None:
    """Reset the peak memory of this process, if the system supports it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes(first: float) -> dict[str, float]:
    """The peak of the whole process and the peak since `reset_peak`, in megabytes. `first` is the peak before the reset."""
    later = memory_megabytes()["peak_mb"]
    return {"peak_mb": max(first, later), "later_peak_mb": later}


def fingerprint(name: str, gradient: Any) -> list[float]:
    """The norm of a parameter's gradient, and its product with a fixed vector, which depends on its direction."""
    import torch

    flat = gradient.detach().double().flatten()
    wave = torch.arange(flat.numel(), dtype=torch.float64).add_(len(name)).cos_()
    return [float(flat.norm()), float(flat @ wave)]


def read_json(path: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(path).read_text())
    return content


def write_json(path: str, content: Mapping[str, Any]) -> None:
    Path(path).write_text(json.dumps(content))
