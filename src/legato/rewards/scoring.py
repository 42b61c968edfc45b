"""Turns reward functions into scores: weighted sums with a breakdown, and handling of rewards that fail.

A reward that raises, or returns something that is not a finite number, is `Unscorable(reason)`: the rollout leaves its
group, is counted and shown once. It is never scored 0: a broken verifier would otherwise teach that right answers are wrong.

A reward has one of three forms:
    def reward(rollout) -> verdict             a plain function, one rollout at a time, in order
    async def reward(rollout) -> verdict       all rollouts at once; results in the order of the rollouts, not of completion
    @batched def reward(rollouts) -> verdicts  one call for all (also async): a reward model, a ranking
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from legato.core.fields import flag, number
from legato.core.rollout import Rollout, Score, Unscorable
from legato.core.settings import optional_table, settings
from legato.errors import InputError
from legato.rewards.environment import EnvironmentReward
from legato.rewards.overlong import OverlongPunishment
from legato.rewards.verifiers import Verdict, finite

Reward = (
    Callable[[Rollout], Verdict]
    | Callable[[Rollout], Awaitable[Verdict]]
    | Callable[[Sequence[Rollout]], Sequence[Verdict]]
    | Callable[[Sequence[Rollout]], Awaitable[Sequence[Verdict]]]
)
Judgement = dict[str, float] | Unscorable
"""A verdict as a breakdown by part; a plain number is the part ''."""

_F = TypeVar("_F", bound=Callable[..., Any])


def batched(reward: _F) -> _F:
    """Mark a reward that takes all rollouts at once and returns as many verdicts. A class says `batch = True` itself."""
    reward.batch = True  # type: ignore[attr-defined]
    return reward


def is_batched(reward: Callable[..., Any]) -> bool:
    """Whether a reward takes all rollouts at once."""
    return getattr(reward, "batch", False) is True


def is_async(reward: Callable[..., Any]) -> bool:
    """Whether a reward is an async function, or an object whose call is one."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004


def check_reward(reward: Any, name: str) -> None:
    """InputError if an object cannot be called with one rollout; `name` is its name in the configuration."""
    if not callable(reward):
        raise InputError(f"reward {name!r}: expected a function of one rollout, got {type(reward).__name__}")
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):
        # Some builtins have no signature; errors then appear at the first call.
        return
    try:
        signature.bind(object())
    except TypeError:
        raise InputError(f"reward {name!r}: expected one positional argument, the rollout, got {signature}") from None


@settings()
class ComponentSettings:
    """The weight of one reward, and whether it judges the answer."""

    weight: float = number(default=1.0, says="What its value is multiplied by in the sum.", minimum=-1e6, maximum=1e6)
    judges: bool = flag(default=True, says="Whether it says that an answer is right; accuracy is the mean of those that do.")


@dataclass(frozen=True, kw_only=True)
class Component(ComponentSettings):
    """One reward of a sum. Shaping terms do not judge the answer, and filters do not read them."""

    reward: Reward


@settings()
class RewardSettings:
    """Settings of the sum of all rewards."""

    overlong: OverlongPunishment | None = optional_table(
        OverlongPunishment,
        default=None,
        says="Punishes overlong responses; absent: not. It is no part of accuracy.",
    )
    # A plain function cannot be stopped from outside: where it may hang, it runs in a process (`workers/pool.py`), as
    # math-verify does.
    timeout_seconds: float | None = number(
        default=None,
        says="For async rewards: one that takes longer leaves its rollout unscored; absent: it may take for ever.",
        above=0.0,
        optional=True,
    )


