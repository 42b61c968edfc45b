"""Rewards that hang, exit, fork, alter what they get or return odd things: none of it reaches the run."""

import asyncio
import contextlib
import hashlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from legato.core import importing, user_code
from legato.core.importing import import_object
from legato.core.rollout import Problem, Rollout, Routes, Score, Unscorable
from legato.core.user_code import RUN, OverdueError, StoppedAtOnce, StopRequestedError, UserCode
from legato.errors import LONGEST_TEXT, InputError
from legato.rewards import scoring, verifiers
from legato.rewards.scoring import Component, WeightedSum, batched, judge, judge_all
from legato.rewards.verifiers import NumberMatch
from tests.proof.responses import response

ROLLOUT = response(Problem(prompt="?", answer="42", fields={"numbers": [1, 2]}), "42", 3)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short times, and a run that no signal has asked to end."""
    monkeypatch.setattr(user_code, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(user_code, "_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(user_code, "_RESCUE_SECONDS", 0.3)
    monkeypatch.setattr(scoring, "_LATE_SECONDS", 0.2)
    monkeypatch.setattr(scoring, "_BEAT_SECONDS", 0.05)
    yield
    RUN.forget()


# Verdicts


@pytest.mark.parametrize(
    ("verdict", "value"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (Fraction(1, 2), 0.5),
        (Decimal("0.5"), 0.5),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(2), 2.0),
        (numpy.bool_(True), 1.0),
        (numpy.array(0.5), 0.5),
        (numpy.array([0.5]), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5]), 0.5),
        (torch.tensor(True), 1.0),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
    ],
    ids=repr,
)
def test_bools_and_scalars_of_numpy_and_torch_are_scores(verdict: Any, value: float) -> None:
    assert judge(lambda _: verdict, ROLLOUT) == {"": value}
    assert judge(lambda _: {"a": verdict}, ROLLOUT) == {"a": value}


@pytest.mark.parametrize("verdicts", [numpy.array([1.0, 0.0]), torch.tensor([[1.0], [0.0]]), (v for v in (True, False))])
def test_a_batch_reward_may_return_an_array(verdicts: Any) -> None:
    assert judge_all(batched(lambda _: verdicts), [ROLLOUT] * 2) == [{"": 1.0}, {"": 0.0}]


class BrokenRepr:
    def __repr__(self) -> str:
        raise SystemExit("no repr")


class BrokenText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "verdict", [1e308, -1e308, 10**400, numpy.array([1.0, 2.0]), torch.ones(2), BrokenRepr(), {"a": BrokenRepr()}, object()]
)
def test_a_verdict_that_is_no_usable_number_is_unscorable(verdict: Any) -> None:
    for reward in (lambda _: verdict, batched(lambda _: [verdict])):
        found = judge(reward, ROLLOUT)
        assert isinstance(found, Unscorable) and found.reason.startswith("returned ")


def test_a_sum_beyond_all_bounds_is_unscorable() -> None:
    whole = WeightedSum(components={"a": Component(reward=lambda _: 1e14, weight=1e6)})
    assert isinstance(whole.score(ROLLOUT), Unscorable)


def test_long_texts_of_a_reward_are_shortened() -> None:
    def raise_long(rollout: Rollout) -> float:
        raise ValueError("x" * 5_000_000 + "the end")

    for reward in (raise_long, lambda _: Unscorable("y" * 5_000_000), lambda _: "z" * 5_000_000):
        verdict = judge(reward, ROLLOUT)
        assert isinstance(verdict, Unscorable) and len(verdict.reason) < 2 * LONGEST_TEXT
    assert "the end" in judge(raise_long, ROLLOUT).reason


# Exceptions


@pytest.mark.parametrize(
    "error",
    [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), BaseException("odd"), asyncio.CancelledError(), BrokenText()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_reward_raises_costs_its_rollout_only(error: BaseException) -> None:
    def plain(rollout: Rollout) -> float:
        raise error

    async def asynchronous(rollout: Rollout) -> float:
        raise error

    def batch(rollouts: Sequence[Rollout]) -> list[float]:
        raise error

    for reward in (plain, asynchronous, batched(batch)):
        verdicts = judge_all(reward, [ROLLOUT] * 2)
        assert len(verdicts) == 2
        for verdict in verdicts:
            assert isinstance(verdict, Unscorable) and verdict.reason.startswith(type(error).__name__)


def test_a_real_interrupt_is_not_a_fault_of_the_reward() -> None:
    def interrupted(rollout: Rollout) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return 1.0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            judge(interrupted, ROLLOUT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_second_signal_of_a_run_passes_through_the_reward() -> None:
    def stopped(rollout: Rollout) -> float:
        raise StoppedAtOnce(143)

    with pytest.raises(SystemExit):
        judge(stopped, ROLLOUT)


# Time


def sleep_long(rollout: Rollout) -> float:
    time.sleep(60)
    return 1.0


def loop_for_ever(rollout: Rollout) -> float:
    while True:
        pass


def swallow_everything(rollout: Rollout) -> float:
    for _ in range(3):
        with contextlib.suppress(BaseException):
            time.sleep(60)
    return 1.0


async def block_the_loop(rollout: Rollout) -> float:
    time.sleep(60)
    return 1.0


async def ignore_cancellation(rollout: Rollout) -> float:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


@pytest.mark.parametrize("reward", [sleep_long, loop_for_ever, block_the_loop, ignore_cancellation, batched(sleep_long)])
def test_a_reward_that_hangs_is_unscorable_after_its_time(reward: Any, impatient: None) -> None:
    start = time.monotonic()
    verdict = judge_all(reward, [ROLLOUT], timeout_seconds=0.2)
    assert verdict == [Unscorable("timed out after 0.2 s")]
    assert time.monotonic() - start < 10


def test_a_reward_that_ignores_its_interruption_is_interrupted_again(impatient: None) -> None:
    start = time.monotonic()
    judge_all(swallow_everything, [ROLLOUT], timeout_seconds=0.1)
    assert time.monotonic() - start < 10


def test_a_coroutine_that_blocks_costs_only_its_own_rollout(impatient: None) -> None:
    async def block_once(rollout: Rollout) -> float:
        if rollout.text == "block":
            time.sleep(60)
        return 1.0

    rollouts = [ROLLOUT, replace(ROLLOUT, text="block"), ROLLOUT]
    assert judge_all(block_once, rollouts, timeout_seconds=0.2) == [
        {"": 1.0},
        Unscorable("timed out after 0.2 s"),
        {"": 1.0},
    ]


def test_an_endless_generator_of_verdicts_is_not_read_to_its_end() -> None:
    [verdict] = judge_all(batched(lambda _: itertools.repeat(1.0)), [ROLLOUT])
    assert verdict == Unscorable("returned more than 1 verdicts for 1 rollouts; a sequence of as many verdicts is needed")


def test_a_reward_in_a_thread_other_than_the_main_one_has_a_deadline_too(impatient: None) -> None:
    verdicts: list[Any] = []
    thread = threading.Thread(target=lambda: verdicts.extend(judge_all(loop_for_ever, [ROLLOUT], timeout_seconds=0.2)))
    thread.start()
    thread.join(10)
    assert verdicts == [Unscorable("timed out after 0.2 s")]


@pytest.mark.parametrize("reward", [sleep_long, loop_for_ever, block_the_loop, ignore_cancellation])
def test_a_signal_ends_a_reward_that_hangs(reward: Any, impatient: None) -> None:
    RUN.ask_to_end(signal.SIGTERM)
    start = time.monotonic()
    with pytest.raises(StopRequestedError) as raised:
        judge_all(reward, [ROLLOUT])
    assert raised.value.signal is signal.SIGTERM
    assert time.monotonic() - start < 10


def test_the_run_is_saved_without_a_call_that_cannot_be_interrupted(impatient: None) -> None:
    """The main thread computes in C without the interpreter's lock, so that no handler of Python's can run."""
    rescued: list[tuple[str, int]] = []
    RUN.rescue = lambda reason, code: rescued.append((reason, code))
    before = signal.signal(signal.SIGTERM, lambda number, frame: RUN.ask_to_end(number))
    try:
        with UserCode("the reward") as code, pytest.raises(StopRequestedError):
            # A real rescue never returns, and the call waits for it.
            code._end_call = lambda: None  # type: ignore[method-assign]
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
            code.call(hashlib.pbkdf2_hmac, "sha256", b"", b"", 3_000_000)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert rescued[0] == ("stopped by SIGTERM while the reward did not return", 143)


def test_code_that_holds_the_lock_and_looks_for_signals_has_a_deadline(impatient: None) -> None:
    """`re` never lets another thread run. This pattern takes a minute."""
    start = time.monotonic()
    pattern, text = re.compile(r"(a+)+$"), "a" * 30 + "b"
    verdict = judge_all(lambda rollout: bool(pattern.match(text)), [ROLLOUT], timeout_seconds=0.2)
    assert verdict == [Unscorable("timed out after 0.2 s")]
    assert time.monotonic() - start < 10


def test_no_exception_is_raised_in_a_thread_after_its_call() -> None:
    escaped: list[BaseException] = []

    def work() -> None:
        try:
            with UserCode("the reward", 600) as code:
                code.call(int)
                # The watch thread saw the call as overdue in the moment in which it ended.
                code._interrupt(OverdueError, time.monotonic())
                sum(number for number in range(1000))
        except BaseException as error:
            escaped.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert escaped == []


HELD = """
import itertools, signal, sys
from legato.core import user_code
from legato.core.guardian import guardian

