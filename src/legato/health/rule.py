"""The classes of rules and findings of the health watch; the rules are in `rules.toml`. Standard library only."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["note", "warning", "alarm"]
LEVELS: tuple[Level, ...] = ("note", "warning", "alarm")
"""note: worth knowing. warning: worth a look. alarm: the run is lost if nothing is done."""

Test = Literal["above", "below", "times", "share", "rises", "falls", "of-best", "of-start", "not-finite", "together"]

AVERAGING = ("rises", "falls", "of-best", "of-start")
"""Tests of the mean of the last `of` steps; the others count the steps that pass among them."""

COMPARING = ("times", "share", "rises", "falls", "of-best", "of-start")
"""Tests that compare with earlier steps."""

LATER = tuple(test for test in COMPARING if test != "of-start")
"""Comparing tests that begin after learning-rate warm-up."""

TESTS: dict[str, str] = {
    "above": "above the threshold",
    "below": "below the threshold",
    "times": "above the threshold times the median of the window",
    "share": "below the threshold times the median of the window",
    "rises": "the mean of the last steps is above that of the window by so many standard errors",
    "falls": "the mean of the last steps is below that of the window by so many standard errors",
    "of-best": "the mean of the last steps is below this share of the best mean over a window so far, by more than chance",
    "of-start": "the mean of the last steps is below this share of that of the first steps of the run, by more than chance",
    "not-finite": "there, but not a finite number",
    "together": "the first rule named and a warning of another family, within the window",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One test of a run's metrics, with its advice."""

    name: str
    family: str
    """Rules of one family test the same thing. Two findings count as two signs only if their families differ."""
    level: Level
    metrics: tuple[str, ...]
    """The first of these keys that a step has is tested; "key@*" is the largest value over the step's updates. For
    `together`, the name of a rule."""
    test: Test
    threshold: float = 0.0
    window: int = 0
    """Number of steps before the last `of` that define usual values; half are enough to begin. of-start: the first steps."""
    hits: int = 1
    of: int = 1
    """`hits` of the last `of` steps must pass. Averaging tests average `of` steps and must pass `hits` times in a row."""
    least: float = 0.0
    """A lower limit. times: of the value; share: of the median; rises, falls: of the change relative to the usual value."""
    beyond: float = 0.0
    """times: the value must also exceed `beyond` times the largest of the window, since occasional spikes are usual."""
    far: float = 0.0
    """times, with `beyond`: `far` times the median is enough, whatever the largest value of the window."""
    unless: tuple[str, float] | None = None
    """(metric, value): no finding while the metric is above the value, where the symptom is good news."""
    under: str = ""
    """No finding while this broader rule holds."""
    says: str
    """The sentence; {value}, {usual} (as per cent: {share}, {usual_share}), {threshold}, {of} and {window} are filled in."""
    causes: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    """Metrics that help to find the cause, shown as evidence."""

    @property
    def test_in_words(self) -> str:
        """The metric and the test as a sentence."""
        if self.test == "together":
            return f"`{self.metrics[0]}` and a warning of another family within {self.window} steps"
        keys = " or ".join(f"`{metric}`" for metric in self.metrics)
        if self.test == "not-finite":
            return f"{keys} is not a finite number"
        sides = {"above": ">", "below": "<", "times": ">", "share": "<"}
        if self.test in sides:
            usual = f" x median of {self.window} steps" if self.window else ""
            also = f" and > {self.least:g}" if self.least and self.test == "times" else ""
            also += f" and (> {self.beyond:g} x the largest of them or > {self.far:g} x the median)" if self.beyond else ""
            persists = f", on {self.hits} of {self.of} steps" if self.of > 1 else ""
            words = f"{keys} {sides[self.test]} {self.threshold:g}{usual}{also}{persists}"
        elif self.test in ("of-best", "of-start"):
            best = f"its best mean of {self.window}" if self.test == "of-best" else f"that of the first {self.window}"
            words = f"mean of {self.of} steps of {keys} < {self.threshold:g} x {best} steps, beyond chance"
            words += f", {self.hits} steps in a row" if self.hits > 1 else ""
        else:
            side = ">" if self.test == "rises" else "<"
            words = (
                f"mean of {self.of} steps of {keys} {side} mean of the {self.window} before by {self.threshold:g}"
                f" standard errors and by {self.least:.0%} of it"
            )
        words += f", unless `{self.unless[0]}` > {self.unless[1]:g}" if self.unless else ""
        return words + (f", unless `{self.under}` holds" if self.under else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that began to hold."""

    rule: str
    level: Level
    family: str
    step: int
    since: int
    """The first of the steps that made the rule hold."""
    metric: str
    value: float | None
    usual: float | None
    """The value compared with; None if the rule does not compare."""
    words: str
