"""What both sides of `benchmarks/step` are given: prompts, the table of rewards, the numbers of a step.

Standard library only, as our environment and the peers' both read it; torch where a gradient is handed in.
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
"""Groups of equal rewards in each of five steps: 8 of 20, which is 40 % of the responses."""

CHECK_ADVANTAGES = (1.0, -1.0, 0.6, -0.6, 1.4, -0.5, 0.3, -1.2)
CHECK_LOG_S = (1e-4, -2e-2, 3e-2, 5e-2, -4e-2, -1.5e-4, 2e-3, 0.15)
"""Of the batch on which both losses are compared: inside the band, clipped on both sides, outside but not clipped."""


def questions(count: int) -> list[str]:
    """So many different sums, differences and products of one-digit numbers; all have the same number of characters."""
    found = [f"What is {a} {sign} {b}?" for a in range(10) for b in range(10) for sign in "+-*"]
    random.Random("questions").shuffle(found)
    return found[:count]


def rewards(steps: int, *, silent: bool) -> list[list[float]]:
    """0 or 1 by prompt number and sample number, `PROMPTS` rows to a step. With `silent` some rows are all alike."""
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
    """The share of responses whose group's rewards are all alike."""
    return sum(min(row) == max(row) for row in table) / len(table)


def digest(rows: Iterable[Sequence[int]]) -> str:
    """A name for tokens: equal on both sides where the prompts are."""
    return hashlib.blake2b(json.dumps([list(row) for row in rows]).encode(), digest_size=8).hexdigest()


def memory() -> dict[str, float]:
    """Megabytes: the largest resident set of this process so far, and the present one.

    Linux hands the peak of whoever started a process on to `ru_maxrss`; VmHWM begins with the program itself.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_mb": peak / (2**20 if sys.platform == "darwin" else 2**10), "now_mb": float("nan")}
    found = dict(re.findall(r"(VmHWM|VmRSS):\s+(\d+) kB", status.read_text()))
    return {"peak_mb": int(found["VmHWM"]) / 1024, "now_mb": int(found["VmRSS"]) / 1024}


def forget_peak() -> None:
    """From here on the peak is measured anew, where the system can do so."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peaks(first: float) -> dict[str, float]:
    """Megabytes: the peak of the process, given what it was before it was forgotten, and that of what came after."""
    later = memory()["peak_mb"]
    return {"peak_mb": max(first, later), "later_peak_mb": later}


def fingerprint(name: str, gradient: Any) -> list[float]:
    """Of a parameter's gradient: its norm, and its product with fixed numbers, which tells its direction."""
    import torch

    flat = gradient.detach().double().flatten()
    wave = torch.arange(flat.numel(), dtype=torch.float64).add_(len(name)).cos_()
    return [float(flat.norm()), float(flat @ wave)]


def read(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def write(path: str, found: Mapping[str, Any]) -> None:
    Path(path).write_text(json.dumps(found))
