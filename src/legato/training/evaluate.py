"""Evaluation: sampled and greedy accuracy, pass@k and avg@n with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.diagnostics.statistics.intervals import mean_interval, wilson_interval
from legato.errors import InputError
from legato.rollouts.episodes import Runner, Start
from legato.rollouts.randomness import seed_of
from legato.rollouts.sampling import Sampling
from legato.training.collect import Judge, score_rollouts


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
        """The accuracy; 0 for an unscorable rollout, since evaluations are not trained on."""
        return 0.0 if isinstance(self.score, Unscorable) else self.score.accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Plays evaluation problems and scores the rollouts."""

    runner: Runner
    judge: Judge

    def answer(
        self, problems: Sequence[Problem], sampling: Sampling, samples: int, seed: int, number: int = 0
    ) -> list[list[Answered]]:
        """The scored samples of each problem. Seeds do not depend on the step, so evaluations are comparable.

        `number` counts the evaluations of a run: rollout ids count down from -1 - 2**32 * number, so they are unique in the
        run.
        """
        first = -1 - (number << 32)
        starts = [
            Start(
                problem=problem,
                prompt=self.runner.rendering.prompt(problem),
                seeds=tuple([seed_of("evaluation", seed, problem.key, k) for k in range(samples)]),
                ids=range(first - place * samples, first - (place + 1) * samples, -1),
            )
            for place, problem in enumerate(problems)
        ]
        rollouts = [rollout for row in self.runner.play(starts, sampling) for rollout in row]
        scores = score_rollouts(self.judge, rollouts)
        answered = [Answered(rollout=r, score=s) for r, s in zip(rollouts, scores, strict=True)]
        return [answered[place * samples : (place + 1) * samples] for place in range(len(problems))]


def accuracy_metrics(name: str, answered: Sequence[Sequence[Answered]]) -> dict[str, float]:
    """`eval/accuracy_<name>` with its 95 % interval, and the mean length."""
    means = [sum(a.accuracy for a in row) / len(row) for row in answered]
    one = all(len(row) == 1 for row in answered) and all(mean in (0.0, 1.0) for mean in means)
    low, high = wilson_interval(sum(means), len(means)) if one else mean_interval(means)
    lengths = [len(a.rollout.tokens) for row in answered for a in row]
    return {
        f"eval/accuracy_{name}": sum(means) / len(means),
        f"eval/accuracy_{name}_low": low,
        f"eval/accuracy_{name}_high": high,
        f"eval/length_{name}": sum(lengths) / len(lengths),
    }
