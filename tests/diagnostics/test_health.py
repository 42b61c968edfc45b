"""The rules of the health watch against a plain account of each, on series written by hand."""

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


def watched(rules: Sequence[Rule], series: Sequence[dict[str, Any]], **options: Any) -> list[tuple[int, str]]:
    watch = Watch(rules, **options)
    return [(f.step, f.rule) for step, metrics in enumerate(series, 1) for f in watch.observe(step, metrics)]


def wavy(key: str, level: float, count: int = STEPS, size: float = 0.1) -> list[dict[str, Any]]:
    """A healthy series: it moves around a level, by up to a tenth of it."""
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
    "entropy/mean": 0.4,
    "length/mean": 30.0,
    "length/truncated": 0.02,
    "rollouts/repetition": 0.02,
    "rollouts/unscorable": 0.0,
    "router/flip_mean": 0.01,
    "groups/zero_variance": 0.3,
    "groups/all_right": 0.2,
}
"""A step of a run that is well."""

EXACT = {"update/applied", "drift/sequence_effective_size"}
"""Shares at their upper end: they do not move above it."""


def healthy(count: int = STEPS) -> list[dict[str, Any]]:
    noise = [1 + 0.1 * math.sin(1.7 * step) for step in range(count)]
    return [{key: value if key in EXACT else value * wave for key, value in HEALTHY.items()} for wave in noise]


