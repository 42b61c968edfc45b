"""A run that starts agents: they own their loop, the run serves them its engine and makes rollouts of what they asked for.

`AgentRunner` takes the place of the runner of episodes. For each rollout it opens a recording (`recording.py`), starts an
attempt of the agent (`legato.environments.agents`) with an endpoint of its own, and waits. The server listens on loopback,
on a free port, with a random key, for as long as the runner lives. While no attempt is in progress, no request reaches the
engine, so that the run can train its weights.
"""

import asyncio
import concurrent.futures
import contextlib
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch

from legato.core.importing import place_in_own_code
from legato.core.protection import copy_problem, settings_restored
from legato.core.rollout import Author, Rollout, StopReason
from legato.core.user_code import GRACE_SECONDS, RUN, StopRequestedError
from legato.environments.agents import Agent, Endpoint
from legato.errors import describe_error
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits
from legato.rollouts.episodes import Runner, Start
from legato.rollouts.sampling import Sampling
from legato.rollouts.traces import rollout_of_traces
from legato.serve.in_thread import CLOSE_SECONDS, LoopThread, ThreadServer
from legato.serve.limits import ServeLimits
from legato.serve.recording import Recording
from legato.serve.served import Served
from legato.serve.weights import Weights

MODEL = "policy"
"""The name of the model for agents."""
_LOOK_SECONDS = 0.2


