"""Tools: functions that the policy may call. Their schemas go into the chat template, their results back to the policy.

    class Calculator(ToolEnvironment):
        max_turns = 4
        def episode(self, problem): return Adding(problem)

    class Adding(ToolEpisode):
        def add(self, a: int, b: int) -> int:      a public method with type hints is a tool
            return a + b
        def finish(self, text):                    a turn without a call ends the episode
            return Reply(reward=float(text == self.answer), done=True)

A call that cannot be read, names no tool or has wrong arguments, and a tool that raises, are replies to the policy. It may
try again. A tool that hangs is cut by `task.timeout_seconds` and costs the rollout.
"""

import asyncio
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from legato.core.rollout import Problem, StopReason
from legato.core.user_code import OverdueError, StopRequestedError
from legato.errors import InputError
from legato.rollouts.episodes import Reply
from legato.rollouts.tool_calls import FORMATS, Call, Turn

LONGEST_RESULT = 100_000
"""Characters of a tool's result. In place of a longer one the policy reads how long it was."""
MOST_CALLS = 16
"""Calls of one turn that are answered."""

_KINDS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def tools_of(environment: Any) -> tuple[Mapping[str, Any], ...]:
    """The JSON schemas of an environment's tools; () if it has none."""
    schemas = getattr(environment, "tools", ())
    if not isinstance(schemas, Iterable) or not all(isinstance(each, Mapping) for each in schemas):
        raise InputError(f"expected a list of JSON schemas, got {schemas!r:.80} (tools of the environment)")
    return tuple([dict(each) for each in schemas])


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function, from its docstring and type hints."""
    signature, hints = _signature(function), _hints(function)
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    properties, required = {}, []
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name not in hints:
            raise InputError(
                f"expected a type hint for the argument {name!r}, got none (tool {function.__name__!r});"
                " the model must know what to write"
            )
        properties[name] = _schema_of_type(hints[name]) | ({"description": described[name]} if name in described else {})
        if parameter.default is parameter.empty:
            required.append(name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": summary, "parameters": parameters},
    }


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception as error:  # names of types that do not exist
        raise InputError(f"expected type hints that can be read, got {error} (tool {function.__name__!r})") from None


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    first = next(iter(signature.parameters), None)
    if first == "self" and not inspect.ismethod(function):
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(what the function does, name -> description) from a docstring with an "Args:" section."""
    head, _, rest = text.partition("\nArgs:")
    described: dict[str, str] = {}
    name = None
    for line in rest.splitlines():
        if line and not line[0].isspace():  # "Returns:"
            break
        first, colon, says = line.strip().partition(":")
        word = first.partition("(")[0].strip()
        if colon and word.isidentifier():
            name, described[word] = word, says.strip()
        elif name is not None and line.strip():
            described[name] += f" {line.strip()}"
    summary = head.partition("\nReturns:")[0].strip()
    return " ".join(summary.split()), described


