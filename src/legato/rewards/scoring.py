"""Turns reward functions into scores: weighted sums with a breakdown, and handling of rewards that fail.

A reward that raises, takes too long or returns something that is not a finite number is `Unscorable(reason)`: the rollout
leaves its group, is counted and shown once. It is never scored 0: a broken verifier would otherwise teach that right answers
are wrong. Rewards see copies of the rollouts (`core/protection.py`). Nothing they raise ends the run (`core/user_code.py`).

A reward has one of four forms:
    def reward(rollout) -> verdict             a plain function, one rollout at a time, in order
    async def reward(rollout) -> verdict       all rollouts at once; results in the order of the rollouts, not of completion
    @batched def reward(rollouts) -> verdicts  one call for all (also async): a reward model, a ranking
    def reward(prompts, completions, **columns) -> list[float | None]   as TRL calls it (`trl.py`), also async

Rewards that wait for worker processes have two class attributes: `own_limit = True`, they watch their time themselves;
`parallel = True`, a plain one is called in several threads. Verifiers of Legato that only read the rollout have the
class attribute `harmless = True`: they see the rollouts themselves, and all their calls count as one.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch

from legato.core.fields import flag, number
from legato.core.protection import copy_rollout, settings_restored
from legato.core.rollout import Rollout, Score, TurnScores, Unscorable
from legato.core.settings import optional_table, settings
from legato.core.user_code import DEFAULT_SECONDS, CallFailedError, UserCode, is_own
from legato.errors import InputError, describe_error, describe_value, shorten
from legato.rewards.environment import EnvironmentReward
from legato.rewards.overlong import OverlongPunishment
from legato.rewards.trl import NotScored
from legato.rewards.verifiers import LARGEST_REWARD, Verdict, as_number

Reward = (
    Callable[[Rollout], Verdict]
    | Callable[[Rollout], Awaitable[Verdict]]
    | Callable[[Sequence[Rollout]], Sequence[Verdict]]
    | Callable[[Sequence[Rollout]], Awaitable[Sequence[Verdict]]]
)
Judgement = dict[str, float] | Unscorable
"""A verdict as a breakdown by part; a plain number is the part ''."""


class _ByTurn(dict[str, float]):
    """The breakdown of a reward that scored each turn: the sum, and the scores of the turns."""

    def __init__(self, turns: tuple[float, ...]) -> None:
        super().__init__({"": sum(turns)})
        self.turns = turns


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
        raise InputError(
            f"reward {name!r}: expected one positional argument, the rollout, got {signature}; a reward of TRL has the"
            " parameters (prompts, completions, **columns)"
        ) from None


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
    timeout_seconds: float | None = number(
        default=DEFAULT_SECONDS,
        says="How long a reward may take for a rollout, or a batched one for all of them; then they are unscored. false: for"
        " ever. math-verify and reasoning-gym have limits of their own.",
        above=0.0,
        optional=True,
    )
    separate_process: bool = flag(
        default=False,
        says="Runs rewards of your own, named by import path, in a process that can be killed whatever they do. It shares no"
        " state and no generators with the run.",
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

    def score(self, rollout: Rollout) -> Score | Unscorable:
        return self.score_all([rollout])[0]

    def score_all(self, rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
        """One score per rollout, in order. A component does not see rollouts that an earlier component could not score.

        A component that does not apply to a rollout (NotScored) is left out of its sum, as TRL does with None.
        """
        breakdowns: list[dict[str, Judgement]] = [{} for _ in rollouts]
        failed: dict[int, Unscorable] = {}
        for name, component in self.components.items():
            places = [place for place in range(len(rollouts)) if place not in failed]
            listed = [rollouts[place] for place in places]
            verdicts = judge_all(component.reward, listed, self.timeout_seconds, name)
            for place, verdict in zip(places, verdicts, strict=True):
                if isinstance(verdict, NotScored) and len(self.components) > 1:
                    continue
                if isinstance(verdict, Unscorable):
                    failed[place] = Unscorable(f"{name}: {verdict.reason}")
                breakdowns[place][name] = verdict
        return [failed.get(place) or self._sum(rollout, breakdowns[place]) for place, rollout in enumerate(rollouts)]

    def _sum(self, rollout: Rollout, verdicts: Mapping[str, Judgement]) -> Score | Unscorable:
        if not verdicts:
            return Unscorable("no reward scored it: each returned None")
        listed: dict[str, float] = {}
        total, judged = 0.0, []
        for name, verdict in verdicts.items():
            assert not isinstance(verdict, Unscorable)
            turns = int(rollout.turn.max()) + 1
            if isinstance(verdict, _ByTurn) and len(verdict.turns) != turns:
                return Unscorable(f"{name}: expected a score for each of the {turns} turns, got {len(verdict.turns)}")
            value = sum(verdict.values())
            total += self.components[name].weight * value
            for part, points in verdict.items():
                listed[name if part == "" else f"{name}/{part}"] = points
            if self.components[name].judges:
                judged.append(value)
        # Where no reward that judges applies, the others are all there is.
        judged = judged or [sum(verdict.values()) for verdict in verdicts.values() if not isinstance(verdict, Unscorable)]
        if self.overlong is not None:
            assert self.longest_response is not None
            length = torch.tensor([rollout.sampled])
            listed["overlong"] = float(self.overlong.punishment(length, self.longest_response)[0])
            total += listed["overlong"]
        if not abs(total) <= LARGEST_REWARD:
            return Unscorable(f"the weighted sum is {total:g}; at most {LARGEST_REWARD:g} is allowed")
        absent: tuple[str, ...] = ()
        if len(verdicts) < len(self.components):
            absent = tuple([name for name in self.components if name not in verdicts])
        return Score(
            reward=total,
            accuracy=sum(judged) / len(judged),
            components=listed,
            turn_rewards=self._divide(total, rollout, verdicts),
            absent=absent,
        )

    def _divide(self, total: float, rollout: Rollout, verdicts: Mapping[str, Judgement]) -> tuple[float, ...] | None:
        """The reward of each turn: the environment's and those that rewards gave turn by turn at their turns, all other
        rewards at the last turn. None if no reward is by turn."""
        divided = []
        for name, verdict in verdicts.items():
            component = self.components[name]
            if isinstance(verdict, _ByTurn):
                divided.append([component.weight * each for each in verdict.turns])
            elif isinstance(component.reward, EnvironmentReward) and rollout.turn_rewards is not None:
                divided.append([component.weight * each for each in rollout.turn_rewards])
        if not divided:
            return None
        turns = [sum(column) for column in zip(*divided, strict=True)][:-1]
        return (*turns, total - sum(turns))


def judge(reward: Reward, rollout: Rollout) -> Judgement:
    """The verdict of one reward on one rollout."""
    return judge_all(reward, [rollout])[0]


def judge_all(
    reward: Reward, rollouts: Sequence[Rollout], timeout_seconds: float | None = None, name: str = "reward"
) -> list[Judgement]:
    """The verdicts of one reward, in the order of the rollouts. An exception affects only its own rollout."""
    if not rollouts:
        return []
    call: Callable[..., Any] = reward
    count, parallel = len(rollouts), getattr(call, "parallel", False) is True
    seconds = None if getattr(call, "own_limit", False) is True else timeout_seconds
    with settings_restored(), UserCode(f"the reward {name!r}", seconds, "reward.timeout_seconds") as code:
        if is_batched(call):
            copies = [copy_rollout(rollout) for rollout in rollouts]
            if is_async(call):
                verdicts = _judge_async(code, call, [copies], lambda returned: _read_batch(returned, count))[0]
            else:
                verdicts = _attempt(code, lambda: _read_batch(call(copies), count))
            return [verdicts] * count if isinstance(verdicts, Unscorable) else verdicts
        if is_async(call):
            return _judge_async(code, call, [copy_rollout(rollout) for rollout in rollouts], _read)
        if parallel:
            return _judge_in_threads(code, call, rollouts)
        if getattr(call, "harmless", False) is True and not is_own(call):
            verdicts = _attempt(code, _judge_each, call, rollouts)
            return [verdicts] * count if isinstance(verdicts, Unscorable) else verdicts
        return [_attempt(code, lambda rollout: _read(call(copy_rollout(rollout))), rollout) for rollout in rollouts]


def _attempt(code: UserCode, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, or Unscorable. Whatever a reward raises is its own affair; the run goes on."""
    try:
        return code.call(function, *arguments)
    except CallFailedError as error:
        return Unscorable(str(error))