user_code.GRACE_SECONDS, user_code._RESCUE_SECONDS = 0.1, 0.1
signal.signal(signal.SIGTERM, lambda number, frame: user_code.RUN.ask_to_end(number))
user_code.RUN.guardian = guardian()
with user_code.UserCode("the reward 'mine'", float(sys.argv[1])) as code:
    print("called", flush=True)
    code.call(sum, itertools.repeat(0))  # a loop in C without end, which keeps the interpreter's lock
"""


@pytest.mark.parametrize(("seconds", "number"), [(600.0, signal.SIGTERM), (1.0, None)])
def test_code_that_holds_the_lock_for_good_is_ended_by_the_guardian(seconds: float, number: signal.Signals | None) -> None:
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "called\n"
    if number is not None:
        time.sleep(0.2)
        process.send_signal(number)
    error = process.communicate(timeout=30)[1]
    assert process.returncode == -signal.SIGKILL and time.monotonic() - start < 30
    why = "SIGTERM came" if number else "it was given 1 s"
    assert f"the reward 'mine' holds the interpreter's lock and does not return ({why})" in error


FORKED = """
import os
from legato.core.guardian import guardian

watching = guardian()
descriptor = watching.process.stdin.fileno()
child = os.fork()
if child == 0:
    try:
        os.fstat(descriptor)
        print("the child holds the pipe", flush=True)
    except OSError:
        print("the child has closed the pipe", flush=True)
    os._exit(0)
