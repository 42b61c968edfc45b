"""Episodes: a policy and an environment take turns, and the runner that plays many of them on one engine.

    environment.episode(problem)     starts an episode
    episode.reply(text, stop)        answers a turn of the policy with a Reply, or ends the episode with None
    runner.play(starts, sampling)    plays many episodes and returns their rollouts

Episodes may also have `act(turn, stop)`, which gets the turn as it was read (`tool_calls.py`) in place of `reply`, and
`opening()`, a text that is added to the prompt before the first turn. `examples/second_guess.py` is a whole environment. A
question with a reward is the environment that never replies (`SingleTurn`) and takes the same path.

Token in, token out: what the policy sampled is never tokenised again. A rollout's tokens are the policy's turns with the
environment's tokens between them (mask False, turn -1), and the prompt of a turn is the first prompt with all tokens so far.
Where a chat template renders earlier turns differently later, the policy must read that: the next turn starts a new row.
"""

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from legato.core.fields import flag, integer, number, text
from legato.core.protection import copy_problem, copy_value, settings_restored
from legato.core.rollout import START_STATE, Author, Message, Problem, Rollout, Routes, Row, StopReason
from legato.core.settings import settings
from legato.core.user_code import DEFAULT_SECONDS, CallFailedError, UserCode, is_own
from legato.errors import InputError
from legato.rollouts.engine import Engine, Finished, Handle, Limits, Request, Response
from legato.rollouts.randomness import seed_of
from legato.rollouts.render import Inserted, Rendering
from legato.rollouts.sampling import Sampling
from legato.rollouts.tool_calls import Turn

_T = TypeVar("_T")

LONGEST_REPLY = 1_000_000
"""Characters of a reply. A longer one fits into no context, and takes long to tokenise."""


