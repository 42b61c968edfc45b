"""Explains a run in words: what stands out in its records, most important first. Standard library only.

It applies the rules of the health watch to recorded steps, so it also explains logs of other trainers.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from legato.diagnostics.collapse import collapse
from legato.diagnostics.words import count
from legato.health.rule import COMPARING, LEVELS, Level, Rule
from legato.health.rules import RULES
from legato.health.watch import Watch

Record = Mapping[str, Any]

STOPPED = "stopped by the health watch"
"""Start of the recorded reason of a run that an alarm ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One thing to know about a run."""

    name: str
    level: Level
    says: str
    evidence: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()
    first: int | None = None
    """The step at which it began."""
    lasting: bool = False
    """Whether it still holds at the last step."""


@dataclass(slots=True)
class _Episode:
    rule: Rule
    words: str
    metric: str
    first: int
    announced: int
    last: int
    steps: int = 1
    times: int = 1


def explain(
    records: Sequence[Record],
    *,
    settled: int = 0,
    ignored: Iterable[str] = (),
    run: str = "RUN",
    checkpoints: Iterable[int] = (),
    lr: float | None = None,
) -> list[Diagnosis]:
    """Return findings of the rules, recoveries and a fall of held-out accuracy, most important first.

    `run`: the name to print in commands; `checkpoints`: steps that can be exported; `lr`: the configured learning rate.
    """
    diagnoses = [
        *_by_rules(records, Watch(settled=settled, ignored=ignored)),
        *_held_out_collapse(records, run, set(checkpoints)),
    ]
    diagnoses += _recoveries(
        records, lr, lost=_stopped_by_watch(records) or any(each.level == "alarm" and each.lasting for each in diagnoses)
    )
    if not any(each.level == "alarm" for each in diagnoses) and not any(_is_alarm_or_recovery(record) for record in records):
        diagnoses += _no_progress(records)
    return rank(diagnoses)


def _is_alarm_or_recovery(record: Record) -> bool:
    """Whether a record is an alarm or a recovery, perhaps of steps that were given up since."""
    return record.get("kind") == "recovery" or (record.get("kind") == "finding" and record.get("level") == "alarm")


def recoveries_of(records: Iterable[Record]) -> list[Record]:
    """Return the recovery records."""
    return [record for record in records if record.get("kind") == "recovery"]


def lr_scale(records: Iterable[Record]) -> float:
    """Return the factor that recoveries left on the configured learning rate; a resumed run keeps it."""
    return float(([1.0] + [record.get("lr_scale", 1.0) for record in recoveries_of(records)])[-1])


def rank(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Sort alarms first, then diagnoses that still hold, then the earliest: the first sign is nearest to the cause."""
    return sorted(diagnoses, key=lambda each: (-LEVELS.index(each.level), not each.lasting, each.first or 0))


def steps_of(records: Iterable[Record]) -> list[Record]:
    """Return the step records."""
    return [record for record in records if record.get("kind", "step") == "step"]


def rules_with_metrics(records: Iterable[Record]) -> list[str]:
    """Return the names of the rules whose metrics the steps contain."""
    keys = _rule_keys(steps_of(records))
    names = [rule.name for rule in RULES if rule.test != "together" and not keys.isdisjoint(rule.metrics)]
    return names + [rule.name for rule in RULES if rule.test == "together" and rule.metrics[0] in names]


def _rule_keys(steps: Iterable[Record]) -> set[str]:
    """Return the metric keys of steps as rules name them ("key@*" for per-update keys)."""
    keys = {key for record in steps for key in record}
    return keys | {f"{key.partition('@')[0]}@*" for key in keys if "@" in key}


def rules_with_enough_steps(records: Sequence[Record], settled: int = 0) -> list[str]:
    """Return the names of the rules with metrics and with enough steps to hold."""
    keys, rules = [_rule_keys([record]) for record in steps_of(records)], {rule.name: rule for rule in RULES}

    def enough(rule: Rule) -> bool:
        if rule.test == "together":
            return enough(rules[rule.metrics[0]])
        return sum(not there.isdisjoint(rule.metrics) for there in keys) >= steps_needed(rule, settled)

    return [name for name in rules_with_metrics(records) if enough(rules[name])]


