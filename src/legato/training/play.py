"""Plays episodes and scores them: each rank its share of the problems, and all ranks get all rollouts."""

from collections.abc import Callable, Sequence

from legato.core.rollout import Rollout, Score, Unscorable
from legato.core.world import World
from legato.rollouts.episodes import Runner, Start
from legato.rollouts.sampling import Sampling
from legato.training.ranks.exchange import ScoredRollout, exchange

Judge = Callable[[Sequence[Rollout]], list[Score | Unscorable]]


def play_and_score(
    runner: Runner, judge: Judge, starts: Sequence[Start], sampling: Sampling, world: World
) -> list[list[ScoredRollout]]:
    """The scored rollouts of each start, in the order of its seeds. Start k is played by rank k modulo the ranks."""
    own = starts if world.size == 1 else starts[world.rank :: world.size]
    rows = runner.play(own, sampling)
    rollouts = [rollout for row in rows for rollout in row]
    with runner.turns:
        scores = iter(score_rollouts(judge, rollouts))
    mine = [[(rollout, next(scores)) for rollout in row] for row in rows]
    return mine if world.size == 1 else exchange(mine, starts, world)


def score_rollouts(judge: Judge, rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
    """A score for each rollout. A rollout whose episode failed is unscorable; the judge does not see it."""
    finished = [rollout for rollout in rollouts if rollout.fault is None]
    scores = judge(finished)
    if len(finished) == len(rollouts):
        return scores
    judged = iter(scores)
    return [next(judged) if rollout.fault is None else Unscorable(rollout.fault) for rollout in rollouts]
