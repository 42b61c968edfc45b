"""Kills of single ranks at random times: the others end at once and name it, and the resumed run equals the straight one."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.trust.kills import SLEEP, is_complete, next_words
from benchmarks.trust.trial import KINDS, Case, digest, environment, train_words, unequal

_WITHIN_SECONDS = 30.0
"""How long the other ranks may take to end."""
_LOST = 4
_WAYS: Mapping[str, Mapping[str, str]] = {
    "optimizer": {"training.shard": "optimizer"},
    "layers": {"training.shard": "layers"},  # kept whole during updates: there is memory
    "layers of each pass": {"training.shard": "layers", "training.keep_layers": "nothing"},
}
_STRAIGHT: dict[tuple[str, str, int], dict[str, str]] = {}
"""Digests of undisturbed runs by kind, way of dividing and number of ranks."""


def killed_ranks(source: random.Random) -> Iterator[Case]:
    """SIGKILL of one of two or three ranks: the others end within 30 s and name it; resumed, the same bits."""
    while True:
        kind, size = source.choice(["plain", "LoRA", "PPO", "mixture", "two passes"]), source.choice([2, 2, 3])
        shard, victim, moment = source.choice([*_WAYS]), source.randrange(size), source.uniform(0.0, 3.0)
        counts: dict[str, int] = {}
        name = f"{kind}, {shard}, rank {victim} of {size} killed {moment:.1f} s after the first checkpoint"
        yield Case(name=name, check=_killed_rank_check(kind, shard, size, victim, moment, counts), counts=counts)


def _killed_rank_check(
    kind: str, shard: str, size: int, victim: int, moment: float, counts: dict[str, int]
) -> Callable[[Path], str | None]:
    options = {**KINDS[kind], **_WAYS[shard]}

    def check(folder: Path) -> str | None:
        expected = _straight(kind, shard, size, options)
        process = _start(train_words(folder, options), size, LEGATO_TRUST_SLEEP=SLEEP)
        while not list((folder / "run" / "checkpoints").glob("step-*")) and process.poll() is None:
            time.sleep(0.02)
        time.sleep(moment)
        ranks = ranks_of(process.pid)
        if victim in ranks and process.poll() is None:
            os.kill(ranks[victim], signal.SIGKILL)
            counts[f"{shard}, rank {victim} of {size}"] = 1
        killed = time.monotonic()
        output, _ = process.communicate(timeout=120)
        seconds = time.monotonic() - killed
        # A rank that is killed after the last exchange may have left nothing to wait for.
        if counts and not is_complete(folder):
            if seconds > _WITHIN_SECONDS:
                return f"the other ranks took {seconds:.0f} s to end"
            if process.returncode != _LOST or f"rank {victim} (process" not in output:
                return f"exit {process.returncode}: {output.strip()[-300:]}"
        if not is_complete(folder):
            again = _start(next_words(folder, kind, options), size)
            output, _ = again.communicate(timeout=240)
            if again.returncode:
                return f"it did not go on: exit {again.returncode}: {output.strip()[-300:]}"
        return unequal(expected, digest(folder / "run"))

    return check


def _straight(kind: str, shard: str, size: int, options: Mapping[str, Any]) -> dict[str, str]:
    key = (kind, shard, size)
    if key not in _STRAIGHT:
        with tempfile.TemporaryDirectory() as folder:
            process = _start(train_words(Path(folder), options), size)
            output, _ = process.communicate(timeout=240)
            if process.returncode:
                raise RuntimeError(f"the undisturbed run failed: {output.strip()[-300:]}")
            _STRAIGHT[key] = digest(Path(folder) / "run")
    return _STRAIGHT[key]


def _start(words: list[str], size: int, **more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "legato", *words, f"--processes={size}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(CUDA_VISIBLE_DEVICES="", **more),
    )


def ranks_of(parent: int) -> dict[int, int]:
    """The processes of the ranks that a process has started, by rank."""
    processes = {}
    for folder in Path("/proc").iterdir():
        try:
            if (folder / "stat").read_text().rpartition(")")[2].split()[1] != str(parent):
                continue
            variables = dict(each.split("=", 1) for each in (folder / "environ").read_text().split("\0") if "=" in each)
            processes[int(variables["RANK"])] = int(folder.name)
        except (OSError, KeyError, IndexError):
            continue
    return processes
