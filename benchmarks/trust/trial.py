"""What the parts of the trial share: cases, small runs, and what must be equal between two runs."""

import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks import digests
from benchmarks.digests import option_words

REWARD = '''"""A reward that an untrained model earns some of, slowly enough to be interrupted."""

import os
import time


def early(rollout):
    time.sleep(float(os.environ.get("LEGATO_TRUST_SLEEP", "0")))
    return float((rollout.tokens < 40).float().mean())
'''
SMALL: dict[str, Any] = {
    **{path: value for path, value in digests.SMALL.items() if path.startswith(("policy.", "task.", "training."))},
    "policy.tiny.layers": 1,
    "rollouts.samples_per_prompt": 4,
    "rollouts.max_response_tokens": 4,
    "training.steps": 6,
    "evaluation.every_steps": 3,
    "output.checkpoint_every_steps": 1,
    "output.keep_last": 2,
    "output.name": "run",
}
MIXTURE = {"policy.model": "tiny-moe", "policy.tiny.experts": 4}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"algorithm": "gspo"},
    "LoRA": {"algorithm": "gspo", "policy.lora.rank": 2},
    "KL": {"algorithm": "grpo", "algorithm.objective.penalties.kl.beta": 0.1, "policy.warm_up.steps": 2},
    "PPO": {"algorithm": "ppo"},
    "mixture": {"algorithm": "gspo", **MIXTURE},
    "history": {"algorithm": "srpo", "task.stages": 1},
    "stale sampler": {"algorithm": "gspo", "rollouts.mismatch.kind": "stale", "rollouts.mismatch.updates": 3},
    "two passes": {"algorithm": "gspo", "training.update_passes": "two"},
    "upcycled": {"algorithm": "gspo", "policy.upcycle.experts": 4, "policy.upcycle.noise": 0.1, "policy.warm_up.steps": 2},
    "LoRA and mixture": {"algorithm": "gspo", **MIXTURE, "policy.lora.rank": 2},
}
"""The kinds of run that are killed. "PPO" trains a value head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One trial: `check` returns None if the promise held, else what was wrong."""

    name: str
    check: Callable[[Path], str | None]
    counts: dict[str, int] = field(default_factory=dict)
    """What `check` counted: summed over the cases of a part and stored."""
    measured: dict[str, Any] = field(default_factory=dict)
    """What `check` measured: stored as it is."""


Part = Callable[[random.Random], Iterator[Case]]
"""A part of the trial: cases without end, drawn from a generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended."""

    code: int
    output: str
    error: str

    @property
    def is_fault(self) -> bool:
        """Whether it ended as a fault of ours, or with a traceback."""
        return self.code == 1 or "Traceback (most recent call last)" in self.error or "fault of ours" in self.error

    def describe(self) -> str:
        lines = self.error.strip().splitlines()
        return f"exit {self.code}: {lines[-1][:200] if lines else 'nothing on standard error'}"


def train_words(folder: Path, options: Mapping[str, Any] | None = None) -> list[str]:
    """The words of `legato train` for a small run in `folder`/run."""
    reward = folder / "early.py"
    if not reward.exists():
        reward.write_text(REWARD)
    merged = {**SMALL, "reward.kind": f"{reward}:early", "output.directory": str(folder), **(options or {})}
    return ["train", *option_words({path: value for path, value in merged.items() if value is not None})]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def legato(*words: str, seconds: float = 300, **more: str) -> Ended:
    """Run a command to its end; a process that hangs is killed and reported as code -9."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "legato.cli.main", *words],
            capture_output=True,
            timeout=seconds,
            env=environment(**more),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(code=-9, output="", error=f"no end after {seconds:.0f} s")
    return Ended(
        code=process.returncode,
        output=process.stdout.decode(errors="replace"),
        error=process.stderr.decode(errors="replace"),
    )


def legato_here(*words: str) -> Ended:
    """Run a command in this process, which saves the seconds of an import. It uses one thread, as processes here do."""
    import torch

    from legato.cli.main import main

    torch.set_num_threads(1)
    before, output, error = sys.argv, io.StringIO(), io.StringIO()
    code = 0
    try:
        sys.argv = ["legato", *words]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
            main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException as escaped:
        code, text = 1, f"Traceback (most recent call last): {type(escaped).__name__}: {escaped}"
        error.write(text)
    finally:
        sys.argv = before
    return Ended(code=code, output=output.getvalue(), error=error.getvalue())


def refusal(ended: Ended) -> str | None:
    """None if the command was refused as bad input in one message; else what was wrong."""
    if ended.is_fault or ended.code != 2:
        return f"expected a refusal with exit 2, got {ended.describe()}"
    return None if len(ended.error) < 4000 else f"the refusal has {len(ended.error)} characters"


def digest(run: Path) -> dict[str, str]:
    """What must be equal between two runs that should be one: every step and evaluation, and the last checkpoint."""
    records = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in ("step", "evaluation"):
            records.append({key: value for key, value in record.items() if not _is_time(key)})
    digests = {
        "metrics": hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest(),
        "steps": str(len(records)),
    }
    last = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name)
    state = json.loads((last / "trainer.json").read_text())
    digests["generators"] = hashlib.sha256(json.dumps(state["generators"]).encode()).hexdigest()
    for path in sorted(last.rglob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            raw = tensor.contiguous().view(-1).numpy().tobytes() if tensor.numel() else b""
            digests[f"{path.relative_to(last)}/{name}"] = hashlib.sha256(raw).hexdigest()
    return digests


def _is_time(key: str) -> bool:
    return key.startswith("time/") or key in ("seconds", "tokens/per_second")


def unequal(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The names of what differs, or None."""
    names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
    return f"differs in {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" if names else None


_STRAIGHT: dict[str, dict[str, str]] = {}


def straight(kind: str, folder: Path) -> dict[str, str]:
    """The digest of the run of a kind that nothing disturbed; computed once."""
    if kind not in _STRAIGHT:
        place = folder / "straight"
        place.mkdir()
        ended = legato_here(*train_words(place, KINDS[kind]))
        if ended.code:
            raise RuntimeError(f"the undisturbed run of kind {kind!r} failed: {ended.describe()}")
        _STRAIGHT[kind] = digest(place / "run")
    return _STRAIGHT[kind]
