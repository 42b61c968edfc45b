"""From a problem to the tokens of its prompt: chat template or plain text, as the tokenizer has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.fields import choice, text
from legato.core.rollout import Problem
from legato.core.settings import free_table, settings
from legato.errors import InputError


@settings()
class ChatSettings:
    """How a model is spoken to."""

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
    """What is said before every problem."""

    system_prompt: str | None = text(
        default=None,
        says="A system message before every problem; without a chat template it is put before the text.",
        optional=True,
        blank=True,
    )


@dataclass(frozen=True, kw_only=True)
class Rendering(ChatSettings, SystemPrompt):
    """How prompts are written."""

    tokenizer: Any

    def check(self) -> None:
        """A template that is asked for is there."""
        if self.chat == "always" and not getattr(self.tokenizer, "chat_template", None):
            raise InputError("policy.chat = 'always', but the tokenizer has no chat template; use 'never' or another model")

    @property
    def by_template(self) -> bool:
        return self.chat == "always" or (self.chat == "auto" and bool(getattr(self.tokenizer, "chat_template", None)))

    def prompt(self, problem: Problem) -> Tensor:
        """[P] token ids, ready for the first token of the answer."""
        if self.by_template:
            found = self.tokenizer.apply_chat_template(
                self._messages(problem),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self.chat_template_kwargs,
            )["input_ids"]
        else:
            # No special tokens of the tokenizer's own at the end: what follows is the answer itself.
            found = self.tokenizer(self._text(problem))["input_ids"]
            if found and found[-1] == self.tokenizer.eos_token_id:
                found = found[:-1]
        if not found:
            raise InputError(f"the prompt {str(problem.prompt)[:60]!r} has no tokens; a prompt needs at least one")
        return torch.tensor(found, dtype=torch.int64)

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
            f"problem {problem.key} is chat messages, but {_why(self.chat)}; use a model with a template or text prompts"
        )


def _why(chat: str) -> str:
    return "policy.chat = 'never'" if chat == "never" else "the tokenizer has no chat template"


def end_tokens(tokenizer: Any, generation: Any, words: Sequence[str]) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's, the model's own generation settings', and those named."""
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    given = getattr(generation, "eos_token_id", None)
    found |= set(given) if isinstance(given, list) else set() if given is None else {given}
    for word in words:
        number = tokenizer.convert_tokens_to_ids(word)
        if number is None or number == tokenizer.unk_token_id:
            raise InputError(f"policy.end_tokens holds {word!r}, which is not a token of this tokenizer")
        found.add(number)
    if not found:
        raise InputError("neither the tokenizer nor the model names an end token; give policy.end_tokens")
    return tuple(sorted(found))
