"""The rules of the health watch against direct computations, on series written by hand."""

import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from legato.diagnostics.metrics.definitions import definition
from legato.diagnostics.metrics.repetition import repetition
from legato.diagnostics.metrics.run import RUN_METRICS
from legato.health.explain import steps_needed
from legato.health.rule import AVERAGING, COMPARING, LEVELS, Rule
from legato.health.rules import RULES, document
from legato.health.watch import REST, Watch

STEPS = 60


def rule(name: str) -> Rule:
    return next(each for each in RULES if each.name == name)


def find_alarms(rules: Sequence[Rule], series: Sequence[dict[str, Any]], **options: Any) -> list[tuple[int, str]]:
    watch = Watch(rules, **options)
    return [(f.step, f.rule) for step, metrics in enumerate(series, 1) for f in watch.observe(step, metrics)]


def wavy_series(key: str, level: float, count: int = STEPS, size: float = 0.1) -> list[dict[str, Any]]:
    """A healthy series that varies around a level by up to a tenth of it."""
    return [{key: level * (1 + size * math.sin(1.7 * step))} for step in range(count)]


HEALTHY = {
    "reward/mean": 0.5,
    "accuracy/mean": 0.5,
    "loss/total": 0.01,
    "gradient/norm": 4.0,
    "gradient/norm_max": 5.0,
    "update/applied": 1.0,
    "drift/k3": 0.006,
    "ratio/sequence_std": 0.06,
    "drift/sequence_effective_size": 0.995,
    "clip/outside_sequences@0": 0.0,
    "clip/tokens": 0.3,
    "clip/sequences": 0.3,
    "clip/sequences@3": 0.5,
    "mismatch/k3": 1e-5,
    "mismatch/clipped": 0.1,
    "mismatch/server_ratio": 1.5,
    "weight/effective_size": 0.99,
    "entropy/mean": 0.4,
    "length/mean": 30.0,
    "length/truncated": 0.02,
    "rollouts/repetition": 0.02,
    "rollouts/unscorable": 0.0,
    "router/flip_mean": 0.01,
    "groups/zero_variance": 0.3,
    "groups/all_right": 0.2,
}
"""Metrics of one step of a healthy run."""

EXACT = {"update/applied", "drift/sequence_effective_size"}
"""Shares at their upper limit, which do not vary."""


def healthy_series(count: int = STEPS) -> list[dict[str, Any]]:
    noise = [1 + 0.1 * math.sin(1.7 * step) for step in range(count)]
    return [{key: value if key in EXACT else value * wave for key, value in HEALTHY.items()} for wave in noise]


SYMPTOMS: dict[str, dict[str, Any]] = {
    "not-finite": {"loss/total": math.nan},
    "gradient-not-finite": {"gradient/norm": math.nan},
    "updates-dropped": {"update/applied": 0.75},
    "updates-lost": {"update/applied": 0.75},
    "reward-fall": {"reward/mean": 0.3},
    "reward-lost": {"reward/mean": 0.2},
    "reward-below-start": {"reward/mean": 0.2},
    "accuracy-fall": {"accuracy/mean": 0.3},
    "accuracy-lost": {"accuracy/mean": 0.2},
    "drift": {"drift/k3": 0.07},
    "ratio-spread": {"ratio/sequence_std": 0.2},
    "effective-size": {"drift/sequence_effective_size": 0.7},
    "effective-size-lost": {"drift/sequence_effective_size": 0.05},
    "anchor-off": {"clip/outside_sequences@0": 0.3},
    "mismatch-rise": {"mismatch/k3": 0.01},
    "mismatch-large": {"mismatch/k3": 0.2},
    "mismatch-clips": {"mismatch/clipped": 0.6},
    "mismatch-server": {"mismatch/server_ratio": 20.0},
    "correction-costs": {"weight/effective_size": 0.3},
    "entropy-fall": {"entropy/mean": 0.01},
    "entropy-lost": {"entropy/mean": 0.03},
    "entropy-rise": {"entropy/mean": 0.6},
    "entropy-explosion": {"entropy/mean": 1.2},
    "length-fall": {"length/mean": 10.0},
    "length-runaway": {"length/mean": 60.0},
    "truncated": {"length/truncated": 0.7},
    "repetition": {"rollouts/repetition": 0.4},
    "repetition-rise": {"rollouts/repetition": 0.1},
    "clip-never": {"clip/tokens": 0.0},
    "clip-half": {"clip/tokens": 0.6},
    "all-clipped": {"clip/sequences": 0.95},
    "update-all-clipped": {"clip/sequences@3": 1.0},
    "gradient-spike": {"gradient/norm_max": 80.0},
    "experts-flip": {"router/flip_mean": 0.2},
    "experts-flip-rise": {"router/flip_mean": 0.05},
    "nothing-to-compare": {"groups/zero_variance": 0.9},
    "nothing-to-learn": {"groups/zero_variance": 1.0},
    "solved": {"groups/all_right": 0.95},
    "unscorable": {"rollouts/unscorable": 0.4},
    "collapse": {"reward/mean": 0.3, "ratio/sequence_std": 0.2},
}
"""The metrics that trigger each rule."""