def steps_needed(rule: Rule, settled: int = 0) -> int:
    """Return the fewest steps after which a rule can hold. For `together`, ask for the rule it names."""
    if rule.test == "of-start":
        return rule.window + rule.of + rule.hits - 1
    if rule.test == "of-best":
        return settled + rule.window + rule.of + rule.hits - 1
    if rule.test in COMPARING:
        return settled + max(2, rule.window // 2) + rule.of + rule.hits - 1
    return rule.hits


def has_gaps(steps: Sequence[Record]) -> bool:
    """Whether steps are missing between the recorded ones, as in a log of every tenth step."""
    numbers = [int(record["step"]) for record in steps]
    return any(later - earlier > 1 for earlier, later in pairwise(numbers))


def _by_rules(records: Sequence[Record], watch: Watch) -> list[Diagnosis]:
    episodes = dict[str, _Episode]()
    rules = {rule.name: rule for rule in RULES}
    steps = steps_of(records)
    some = has_gaps(steps)
    last = 0
    # Rows are counted in place of steps, so that windows of a sparse log span recorded rows.
    start = int(steps[0]["step"]) if steps else 0
    for row, record in enumerate(steps, start=start):
        last = int(record["step"])
        for finding in watch.observe(row, record):
            known = episodes.get(finding.rule)
            if known is None:
                words = re.sub(r"(\d) steps\b", r"\1 logged steps", finding.words) if some else finding.words
                first = int(steps[max(0, finding.since - start)]["step"])
                episodes[finding.rule] = _Episode(rules[finding.rule], words, finding.metric, first, last, last)
            else:
                known.times += 1
        for name, last_held in watch.active.items():
            if last_held == row:
                episodes[name].last = last
                episodes[name].steps += last != episodes[name].announced
    folders = {str(r["rule"]): str(r["evidence"]) for r in records if r.get("kind") == "finding" and r.get("evidence")}
    return [_diagnosis(each, steps, last, folders.get(each.rule.name)) for each in episodes.values()]


def _diagnosis(episode: _Episode, steps: Sequence[Record], last: int, folder: str | None) -> Diagnosis:
    rule = episode.rule
    again = f", in {episode.times} stretches" if episode.times > 1 else ""
    when = f"first at step {episode.announced} (signs from {episode.first}), last at step {episode.last}"
    many = count(episode.steps, "row" if has_gaps(steps) else "step")
    evidence = [f"{when}: {many}{again}", *_course(steps, episode)]
    evidence += [f"rollouts, tensors and metrics of those steps: {folder}"] if folder else []
    return Diagnosis(
        name=rule.name,
        level=rule.level,
        says=episode.words,
        evidence=tuple(evidence),
        causes=rule.causes,
        tries=rule.tries,
        first=episode.first,
        lasting=episode.last == last,
    )


def _course(steps: Sequence[Record], episode: _Episode) -> list[str]:
    """Describe the rule's metrics before, during and at the end of an episode, a line each."""
    looked_at = () if episode.rule.test in ("together", "not-finite") else (episode.metric,)
    lines = []
    for key in (*looked_at, *episode.rule.beside):
        before = [v for r in steps if int(r["step"]) < episode.first and (v := _finite(r, key)) is not None]
        during = [v for r in steps if int(r["step"]) >= episode.first and (v := _finite(r, key)) is not None]
        if during:
            start = f"{sum(before) / len(before):.3g} on average before, " if before else ""
            lines.append(f"{key}: {start}{min(during):.3g} to {max(during):.3g} since, {during[-1]:.3g} at the end")
    return lines


def _stopped_by_watch(records: Iterable[Record]) -> bool:
    """Whether the watch ended the run. A resumed run has no such record any more."""
    ends = [str(record.get("reason")) for record in records if record.get("kind") == "end"]
    return bool(ends) and ends[-1].startswith(STOPPED)


def _recoveries(records: Sequence[Record], lr: float | None, *, lost: bool) -> list[Diagnosis]:
    recoveries = recoveries_of(records)
    if not recoveries:
        return []
    causes = {rule.name: rule.causes for rule in RULES}
    return [
        Diagnosis(
            name="recovered",
            level="warning",
            says=f"The run was rolled back {count(len(recoveries), 'time')} by the health watch"
            + (", and was lost nevertheless." if lost else "."),
            evidence=tuple(_recovery_sentence(record) for record in recoveries),
            causes=tuple(dict.fromkeys(cause for record in recoveries for cause in causes.get(str(record.get("rule")), ()))),
            tries=(_suggest_lower_settings if lost else _suggest_final_settings)(
                lr, lr_scale(recoveries), float(recoveries[-1].get("clip_scale", 1.0))
            ),
            first=int(recoveries[0]["step"]),
        )
    ]


def _suggest_final_settings(lr: float | None, scale: float, clip_scale: float) -> tuple[str, ...]:
    """Suggest starting the next run with the settings that the recovered run ended with."""
    rate = f"a learning rate times {scale:g}" if lr is None else f"training.lr = {lr * scale:g} ({lr:g} x {scale:g})"
    changed = [rate] if scale != 1 else []
    changed += [f"bounds of the clip times {clip_scale:g}"] if clip_scale != 1 else []
    if not changed:
        return ("read the rollouts of the steps given up: only the problems were changed",)
    return (f"start with {' and '.join(changed)}: that is what it went on with",)


def _suggest_lower_settings(lr: float | None, scale: float, clip_scale: float) -> tuple[str, ...]:
    """Suggest settings below those the run was lost with."""
    if lr is None:
        below = f"start with less than half of the learning rate times {scale:g}: with that it was lost"
    else:
        below = (
            f"start with training.lr = {lr * scale / 2:g} or less: half of {lr * scale:g} ({lr:g} x {scale:g}), which was in"
            " force at the end and with which it was lost"
        )
    return (below, *([f"bounds of the clip times {clip_scale:g} did not save it either"] if clip_scale != 1 else []))


def _recovery_sentence(record: Record) -> str:
    folder = record.get("evidence")
    return str(record.get("words", "")) + (f" What was given up: {folder}." if folder else "")


def _held_out_collapse(records: Sequence[Record], run: str, checkpoints: set[int]) -> list[Diagnosis]:
    keys = ("eval/accuracy_sampled", "eval/accuracy_sampled_low", "eval/accuracy_sampled_high")
    evaluations = [
        record
        for record in records
        if record.get("kind") == "evaluation" and all(_finite(record, key) is not None for key in keys)
    ]
    intervals = [tuple(float(record[key]) for key in keys) for record in evaluations]
    why = collapse([(value, low, high) for value, low, high in intervals])
    if why is None:
        return []
    accuracies = {int(each["step"]): float(each[keys[0]]) for each in evaluations if int(each["step"]) in checkpoints}
    best = max(accuracies, key=lambda step: accuracies[step], default=None)
    export = (
        ()
        if best is None
        else (f"take the best checkpoint: legato export {run} FOLDER --step {best} ({accuracies[best]:.1%})",)
    )
    return [
        Diagnosis(
            name="held-out",
            level="alarm",
            says=f"Held-out accuracy (sampled) {why}.",
            evidence=(", ".join(f"{value:.1%}" for value, *_ in intervals[-8:]) + " in the last evaluations",),
            causes=("a collapse of the policy", "a reward that is gamed: it may have stayed up meanwhile"),
            tries=(*export, "see the findings that began before the fall"),
            lasting=True,
        )
    ]


def _no_progress(records: Sequence[Record]) -> list[Diagnosis]:
    """Return a note if the reward did not move between the first and the last fifth of the steps."""
    rewards = [value for record in steps_of(records) if (value := _finite(record, "reward/mean")) is not None]
    fifth = len(rewards) // 5
    if fifth < 10:
        return []
    first, last = rewards[:fifth], rewards[-fifth:]
    change = sum(last) / fifth - sum(first) / fifth
    mean = sum(first) / fifth
    error = math.sqrt(2 * sum((value - mean) ** 2 for value in first) / (fifth - 1) / fifth)
    if abs(change) > 2 * error:
        return []
    rose = change >= 0
    rate = "a learning rate that is too low" if rose else "a learning rate that is too high, where drift/k3 grew"
    lever = "a higher training.lr" if rose else "a lower training.lr, where drift/k3 or gradient/norm grew"
    return [
        Diagnosis(
            name="no-progress",
            level="note",
            says=f"The reward did not move: {mean:.3g} in the first fifth of the steps, {mean + change:.3g} in the last.",
            evidence=(f"the difference is {change:+.2g}, within two standard errors ({2 * error:.2g}) of chance",),
            causes=(rate, "problems too hard or too easy", "nearly everything clipped"),
            tries=(lever, "groups/all_right and groups/all_wrong say how hard the problems are"),
            lasting=True,
        )
    ]


def _finite(record: Record, key: str) -> float | None:
    value = record.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if number and value is not None else None
