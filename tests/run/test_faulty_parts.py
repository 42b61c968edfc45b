"""Parts and engines of the user's that raise, exit, hang or return the wrong thing: their fault, named by file and line."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import legato
from legato.core import user_code
from legato.core.user_code import RUN, StopRequestedError
from legato.errors import InputError
from legato.rollouts.engine import Finished
from legato.rollouts.episodes import SingleTurn
from legato.rollouts.sampling import Sampling
from tests.proof import verdicts
from tests.proof.command import Command, assert_refused
from tests.proof.runs import run_small, words
from tests.rollouts.test_episodes import Speaking, make_runner, make_start

pytestmark = pytest.mark.usefixtures("lightly")

PART = '''
import os, signal, sys
from dataclasses import replace
from legato.parts import Trust, part

@part("trust", "faulty")
class Faulty(Trust):
    """A trust region with a fault."""
    role = "clip"

    def apply(self, region, context):
        {body}
'''
OPTIONS: dict[str, Any] = {
    "reward.kind": f"{verdicts.__file__}:early",
    "algorithm.objective.trust": ["faulty.py:Faulty"],
    "output.checkpoint_every_steps": 0,
}
PLACE = r"faulty\.py:12, in Faulty\.apply"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return lambda body: (tmp_path / "faulty.py").write_text(PART.format(body=body))


def test_an_exception_of_an_own_part_is_no_fault_of_ours(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write('raise ValueError("boo")')
    result = Command(monkeypatch, capfd)("train", *words(tmp_path / "runs", OPTIONS))
    assert_refused(result, "ValueError: boo", "faulty.py:12, in Faulty.apply")
    assert not list(tmp_path.glob("legato-fault-*"))


@pytest.mark.parametrize("body", ["sys.exit(0)", "raise KeyboardInterrupt", 'raise BaseException("odd")'])
def test_an_own_part_cannot_end_the_run_as_a_success_or_in_silence(body: str, write: Any, tmp_path: Path) -> None:
    write(body)
    with pytest.raises(InputError, match=PLACE):
        run_small(tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "expected a Region, got None"),
        ("return replace(region, log_value=region.log_value[:1])", r"expected a tensor of shape .* got .*shape \[1, "),
        ("return replace(region, selected=1.0)", "expected a tensor of shape .* got 1.0"),
    ],
)
def test_what_an_own_part_returns_is_checked(body: str, message: str, write: Any) -> None:
    """A wrong shape may broadcast: a run would train on the ratios of another response."""
    write(body)
    algorithm = legato.algorithm("gspo", {"objective.trust": ["faulty.py:Faulty"]})
    table = torch.zeros(3, 4)
    with pytest.raises(InputError, match=message):
        legato.loss(algorithm, logprobs=table, old_logprobs=table, advantages=torch.ones(3), mask=table == 0)


@pytest.mark.parametrize("first", [True, False])
def test_a_signal_ends_a_run_whose_part_hangs(
    first: bool, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before is saved; not if an update of this step has changed the weights already."""
    monkeypatch.setattr(user_code, "GRACE_SECONDS", 0.1)
    when = "True" if first else "float(context.signals.logprobs.detach().sub(context.signals.old_logprobs).abs().max()) > 0"
    hang = f"if {when} and context.signals.advantages.abs().max() > 0:\n            os.kill(os.getpid(), signal.SIGTERM)"
    write(f"{hang}\n            while True: pass\n        return region")
    run = run_small(tmp_path, OPTIONS | {"training.anchor": "recompute", "training.update_passes": "one"})
    assert run.exit_code == 143
    saved = sorted(path.name for path in (run.directory / "checkpoints").glob("step-*"))
    assert saved == (["step-000000"] if first else []), run.reason


class Hanging(Speaking):
    """An engine that waits for a server that is gone."""

    def poll(self) -> list[Finished]:
        time.sleep(60)
        return []


def test_a_signal_gives_up_an_own_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(RUN, "asked_to_end", None)
    RUN.ask_to_end(15)
    started = time.monotonic()
    with pytest.raises(StopRequestedError):
        make_runner(Hanging("a"), SingleTurn()).play([make_start()], Sampling())
    assert time.monotonic() - started < 30
