"""Turn-level advantages: every token of a turn has the turn's number, tool tokens have 0."""

from dataclasses import dataclass

import torch
from torch import Tensor

from legato.advantages.estimator import Estimate, Estimator, Scores
from legato.advantages.siblings import compare
from legato.core.parts import choice, integer, number, part
from legato.core.scan import reverse_recurrence
from legato.core.segments import renumber
from legato.core.shapes import PerToken
from legato.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of a batch, U the largest number of them in any response."""

    reached: Tensor
    """[B, U] bool"""
    rewards: Tensor
    """[B, U], 0 at turns not reached."""
    index: Tensor
    """[B, T]: the turn of each token, 0 where there is none."""
    tokens: Tensor
    """[B, T] bool: tokens that belong to a turn."""

    @classmethod
    def of(cls, scores: Scores) -> "Turns":
        assert scores.turn is not None and scores.mask is not None
        tokens = scores.mask.tokens
        index = torch.where(tokens, scores.turn, 0)
        rows, count = len(index), int(index.max()) + 1 if index.numel() else 1
        if scores.turn_rewards is not None:
            if scores.turn_rewards.shape[1] < count:
                raise InputError(
                    f"turn_rewards has {scores.turn_rewards.shape[1]} columns but turn reaches index {count - 1};"
                    f" [B, {count}] or more is needed"
                )
            count = scores.turn_rewards.shape[1]
        reached = torch.zeros(rows, count, dtype=torch.bool, device=index.device)
        owner = torch.arange(rows, device=index.device).unsqueeze(1).expand_as(index)
        reached[owner[tokens], index[tokens]] = True
        if scores.turn_rewards is not None:
            rewards = torch.where(reached, scores.turn_rewards.double(), 0.0)
            if not bool(torch.isfinite(rewards).all()):
                raise InputError("turn_rewards holds a value that is not finite at a turn that was reached")
        else:
            last = torch.where(reached, torch.arange(count, device=index.device), -1).amax(1, keepdim=True)
            is_last = torch.arange(count, device=index.device) == last
            rewards = torch.where(is_last, scores.rewards.unsqueeze(1), 0.0)
        return cls(reached=reached, rewards=rewards, index=index, tokens=tokens)

    def returns(self, gamma: float) -> Tensor:
        """[B, U]: the discounted sum of rewards from each turn on."""
        return reverse_recurrence(self.rewards, torch.full_like(self.rewards, gamma))

    def spread(self, per_turn: Tensor) -> PerToken:
        """Values per turn [B, U] as values per token [B, T], 0 outside turns."""
        return torch.where(self.tokens, per_turn.gather(1, self.index), 0.0)


def _compare_siblings(values: Tensor, ids: Tensor, member: Tensor | None, estimator: "TurnReturn | GroupInGroup") -> Tensor:
    siblings = compare(values, ids, member)
    return siblings.standardise(estimator.ddof, estimator.epsilon) if estimator.normalise == "z" else siblings.centred


@part("advantage", "turn-return")
class TurnReturn(Estimator):
    """Return-to-go of each turn minus the mean of the group members that reached that turn.

    A turn index that one response alone reached has no baseline and gets 0. Without `turn_rewards` the reward of the
    response stands at its last turn.
    """

    gamma: float = number(default=1.0, says="Discount per turn.", minimum=0.0, maximum=1.0)
    normalise: str = choice("centre", "z", default="z", says="'centre', or 'z': also over the standard deviation.")
    ddof: int = integer(default=0, says="0: population standard deviation; 1: Bessel's.", minimum=0, maximum=1)
    epsilon: float = number(default=1e-6, says="Added to the standard deviation.", minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        return ("mask", "turn")

    def estimate(self, scores: Scores) -> Estimate:
        assert scores.group is not None
        turns = Turns.of(scores)
        count = turns.reached.shape[1]
        ids = scores.group.unsqueeze(1) * count + torch.arange(count, device=scores.group.device)
        per_turn = _compare_siblings(turns.returns(self.gamma), ids, turns.reached, self)
        return Estimate(advantages=turns.spread(per_turn))


@part("advantage", "gigpo")
class GroupInGroup(Estimator):
    """A = A_episode + omega * A_step: siblings compared as wholes, and step by step where they share a state (GiGPO).

    A_step compares the discounted return-to-go of all turns of the group that start in the same state. Constants are
    not verified against the paper.
    """

    omega: float = number(default=1.0, says="Weight of the step advantage.", minimum=0.0)
    gamma: float = number(default=0.95, says="Discount per turn.", minimum=0.0, maximum=1.0)
    normalise: str = choice("none", "z", default="none", says="'none', or 'z': over the standard deviation.")
    ddof: int = integer(default=0, says="0: population standard deviation; 1: Bessel's.", minimum=0, maximum=1)
    epsilon: float = number(default=1e-6, says="Added to the standard deviation.", minimum=0.0)

    def needs(self) -> tuple[str, ...]:
        return ("mask", "turn", "turn_states")

    def estimate(self, scores: Scores) -> Estimate:
        assert scores.group is not None and scores.turn_states is not None
        turns = Turns.of(scores)
        if scores.turn_states.shape != turns.reached.shape:
            raise InputError(
                f"turn_states has shape {list(scores.turn_states.shape)}; {list(turns.reached.shape)} is needed"
            )
        episode = _compare_siblings(scores.rewards, scores.group, None, self)
        states = renumber(scores.turn_states)
        ids = scores.group.unsqueeze(1) * (int(states.max()) + 1) + states
        step = _compare_siblings(turns.returns(self.gamma), ids, turns.reached, self)
        return Estimate(advantages=turns.spread(episode.unsqueeze(1) + self.omega * step))
