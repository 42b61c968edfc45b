"""Renders problems and replies as tokens, with the chat template of the tokenizer or as plain text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.fields import choice, text
from legato.core.rollout import Author, Message, Problem
from legato.core.settings import free_table, settings
from legato.errors import InputError


@settings()
class ChatSettings:
    """How problems are put into the chat template."""

    chat: str = choice(
        "auto",
        "always",
        "never",
        default="auto",
        says="Whether problems are put into the chat template; auto: if the tokenizer has one.",
    )
    chat_template_kwargs: Mapping[str, Any] = free_table(
        default_factory=dict, says="Further arguments of the chat template: enable_thinking = false."
    )


@settings()
class SystemPrompt:
    """The system message before every problem."""

    system_prompt: str | None = text(
        default=None,
        says="A system message before every problem; without a chat template it is put before the text.",
        optional=True,
        blank=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inserted:
    """The reply of an environment, as tokens that the policy reads."""

    tokens: Tensor
    """[N] token ids."""
    authors: Tensor
    """[N]: TOOL for tokens of the environment, TEMPLATE for tokens that the chat template adds around them."""
    text: str
    """The text of the environment, without the template."""
    messages: tuple[Message, ...]
    """The policy's turn and the reply as chat messages; () without a chat template."""


@dataclass(frozen=True, kw_only=True)
class Rendering(ChatSettings, SystemPrompt):
    """Renders prompts and replies."""

    tokenizer: Any

    def check(self) -> None:
        """InputError if a chat template is required but missing."""
        if self.chat == "always" and not getattr(self.tokenizer, "chat_template", None):
            raise InputError("policy.chat = 'always', but the tokenizer has no chat template; use 'never' or another model")

    @property
    def by_template(self) -> bool:
        return self.chat == "always" or (self.chat == "auto" and bool(getattr(self.tokenizer, "chat_template", None)))

    def prompt(self, problem: Problem) -> Tensor:
        """[P] token ids of a problem, up to the first token of the answer."""
        if self.by_template:
            tokens = self.tokenizer.apply_chat_template(
                self._messages(problem),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self.chat_template_kwargs,
            )["input_ids"]
        else:
            # Drop an end token that the tokenizer appends: the answer follows.
            tokens = self.tokenizer(self._text(problem))["input_ids"]
            if tokens and tokens[-1] == self.tokenizer.eos_token_id:
                tokens = tokens[:-1]
        if not tokens:
            raise InputError(f"the prompt {str(problem.prompt)[:60]!r} has no tokens; a prompt needs at least one")
        return _ids(tokens)

    def reply(
        self, problem: Problem, earlier: Sequence[Message], turn: str, content: str | Sequence[Message], end: int | None
    ) -> Inserted:
        """The tokens of an environment's reply `content` to the policy's text `turn`.

        `earlier` are the messages between the problem and that turn. `end` is the end token that the policy sampled, if any;
        a template that adds it does not add it twice.
        """
        if not self.by_template:
            if not isinstance(content, str):
                raise InputError(
                    f"expected replies of text, got chat messages: {_why_no_template(self.chat)} (task.environment)"
                )
            plain = _ids(self.tokenizer(content, add_special_tokens=False)["input_ids"])
            return Inserted(tokens=plain, authors=torch.full_like(plain, Author.TOOL.value), text=content, messages=())
        answer = [{"role": "user", "content": content}] if isinstance(content, str) else [dict(each) for each in content]
        turn_and_answer = ({"role": "assistant", "content": turn}, *answer)
        before = self._render([*self._messages(problem), *earlier])
        after = self._render([*self._messages(problem), *earlier, *turn_and_answer])
        contents = [str(each.get("content", "")) for each in answer]
        tokens, authors = self._tokens_and_authors(self._added_after_turn(before, turn, after), contents)
        again = bool(tokens) and tokens[0] == end
        return Inserted(
            tokens=_ids(tokens)[again:], authors=_ids(authors)[again:], text="\n".join(contents), messages=turn_and_answer
        )

    def _render(self, messages: list[Message]) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self.chat_template_kwargs
            )
        except Exception as error:  # templates are programs, and many refuse roles or orders of messages
            roles = ", ".join(str(each.get("role")) for each in messages)
            raise InputError(
                f"expected messages that the chat template of {self._name} can render, got {roles} (task.environment):"
                f" {type(error).__name__}: {error}"
            ) from error
        return text

    @property
    def _name(self) -> str:
        return getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__

    def _added_after_turn(self, before: str, turn: str, after: str) -> str:
        """The text that the template adds after the policy's turn."""
        rest = after[len(before) :]
        # Templates may strip white space. Any other change would make the policy read a different past.
        for rendered in (turn, turn.lstrip(), turn.rstrip(), turn.strip()):
            if after.startswith(before) and rest.startswith(rendered):
                return rest[len(rendered) :]
        raise InputError(
            f"expected a chat template that leaves earlier turns as they were, got that of {self._name}: after a reply it"
            f" renders {rest[:60]!r} where the policy wrote {turn[:60]!r} (task.environment); use a template without such"
            " changes (policy.chat_template_kwargs), or policy.chat = 'never'"
        )

    def _tokens_and_authors(self, text: str, contents: Sequence[str]) -> tuple[list[int], list[int]]:
        """The tokens of a text and the author of each. Without character offsets, all tokens count as the environment's."""
        if not getattr(self.tokenizer, "is_fast", False):
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return tokens, [Author.TOOL.value] * len(tokens)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans, place = [], 0
        for content in contents:
            start = text.find(content.strip(), place)
            if start >= 0:
                place = start + len(content.strip())
                spans.append((start, place))
        inside = [any(low <= start and end <= high for low, high in spans) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], [Author.TOOL.value if own else Author.TEMPLATE.value for own in inside]

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        prompt = problem.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def _text(self, problem: Problem) -> str:
        if isinstance(problem.prompt, str):
            return problem.prompt if self.system_prompt is None else f"{self.system_prompt}\n{problem.prompt}"
        raise InputError(
            f"problem {problem.key} is chat messages, but {_why_no_template(self.chat)}; use a model with a template or text"
            " prompts"
        )


def _ids(tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def _why_no_template(chat: str) -> str:
    return "policy.chat = 'never'" if chat == "never" else "the tokenizer has no chat template"


def end_tokens(tokenizer: Any, generation: Any, words: Sequence[str]) -> tuple[int, ...]:
    """The end tokens of the tokenizer, of the model's generation settings, and those in `words`."""
    ends = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    configured = getattr(generation, "eos_token_id", None)
    ends |= set(configured) if isinstance(configured, list) else set() if configured is None else {configured}
    for word in words:
        number = tokenizer.convert_tokens_to_ids(word)
        if number is None or number == tokenizer.unk_token_id:
            raise InputError(f"policy.end_tokens holds {word!r}, which is not a token of this tokenizer")
        ends.add(number)
    if not ends:
        raise InputError("neither the tokenizer nor the model names an end token; give policy.end_tokens")
    return tuple(sorted(ends))
