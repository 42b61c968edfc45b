"""Hostile rewards: none may end the run as a success, hang it, harm the training or be blamed on us."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.trust.trial import Case, Ended, digest, legato, train_words, unequal

PLAIN = "float(int(rollout.tokens.sum()) % 2)"
HARMLESS = ("alters tensors", "grad off", "changes directory", "forks", "seeds", "threads", "warns", "logs")
"""Rewards that score as the plain one does: the run must come to the same weights."""
REWARDS = {
    "bool": ("return True", True),
    "numpy scalar": ("import numpy; return numpy.float32(0.5)", True),
    "torch scalar": ("import torch; return torch.tensor(0.5)", True),
    "None": ("return None", False),
    "text": ("return 'good'", False),
    "NaN": ("return float('nan')", False),
    "infinite": ("return float('inf')", False),
    "1e308": ("return 1e308", None),
    "10**400": ("return 10**400", False),
    "complex": ("return 1j", False),
    "a list": ("return [1.0]", False),
    "broken repr": ("class A:\n        def __repr__(self): raise ValueError('x')\n    return A()", False),
    "always raises": ("raise ValueError('no')", False),
    "raises 5 MB": ("raise ValueError('x' * 5_000_000)", False),
    "SystemExit": ("import sys; sys.exit(0)", False),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", False),
    "GeneratorExit": ("raise GeneratorExit", False),
    "BaseException": ("raise BaseException('odd')", False),
    "closes stdout": ("import sys; sys.stdout.close(); return 1.0", True),
    "grad off": ("import torch; torch.set_grad_enabled(False); return float(int(rollout.tokens.sum()) % 2)", True),
    "alters tensors": (f"value = {PLAIN}; rollout.tokens.zero_(); rollout.logprobs.zero_(); return value", True),
    "hangs": ("import time; time.sleep(1000)", False),
    "loops": ("while True: pass", False),
    "changes directory": ("import os; os.chdir('/'); return float(int(rollout.tokens.sum()) % 2)", True),
    "forks": (
        "import os\n    pid = os.fork()\n    if pid: os.waitpid(pid, 0)\n    return float(int(rollout.tokens.sum()) % 2)",
        True,
    ),
    "prints a lot": ("print('x' * 100_000); return float(int(rollout.tokens.sum()) % 2)", True),
    "warns": ("import warnings; warnings.warn('odd'); return float(int(rollout.tokens.sum()) % 2)", True),
    "logs": ("import logging; logging.error('odd'); return float(int(rollout.tokens.sum()) % 2)", True),
    "seeds": ("import torch; torch.manual_seed(0); return float(int(rollout.tokens.sum()) % 2)", True),
    "threads": (
        "import threading; threading.Thread(target=lambda: None).start(); return float(int(rollout.tokens.sum()) % 2)",
        True,
    ),
}
"""The body of `score(rollout)`, and whether the run should work: None where a refusal is as right."""


def hostile_rewards(source: random.Random) -> Iterator[Case]:
    """Rewards that return, raise, exit, fork or alter what they should not: never a fault, never a silent success."""
    while True:
        names = list(REWARDS)
        source.shuffle(names)
        for name in names:
            yield Case(name=name, check=_checker(name, *REWARDS[name]))


_PLAIN_DIGEST: dict[str, str] = {}


def _train(folder: Path, body: str) -> Ended:
    file = folder / "reward.py"
    file.write_text(f"def score(rollout):\n    {body}\n")
    options = {"reward.kind": f"{file}:score", "training.steps": 2, "evaluation.every_steps": 0}
    return legato(*train_words(folder, {**options, "reward.timeout_seconds": 0.2}), seconds=120)


def _checker(name: str, body: str, works: bool | None) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        ended = _train(folder, body)
        if ended.is_fault:
            return ended.describe()
        if name != "prints a lot" and len(ended.error) + len(ended.output) > 200_000:
            return "its message was printed whole"
        if works is True and ended.code:
            return f"expected the run to work, got {ended.describe()}"
        if works is False and ended.code == 0:
            return "expected an error, got a run that ended as a success"
        if name in HARMLESS and ended.code == 0:
            if not _PLAIN_DIGEST:
                (folder / "plain").mkdir()
                _train(folder / "plain", f"return {PLAIN}")
                _PLAIN_DIGEST.update(weights(folder / "plain" / "run"))
            return unequal(_PLAIN_DIGEST, weights(folder / "run"))
        return None if ended.code in (0, 2) else f"unexpected {ended.describe()}"

    return check


def weights(run: Path) -> dict[str, str]:
    """The digest of a run without the global generators, which a reward may advance."""
    return {name: value for name, value in digest(run).items() if name != "generators" and "random" not in name}