def _schema_of_type(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"type": _KINDS.get(type(arguments[0]), "string"), "enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        known = [_schema_of_type(each) for each in arguments if each is not type(None)]
        nullable = {"nullable": True} if len(known) < len(arguments) else {}
        return (known[0] if len(known) == 1 else {"anyOf": known}) | nullable
    if origin in (list, tuple, Sequence) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return {"type": "array"} | ({"items": _schema_of_type(arguments[0])} if arguments else {})
    if origin is not None:
        return {"type": "object"}
    return {"type": _KINDS[hint]} if hint in _KINDS else {}


class ToolBox:
    """The tools of an episode by name."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self.functions = {function.__name__: function for function in functions}

    def call(self, call: Call) -> tuple[str, str | None]:
        """(what the policy reads, what went wrong or None). Raises only what ends a call from outside."""
        function = self.functions.get(call.name)
        if function is None:
            known = ", ".join(self.functions) or "none"
            return _error(f"expected one of the tools {known}, got {call.name[:80]!r}")
        try:
            arguments = self._bind(function, call.arguments)
        except InputError as error:
            return _error(str(error))
        try:
            result = function(**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_await(result))
            text = result if isinstance(result, str) else _as_text(result)
        except (OverdueError, StopRequestedError):
            raise
        except Exception as error:
            return _error(f"{type(error).__name__}: {error!s:.500}")
        if len(text) > LONGEST_RESULT:
            return _error(f"the result has {len(text)} characters, more than {LONGEST_RESULT}")
        return text, None

    def _bind(self, function: Callable[..., Any], arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """The arguments for a function; InputError if they do not fit its signature."""
        signature = _signature(function)
        if isinstance(arguments, str):
            first = next(iter(signature.parameters), None)
            arguments = {} if first is None else {first: arguments}
        try:
            bound = signature.bind(**{str(name): value for name, value in arguments.items()})
        except TypeError as error:
            raise InputError(f"{function.__name__}: {error}") from None
        hints = _hints(function)
        return {
            name: _convert(value, hints.get(name, Any), f"{function.__name__}: {name}")
            for name, value in bound.arguments.items()
        }


def _error(reason: str) -> tuple[str, str]:
    return f"error: {reason}", reason


def _as_text(value: Any) -> str:
    """A result as the policy reads it: JSON where it is data."""
    if isinstance(value, dict | list | tuple | bool) or value is None:
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return str(value)
    return str(value)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """The value as the type hint wants it. Models write numbers as texts now and then."""
    wanted = [each for each in typing.get_args(hint) if each is not type(None)] if _is_union(hint) else [hint]
    if value is None and _is_union(hint) and type(None) in typing.get_args(hint):
        return None
    for kind in wanted:
        plain = typing.get_origin(kind) or kind
        if plain is typing.Literal:
            if value in typing.get_args(kind):
                return value
        elif plain not in _KINDS or (isinstance(value, plain) and not (isinstance(value, bool) and plain in (int, float))):
            return value
        elif plain is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif plain is int and isinstance(value, float) and value.is_integer():
            return int(value)
        elif plain in (int, float) and isinstance(value, str):
            try:
                return plain(value)
            except ValueError:
                continue
    names = " or ".join(getattr(typing.get_origin(kind) or kind, "__name__", str(kind)) for kind in wanted)
    raise InputError(f"expected {names}, got {value!r:.80} ({where})")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


async def _await(value: Any) -> Any:
    return await value


def public_methods(cls: type, without: Iterable[str] = ()) -> list[str]:
    """The names of a class's public methods in the order of their names, without those of `without`."""
    members = inspect.getmembers(cls, predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in without]


class ToolEpisode:
    """An episode with tools: the public methods of a subclass. `finish` answers a turn that calls none."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.failed = 0
        """Calls so far that could not be carried out."""

    @classmethod
    def tool_names(cls) -> list[str]:
        return public_methods(cls, without=dir(ToolEpisode))

    def finish(self, text: str) -> Reply | None:
        """The reply to a turn without a call: the answer of the policy."""
        return Reply(done=True)

    def after_calls(self, results: Sequence[str]) -> Reply:
        """The reply to a turn with calls; its content is replaced by the results. A place for rewards and states."""
        return Reply()

    def act(self, turn: Turn, stop: StopReason) -> Reply | None:
        """Carry out the calls of a turn."""
        box = ToolBox([getattr(self, name) for name in self.tool_names()])
        return answer_turn(turn, box, finish=self.finish, after_calls=self.after_calls, count=self._count)

    def _count(self) -> None:
        self.failed += 1


def answer_turn(
    turn: Turn,
    box: ToolBox,
    *,
    finish: Callable[[str], Reply | None],
    after_calls: Callable[[Sequence[str]], Reply],
    count: Callable[[], None],
) -> Reply | None:
    """The reply to a turn: results of its calls as messages of tools, or what `finish` says to an answer.

    `count` is called for each call that could not be carried out.
    """
    if not turn.calls and not turn.malformed:
        return finish(turn.content)
    messages, results = list[dict[str, str]](), list[str]()
    for call in turn.calls[:MOST_CALLS]:
        text, fault = box.call(call)
        results.append(text)
        messages.append({"role": "tool", "name": call.name, "content": text})
        if fault is not None:
            count()
    role = "tool" if turn.calls else _malformed_role(turn)
    for reason in (*turn.malformed, *(["too many calls in one turn"] if len(turn.calls) > MOST_CALLS else [])):
        results.append(f"error: the tool call could not be read: {reason}")
        messages.append({"role": role, "content": results[-1]})
        count()
    reply = after_calls(results)
    if not isinstance(reply, Reply) or reply.done:
        return reply
    return Reply(content=messages, reward=reply.reward, state=reply.state, done=False)


def _malformed_role(turn: Turn) -> str:
    # The turn does not say which format read it; harmony's markers do.
    return FORMATS["harmony"].malformed_role if "<|message|>" in turn.text else FORMATS["hermes"].malformed_role


class ToolEnvironment:
    """An environment of tool episodes. Subclasses set `episodes`, the class of their episodes, and `max_turns`."""

    max_turns: int = 8
    deterministic: bool = True
    episodes: ClassVar[type[ToolEpisode]]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The schemas of the tools."""
        return [schema_of(getattr(self.episodes, name)) for name in self.episodes.tool_names()]

    def episode(self, problem: Problem) -> ToolEpisode:
        return self.episodes(problem)