EARLIEST = {
    **dict.fromkeys(("not-finite", "gradient-not-finite", "updates-dropped", "gradient-spike"), 1),
    **dict.fromkeys(("drift", "anchor-off"), 2),
    "nothing-to-learn": 4,
    "updates-lost": 4,
    "entropy-fall": 5,
    "nothing-to-compare": 8,
    "solved": 8,
    "mismatch-server": 8,
    "clip-half": 10,
    "clip-never": 20,
    "collapse": 3,
}
"""Number of bad steps after which a step-counting rule reports, if not 3. Averaging rules have no entry."""


def test_a_healthy_run_raises_no_alarm() -> None:
    assert find_alarms(RULES, healthy_series(400)) == []


def test_every_rule_has_a_case() -> None:
    assert {*SYMPTOMS} == {each.name for each in RULES}


@pytest.mark.parametrize("name", SYMPTOMS)
def test_each_rule_reports_its_symptom_once(name: str) -> None:
    ill = [{**step, **SYMPTOMS[name]} for step in healthy_series(25)]
    # Without the broader rule, which would suppress this one.
    rules = [each for each in RULES if each.name != rule(name).under]
    steps = [step for step, rule_name in find_alarms(rules, [*healthy_series(), *ill]) if rule_name == name]
    assert len(steps) == 1, steps
    if rule(name).test not in AVERAGING:
        assert steps[0] == STEPS + EARLIEST.get(name, 3)
    else:
        assert STEPS < steps[0] <= STEPS + rule(name).of + rule(name).hits - 1


@pytest.mark.parametrize("name", [each.name for each in RULES if each.of > 1 and each.hits > 1])
def test_one_bad_step_raises_no_finding(name: str) -> None:
    series = healthy_series(STEPS + 5)
    series[STEPS] |= SYMPTOMS[name]
    assert name not in [rule_name for _, rule_name in find_alarms([rule(name)], series)]


