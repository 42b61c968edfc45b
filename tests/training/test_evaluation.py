"""Evaluation: pass@k against counting all choices, intervals with published ends, seeds that do not change."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.diagnostics.statistics.intervals import (
    clustered_interval,
    difference_interval,
    mean_interval,
    wilson_interval,
)
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.engine import Handle, Limits, Request
from legato.rollouts.episodes import Runner
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.rollouts.scripted import ScriptedEngine
from legato.training.evaluate import Answered, Evaluator, accuracy_metrics, measure_names, pass_at


@pytest.mark.parametrize("trials", [1, 4, 6])
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_success(trials: int) -> None:
    for successes, k in itertools.product(range(trials + 1), range(1, trials + 1)):
        outcomes = [True] * successes + [False] * (trials - successes)
        choices = list(itertools.combinations(outcomes, k))
        assert math.isclose(pass_at(successes, trials, k), sum(any(c) for c in choices) / len(choices), abs_tol=1e-12)


def test_pass_at_k_above_the_number_of_trials_is_refused_or_no_success() -> None:
    try:
        estimate = pass_at(0, 4, 8)
    except ValueError:
        return
    assert math.isnan(estimate) or estimate == 0.0


# Newcombe (1998), table I, method 3: 81/263, 15/148, 0/20, 1/29.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_wilson_interval_has_the_published_ends(successes: int, trials: int, low: float, high: float) -> None:
    interval = wilson_interval(successes, trials)
    assert abs(interval[0] - low) < 6e-5 and abs(interval[1] - high) < 6e-5


def test_the_wilson_interval_is_symmetric_and_stays_within_0_and_1() -> None:
    for trials in (1, 7, 200):
        for successes in range(trials + 1):
            low, high = wilson_interval(successes, trials)
            other = wilson_interval(trials - successes, trials)
            assert 0.0 <= low <= successes / trials + 1e-12 and successes / trials - 1e-12 <= high <= 1.0
            assert math.isclose(low, 1 - other[1], abs_tol=1e-12)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_the_interval_of_a_mean_is_the_normal_one_over_problems() -> None:
    means = [0.25, 0.5, 0.75, 0.5]
    half = 1.959964 * math.sqrt(sum((x - 0.5) ** 2 for x in means) / 3 / 4)
    low, high = mean_interval(means)
    assert math.isclose(low, 0.5 - half, rel_tol=1e-6) and math.isclose(high, 0.5 + half, rel_tol=1e-6)
    assert mean_interval([0.7]) == (0.0, 1.0) and mean_interval([1.0, 1.0]) == (1.0, 1.0)


def test_the_interval_over_problems_is_wilsons_where_all_values_are_0_or_1() -> None:
    assert clustered_interval([0.0] * 20) == wilson_interval(0, 20) and clustered_interval([1.0, 0.0]) == wilson_interval(
        1, 2
    )
    assert clustered_interval([0.25, 0.5, 1.0]) == mean_interval([0.25, 0.5, 1.0])


def test_a_difference_is_paired_by_problem() -> None:
    before, after = [0.1, 0.9, 0.5, 0.3] * 50, [0.2, 1.0, 0.6, 0.4] * 50
    mean, low, high = difference_interval(before, [*after[:-1], 0.41])
    assert math.isclose(mean, 0.1, rel_tol=1e-3) and low > 0.0999 and high < 0.1002
    before = before[:4]
    mean, low, high = difference_interval(before, [0.1, 0.9, 0.5, 0.7])
    assert low < 0 < mean < high


def test_equal_values_are_no_proof_of_a_value() -> None:
    most = wilson_interval(0, 2)[1]
    assert difference_interval([0.0, 0.0], [0.0, 0.0]) == (0.0, -most, most)
    low, high = clustered_interval([0.5, 0.5])
    assert 0 < low < 0.5 < high < 1
    mean, low, high = difference_interval([0.1] * 400, [0.2] * 400)
    assert low < mean < high and high - low < 0.02


def test_measures_are_the_mean_and_powers_of_two() -> None:
    assert measure_names(1) == ["avg@1"] and measure_names(3) == ["avg@3", "pass@2"]
    assert measure_names(16) == ["avg@16", "pass@2", "pass@4", "pass@8", "pass@16"]


PROBLEMS = [Problem(prompt="a"), Problem(prompt="b")]


class Listening(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(lambda prompt, sample: ([20 + sample, 1], [-0.5, -0.1]))
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        self.requests += requests
        return super().submit(requests, sampling, limits)


def judge(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
    scores: list[Score | Unscorable] = []
    for rollout in rollouts:
        sample = int(rollout.tokens[0]) - 20
        right = float(rollout.problem.prompt == "a" or sample == 0)
        scores.append(Unscorable("no") if sample == 2 else Score(reward=2 * right, accuracy=right))
    return scores


def make_evaluator() -> Evaluator:
    runner = Runner(
        engine=Listening(),
        rendering=Rendering(tokenizer=character_tokenizer()),
        limits=Limits(max_response_tokens=4, end_tokens=(1,)),
    )
    return Evaluator(runner=runner, judge=judge)


def test_each_problem_gets_the_requested_samples_in_order() -> None:
    answers = make_evaluator().answer(PROBLEMS, Sampling(temperature=0.6), 3, seed=1)
    assert [[int(a.rollout.tokens[0]) - 20 for a in row] for row in answers] == [[0, 1, 2], [0, 1, 2]]
    assert [[a.accuracy for a in row] for row in answers] == [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_the_seeds_of_an_evaluation_do_not_depend_on_the_step_or_on_neighbours() -> None:
    one, two = make_evaluator(), make_evaluator()
    two.runner.publish(9)
    one.answer(PROBLEMS, Sampling(), 3, seed=1)
    two.answer(PROBLEMS[::-1], Sampling(), 3, seed=1, number=7)
    requests = [evaluator.runner.engine.requests for evaluator in (one, two)]
    assert [r.seeds for r in requests[0]] == [r.seeds for r in requests[1]][::-1]
    three = make_evaluator()
    three.answer(PROBLEMS, Sampling(), 3, seed=2)
    assert not {s for r in requests[0] for s in r.seeds} & {s for r in three.runner.engine.requests for s in r.seeds}


def test_an_evaluation_records_its_own_temperature() -> None:
    for temperature in (0.0, 0.6):
        row = make_evaluator().answer(PROBLEMS, Sampling(temperature=temperature), 1, seed=1)[0]
        assert [answered.rollout.temperature for answered in row] == [temperature]


def test_rollout_ids_of_evaluations_are_below_0_and_never_come_again() -> None:
    this = make_evaluator()
    rows = [this.answer(PROBLEMS, Sampling(), samples, seed=1, number=n) for n, samples in enumerate((3, 1, 3))]
    ids = [answered.rollout.rollout_id for evaluation in rows for row in evaluation for answered in row]
    assert len(set(ids)) == len(ids) == 14 and max(ids) == -1


def test_metrics_hold_accuracy_with_its_interval_and_the_mean_length() -> None:
    metrics = accuracy_metrics("sampled", make_evaluator().answer(PROBLEMS, Sampling(), 3, seed=1))
    assert math.isclose(metrics["eval/accuracy_sampled"], 0.5)
    assert metrics["eval/accuracy_sampled_low"] <= 0.5 <= metrics["eval/accuracy_sampled_high"]
    assert metrics["eval/length_sampled"] == 2.0


def test_one_sample_a_problem_gives_the_wilson_interval() -> None:
    metrics = accuracy_metrics("greedy", make_evaluator().answer(PROBLEMS, Sampling(temperature=0.0), 1, seed=1))
    assert (metrics["eval/accuracy_greedy_low"], metrics["eval/accuracy_greedy_high"]) == wilson_interval(2, 2)


def test_an_unscorable_answer_counts_as_wrong() -> None:
    rollout = make_evaluator().answer(PROBLEMS, Sampling(), 1, seed=1)[0][0].rollout
    assert Answered(rollout=rollout, score=Unscorable("no")).accuracy == 0.0
    assert torch.equal(rollout.mask, torch.ones(2, dtype=torch.bool))
