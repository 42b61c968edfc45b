"""The health watch: reads the metrics of each step and returns findings. Works on plain numbers on the host.

A checkpoint stores the state of the watch, so a resumed run finds what an uninterrupted run finds. After `renew` the watch
also reports the alarms that held when the checkpoint was saved.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from legato.health.rule import AVERAGING, LATER, LEVELS, Finding, Rule
from legato.health.rules import RULES

REST = 20
"""A rule is reported again only after this many steps in which it did not hold."""

CHANCE = 5.0
"""Standard errors by which a mean must lie below the best one to count. Half of a reward of a few per cent is one lucky
problem, and half of a reward that may be negative means nothing."""

Judged = tuple[bool, float | None, float | None]
"""Whether a step passes the test of a rule, the tested value, and the value it was compared with."""


class Watch:
    """Applies the rules. The first `settled` steps (learning-rate warm-up) do not count as usual values."""

    def __init__(self, rules: Sequence[Rule] = RULES, *, settled: int = 0, ignored: Iterable[str] = ()) -> None:
        left_out = set(ignored)
        self.rules = [rule for rule in rules if rule.name not in left_out]
        self.settled = settled
        self._length = max((rule.window + rule.of for rule in self.rules), default=0)
        compared = (rule for rule in self.rules if rule.test in LATER)
        self._watched = sorted({metric for rule in compared for metric in rule.metrics})
        self.history: dict[str, list[float | None]] = {}
        """The last values of each metric that a rule compares with its past; None if a step lacks the metric."""
        self.best: dict[str, float] = {}
        """The best mean over a window so far, by rule."""
        self.spread: dict[str, float] = {}
        """The standard deviation within the window of that best mean, by rule."""
        self.start: dict[str, list[float]] = {}
        """The first values of the run and the last ones, by rule that compares them."""
        self._without_start: set[str] = set()
        """Rules of `start` whose first values were not stored. Later values cannot replace them."""
        self.hits: dict[str, list[bool]] = {}
        """Which of the last steps passed the test, by rule."""
        self.active: dict[str, int] = {}
        """The rules that hold, with the last step at which they held."""
        self.since: dict[str, int] = {}
        """By active rule, the first step that made it hold."""
        self.last = 0
        """The last step observed."""
        self._renewed: set[str] = set()
        """Rules that are reported again at the next step at which they hold, unless they end first."""

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Read the metrics of a step and return the rules that begin to hold with it."""
        self.last = step
        if step > self.settled:
            for key in self._watched:
                held = self.history.setdefault(key, [])
                held.append(_number(metrics, key))
                del held[: -self._length]
        findings: list[Finding] = []
        for rule in self.rules:
            passed, value, usual, metric = self._judge(rule, step, metrics)
            if self._holds(rule, passed):
                began = rule.name not in self.active
                self.active[rule.name] = step
                if began:
                    self.since[rule.name] = self._first_sign(rule, step)
                if began or rule.name in self._renewed:
                    self._renewed.discard(rule.name)
                    findings.append(self._finding(rule, step, metric, value, usual))
            elif rule.name in self.active and step - self.active[rule.name] >= REST:
                del self.active[rule.name], self.since[rule.name]
                self._renewed.discard(rule.name)
        return findings

    def _first_sign(self, rule: Rule, step: int) -> int:
        if rule.test in AVERAGING:
            return step - rule.of - rule.hits + 2
        held = self.hits[rule.name]
        return step - (len(held) - 1 - held.index(True))

    def _holds(self, rule: Rule, passed: bool) -> bool:
        held = self.hits.setdefault(rule.name, [])
        held.append(passed)
        del held[: -(rule.hits if rule.test in AVERAGING else rule.of)]
        return passed and sum(held) >= rule.hits

    def _judge(self, rule: Rule, step: int, metrics: Mapping[str, Any]) -> tuple[bool, float | None, float | None, str]:
        if rule.test == "together":
            return (*self._test_together(rule, step), rule.metrics[0])
        metric = next((key for key in rule.metrics if _present(metrics, key)), None)
        if metric is None:
            return False, None, None, rule.metrics[0]
        if rule.test == "not-finite":
            return _number(metrics, metric) is None, None, None, metric
        value = _number(metrics, metric)
        if value is None:
            return False, None, None, metric
        passed, value, usual = self._compare(rule, metric, value)
        passed = passed and self.active.get(rule.under) != step
        if rule.unless is not None and (excuse := _number(metrics, rule.unless[0])) is not None:
            passed = passed and excuse <= rule.unless[1]
        return passed, value, usual, metric

    def _compare(self, rule: Rule, metric: str, value: float) -> Judged:
        if rule.test == "above":
            return value > rule.threshold, value, None
        if rule.test == "below":
            return value < rule.threshold, value, None
        if rule.test == "of-start":
            return self._test_of_start(rule, value)
        held = self.history.get(metric, [])
        before = [each for each in held[: -rule.of][-rule.window :] if each is not None]
        recent = [each for each in held[-rule.of :] if each is not None]
        if rule.test == "of-best":
            return self._test_of_best(rule, before, recent)
        if len(before) < max(2, rule.window // 2) or not recent:
            return False, value, None
        if rule.test in ("times", "share"):
            usual = statistics.median(before)
            if rule.test == "times":
                new = value > rule.beyond * max(before) or 0 < rule.far * usual < value
                return new and value > max(rule.threshold * usual, rule.least), value, usual
            return value < rule.threshold * usual and usual > rule.least, value, usual
        return _has_moved(rule, before, recent)

    def _test_of_best(self, rule: Rule, before: Sequence[float], recent: Sequence[float]) -> Judged:
        if len(before) >= rule.window and (usual := statistics.fmean(before)) > self.best.get(rule.name, -math.inf):
            self.best[rule.name], self.spread[rule.name] = usual, statistics.stdev(before)
        best = self.best.get(rule.name)
        if best is None or len(recent) < rule.of:
            return False, None, best
        return _has_fallen(rule, recent, best, self.spread.get(rule.name, 0.0))

    def _test_of_start(self, rule: Rule, value: float) -> Judged:
        if rule.name in self._without_start:
            return False, None, None
        held = self.start.setdefault(rule.name, [])
        held.append(value)
        del held[rule.window : -rule.of]
        first, recent = held[: rule.window], held[rule.window :]
        if len(recent) < rule.of:
            return False, None, None
        return _has_fallen(rule, recent, statistics.fmean(first), statistics.stdev(first))

    def _test_together(self, rule: Rule, step: int) -> Judged:
        first = next((each for each in self.rules if each.name == rule.metrics[0]), None)
        if first is None:
            return False, None, None
        families = {
            each.family
            for each in self.rules
            if each.level != "note" and each.test != "together" and step - self.active.get(each.name, -REST) < rule.window
        }
        recent = step - self.active.get(first.name, -REST) < rule.window
        return recent and bool(families - {first.family}), None, None

    def _finding(self, rule: Rule, step: int, metric: str, value: float | None, usual: float | None) -> Finding:
        fields = {
            "value": _format(value),
            "usual": _format(usual),
            "share": _percent(value),
            "usual_share": _percent(usual),
            "threshold": f"{rule.threshold:g}",
            "of": rule.of,
            "window": rule.window,
        }
        return Finding(
            rule=rule.name,
            level=rule.level,
            family=rule.family,
            step=step,
            since=self.since[rule.name],
            metric=metric,
            value=value,
            usual=usual,
            words=rule.says.format(**fields),
        )

    def alarms(self) -> set[str]:
        """Return the alarms that held at the last step."""
        return {each.name for each in self.rules if each.level == "alarm" and self.active.get(each.name) == self.last}

    def renew(self, answered: Iterable[str] = ()) -> None:
        """Report the current alarms once more when they hold again, since the resumed run has not acted on them.

        Alarms in `answered` were acted on and stay silent.
        """
        self._renewed = (self._renewed | self.alarms()) - set(answered)

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {
            "history": {key: list(values) for key, values in self.history.items()},
            "best": dict(self.best),
            "spread": dict(self.spread),
            "start": {name: list(values) for name, values in self.start.items()},
            "hits": {name: list(held) for name, held in self.hits.items()},
            "active": dict(self.active),
            "since": dict(self.since),
            "last": self.last,
            "renewed": sorted(self._renewed),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Rules that are ignored now or were renamed are left out."""
        known = {rule.name for rule in self.rules}
        self.history = {key: list(values) for key, values in state["history"].items()}
        self.best, self.spread, self.active, self.since = (
            {name: value for name, value in state.get(field, {}).items() if name in known}
            for field in ("best", "spread", "active", "since")
        )
        self.hits, self.start = (
            {name: list(held) for name, held in state.get(field, {}).items() if name in known} for field in ("hits", "start")
        )
        self._renewed = {name for name in state.get("renewed", ()) if name in known}
        self.last = int(state.get("last", max(self.active.values(), default=0)))
        # Saved by another version, or while the rule was ignored.
        missed = {rule.name for rule in self.rules if rule.test == "of-start" and rule.name not in self.start}
        self._without_start = missed if state["hits"] else set()


def worst(findings: Iterable[Finding]) -> Finding | None:
    """Return the gravest finding; the first among equals, None if there is none."""
    return max(findings, key=lambda finding: LEVELS.index(finding.level), default=None)


def _has_moved(rule: Rule, before: Sequence[float], recent: Sequence[float]) -> Judged:
    """Whether the mean of `recent` differs from the mean of `before` by more than chance and by more than `rule.least`."""
    mean, usual = statistics.fmean(recent), statistics.fmean(before)
    error = statistics.stdev(before) * math.sqrt(1 / len(recent) + 1 / len(before))
    change = mean - usual if rule.test == "rises" else usual - mean
    enough = len(recent) == rule.of and change > rule.threshold * error and change > rule.least * abs(usual)
    return enough, mean, usual


def _has_fallen(rule: Rule, recent: Sequence[float], usual: float, spread: float) -> Judged:
    """Whether the mean of `recent` is below `rule.threshold` times `usual`, by more than chance."""
    mean, error = statistics.fmean(recent), spread * math.sqrt(1 / rule.of + 1 / rule.window)
    return usual > 0 and mean < rule.threshold * usual and usual - mean > CHANCE * error, mean, usual


def _present(metrics: Mapping[str, Any], key: str) -> bool:
    if key.endswith("@*"):
        return any(each.startswith(key[:-1]) for each in metrics)
    return key in metrics


def _number(metrics: Mapping[str, Any], key: str) -> float | None:
    """Return the metric if it is a finite number, else None. A key that ends in "@*": the largest over updates."""
    if key.endswith("@*"):
        values = [_number(metrics, each) for each in metrics if each.startswith(key[:-1])]
        return max((each for each in values if each is not None), default=None)
    value = metrics.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}%"
