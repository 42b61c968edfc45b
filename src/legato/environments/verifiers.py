"""Environments of verifiers, played as they are: verifiers drives the episode and judges it, the run serves and records.

`task.kind = "verifiers"` names the taskset. verifiers' harness talks to the endpoint of the run through verifiers' own
interception, as it would to any server. Tokens come from the record of the endpoint (`legato.serve.recording`), and the
reward from verifiers' trace.
"""

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from legato.core.parts import Part, mapping, part, text
from legato.core.rollout import Problem
from legato.environments.agents import Endpoint
from legato.errors import InputError, describe_error
from legato.tasks.verifiers import FIELD, TasksetName, import_verifiers, load_tasks, thaw

KEY_VARIABLE = "LEGATO_AGENT_KEY"
"""verifiers reads keys of endpoints from environment variables."""


@part("environment", "verifiers")
class VerifiersEnvironment(Part):
    """Tasks of `task.kind = "verifiers"`, played by a harness and judged by the rewards that were written for verifiers."""

    harness: str | None = text(
        default=None, says="The harness as verifiers names it; absent: the one that the taskset brings.", optional=True
    )
    harness_options: tuple[tuple[str, Any], ...] = mapping(says="Options of the harness.")

    @contextlib.asynccontextmanager
    async def playing(self, problems: Sequence[Problem]) -> AsyncIterator[None]:
        """Holds what verifiers serves to its harnesses while these problems are played."""
        async with contextlib.AsyncExitStack() as stack:
            for name in dict.fromkeys(task_name(problem)[0] for problem in problems):
                await stack.enter_async_context(load_environment(name, self.harness, self.harness_options).serving())
            yield

    async def attempt(self, problem: Problem, endpoint: Endpoint) -> float:
        vf = import_verifiers()
        name, number = task_name(problem)
        os.environ[KEY_VARIABLE] = endpoint.api_key
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=KEY_VARIABLE)
        context = vf.ModelContext(model=endpoint.model, client=client)
        environment = load_environment(name, self.harness, self.harness_options)
        return read_reward(await environment.run_episode(load_tasks(name)[number], context))


def task_name(problem: Problem) -> tuple[TasksetName, int]:
    """The taskset of a problem and the number of its task there."""
    field = problem.fields.get(FIELD)
    if field is None:
        raise InputError("expected a problem of task.kind = 'verifiers', got another (task.environment = 'verifiers')")
    taskset, options, most, number = field
    return TasksetName(taskset, tuple([(str(key), value) for key, value in options]), most), number


@functools.cache
def load_environment(name: TasksetName, harness: str | None, options: tuple[tuple[str, Any], ...]) -> Any:
    """The environment of a taskset as verifiers builds it; InputError if it does not."""
    import_verifiers()
    from verifiers.v1.utils import loaders

    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if harness is not None:
        agent["harness"] = {**thaw(options), "id": harness}
    try:
        taskset = {**thaw(name.options), "id": name.taskset}
        return loaders.load_environment(loaders.resolve_env_config({"taskset": taskset, "agent": agent}))
    except Exception as error:  # a module of the user's, options that do not fit
        raise InputError(
            f"expected an environment that verifiers loads, got {describe_error(error)} (task.environment = 'verifiers')"
        ) from error


def read_reward(episode: Any) -> float:
    """The reward of an episode of verifiers; RuntimeError with the reason if it has none."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        reason = f"{errors[0].type}: {errors[0].message}" if errors else "verifiers gave no reason"
        raise RuntimeError(f"the episode failed in verifiers: {reason[:500]}")
    if len(episode.traces) != 1:
        raise RuntimeError(f"expected an environment of one agent, got {len(episode.traces)} traces of an episode")
    return float(episode.traces[0].reward)
