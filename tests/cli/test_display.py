"""The displays during training and the end screen."""

import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from legato.cli.ending import end_screen
from legato.pages.summary import Evaluation, Samples, Summary, wilson_interval
from legato.run.display import LiveDisplay, PlainDisplay, for_terminal, sparkline
from legato.run.pace import Pace
from legato.run.watcher import DisplaySettings

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
        "  entropy 0.520  length 4.2  tokens/s 5,123  at most 1 min 20 s left\n"
    )


def test_no_time_left_is_shown_without_an_estimate() -> None:
    """The first step of a run also compiles, so its duration says nothing about the others."""
    stream = io.StringIO()
    display = PlainDisplay(stream)
    display.configure(DisplaySettings(log_every_steps=1, log_every_seconds=30.0, may_end_early=False))
    display.step(1, 4, METRICS, None, None)
    display.step(2, 4, METRICS, None, 6.0)
    first, second = stream.getvalue().splitlines()
    assert "left" not in first and second.endswith("about 6 s left")
    assert "held-out" not in first
    console, panel = terminal()
    live = LiveDisplay(console)
    live.step(1, 4, METRICS, None, None)
    console.print(live)
    assert "left" not in text_of(panel)


def lines_of(settings: DisplaySettings, steps: int, ended_at: int, evaluated: int = 0) -> list[int]:
    """The steps whose lines are printed by a run of a step a second, and a last evaluation at `evaluated`."""
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, clock=lambda: now[0])
    display.configure(settings)
    for step in range(1, ended_at + 1):
        now[0] += 1.0
        display.step(step, steps, METRICS, EVALUATION if evaluated and step >= evaluated else None, 1.0)
    display.close()
    display.close()
    return [int(line.split()[1].partition("/")[0]) for line in stream.getvalue().splitlines()]


def test_a_log_has_a_line_now_and_then() -> None:
    by_time = DisplaySettings(log_every_steps=0, log_every_seconds=30.0)
    assert lines_of(by_time, 100, 100) == [1, 31, 61, 91, 100]
    assert lines_of(by_time, 100, 100, evaluated=40) == [1, 31, 40, 70, 100]
    assert lines_of(by_time, 2200, 45) == [1, 31, 45]  # ended early
    assert lines_of(DisplaySettings(log_every_steps=4, log_every_seconds=0.0), 10, 10) == [1, 4, 8, 10]
    assert lines_of(DisplaySettings(log_every_steps=0, log_every_seconds=0.0), 10, 10) == [1, 10]


def test_the_pace_leaves_out_the_first_step_and_follows_the_last_hundred() -> None:
    pace = Pace()
    assert pace.seconds_left(1000.0, 10) is None  # an evaluation and the first step took 1000 s
    assert pace.seconds_left(1002.0, 9) == pytest.approx(18.0)
    assert pace.seconds_left(1003.0, 8) == pytest.approx(12.0)
    for second in range(200):
        left = pace.seconds_left(2000.0 + 5.0 * second, 10)
    assert left == pytest.approx(50.0)


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
    for words in ("tokens/s 5,123", "held-out sampled 81.0%", "held-out greedy 88.0%", "at most 1 min", "▁▂▃▄▅▅▆▇"):
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
    return tuple({"prompt": f"{index}+1=\x07", "text": text, "accuracy": accuracy} for index in range(5))


def test_long_samples_are_shown_whole() -> None:
    console, stream = terminal(60)
    long = {"prompt": "system: be brief\nuser: How many?", "text": f"first {HOSTILE}\nlast", "accuracy": 0.0, "reward": 0.25}
    right = {"prompt": "p", "question": "How much?", "text": "x" * 90, "accuracy": 1.0, "answer": "12\u20ac", "tokens": 3}
    samples = Samples(before_step=0, after_step=8, before=(long,), after=(long, long, right))
    end_screen(make_summary(), samples=samples, console=console)
    text = text_of(stream)
    for words in (
        "samples of step 8",
        "prompt    How many?",
        "reward 0.250, wrong",
        "right, 3 tokens",
        "How much?",
        "12\u20ac",
    ):
        assert words in text, words
    assert text.count("How many?") == 1 and "be brief" not in text
    lines = [line.strip() for line in text.splitlines()]
    assert "last" in lines and "x" * 48 in text and not set("\x07\u202e\x1b") & set(text)


def test_the_end_screen_fits_24_lines_and_shows_everything() -> None:
    console, stream = terminal(80)
    samples = Samples(before_step=1, after_step=400, before=rollouts("\x1b[2J\n", 0.0), after=rollouts("12", 1.0))
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
    code = "import sys, legato.run.display; sys.exit('torch' in sys.modules or 'plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_evaluation_sets_stand_beside_held_out_accuracy() -> None:
    stream = io.StringIO()
    evaluation = {"eval/accuracy_sampled": 0.5, "eval/aime/avg@4": 0.25, "eval/aime/avg@4_low": 0.1, "eval/aime/pass@4": 0.6}
    PlainDisplay(stream).step(1, 2, {"reward/mean": 1.0}, evaluation, None)
    assert "held-out sampled 50.0%  aime avg@4 25.0%" in stream.getvalue() and "pass@4" not in stream.getvalue()
