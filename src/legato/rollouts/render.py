"""Renders problems and replies as tokens, with the chat template of the tokenizer or as plain text."""

import functools
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.fields import choice, text
from legato.core.rollout import Author, Message, Problem
from legato.core.settings import free_table, settings
from legato.errors import InputError
from legato.rollouts.tool_calls import FORMATS, Format, Turn, format_by_name
from legato.workers.pool import DiedError, RefusedError, TimedOutError, shared

WORKER = "legato.rollouts.template_worker:render"
RENDER_SECONDS = 10.0
"""How long a template may take for one text; usual ones take less than a millisecond."""

_OURS = (
    *("add_generation_prompt", "continue_final_message", "conversation", "conversations", "max_length", "messages"),
    *("padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "tokenize"),
    *("tokenizer_kwargs", "truncation"),
)
"""Arguments of `apply_chat_template` that are not for the template. They would change the type or the length of a prompt."""


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

    def check(self) -> None:
        """InputError for arguments that a template cannot read."""
        for name in self.chat_template_kwargs:
            if name in _OURS:
                raise InputError(
                    f"chat_template_kwargs: expected variables of the chat template, got {name!r}; that is an argument of"
                    " apply_chat_template, which legato sets itself: drop it (policy.max_prompt_tokens limits prompts)"
                )


@settings()
class ToolSettings:
    """How tool calls are read."""

    tool_format: str = choice(
        "auto",
        *FORMATS,
        default="auto",
        says="How the model writes tool calls; auto: as its chat template does (hermes for Qwen, llama for Llama 3.1,"
        " harmony for gpt-oss), plain without a template.",
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
    rendered: str = ""
    """The conversation as the template renders it now; "" without a chat template."""
    starts_row: bool = False
    """The template renders earlier turns differently now: `tokens` are the whole prompt of a new row."""


@dataclass(frozen=True, kw_only=True)
class Rendering(ChatSettings, SystemPrompt, ToolSettings):
    """Renders prompts and replies."""

    tokenizer: Any
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the environment's tools, for the chat template."""
    date: str | None = None
    """The time, in ISO format, that a template gets that asks for the date; None: the time of now."""

    def check(self) -> None:
        """InputError if a chat template is required but missing."""
        if self.chat == "always" and not getattr(self.tokenizer, "chat_template", None):
            raise InputError("policy.chat = 'always', but the tokenizer has no chat template; use 'never' or another model")

    @property
    def by_template(self) -> bool:
        return self.chat == "always" or (self.chat == "auto" and bool(getattr(self.tokenizer, "chat_template", None)))

    @property
    def asks_for_date(self) -> bool:
        """Whether the chat template writes the date into prompts, so that they differ from day to day."""
        template = self.chat_template_kwargs.get("chat_template") or getattr(self.tokenizer, "chat_template", None)
        return self.by_template and "strftime_now" in str(template)

    @functools.cached_property
    def _marks(self) -> "_Marks":
        return _Marks.of(self.tokenizer)

    @property
    def tool_calls(self) -> Format:
        """How the policy writes tool calls."""
        return format_by_name(self.tool_format, self._template_text() if self.by_template else None)

    def _template_text(self) -> str:
        """The template that renders; of several named ones the one that takes tools, if there are tools."""
        template = self.chat_template_kwargs.get("chat_template") or getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, dict):
            template = template.get("tool_use" if self.tools else "default", next(iter(template.values()), ""))
        return str(template or "")

    def read_turn(self, tokens: Tensor, text: str, *, ended: bool) -> Turn:
        """The policy's turn. `ended`: its last token is an end token. `text` is the turn without special tokens.

        Without a chat template, special tokens mean nothing, and the text is all there is.
        """
        if not self.by_template:
            return self.tool_calls.read(text)
        raw = self.tokenizer.decode(tokens[: len(tokens) - ended].tolist(), skip_special_tokens=False)
        return self.tool_calls.read(raw)

    def rendered(self, problem: Problem) -> str:
        """The text of a problem's prompt; "" without a chat template."""
        return self._render(self._messages(problem)) if self.by_template else ""

    def prompt(self, problem: Problem) -> Tensor:
        """[P] token ids of a problem, up to the first token of the answer."""
        if self.by_template:
            text = self._render(self._messages(problem))
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            # Drop an end token that the tokenizer appends: the answer follows.
            tokens = self.tokenizer(self._text(problem))["input_ids"]
            if tokens and tokens[-1] == self.tokenizer.eos_token_id:
                tokens = tokens[:-1]
        if not tokens:
            raise InputError(f"the prompt {str(problem.prompt)[:60]!r} has no tokens; a prompt needs at least one")
        return _ids(tokens)

    def check_problems(self, problems: Sequence[Problem]) -> list[str]:
        """Check that the policy can read the first problems of a run; returns notes about what it cannot read.

        InputError if the chat template leaves the problem out, or if the tokenizer knows no character of any problem.
        """
        if self.by_template and problems:
            self._check_that_template_shows(problems[0])
        unknown = self.tokenizer.unk_token_id
        if unknown is None:
            return []
        tokens = [
            [token for text in _contents(problem) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]
            for problem in problems
        ]
        partly = [problem for problem, ids in zip(problems, tokens, strict=True) if unknown in ids]
        if not partly:
            return []
        example = f"{_content(partly[0])[:60]!r}"
        if all(set(ids) == {unknown} for ids in tokens):
            raise InputError(
                f"expected problems in characters that the tokenizer of {self._name} knows, got only unknown ones:"
                f" {example} (task); take a model whose tokenizer knows them"
            )
        return [
            f"{len(partly)} of the first {len(problems)} problems hold characters that the tokenizer does not know, for"
            f" instance {example}: the policy reads {self.tokenizer.unk_token!r} in their place"
        ]

    def _check_that_template_shows(self, problem: Problem) -> None:
        messages = self._messages(problem)
        other = [{**each, "content": "?"} if each.get("role") != "system" else each for each in messages]
        if other != messages and self._render(messages) == self._render(other):
            raise InputError(
                f"expected a chat template that shows the problem, got that of {self._name}, which renders the same text for"
                " any problem (policy.chat); correct its chat_template, or use policy.chat = 'never'"
            )

    def reply(
        self,
        problem: Problem,
        earlier: Sequence[Message],
        turn: Turn,
        content: str | Sequence[Message],
        *,
        before: str | None = None,
        end: int | None = None,
        end_tokens: Sequence[int] = (),
    ) -> Inserted:
        """The tokens of an environment's reply `content` to a turn of the policy.

        `earlier` are the messages between the problem and that turn, `before` their text as the policy read it (None: as the
        template renders them). `end` is the end token that the policy sampled, if any: it stands for that of the template.
        Special tokens that the environment spells out are encoded as the characters that they are made of.
        """
        if not self.by_template:
            if not isinstance(content, str):
                if self.tools:
                    content = "".join(str(each.get("content", "")) for each in content)
                else:
                    raise InputError(
                        f"expected replies of text, got chat messages: {_why_no_template(self.chat)} (task.environment)"
                    )
            plain = _ids(self._encode_foreign(content))
            return Inserted(tokens=plain, authors=torch.full_like(plain, Author.TOOL.value), text=content, messages=())
        answer = [{"role": "user", "content": content}] if isinstance(content, str) else [dict(each) for each in content]
        contents = [str(each.get("content", "")) for each in answer]
        marks = self._marks
        turn_and_answer = (self.tool_calls.message(turn), *map(marks.mark, answer))
        history = [*self._messages(problem), *earlier]
        before = self._render(history, "task.environment") if before is None else before
        after = self._render([*history, *turn_and_answer], "task.environment")
        added = self._added_after_turn(before, turn, after, [*history, turn_and_answer[0]], end_tokens)
        if added is not None and end is not None and self._closes_otherwise(added, end_tokens):
            added = None
        tokens, authors = self._tokens_and_authors(after if added is None else added, contents, marks)
        again = added is not None and end is not None and bool(tokens) and tokens[0] in (end, *end_tokens)
        return Inserted(
            tokens=_ids(tokens)[again:],
            authors=_ids(authors)[again:],
            text="\n".join(contents),
            messages=turn_and_answer,
            rendered=after,
            starts_row=added is None,
        )

    def conversation(self, messages: Sequence[Message]) -> Inserted:
        """The whole prompt of messages that others wrote. Special tokens that they spell out are text, as in `reply`."""
        marks = self._marks
        marked = tuple(map(marks.mark, messages))
        text = self._render(marked, "messages")
        tokens, authors = self._tokens_and_authors(text, (), marks)
        return Inserted(tokens=_ids(tokens), authors=_ids(authors), text="", messages=marked, rendered=text, starts_row=True)

    def _render(self, messages: Sequence[Message], where: str = "policy.model") -> str:
        """The text of messages; InputError with the remedy if the template fails, loops or needs too much memory."""
        try:
            return self.render_messages(messages)
        except TemplateError as error:
            raise InputError(self._explain(messages, error, where)) from error

    def render_messages(self, messages: Sequence[Message], *, opens: bool = True) -> str:
        """The text of messages up to the first token of the next answer; TemplateError with the reason if there is none.

        Not `opens`: up to the end of the last message.
        """
        arguments = dict(self.chat_template_kwargs)
        if self.tools:
            arguments["tools"] = [dict(each) for each in self.tools]
        try:
            if not _renders_as_transformers(self.tokenizer):
                own: str = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=opens, tokenize=False, **arguments
                )
                return own
            template = self.tokenizer.get_chat_template(arguments.pop("chat_template", None), arguments.get("tools"))
            # The order of `apply_chat_template`: arguments of the user win over special tokens.
            variables = {**self.tokenizer.special_tokens_map, **arguments}
            # jinja2 leaks nothing, and a fresh worker takes a second: a step may render thousands of turns.
            workers = shared(WORKER, questions_per_worker=1_000_000)
            rendered: str = workers.ask(template, list(messages), variables, self.date, opens, seconds=RENDER_SECONDS)
            return rendered
        except TimedOutError:
            raise TemplateError(f"it did not end within {RENDER_SECONDS:g} s") from None
        except DiedError as error:
            raise TemplateError(f"the process that renders it failed: {error}") from None
        except RefusedError as error:
            raise TemplateError(_shorten(str(error))) from None
        except Exception as error:  # a tokenizer with code of its own, several templates without a default, odd messages
            raise TemplateError(_shorten(f"{type(error).__name__}: {error}")) from error

    def _explain(self, messages: Sequence[Message], error: "TemplateError", where: str) -> str:
        """The message about a template that failed, with what to do about it."""
        roles = ", ".join(str(each.get("role")) for each in messages)
        without = [each for each in messages if each.get("role") != "system"]
        advice = (
            "correct the template, give the variables that it reads (policy.chat_template_kwargs), or do without it"
            " (policy.chat = 'never')"
        )
        if len(without) < len(messages) and self._renders(without):
            own = self.system_prompt is not None and messages[0].get("content") == self.system_prompt
            where, what = ("task.system_prompt", "it") if own else ("the problem's messages", "the system message")
            advice = f"the template takes no system message: drop {what}, or put its text at the beginning of each problem"
        return (
            f"expected messages that the chat template of {self._name} can render, got {roles} ({where}): {error}; {advice}"
        )

    def _renders(self, messages: Sequence[Message]) -> bool:
        try:
            self.render_messages(messages)
        except TemplateError:
            return False
        return True

    @property
    def _name(self) -> str:
        return getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__

    def _added_after_turn(
        self, before: str, turn: Turn, after: str, closed_history: Sequence[Message], end_tokens: Sequence[int]
    ) -> str | None:
        """The text that the template adds after the policy's turn; None if it changes what the policy read or wrote."""
        if not after.startswith(before):
            return None
        rest = after[len(before) :]
        # Templates may strip white space.
        for wrote in (turn.text, turn.text.lstrip(), turn.text.rstrip(), turn.text.strip()):
            if rest.startswith(wrote):
                return rest[len(wrote) :]
        # A template that writes a call in its own way says the same: what was sampled stays.
        try:
            closed = self.render_messages(closed_history, opens=False)
        except TemplateError:
            return None
        if not after.startswith(closed) or not closed.startswith(before):
            return None
        written = closed[len(before) :]
        words = map(self.tokenizer.convert_ids_to_tokens, end_tokens)
        place = max((written.rfind(word) for word in words if word), default=-1)
        # The generation prompt may hold the beginning of the turn, which the parser does not need.
        if place < 0 or not turn.same_as(self.tool_calls.read(written[:place])):
            return None
        return written[place:] + after[len(closed) :]

    def _closes_otherwise(self, added: str, end_tokens: Sequence[int]) -> bool:
        """Whether the template closes a turn with a special token that never ends one: gpt-oss ends answers with <|return|>
        and remembers them with <|end|>."""
        special = self._marks.special
        first = special.match(added) if special is not None else None
        return first is not None and self.tokenizer.convert_tokens_to_ids(first[0]) not in end_tokens

    def _tokens_and_authors(self, text: str, contents: Sequence[str], marks: "_Marks") -> tuple[list[int], list[int]]:
        """The tokens of a text and the author of each. Without character offsets, all tokens count as the environment's."""
        tokens, authors = list[int](), list[int]()
        left = [marks.mark(content).strip() for content in contents]
        for piece, foreign in marks.pieces(text):
            if foreign:
                encoded = self._encode_foreign(piece)
                tokens += encoded
                authors += [Author.TOOL.value] * len(encoded)
            elif not getattr(self.tokenizer, "is_fast", False):
                plain = self.tokenizer(piece, add_special_tokens=False)["input_ids"]
                tokens += plain
                authors += [Author.TOOL.value] * len(plain)
            else:
                more, owned = self._tokens_with_authors(piece, left, marks)
                tokens += more
                authors += owned
        return tokens, authors

    def _tokens_with_authors(self, text: str, contents: Sequence[str], marks: "_Marks") -> tuple[list[int], list[int]]:
        """The tokens of a text without marks, and who wrote each: the environment what it has in `contents`."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans, place = [], 0
        for content in contents:
            for part, foreign in marks.pieces(content):
                start = -1 if foreign or not part.strip() else text.find(part.strip(), place)
                if start >= 0:
                    place = start + len(part.strip())
                    spans.append((start, place))
        inside = [any(low <= start and end <= high for low, high in spans) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], [Author.TOOL.value if own else Author.TEMPLATE.value for own in inside]

    def _encode_foreign(self, text: str) -> list[int]:
        """The tokens of a text that an environment wrote: none of them is a special or an added token."""
        pattern = self._marks.special
        if pattern is None or pattern.search(text) is None:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        tokens, place = list[int](), 0
        for match in pattern.finditer(text):
            tokens += self.tokenizer(text[place : match.start()], add_special_tokens=False)["input_ids"]
            tokens += self._spell(match[0], set(_added_tokens(self.tokenizer).values()))
            place = match.end()
        return tokens + list(self.tokenizer(text[place:], add_special_tokens=False)["input_ids"])

    def _spell(self, word: str, added: set[int]) -> list[int]:
        """A special token's name as ordinary tokens."""
        added = added - {self.tokenizer.unk_token_id}  # how a tokenizer without these characters writes them
        for parts in ((word[:1], word[1:]), tuple(word)):
            tokens = [t for part in parts for t in self.tokenizer(part, add_special_tokens=False)["input_ids"]]
            if not added.intersection(tokens):
                return tokens
        return [token for token in tokens if token not in added]

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        prompt = problem.prompt
        if not isinstance(prompt, str) and not (prompt and all(isinstance(each, Mapping) for each in prompt)):
            raise InputError(
                f"expected a text or chat messages with role and content, got {str(prompt)[:60]!r} (the prompt of a problem)"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if self.system_prompt is not None and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def _text(self, problem: Problem) -> str:
        if isinstance(problem.prompt, str):
            return problem.prompt if self.system_prompt is None else f"{self.system_prompt}\n{problem.prompt}"
        raise InputError(
            f"problem {problem.key} is chat messages, but {_why_no_template(self.chat)}; use a model with a template or text"
            " prompts"
        )


_SECRET = secrets.token_hex(8)
"""Between characters of the private use area, so that no text of an environment can hold a mark."""


@dataclass(frozen=True, slots=True)
class _Marks:
    """Marks around special tokens that an environment spells out, so that they are found again in the rendered text."""

    opening: str
    closing: str
    special: re.Pattern[str] | None

    @classmethod
    def of(cls, tokenizer: Any) -> "_Marks":
        return cls(f"\ue000{_SECRET}\ue001", f"\ue000{_SECRET}\ue002", _pattern(_added_tokens(tokenizer)))

    def mark(self, value: Any) -> Any:
        """The value with every special token in its texts between marks."""
        if self.special is None:
            return value
        if isinstance(value, str):
            return self.special.sub(lambda match: f"{self.opening}{match[0]}{self.closing}", value)
        if isinstance(value, Mapping):
            return {key: self.mark(each) for key, each in value.items()}
        return [self.mark(each) for each in value] if isinstance(value, list) else value

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """The pieces of a rendered text: (piece, whether it stood between marks)."""
        parts = re.split(f"{self.opening}(.*?){self.closing}", text, flags=re.DOTALL)
        return [(piece, place % 2 == 1) for place, piece in enumerate(parts) if piece]


def _added_tokens(tokenizer: Any) -> dict[str, int]:
    """The names of special and other added tokens, which a tokenizer finds in any text."""
    added = {str(token): number for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    names = getattr(tokenizer, "all_special_tokens", ())
    special = dict(zip(names, getattr(tokenizer, "all_special_ids", ()), strict=False))
    return {word: number for word, number in {**special, **added}.items() if word.strip()}


def _pattern(added: Mapping[str, int]) -> re.Pattern[str] | None:
    # The longest first, so that a token that begins with another is found whole.
    words = sorted(added, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None


class TemplateError(Exception):
    """A chat template gave no text; the message is the reason."""


def _renders_as_transformers(tokenizer: Any) -> bool:
    """Whether the tokenizer renders its template as transformers does, so that a worker can do it."""
    from transformers import PreTrainedTokenizerBase

    return getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template


def _content(problem: Problem) -> str:
    """The text of a problem, without roles."""
    return "\n".join(_contents(problem))


def _contents(problem: Problem) -> list[str]:
    """The text of each message of a problem, which a template joins in its own way."""
    if isinstance(problem.prompt, str):
        return [problem.prompt]
    return [str(each.get("content", "")) for each in problem.prompt]


def _shorten(text: str) -> str:
    """The text on one line, at most 300 characters of it."""
    return " ".join(text.split())[:300]


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
