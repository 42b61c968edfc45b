"""The command line as a person uses it."""

import resource
import subprocess
import sys

import pytest

from legato.algorithms.catalogue import algorithm_names


def legato_command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {"COLUMNS": "140", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-m", "legato.cli.main", *words], capture_output=True, text=True, check=False, env=environment
    )


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    monkeypatch.setattr("legato.cli.explain.console.width", 200)
    return capsys


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_is_explained(name: str, wide: pytest.CaptureFixture[str]) -> None:
    from legato.cli.explain import explain_one

    explain_one(name, [])
    text = wide.readouterr().out
    for words in (name, "J = ", "objective.ratio", "aggregate", "Beware"):
        assert words in text


def test_two_algorithms_stand_side_by_side() -> None:
    told = legato_command("explain", "gspo", "grpo")
    assert told.returncode == 0
    rows = [line for line in told.stdout.splitlines() if "objective.trust.clip.low" in line]
    assert len(rows) == 1
    assert "0.0003" in rows[0]
    assert "0.2" in rows[0]


def test_a_change_is_shown_as_a_deviation() -> None:
    told = legato_command("explain", "gspo", "--set", "objective.trust.clip.high=0.2")
    assert "objective.trust.clip.high: 0.0004 -> 0.2" in told.stdout
    assert "never clips" in told.stdout


def test_all_algorithms_are_listed() -> None:
    told = legato_command("explain")
    assert all(name in told.stdout for name in algorithm_names())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("explain", "gspoo"), "did you mean 'gspo'?"),
        (("explain", "gspo", "--set", "objective.trust.clip.low"), "path=value is"),
        (("explain", "gspo", "--set", "objective.trust.clip.low=-1"), "a number >= 0 is"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: tuple[str, ...], message: str) -> None:
    told = legato_command(*words)
    assert told.returncode == 2
    assert message in told.stderr
    assert len(told.stderr.strip().splitlines()) == 1


def test_help_comes_at_once() -> None:
    """The promise is half a second on a quiet machine: the processor time of the best of three."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    best = float("inf")
    for _ in range(3):
        start = spent()
        assert legato_command("--help").returncode == 0
        best = min(best, spent() - start)
    assert best < 0.5
