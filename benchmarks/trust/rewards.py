"""Hostile rewards: none may end the run as a success, hang it, harm the training or be blamed on us."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.trust.trial import Case, Ended, digest, legato, legato_here, refusal, train_words, unequal

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
    "alters tensors": (f"value = {PLAIN}; rollout.tokens.zero_(); rollout.sampler_logprobs.zero_(); return value", True),
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
BATCH = "import time\nfrom legato.rewards.scoring import batched\n@batched\ndef score(rollouts):\n"
FILES = {
    "async, hangs": "import asyncio\nasync def score(rollout):\n    await asyncio.sleep(1000)\n",
    "async, blocks the loop": "import time\nasync def score(rollout):\n    time.sleep(1000)\n",
    "async, ignores its cancellation": (
        "import asyncio\nasync def score(rollout):\n    while True:\n        try:\n            await asyncio.sleep(1)\n"
        "        except asyncio.CancelledError:\n            pass\n"
    ),
    "batch, hangs": f"{BATCH}    time.sleep(1000)\n",
    "batch, a generator that hangs": f"{BATCH}    yield 1.0\n    time.sleep(1000)\n",
    "batch, a generator without end": f"{BATCH}    while True:\n        yield 1.0\n",
    "a regular expression without end": (
        "import re\ndef score(rollout):\n    return float(bool(re.match(r'(a+)+$', 'a' * 60 + 'b')))\n"
    ),
    "exits at its import": "import sys\nsys.exit(0)\n",
    "raises at its import": "raise KeyboardInterrupt\n",
}
"""Whole reward files, none of which can train."""
HUNG_IMPORT = "while True:\n    pass\n"


def hostile_rewards(source: random.Random) -> Iterator[Case]:
    """Rewards that return, raise, exit, hang, fork or alter what they should not: never a fault, never a silent success."""
    while True:
        names = [*REWARDS, *FILES, "hangs at its import"]
        source.shuffle(names)
        for name in names:
            if name in REWARDS:
                body, works = REWARDS[name]
                yield Case(name=name, check=_checker(name, _file(body), works))
            else:
                yield Case(name=name, check=_hung_import if name not in FILES else _checker(name, FILES[name], False))


def _file(body: str) -> str:
    """The text of a reward file with this body of `score(rollout)`."""
    return f"def score(rollout):\n    {body}\n"


def _hung_import(folder: Path) -> str | None:
    """An import may take ten minutes; here it gets a second, in this process."""
    from legato.core import importing

    file, before = folder / "reward.py", importing.IMPORT_SECONDS
    file.write_text(HUNG_IMPORT)
    try:
        importing.IMPORT_SECONDS = 1.0
        return refusal(legato_here(*train_words(folder, {"reward.kind": f"{file}:score"})))
    finally:
        importing.IMPORT_SECONDS = before


_PLAIN_DIGEST: dict[str, str] = {}


def _train(folder: Path, text: str) -> Ended:
    file = folder / "reward.py"
    file.write_text(text)
    options = {"reward.kind": f"{file}:score", "training.steps": 2, "evaluation.every_steps": 0}
    return legato(*train_words(folder, {**options, "reward.timeout_seconds": 0.2}), seconds=120)


def _checker(name: str, text: str, works: bool | None) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        ended = _train(folder, text)
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
                _train(folder / "plain", _file(f"return {PLAIN}"))
                _PLAIN_DIGEST.update(weights(folder / "plain" / "run"))
            return unequal(_PLAIN_DIGEST, weights(folder / "run"))
        return None if ended.code in (0, 2) else f"unexpected {ended.describe()}"

    return check


def weights(run: Path) -> dict[str, str]:
    """The digest of a run without the global generators, which a reward may advance."""
    return {name: value for name, value in digest(run).items() if name != "generators" and "random" not in name}
