"""Classes written for TRL's `environment_factory`, run as they are.

    class Adding:
        def reset(self, **row) -> str | None: ...     called for each rollout with the columns of its problem; a text that it
                                                      returns is added to the last message
        def add(self, a: int, b: int) -> int: ...     public methods are tools
        def get_reward(self) -> float: ...            called once, at the end of the rollout

Methods may be async. An episode goes on while the policy calls tools and ends with a turn that calls none. As in TRL an
instance is used again for later rollouts, after `reset`.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from legato.core.rollout import Problem, StopReason
from legato.environments.tools import ToolBox, answer_turn, public_methods, schema_of
from legato.errors import InputError
from legato.rollouts.episodes import Reply
from legato.rollouts.tool_calls import Turn

_NOT_TOOLS = ("reset", "get_reward")
MOST_TURNS = 1_000
"""TRL has no limit of its own; tokens and task.max_turns end an episode."""


def is_trl_environment(cls: type) -> bool:
    """Whether a class follows TRL's convention: `reset`, and no `episode` as our environments have."""
    return callable(getattr(cls, "reset", None)) and not hasattr(cls, "episode")


class TrlEnvironment:
    """A class of TRL's as an environment."""

    deterministic = False
    opens = True
    """Episodes have an opening: what `reset` returns."""

    def __init__(self, factory: Callable[[], Any], first: Any = None) -> None:
        self.factory = factory
        self._idle: list[Any] = [] if first is None else [first]
        instance = self._idle[0] if self._idle else factory()
        if not self._idle:
            self._idle.append(instance)
        self._names = public_methods(type(instance), without=_NOT_TOOLS)
        self._rewards = callable(getattr(instance, "get_reward", None))
        self.name = type(instance).__name__
        if not callable(getattr(instance, "reset", None)):
            raise InputError(f"expected an environment with reset(), got {self.name} (task.environment)")

    @property
    def max_turns(self) -> int:
        return MOST_TURNS

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [_schema_as_trl(getattr(self._idle[0] if self._idle else self.factory(), name)) for name in self._names]

    def episode(self, problem: Problem) -> "TrlEpisode":
        return TrlEpisode(self, problem)

    def take(self) -> Any:
        """An instance that no other episode uses."""
        return self._idle.pop() if len(self._idle) > 1 else self.factory()

    def give_back(self, instance: Any) -> None:
        if len(self._idle) < 1024:
            self._idle.append(instance)


class TrlEpisode:
    """One rollout of an instance."""

    def __init__(self, environment: TrlEnvironment, problem: Problem) -> None:
        self.environment, self.problem = environment, problem
        self.instance = environment.take()
        self.failed = 0
        self._box = ToolBox([getattr(self.instance, name) for name in environment._names])

    def opening(self) -> Any:
        """What `reset` returns for the row of the problem."""
        answer = {} if self.problem.answer is None else {"answer": self.problem.answer}
        prompt = self.problem.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
        return _wait_for(self.instance.reset(**{**answer, **self.problem.fields, "prompt": messages}))

    def act(self, turn: Turn, stop: StopReason) -> Reply | None:
        if stop.truncated:
            # Calls of a turn that was cut are not carried out: their text has no end.
            return self._finish(turn.content)
        return answer_turn(turn, self._box, finish=self._finish, after_calls=self._go_on, count=self._count)

    def _go_on(self, results: Sequence[str]) -> Reply:
        return Reply()

    def _count(self) -> None:
        self.failed += 1

    def end(self) -> float | None:
        """The reward of an episode that a limit ends."""
        reply = self._finish("")
        return None if reply.reward is None else float(reply.reward)

    def _finish(self, text: str) -> Reply:
        reward = None
        if self.environment._rewards:
            reward = _wait_for(self.instance.get_reward())
            if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
                raise TypeError(f"expected a finite number from get_reward, got {reward!r:.80}")
        self.environment.give_back(self.instance)
        return Reply(reward=None if reward is None else float(reward), done=True)


def _schema_as_trl(method: Callable[..., Any]) -> dict[str, Any]:
    """The schema that TRL's prompt shows, by transformers; ours for a method whose docstring transformers cannot read."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(method)
    except Exception:  # no docstring, an argument without a description, types it does not know
        return schema_of(method)
    return schema


def _wait_for(value: Any) -> Any:
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())
