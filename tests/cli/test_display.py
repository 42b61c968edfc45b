"""The displays during training and the end screen."""

import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from legato.cli.display import LiveDisplay, PlainDisplay, end_screen, for_terminal, sparkline, time_left
from legato.pages.summary import Evaluation, Samples, Summary, wilson_interval

METRICS = {
    "reward/mean": 0.8123,
    "accuracy/mean": 0.79,
    "clip/sequences": 0.141,
    "entropy/mean": 0.52,
    "length/mean": 4.24,
    "tokens/per_second": 5123.4,
    "time/step_seconds": 2.0,
}
EVALUATION = {"eval/accuracy_sampled": 0.81, "eval/accuracy_greedy": 0.88}
HOSTILE = "[bold red]x[/bold red] \x1b[2J\x07\u202e [link=file:///etc]"


def terminal(width: int = 80, height: int = 24, encoding: str = "utf-8") -> tuple[Console, io.TextIOWrapper]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    return Console(file=stream, force_terminal=True, width=width, height=height, highlight=False, color_system=None), stream


def text_of(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(stream.encoding)


def test_a_plain_step_is_one_line_with_everything() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.step(12, 400, METRICS, EVALUATION, 80.0)
    assert stream.getvalue() == (
        "step  12/400  reward 0.812  accuracy 79.0%  held-out sampled 81.0%  held-out greedy 88.0%  clipped 14.1%"
        "  entropy 0.520  length 4.2  tokens/s 5,123  left 1 min 20 s\n"
    )


def test_time_left_is_estimated_if_none_is_given() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.step(1, 4, METRICS, None, None)
    display.step(2, 4, METRICS | {"time/step_seconds": 4.0}, None, None)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("left 6 s")
    assert second.endswith("left 6 s")
    assert "held-out" not in first


def test_a_number_that_is_missing_or_not_finite_breaks_no_line() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.step(1, 2, {"reward/mean": math.nan, "time/step_seconds": math.inf}, {}, None)
    assert stream.getvalue() == "step 1/2  reward -\n"


def test_a_warm_up_prints_every_tenth() -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for step in range(1, 206):
        display.warm_up(step, 205, 1.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[-1] == "warm-up 205/205  loss 1.000"


def test_an_ascii_log_escapes_other_characters() -> None:
    _, stream = terminal(encoding="ascii")
    display = PlainDisplay(stream)
    display.start("née", ["∑ of parts"])
    assert text_of(stream) == "n\\xe9e\n  \\u2211 of parts\n"


def test_for_terminal_picks_the_display() -> None:
    console, _ = terminal()
    assert isinstance(for_terminal(console), LiveDisplay)
    assert isinstance(for_terminal(Console(file=io.StringIO())), PlainDisplay)
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(for_terminal(dumb), PlainDisplay)


@pytest.mark.parametrize("width", [8, 20, 40, 80, 200])
def test_the_live_panel_fits_any_width(width: int) -> None:
    console, stream = terminal(width)
    display = LiveDisplay(console)
    display.step(12, 400, METRICS, EVALUATION, 80.0)
    console.print(display)
    lines = text_of(stream).splitlines()
    assert max(map(len, lines)) <= width
    assert "training" in lines[0]


def test_the_live_panel_shows_all_numbers_and_messages() -> None:
    console, stream = terminal(100)
    display = LiveDisplay(console)
    display.start("gspo on arithmetic", ["a note"])
    display.warm_up(3, 10, 1.25)
    for step in range(1, 9):
        display.step(step, 10, METRICS | {"accuracy/mean": step / 10}, EVALUATION if step == 2 else None, 80.0)
    display.message(f"saved {HOSTILE}")
    display.close()
    text = text_of(stream)
    for words in (
        "gspo on arithmetic",
        "a note",
        "training 8/10",
        "reward 0.812",
        "clipped 14.1%",
        "entropy 0.520",
        "length 4.2",
    ):
        assert words in text, words
    for words in ("tokens/s 5,123", "held-out sampled 81.0%", "held-out greedy 88.0%", "left 1 min", "▁▂▃▄▅▅▆▇"):
        assert words in text, words
    assert r"saved [bold red]x[/bold red] \x1b[2J\x07\u202e [link=file:///etc]" in text.replace("\n", "")


def test_the_live_panel_in_ascii() -> None:
    console, stream = terminal(80, encoding="ascii")
    display = LiveDisplay(console)
    display.step(1, 2, METRICS, None, None)
    console.print(display)
    assert "accuracy %" not in text_of(stream)
    assert text_of(stream).splitlines()[-1].startswith("accuracy *") or "#" in text_of(stream).splitlines()[-1]


def test_closing_twice_or_unstarted_is_harmless() -> None:
    console, stream = terminal()
    display = LiveDisplay(console)
    display.close()
    display.close()
    assert text_of(stream).strip() == ""


@pytest.mark.parametrize(
    ("durations", "remaining", "expected"),
    [
        ([], 10, None),
        ([2.0], 10, 20.0),
        ([1.0, 1.0, 4.0], 2, 4.0),
        ([math.nan, math.inf, -1.0, 3.0], 2, 6.0),
        ([100.0] * 5 + [1.0] * 20, 7, 7.0),
        ([], 0, 0.0),
        ([5.0], -1, 0.0),
    ],
)
def test_the_time_left(durations: list[float], remaining: int, expected: float | None) -> None:
    assert time_left(durations, remaining) == expected


def test_a_sparkline_has_one_bar_a_value_until_there_are_too_many() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([0.0, 0.5, 1.0, math.nan, 7.0, -3.0], 10) == "▁▅██▁"
    assert sparkline([0.0] * 50 + [1.0] * 50, 10) == "▁▁▁▁▁█████"
    assert sparkline([math.nan], 10) == sparkline([0.5], 0) == ""
    assert sparkline([0.0, 1.0], 10, ascii_only=True) == ".%"


def make_summary(reason: str | None = "target reached", *, measured: bool = True) -> Summary:
    before = (
        Evaluation(step=0, problems=200, sampled=wilson_interval(0.2, 200), greedy=wilson_interval(0.4, 200))
        if measured
        else None
    )
    after = (
        Evaluation(step=400, problems=200, sampled=wilson_interval(0.9, 200), greedy=wilson_interval(0.95, 200))
        if measured
        else None
    )
    return Summary(
        name=f"run {HOSTILE}",
        model="tiny",
        algorithm="gspo",
        steps=400,
        seconds=221.0,
        reason=reason,
        before=before,
        after=after,
        best=after,
    )


def rollouts(text: str, accuracy: float) -> tuple[dict[str, object], ...]:
    return tuple({"prompt": f"{index}+1={HOSTILE}", "text": text, "accuracy": accuracy} for index in range(5))


def test_the_end_screen_fits_24_lines_and_shows_everything() -> None:
    console, stream = terminal(80)
    samples = Samples(before_step=1, after_step=400, before=rollouts(HOSTILE + "\n" * 50, 0.0), after=rollouts("12", 1.0))
    folder = Path("/a/very/long/folder/" + "x" * 80)
    end_screen(
        make_summary(),
        samples=samples,
        checkpoint=folder / "checkpoints/step-000400",
        report=folder / "report.html",
        next_command=f"legato sample {folder}",
        console=console,
    )
    text = text_of(stream)
    lines = text.splitlines()
    assert len(lines) + 3 <= 24  # the three long paths take a second line each
    for words in (
        "3 min 41 s",
        "20.0 % (15.0 to 26.1)",
        "95.0 % (91.0 to 97.3)",
        "+70.0 points",
        "+55.0 points",
        "step 400",
    ):
        assert words in text, words
    assert f"{folder}/report.html" in text
    assert f"next       legato sample {folder}" in lines
    assert sum("+1=" in line for line in lines) == 3
    assert not set("\x07\u202e") & set(text)
    assert "\x1b[2J" not in text
    assert "[bold red" in lines[1]


def test_the_end_screen_on_a_narrow_terminal_cuts_no_number() -> None:
    console, stream = terminal(40)
    end_screen(make_summary(), console=console)
    rows = [line.split() for line in text_of(stream).splitlines() if line.startswith(("sampled", "greedy"))]
    assert rows == [["sampled", "20.0", "%", "90.0", "%", "+70.0"], ["greedy", "40.0", "%", "95.0", "%", "+55.0"]]


def test_the_end_screen_without_evaluations_still_shows_the_paths() -> None:
    console, stream = terminal(40)
    end_screen(make_summary(None, measured=False), samples=None, report=Path("r.html"), console=console)
    assert "No evaluation" in text_of(stream)
    assert "r.html" in text_of(stream)


def test_samples_of_different_prompts_are_in_separate_rows() -> None:
    console, stream = terminal(80)
    before = ({"prompt": "1+1=", "text": "3", "accuracy": 0.0},)
    after = ({"prompt": "2+2=", "text": "4", "accuracy": 1.0},)
    end_screen(make_summary(), samples=Samples(before_step=1, after_step=9, before=before, after=after), console=console)
    rows = [line.split() for line in text_of(stream).splitlines() if "+" in line and "=" in line]
    assert rows == [["1+1=", "✗", "3"], ["2+2=", "✓", "4"]]
    console, stream = terminal(80)
    end_screen(make_summary(), samples=Samples(before_step=1, after_step=None, before=before, after=()), console=console)
    assert "1+1=" in text_of(stream)


def test_the_display_loads_no_torch() -> None:
    code = "import sys, legato.cli.display; sys.exit('torch' in sys.modules or 'plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
