"""The tasks of a taskset of verifiers, for the environment `verifiers` (`legato.environments.verifiers`)."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from legato.core.parts import Part, integer, mapping, part, text
from legato.core.rollout import Problem
from legato.errors import InputError, describe_error

FIELD = "verifiers"
"""The column of a problem that names its task: the taskset, its options, how many tasks are loaded, and its number."""


class TasksetName(NamedTuple):
    """Which tasks are loaded."""

    taskset: str
    options: tuple[tuple[str, Any], ...]
    most: int


@part("data", "verifiers")
class VerifiersTasks(Part):
    """The tasks of a taskset that was written for verifiers (`legato[verifiers]`), with `task.environment = "verifiers"`."""

    taskset: str = text(default=None, says="The taskset as verifiers names it: reverse-text, or a module on the path.")
    taskset_options: tuple[tuple[str, Any], ...] = mapping(says="Options of the taskset.")
    tasks: int = integer(default=10_000, says="The most tasks; an infinite taskset is cut here.", minimum=1)

    def load(self) -> list[Problem]:
        name = TasksetName(self.taskset, self.taskset_options, self.tasks)
        return [problem_of(task, name) for task in load_tasks(name)]


def import_verifiers() -> Any:
    """verifiers.v1; InputError with what to install if it is missing."""
    try:
        import verifiers.v1
    except ImportError as error:
        raise InputError(
            f"expected the package verifiers, got {describe_error(error)}; pip install 'legato[verifiers]' (it brings about"
            " 60 packages: an environment of its own is a good place)"
        ) from None
    return verifiers.v1


@functools.cache
def load_tasks(name: TasksetName) -> list[Any]:
    """The first tasks of a taskset; InputError if verifiers does not find or load it."""
    import_verifiers()
    from verifiers.v1.utils import loaders

    taskset, options, most = name
    try:
        config = loaders.taskset_config_type(taskset).model_validate({**thaw(options), "id": taskset})
        return list(loaders.load_taskset(config).take(most))
    except Exception as error:  # a module of the user's, data that are not there, options that do not fit
        raise InputError(
            f"expected a taskset of verifiers, got {taskset!r}: {describe_error(error)} (task.taskset)"
        ) from error


def thaw(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Options as verifiers takes them: a table with lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options}


def problem_of(task: Any, name: TasksetName) -> Problem:
    """The task as a problem. verifiers itself puts it to the policy: the prompt here names it and is shown."""
    data = task.data
    prompt = data.prompt
    if prompt is None:
        prompt = f"{name.taskset} {data.idx}"  # an environment that opens the conversation itself
    elif not isinstance(prompt, str):
        prompt = [_message(each) for each in prompt]
    system = getattr(data, "system_prompt", None)
    if isinstance(system, str) and system:
        rest = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        prompt = [{"role": "system", "content": system}, *rest]
    answer = getattr(data, "answer", None)
    return Problem(prompt=prompt, answer=None if answer is None else str(answer), fields={FIELD: (*name, data.idx)})


def _message(message: Any) -> dict[str, str]:
    values: Mapping[str, Any] = message if isinstance(message, Mapping) else message.model_dump()
    return {"role": str(values.get("role")), "content": str(values.get("content") or "")}
