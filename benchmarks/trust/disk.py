"""Disks that are full for a moment, or cannot be written: nothing half written blocks the next try."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.trust.damage import finished_run
from benchmarks.trust.trial import KINDS, Case, digest, environment, legato_here, straight, train_words, unequal


def full_for_a_moment(source: random.Random) -> Iterator[Case]:
    """No space for three operations in a row: the run waits, or ends and can be resumed; it comes to the same end."""
    while True:
        operation = source.randint(20, 160)
        yield Case(name=f"full at disk operation {operation}", check=_full(operation))


def _full(operation: int) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        expected = straight("plain", folder)
        words = train_words(folder, KINDS["plain"])
        command = [sys.executable, "-m", "benchmarks.trust.child", "--full", str(operation), "--", *words]
        process = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300, check=False)
        if process.returncode == 1 or "fault of ours" in process.stderr:
            return f"exit {process.returncode}: {process.stderr.strip()[-200:]}"
        if process.returncode:
            run = folder / "run"
            if not any((run / "checkpoints").glob("step-*")):
                return None  # refused before anything was saved
            ended = legato_here("resume", str(run))
            if ended.code:
                return f"after the disk had space again: {ended.describe()}"
        return unequal(expected, digest(folder / "run"))

    return check


def unwritable_places(source: random.Random) -> Iterator[Case]:
    """Folders that cannot be written: refused as bad input, and nothing of the user's is lost."""
    while True:
        place = source.choice(["a file in place of the folder", "a target that exists", "a missing parent that is a file"])
        verb = source.choice(["train", "export"])
        yield Case(name=f"{verb}: {place}", check=_unwritable(verb, place))


def _unwritable(verb: str, place: str) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        target = folder / "target"
        if place == "a target that exists":
            target.mkdir()
            (target / "something").write_text("mine")
        else:
            target.write_text("a file")
        where = target / "below" if place.startswith("a missing parent") else target
        if verb == "train":
            options = {"output.directory": str(where), "training.steps": 1}
            if place == "a target that exists":
                (target / "run").mkdir()
            ended = legato_here(*train_words(folder, options))
        else:
            run = folder / "run"
            shutil.copytree(finished_run("plain", folder), run)
            ended = legato_here("export", str(run), str(where))
        if ended.code != 2 or ended.is_fault:
            return f"expected exit 2, got {ended.describe()}"
        if place == "a target that exists" and sorted(os.listdir(target))[-1] != "something":
            return "what was in the folder is gone"
        return None

    return check
