"""The synchronous rollout source: problems -> episodes -> rewards -> groups, filtered and refilled if configured.

Everything random here is a function of (run seed, problem number, sample). The place in the data is one integer, so a
resumed run draws the same problems as an uninterrupted one. Groups come in the order in which their problems were drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from legato.core.fields import choice, integer
from legato.core.rollout import TRUNCATED, Group, Problem, Scored, Unscorable
from legato.core.settings import settings
from legato.core.world import OneProcess, World
from legato.diagnostics.words import count as count_of
from legato.errors import InputError
from legato.rollouts.episodes import Runner, Start
from legato.rollouts.randomness import seed_of
from legato.rollouts.sampling import Sampling
from legato.tasks.source import Joined, Source
from legato.training.play import Judge, play_and_score
from legato.training.ranks.exchange import ScoredRollout
from legato.training.source import ExhaustedError, NothingScoredError, Tally

SAVED_GROUPS = "ahead/"
"""How the names of tensors in a checkpoint begin that belong to groups sampled ahead (`ahead.py`)."""
_CHECKED_PROBLEMS = 32
"""Problems whose prompts are looked at before a run starts."""


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
    """The settings of a collector, from three sections of the configuration."""


@dataclass(slots=True, kw_only=True)
class Collector:
    """A rollout source that samples and scores groups when the trainer asks for them."""

    source: Source
    runner: Runner
    judge: Judge
    sampling: Sampling
    settings: CollectorSettings
    seed: int
    world: World = field(default_factory=OneProcess)
    evaluation: Runner | None = None
    """The runner of evaluations if `runner` does not sample from the policy itself; it gets new versions too."""
    _drawn: int = 0
    _steps_begun: int = 0
    _solved: set[str] = field(default_factory=set)
    """Keys of problems whose last responses were all correct."""
    _scored: bool = False
    """Whether any rollout could be scored since the process started."""
    _before: dict[str, Any] | None = None
    """The state before the call of `next` that is in progress. A step that was not finished is drawn again."""

    def next(self, count: int) -> tuple[list[Group], Tally]:
        """`count` groups of at least two scored rollouts each; fewer only if refills did not find enough.

        If it raises, the state is that before the call.
        """
        self._before = self.state()
        try:
            return self._next(count)
        except BaseException:
            self._set(self._before)
            raise
        finally:
            self._before = None

    def _next(self, count: int) -> tuple[list[Group], Tally]:
        groups: list[Group] = []
        tally = Tally()
        self._begin_stage(self._steps_begun)
        self._steps_begun += 1
        while len(groups) < count and tally.rounds < self._rounds:
            tally.rounds += 1
            starts = [self._draw(tally) for _ in range(count - len(groups))]
            groups += [group for group in self._sample_groups(starts, tally) if group is not None]
        self._check_scored(tally)
        tally.sampler = self.runner.engine.metrics()
        return groups, tally

    @property
    def _rounds(self) -> int:
        """How often a step may sample: once, and again to replace groups."""
        return 1 + (self.settings.max_refills if self.settings.resampling == "dynamic" else 0)

    def _begin_stage(self, step: int) -> None:
        """Begin the second stage with the next problem if it belongs to a step of that stage; steps count from 0."""
        if isinstance(self.source, Joined) and self.source.after is None and step >= self.source.after_steps:
            self.source.after = self._drawn

    def _check_scored(self, tally: Tally) -> None:
        """NothingScoredError if no rollout of this process could be scored yet: such a run would train nothing for ever."""
        self._scored = self._scored or tally.unscorable < tally.rollouts
        if self._scored:
            return
        reasons = sorted(tally.reasons.items(), key=lambda item: -item[1])
        listed = "; ".join(f"{reason} ({count_of(times, 'rollout')})" for reason, times in reasons[:3])
        more = f"; and {count_of(len(reasons) - 3, 'other reason')}" if len(reasons) > 3 else ""
        raise NothingScoredError(
            f"expected a reward that scores rollouts, got no score for any of the first {tally.rollouts}: {listed}{more};"
            " correct the reward, which returns a finite number or a dict of such numbers"
        )

    @property
    def version(self) -> int:
        return self.runner.version

    @property
    def ahead(self) -> int:
        return 0

    def on_publish(self, version: int) -> None:
        self.runner.publish(version)
        if self.evaluation is not None:
            self.evaluation.publish(version)

    def before_update(self) -> None:
        self.runner.engine.before_update()

    @property
    def settled(self) -> bool:
        return self.runner.engine.settled

    @property
    def drawn(self) -> int:
        return self._drawn

    def go_to(self, drawn: int) -> None:
        self._drawn = drawn

    def check_prompts(self) -> list[str]:
        """Raise InputError if no problem can be drawn or read; returns notes. The place in the data does not move."""
        before = self._drawn
        self._draw(Tally())
        self._drawn = before
        count = min(_CHECKED_PROBLEMS, self.source.size or _CHECKED_PROBLEMS)
        return self.runner.rendering.check_problems([self.source.training(number) for number in range(count)])

    def state(self) -> dict[str, Any]:
        if self._before is not None:
            return self._before
        second = self.source.after if isinstance(self.source, Joined) else None
        return {
            "cursor": self._drawn,
            "version": self.version,
            "solved": sorted(self._solved),
            "steps_begun": self._steps_begun,
            "second_stage_from": second,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._set(state)
        self.on_publish(int(state["version"]))

    def _set(self, state: Mapping[str, Any]) -> None:
        self._drawn, self._solved = int(state["cursor"]), set(state["solved"])
        waiting = state.get("ahead", {}).get("waiting")
        if waiting:
            # A run that sampled ahead (`ahead.py`) and does so no more: the problems it had drawn are drawn again.
            self._drawn = int(waiting[0])
        self._steps_begun = int(state["steps_begun"])
        if isinstance(self.source, Joined):
            self.source.after = state["second_stage_from"]

    def tensors(self) -> dict[str, Tensor]:
        return self.runner.engine.state()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(SAVED_GROUPS)}
        self.runner.engine.load(own)

    def on_saved(self, states: Sequence[Mapping[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass

    def _draw(self, tally: Tally) -> Start:
        """The next problem that may be trained on, with the seeds and ids of its episodes."""
        size = self.source.size
        # Two epochs from any place in the data draw every problem.
        for _ in range(2 * size if size is not None else 10_000):
            number, problem = self._drawn, self.source.training(self._drawn)
            self._drawn += 1
            if self.settings.resampling == "history" and problem.key in self._solved:
                continue
            prompt = self.runner.rendering.prompt(problem)
            if len(prompt) <= self.settings.max_prompt_tokens:
                return self._start(number, problem, prompt)
            if self.settings.too_long == "error":
                raise InputError(
                    f"the prompt of problem {number} has {len(prompt)} tokens, more than policy.max_prompt_tokens ="
                    f" {self.settings.max_prompt_tokens}; raise it, or drop such problems with policy.too_long = 'drop'"
                )
            tally.too_long += 1
        if self.settings.resampling == "history" and self._solved:
            raise ExhaustedError("every problem of the task was answered right by all its rollouts")
        raise InputError(
            f"no problem has a prompt of at most policy.max_prompt_tokens = {self.settings.max_prompt_tokens} tokens;"
            " raise it"
        )

    def _start(self, number: int, problem: Problem, prompt: Tensor) -> Start:
        """The episodes of the problem that was drawn as this number."""
        each, key = self.settings.samples_per_prompt, problem.key
        return Start(
            problem=problem,
            prompt=prompt,
            seeds=tuple([seed_of(self.seed, key, number, k) for k in range(each)]),
            ids=range(number * each, (number + 1) * each),
        )

    def _sample_groups(self, starts: Sequence[Start], tally: Tally) -> list[Group | None]:
        rows = play_and_score(self.runner, self.judge, starts, self.sampling, self.world)
        return [self._group(start.problem, row, tally) for start, row in zip(starts, rows, strict=True)]

    def _group(self, problem: Problem, rollouts: Sequence[ScoredRollout], tally: Tally) -> Group | None:
        members = []
        for rollout, score in rollouts:
            tally.rollouts += 1
            if isinstance(score, Unscorable):
                tally.unscorable += 1
                tally.reasons[score.reason] = tally.reasons.get(score.reason, 0) + 1
                continue
            members.append(Scored(rollout=rollout, score=score))
            tally.rewards.append(score.reward)
            tally.accuracy.append(score.correctness)
            tally.lengths.append(rollout.length)
            tally.truncated += rollout.stop in TRUNCATED
            for name, value in score.components.items():
                tally.components.setdefault(name, []).append(value)
        tally.groups += 1
        if len(members) < 2:
            tally.too_few += 1
            return None
        accuracy = [member.score.accuracy for member in members]
        flat = max(accuracy) - min(accuracy) <= 1e-6
        right = flat and min(accuracy) >= 1.0
        # Compared by reward, as advantages are: a shaping term may distinguish answers that are all wrong.
        rewards = [member.score.reward for member in members]
        tally.flat += max(rewards) - min(rewards) <= 1e-6
        tally.all_right += right
        tally.all_wrong += flat and max(accuracy) <= 0.0
        if self.settings.resampling == "history":
            (self._solved.add if right else self._solved.discard)(problem.key)
        if self.settings.resampling == "dynamic" and flat:
            return None
        return Group(problem=problem, members=tuple(members))
