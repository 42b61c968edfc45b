"""The record of an episode: what an agent that owns its loop asked an engine for, and the exact tokens that it got.

A run that starts agents (`agents.py`) opens a recording for each rollout, and the requests of its agent arrive below
/episodes/NAME/. The run decides how is sampled: temperature, seeds and limits of requests are those of the recording.

Token in, token out: a request that repeats an earlier one with its answer and goes on continues the tokens that were read
and sampled. Only what the agent added is tokenised. A request that changes the past is rendered anew: a new row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from legato.core.rollout import Problem, StopReason
from legato.errors import InputError
from legato.rollouts.episodes import EpisodeSettings
from legato.rollouts.randomness import seed_of
from legato.rollouts.render import Inserted, Rendering
from legato.rollouts.sampling import Sampling
from legato.rollouts.tool_calls import Turn
from legato.serve.errors import ApiError
from legato.serve.prompts import Prompts

if TYPE_CHECKING:
    from legato.serve.generation import Sample


@dataclass(slots=True, kw_only=True, eq=False)
class Recorded:
    """A completion of an episode: a turn of the policy."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    kept_logmass: list[float] | None
    text: str
    ended: bool
    """Whether its last token is an end token of the model."""
    cut: bool
    """Whether a limit of the run cut it."""

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """A chat as the agent sent it, and as the template rendered it."""

    sent: list[dict[str, Any]]
    inserted: Inserted
    history: list[Any]
    """The messages as the template got them."""
    tools: list[dict[str, Any]]
    prompt: list[int]
    answer: dict[str, Any] | None = None
    """The message that the agent got."""
    turn: Turn | None = None
    recorded: Recorded | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Recording:
    """One episode of an agent. Its methods are called in the threads of the server; `ended` once no request is left."""

    sampling: Sampling
    seed: int
    end_tokens: Sequence[int]
    max_response_tokens: int
    """The most tokens of the episode after its first prompt."""
    longest_prompt: int | None
    settings: EpisodeSettings
    turns: list[Recorded] = field(default_factory=list)
    refused: StopReason | None = None
    """The limit for which a request was refused."""
    ended: bool = False
    _requests: int = 0
    _allowed: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The most tokens of a response to each prompt."""
    _first_prompt: int | None = None
    _conversations: list[Conversation] = field(default_factory=list)
    _texts: dict[tuple[int, ...], str] = field(default_factory=dict)
    """The text of each prompt that was a text."""

    @property
    def stop(self) -> StopReason:
        """Why the episode ended, if its agent ended it."""
        if self.refused is not None:
            return self.refused
        return StopReason.LENGTH if self.turns and self.turns[-1].cut else StopReason.ENVIRONMENT

    def next_seed(self) -> int:
        """The seed of the next request: the same for the same requests in the same order."""
        number, self._requests = self._requests, self._requests + 1
        return self.seed if number == 0 else seed_of("turn", self.seed, number)

    def room(self, prompt: Sequence[int], param: str) -> int:
        """The most tokens of a response to this prompt; ApiError if a limit of the run leaves none."""
        limits = self.settings
        if self.ended:
            raise ApiError(409, "this episode has ended: its agent took too long", code="episode_ended")
        if self._first_prompt is None:
            if self.longest_prompt is not None and len(prompt) > self.longest_prompt:
                raise ApiError(
                    400,
                    f"expected a first prompt of at most {self.longest_prompt} tokens (policy.max_prompt_tokens of the run),"
                    f" got {len(prompt)} ({param})",
                    param=param,
                    code="context_length_exceeded",
                )
            self._first_prompt = len(prompt)
        if limits.max_turns is not None and len(self.turns) >= limits.max_turns:
            self.refused = StopReason.TURNS
            raise ApiError(400, f"the run allows {limits.max_turns} requests an episode (task.max_turns)", code="limit")
        sampled = sum(len(turn.tokens) for turn in self.turns)
        left = self.max_response_tokens - max(sampled, len(prompt) - self._first_prompt)
        if left < 1:
            self.refused = StopReason.LENGTH
            raise ApiError(
                400,
                f"the run allows {self.max_response_tokens} tokens an episode after its first prompt"
                " (rollouts.max_response_tokens)",
                param=param,
                code="context_length_exceeded",
            )
        left = left if limits.max_turn_tokens is None else min(left, limits.max_turn_tokens)
        self._allowed[tuple(prompt)] = left
        return left

    def add(self, samples: "Sequence[Sample]") -> None:
        """Record complete responses."""
        for sample in samples:
            if sample.finish == "abort" or not sample.tokens or self.ended:
                continue
            self.turns.append(
                Recorded(
                    prompt=sample.prompt,
                    tokens=list(sample.tokens),
                    logprobs=list(sample.logprobs),
                    kept_logmass=None if sample.kept_logmass is None else sample.kept_logmass[: len(sample.tokens)],
                    text=sample.whole_text,
                    ended=sample.tokens[-1] in self.end_tokens,
                    cut=sample.finish == "length" and len(sample.tokens) >= self._allowed[tuple(sample.prompt)],
                )
            )

    # Texts

    def encode_text(self, prompts: Prompts, text: str, add: bool, parse: bool) -> list[int]:
        """The tokens of a text; one that begins with an earlier text and its answer continues their tokens."""
        for turn in reversed(self.turns):
            before = self._texts.get(tuple(turn.prompt))
            if before is None or not text.startswith(before + turn.text):
                continue
            rest = text[len(before) + len(turn.text) :]
            end = prompts.tokenizer.convert_ids_to_tokens(turn.tokens[-1]) if turn.ended else None
            rest = rest.removeprefix(end) if end else rest
            encode = prompts.encode_text
            added = encode(rest, add_special_tokens=False, parse_special_tokens=parse, param="prompt") if rest else []
            return self._note_text(turn.whole + added, text)
        tokens = prompts.encode_text(text, add_special_tokens=add, parse_special_tokens=parse, param="prompt")
        return self._note_text(tokens, text)

    def _note_text(self, tokens: list[int], text: str) -> list[int]:
        self._texts[tuple(tokens)] = text
        return tokens

    # Chats

    def converse(
        self,
        prompts: Prompts,
        messages: list[dict[str, Any]],
        arguments: Mapping[str, Any],
        tools: list[dict[str, Any]],
    ) -> Conversation:
        """The conversation of a request. If it continues an earlier one, its prompt begins with the tokens of that."""
        if not getattr(prompts.tokenizer, "chat_template", None):
            raise ApiError(400, "this model has no chat template; send the text to /v1/completions", param="messages")
        rendering = replace(
            prompts.rendering,
            chat="always",
            chat_template_kwargs={**prompts.rendering.chat_template_kwargs, **arguments},
            tools=tuple(tools),
        )
        before = next((each for each in reversed(self._conversations) if _continues(messages, tools, each)), None)
        try:
            return self._start(rendering, messages, tools) if before is None else self._go_on(rendering, messages, before)
        except InputError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _start(self, rendering: Rendering, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Conversation:
        inserted = rendering.conversation(messages)
        return Conversation(
            sent=messages,
            inserted=inserted,
            history=list(inserted.messages),
            tools=tools,
            prompt=inserted.tokens.tolist(),
        )

    def _go_on(self, rendering: Rendering, messages: list[dict[str, Any]], before: Conversation) -> Conversation:
        assert before.turn is not None and before.recorded is not None
        recorded = before.recorded
        inserted = rendering.reply(
            Problem(prompt=before.history),
            (),
            before.turn,
            messages[len(before.sent) + 1 :],
            before=before.inserted.rendered,
            end=recorded.tokens[-1] if recorded.ended else None,
            end_tokens=self.end_tokens,
        )
        own = inserted.tokens.tolist()
        return Conversation(
            sent=messages,
            inserted=inserted,
            history=[*before.history, *inserted.messages],
            tools=before.tools,
            prompt=own if inserted.starts_row else recorded.whole + own,
        )

    def answered(self, conversation: Conversation, answer: dict[str, Any], turn: Turn) -> None:
        """Remember the message that an agent gets, which its next request repeats."""
        same = [each for each in self.turns if each.prompt == conversation.prompt]
        if same:
            conversation.answer, conversation.turn, conversation.recorded = answer, turn, same[-1]
            self._conversations.append(conversation)


def _continues(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], before: Conversation) -> bool:
    """Whether messages are those of an earlier request, its answer as it was given, and more."""
    count = len(before.sent)
    if before.answer is None or len(messages) < count + 2 or list(messages[:count]) != before.sent or tools != before.tools:
        return False
    repeated = messages[count]
    if repeated.get("role") != "assistant" or (repeated.get("content") or "") != (before.answer.get("content") or ""):
        return False
    own, others = ([call.get("id") for call in each.get("tool_calls") or ()] for each in (before.answer, repeated))
    return own == others