ILL: dict[str, dict[str, Any]] = {
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
"""What makes each rule hold."""

EARLIEST = {
    **dict.fromkeys(("not-finite", "gradient-not-finite", "updates-dropped", "gradient-spike"), 1),
    **dict.fromkeys(("drift", "anchor-off"), 2),
    "nothing-to-learn": 4,
    "updates-lost": 4,
    "entropy-fall": 5,
    "nothing-to-compare": 8,
    "solved": 8,
    "clip-half": 10,
    "clip-never": 20,
    "collapse": 3,
}
"""Steps of illness after which a rule that counts steps is told, where that is not 3; rules of a mean have none."""


def test_a_healthy_run_is_left_in_peace() -> None:
    assert watched(RULES, healthy(400)) == []


def test_every_rule_has_a_case() -> None:
    assert {*ILL} == {each.name for each in RULES}


@pytest.mark.parametrize("name", ILL)
def test_a_rule_that_holds_is_found_once(name: str) -> None:
    ill = [{**step, **ILL[name]} for step in healthy(25)]
    # But for the rule that would say the same of more.
    rules = [each for each in RULES if each.name != rule(name).under]
    found = [step for step, told in watched(rules, [*healthy(), *ill]) if told == name]
    assert len(found) == 1, found
    if rule(name).test not in AVERAGING:
        assert found[0] == STEPS + EARLIEST.get(name, 3)
    else:
        assert STEPS < found[0] <= STEPS + rule(name).of + rule(name).hits - 1


@pytest.mark.parametrize("name", [each.name for each in RULES if each.of > 1 and each.hits > 1])
def test_one_bad_step_raises_no_finding(name: str) -> None:
    series = healthy(STEPS + 5)
    series[STEPS] |= ILL[name]
    assert name not in [told for _, told in watched([rule(name)], series)]


def test_a_fall_is_told_by_standard_errors_and_size() -> None:
    """The plain account: means, a standard deviation, a square root."""
    falls = rule("reward-fall")
    series = [*wavy("reward/mean", 0.5), *wavy("reward/mean", 0.36, 30, 0.4)]
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
    assert watched([falls], series)[0] == (expected, "reward-fall")


def test_a_slow_fall_is_seen_beside_the_best_though_each_window_looks_usual() -> None:
    series = [{"reward/mean": max(0.05, 0.8 - 0.001 * step)} for step in range(700)]
    found = {told: step for step, told in watched(RULES, series)}
    assert "reward-fall" not in found and 400 < found["reward-lost"] < 480


def still(chance: float, seed: int, low: float = 0.0, high: float = 1.0) -> list[dict[str, Any]]:
    """32 problems of 8 answers, most of them all right or all wrong, at rates at which models begin."""
    draw, steps = random.Random(seed), []
    for _ in range(600):
        rates = [draw.betavariate(chance, 1 - chance) for _ in range(32)]
        share = statistics.fmean(sum(draw.random() < rate for _ in range(8)) / 8 for rate in rates)
        steps.append({"reward/mean": low + (high - low) * share, "accuracy/mean": share})
    return steps


@pytest.mark.parametrize(("chance", "low", "high"), [(0.02, 0.0, 1.0), (0.05, 0.0, 1.0), (0.1, 0.0, 1.0), (0.6, -1.0, 1.0)])
def test_a_reward_that_does_not_move_is_not_lost(chance: float, low: float, high: float) -> None:
    told = [name for _, name in watched(RULES, still(chance, 0, low, high))]
    assert not {"reward-lost", "reward-below-start", "accuracy-lost", "collapse"} & {*told}


def test_a_quiet_start_makes_no_alarm_of_the_steps_that_follow() -> None:
    """Five values may lie close together by chance: what is chance beside them is then anything."""
    below, runs = rule("reward-below-start"), [still(0.05, seed) for seed in range(10)]
    assert any(watched([replace(below, hits=1)], steps) for steps in runs), "these runs would not show it"
    assert not any(watched([below], steps) for steps in runs)


def test_usual_values_are_measured_after_the_warm_up() -> None:
    """Ratios spread with the learning rate: the first steps are no measure of what is usual."""
    rising = [{"ratio/sequence_std": 0.5 * min(1.0, step / 30) ** 4 + 1e-6} for step in range(1, 80)]
    assert watched([rule("ratio-spread")], rising) != []
    assert watched([rule("ratio-spread")], rising, settled=30) == []


def test_good_news_is_no_alarm() -> None:
    solved = {"groups/zero_variance": 1.0, "groups/all_right": 1.0, "accuracy/mean": 1.0, "reward/mean": 1.0}
    certain = {"entropy/mean": 0.001}
    told = [name for _, name in watched(RULES, [*healthy(), *[{**step, **solved, **certain} for step in healthy(30)]])]
    assert told == ["solved"]


def test_an_accuracy_that_falls_with_the_reward_is_told_once() -> None:
    ill = [{**step, "reward/mean": 0.2, "accuracy/mean": 0.2} for step in healthy(15)]
    told = [name for _, name in watched(RULES, [*healthy(), *ill])]
    assert "reward-fall" in told and "accuracy-fall" not in told and "accuracy-lost" not in told


def test_a_rule_is_told_again_after_a_rest() -> None:
    bad, good = [{"rollouts/unscorable": 0.4}] * 5, [{"rollouts/unscorable": 0.0}]
    only = [rule("unscorable")]
    assert len(watched(only, [*bad, *good * (REST - 3), *bad])) == 1
    assert len(watched(only, [*bad, *good * (REST + 1), *bad])) == 2


def test_a_metric_that_is_missing_is_no_sign() -> None:
    series = healthy()
    for step in series[20:]:
        for key in ("entropy/mean", "drift/k3", "clip/tokens", "reward/mean"):
            step.pop(key)
    assert watched(RULES, series) == []


def test_rules_that_are_ignored_are_silent() -> None:
    ill = [{**step, **ILL["drift"]} for step in healthy(10)]
    assert "drift" not in [name for _, name in watched(RULES, [*healthy(), *ill], ignored=["drift"])]


@pytest.mark.parametrize("cut", [1, 23, STEPS + 1, STEPS + 3])
def test_a_watch_that_is_stored_and_read_finds_the_same(cut: int) -> None:
    series = [*healthy(), *[{**step, **ILL["collapse"], **ILL["drift"]} for step in healthy(40)]]
    straight, first = Watch(), Watch()
    expected = [straight.observe(step, metrics) for step, metrics in enumerate(series, 1)]
    found = [first.observe(step, metrics) for step, metrics in enumerate(series[:cut], 1)]
    second = Watch()
    second.load(json.loads(json.dumps(first.state())))
    found += [second.observe(step, metrics) for step, metrics in enumerate(series[cut:], cut + 1)]
    assert found == expected and second.state() == straight.state()


def test_spikes_that_come_now_and_then_are_usual() -> None:
    """Late in a run few groups are left to learn from, and what they do jumps: half as high again as ever is more."""
    drift, spiky = rule("drift"), [{"drift/k3": 0.05 if step % 15 == 0 else 0.008} for step in range(100)]
    assert drift.threshold * 0.008 < 0.05 < 0.07 < drift.beyond * 0.05 < 0.077 < drift.far * 0.008 < 0.081
    for value, told in {0.07: [], 0.077: [(102, "drift")]}.items():
        assert watched([drift], [*spiky, *[{"drift/k3": value}] * 2]) == told
    # Ten times the usual is enough, though the window held more.
    high = [{"drift/k3": 0.09 if step % 15 == 0 else 0.008} for step in range(100)]
    assert watched([drift], [*high, *[{"drift/k3": 0.081}] * 2]) == [(102, "drift")]


def test_a_reward_lost_while_the_learning_rate_warms_up_is_told() -> None:
    """Rules of the usual know nothing of the first steps; the beginning of the run is what there is to compare with."""
    below = rule("reward-below-start")
    series = [*wavy("reward/mean", 0.5, below.window), *wavy("reward/mean", 0.1, 30)]
    assert watched(RULES, series, settled=25)[:1] == [(below.window + below.of + below.hits - 1, "reward-below-start")]
    rising = [*wavy("reward/mean", 0.1, below.window), *wavy("reward/mean", 0.5, 60)]
    assert watched(RULES, rising, settled=25) == []
    # Half of next to nothing is chance: one right answer of 64 a step, then none.
    rare = [{"reward/mean": (step % 4 == 0) / 64 if step < 12 else 0.0} for step in range(40)]
    assert "reward-below-start" not in [told for _, told in watched(RULES, rare)]


def test_the_beginning_of_a_run_survives_a_checkpoint() -> None:
    below = rule("reward-below-start")
    series = [*wavy("reward/mean", 0.5, below.window), *wavy("reward/mean", 0.1, below.of + below.hits - 1)]
    for cut in range(1, len(series)):
        first, second = Watch([below]), Watch([below])
        for step, metrics in enumerate(series[:cut], 1):
            assert not first.observe(step, metrics)
        second.load(json.loads(json.dumps(first.state())))
        told = [found.step for step, metrics in enumerate(series[cut:], cut + 1) for found in second.observe(step, metrics)]
        assert told == [len(series)]


def test_a_rule_loaded_midway_does_not_take_its_first_steps_for_the_start() -> None:
    """A checkpoint of a version without the rule, or of a run that ignored it, says nothing of the first steps."""
    below, other = rule("reward-below-start"), rule("reward-fall")
    before, after = Watch([other]), Watch([other, below])
    for step, metrics in enumerate(wavy("reward/mean", 0.2, 30), 1):
        before.observe(step, metrics)
    after.load(json.loads(json.dumps(before.state())))
    fallen = [*wavy("reward/mean", 0.8, below.window), *wavy("reward/mean", 0.3, 30)]
    assert below.name not in [found.rule for step, each in enumerate(fallen, 31) for found in after.observe(step, each)]
    again = Watch([other, below])
    again.load(json.loads(json.dumps(after.state())))
    assert not again.start


def test_an_alarm_that_holds_is_told_again_where_somebody_takes_over() -> None:
    drift, bad, good = rule("drift"), {"drift/k3": 1.0}, {"drift/k3": 0.006}

    def resumed(after: Sequence[Mapping[str, float]], **given: Any) -> list[tuple[int, int]]:
        """Steps and first signs of what a watch says of steps 44 and on that takes over after 41 (bad), 42 and 43."""
        first, second = Watch([drift]), Watch([drift])
        for step, metrics in enumerate([good] * 39 + [bad] * 2 + list(before), 1):
            first.observe(step, metrics)
        second.load(json.loads(json.dumps(first.state())))
        second.renew(**given)
        return [(f.step, f.since) for step, metrics in enumerate(after, 44) for f in second.observe(step, metrics)]

    before = [bad, bad]
    assert resumed([bad, bad, bad]) == [(44, 40)], "once, and from the step it began with"
    assert resumed([bad, bad], answered=["drift"]) == []
    assert resumed([good, bad, bad]) == [(45, 40)]
    assert resumed([good] * REST + [bad] * 3) == [(65, 64)], "another one"
    before = [good, good]
    assert resumed([bad, bad, bad]) == [], "it did not hold any more"


def test_the_first_bad_step_is_known() -> None:
    series = [*healthy(), *[{**step, **ILL["drift"]} for step in healthy(5)]]
    watch = Watch([rule("drift")])
    (found,) = (each for step, metrics in enumerate(series, 1) for each in watch.observe(step, metrics))
    assert (found.since, found.step, found.level) == (STEPS + 1, STEPS + 2, "alarm")
    assert found.usual == pytest.approx(0.006, rel=0.1) and f"{found.value:.3g}" in found.words


def test_rules_are_whole() -> None:
    known = {metric.key for metric in RUN_METRICS}
    for each in RULES:
        assert each.level in LEVELS and each.says.endswith(".") and each.causes and each.tries, each.name
        assert (each.window > 0) == (each.test in COMPARING or each.test == "together"), each.name
        for key in each.metrics if each.test != "together" else ():
            plain = key.partition("@")[0]
            assert plain in known or definition(plain), key
        assert f"| `{each.name}` | {each.level} | {each.test_in_words} |" in document()


def test_the_watch_costs_next_to_nothing() -> None:
    """Far less than the smallest step, which takes about a tenth of a second."""
    watch, series = Watch(), healthy(200)
    began = time.process_time()
    for step, metrics in enumerate(series, 1):
        watch.observe(step, metrics)
    assert (time.process_time() - began) / len(series) < 2e-3


# Repetition


def slowly(rows: list[list[int]]) -> float:
    shares = []
    for row in (row for row in rows if len(row) >= 8):
        runs = [tuple(row[at : at + 4]) for at in range(len(row) - 3)]
        shares.append(sum(run in runs[:at] for at, run in enumerate(runs)) / len(runs))
    return statistics.mean(shares) if shares else math.nan


def test_repetition_is_the_share_of_runs_that_stood_there_before() -> None:
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
    assert repetition(tokens, lengths) == pytest.approx(slowly(rows), abs=1e-6)


def test_short_responses_have_no_repetition() -> None:
    assert math.isnan(repetition(torch.zeros(3, 6, dtype=torch.int64), torch.tensor([6, 5, 1])))
    assert math.isnan(repetition(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2])))


@pytest.mark.parametrize("name", [name for name in ILL if rule(name).test != "together"])
def test_the_steps_a_rule_needs_are_those_after_which_it_can_hold(name: str) -> None:
    """The watch itself, ill from every step on that there is: the earliest it is told."""
    looked_at = rule(name)
    enough = looked_at.window + 2 * looked_at.of
    told = []
    for settled in (0, 3):
        for well in range(enough + settled):
            watch = Watch([looked_at], settled=settled)
            course = [*healthy(well), *({**step, **ILL[name]} for step in healthy(looked_at.of + looked_at.hits))]
            told += [(settled, n) for n, step in enumerate(course, start=1) if watch.observe(n, step)]
    for settled in (0, 3):
        earliest = min(n for each, n in told if each == settled)
        assert earliest >= steps_needed(looked_at, settled)
        assert earliest == steps_needed(looked_at, settled) or looked_at.test in AVERAGING
