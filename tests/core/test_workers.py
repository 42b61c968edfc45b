"""Functions in processes that can be killed: hangs, deaths, threads, children, and nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from legato.workers.pool import DiedError, RefusedError, TimedOutError, Workers, shared

MADE: list[Workers] = []


def workers(function: str, **options: int) -> Workers:
    MADE.append(Workers(function, **options))
    return MADE[-1]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for pool in MADE:
        left = pool.processes
        pool.close()
        assert not any(os.path.exists(f"/proc/{process}") for process in left)
    MADE.clear()


def test_a_worker_answers_several_calls() -> None:
    add = workers("operator:add")
    assert add.processes == []
    assert add.ask(2, 3, seconds=5) == 5
    first = add.processes
    assert add.ask("é\ud800", "b\n", seconds=5) == "é\ud800b\n"
    assert add.processes == first
    assert len(first) == 1


def test_a_hang_is_ended_by_killing_its_worker_and_the_next_question_is_answered() -> None:
    nap = workers("time:sleep")
    assert nap.ask(0, seconds=5) is None
    [process] = nap.processes
    start = time.monotonic()
    with pytest.raises(TimedOutError, match=r"no reply after 0\.3 s"):
        nap.ask(60, seconds=0.3)
    assert time.monotonic() - start < 5
    assert not os.path.exists(f"/proc/{process}")
    assert nap.ask(0, seconds=5) is None


def test_an_exception_in_the_function_is_reported_and_the_worker_stays() -> None:
    divide = workers("operator:truediv")
    with pytest.raises(RefusedError, match="ZeroDivisionError: division by zero"):
        divide.ask(1, 0, seconds=5)
    process = divide.processes
    with pytest.raises(RefusedError, match="TypeError"):
        divide.ask(1, seconds=5)
    assert divide.ask(1, 2, seconds=5) == 0.5
    assert divide.processes == process


def test_a_value_that_is_no_json_is_refused() -> None:
    with pytest.raises(RefusedError, match="not JSON serializable"):
        workers("builtins:complex").ask(1, 2, seconds=5)


def test_a_worker_killed_while_idle_is_replaced() -> None:
    add = workers("operator:add")
    add.ask(1, 1, seconds=5)
    [process] = add.processes
    os.kill(process, signal.SIGKILL)
    assert add.ask(2, 2, seconds=5) == 4
    assert process not in add.processes


def test_all_workers_killed_at_once_are_replaced() -> None:
    add = workers("operator:add", count=3)
    with ThreadPoolExecutor(3) as threads:
        for _ in range(5):
            list(threads.map(lambda n: add.ask(n, n, seconds=20), range(30)))
            for process in add.processes:
                os.kill(process, signal.SIGKILL)
            assert add.ask(2, 2, seconds=20) == 4


def test_a_worker_killed_in_the_middle_of_a_question_is_asked_again() -> None:
    nap = workers("time:sleep")
    nap.ask(0, seconds=5)
    [process] = nap.processes
    threading.Timer(0.2, os.kill, (process, signal.SIGKILL)).start()
    assert nap.ask(0.5, seconds=10) is None


def test_a_question_that_ends_its_worker_is_put_twice_and_no_more() -> None:
    leave = workers("os:_exit")
    with pytest.raises(DiedError, match="two workers ended in the middle of a question, the last by exit status 3"):
        leave.ask(3, seconds=5)
    with pytest.raises(DiedError, match="signal SIGABRT"):
        workers("os:abort").ask(seconds=5)
    assert leave.processes == []


@pytest.mark.parametrize(
    ("function", "message"),
    [("nowhere_at_all:f", "No module named 'nowhere_at_all'"), ("operator:ad", "has no attribute 'ad'")],
)
def test_a_missing_function_is_reported(function: str, message: str) -> None:
    with pytest.raises(DiedError, match=message):
        workers(function).ask(seconds=5)


def test_many_threads_share_few_workers_and_each_gets_its_own_answer() -> None:
    add = workers("operator:add", count=2)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda n: add.ask(n, 1, seconds=20), range(200))) == list(range(1, 201))
    assert len(add.processes) <= 2


def test_hangs_in_some_threads_do_not_disturb_the_others() -> None:
    nap = workers("time:sleep", count=2)

    def ask(seconds: float) -> str:
        try:
            nap.ask(seconds, seconds=1)
        except TimedOutError:
            return "timed out"
        return "slept"

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, [30, 0, 30, 0, 0, 0])) == ["timed out", "slept"] * 2 + ["slept"] * 2


def test_a_worker_is_replaced_after_its_questions() -> None:
    pid = workers("os:getpid", questions_per_worker=2)
    first, second, third = (pid.ask(seconds=5) for _ in range(3))
    assert first == second != third


def test_a_worker_sees_no_secrets_loads_no_torch_and_writes_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    look = workers("builtins:eval")
    assert "SECRET_TOKEN" not in look.ask("dict(__import__('os').environ)", seconds=5)
    loaded = look.ask("sorted(__import__('sys').modules)", seconds=5)
    assert "legato.workers.pool" in loaded
    assert not {"torch", "numpy", "legato.core.rollout"} & set(loaded)
    with pytest.raises(RefusedError, match="File too large"):
        look.ask(f"open({str(tmp_path / 'file')!r}, 'w', buffering=1).write(chr(10))", seconds=5)
    with pytest.raises(RefusedError, match="MemoryError"):
        look.ask("len(bytearray(8 * 2**30))", seconds=5)


def test_an_interrupted_question_does_not_leave_its_reply_for_the_next() -> None:
    program = """
