"""What is asked for, and every way to ask for it wrongly: one sentence, exit code 2, nothing written."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from legato.compare import processes
from legato.compare.definition import Definition, from_arguments, from_file
from legato.compare.jobs import differences, jobs
from legato.compare.processes import Machine
from legato.run.interrupt import ENDING
from tests.proof import verdicts
from tests.proof.command import Command, assert_refused
from tests.proof.comparisons import definition
from tests.proof.pages import numbers

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes/tiny.toml")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(monkeypatch, capsys)


def asked(
    *arguments: str, arms: list[str] | None = None, seeds: str | None = None, sweep: list[str] | None = None
) -> Definition:
    return from_arguments(arguments, arms=arms or ["grpo", "gspo"], seeds=seeds, sweep=sweep or [], unequal=False)


def test_a_command_line_becomes_a_definition() -> None:
    result = asked(
        RECIPE,
        "training.steps=7",
        arms=("gspo", "wide algorithm=gspo algorithm.objective.trust.clip.low=2e-3"),
        seeds="0-2,7",
        sweep=("training.lr=1e-4,3e-4", "training.anchor=recompute,sampler"),
    )
    assert result.recipes == (Path(RECIPE),)
    assert result.options == {"training.steps": 7}
    assert result.arms["gspo"] == {"algorithm": "gspo"}
    assert result.arms["wide"] == {"algorithm": "gspo", "algorithm.objective.trust.clip.low": 2e-3}
    assert result.seeds == (0, 1, 2, 7)
    assert result.sweep == {"training.lr": (1e-4, 3e-4), "training.anchor": ("recompute", "sampler")}


def test_a_file_says_the_same_as_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "comparison.toml"
    file.write_text(
        f"""
        recipe = "{RECIPE}"
        seeds = [0, 1]
        [options]
        training.steps = 7
        [arms.gspo]
        algorithm = "gspo"
        [arms.wide]
        algorithm.name = "gspo"
        algorithm.objective.trust.clip.low = 2e-3
        [sweep]
        training.lr = [1e-4, 3e-4]
        """
    )
    typed = asked(
        RECIPE,
        "training.steps=90",
        arms=("gspo", "wide algorithm=gspo algorithm.objective.trust.clip.low=2e-3"),
        seeds="0,1",
        sweep=("training.lr=1e-4,3e-4",),
    )
    from_toml = from_arguments([str(file), "training.steps=90"], arms=[], seeds=None, sweep=[], unequal=False)
    file_jobs, typed_jobs = jobs(from_toml, tmp_path), jobs(typed, tmp_path)
    assert [job.name for job in file_jobs] == [job.name for job in typed_jobs]
    assert [job.resolved.values for job in file_jobs] == [job.resolved.values for job in typed_jobs]
    assert file_jobs[0].name == "gspo-lr0.0001-seed0"
    assert from_file(file, {}).options == {"training.steps": 7}


def test_every_run_has_its_seed_its_folder_and_all_steps(tmp_path: Path) -> None:
    planned = jobs(asked(RECIPE, "training.steps=90", seeds="3,5"), tmp_path)
    assert [(job.arm, job.resolved.config.training.seed) for job in planned] == [
        ("grpo", 3),
        ("gspo", 3),
        ("grpo", 5),
        ("gspo", 5),
    ]
    assert all(job.resolved.config.evaluation.target is None for job in planned)  # the recipe has one
    assert {job.resolved.config.output.directory for job in planned} == {str(tmp_path / "runs")}
    assert differences(planned) == []


def test_settings_of_an_algorithm_are_no_difference_between_arms(tmp_path: Path) -> None:
    planned = jobs(definition(arms={"gspo": {"algorithm": "gspo"}, "dapo": {"algorithm": "dapo"}}), tmp_path)
    assert planned[1].resolved.config.task.resampling == "dynamic"
    assert differences(planned) == []


@pytest.mark.parametrize(
    "change",
    [
        {"training.steps": 9},
        {"training.updates_per_step": 1},
        {"rollouts.samples_per_prompt": 8},
        {"task.left_digits": 2},
        {"policy.tiny.hidden": 64},
        {"reward.kind": f"{verdicts.__file__}:early"},
        {"evaluation.temperature": 0.5},
    ],
)
def test_arms_with_other_problems_weights_or_budgets_are_told_apart(change: dict[str, object], tmp_path: Path) -> None:
    planned = jobs(definition(arms={"one": {}, "other": change}), tmp_path)
    path = next(iter(change))
    sentences = differences(planned)
    assert len(sentences) == 1
    assert sentences[0].startswith(f"{path} is ") and "for one (" in sentences[0] and "for other (override" in sentences[0]


def test_threads_that_were_asked_for_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Machine(parallel=1).threads == Machine(parallel=500).threads == 3
    assert Machine().environment(0)["OMP_NUM_THREADS"] == "3"


def test_the_step_of_a_running_run_is_reported_now_and_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker that logs a step as a run does, and answers once that was reported."""
    reported = tmp_path / "reported"
    script = (
        "import json, pathlib, sys, time\n"
        "log = pathlib.Path(json.loads(sys.stdin.readline())['log'])\n"
        "log.write_text('step  7/20  reward 0.5  left 3 s\\n')\n"
        f"while not pathlib.Path({str(reported)!r}).exists(): time.sleep(0.02)\n"
        "print(0, flush=True)\n"
    )
    popen = processes.subprocess.Popen
    monkeypatch.setattr(processes, "_PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(processes.subprocess, "Popen", lambda words, **rest: popen([words[0], "-c", script], **rest))
    messages: list[str] = []

    def say(text: str) -> None:
        messages.append(text)
        reported.touch()

    task = processes.Task(name="one", words=("train",), log=tmp_path / "log")
    code = processes.run_all([task], Machine(), begun=lambda task: None, ended=lambda end: None, say=say)
    (progress,) = messages
    assert code == 0 and "one: " in progress and numbers(progress) == [7, 20]


@pytest.mark.parametrize("number", ENDING)
def test_signals_are_passed_on_to_the_runs(number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker that ignores SIGUSR2 until its run begins, notes it then, and ends as a run does at a signal."""
    script = (
        "import os, signal, sys, time\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "line = sys.stdin.readline()\n"
        f"saved = open({str(tmp_path / 'saved')!r}, 'w')\n"
        "signal.signal(signal.SIGUSR2, lambda number, frame: print('saved', file=saved, flush=True))\n"
        "def end(number, frame):\n"
        "    print(128 + number, flush=True)\n"
        "    sys.exit()\n"
        f"for number in {[int(each) for each in ENDING]}: signal.signal(number, end)\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "while True: time.sleep(0.02)\n"
    )
    popen = processes.subprocess.Popen
    monkeypatch.setattr(processes.subprocess, "Popen", lambda words, **rest: popen([words[0], "-c", script], **rest))
    sent: list[signal.Signals] = []

    def send_in_turn(seconds: float) -> None:
        time.sleep(0.01)
        if not sent and (tmp_path / "ready").exists():
            sent.append(signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR2)
        elif len(sent) == 1 and (tmp_path / "saved").read_text() == "saved\n":
            sent.append(number)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=send_in_turn, monotonic=time.monotonic))
    ended: list[processes.EndedRun] = []
    tasks = [processes.Task(name=name, words=("train",), log=tmp_path / "log") for name in ("one", "two")]
    code = processes.run_all(tasks, Machine(), begun=lambda task: None, ended=ended.append, say=lambda text: None)
    assert code == 128 + number
    assert [(end.name, end.code, end.interrupted) for end in ended] == [("one", 128 + number, True)]


def test_cores_and_gpus_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert Machine(parallel=1).threads == cores
    assert Machine(parallel=10 * cores).threads == 1
    machine = Machine(parallel=4, gpus=("0", "3"))
    assert [machine.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == ["0", "3", "0", "3"]
    assert machine.environment(0)["OMP_NUM_THREADS"] == str(machine.threads)


TWO = ("--arm", "grpo", "--arm", "gspo")


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ((), ["no arm", "no sweep"]),
        (("--arm", "gspo"), ["gspo", "no sweep"]),
        (("--arm", "gspo", "--arm", "gspo"), ["--arm", "gspo", "twice"]),
        (("--arm", "gspo", "--arm", "nonesuch"), ["'nonesuch'", "algorithm"]),
        (("--arm", "gspo", "--arm", "a/b algorithm=grpo"), ["'a/b'"]),
        (
            ("--arm", "gspo", "--arm", "x algorithm=grop"),
            ["arm x", "algorithm.name", "'grop'"],
        ),
        (("--arm", "gspo", "--arm", "x training.lrr=1"), ["arm x", "training.lrr"]),
        (("--arm", "gspo", "--arm", "x 'open"), ["'open"]),
        (("--arm", "gspo", "--arm", "x word"), ["'word'", "path=value"]),
        ((*TWO, "--seeds", "a"), ["--seeds", "'a'", "ranges"]),
        ((*TWO, "--seeds", "3-1"), ["--seeds", "'3-1'"]),
        ((*TWO, "--seeds", "1,1"), ["seeds", "[1, 1]", "twice"]),
        ((*TWO, "--sweep", "training.lr"), ["--sweep", "'training.lr'", "path=value,value"]),
        ((*TWO, "--sweep", "training.lr=1e-3,1e-3"), ["training.lr", "different values"]),
        ((*TWO, "--sweep", "training.seed=1,2"), ["sweep", "training.seed"]),
        ((*TWO, "output.name=x"), ["options", "output.name"]),
        ((*TWO, "evaluation.target=0.5"), ["options", "evaluation.target"]),
        (
            ("--arm", "grpo", "--arm", "x training.lr=1", "--sweep", "training.lr=1,2"),
            ["training.lr", "swept", "arm x"],
        ),
        ((*TWO, "--gpus", "0;1"), ["--gpus", "'0;1'", "numbers"]),
        (("--arm", "gspo", "--arm", "rloo"), ["training.updates_per_step", "4 for gspo", "1 for rloo"]),
        ((*TWO, "--out", "a=b"), ["a=b", "equals sign"]),
        (("--arm", "gspo", "--sweep", "reward.kind=a/b.py:x,a_b.py:x"), ["two runs", "gspo-kinda_b.py_x-seed0"]),
        ((*TWO, "no-such.toml"), ["no-such.toml", "exist"]),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_is_written(
    words: tuple[str, ...], fragments: list[str], command: Command, tmp_path: Path
) -> None:
    assert_refused(command("compare", "--out", "here", *words), *fragments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("arms = 3", ["arms", "3", "table"]),
        ("arm.a = {}\n[arms.b]", ["'arm'", "key"]),
        ("[arms]\na = 'grpo'", ["arms.a", "'grpo'", "table"]),
        ("seeds = 3\n[arms.a]\n[arms.b]", ["seeds", "3", "list"]),
        ("seeds = [true]\n[arms.a]\n[arms.b]", ["seed", "true", "whole number"]),
        ("seeds = []\n[arms.a]\n[arms.b]", ["no seed"]),
        ("recipe = 4\n[arms.a]\n[arms.b]", ["recipe", "4", "TOML"]),
        ("[arms.a]\n[sweep]\ntraining.lr = 1e-3", ["sweep.training.lr", "0.001", "list"]),
        ("unequal = 1\n[arms.a]\n[arms.b]", ["unequal", "1", "true or false"]),
        ("[arms.a]\n[arms.b", ["comparison.toml", "TOML"]),
    ],
)
def test_a_mistake_in_a_comparison_file_is_refused(
    text: str, fragments: list[str], command: Command, tmp_path: Path
) -> None:
    (tmp_path / "comparison.toml").write_text(text)
    assert_refused(command("compare", "comparison.toml", "--out", "here"), *fragments)


def test_a_file_and_options_do_not_both_name_arms(command: Command, tmp_path: Path) -> None:
    (tmp_path / "comparison.toml").write_text("[arms.a]\n[arms.b]\n")
    assert_refused(command("compare", "comparison.toml", *TWO), "comparison.toml", "arms")


def test_a_folder_of_something_else_is_left_alone(command: Command, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.txt").write_text("mine")
    assert_refused(command("compare", *TWO, "--out", "here"), "here", "no comparison")
    assert [each.name for each in (tmp_path / "here").iterdir() if each.name != ".lock"] == ["thesis.txt"]
    assert_refused(command("compare", *TWO, "--out", "here/thesis.txt"), "cannot create here/thesis.txt")
