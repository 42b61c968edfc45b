"""Mathematical equality, and answers designed to make the comparison hang."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from legato.core.boxed import last_boxed
from legato.core.rollout import Problem, Rollout, Unscorable
from legato.rewards.math import WORKER, MathVerify
from legato.rewards.scoring import judge_all
from legato.workers.pool import shared
from tests.proof.responses import response

pytest.importorskip("math_verify")

HANGS = [r"$9^{9^{9^9}}$", r"$((999999)!)!$", r"$\binom{10^9}{5\cdot 10^8}$", r"\boxed{2^{2^{100}}}"]


def make_rollout(text: str, answer: str | None = "42") -> Rollout:
    return response(Problem(prompt="?", answer=answer), text)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"so it is \boxed{0.5}", "1/2", 1),
        (r"so it is $\frac{1}{2}$.", "0.5", 1),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        ("the answer is 1,234", "1234", 1),
        (r"\boxed{x=5}", "5", 1),
        (r"$(1, 2)$", "(1,2)", 1),
        (r"$\{3, 1, 2\}$", r"\{1,2,3\}", 1),
        (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
        ("Evelyn", "Evelyn", 1),
        (r"\boxed{41}", "42", 0),
        (r"first \boxed{42}, no: \boxed{41}", "42", 0),
        (r"\frac{1}{2}", "2", 0),
        ("I do not know", "42", 0),
        ("", "42", 0),
        (r"\boxed{\frac{}", "42", 0),
        ("(" * 3000, "42", 0),
        ("\ud800\0\\boxed{", "42", 0),
    ],
)
def test_mathematically_equal_answers_score_1_and_others_0(text: str, answer: str, expected: float) -> None:
    assert MathVerify(seconds=60)(make_rollout(text, answer)) == expected


@pytest.mark.parametrize(("answer", "reason"), [(None, "no answer"), ("###", "'###' cannot be read"), (" ", "empty")])
def test_a_reference_answer_that_cannot_be_read_is_unscorable(answer: str | None, reason: str) -> None:
    verdict = MathVerify(seconds=60)(make_rollout("42", answer))
    assert isinstance(verdict, Unscorable)
    assert reason in verdict.reason


@pytest.mark.parametrize("text", HANGS)
def test_an_answer_that_hangs_times_out_and_the_next_is_scored(text: str) -> None:
    assert MathVerify(seconds=60)(make_rollout("42")) == 1
    start = time.monotonic()
    assert MathVerify(seconds=0.5)(make_rollout(text)) == Unscorable("timed out after 0.5 s")
    assert time.monotonic() - start < 10
    assert MathVerify(seconds=60)(make_rollout("$43$")) == 0


def test_answers_are_checked_in_parallel_and_their_order_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        """Answers questions two by two: with one question at a time none is answered."""

        both = threading.Barrier(2, timeout=5)

        def ask(self, answer: str, response: str, *, seconds: float) -> str:
            self.both.wait()
            return "right" if response.endswith("7") else "wrong"

    monkeypatch.setattr("legato.rewards.math.shared", lambda function: Pool())
    verdicts = judge_all(MathVerify(), [make_rollout(f"${number}$ 1{number}") for number in range(20)])
    assert verdicts == [{"": float(number % 10 == 7)} for number in range(20)]


def test_a_long_answer_is_equal_to_itself_at_once() -> None:
    long = "+".join(f"x_{{{n}}}^{{{n}}}" for n in range(2000))
    verify = MathVerify(seconds=0.001)
    assert verify(make_rollout(long, long)) == 1
    assert verify(make_rollout(rf"therefore \boxed{{{long}}}", long)) == 1
    assert verify(make_rollout(HANGS[0], HANGS[0])) == 1
    assert "longest = 4096" in verify(make_rollout("5", long)).reason


def test_only_the_end_of_a_response_is_read() -> None:
    text = r"\boxed{42}" + " and so on" * 60
    assert MathVerify(seconds=60, longest=1000)(make_rollout(text, "42.0")) == 1
    assert MathVerify(seconds=60, longest=500)(make_rollout(text, "42.0")) == 0


def test_threads_score_while_others_hang() -> None:
    texts = [HANGS[0], "$84/2$", "$41$", HANGS[1], "$42.0$", r"$\sqrt{1764}$"]
    MathVerify(seconds=60)(make_rollout("$1$"))
    with ThreadPoolExecutor(6) as threads:
        verdicts = list(threads.map(lambda text: MathVerify(seconds=3)(make_rollout(text)), texts))
    late = Unscorable("timed out after 3 s")
    assert verdicts == [late, 1, 0, late, 1, 1]


def test_math_verify_works_off_the_main_thread_and_after_its_worker_was_killed() -> None:
    verdicts: list[object] = []
    verify = MathVerify(seconds=60)
    verify(make_rollout("$1$"))
    for process in shared(WORKER).processes:
        os.kill(process, signal.SIGKILL)
    thread = threading.Thread(target=lambda: verdicts.append(verify(make_rollout("$42.0$"))))
    thread.start()
    thread.join()
    assert verdicts == [1]


CHILD = """
import multiprocessing, sys
from legato.workers.pool import shared
from legato.rewards.math import WORKER

def work(queue):
    queue.put(shared(WORKER).ask("1/2", "$0.5$", seconds=60))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(queue.get())
    child.join()
"""


def test_math_verify_works_in_a_spawned_child(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert (process.stdout, process.stderr) == ("right\n", "")


def test_the_math_worker_does_not_load_torch() -> None:
    program = """
import sys
from legato.rewards.math_worker import compare, prepare
prepare()
print(compare("1/2", "$0.5$"), sorted({"torch", "numpy"} & set(sys.modules)))
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert process.stdout == "right []\n"


def test_without_the_package_it_says_what_to_install() -> None:
    program = """
import sys
sys.modules["math_verify"] = None
from legato.rewards.math import MathVerify
try:
    MathVerify()
except ValueError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert "pip install 'legato[math]'" in process.stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\end{pmatrix}"),
        (r"\boxed {7}", "7"),
        (r"so $\boxed 5$ it is", "5"),
        (r"\fbox{8}", "8"),
        (r"\boxed{1", None),
        (r"\boxed{}", None),
        (r"\boxedness{3}", None),
        ("5", None),
        (r"\boxed", None),
        (r"\boxed{" * 100_000, None),
    ],
)
def test_the_last_box_is_read_with_its_braces_balanced(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected
