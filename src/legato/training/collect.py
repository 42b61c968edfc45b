"""prompts -> rollouts -> rewards -> groups, filtered and refilled.

Everything random here is a function of (run seed, problem number, sample): the place in the data is one integer, and a
resumed run draws what the straight one drew. Groups come back in the order their problems were drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from legato.core.fields import choice, integer
from legato.core.rollout import Author, Group, Problem, Rollout, Score, Scored, Unscorable
from legato.core.settings import settings
from legato.errors import InputError
from legato.rollouts.engine import Engine, Limits, Request, Response
from legato.rollouts.randomness import seed_of
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.tasks.source import Joined, Source

Judge = Callable[[Sequence[Rollout]], list[Score | Unscorable]]


class ExhaustedError(Exception):
    """No problem is left to train on."""


@dataclass(slots=True)
class Tally:
    """What was seen while collecting a step, before anything was dropped."""

    rollouts: int = 0
    unscorable: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    groups: int = 0
    all_right: int = 0
    all_wrong: int = 0
    flat: int = 0
    too_few: int = 0
    too_long: int = 0
    rounds: int = 0
    components: dict[str, list[float]] = field(default_factory=dict)


@settings()
class PromptSettings:
    """How long a prompt may be."""

    max_prompt_tokens: int = integer(default=256, says="The longest prompt.", minimum=1)
    too_long: str = choice(
        "drop",
        "error",
        default="drop",
        says="What becomes of a problem whose prompt is longer: left out and counted, or the end of the run.",
    )


@settings()
class ResamplingSettings:
    """Which groups and problems are left out, and what replaces them."""

    resampling: str = choice(
        "none",
        "dynamic",
        "history",
        default="none",
        says="'dynamic': groups of equal accuracy are replaced (DAPO); 'history': problems that all solved are left out"
        " (SRPO).",
    )
    max_refills: int = integer(
        default=8,
        says="How often a step may sample again to replace groups before it goes on with fewer.",
        minimum=1,
    )


@settings()
class GroupSettings:
    """How many responses answer one problem."""

    samples_per_prompt: int = integer(
        default=8,
        says="The size of a group. One response has no siblings to be compared with.",
        minimum=2,
    )


@settings()
class CollectorSettings(GroupSettings, PromptSettings, ResamplingSettings):
    """What a collector reads of a run; the options stand in three sections."""


@dataclass(slots=True, kw_only=True)
class Collector:
    """Where a step's groups come from."""

    source: Source
    engine: Engine
    rendering: Rendering
    judge: Judge
    sampling: Sampling
    limits: Limits
    settings: CollectorSettings
    seed: int
    evaluator: Engine | None = None
    """What evaluations sample with, where `engine` is not the policy itself."""
    cursor: int = 0
    """The number of the next problem."""
    version: int = 0
    """Of the policy that is being sampled."""
    steps_begun: int = 0
    solved: set[str] = field(default_factory=set)
    """Keys of problems whose last responses were all right."""

    def next(self, count: int) -> tuple[list[Group], Tally]:
        """So many groups of at least two scored rollouts each; fewer only where refills did not find enough."""
        groups: list[Group] = []
        tally = Tally()
        if isinstance(self.source, Joined) and self.source.after is None and self.steps_begun >= self.source.after_steps:
            self.source.after = self.cursor
        self.steps_begun += 1
        rounds = 1 + (self.settings.max_refills if self.settings.resampling == "dynamic" else 0)
        while len(groups) < count and tally.rounds < rounds:
            tally.rounds += 1
            drawn = [self.draw(tally) for _ in range(count - len(groups))]
            groups += [group for group in self._roll(drawn, tally) if group is not None]
        return groups, tally

    def state(self) -> dict[str, Any]:
        second = self.source.after if isinstance(self.source, Joined) else None
        return {
            "cursor": self.cursor,
            "version": self.version,
            "solved": sorted(self.solved),
            "steps_begun": self.steps_begun,
            "second_stage_from": second,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.cursor, self.version, self.solved = int(state["cursor"]), int(state["version"]), set(state["solved"])
        self.steps_begun = int(state["steps_begun"])
        if isinstance(self.source, Joined):
            self.source.after = state["second_stage_from"]

    def draw(self, tally: Tally) -> tuple[int, Problem, Tensor]:
        """The next problem that may be trained on, with its number and prompt."""
        size = self.source.size
        # From the middle of an epoch, every problem has come by after two.
        for _ in range(2 * size if size is not None else 10_000):
            number, problem = self.cursor, self.source.training(self.cursor)
            self.cursor += 1
            if self.settings.resampling == "history" and problem.key in self.solved:
                continue
            prompt = self.rendering.prompt(problem)
            if len(prompt) <= self.settings.max_prompt_tokens:
                return number, problem, prompt
            if self.settings.too_long == "error":
                raise InputError(
                    f"the prompt of problem {number} has {len(prompt)} tokens, more than policy.max_prompt_tokens ="
                    f" {self.settings.max_prompt_tokens}; raise it, or drop such problems with policy.too_long = 'drop'"
                )
            tally.too_long += 1
        if self.settings.resampling == "history" and self.solved:
            raise ExhaustedError("every problem of the task was answered right by all its rollouts")
        raise InputError(
            f"no problem has a prompt of at most policy.max_prompt_tokens = {self.settings.max_prompt_tokens} tokens;"
            " raise it"
        )

    def _roll(self, drawn: Sequence[tuple[int, Problem, Tensor]], tally: Tally) -> list[Group | None]:
        requests = [
            Request(
                prompt=prompt,
                seeds=tuple(seed_of(self.seed, problem.key, number, k) for k in range(self.settings.samples_per_prompt)),
            )
            for number, problem, prompt in drawn
        ]
        responses = self.engine.generate(requests, self.sampling, self.limits)
        rollouts = [
            self.rollout(problem, prompt, response, number * self.settings.samples_per_prompt + k)
            for (number, problem, prompt), row in zip(drawn, responses, strict=True)
            for k, response in enumerate(row)
        ]
        scores = self.judge(rollouts)
        scored = list(zip(rollouts, scores, strict=True))
        each = self.settings.samples_per_prompt
        return [
            self._group(problem, scored[place * each : (place + 1) * each], tally)
            for place, (_, problem, _) in enumerate(drawn)
        ]

    def rollout(self, problem: Problem, prompt: Tensor, response: Response, number: int) -> Rollout:
        """A response as the record of a single turn."""
        length = len(response.tokens)
        return Rollout(
            problem=problem,
            rollout_id=number,
            prompt_tokens=prompt,
            tokens=response.tokens,
            sampler_logprobs=response.logprobs,
            version=torch.full((length,), self.version),
            text=response.text,
            stop=response.stop,
            temperature=self.sampling.temperature,
            mask=torch.ones(length, dtype=torch.bool),
            turn=torch.zeros(length, dtype=torch.int64),
            author=torch.full((length,), Author.POLICY.value),
            kept_logmass=response.kept_logmass,
            routes=response.routes,
        )

    def _group(self, problem: Problem, rollouts: Sequence[tuple[Rollout, Score | Unscorable]], tally: Tally) -> Group | None:
        members = []
        for rollout, score in rollouts:
            tally.rollouts += 1
            if isinstance(score, Unscorable):
                tally.unscorable += 1
                tally.reasons[score.reason] = tally.reasons.get(score.reason, 0) + 1
                continue
            members.append(Scored(rollout=rollout, score=score))
            tally.rewards.append(score.reward)
            tally.accuracy.append(score.accuracy)
            tally.lengths.append(len(rollout.tokens))
            tally.truncated += rollout.stop.truncated
            for name, value in score.components.items():
                tally.components.setdefault(name, []).append(value)
        tally.groups += 1
        if len(members) < 2:
            tally.too_few += 1
            return None
        accuracy = [member.score.accuracy for member in members]
        flat = max(accuracy) - min(accuracy) <= 1e-6
        right = flat and min(accuracy) >= 1.0
        # By reward, as advantages are: answers that are all wrong may still be told apart by a shaping term.
        rewards = [member.score.reward for member in members]
        tally.flat += max(rewards) - min(rewards) <= 1e-6
        tally.all_right += right
        tally.all_wrong += flat and max(accuracy) <= 0.0
        if self.settings.resampling == "history":
            (self.solved.add if right else self.solved.discard)(problem.key)
        if self.settings.resampling == "dynamic" and flat:
            return None
        return Group(problem=problem, members=tuple(members))