import signal
from legato.workers.pool import Workers
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
nap, answers = Workers("builtins:eval", count=1), []
nap.ask("0", seconds=30)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    nap.ask("__import__('time').sleep(1) or 'late'", seconds=30)
except KeyboardInterrupt:
    answers.append("interrupted")
answers.append(nap.ask("'next'", seconds=30))
print(answers)
"""
    assert run(program) == "['interrupted', 'next']"


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.stdout.strip()


CHILDREN = """
import multiprocessing, os, sys, threading
from legato.workers.pool import shared

def own():
    # Whose worker answered: after a fork it must not be the parent's.
    return shared("os:getppid").ask(seconds=30) == os.getpid()

def ask(queue):
    queue.put(own())

def main():
    print(own())
    for method, daemon in (("spawn", False), ("spawn", True), ("fork", False)):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=ask, args=(queue,), daemon=daemon)
        child.start()
        print(method, queue.get())
        child.join()
        assert child.exitcode == 0
    thread = threading.Thread(target=lambda: print("thread", own()))
    thread.start()
    thread.join()
    print(own(), len(shared("os:getppid").processes))

if __name__ == "__main__":
    main()
"""


def test_children_and_threads_have_workers_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert done.stderr == ""
    assert done.stdout.split("\n") == ["True", "spawn True", "spawn True", "fork True", "thread True", "True 1", ""]


def test_a_fork_while_another_thread_holds_the_lock_does_not_lock_the_child() -> None:
    program = """
import os, threading, time
from legato.workers.pool import shared
pool = shared("operator:add")
pool.ask(1, 1, seconds=30)
held = threading.Event()
def hold():
    with pool._changed:
        held.set()
        time.sleep(1)
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    print(pool.ask(20, 22, seconds=30), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(pool.ask(1, 2, seconds=30))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "42\n3\n"


@pytest.mark.parametrize("how", ["pass", "import os; os.kill(os.getpid(), 9)", "import os; os._exit(0)", "1 / 0"])
def test_no_worker_outlives_the_asker_however_it_ends(how: str) -> None:
    program = f"""
from legato.workers.pool import shared
print(shared("os:getpid").ask(seconds=30), flush=True)
{how}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert has_ended(int(done.stdout), within=10)


def test_a_worker_that_hangs_when_its_asker_dies_ends_by_its_own_cpu_limit() -> None:
    """A loop that holds the interpreter's lock for good: only the kernel can end it."""
    program = """
import os, threading
from legato.workers.pool import Workers
spin = Workers("builtins:eval")
print(spin.ask("__import__('os').getpid()", seconds=30), flush=True)
threading.Timer(0.3, os._exit, (0,)).start()
spin.ask("10 ** 10 ** 10", seconds=1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert has_ended(int(done.stdout), within=60)


def has_ended(process: int, within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            with open(f"/proc/{process}/stat") as file:
                # In a container nobody may reap the orphan; a zombie has ended.
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_closed_workers_say_so() -> None:
    add = workers("operator:add")
    add.ask(1, 1, seconds=5)
    add.close()
    with pytest.raises(DiedError, match="closed"):
        add.ask(1, 1, seconds=5)


def test_the_workers_of_a_function_are_shared() -> None:
    assert shared("operator:mul") is shared("operator:mul")
    assert shared("operator:mul") is not shared("operator:add")
