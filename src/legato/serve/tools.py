"""Tools in chats: the schemas of a request, the calls in its messages, and the calls that a response holds."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from legato.rollouts.tool_calls import Call, Turn
from legato.serve.errors import bad_value
from legato.serve.values import Body

MOST_TOOLS = 256
"""Tools of a request."""


def read_tools(body: Body) -> list[dict[str, Any]]:
    """The tools of a request, as the chat template takes them."""
    tools = body.items("tools", most=MOST_TOOLS)
    for place, tool in enumerate(tools):
        where = f"{body.path('tools')}[{place}]"
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_value(where, 'a tool {"type": "function", "function": {"name": ...}}', tool)
    return [{"type": "function", "function": dict(tool["function"])} for tool in tools]


def read_calls(fields: Body) -> list[dict[str, Any]]:
    """The calls of a message that a client sends back, with their arguments as objects."""
    where = fields.path("tool_calls")
    calls = []
    for place, call in enumerate(fields.items("tool_calls", most=MOST_TOOLS)):
        function = call.get("function") if isinstance(call, dict) else None
        arguments = _arguments(function)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or arguments is None:
            raise bad_value(f"{where}[{place}]", 'a call {"function": {"name": ..., "arguments": "{...}"}}', call)
        name = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**name, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _arguments(function: Any) -> dict[str, Any] | None:
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def message_of(turn: Turn, text: str | None, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of a response; `text` is all of it, None where it has channels and only one of them is the answer.

    Calls that can be read become `tool_calls`; others stay in the text, where a client sees what is wrong with them.
    """
    calls = turn.calls if tools and not turn.malformed else ()
    content = turn.content if calls or text is None else text
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if turn.thinking and (calls or text is None):
        message["reasoning_content"] = turn.thinking
    if calls:
        message["tool_calls"] = [_call(call, tools) for call in calls]
    return message


def _call(call: Call, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    arguments = call.arguments
    if isinstance(arguments, str):
        # The format `plain` names no argument: the text belongs to the first.
        schema: Mapping[str, Any] = next((each["function"] for each in tools if each["function"]["name"] == call.name), {})
        names = list((schema.get("parameters") or {}).get("properties") or {})
        arguments = {names[0]: arguments} if names else {}
    function = {"name": call.name, "arguments": json.dumps(dict(arguments), ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