@settings()
class EpisodeSettings:
    """The limits of an episode, and what becomes of one that a limit cut."""

    max_turns: int | None = integer(
        default=None,
        says="The most turns of the policy in an episode; absent: as many as the environment allows.",
        minimum=1,
        optional=True,
    )
    max_turn_tokens: int | None = integer(
        default=None,
        says="The longest turn of the policy in tokens; absent: what rollouts.max_response_tokens leaves.",
        minimum=1,
        optional=True,
    )
    episode_seconds: float | None = number(
        default=None,
        says="The time of an episode, sampling included; then it ends after the turn. absent: any time.",
        above=0.0,
        optional=True,
    )
    train_on_cut: bool = flag(
        default=False,
        says="Whether episodes that a limit of tokens, turns or time cut are trained on. If not, they still count in the"
        " baseline of their group. Without an environment the filter 'overlong' decides.",
    )
    step_separator: str | None = text(
        default=None,
        says="Divides a response into steps that end with this text, each with credit of its own, as turns have: a reward"
        " may return legato.TurnScores, a number for each step. Only without an environment. absent: it is one step.",
        optional=True,
        blank=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment answers to a turn of the policy."""

    content: str | Sequence[Message] = ""
    """Text, or chat messages. Under a chat template a text is a message of the user."""
    reward: float | int | None = None
    """Reward of the turn that is answered; None: the turn has no reward of its own."""
    state: Hashable | None = None
    """The state in which the next turn begins. Episodes of a problem that reach equal states are compared there (GiGPO);
    None: a state that no other episode reaches."""
    done: bool = False
    """Whether the episode ends here; then `content` is not read."""


@runtime_checkable
class Episode(Protocol):
    """One attempt at a problem."""

    def reply(self, text: str, stop: StopReason) -> Reply | None:
        """The reply to the policy's text, given why the policy stopped; None ends the episode without a reward for the turn.

        Also called if the policy ran out of tokens; then only the reward of the reply is read.
        """


@runtime_checkable
class Environment(Protocol):
    """Makes episodes. An exception costs the rollout, which is left out and counted, but never the run."""

    @property
    def max_turns(self) -> int:
        """The largest number of policy turns; the runner then ends the episode."""

    @property
    def deterministic(self) -> bool:
        """Whether equal texts get equal replies; `tests/contracts` checks the claim."""

    def episode(self, problem: Problem) -> Episode:
        """A new episode, which shares no mutable state with others."""


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """The trivial environment, and its own episode: one turn, and no reply."""

    max_turns: int = 1
    deterministic: bool = True

    def episode(self, problem: Problem) -> "SingleTurn":
        return self

    def reply(self, text: str, stop: StopReason) -> None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Episodes to start on one problem, one per seed."""

    problem: Problem
    prompt: Tensor
    """[P] token ids."""
    seeds: tuple[int, ...]
    """Seeds of the first turns; later seeds are derived from them."""
    ids: Sequence[int]
    """The rollout ids, one per seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A reply of the environment as the run keeps it: nothing in it is shared with the environment's own objects."""

    content: str | list[dict[str, Any]] = ""
    reward: float | None = None
    state: str | None = None
    """The repr of the state."""
    done: bool = False
    fault: str | None = None
    """What is wrong with the reply."""


@dataclass(slots=True, eq=False)
class _Playing:
    """An episode in progress."""

    problem: Problem
    prompt: Tensor
    """The prompt of the current row."""
    seed: int
    number: int
    group: int = 0
    """The start it belongs to, as `Session.add` numbers them."""
    episode: Episode | None = None
    turns: list[Response] = field(default_factory=list)
    """The turns of the current row."""
    versions: list[Tensor] = field(default_factory=list)
    inserted: list[Inserted] = field(default_factory=list)
    """The environment's replies after each turn of the row but the last."""
    earlier: list[Row] = field(default_factory=list)
    """Rows that the chat template closed."""
    turns_before: int = 0
    """Turns in earlier rows."""
    first_prompt: int = 0
    """Tokens of the first prompt."""
    rendered: str | None = None
    """The conversation so far as the template rendered it; None: not known."""
    texts: list[str] = field(default_factory=list)
    """What policy and environment said, in turn."""
    servers: set[str | None] = field(default_factory=set)
    """The servers that sampled its turns."""
    kept: object = None
    """The KV cache that the engine left with the last turn (`Response.kept`)."""
    started: float = field(default_factory=time.monotonic)
    rewards: list[float | None] = field(default_factory=list)
    states: list[int] = field(default_factory=[START_STATE].copy)
    messages: list[Message] = field(default_factory=list)
    """The messages so far after the problem; empty without a chat template."""
    length: int = 0
    """Tokens so far, including the environment's."""
    stop: StopReason | None = None
    fault: str | None = None

    @property
    def turn_count(self) -> int:
        return self.turns_before + len(self.turns)

    def add_turn(self, response: Response) -> None:
        """Append a turn of the policy. Only the KV cache of the last turn is held."""
        self.kept = response.kept
        self.turns.append(replace(response, kept=None))
        self.versions.append(response.version)
        self.length += len(response.tokens)
        self.texts.append(response.text)
        self.servers.add(response.server)


@dataclass(slots=True, kw_only=True)
class Runner:
    """Plays episodes on an engine."""

    engine: Engine
    rendering: Rendering
    limits: Limits
    """`max_response_tokens` is for a whole rollout, including the environment's tokens."""
    environment: Environment = field(default_factory=SingleTurn)
    environment_seconds: float | None = DEFAULT_SECONDS
    """How long a call of the environment may take; None: for ever."""
    weights: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
    """Returns the policy's weights, for engines that hold their own."""
    version: int = 0
    """Version of the policy being sampled."""
    episodes: EpisodeSettings = field(default_factory=EpisodeSettings)
    longest_prompt: int | None = None
    """Tokens of a prompt with the opening of its episode; None: any number."""
    turns: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """Entered around the environment's code, so that two threads do not run it at once."""
    _published_to: Engine | None = None

    def publish(self, version: int) -> None:
        """Hand the policy's weights to the engine as this version."""
        self.version = version
        self.call_engine(self.engine.publish, self.weights(), version)
        self._published_to = self.engine

    def single_turn(self, limits: Limits) -> "Runner":
        """This runner for single turns with other limits, at the version that it has now."""
        self._publish_first()
        return replace(self, limits=limits, environment=SingleTurn())

    def on_client(self, engine: Engine) -> "Runner":
        """This runner on another client of its engine, which has the weights already."""
        self._publish_first()
        return replace(self, engine=engine, _published_to=engine)

    def close(self) -> None:
        """Called when the run has ended."""

    def _publish_first(self) -> None:
        if self._published_to is not self.engine:
            self.publish(self.version)

    def play(self, starts: Sequence[Start], sampling: Sampling) -> list[list[Rollout]]:
        """For each start its rollouts, in the order of its seeds. A turn is submitted as soon as the reply to the last is
        there, while others decode."""
        session = self.session(sampling)
        try:
            numbers = session.add(starts)
            played: dict[int, list[Rollout]] = {}
            while session.outstanding:
                played |= session.advance()
        except BaseException:
            # The caller will not poll for these requests.
            session.cancel()
            raise
        return [played[number] for number in numbers]

    def session(self, sampling: Sampling) -> "Session":
        """Episodes to which others can be added while they are played."""
        self._publish_first()
        return Session(runner=self, sampling=sampling, max_turns=self._read_max_turns())

    def guard_environment(self) -> UserCode:
        """A context for calls of the environment."""
        return UserCode("the environment", self.environment_seconds, "task.timeout_seconds")

    def turn_limits(self, left: int) -> Limits:
        """The limits of a turn of an episode that has so many tokens left."""
        most = self.episodes.max_turn_tokens
        several = most is not None and not isinstance(self.environment, SingleTurn)
        return replace(self.limits, max_response_tokens=min(left, most) if several and most is not None else left)

    def demonstrate(self, problem: Problem) -> list[tuple[Tensor, Tensor]]:
        """(prompt, response) of each turn of the environment's own demonstration, played against the environment.

        InputError if the environment fails: the run has not begun yet.
        """
        environment: Any = self.environment
        playing = _Playing(problem, self.rendering.prompt(problem), 0, 0)
        playing.first_prompt, end = len(playing.prompt), self.limits.end_tokens[0]
        session = Session(runner=self, sampling=Sampling(), max_turns=self._read_max_turns())
        examples = []
        with self.turns, settings_restored(), self.guard_environment() as code:
            try:
                words = code.call(environment.demonstrate, copy_problem(problem))
            except CallFailedError as error:
                raise InputError(f"expected the turns of a demonstration, got {error} (task.environment)") from None
            if getattr(environment, "opens", False):
                session.open_episode(playing, code)
            for text in words:
                tokens = torch.tensor([*self.rendering.tokenizer(str(text), add_special_tokens=False)["input_ids"], end])
                examples.append((session.row_so_far(playing), tokens))
                response = Response(
                    tokens=tokens,
                    logprobs=torch.zeros(len(tokens)),
                    kept_logmass=None,
                    text=str(text),
                    stop=StopReason.END_TOKEN,
                    version=torch.zeros(len(tokens), dtype=torch.int64),
                )
                if not session.play_turn(playing, response, code):
                    break
        if playing.fault is not None:
            raise InputError(f"expected a demonstration that the environment can play, got {playing.fault}")
        return examples

    def call_engine(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """What a method of the engine returns. An engine of the user's is given up soon after a signal, like a reward.

        It has no deadline: how long sampling may take is its own affair.
        """
        if not is_own(self.engine.innermost):
            return function(*arguments)
        with settings_restored(), UserCode(f"the engine {self.engine.name!r}", None) as code:
            try:
                return code.call(function, *arguments)
            except CallFailedError as failed:
                cause = failed.__cause__
                assert cause is not None
                raise cause from cause.__cause__

    def _read_max_turns(self) -> int:
        if isinstance(self.environment, SingleTurn):
            return self.environment.max_turns
        with self.turns, settings_restored(), self.guard_environment() as code:
            try:
                return code.call(lambda: int(self.environment.max_turns))
            except CallFailedError as error:
                raise InputError(
                    f"expected a number of turns, got {error} (max_turns of the environment); correct the environment"
                ) from error.__cause__


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """Episodes in progress on the engine of a runner, in groups that begin and end at any time.

    One thread calls `advance`. Another may call `add` meanwhile if the engine takes requests during a poll.
    """

    runner: Runner
    sampling: Sampling
    max_turns: int
    """`max_turns` of the environment, which is read once for all episodes of a session."""
    _waiting: dict[Handle, list[_Playing]] = field(default_factory=dict)
    _groups: dict[int, list[_Playing]] = field(default_factory=dict)
    """The episodes of each start that is not finished."""
    _left: dict[int, int] = field(default_factory=dict)
    """How many episodes of each start are still being played."""
    _added: int = 0
    _cancelled: bool = False
    """Nothing more is submitted: an episode may be in the middle of its environment's reply when it is given up."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def outstanding(self) -> bool:
        """Whether any episode is in progress."""
        return bool(self._left)

    def add(self, starts: Sequence[Start]) -> list[int]:
        """Submit the first turns of some starts; returns the number of each, by which `advance` reports it."""
        numbers = list(range(self._added, self._added + len(starts)))
        self._added += len(starts)
        groups = {
            number: [
                _Playing(start.problem, start.prompt, seed, rollout_id, number, first_prompt=len(start.prompt))
                for seed, rollout_id in zip(start.seeds, start.ids, strict=True)
            ]
            for number, start in zip(numbers, starts, strict=True)
        }
        together = self._open(list(groups.values()))
        requests = [
            Request(prompt=each[0].prompt, seeds=tuple([one.seed for one in each]), keep=self.max_turns > 1)
            for each in together
        ]
        limits = self.runner.turn_limits(self.runner.limits.max_response_tokens)
        with self._lock:
            if self._cancelled:
                return numbers
            handles = self.runner.call_engine(self.runner.engine.submit, requests, self.sampling, limits)
            self._groups |= groups
            self._left |= {number: len(group) for number, group in groups.items()}
            self._waiting |= dict(zip(handles, together, strict=True))
        return numbers

    def advance(self) -> dict[int, list[Rollout]]:
        """Decode until a request is complete, and play on; returns the rollouts of the starts that are finished now."""
        waiting = len(self._waiting)
        finished = self.runner.call_engine(self.runner.engine.poll)
        if not finished and waiting:
            raise RuntimeError(f"the engine {self.runner.engine.name!r} polled [] with {waiting} requests outstanding")
        ended = self._continue(finished)
        with self._lock:
            if self._cancelled:
                return {}
            for playing in ended:
                self._left[playing.group] -= 1
            done = [number for number in dict.fromkeys([playing.group for playing in ended]) if not self._left[number]]
            groups = {number: self._groups.pop(number) for number in done}
            for number in done:
                del self._left[number]
        temperature = self.sampling.temperature
        return {number: [self._rollout(each, temperature) for each in group] for number, group in groups.items()}

    def cancel(self) -> None:
        """Give up all episodes."""
        with self._lock:
            self._cancelled = True
            for handle in self._waiting:
                self.runner.engine.cancel(handle)
            self._waiting.clear()
            self._groups.clear()
            self._left.clear()

    def _open(self, groups: Sequence[list[_Playing]]) -> list[list[_Playing]]:
        """Episodes that share a prompt, together. Episodes with an opening begin here, and their prompts may differ."""
        if not getattr(self.runner.environment, "opens", False):
            return list(groups)
        together: list[list[_Playing]] = []
        with self.runner.turns, settings_restored(), self.runner.guard_environment() as code:
            for group in groups:
                by_prompt: dict[tuple[int, ...], list[_Playing]] = {}
                for playing in group:
                    self.open_episode(playing, code)
                    by_prompt.setdefault(tuple(playing.prompt.tolist()), []).append(playing)
                together += by_prompt.values()
        return together

    def open_episode(self, playing: _Playing, code: UserCode) -> None:
        """Start the episode and add its opening to the prompt. A fault ends it after its first turn."""
        try:
            playing.episode = code.call(self.runner.environment.episode, copy_problem(playing.problem))
            opening = code.call(_read_opening, playing.episode)
        except CallFailedError as error:
            playing.fault = f"environment: {error}"
            return
        if opening is None:
            return
        if isinstance(opening, _Fault):
            playing.fault = str(opening)
            return
        problem = _add_opening(playing.problem, opening)
        prompt = self.runner.rendering.prompt(problem)
        if self.runner.longest_prompt is not None and len(prompt) > self.runner.longest_prompt:
            playing.fault = (
                f"environment: its opening makes a prompt of {len(prompt)} tokens, more than policy.max_prompt_tokens ="
                f" {self.runner.longest_prompt}"
            )
            return
        playing.problem, playing.prompt, playing.first_prompt = problem, prompt, len(prompt)

    def _continue(self, finished: Sequence[Finished]) -> list[_Playing]:
        """Play on after finished turns and submit the turns that follow; returns the episodes that have ended."""
        with self._lock:
            turns = [
                (playing, response)
                for each in finished
                if each.handle in self._waiting  # else cancelled meanwhile
                for playing, response in zip(self._waiting.pop(each.handle), each.responses, strict=True)
            ]
        if isinstance(self.runner.environment, SingleTurn):
            # Nothing is asked of the environment, so nothing needs a guard.
            for playing, response in turns:
                playing.add_turn(response)
                playing.rewards.append(None)
            return [playing for playing, _ in turns]
        ended: list[_Playing] = []
        going_on: dict[int, list[_Playing]] = {}
        with self.runner.turns, settings_restored(), self.runner.guard_environment() as code:
            for playing, response in turns:
                if self.play_turn(playing, response, code):
                    # A new row may hold more than was sampled so far: the template wrote its prompt.
                    used = max(playing.length, len(self.row_so_far(playing)) - playing.first_prompt)
                    going_on.setdefault(self.runner.limits.max_response_tokens - used, []).append(playing)
                else:
                    playing.kept = None
                    ended.append(playing)
        for left, together in going_on.items():
            requests = [self._next_request(playing) for playing in together]
            limits = self.runner.turn_limits(left)
            with self._lock:
                if self._cancelled:
                    return []
                handles = self.runner.call_engine(self.runner.engine.submit, requests, self.sampling, limits)
                self._waiting |= {handle: [playing] for handle, playing in zip(handles, together, strict=True)}
        return ended

    def play_turn(self, playing: _Playing, response: Response, code: UserCode) -> bool:
        """Add a turn of the policy and the environment's reply to it. Returns whether another turn follows."""
        playing.add_turn(response)
        if playing.fault is not None:  # at its opening
            return False
        turn = self._read_turn(response)
        try:
            if playing.episode is None:
                playing.episode = code.call(self.runner.environment.episode, copy_problem(playing.problem))
            # Under harmony the text without special tokens is a jumble of channels.
            text = turn.content if self.runner.rendering.tool_calls.name == "harmony" else response.text
            answer = code.call(_ask, playing.episode, text, response.stop, turn)
        except CallFailedError as error:  # an environment may raise anything; only this rollout is lost
            playing.fault = f"environment: {error}"
            return False
        if answer is None:
            playing.rewards.append(None)
            return False
        playing.fault = answer.fault
        if playing.fault is not None:
            return False
        playing.rewards.append(answer.reward)
        if answer.done:
            playing.stop = response.stop if response.stop.truncated else StopReason.ENVIRONMENT
            return False
        if playing.turn_count >= self.max_turns and not response.stop.truncated:
            playing.stop = StopReason.ENVIRONMENT
        elif response.stop.truncated or (limit := self._limit_reached(playing)) is not None:
            playing.stop = response.stop if response.stop.truncated else limit
        else:
            try:
                if self._insert_reply(playing, response, turn, answer):
                    return True
            except InputError as error:  # messages that the template refuses, or that have none
                playing.fault = f"environment: {error}"
                return False
        self._end_episode(playing, code)
        return False

    def _end_episode(self, playing: _Playing, code: UserCode) -> None:
        """Tell an episode that wants to know that a limit ended it; its last reward is added to that of the turn."""
        end = getattr(playing.episode, "end", None)
        if not callable(end):
            return
        try:
            reward = code.call(lambda: _wait_for(end()))
        except CallFailedError as error:
            playing.fault = f"environment: {error}"
            return
        fault = _fault_of(Reply(reward=reward))
        if fault is not None:
            playing.fault = fault
        elif reward is not None:
            playing.rewards[-1] = (playing.rewards[-1] or 0.0) + float(reward)

    def _read_turn(self, response: Response) -> Turn:
        """The policy's turn; a turn that a stop string ended is the text before that string."""
        if response.stop is StopReason.STOP_STRING:
            return self.runner.rendering.tool_calls.read(response.text)
        return self.runner.rendering.read_turn(response.tokens, response.text, ended=response.stop is StopReason.END_TOKEN)

    def _limit_reached(self, playing: _Playing) -> StopReason | None:
        """The limit of the run that ends the episode here; None: it goes on."""
        limits = self.runner.episodes
        if limits.max_turns is not None and playing.turn_count >= limits.max_turns:
            return StopReason.TURNS
        if limits.episode_seconds is not None and time.monotonic() - playing.started > limits.episode_seconds:
            return StopReason.TIME
        return None

    def _insert_reply(self, playing: _Playing, response: Response, turn: Turn, answer: _Answer) -> bool:
        """Append the environment's tokens to the turn; False if no token of the policy would fit after them."""
        inserted = self.runner.rendering.reply(
            playing.problem,
            playing.messages,
            turn,
            answer.content,
            before=playing.rendered,
            end=int(response.tokens[-1]) if response.stop is StopReason.END_TOKEN else None,
            end_tokens=self.runner.limits.end_tokens,
        )
        added = len(inserted.tokens)
        if inserted.starts_row:
            # What the conversation holds beyond the first prompt counts, as it would without a new row.
            added = max(0, added - playing.first_prompt - playing.length)
        if playing.length + added >= self.runner.limits.max_response_tokens:
            playing.stop = StopReason.LENGTH
            return False
        turns = playing.turn_count
        if inserted.starts_row:
            playing.earlier.append(_row(playing))
            playing.turns_before, playing.prompt = turns, inserted.tokens
            playing.turns, playing.versions, playing.inserted = [], [], []
        else:
            playing.inserted.append(inserted)
        playing.length += added
        playing.messages += inserted.messages
        playing.rendered = inserted.rendered or None
        playing.texts.append(inserted.text)
        playing.states.append(seed_of("state", playing.number, turns) if answer.state is None else seed_of(answer.state))
        return True

    def row_so_far(self, playing: _Playing) -> Tensor:
        """The prompt of the next turn."""
        pieces = [playing.prompt]
        for turn, inserted in zip(playing.turns, playing.inserted, strict=True):
            pieces += [turn.tokens, inserted.tokens]
        return torch.cat(pieces)

    def _next_request(self, playing: _Playing) -> Request:
        kept, playing.kept = playing.kept, None
        return Request(
            prompt=self.row_so_far(playing),
            seeds=(seed_of("turn", playing.seed, playing.turn_count),),
            keep=playing.turn_count + 1 < self.max_turns,
            kept=kept,
        )

    def _rollout(self, playing: _Playing, temperature: float) -> Rollout:
        """The record of an episode."""
        first = playing.turns[0]
        length = len(first.tokens)
        separator = self.runner.episodes.step_separator
        if self.max_turns == 1:
            steps, texts = torch.zeros(length, dtype=torch.int64), [first.text]
            if separator and isinstance(self.runner.environment, SingleTurn):
                steps, texts = divide_into_steps(first.tokens, self.runner.rendering.tokenizer, separator)
            several = len(texts) > 1
            # Most rollouts have a single turn: nothing has to be joined.
            return Rollout(
                problem=playing.problem,
                rollout_id=playing.number,
                prompt_tokens=playing.prompt,
                tokens=first.tokens,
                sampler_logprobs=first.logprobs,
                version=playing.versions[0],
                text=first.text,
                stop=playing.stop or first.stop,
                temperature=temperature,
                mask=torch.ones(length, dtype=torch.bool),
                turn=steps,
                author=torch.full((length,), Author.POLICY.value),
                turn_states=_unique_states(playing.number, len(texts)) if separator else None,
                dialogue=tuple([each for said in texts for each in (said, "")][:-1]) if several else None,
                kept_logmass=first.kept_logmass,
                routes=first.routes,
                server=first.server,
                turn_rewards=None if not playing.rewards or playing.rewards[0] is None else (playing.rewards[0],),
                fault=playing.fault,
            )
        several = self.max_turns > 1
        rewarded = [reward for reward in playing.rewards if reward is not None]
        row = _row(playing)
        return Rollout(
            problem=playing.problem,
            rollout_id=playing.number,
            text=playing.turns[-1].text,
            stop=playing.stop or playing.turns[-1].stop,
            temperature=temperature,
            server=next(iter(playing.servers)) if len(playing.servers) == 1 else None,
            turn_rewards=tuple(reward or 0.0 for reward in playing.rewards) if rewarded else None,
            turn_states=tuple(playing.states) if several else None,
            dialogue=tuple(playing.texts) if several else None,
            fault=playing.fault,
            earlier=tuple(playing.earlier),
            **{each.name: getattr(row, each.name) for each in fields(Row)},
        )


def divide_into_steps(tokens: Tensor, tokenizer: Any, separator: str) -> tuple[Tensor, list[str]]:
    """The step of each token, [T], and the text of each step. A step ends with the token that completes the separator."""
    steps, texts = list[int](), [""]
    for token in tokens.tolist():
        if separator in texts[-1]:
            texts.append("")
        steps.append(len(texts) - 1)
        texts[-1] += tokenizer.decode([token], skip_special_tokens=True)
    if len(texts) > 1 and not texts[-1].strip():
        # What follows the last separator is the end token: it belongs to the step before.
        rest = texts.pop()
        texts[-1] += rest
        steps = [min(step, len(texts) - 1) for step in steps]
    return torch.tensor(steps), texts


def _unique_states(number: int, count: int) -> tuple[int, ...]:
    """The states of turns that no other episode shares, but for the first."""
    return (START_STATE, *(seed_of("state", number, turn) for turn in range(1, count)))


def _row(playing: _Playing) -> Row:
    """The current row of an episode as a record."""
    columns: dict[str, list[Tensor]] = {name: [] for name in _COLUMNS}
    for place, turn in enumerate(playing.turns):
        length = len(turn.tokens)
        columns["tokens"].append(turn.tokens)
        columns["sampler_logprobs"].append(turn.logprobs)
        columns["version"].append(playing.versions[place])
        columns["mask"].append(torch.ones(length, dtype=torch.bool))
        columns["turn"].append(torch.full((length,), playing.turns_before + place))
        columns["author"].append(torch.full((length,), Author.POLICY.value))
        if turn.kept_logmass is not None:
            columns["kept_logmass"].append(turn.kept_logmass)
        if place < len(playing.inserted):
            _add_reply(columns, playing.inserted[place])
    tables = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in columns.items() if pieces}
    routes = _join_routes([turn.routes for turn in playing.turns])
    return Row(prompt_tokens=playing.prompt, routes=routes, **tables)


_COLUMNS = ("tokens", "sampler_logprobs", "version", "mask", "turn", "author", "kept_logmass")


def _add_reply(columns: dict[str, list[Tensor]], inserted: Inserted) -> None:
    """Append the environment's tokens to every table. Their log-probs are 0 and are never read."""
    length = len(inserted.tokens)
    columns["tokens"].append(inserted.tokens)
    columns["sampler_logprobs"].append(torch.zeros(length))
    columns["version"].append(torch.full((length,), -1))
    columns["mask"].append(torch.zeros(length, dtype=torch.bool))
    columns["turn"].append(torch.full((length,), -1))
    columns["author"].append(inserted.authors)
    if columns["kept_logmass"]:
        columns["kept_logmass"].append(torch.zeros(length))


def _join_routes(routes: Sequence[Routes | None]) -> Routes | None:
    """The routes of all turns, each token's from its first forward. None if a turn has no routes."""
    records = [each for each in routes if each is not None]
    if len(records) < len(routes):
        return None
    whole = records[0]
    for later in records[1:]:
        # The engine read all earlier turns again as the prompt; their tokens keep the routes they already have.
        new = slice(len(whole.tokens), None)
        whole = Routes(
            tokens=torch.cat([whole.tokens, later.tokens[new]]),
            experts=torch.cat([whole.experts, later.experts[new]]),
            count=whole.count,
        )
    return whole


class _Fault(str):
    """What is wrong with what an environment returned."""

    __slots__ = ()


def _read_opening(episode: Any) -> "str | _Fault | None":
    """The opening of an episode. All of this runs code of the user's."""
    opening = _wait_for(episode.opening())
    if opening is None:
        return None
    if not isinstance(opening, str):
        return _Fault(f"environment: expected an opening of text or None, got {opening!r:.80}")
    if len(opening) > LONGEST_REPLY:
        return _Fault(f"environment: expected an opening of at most {LONGEST_REPLY} characters, got {len(opening)}")
    return _without_surrogates(str(opening))


def _add_opening(problem: Problem, opening: str) -> Problem:
    """The problem with a text at the end of its last message."""
    if isinstance(problem.prompt, str):
        return replace(problem, prompt=problem.prompt + opening)
    *before, last = problem.prompt
    return replace(problem, prompt=[*before, {**last, "content": f"{last.get('content', '')}{opening}"}])


def _wait_for(value: Any) -> Any:
    """The value, or the result of the coroutine that it is."""
    return asyncio.run(_await(value)) if inspect.isawaitable(value) else value


async def _await(value: Any) -> Any:
    return await value


def _without_surrogates(text: str) -> str:
    """The text without halves of surrogate pairs, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _ask(episode: Any, text: str, stop: StopReason, turn: Turn | None = None) -> _Answer | None:
    """The episode's reply, read and copied. All of this runs code of the user's: properties, `repr`, `float`.

    `turn` is for episodes that act on calls.
    """
    act = getattr(episode, "act", None)
    reply = _wait_for(act(turn, stop) if callable(act) else episode.reply(text, stop))
    if reply is None:
        return None
    fault = _fault_of(reply)
    if fault is not None:
        return _Answer(fault=fault)
    content = reply.content
    return _Answer(
        content=_without_surrogates(str(content)) if isinstance(content, str) else [_copy_message(each) for each in content],
        reward=None if reply.reward is None else float(reply.reward),
        state=None if reply.state is None else repr(reply.state),
        done=bool(reply.done),
    )


def _copy_message(message: Mapping[str, Any]) -> dict[str, Any]:
    copied = copy_value(dict(message))
    return {str(key): _without_surrogates(value) if isinstance(value, str) else value for key, value in copied.items()}


def _fault_of(reply: Any) -> str | None:
    """What is wrong with a reply; None if nothing is."""
    if not isinstance(reply, Reply):
        return f"environment: expected a Reply or None, got {reply!r:.80}"
    reward, content = reply.reward, reply.content
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward)):
        return f"environment: expected a finite reward or None, got {reward!r:.80}"
    if isinstance(content, str):
        return _too_long(len(content))
    if isinstance(content, Sequence) and all(isinstance(each, Mapping) and "role" in each for each in content):
        messages = cast(Sequence[Message], content)
        return _too_long(sum([len(str(each.get("content", ""))) for each in messages]))
    return f"environment: expected text or chat messages, got {content!r:.80}"


def _too_long(characters: int) -> str | None:
    if characters <= LONGEST_REPLY:
        return None
    return f"environment: expected a reply of at most {LONGEST_REPLY} characters, got {characters}"
