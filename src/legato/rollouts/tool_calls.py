"""Reads a turn of the policy in the format of its chat template: text, reasoning and tool calls.

    hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Qwen, Hermes and others
    llama     {"name": "add", "parameters": {"a": 1}}, also after <|python_tag|>; name.call(a=1) for built-in tools
    harmony   <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>      gpt-oss
    plain     add(1), or add({"a": 1}): for models without a chat template

A turn is read once, here. What cannot be read becomes a sentence in `malformed`, which environments send back to the policy.
"""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from legato.errors import InputError

LONGEST_CALL = 100_000
"""Characters of a call that are read; a longer one is malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a tool. Arguments that are a text belong to the tool's first parameter (format `plain`)."""

    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the policy wrote in one turn."""

    text: str
    """All of it, with the markers of the template and without the end token."""
    content: str
    """The text beside reasoning and calls."""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    malformed: tuple[str, ...] = ()
    """For each call that cannot be read, what is wrong with it."""

    def same_as(self, other: "Turn") -> bool:
        """Whether both say the same; white space around texts and the spelling of JSON do not matter."""
        own, others = ((each.content.strip(), each.thinking.strip(), each.calls, each.malformed) for each in (self, other))
        return own == others


class MalformedError(Exception):
    """A call that cannot be read; the message says why."""


class Format:
    """How a chat template writes tool calls."""

    name: str
    malformed_role = "tool"
    """The role of the answer to a call that cannot be read."""

    def read(self, text: str) -> Turn:
        """The turn that a text is. `text` has the special tokens of the template, but not the end token."""
        raise NotImplementedError

    def message(self, turn: Turn) -> dict[str, Any]:
        """The turn as a chat message for the template. The text as it stands is the closest to what was sampled."""
        return {"role": "assistant", "content": turn.text}


@dataclass(slots=True)
class _Read:
    calls: list[Call] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)

    def add(self, text: str, key: str) -> None:
        """Read a JSON object with the name of a tool and, under `key`, its arguments."""
        try:
            self.calls.append(_read_call(text, key))
        except MalformedError as error:
            self.malformed.append(str(error))


class Hermes(Format):
    """JSON between <tool_call> and </tool_call>."""

    name = "hermes"
    _CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def read(self, text: str) -> Turn:
        thinking, said = _split_thinking(text)
        parsed = _Read()
        for match in self._CALL.finditer(said):
            if match[2]:
                parsed.add(match[1], "arguments")
            else:
                parsed.malformed.append("expected </tool_call> after the call, got the end of the turn")
        content = self._CALL.sub("", said)
        return Turn(
            text=text,
            content=content.strip(),
            thinking=thinking,
            calls=tuple(parsed.calls),
            malformed=tuple(parsed.malformed),
        )


class Llama(Format):
    """A turn that is one JSON object, or follows <|python_tag|>."""

    name = "llama"
    _TAG = "<|python_tag|>"
    _BUILT_IN = re.compile(r"\A([^\W\d]\w*)\.call\((.*)\)\Z", re.DOTALL)

    def read(self, text: str) -> Turn:
        before, tag, after = text.partition(self._TAG)
        said = (after if tag else text).strip()
        parsed = _Read()
        if tag or (said.startswith("{") and '"name"' in said):
            content = before.strip()
            built_in = self._BUILT_IN.match(said) if tag else None
            if built_in is not None:
                try:
                    parsed.calls.append(Call(name=built_in[1], arguments=_keywords(built_in[2])))
                except MalformedError as error:
                    parsed.malformed.append(str(error))
            else:
                parsed.add(said, "parameters")
        else:
            content = said
        return Turn(text=text, content=content, calls=tuple(parsed.calls), malformed=tuple(parsed.malformed))


class Harmony(Format):
    """Messages with channels: `analysis` is reasoning, `final` the answer; a recipient makes a call of a message."""

    name = "harmony"
    malformed_role = "user"  # the template takes a tool's message only after a call
    _END = re.compile(r"<\|(?:end|call|return)\|>")
    _TO = re.compile(r"\bto=(\S+?)(?=<\||\s|\Z)")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

    def read(self, text: str) -> Turn:
        thinking, content, parsed = list[str](), list[str](), _Read()
        for piece in text.split("<|start|>"):
            header, marker, body = piece.partition("<|message|>")
            if not marker:
                if header.strip() not in ("", "assistant"):
                    content.append(header)
                continue
            body = self._END.split(body)[0]
            channel, to = self._CHANNEL.search(header), self._TO.search(header)
            if to is not None and to[1] not in ("assistant", "user"):
                self._add_call(to[1], body, parsed)
            elif channel is not None and channel[1] == "analysis":
                thinking.append(body)
            else:
                content.append(body)
        return Turn(
            text=text,
            content="\n".join(content).strip(),
            thinking="\n".join(thinking),
            calls=tuple(parsed.calls),
            malformed=tuple(parsed.malformed),
        )

    def _add_call(self, recipient: str, body: str, parsed: _Read) -> None:
        space, _, name = recipient.partition(".")
        if space != "functions" or not name:
            parsed.malformed.append(f"expected a recipient functions.NAME, got {recipient[:80]!r}")
            return
        try:
            parsed.calls.append(Call(name=name, arguments=_read_object(body, "arguments")))
        except MalformedError as error:
            parsed.malformed.append(str(error))

    def message(self, turn: Turn) -> dict[str, Any]:
        # The template refuses its own markers inside a message, and knows a tool's message by the call before it.
        thinking = {"thinking": turn.thinking} if turn.thinking else {}
        if len(turn.calls) == 1 and not turn.content and not turn.malformed:
            call = turn.calls[0]
            function = {"name": call.name, "arguments": call.arguments}
            return {
                "role": "assistant",
                "content": "",
                **thinking,
                "tool_calls": [{"type": "function", "function": function}],
            }
        return {"role": "assistant", "content": turn.content, **thinking}


class Plain(Format):
    """name(arguments), the whole turn: for models without a chat template."""

    name = "plain"
    malformed_role = "user"
    _CALL = re.compile(r"\A([^\W\d]\w*)\((.*)\)\Z", re.DOTALL)

    def read(self, text: str) -> Turn:
        match = self._CALL.match(text.strip())
        if match is None:
            return Turn(text=text, content=text.strip())
        if not match[2].lstrip().startswith("{"):
            return Turn(text=text, content="", calls=(Call(name=match[1], arguments=match[2]),))
        try:
            return Turn(text=text, content="", calls=(Call(name=match[1], arguments=_read_object(match[2], "arguments")),))
        except MalformedError as error:
            return Turn(text=text, content="", malformed=(str(error),))


FORMATS: dict[str, Format] = {each.name: each for each in (Hermes(), Llama(), Harmony(), Plain())}


def format_of(template: str | None) -> Format:
    """The format of a chat template, by the markers that it writes; `plain` without a template, `hermes` if unknown."""
    if not template:
        return FORMATS["plain"]
    if "<|channel|>" in template:
        return FORMATS["harmony"]
    if "<|python_tag|>" in template and "<tool_call>" not in template:
        return FORMATS["llama"]
    return FORMATS["hermes"]


def format_by_name(name: str, template: str | None) -> Format:
    """The named format; 'auto': that of the template."""
    if name == "auto":
        return format_of(template)
    if name not in FORMATS:
        raise InputError(f"expected one of {', '.join(FORMATS)} or auto, got {name!r} (task.tool_format)")
    return FORMATS[name]


def _split_thinking(text: str) -> tuple[str, str]:
    """(reasoning, the rest). Calls inside the reasoning are thoughts and no calls."""
    before, closing, rest = text.rpartition("</think>")
    if not closing:
        # Reasoning that never ended holds no call either.
        opening = text.find("<think>")
        return (text[opening + len("<think>") :], text[:opening]) if opening >= 0 else ("", text)
    return before.rpartition("<think>")[2], rest


def _read_call(text: str, key: str) -> Call:
    value = _read_object(text, "call")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedError(f'expected {{"name": ..., "{key}": {{...}}}}, got {_shorten(text)!r}')
    others = {"arguments", "parameters"} - {key}
    arguments = value.get(key, next((value[other] for other in others if other in value), {}))
    if isinstance(arguments, str):  # as OpenAI's API writes them
        arguments = _read_object(arguments, "arguments")
    if not isinstance(arguments, dict):
        raise MalformedError(f"expected an object as {key} of {name[:80]!r}, got {_shorten(repr(arguments))}")
    return Call(name=name, arguments=arguments)


def _read_object(text: str, what: str) -> dict[str, Any]:
    if len(text) > LONGEST_CALL:
        raise MalformedError(f"expected a {what} of at most {LONGEST_CALL} characters, got {len(text)}")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"expected a JSON object, got {_shorten(text)!r}: {_shorten(str(error))}") from None
    if not isinstance(value, dict):
        raise MalformedError(f"expected a JSON object, got {_shorten(text)!r}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _keywords(text: str) -> dict[str, Any]:
    """The arguments of name.call(a="b"): literals only."""
    if len(text) > LONGEST_CALL:
        raise MalformedError(f"expected arguments of at most {LONGEST_CALL} characters, got {len(text)}")
    try:
        parsed = ast.parse(f"call({text})", mode="eval").body
        if not isinstance(parsed, ast.Call) or parsed.args or any(each.arg is None for each in parsed.keywords):
            raise ValueError("only name=value")
        return {str(each.arg): ast.literal_eval(each.value) for each in parsed.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise MalformedError(f"expected name=value, ..., got {_shorten(text)!r}: {_shorten(str(error))}") from None


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:117]}..."