@dataclass(slots=True, kw_only=True)
class AgentRunner(Runner):
    """Plays episodes by starting agents."""

    agent: Agent
    policy: Policy
    _server: "AgentServer | None" = field(default=None, init=False)
    _loop: "LoopThread | None" = field(default=None, init=False)

    def single_turn(self, limits: Limits) -> Runner:
        """A plain runner of single turns on the same engine."""
        self._publish_first()
        return Runner(
            engine=self.engine,
            rendering=self.rendering,
            limits=limits,
            weights=self.weights,
            version=self.version,
            longest_prompt=self.longest_prompt,
            turns=self.turns,
            _published_to=self.engine,
        )

    def play(self, starts: Sequence[Start], sampling: Sampling) -> list[list[Rollout]]:
        """For each start its rollouts, in the order of its seeds. All attempts are in progress at once."""
        self._publish_first()
        if self._server is None:
            self._server = AgentServer(self)
        if self._loop is None:
            self._loop = LoopThread("agents")
        attempts = [
            _Attempt(start=start, number=number, recording=self._record(seed, sampling))
            for start in starts
            for seed, number in zip(start.seeds, start.ids, strict=True)
        ]
        with settings_restored(), self._server.serving([each.recording for each in attempts]) as endpoints:
            playing = self._loop.submit(_play_all(self.agent, attempts, endpoints, self._seconds))
            self._wait(playing, attempts)
        rollouts = iter([self._rollout(each, sampling.temperature) for each in attempts])
        return [[next(rollouts) for _ in start.seeds] for start in starts]

    def close(self) -> None:
        """Stop the server and the agents."""
        for thread in (self._server, self._loop):
            if thread is not None:
                thread.close()
        self._server = self._loop = None

    @property
    def _seconds(self) -> tuple[float | None, str]:
        """How long an attempt may take, and the option that says so."""
        limits = [
            (self.episodes.episode_seconds, "task.episode_seconds"),
            (self.environment_seconds, "task.timeout_seconds"),
        ]
        known = [(seconds, option) for seconds, option in limits if seconds is not None]
        return min(known, default=(None, ""))

    def _record(self, seed: int, sampling: Sampling) -> Recording:
        return Recording(
            sampling=sampling,
            seed=seed,
            end_tokens=self.limits.end_tokens,
            max_response_tokens=self.limits.max_response_tokens,
            longest_prompt=self.longest_prompt,
            settings=self.episodes,
        )

    def _wait(self, playing: "concurrent.futures.Future[None]", attempts: "Sequence[_Attempt]") -> None:
        """Wait for all attempts. After a signal they are given up soon, as other code of the user's is."""
        seconds, option = self._seconds
        # Attempts that are async and block stop the loop that would give them up; then they are given up here.
        latest = math.inf if seconds is None else time.monotonic() + seconds + 3 * CLOSE_SECONDS
        while True:
            done, _ = concurrent.futures.wait([playing], _LOOK_SECONDS)
            if done:
                return playing.result()
            if RUN.asked_to_end is not None and time.monotonic() - RUN.asked_at >= GRACE_SECONDS:
                playing.cancel()
                raise StopRequestedError
            if time.monotonic() > latest:
                self._loop = None  # left behind
                for attempt in attempts:
                    if not attempt.recording.ended:
                        attempt.fault = f"agent: timed out after {seconds:g} s ({option})"
                return None

    def _rollout(self, attempt: "_Attempt", temperature: float) -> Rollout:
        recording, problem = attempt.recording, attempt.start.problem
        fault, rewards = attempt.fault, attempt.rewards
        if fault is None and not recording.turns:
            fault = "agent: expected at least one request to the endpoint, got none"
        if fault is None and isinstance(rewards, list) and len(rewards) != len(recording.turns):
            fault = f"agent: expected a reward for each of the {len(recording.turns)} requests, got {len(rewards)}"
        if not recording.turns:
            return self._empty_rollout(attempt, temperature, fault or "")
        traces = [
            {
                "node_id": str(place),
                "prompt_token_ids": turn.prompt,
                "completion_token_ids": turn.tokens,
                "per_token_logps": turn.logprobs,
                "kept_logmass": turn.kept_logmass,
            }
            for place, turn in enumerate(recording.turns)
        ]
        rollout = rollout_of_traces(
            traces,
            problem=problem,
            rollout_id=attempt.number,
            rewards=None if fault is not None else rewards,
            temperature=temperature,
            version=self.version,
            stop=recording.stop,
            tokenizer=self.rendering.tokenizer,
            turn_texts=[turn.text for turn in recording.turns],
        )
        return replace(rollout, fault=fault)

    def _empty_rollout(self, attempt: "_Attempt", temperature: float, fault: str) -> Rollout:
        """A rollout of an agent that asked for nothing: an end token that nobody sampled."""
        one = torch.tensor([self.limits.end_tokens[0]])
        return Rollout(
            problem=attempt.start.problem,
            rollout_id=attempt.number,
            prompt_tokens=attempt.start.prompt,
            tokens=one,
            sampler_logprobs=torch.zeros(1),
            version=torch.tensor([-1]),
            text="",
            stop=StopReason.ENVIRONMENT,
            temperature=temperature,
            mask=torch.tensor([False]),
            turn=torch.tensor([-1]),
            author=torch.tensor([Author.TEMPLATE.value]),
            fault=fault,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    """An attempt of the agent in progress."""

    start: Start
    number: int
    """The id of its rollout."""
    recording: Recording
    rewards: list[float] | float | None = None
    fault: str | None = None


async def _play_all(
    agent: Agent, attempts: Sequence[_Attempt], endpoints: Sequence[Endpoint], seconds: tuple[float | None, str]
) -> None:
    """Play all attempts at once; what becomes of each is noted in it."""
    context = getattr(agent, "playing", None)
    try:
        async with context([each.start.problem for each in attempts]) if callable(context) else contextlib.nullcontext():
            tasks = [
                asyncio.ensure_future(_play(agent, attempt, endpoint, seconds))
                for attempt, endpoint in zip(attempts, endpoints, strict=True)
            ]
            await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # of `playing`
        for attempt in attempts:
            attempt.fault = attempt.fault or _describe(error)


async def _play(agent: Agent, attempt: _Attempt, endpoint: Endpoint, limit: tuple[float | None, str]) -> None:
    seconds, option = limit
    playing = asyncio.ensure_future(_attempt(agent, attempt, endpoint))
    done, _ = await asyncio.wait([playing], timeout=seconds)
    attempt.recording.ended = True
    if done:
        return
    attempt.fault = f"agent: timed out after {seconds:g} s ({option})"
    playing.cancel()
    # An attempt that goes on regardless is left behind: its requests are refused.
    await asyncio.wait([playing], timeout=CLOSE_SECONDS)


async def _attempt(agent: Agent, attempt: _Attempt, endpoint: Endpoint) -> None:
    try:
        outcome = await agent.attempt(copy_problem(attempt.start.problem), endpoint)
        attempt.rewards = _read_outcome(outcome)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # an agent may raise anything; only this rollout is lost
        attempt.fault = attempt.fault or _describe(error)


def _describe(error: BaseException) -> str:
    place = place_in_own_code(error)
    return f"agent: {describe_error(error)}" + ("" if place is None else f" ({place})")


def _read_outcome(outcome: Any) -> list[float] | float | None:
    """The rewards that an attempt returned; TypeError if they are none."""
    if outcome is None or _is_reward(outcome):
        return None if outcome is None else float(outcome)
    if isinstance(outcome, Sequence) and not isinstance(outcome, str | bytes) and outcome and all(map(_is_reward, outcome)):
        return [float(each) for each in outcome]
    raise TypeError(f"expected a finite reward, a list of them or None, got {outcome!r:.80}")


def _is_reward(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


class AgentServer:
    """The endpoint of agents on loopback."""

    def __init__(self, runner: AgentRunner) -> None:
        context = (runner.longest_prompt or 0) + runner.limits.max_response_tokens
        engine = runner.engine
        served = Served(
            name=MODEL,
            policy=runner.policy,
            engine=engine,
            rendering=runner.rendering,
            end_tokens=runner.limits.end_tokens,
            limits=ServeLimits(context_tokens=context, response_tokens=runner.limits.max_response_tokens, sequences=2**20),
            weights=Weights(runner.policy, engine, str(engine.version)),
            software="",
        )
        self.recordings: dict[str, Recording] = {}
        self._server = ThreadServer(served, self.recordings)
        self.close = self._server.close

    @contextlib.contextmanager
    def serving(self, recordings: Sequence[Recording]) -> Iterator[list[Endpoint]]:
        """Inside, requests of these episodes are answered; yields their endpoints. Afterwards none reaches the engine."""
        names = [f"{place}-{secrets.token_hex(6)}" for place in range(len(recordings))]
        self.recordings |= dict(zip(names, recordings, strict=True))
        url, key = self._server.url, self._server.key
        try:
            yield [Endpoint(base_url=f"{url}/episodes/{name}/v1", api_key=key, model=MODEL) for name in names]
        finally:
            self._server.thread.submit(self._end(recordings)).result()

    async def _end(self, recordings: Sequence[Recording]) -> None:
        for recording in recordings:
            recording.ended = True
        self.recordings.clear()
        await self._server.served.thread.abort(())
