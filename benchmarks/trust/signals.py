"""Signals at random times: the run saves, ends with the signal's exit code, and the resumed run equals the straight one."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.trust.kills import SLEEP, next_words
from benchmarks.trust.trial import KINDS, Case, digest, environment, legato_here, straight, train_words, unequal

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def signalled(source: random.Random) -> Iterator[Case]:
    """HUP, INT, TERM and USR1 save and end (129, 130, 143, 138), USR2 saves and goes on: all come to the same end."""
    while True:
        kind, number, seconds = source.choice(list(KINDS)), source.choice(SIGNALS), source.uniform(4.0, 9.0)
        yield Case(name=f"{kind}, {number.name} after {seconds:.1f} s", check=_checker(kind, number, seconds))


def _checker(kind: str, number: signal.Signals, seconds: float) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        expected = straight(kind, folder)
        process = subprocess.Popen(
            [sys.executable, "-m", "legato.cli.main", *train_words(folder, KINDS[kind])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(LEGATO_TRUST_SLEEP=SLEEP),
        )
        time.sleep(seconds)
        begun = (folder / "run" / "metrics.jsonl").exists()
        process.send_signal(number)
        try:
            error = process.communicate(timeout=120)[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            process.kill()
            return "it did not end within 120 s"
        # Before the run has begun there is no handler yet, and the signal's own action is right.
        allowed = {0, 128 + number} if begun else {0, 128 + number, -number}
        if number is signal.SIGUSR2 and begun:
            allowed = {0}
        done = begun and '"all steps done"' in (folder / "run" / "metrics.jsonl").read_text()
        if done:
            allowed |= {-number}  # the run had ended, and the process was about to
        if process.returncode not in allowed:
            return f"expected an exit code among {sorted(allowed)}, got {process.returncode}: {error.strip()[-200:]}"
        if process.returncode == 0 or done:
            return unequal(expected, digest(folder / "run"))
        ended = legato_here(*next_words(folder, kind))
        return ended.describe() if ended.code else unequal(expected, digest(folder / "run"))

    return check
