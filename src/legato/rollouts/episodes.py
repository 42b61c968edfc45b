"""Episodes: a policy and an environment take turns, and the runner that plays many of them on one engine.

    environment.episode(problem)     starts an episode
    episode.reply(text, stop)        answers a turn of the policy with a Reply, or ends the episode with None
    runner.play(starts, sampling)    plays many episodes and returns their rollouts

`examples/second_guess.py` is a whole environment. A question with a reward is the environment that never replies
(`SingleTurn`) and takes the same path.

Token in, token out: what the policy sampled is never tokenised again. A rollout's tokens are the policy's turns with the
environment's tokens between them (mask False, turn -1), and the prompt of a turn is the first prompt with all tokens so far.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from legato.core.protection import copy_problem, copy_value, settings_restored
from legato.core.rollout import START_STATE, Author, Message, Problem, Rollout, Routes, StopReason
from legato.core.user_code import DEFAULT_SECONDS, CallFailedError, UserCode, is_own
from legato.errors import InputError
from legato.rollouts.engine import Engine, Finished, Handle, Limits, Request, Response
from legato.rollouts.randomness import seed_of
from legato.rollouts.render import Inserted, Rendering
from legato.rollouts.sampling import Sampling

_T = TypeVar("_T")


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
    seed: int
    number: int
    episode: Episode | None = None
    turns: list[Response] = field(default_factory=list)
    versions: list[Tensor] = field(default_factory=list)
    inserted: list[Inserted] = field(default_factory=list)
    """The environment's replies after each turn but the last."""
    rewards: list[float | None] = field(default_factory=list)
    states: list[int] = field(default_factory=[START_STATE].copy)
    messages: list[Message] = field(default_factory=list)
    """The messages so far after the problem; empty without a chat template."""
    length: int = 0
    """Tokens so far, including the environment's."""
    stop: StopReason | None = None
    fault: str | None = None

    def add_turn(self, response: Response) -> None:
        """Append a turn of the policy."""
        self.turns.append(response)
        self.versions.append(response.version)
        self.length += len(response.tokens)


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
    _published_to: Engine | None = None
    _max_turns: int = 1
    """`max_turns` of the environment, which is read once for all episodes that are played together."""

    def publish(self, version: int) -> None:
        """Hand the policy's weights to the engine as this version."""
        self.version = version
        self._call_engine(self.engine.publish, self.weights(), version)
        self._published_to = self.engine

    def single_turn(self, limits: Limits) -> "Runner":
        """This runner for single turns with other limits, at the version that it has now."""
        self._publish_first()
        return replace(self, limits=limits, environment=SingleTurn())

    def _publish_first(self) -> None:
        if self._published_to is not self.engine:
            self.publish(self.version)

    def play(self, starts: Sequence[Start], sampling: Sampling) -> list[list[Rollout]]:
        """For each start its rollouts, in the order of its seeds. A turn is submitted as soon as the reply to the last is
        there, while others decode."""
        self._publish_first()
        self._max_turns = self._read_max_turns()
        groups = [
            [
                _Playing(start.problem, start.prompt, seed, number)
                for seed, number in zip(start.seeds, start.ids, strict=True)
            ]
            for start in starts
        ]
        requests = [Request(prompt=start.prompt, seeds=start.seeds) for start in starts]
        handles = self._call_engine(self.engine.submit, requests, sampling, self.limits)
        waiting: dict[Handle, list[_Playing]] = dict(zip(handles, groups, strict=True))
        try:
            while waiting:
                finished = self._call_engine(self.engine.poll)
                if not finished:
                    raise RuntimeError(f"the engine {self.engine.name!r} polled [] with {len(waiting)} requests outstanding")
                self._continue(finished, waiting, sampling)
        except BaseException:
            # The caller will not poll for these requests.
            for handle in waiting:
                self.engine.cancel(handle)
            raise
        return [[self._rollout(playing, sampling.temperature) for playing in group] for group in groups]

    def _call_engine(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """What a method of the engine returns. An engine of the user's is given up soon after a signal, like a reward.

        It has no deadline: how long sampling may take is its own affair.
        """
        if not is_own(self.engine):
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
        with settings_restored(), UserCode("the environment", self.environment_seconds, "task.timeout_seconds") as code:
            try:
                return code.call(lambda: int(self.environment.max_turns))
            except CallFailedError as error:
                raise InputError(
                    f"expected a number of turns, got {error} (max_turns of the environment); correct the environment"
                ) from error.__cause__

    def _continue(self, finished: Sequence[Finished], waiting: dict[Handle, list[_Playing]], sampling: Sampling) -> None:
        """Replace finished turns in `waiting` by the turns that follow them, which are submitted."""
        going_on: dict[int, list[_Playing]] = {}
        ended = [
            (playing, response)
            for each in finished
            for playing, response in zip(waiting.pop(each.handle), each.responses, strict=True)
        ]
        if isinstance(self.environment, SingleTurn):
            # Nothing is asked of the environment, so nothing needs a guard.
            for playing, response in ended:
                playing.add_turn(response)
                playing.rewards.append(None)
            return
        with settings_restored(), UserCode("the environment", self.environment_seconds, "task.timeout_seconds") as code:
            for playing, response in ended:
                if self._play_turn(playing, response, code):
                    left = self.limits.max_response_tokens - playing.length
                    going_on.setdefault(left, []).append(playing)
        for left, together in going_on.items():
            requests = [self._next_request(playing) for playing in together]
            limits = replace(self.limits, max_response_tokens=left)
            handles = self._call_engine(self.engine.submit, requests, sampling, limits)
            waiting |= {handle: [playing] for handle, playing in zip(handles, together, strict=True)}

    def _play_turn(self, playing: _Playing, response: Response, code: UserCode) -> bool:
        """Add a turn of the policy and the environment's reply to it. Returns whether another turn follows."""
        playing.add_turn(response)
        try:
            if playing.episode is None:
                playing.episode = code.call(self.environment.episode, copy_problem(playing.problem))
            answer = code.call(_ask, playing.episode, response.text, response.stop)
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
        if response.stop.truncated:
            return False
        if answer.done or len(playing.turns) >= self._max_turns:
            playing.stop = StopReason.ENVIRONMENT
            return False
        return self._insert_reply(playing, response, answer)

    def _insert_reply(self, playing: _Playing, response: Response, answer: _Answer) -> bool:
        """Append the environment's tokens to the turn; False if no token of the policy would fit after them."""
        inserted = self.rendering.reply(
            playing.problem,
            playing.messages,
            response.text,
            answer.content,
            int(response.tokens[-1]) if response.stop is StopReason.END_TOKEN else None,
        )
        if playing.length + len(inserted.tokens) >= self.limits.max_response_tokens:
            playing.stop = StopReason.LENGTH
            return False
        playing.inserted.append(inserted)
        playing.messages += inserted.messages
        playing.length += len(inserted.tokens)
        turn = len(playing.turns)
        playing.states.append(seed_of("state", playing.number, turn) if answer.state is None else seed_of(answer.state))
        return True

    def _next_request(self, playing: _Playing) -> Request:
        pieces = [playing.prompt]
        for turn, inserted in zip(playing.turns, playing.inserted, strict=True):
            pieces += [turn.tokens, inserted.tokens]
        return Request(prompt=torch.cat(pieces), seeds=(seed_of("turn", playing.seed, len(playing.turns)),))

    def _rollout(self, playing: _Playing, temperature: float) -> Rollout:
        """The record of an episode."""
        first = playing.turns[0]
        length = len(first.tokens)
        if self._max_turns == 1:
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
                turn=torch.zeros(length, dtype=torch.int64),
                author=torch.full((length,), Author.POLICY.value),
                kept_logmass=first.kept_logmass,
                routes=first.routes,
                turn_rewards=None if not playing.rewards or playing.rewards[0] is None else (playing.rewards[0],),
                fault=playing.fault,
            )
        columns: dict[str, list[Tensor]] = {name: [] for name in _COLUMNS}
        texts: list[str] = []
        for number, turn in enumerate(playing.turns):
            length = len(turn.tokens)
            columns["tokens"].append(turn.tokens)
            columns["sampler_logprobs"].append(turn.logprobs)
            columns["version"].append(playing.versions[number])
            columns["mask"].append(torch.ones(length, dtype=torch.bool))
            columns["turn"].append(torch.full((length,), number))
            columns["author"].append(torch.full((length,), Author.POLICY.value))
            if turn.kept_logmass is not None:
                columns["kept_logmass"].append(turn.kept_logmass)
            texts.append(turn.text)
            if number < len(playing.inserted):
                _add_reply(columns, playing.inserted[number])
                texts.append(playing.inserted[number].text)
        tables = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in columns.items() if pieces}
        several = self._max_turns > 1
        rewarded = [reward for reward in playing.rewards if reward is not None]
        return Rollout(
            problem=playing.problem,
            rollout_id=playing.number,
            prompt_tokens=playing.prompt,
            text=playing.turns[-1].text,
            stop=playing.stop or playing.turns[-1].stop,
            temperature=temperature,
            routes=_join_routes([turn.routes for turn in playing.turns]),
            turn_rewards=tuple(reward or 0.0 for reward in playing.rewards) if rewarded else None,
            turn_states=tuple(playing.states) if several else None,
            dialogue=tuple(texts) if several else None,
            fault=playing.fault,
            **tables,
        )


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


def _ask(episode: Episode, text: str, stop: StopReason) -> _Answer | None:
    """The episode's reply, read and copied. All of this runs code of the user's: properties, `repr`, `float`."""
    reply = episode.reply(text, stop)
    if reply is None:
        return None
    fault = _fault_of(reply)
    if fault is not None:
        return _Answer(fault=fault)
    content = reply.content
    return _Answer(
        content=str(content) if isinstance(content, str) else [copy_value(dict(each)) for each in content],
        reward=None if reply.reward is None else float(reply.reward),
        state=None if reply.state is None else repr(reply.state),
        done=bool(reply.done),
    )


def _fault_of(reply: Any) -> str | None:
    """What is wrong with a reply; None if nothing is."""
    if not isinstance(reply, Reply):
        return f"environment: expected a Reply or None, got {reply!r:.80}"
    reward, content = reply.reward, reply.content
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward)):
        return f"environment: expected a finite reward or None, got {reward!r:.80}"
    if isinstance(content, str):
        return None
    if isinstance(content, Sequence) and all(isinstance(each, Mapping) and "role" in each for each in content):
        return None
    return f"environment: expected text or chat messages, got {content!r:.80}"
