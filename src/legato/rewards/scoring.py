"""From a reward function to scores: weighted sums with a breakdown, and what becomes of one that fails.

A reward that raises, or returns something that is not a finite number, is `Unscorable(reason)`: the rollout leaves its
group, is counted and shown once. It is never scored 0: a broken verifier would otherwise teach that right answers are wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from legato.core.rollout import Rollout, Score, Unscorable
from legato.rewards.verifiers import Verdict, finite

Reward = Callable[[Rollout], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One reward of several."""

    reward: Reward
    weight: float = 1.0
    is_accuracy: bool = True
    """Whether it says that an answer is right; shaping terms do not, and filters must not look at them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """reward = sum of weight * component; accuracy = mean of the components that judge the answer."""

    components: Mapping[str, Component] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not any(component.is_accuracy for component in self.components.values()):
            raise ValueError("a reward needs at least one component that judges the answer (is_accuracy)")

    def score(self, rollout: Rollout) -> Score | Unscorable:
        found: dict[str, float] = {}
        total, judged = 0.0, []
        for name, component in self.components.items():
            verdict = judge(component.reward, rollout)
            if isinstance(verdict, Unscorable):
                return Unscorable(f"{name}: {verdict.reason}")
            value = sum(verdict.values())
            total += component.weight * value
            found |= {name if part == "" else f"{name}/{part}": number for part, number in verdict.items()}
            if component.is_accuracy:
                judged.append(value)
        return Score(reward=total, accuracy=sum(judged) / len(judged), components=found)


def judge(reward: Reward, rollout: Rollout) -> dict[str, float] | Unscorable:
    """The verdict of one reward as a breakdown; a plain number has the one part ''."""
    try:
        verdict = reward(rollout)
    except Exception as error:  # whatever a reward raises is its own affair; the run goes on without this rollout
        return Unscorable(f"{type(error).__name__}: {error}")
    if isinstance(verdict, Unscorable):
        return verdict
    parts = verdict if isinstance(verdict, dict) else {"": verdict}
    wrong = {name: value for name, value in parts.items() if not finite(value)}
    if wrong or not parts:
        return Unscorable(f"returned {verdict!r}; a finite number or a dict of finite numbers is needed")
    return {name: float(value) for name, value in parts.items()}