@dataclass(frozen=True, kw_only=True)
class WeightedSum(RewardSettings):
    """reward = sum of weight * component, plus the punishment; accuracy = mean of the components that judge the answer."""

    components: Mapping[str, Component] = field(default_factory=dict)
    longest_response: int | None = None
    """Length limit in tokens; needed with `overlong`."""

    def check(self) -> None:
        """InputError if the components and the settings of the sum contradict each other."""
        if not any(component.judges for component in self.components.values()):
            raise InputError("a reward needs at least one component that judges the answer (judges)")
        if self.overlong is not None and "overlong" in self.components:
            raise InputError("a component is called 'overlong', as the punishment for length is; give it another name")
        if self.timeout_seconds is not None and not all(is_async(each.reward) for each in self.components.values()):
            raise InputError(
                f"timeout_seconds = {self.timeout_seconds:g} is for async rewards; a plain one cannot be stopped"
            )

    def score(self, rollout: Rollout) -> Score | Unscorable:
        return self.score_all([rollout])[0]

    def score_all(self, rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
        """One score per rollout, in order. A component does not see rollouts that an earlier component could not score."""
        breakdowns: list[dict[str, Judgement]] = [{} for _ in rollouts]
        failed: dict[int, Unscorable] = {}
        for name, component in self.components.items():
            places = [place for place in range(len(rollouts)) if place not in failed]
            verdicts = judge_all(component.reward, [rollouts[place] for place in places], self.timeout_seconds)
            for place, verdict in zip(places, verdicts, strict=True):
                if isinstance(verdict, Unscorable):
                    failed[place] = Unscorable(f"{name}: {verdict.reason}")
                breakdowns[place][name] = verdict
        return [failed.get(place) or self._sum(rollout, breakdowns[place]) for place, rollout in enumerate(rollouts)]

    def _sum(self, rollout: Rollout, verdicts: Mapping[str, Judgement]) -> Score:
        listed: dict[str, float] = {}
        total, judged = 0.0, []
        for name, verdict in verdicts.items():
            assert not isinstance(verdict, Unscorable)
            value = sum(verdict.values())
            total += self.components[name].weight * value
            listed |= {name if part == "" else f"{name}/{part}": number for part, number in verdict.items()}
            if self.components[name].judges:
                judged.append(value)
        if self.overlong is not None:
            assert self.longest_response is not None
            length = rollout.mask.sum().reshape(1).to(torch.int64)
            listed["overlong"] = float(self.overlong.punishment(length, self.longest_response)[0])
            total += listed["overlong"]
        turns = None if rollout.turn_rewards is None else self._divide(total, rollout.turn_rewards)
        return Score(reward=total, accuracy=sum(judged) / len(judged), components=listed, turn_rewards=turns)

    def _divide(self, total: float, turn_rewards: tuple[float, ...]) -> tuple[float, ...] | None:
        """The reward of each turn: the environment's rewards at their turns, all other rewards at the last turn."""
        weights = [each.weight for each in self.components.values() if isinstance(each.reward, EnvironmentReward)]
        if not weights:
            return None
        turns = [sum(weights) * reward for reward in turn_rewards[:-1]]
        return (*turns, total - sum(turns))


def judge(reward: Reward, rollout: Rollout) -> Judgement:
    """The verdict of one reward on one rollout."""
    return judge_all(reward, [rollout])[0]


def judge_all(reward: Reward, rollouts: Sequence[Rollout], timeout_seconds: float | None = None) -> list[Judgement]:
    """The verdicts of one reward, in the order of the rollouts. An exception affects only its own rollout."""
    if not rollouts:
        return []
    call: Callable[..., Any] = reward
    if is_batched(call):
        verdicts = _run(_await_all(call, [rollouts], timeout_seconds))[0] if is_async(call) else _attempt(call, rollouts)
        return _judge_batch(verdicts, len(rollouts))
    if is_async(call):
        return _breakdowns(_run(_await_all(call, rollouts, timeout_seconds)))
    verdicts = []
    for rollout in rollouts:
        try:
            verdicts.append(call(rollout))
        except Exception as error:  # whatever a reward raises is its own affair; the run goes on without this rollout
            verdicts.append(_as_unscorable(error))
    return _breakdowns(verdicts)


def _attempt(reward: Callable[..., Any], argument: Any) -> Any:
    try:
        return reward(argument)
    except Exception as error:  # whatever a reward raises is its own affair; the run goes on without this rollout
        return _as_unscorable(error)


def _as_unscorable(error: BaseException) -> Unscorable:
    return Unscorable(f"{type(error).__name__}: {error}")


def _judge_batch(verdicts: Any, count: int) -> list[Judgement]:
    if isinstance(verdicts, Unscorable):
        return [verdicts] * count
    _close(verdicts)
    try:
        rows = None if isinstance(verdicts, str | bytes | Mapping) else list(verdicts)
    except Exception:
        rows = None
    if rows is None or len(rows) != count:
        what = f"a {type(verdicts).__name__}" if rows is None else f"{len(rows)} verdicts"
        return [Unscorable(f"returned {what} for {count} rollouts; a sequence of as many verdicts is needed")] * count
    return _breakdowns(rows)


def _breakdowns(verdicts: Sequence[Any]) -> list[Judgement]:
    """Verdicts as breakdowns, with a fast path for plain finite floats."""
    return [{"": each} if type(each) is float and math.isfinite(each) else _breakdown(each) for each in verdicts]


def _breakdown(verdict: Any) -> Judgement:
    if isinstance(verdict, Unscorable):
        return verdict
    _close(verdict)
    parts = verdict if isinstance(verdict, dict) else {"": verdict}
    wrong = {name: value for name, value in parts.items() if not finite(value)}
    if wrong or not parts:
        return Unscorable(f"returned {verdict!r}; a finite number or a dict of finite numbers is needed")
    return {str(name): float(value) for name, value in parts.items()}


def _close(verdict: Any) -> None:
    # A plain function returned a coroutine. It is never awaited; closing it avoids a warning.
    if inspect.iscoroutine(verdict):
        verdict.close()


async def _await_all(reward: Callable[..., Any], items: Sequence[Any], seconds: float | None) -> list[Any]:
    async def one(item: Any) -> Any:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await reward(item)
        except Exception as error:
            return Unscorable(f"timed out after {seconds:g} s") if limit.expired() else _as_unscorable(error)

    verdicts = await asyncio.gather(*map(one, items), return_exceptions=True)
    # A reward that cancelled itself; other exceptions were handled above or end the run.
    return [_as_unscorable(verdict) if isinstance(verdict, BaseException) else verdict for verdict in verdicts]


def _run(coroutine: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Run a coroutine here, or in a new thread if this thread already has a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.extend(asyncio.run(coroutine))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="async rewards")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results
