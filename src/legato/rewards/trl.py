"""Rewards written for TRL, called as TRL calls them.

    def reward(prompts, completions, **columns) -> list[float | None]

TRL passes all responses of a batch at once, by keyword: `prompts`, `completions` (lists of messages where prompts are
messages), `completion_ids`, `trainer_state`, `log_extra`, `log_metric`, and every other column of the data under its name.
A function with such parameters becomes a batched reward here. None means that the reward does not apply to that response.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from legato.core.rollout import Rollout, Unscorable

_BATCH = ("completions", "completion_ids")
_LOGGERS = ("log_extra", "log_metric")


@dataclass(frozen=True, slots=True)
class NotScored(Unscorable):
    """A reward says that it does not apply to a response. Other rewards of the sum still count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many updates the run makes: TRL counts updates, and a rollout knows its step only."""

    updates_per_step: int = 1
    total_updates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The two fields of TRL's `trainer_state` that rewards read: updates done, and updates of the whole run."""

    global_step: int
    max_steps: int


def has_trl_signature(reward: Any) -> bool:
    """Whether a callable has TRL's parameters: `completions` or `completion_ids`, beside `prompts` or **columns."""
    if getattr(reward, "batch", False) is True or not callable(reward):
        return False
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):
        return False
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    any_keyword = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return not names.isdisjoint(_BATCH) and ("prompts" in names or any_keyword)


def reads_a_column(reward: Any) -> bool:
    """Whether a reward of TRL names a column of the data among its parameters, as `answer` in one that judges answers."""
    if not has_trl_signature(reward):
        return False
    parameters = inspect.signature(reward).parameters.values()
    names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    return bool(names - {"prompts", *_BATCH, "trainer_state", *_LOGGERS, "environments", "self"})


def adapt_trl_reward(reward: Any, schedule: Schedule | None = None) -> Any:
    """A reward with TRL's signature as a batched reward; any other reward unchanged."""
    if not has_trl_signature(reward):
        return reward
    waits = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004
    kind = AsyncTrlReward if waits else TrlReward
    return kind(function=reward, schedule=schedule or Schedule())


@dataclass(frozen=True, kw_only=True)
class _Called:
    function: Callable[..., Any]
    schedule: Schedule
    batch: ClassVar[bool] = True

    @property
    def __name__(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def notes(self) -> list[str]:
        """Sentences for the start of a run."""
        named = [name for name in _LOGGERS if name in inspect.signature(self.function).parameters]
        lost = f"; what it passes to {' and '.join(named)} is not recorded" if named else ""
        return [f"the reward {self.__name__!r} has TRL's signature and is called as TRL calls it{lost}"]

    def _arguments(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        columns = {
            name: [_columns(rollout).get(name) for rollout in rollouts]
            for name in dict.fromkeys(name for rollout in rollouts for name in _columns(rollout))
        }
        step = max((int(rollout.version.max()) for rollout in rollouts if rollout.version.numel()), default=0)
        arguments = {
            **columns,
            "prompts": [rollout.problem.prompt for rollout in rollouts],
            "completions": [_completion(rollout) for rollout in rollouts],
            "completion_ids": [rollout.tokens.tolist() for rollout in rollouts],
            "trainer_state": TrainerState(
                global_step=max(0, step) * self.schedule.updates_per_step, max_steps=self.schedule.total_updates
            ),
            "log_extra": _discard,
            "log_metric": _discard,
        }
        parameters = inspect.signature(self.function).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return arguments
        return {name: value for name, value in arguments.items() if name in parameters}


class TrlReward(_Called):
    """A plain function of TRL's."""

    def __call__(self, rollouts: Sequence[Rollout]) -> Any:
        return _verdicts(self.function(**self._arguments(rollouts)))


class AsyncTrlReward(_Called):
    """An async function of TRL's: one call that is awaited for all responses."""

    async def __call__(self, rollouts: Sequence[Rollout]) -> Any:
        return _verdicts(await self.function(**self._arguments(rollouts)))


def _columns(rollout: Rollout) -> Mapping[str, Any]:
    """The columns of a problem beside its prompt. TRL knows no answer apart from its column."""
    answer = {} if rollout.problem.answer is None else {"answer": rollout.problem.answer}
    return {**answer, **rollout.problem.fields}


def _completion(rollout: Rollout) -> str | list[dict[str, str]]:
    """The response as text; as messages where the prompt is messages. An environment's turns are the user's."""
    turns = (rollout.text,) if rollout.dialogue is None else rollout.dialogue
    if not any(turns[1::2]):
        turns = ("".join(turns),)  # steps of one response
    if isinstance(rollout.problem.prompt, str):
        return "".join(turns)
    return [{"role": "user" if place % 2 else "assistant", "content": text} for place, text in enumerate(turns)]


def _verdicts(returned: Any) -> Any:
    """The list a reward returned, with None and NaN replaced by NotScored. Anything else is left to the caller's checks."""
    if callable(getattr(returned, "tolist", None)):  # an array or a tensor, in which NaN stands for None
        returned = returned.tolist()
    if not isinstance(returned, list | tuple):
        return returned
    return [_verdict(each) for each in returned]


def _verdict(value: Any) -> Any:
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return NotScored("returned None: it does not score this response") if missing else value


def _discard(*_: Any, **__: Any) -> None:
    """Takes the place of TRL's loggers."""
