"""From a problem to the tokens of its prompt: chat template or plain text, as the tokenizer has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from legato.core.rollout import Problem
from legato.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How prompts are written."""

    tokenizer: Any
    chat: str = "auto"
    """'auto': by the chat template where the tokenizer has one; 'always', 'never'."""
    system_prompt: str | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template (`enable_thinking` and the like)."""

    def __post_init__(self) -> None:
        if self.chat == "always" and not getattr(self.tokenizer, "chat_template", None):
            raise InputError("policy.chat = 'always', but the tokenizer has no chat template; use 'never' or another model")

    @property
    def by_template(self) -> bool:
        return self.chat == "always" or (self.chat == "auto" and bool(getattr(self.tokenizer, "chat_template", None)))

    def prompt(self, problem: Problem) -> Tensor:
        """[P] token ids, ready for the first token of the answer."""
        if self.by_template:
            found = self.tokenizer.apply_chat_template(
                self._messages(problem), add_generation_prompt=True, tokenize=True, return_dict=True, **self.template_options
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
