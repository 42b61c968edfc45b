"""Agents that own their loop: a run starts them, one attempt for each rollout, and serves them its own engine.

    def play(problem, endpoint):                    task.environment = "my_agent.py:play"; it may be async
        answer = endpoint.ask("/chat/completions", messages=[{"role": "user", "content": problem.prompt}])
        return float("42" in answer["choices"][0]["message"]["content"])

`endpoint.base_url` and `endpoint.api_key` are those of an OpenAI client. Each request is a turn of the policy; what is
sampled is recorded token by token (`legato.serve.agents`). The return value is the reward: a number counts at the last turn,
a list has a number for each turn, None leaves the reward to `reward.kind`. The part `command` starts a program instead.
"""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from legato.core.fields import texts
from legato.core.parts import Part, integer, part
from legato.core.rollout import Problem
from legato.errors import InputError

Outcome = float | Sequence[float] | None
"""What an attempt returns: the reward of the last turn, a reward for each turn, or nothing."""
LONGEST_OUTPUT = 1_000_000
"""Bytes of a program's output that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an agent asks for completions. It belongs to one episode: what is asked there becomes one rollout."""

    base_url: str
    """Up to /v1, as OpenAI's clients take it."""
    api_key: str
    model: str

    def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        """The answer to a request, "/chat/completions" or "/completions"; RuntimeError with the reason if it is refused.

        It blocks: an async agent uses a client of its own.
        """
        body = json.dumps({"model": self.model, **fields}).encode()
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.base_url}{path}", body, headers)
        try:
            # The server is in this process or on this machine: a proxy of the system would not find it.
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
                read: dict[str, Any] = json.load(answer)
                return read
        except urllib.error.HTTPError as error:
            with error:
                reason = error.read().decode("utf-8", "replace")
            raise RuntimeError(f"{path} was answered with {error.code}: {reason[:500]}") from None


@runtime_checkable
class Agent(Protocol):
    """Plays episodes by itself. It may also have `playing(problems)`, an async context around attempts at these problems."""

    async def attempt(self, problem: Problem, endpoint: Endpoint) -> Outcome:
        """One attempt at a problem. An exception costs the rollout, which is left out and counted, but never the run."""


class FunctionAgent:
    """A function of the user's as an agent; one that is not async gets a thread for each attempt."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def attempt(self, problem: Problem, endpoint: Endpoint) -> Any:
        function = getattr(self.function, "func", self.function)  # of a partial, which options make
        if inspect.iscoroutinefunction(function):
            return await self.function(problem, endpoint)
        result = await in_thread(self.function, problem, endpoint)
        return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns that may block, in a thread of its own. A thread that hangs does not keep the process."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            outcome = (future.set_result, function(*arguments))
        except BaseException as error:  # SystemExit too: the attempt has failed, not the run
            failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            outcome = (future.set_exception, failure)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await future


@part("environment", "command")
class CommandAgent(Part):
    """A program that plays an episode. It gets the problem as JSON (prompt, answer, fields) on standard input, and
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. The last line that it prints is the reward: a number, a list of numbers
    for the turns, or null."""

    command: tuple[str, ...] = texts(default=None, says="The program and its arguments: ['python', 'agent.py'].")
    parallel: int = integer(default=16, says="Programs that run at once.", minimum=1, maximum=4096)

    def __post_init__(self) -> None:
        if not self.command:
            raise InputError("expected a program and its arguments, got none (task.environment_options.command)")

    async def attempt(self, problem: Problem, endpoint: Endpoint) -> Any:
        asked = {"prompt": problem.prompt, "answer": problem.answer, "fields": dict(problem.fields)}
        variables = {
            **os.environ,
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "OPENAI_MODEL": endpoint.model,
            "NO_PROXY": "127.0.0.1",
        }
        async with _slots(self.parallel):
            process = await asyncio.create_subprocess_exec(
                *self.command,
                env=variables,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            try:
                output, errors = await process.communicate(json.dumps(asked).encode())
            finally:
                if process.returncode is None:
                    _end(process)
        if process.returncode != 0:
            told = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or ["nothing on standard error"]
            raise RuntimeError(f"the program ended with {process.returncode}: {told[0][:300]}")
        return _read_outcome(output)


_SLOTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def _slots(count: int) -> asyncio.Semaphore:
    """As many slots as programs may run at once in the event loop of the agents."""
    return _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(count))


def _end(process: asyncio.subprocess.Process) -> None:
    """End a program that took too long, with all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read_outcome(output: bytes) -> Any:
    lines = output[-LONGEST_OUTPUT:].decode("utf-8", "replace").strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError):
        got = repr(lines[-1][:80]) if lines else "no output"
        raise RuntimeError(f"expected the reward as the last line: a number, a list of numbers or null; got {got}") from None
