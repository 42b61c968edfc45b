"""Starts processes that are one world, and runs functions of `cases.py` in them. One spawn serves many calls."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Call = tuple[str, Mapping[str, Any]]
"""The name of a function in `cases.py`, and its arguments, which are JSON."""


def run_world(folder: Path, size: int, calls: Mapping[str, Call], seconds: float = 240) -> dict[str, list[Any]]:
    """What each call returned, in the order of ranks. A call that raised has the error as {"error": text}."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calls.json").write_text(json.dumps({name: list(call) for name, call in calls.items()}))
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.ranks.worker", str(size), str(folder)]
    with (folder / "log").open("wb") as log:
        options: dict[str, Any] = {"env": environment, "cwd": ROOT, "stdout": log, "stderr": log}
        ranks = [subprocess.Popen([*command, str(rank)], **options) for rank in range(size)]
        try:
            codes = [rank.wait(seconds) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert codes == [0] * size, (folder / "log").read_text()[-3000:]
    told = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(size)]
    return {name: [each.get(name) for each in told] for name in calls}


def once(factory: pytest.TempPathFactory, name: str, compute: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns, computed by one of the test workers and read by the others."""
    shared = factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stored = shared / f"{name}.json"
        if not stored.exists():
            stored.write_text(json.dumps(compute(shared / name)))
        results: dict[str, Any] = json.loads(stored.read_text())
        return results


def words_of(options: Mapping[str, Any]) -> Sequence[str]:
    """Options as words of the command line."""
    return [f"{path}={value if isinstance(value, str) else json.dumps(value)}" for path, value in options.items()]
