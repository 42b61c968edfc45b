"""From a client's text or chat messages to the tokens of a prompt.

What a client writes into a message is text: a special token that is spelled out there (`<|im_end|>`) is encoded as the
characters it is made of, and cannot end the message. Only the chat template writes special tokens. The text of
/v1/completions is a whole prompt and no part of one, so special tokens in it are special unless the client says otherwise.
"""

import copy
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from legato.errors import InputError
from legato.rollouts.render import ChatSettings, Rendering, TemplateError
from legato.serve.errors import ApiError, bad_value
from legato.serve.tools import read_calls
from legato.serve.values import Body

ROLES = ("system", "developer", "user", "assistant", "tool")


class Prompts:
    """Encodes prompts. Not for several threads at once: encoding changes settings of the tokenizer."""

    def __init__(self, rendering: Rendering) -> None:
        # A copy: the engine decodes with the policy's tokenizer in another thread.
        self.tokenizer = copy.deepcopy(rendering.tokenizer)
        self.rendering = replace(rendering, tokenizer=self.tokenizer, system_prompt=None)
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if token.special} | set(getattr(self.tokenizer, "all_special_tokens", ()))
        self._special_ids = set(getattr(self.tokenizer, "all_special_ids", ()))
        # The longest first, so that a token that begins with another is found whole.
        words = sorted((word for word in special if word), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, words))) if words else None

    def encode_text(self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool, param: str) -> list[int]:
        """The tokens of a whole prompt. An end token that the tokenizer appends is dropped: the answer follows."""
        more = {} if parse_special_tokens or not self._holds_special(text) else {"split_special_tokens": True}
        tokens: list[int] = self._encode(text, param, add_special_tokens=add_special_tokens, **more)
        if add_special_tokens and len(tokens) > 1 and tokens[-1] == self.tokenizer.eos_token_id:
            tokens = tokens if text.endswith(str(self.tokenizer.eos_token)) else tokens[:-1]
        if not tokens:
            raise ApiError(400, f"expected a prompt of at least one token, got none ({param})", param=param)
        return tokens

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The tokens of chat messages up to the first token of the answer. `arguments` are for the chat template."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, "this model has no chat template; send the text to /v1/completions", param="messages")
        opening, closing = (f"\ue000{secrets.token_hex(8)}{end}" for end in "\ue001\ue002")
        rendering = replace(
            self.rendering,
            chat="always",
            chat_template_kwargs={**self.rendering.chat_template_kwargs, **self._mark(arguments, opening, closing)},
            tools=tuple([self._mark(each, opening, closing) for each in tools]),
        )
        try:
            rendered = rendering.render_messages([self._mark(each, opening, closing) for each in messages])
        except TemplateError as error:
            raise ApiError(
                400, f"the chat template of this model cannot render these messages: {error}", param="messages"
            ) from None
        tokens: list[int] = []
        marked = re.compile(f"{opening}(.*?){closing}", re.DOTALL)
        # Every second piece is a special token that a client has spelled out.
        for place, piece in enumerate(marked.split(rendered)):
            if place % 2 == 0:
                tokens += self._encode(piece, "messages", add_special_tokens=False) if piece else []
            else:
                tokens += self._encode_as_text(piece)
        if not tokens:
            raise ApiError(400, "expected messages of at least one token, got none (messages)", param="messages")
        return tokens

    def _holds_special(self, text: str) -> bool:
        return self._special is not None and self._special.search(text) is not None

    def _mark(self, value: Any, opening: str, closing: str) -> Any:
        """The value with every special token in its texts between two marks, which no client can guess."""
        if self._special is None:
            return value
        if isinstance(value, str):
            return self._special.sub(lambda match: f"{opening}{match[0]}{closing}", value)
        if isinstance(value, Mapping):
            return {key: self._mark(each, opening, closing) for key, each in value.items()}
        return [self._mark(each, opening, closing) for each in value] if isinstance(value, list) else value

    def _encode_as_text(self, word: str) -> list[int]:
        tokens = self._encode(word, "messages", add_special_tokens=False, split_special_tokens=True)
        # <unknown> is how a tokenizer without these characters writes them.
        forged = self._special_ids.intersection(tokens) - {getattr(self.tokenizer, "unk_token_id", None)}
        if forged:
            raise ApiError(
                400, f"expected no special tokens in messages, got {word!r}, which this tokenizer cannot write as text"
            )
        return tokens

    def _encode(self, text: str, param: str, **how: Any) -> list[int]:
        try:
            tokens: list[int] = self.tokenizer(text, **how)["input_ids"]
        except Exception as error:  # a tokenizer of the user's, or one without `split_special_tokens`
            raise ApiError(
                400, f"the tokenizer cannot encode this text: {type(error).__name__}: {str(error)[:200]}", param=param
            ) from None
        return tokens


def read_messages(body: Body, most: int) -> list[dict[str, Any]]:
    """The chat messages of a request, their contents joined to texts."""
    messages = body.items("messages", most=most)
    if not messages:
        raise ApiError(400, "expected a list of at least one message, got none (messages)", param="messages")
    return [_read_message(each, f"messages[{place}]") for place, each in enumerate(messages)]


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise bad_value(where, "a message with role and content", message)
    fields = Body(message, f"{where}.")
    role = fields.raw("role")
    if role not in ROLES:
        raise bad_value(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    for name in ("function_call", "audio"):
        fields.only(name, [], advice="messages are texts and tool_calls")
    content = _read_content(fields.raw("content"), f"{where}.content")
    read: dict[str, Any] = {"role": role, "content": content}
    calls = read_calls(fields)
    if calls:
        read["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        value = fields.text(name, longest=10**7)
        if value is not None:
            read[name] = value
    fields.ignore("refusal", "annotations")
    fields.refuse_unknown()
    return read


def _read_content(content: Any, where: str) -> str:
    """The text of a message: a text, or text parts, which are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_value(where, "a text or a list of text parts", content)
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_value(f"{where}[{place}]", 'a part {"type": "text", "text": "..."}', part)
        texts.append(part["text"])
    return "".join(texts)


def read_template_arguments(body: Body) -> dict[str, Any]:
    """The variables that a client gives to the chat template."""
    arguments = body.table("chat_template_kwargs")
    if "chat_template" in arguments:
        raise bad_value("chat_template_kwargs", "variables of the chat template", "a template")
    try:
        ChatSettings(chat_template_kwargs=arguments)
    except InputError as error:
        raise ApiError(400, str(error).partition(";")[0], param="chat_template_kwargs") from None
    return arguments