def _read_batch(returned: Any, count: int) -> list[Judgement]:
    """The verdicts of a batched reward, which may return any iterable of as many."""
    _close(returned)
    try:
        # One more than needed shows that there are too many, even if there is no end to them.
        rows = None if isinstance(returned, str | bytes | Mapping) else list(islice(returned, count + 1))
    except Exception as error:
        if not isinstance(error, TypeError):
            return [Unscorable(describe_error(error))] * count
        rows = None
    if rows is None or len(rows) != count:
        many = None if rows is None else f"{len(rows)} verdicts" if len(rows) < count else f"more than {count} verdicts"
        what = f"a {type(returned).__name__}" if many is None else many
        return [Unscorable(f"returned {what} for {count} rollouts; a sequence of as many verdicts is needed")] * count
    return [_read_safely(row) for row in rows]


def _read_safely(row: Any) -> Judgement:
    try:
        return _read(row)
    except Exception as error:
        return Unscorable(describe_error(error))


def _judge_each(reward: Callable[[Rollout], Any], rollouts: Sequence[Rollout]) -> list[Judgement]:
    """The verdicts of a reward of Legato's, which neither changes nor keeps a rollout."""
    verdicts = list[Any]()
    for rollout in rollouts:
        try:
            verdicts.append(reward(rollout))
        except Exception as error:
            verdicts.append(Unscorable(describe_error(error)))
    return [_read(verdict) for verdict in verdicts]