os.waitpid(child, 0)
held = os.dup(descriptor)  # as a child of C code holds it, which runs no line of Python after its fork
print("exits", flush=True)
"""


def test_a_forked_child_does_not_keep_the_guardian_and_so_the_process_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", FORKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    start = time.monotonic()
    error = process.communicate(timeout=30)[1]
    assert lines == ["the child has closed the pipe\n", "exits\n"]
    assert process.returncode == 0 and error == "" and time.monotonic() - start < 5


def test_a_file_that_hangs_or_exits_at_its_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "IMPORT_SECONDS", 0.2)
    for number, (line, reason) in enumerate(
        {"while True: pass": "timed out", "raise KeyboardInterrupt": "KeyboardInterrupt", "exit(0)": "SystemExit"}.items()
    ):
        file = tmp_path / f"mine{number}.py"
        file.write_text(line)
        with pytest.raises(InputError, match=f"could not be imported: {reason}"):
            import_object("reward", f"{file}:score")


# Harm


def test_a_reward_cannot_alter_a_rollout() -> None:
    routes = Routes(tokens=torch.zeros(1, dtype=torch.long), experts=torch.zeros(1, 1, 1, dtype=torch.long), count=2)
    rollout = replace(ROLLOUT, kept_logmass=torch.zeros(3), routes=routes)
    names = ("prompt_tokens", "tokens", "sampler_logprobs", "version", "mask", "turn", "author", "kept_logmass")
    before = {name: getattr(rollout, name).clone() for name in names}

    def alter(rollout: Rollout) -> float:
        for name in names:
            getattr(rollout, name).zero_().add_(1) if name != "mask" else rollout.mask.zero_()
        rollout.routes.experts.add_(1)
        rollout.routes.tokens.add_(1)
        rollout.problem.fields["numbers"].append(3)
        rollout.problem.fields["more"] = 1
        return 1.0

    async def alter_later(rollout: Rollout) -> float:
        return alter(rollout)

    for reward in (alter, alter_later, batched(lambda rollouts: [alter(each) for each in rollouts])):
        assert judge(reward, rollout) == {"": 1.0}
    assert all(torch.equal(getattr(rollout, name), value) for name, value in before.items())
    assert int(rollout.routes.experts.sum()) == int(rollout.routes.tokens.sum()) == 0
    assert rollout.problem.fields == {"numbers": [1, 2]}


def test_the_second_component_sees_what_the_first_saw() -> None:
    def alter(rollout: Rollout) -> float:
        rollout.tokens.fill_(9)
        return 1.0

    whole = WeightedSum(
        components={"a": Component(reward=alter), "b": Component(reward=lambda rollout: float(rollout.tokens.sum()))}
    )
    score = whole.score(ROLLOUT)
    assert isinstance(score, Score) and score.components["b"] == 0.0


def test_settings_of_the_process_are_put_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def meddle(rollout: Rollout) -> float:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(torch.get_num_threads() + 1)
        os.chdir(tmp_path)
        print("heard")
        sys.stdout.close()
        sys.stderr = None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return 1.0

    threads, folder, handler = torch.get_num_threads(), os.getcwd(), signal.getsignal(signal.SIGTERM)
    outputs = sys.stdout, sys.stderr
    assert judge(meddle, ROLLOUT) == {"": 1.0}
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert (torch.get_num_threads(), os.getcwd(), signal.getsignal(signal.SIGTERM)) == (threads, folder, handler)
    assert (sys.stdout, sys.stderr) == outputs
    print("still heard")
    assert capfd.readouterr().out == "heard\nstill heard\n"


def test_a_closed_descriptor_of_the_output_is_not_given_to_the_next_file(tmp_path: Path) -> None:
    kept = os.dup(1)
    try:
        assert judge(lambda _: float(os.close(1) is None), ROLLOUT) == {"": 1.0}
        with (tmp_path / "file").open("w") as file:
            assert file.fileno() > 2
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_a_fork_in_a_reward_makes_no_second_trainer(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def fork(rollout: Rollout) -> float:
        os.fork()
        return 1.0

    def fork_and_raise(rollout: Rollout) -> float:
        if os.fork() == 0:
            raise SystemExit(3)
        return 1.0

    async def fork_later(rollout: Rollout) -> float:
        return fork(rollout)

    for reward in (fork, fork_and_raise, fork_later):
        assert judge(reward, ROLLOUT) == {"": 1.0}
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
    for _ in range(3):
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert log.read_text().split() == [str(os.getpid())] * 3


# Rewards of Legato's own


class _Subclass(NumberMatch):
    """A user's reward that inherits from a harmless one and alters the rollout."""

    def __call__(self, rollout: Rollout) -> float:
        rollout.tokens.zero_()
        return 1.0


def test_harmless_rewards_get_the_rollout_itself_and_subclasses_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    monkeypatch.setattr(scoring, "copy_rollout", lambda rollout: copied.append(rollout) or replace(rollout))
    assert judge_all(NumberMatch(), [ROLLOUT, ROLLOUT]) == [{"": 1.0}, {"": 1.0}]
    assert not copied
    monkeypatch.undo()
    before = ROLLOUT.tokens.clone()
    assert judge(_Subclass(), ROLLOUT) == {"": 1.0}
    assert torch.equal(ROLLOUT.tokens, before)


def test_a_harmless_reward_that_raises_costs_its_rollout_only(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(ROLLOUT, text="7")
    monkeypatch.setattr(verifiers, "_last_number", lambda text: "42" if text == "42" else 1 / 0)
    right, failed, also_right = judge_all(NumberMatch(), [ROLLOUT, broken, ROLLOUT])
    assert right == also_right == {"": 1.0}
    assert isinstance(failed, Unscorable) and "ZeroDivisionError" in failed.reason