def test_a_fall_is_detected_by_standard_errors_and_size() -> None:
    """Computed directly from means and a standard deviation."""
    falls = rule("reward-fall")
    series = [*wavy_series("reward/mean", 0.5), *wavy_series("reward/mean", 0.36, 30, 0.4)]
    values = [step["reward/mean"] for step in series]
    expected = None
    for end in range(falls.of + falls.window // 2, len(values) + 1):
        recent, before = values[end - falls.of : end], values[max(0, end - falls.of - falls.window) : end - falls.of]
        error = statistics.stdev(before) * math.sqrt(1 / len(recent) + 1 / len(before))
        drop = statistics.mean(before) - statistics.mean(recent)
        if drop > falls.threshold * error and drop > falls.least * abs(statistics.mean(before)):
            expected = end
            break
    assert expected is not None
    assert find_alarms([falls], series)[0] == (expected, "reward-fall")


def test_a_slow_fall_is_detected_against_the_best_window() -> None:
    series = [{"reward/mean": max(0.05, 0.8 - 0.001 * step)} for step in range(700)]
    first_steps = {rule_name: step for step, rule_name in find_alarms(RULES, series)}
    assert "reward-fall" not in first_steps and 400 < first_steps["reward-lost"] < 480


def steady_rewards(chance: float, seed: int, low: float = 0.0, high: float = 1.0) -> list[dict[str, Any]]:
    """Rewards of 32 problems with 8 answers each, mostly all right or all wrong, at the accuracy of an untrained model."""
    draw, steps = random.Random(seed), []
    for _ in range(600):
        rates = [draw.betavariate(chance, 1 - chance) for _ in range(32)]
        share = statistics.fmean(sum(draw.random() < rate for _ in range(8)) / 8 for rate in rates)
        steps.append({"reward/mean": low + (high - low) * share, "accuracy/mean": share})
    return steps


@pytest.mark.parametrize(("chance", "low", "high"), [(0.02, 0.0, 1.0), (0.05, 0.0, 1.0), (0.1, 0.0, 1.0), (0.6, -1.0, 1.0)])
def test_a_steady_reward_is_not_reported_as_lost(chance: float, low: float, high: float) -> None:
    names = [name for _, name in find_alarms(RULES, steady_rewards(chance, 0, low, high))]
    assert not {"reward-lost", "reward-below-start", "accuracy-lost", "collapse"} & {*names}


def test_a_quiet_start_raises_no_alarm_in_later_steps() -> None:
    """Five values may lie close together by chance; compared with their spread, any later value looks unusual."""
    below, runs = rule("reward-below-start"), [steady_rewards(0.05, seed) for seed in range(10)]
    assert any(find_alarms([replace(below, hits=1)], steps) for steps in runs), "these runs would not trigger the rule"
    assert not any(find_alarms([below], steps) for steps in runs)


def test_usual_values_are_measured_after_the_warm_up() -> None:
    """The spread of ratios grows with the learning rate, so the first steps do not show usual values."""
    rising = [{"ratio/sequence_std": 0.5 * min(1.0, step / 30) ** 4 + 1e-6} for step in range(1, 80)]
    assert find_alarms([rule("ratio-spread")], rising) != []
    assert find_alarms([rule("ratio-spread")], rising, settled=30) == []


def test_good_news_is_no_alarm() -> None:
    solved = {"groups/zero_variance": 1.0, "groups/all_right": 1.0, "accuracy/mean": 1.0, "reward/mean": 1.0}
    certain = {"entropy/mean": 0.001}
    names = [
        name
        for _, name in find_alarms(
            RULES, [*healthy_series(), *[{**step, **solved, **certain} for step in healthy_series(30)]]
        )
    ]
    assert names == ["solved"]


def test_an_accuracy_that_falls_with_the_reward_is_reported_once() -> None:
    ill = [{**step, "reward/mean": 0.2, "accuracy/mean": 0.2} for step in healthy_series(15)]
    names = [name for _, name in find_alarms(RULES, [*healthy_series(), *ill])]
    assert "reward-fall" in names and "accuracy-fall" not in names and "accuracy-lost" not in names


def test_a_rule_reports_again_after_its_rest() -> None:
    bad, good = [{"rollouts/unscorable": 0.4}] * 5, [{"rollouts/unscorable": 0.0}]
    only = [rule("unscorable")]
    assert len(find_alarms(only, [*bad, *good * (REST - 3), *bad])) == 1
    assert len(find_alarms(only, [*bad, *good * (REST + 1), *bad])) == 2


def test_a_missing_metric_raises_no_alarm() -> None:
    series = healthy_series()
    for step in series[20:]:
        for key in ("entropy/mean", "drift/k3", "clip/tokens", "reward/mean"):
            step.pop(key)
    assert find_alarms(RULES, series) == []


def test_ignored_rules_raise_no_alarm() -> None:
    ill = [{**step, **SYMPTOMS["drift"]} for step in healthy_series(10)]
    assert "drift" not in [name for _, name in find_alarms(RULES, [*healthy_series(), *ill], ignored=["drift"])]


@pytest.mark.parametrize("cut", [1, 23, STEPS + 1, STEPS + 3])
def test_a_watch_restored_from_its_state_reports_the_same_findings(cut: int) -> None:
    series = [*healthy_series(), *[{**step, **SYMPTOMS["collapse"], **SYMPTOMS["drift"]} for step in healthy_series(40)]]
    straight, first = Watch(), Watch()
    expected = [straight.observe(step, metrics) for step, metrics in enumerate(series, 1)]
    findings = [first.observe(step, metrics) for step, metrics in enumerate(series[:cut], 1)]
    second = Watch()
    second.load(json.loads(json.dumps(first.state())))
    findings += [second.observe(step, metrics) for step, metrics in enumerate(series[cut:], cut + 1)]
    assert findings == expected and second.state() == straight.state()


def test_occasional_spikes_count_as_usual() -> None:
    """Late in a run few groups have an advantage, so drift jumps. Only 1.5 times the highest earlier value is unusual."""
    drift, spiky = rule("drift"), [{"drift/k3": 0.05 if step % 15 == 0 else 0.008} for step in range(100)]
    assert drift.threshold * 0.008 < 0.05 < 0.07 < drift.beyond * 0.05 < 0.077 < drift.far * 0.008 < 0.081
    for value, expected in {0.07: [], 0.077: [(102, "drift")]}.items():
        assert find_alarms([drift], [*spiky, *[{"drift/k3": value}] * 2]) == expected
    # Ten times the usual value is enough, even if the window held a higher value.
    high = [{"drift/k3": 0.09 if step % 15 == 0 else 0.008} for step in range(100)]
    assert find_alarms([drift], [*high, *[{"drift/k3": 0.081}] * 2]) == [(102, "drift")]


def test_a_reward_lost_during_warm_up_is_reported() -> None:
    """Rules that compare with usual values skip the first steps, so this rule compares with the start of the run."""
    below = rule("reward-below-start")
    series = [*wavy_series("reward/mean", 0.5, below.window), *wavy_series("reward/mean", 0.1, 30)]
    assert find_alarms(RULES, series, settled=25)[:1] == [(below.window + below.of + below.hits - 1, "reward-below-start")]
    rising = [*wavy_series("reward/mean", 0.1, below.window), *wavy_series("reward/mean", 0.5, 60)]
    assert find_alarms(RULES, rising, settled=25) == []
    # Losing a tiny reward may be chance: one right answer of 64 a step, then none.
    rare = [{"reward/mean": (step % 4 == 0) / 64 if step < 12 else 0.0} for step in range(40)]
    assert "reward-below-start" not in [rule_name for _, rule_name in find_alarms(RULES, rare)]


def test_the_beginning_of_a_run_survives_a_checkpoint() -> None:
    below = rule("reward-below-start")
    series = [*wavy_series("reward/mean", 0.5, below.window), *wavy_series("reward/mean", 0.1, below.of + below.hits - 1)]
    for cut in range(1, len(series)):
        first, second = Watch([below]), Watch([below])
        for step, metrics in enumerate(series[:cut], 1):
            assert not first.observe(step, metrics)
        second.load(json.loads(json.dumps(first.state())))
        steps = [
            finding.step for step, metrics in enumerate(series[cut:], cut + 1) for finding in second.observe(step, metrics)
        ]
        assert steps == [len(series)]


def test_a_rule_added_midway_does_not_treat_its_first_steps_as_the_start() -> None:
    """A checkpoint written without the rule holds no values of the first steps."""
    below, other = rule("reward-below-start"), rule("reward-fall")
    before, after = Watch([other]), Watch([other, below])
    for step, metrics in enumerate(wavy_series("reward/mean", 0.2, 30), 1):
        before.observe(step, metrics)
    after.load(json.loads(json.dumps(before.state())))
    fallen = [*wavy_series("reward/mean", 0.8, below.window), *wavy_series("reward/mean", 0.3, 30)]
    assert below.name not in [finding.rule for step, each in enumerate(fallen, 31) for finding in after.observe(step, each)]
    again = Watch([other, below])
    again.load(json.loads(json.dumps(after.state())))
    assert not again.start


def test_a_persistent_alarm_is_reported_again_after_resuming() -> None:
    drift, bad, good = rule("drift"), {"drift/k3": 1.0}, {"drift/k3": 0.006}

    def findings_after_resume(after: Sequence[Mapping[str, float]], **options: Any) -> list[tuple[int, int]]:
        """(step, since) of the findings from step 44 on, by a watch restored after bad step 41 and the steps `before`."""
        first, second = Watch([drift]), Watch([drift])
        for step, metrics in enumerate([good] * 39 + [bad] * 2 + list(before), 1):
            first.observe(step, metrics)
        second.load(json.loads(json.dumps(first.state())))
        second.renew(**options)
        return [(f.step, f.since) for step, metrics in enumerate(after, 44) for f in second.observe(step, metrics)]

    before = [bad, bad]
    assert findings_after_resume([bad, bad, bad]) == [(44, 40)], "one report, dated from its first step"
    assert findings_after_resume([bad, bad], answered=["drift"]) == []
    assert findings_after_resume([good, bad, bad]) == [(45, 40)]
    assert findings_after_resume([good] * REST + [bad] * 3) == [(65, 64)], "a new alarm"
    before = [good, good]
    assert findings_after_resume([bad, bad, bad]) == [], "the alarm was over"


def test_a_finding_names_the_first_bad_step() -> None:
    series = [*healthy_series(), *[{**step, **SYMPTOMS["drift"]} for step in healthy_series(5)]]
    watch = Watch([rule("drift")])
    (finding,) = (each for step, metrics in enumerate(series, 1) for each in watch.observe(step, metrics))
    assert (finding.since, finding.step, finding.level) == (STEPS + 1, STEPS + 2, "alarm")
    assert finding.usual == pytest.approx(0.006, rel=0.1) and f"{finding.value:.3g}" in finding.words


def test_every_rule_is_complete_and_documented() -> None:
    known = {metric.key for metric in RUN_METRICS}
    for each in RULES:
        assert each.level in LEVELS and each.says.endswith(".") and each.causes and each.tries, each.name
        assert (each.window > 0) == (each.test in COMPARING or each.test == "together"), each.name
        for key in each.metrics if each.test != "together" else ():
            plain = key.partition("@")[0]
            assert plain in known or definition(plain), key
        assert f"| `{each.name}` | {each.level} | {each.test_in_words} |" in document()


def test_the_watch_costs_next_to_nothing() -> None:
    """A small fraction of the fastest training step, which takes about a tenth of a second."""
    watch, series = Watch(), healthy_series(200)
    began = time.process_time()
    for step, metrics in enumerate(series, 1):
        watch.observe(step, metrics)
    assert (time.process_time() - began) / len(series) < 2e-3


# Repetition


def slow_repetition(rows: list[list[int]]) -> float:
    shares = []
    for row in (row for row in rows if len(row) >= 8):
        runs = [tuple(row[at : at + 4]) for at in range(len(row) - 3)]
        shares.append(sum(run in runs[:at] for at, run in enumerate(runs)) / len(runs))
    return statistics.mean(shares) if shares else math.nan


def test_repetition_is_the_share_of_repeated_four_token_runs() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randint(0, 3, (int(n),), generator=generator).tolist()
        for n in torch.randint(1, 40, (50,), generator=generator)
    ]
    rows += [[7] * 20, list(range(30)), [0] * 8, [1, 2, 3, 4] * 5]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    assert repetition(tokens, lengths) == pytest.approx(slow_repetition(rows), abs=1e-6)


def test_short_responses_have_no_repetition() -> None:
    assert math.isnan(repetition(torch.zeros(3, 6, dtype=torch.int64), torch.tensor([6, 5, 1])))
    assert math.isnan(repetition(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2])))


@pytest.mark.parametrize("name", [name for name in SYMPTOMS if rule(name).test != "together"])
def test_steps_needed_is_the_earliest_step_at_which_a_rule_can_report(name: str) -> None:
    """Start the symptoms at every possible step and take the earliest report of the watch."""
    tested = rule(name)
    enough = tested.window + 2 * tested.of
    alarms = []
    for settled in (0, 3):
        for well in range(enough + settled):
            watch = Watch([tested], settled=settled)
            course = [
                *healthy_series(well),
                *({**step, **SYMPTOMS[name]} for step in healthy_series(tested.of + tested.hits)),
            ]
            alarms += [(settled, n) for n, step in enumerate(course, start=1) if watch.observe(n, step)]
    for settled in (0, 3):
        earliest = min(n for each, n in alarms if each == settled)
        assert earliest >= steps_needed(tested, settled)
        assert earliest == steps_needed(tested, settled) or tested.test in AVERAGING