def _read(verdict: Any) -> Judgement:
    """A verdict as a breakdown, with a fast path for plain floats. It runs code of the user's: `repr`, `item`, `items`."""
    if type(verdict) is float and abs(verdict) <= LARGEST_REWARD:
        return {"": verdict}
    if isinstance(verdict, TurnScores):
        return _read_turns(verdict)
    if isinstance(verdict, NotScored):
        return verdict
    if isinstance(verdict, Unscorable):
        return Unscorable(shorten(str(verdict.reason)))
    _close(verdict)
    parts = verdict if isinstance(verdict, dict) else {"": verdict}
    numbers = {shorten(str(name), 100): as_number(value) for name, value in parts.items()}
    listed = {name: value for name, value in numbers.items() if value is not None}
    if len(listed) < len(parts) or not parts:
        return Unscorable(
            f"returned {describe_value(verdict)}; a finite number of at most {LARGEST_REWARD:g}, or a dict of such numbers,"
            " is needed"
        )
    return listed


def _read_turns(verdict: TurnScores) -> Judgement:
    numbers = [as_number(each) for each in islice(verdict.scores, _MOST_TURNS)]
    known = [each for each in numbers if each is not None]
    if len(known) < len(numbers) or not known or abs(sum(known)) > LARGEST_REWARD:
        return Unscorable(f"returned {describe_value(verdict)}; a finite number for each turn is needed")
    return _ByTurn(tuple(known))


_MOST_TURNS = 100_000


def _close(verdict: Any) -> None:
    # A plain function returned a coroutine. It is never awaited; closing it avoids a warning.
    if inspect.iscoroutine(verdict):
        verdict.close()


_THREADS = 8
"""For parallel rewards. Threads beyond the worker processes only wait."""


def _judge_in_threads(code: UserCode, reward: Callable[..., Any], rollouts: Sequence[Rollout]) -> list[Judgement]:
    """The verdicts of a parallel reward. The threads are daemons: a run that ends does not wait for their questions."""
    verdicts: list[Judgement] = [Unscorable("not asked")] * len(rollouts)
    places, ended = iter(range(len(rollouts))), threading.Event()

    def work() -> None:
        for place in places:
            if ended.is_set():
                return
            try:
                verdicts[place] = _read(reward(copy_rollout(rollouts[place])))
            except BaseException as error:
                verdicts[place] = Unscorable(describe_error(error))

    def run() -> None:
        threads = [threading.Thread(target=work, name="reward", daemon=True) for _ in rollouts[:_THREADS]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    try:
        _attempt(code, run)
    finally:
        ended.set()
    return verdicts


_BEAT_SECONDS = 0.25
_LATE_SECONDS = 1.0
"""How long a coroutine may take to react to its cancellation."""


def _judge_async(code: UserCode, reward: Callable[..., Any], items: Sequence[Any], read: Callable[[Any], Any]) -> list[Any]:
    """What `read` makes of the results of an async reward, or Unscorable. Each item has its own time limit.

    The event loop restarts the clock of `code` as long as it goes round. A coroutine that blocks the loop is interrupted.
    """
    verdicts: list[Any] = [None] * len(items)
    # Else a short limit would take a loop that waits for its next round for one that is blocked.
    code.slack = _LATE_SECONDS
    last_start = time.monotonic()

    async def judge_one(place: int, item: Any) -> None:
        nonlocal last_start
        code.restart()
        last_start = time.monotonic()
        limit = asyncio.timeout(code.seconds)
        try:
            async with limit:
                verdicts[place] = read(await reward(item))
        except BaseException as error:
            if code.is_signal(error):
                raise
            verdicts[place] = Unscorable(code.overdue if limit.expired() else code.reason(error))

    async def judge_items() -> None:
        waiting = {asyncio.ensure_future(judge_one(place, item)) for place, item in enumerate(items)}
        while waiting:
            ended, waiting = await asyncio.wait(waiting, timeout=_BEAT_SECONDS)
            code.restart()
            for task in ended:
                task.result()
            if code.seconds is not None and time.monotonic() - last_start > code.seconds + _LATE_SECONDS:
                # Coroutines that ignore their cancellation; the loop waits for them at its end too.
                code.hurry(_LATE_SECONDS)
                return

    verdict = _attempt(code, _run, judge_items)
    reason = verdict if isinstance(verdict, Unscorable) else Unscorable(code.overdue)
    return [reason if each is None else each for each in verdicts]


def _run(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine here, or in a new thread if this thread already has a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(function())
        return
    errors: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="async rewards", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
