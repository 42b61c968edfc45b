"""The summary of a run: accuracy before, after and at best, with intervals, and sample rollouts."""

from pathlib import Path

import pytest

from legato.pages.report import verdict
from legato.pages.summary import Interval, Summary, samples, summarise, summary, wilson_interval
from legato.records.directory import RunDirectory
from tests.dashboard.synthetic import synthetic_run


def evaluation(step: int, sampled: float | None, greedy: float | None = None) -> dict[str, object]:
    return {
        "kind": "evaluation",
        "step": step,
        "eval/accuracy_sampled": sampled,
        "eval/accuracy_greedy": greedy,
        "eval/problems": 200,
    }


def summarise_records(*records: dict[str, object]) -> Summary:
    return summarise(records, "folder")


def test_the_seconds_are_those_of_all_sessions() -> None:
    step, saved = {"kind": "step", "step": 1, "time/step_seconds": 2.0}, {"kind": "checkpoint", "step": 1, "seconds": 30.0}
    assert summarise_records(step, saved, step).seconds == 32.0
    assert summarise_records(step, saved, step, {"kind": "end", "reason": "done", "seconds": 35.0}).seconds == 35.0
    # The end record of an older version counts only the last session.
    assert summarise_records(*[step] * 8, {"kind": "end", "reason": "done", "seconds": 3.0}).seconds == 16.0


def test_a_run_is_summarised(tmp_path: Path) -> None:
    result = summary(synthetic_run(tmp_path))
    assert (result.name, result.algorithm, result.steps, result.seconds) == ("arithmetic-tiny-gspo", "gspo", 200, 198.4)
    assert result.reason == "target reached"
    assert result.before is not None
    assert result.after is not None
    assert (result.before.step, result.after.step) == (0, 200)
    assert result.before.sampled is not None
    assert result.before.sampled.low == pytest.approx(result.before.sampled.value - 0.03)
    assert result.before.greedy == wilson_interval(result.before.greedy.value, 512) if result.before.greedy else False


def test_best_is_by_sampled_accuracy_and_then_greedy() -> None:
    result = summarise_records(
        evaluation(0, 0.1), evaluation(20, 0.9, 0.8), evaluation(40, 0.9, 0.95), evaluation(60, 0.5, 1.0)
    )
    assert result.best is not None
    assert result.best.step == 40
    assert result.after is not None
    assert result.after.step == 60


def test_one_evaluation_is_before_or_after_by_its_step() -> None:
    at_start, later = summarise_records(evaluation(0, 0.1)), summarise_records(evaluation(9, 0.1))
    assert (at_start.before is None, at_start.after is None) == (False, True)
    assert (later.before is None, later.after is None) == (True, False)
    assert summarise_records(evaluation(0, None), evaluation(9, 0.2)).before is None


def test_a_run_without_records_has_the_name_of_its_folder() -> None:
    result = summarise_records()
    assert (result.name, result.steps, result.seconds, result.best, result.reason) == ("folder", 0, 0.0, None, None)


def test_time_is_the_sum_of_steps_where_no_end_tells_it() -> None:
    steps = [{"kind": "step", "step": step, "time/step_seconds": 1.5} for step in (1, 2)]
    assert summarise_records(*steps, {"kind": "step", "step": 3, "time/step_seconds": None}).seconds == 3.0


@pytest.mark.parametrize(
    ("share", "trials", "low", "high"),
    # Newcombe 1998, table I, method 3.
    [(81 / 263, 263, 0.2553, 0.3662), (15 / 148, 148, 0.0624, 0.1605), (0.0, 20, 0.0, 0.1611), (1 / 29, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_equal_published_ones(share: float, trials: int, low: float, high: float) -> None:
    interval = wilson_interval(share, trials)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


def test_the_verdict_claims_no_more_than_the_intervals_allow() -> None:
    low, middle, high = (Interval(value=x, low=x - 0.1, high=x + 0.1) for x in (0.2, 0.35, 0.6))
    assert verdict(low, high) == "rose"
    assert verdict(high, low) == "fell"
    assert "did not change" in verdict(low, middle)
    assert verdict(None, low) == "measured once"


def test_samples_are_of_the_same_prompts_where_both_ends_have_them(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run")
    assert samples(directory).before == ()
    directory.write_rollouts(1, [{"prompt": prompt, "text": f"old {prompt}"} for prompt in "aabcd"])
    alone = samples(directory, 2)
    assert [each["prompt"] for each in alone.before] == ["a", "b"]
    assert (alone.after, alone.after_step) == ((), None)
    directory.write_rollouts(5, [{"prompt": prompt, "text": f"new {prompt}"} for prompt in "xdcc"])
    both = samples(directory)
    assert [each["text"] for each in both.before] == ["old c", "old d"]
    assert [each["text"] for each in both.after] == ["new c", "new d"]
    directory.write_rollouts(9, [{"prompt": "y"}, {"prompt": "z"}])
    both = samples(directory, 1)
    assert ([each["prompt"] for each in both.before], [each["prompt"] for each in both.after]) == (["a"], ["y"])
