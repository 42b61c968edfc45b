"""Evaluation: sampled and greedy accuracy, pass@k and avg@n with confidence intervals, on one or several sets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.core.world import OneProcess, World
from legato.diagnostics.statistics.intervals import clustered_interval
from legato.errors import InputError
from legato.rollouts.engine import Limits
from legato.rollouts.episodes import Runner, Start
from legato.rollouts.randomness import seed_of
from legato.rollouts.sampling import Sampling
from legato.training.play import Judge, play_and_score

HELD_OUT_REWARDS = ("eval/reward_sampled", "eval/reward_greedy")
"""Metrics of an evaluation that are rewards, and so any number."""


def pass_at(successes: int, trials: int, k: int) -> float:
    """The unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k)."""
    if not 1 <= k <= trials:
        raise InputError(f"pass@k: expected k from 1 to the {trials} samples, got {k}")
    if trials - successes < k:
        return 1.0
    return 1.0 - math.comb(trials - successes, k) / math.comb(trials, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A rollout on an evaluation problem and its score."""

    rollout: Rollout
    score: Score | Unscorable

    @property
    def accuracy(self) -> float:
        """The accuracy, from 0 to 1; 0 for an unscorable rollout, since evaluations are not trained on."""
        return 0.0 if isinstance(self.score, Unscorable) else self.score.correctness


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Plays evaluation problems and scores the rollouts."""

    runner: Runner
    judge: Judge
    world: World = field(default_factory=OneProcess)

    def answer(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        samples: int,
        seed: int,
        number: int = 0,
        stream: str = "evaluation",
    ) -> list[list[Answered]]:
        """The scored samples of each problem. Seeds do not depend on the step, so evaluations are comparable.

        `number` counts the evaluations of a run: rollout ids count down from -1 - 2**32 * number, so they are unique in the
        run. `stream` names the random stream: evaluation sets have their own.
        """
        first = -1 - (number << 32)
        starts = [
            Start(
                problem=problem,
                prompt=self.runner.rendering.prompt(problem),
                seeds=tuple([seed_of(stream, seed, problem.key, k) for k in range(samples)]),
                ids=range(first - place * samples, first - (place + 1) * samples, -1),
            )
            for place, problem in enumerate(problems)
        ]
        rows = play_and_score(self.runner, self.judge, starts, sampling, self.world)
        return [[Answered(rollout=rollout, score=score) for rollout, score in row] for row in rows]


def accuracy_metrics(name: str, answered: Sequence[Sequence[Answered]]) -> dict[str, float]:
    """`eval/accuracy_<name>` with its 95 % interval, the mean reward of those that were scored, and the mean length."""
    means = [sum(a.accuracy for a in row) / len(row) for row in answered]
    low, high = clustered_interval(means)
    lengths = [a.rollout.length for row in answered for a in row]
    reward = mean_reward(answered)
    return {
        f"eval/accuracy_{name}": sum(means) / len(means),
        f"eval/accuracy_{name}_low": low,
        f"eval/accuracy_{name}_high": high,
        **({} if reward is None else {f"eval/reward_{name}": reward}),
        f"eval/length_{name}": sum(lengths) / len(lengths),
    }


def mean_reward(answered: Sequence[Sequence[Answered]]) -> float | None:
    """The mean reward of the rollouts that were scored; None if none was."""
    rewards = [a.score.reward for row in answered for a in row if isinstance(a.score, Score)]
    return math.fsum(rewards) / len(rewards) if rewards else None


def outside_accuracy(answered: Sequence[Sequence[Answered]]) -> float | None:
    """A verdict on an answer that is no accuracy, the farthest from 0 to 1; None if there is none."""
    verdicts = [a.score.accuracy for row in answered for a in row if isinstance(a.score, Score)]
    outside = [each for each in verdicts if not 0 <= each <= 1]
    return max(outside, key=lambda each: abs(each - 0.5), default=None)


def measure_names(samples: int) -> list[str]:
    """The measures of a set with so many samples a problem: avg@n, and pass@k for the powers of two up to n."""
    powers = [2**exponent for exponent in range(1, samples.bit_length()) if 2**exponent <= samples]
    return [f"avg@{samples}", *(f"pass@{k}" for k in powers)]


def values_by_problem(answered: Sequence[Sequence[Answered]]) -> dict[str, list[float]]:
    """For each measure its value on each problem: the mean accuracy, and the unbiased estimates of pass@k."""
    samples = len(answered[0])
    values = {}
    for name in measure_names(samples):
        measure, _, k = name.partition("@")
        if measure == "avg":
            values[name] = [sum(a.accuracy for a in row) / samples for row in answered]
        else:
            values[name] = [pass_at(sum(a.accuracy >= 1.0 for a in row), samples, int(k)) for row in answered]
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """An evaluation set of a run: its problems, and how they are sampled and judged."""

    name: str
    problems: Sequence[Problem]
    runner: Runner
    """The runner of the run's own evaluations."""
    limits: Limits
    judge: Judge
    sampling: Sampling
    samples: int
    every_steps: int
    world: World = field(default_factory=OneProcess)

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether the set is evaluated after a step."""
        return self.every_steps > 0 and (step % self.every_steps == 0 or last)

    def answer(self, seed: int, number: int) -> list[list[Answered]]:
        """The scored samples of each problem; `number` as for `Evaluator.answer`."""
        evaluator = Evaluator(runner=self.runner.single_turn(self.limits), judge=self.judge, world=self.world)
        stream = f"evaluation set {self.name}"
        return evaluator.answer(self.problems, self.sampling, self.samples, seed, number, stream)

    def metrics(self, answered: Sequence[Sequence[Answered]]) -> dict[str, float]:
        """`eval/NAME/avg@n` and `eval/NAME/pass@k` with their 95 % intervals over problems, and the mean length."""
        metrics: dict[str, float] = {}
        for measure, values in values_by_problem(answered).items():
            low, high = clustered_interval(values)
            key = f"eval/{self.name}/{measure}"
            metrics |= {key: math.fsum(values) / len(values), f"{key}_low": low, f"{key}_high": high}
        lengths = [a.rollout.length for row in answered for a in row]
        metrics[f"eval/{self.name}/length"] = sum(lengths) / len(lengths)
        metrics[f"eval/{self.name}/problems"] = float(len(self.problems))
        return metrics
