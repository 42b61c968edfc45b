"""Responses in flight: from a request's sampling fields to tokens and texts, as they come or all at once.

Stop strings and stop tokens of a client are found here and not in the engine, so that clients with different ones decode
together. The engine may write a few tokens more; they are dropped.
"""

import asyncio
import secrets
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from legato.core.rollout import StopReason
from legato.errors import InputError
from legato.rollouts.engine import Limits, Request
from legato.rollouts.randomness import seed_of
from legato.rollouts.sampling import HIGHEST_TEMPERATURE, Sampling
from legato.serve.engine_thread import Aborted, Complete, Event, Failed, NewTokens, Work
from legato.serve.errors import ApiError, bad_value, context_exceeded, unsupported
from legato.serve.served import Served
from legato.serve.text import TextStream
from legato.serve.values import INT64, Body, token_ids

FINISH = {
    StopReason.END_TOKEN: "stop",
    StopReason.STOP_STRING: "stop",
    StopReason.LENGTH: "length",
    StopReason.ABORTED: "abort",
}
"""OpenAI's words for the end of a response; "abort" is vLLM's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How a client wants responses sampled."""

    sampling: Sampling
    seeds: tuple[int, ...]
    """One per sample."""
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    """Tokens that end a response, beside `end_ids`."""
    end_ids: tuple[int, ...]
    """Tokens at which the engine itself ends a response: the model's own, or those of the client in their place."""
    keep_stop: bool
    ignore_end: bool
    """Whether the model's end tokens end nothing."""
    skip_special: bool
    """Whether special tokens are no text."""

    @property
    def cuts(self) -> bool:
        """Whether a response may end before the engine ends it."""
        return bool(self.stops or self.stop_ids)


def read_asked(body: Body, served: Served) -> Asked:
    """The sampling fields that all endpoints share."""
    limits = served.limits
    try:
        sampling = _sampling(
            temperature=body.number("temperature", 1.0, minimum=0.0, maximum=HIGHEST_TEMPERATURE),
            top_p=body.number("top_p", 1.0, minimum=0.0, maximum=1.0),
            # vLLM writes -1 for all tokens.
            top_k=max(0, body.integer("top_k", 0, minimum=-1, maximum=2**31)),
            min_p=body.number("min_p", 0.0, minimum=0.0, maximum=1.0),
        )
    except InputError as error:
        raise ApiError(400, str(error)) from None
    count = body.integer("n", 1, minimum=1, maximum=limits.samples)
    seed = body.integer("seed", None)
    neutral = "it would change the distribution that log-probs are of"
    for name, value in (("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1), ("logit_bias", {})):
        body.only(name, value, advice=f"expected {value!r} or nothing; {neutral}")
    for name in ("allowed_token_ids", "bad_words", "logprob_token_ids"):
        body.only(name, [], advice="expected nothing")
    body.only("min_tokens", 0, advice="expected 0 or nothing; ignore_eos ignores end tokens altogether")
    for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        body.only(name, advice="responses are sampled without a grammar")
    body.ignore("spaces_between_special_tokens", "detokenize", "flat_logprobs", "output_kind", "stream_interval")
    first = secrets.randbits(62) if seed is None else seed
    if served.recording is not None:
        # The run that trains decides how is sampled; its log-probs are of that distribution.
        sampling, first = served.recording.sampling, served.recording.next_seed()
        if sampling.truncates and (body.raw("stop") or body.raw("stop_token_ids")):
            raise unsupported("stop", "the run samples with top-p, top-k or min-p, which need whole responses")
    ignore_end = body.flag("ignore_eos")
    stop_ids = token_ids(body.items("stop_token_ids", most=limits.stops), served.vocabulary, body.path("stop_token_ids"))
    return Asked(
        sampling=sampling,
        seeds=derive_seeds(first, count),
        stops=_read_stops(body, served),
        stop_ids=frozenset() if ignore_end else frozenset(stop_ids) - set(served.end_tokens),
        end_ids=tuple(dict.fromkeys(stop_ids)) if ignore_end else served.end_tokens,
        keep_stop=body.flag("include_stop_str_in_output"),
        ignore_end=ignore_end,
        skip_special=body.flag("skip_special_tokens", True),
    )


@lru_cache(256)
def _sampling(*, temperature: float, top_p: float, top_k: int, min_p: float) -> Sampling:
    """Checking the values takes longer than most of what is done for a request, and clients repeat them."""
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)


@lru_cache(256)
def _limits(max_response_tokens: int, end_tokens: tuple[int, ...]) -> Limits:
    return Limits(max_response_tokens=max_response_tokens, end_tokens=end_tokens)


def derive_seeds(seed: int, count: int) -> tuple[int, ...]:
    """The seeds of the samples of a prompt: the first has the request's own, sample i the hash of that and i."""
    return (seed, *(seed_of("sample", seed, place) for place in range(1, count)))


def _read_stops(body: Body, served: Served) -> tuple[str, ...]:
    value, limits = body.raw("stop"), served.limits
    stops = [value] if isinstance(value, str) else body.items("stop", most=limits.stops)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= limits.stop_characters:
            raise bad_value(body.path("stop"), f"texts of 1 to {limits.stop_characters} characters", stop)
    return tuple(dict.fromkeys(stops))


def read_max_tokens(body: Body, names: Sequence[str], default: int | None, *, zero: bool = False) -> int | None:
    """The most tokens of a response as the first of these fields says, else `default`; `zero`: none at all is allowed."""
    limits = [body.integer(name, None, minimum=0 if zero else 1, maximum=INT64 - 1) for name in names]
    return next((value for value in limits if value is not None), default)


def fit_response(served: Served, prompt: Sequence[int], wanted: int | None, param: str) -> int:
    """The most tokens of a response to a prompt; ApiError if both do not fit in the context."""
    room = served.limits.context_tokens - len(prompt)
    if served.recording is not None:
        # Agents ask for more than a run allows as a matter of course: they get what is left.
        left = min(room, served.recording.room(prompt, param))
        wanted = left if wanted is None else min(wanted, max(1, left))
    tokens = min(room, served.limits.response_tokens) if wanted is None else wanted
    if room < 1 or tokens > room:
        raise context_exceeded(param, len(prompt) + max(1, tokens), served.limits.context_tokens)
    return tokens


def _as_tensor(tokens: Sequence[int]) -> torch.Tensor:
    """Token ids as a tensor; ten times as fast as `torch.tensor` of a list."""
    return torch.frombuffer(array("q", tokens), dtype=torch.int64)


@dataclass(slots=True)
class Sample:
    """One response as the client sees it."""

    index: int
    """Among the choices of the answer."""
    prompt: list[int]
    asked: Asked
    text: TextStream | None
    """Decodes as tokens come; None: the text comes with the whole response."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_logmass: list[float] | None = None
    finish: str | None = None
    """Why it ended; None: it has not."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it."""
    whole_text: str = ""

    def add(self, tokens: list[int], logprobs: list[float], versions: list[int], ended: StopReason | None) -> None:
        """Add new tokens; `ended` says why the engine ended the response with the last of them."""
        stop_ids = self.asked.stop_ids
        stop_id = next((place for place, token in enumerate(tokens) if token in stop_ids), None) if stop_ids else None
        if stop_id is not None:
            tokens = tokens[: stop_id + 1]
            self.finish, self.stop_reason = "stop", tokens[-1]
        elif ended is not None:
            self.finish = FINISH[ended]
            if ended is StopReason.END_TOKEN and self.asked.ignore_end:
                self.stop_reason = tokens[-1]
        before, count = len(self.tokens), len(self.tokens) + len(tokens)
        if self.text is not None:
            hidden = stop_id is not None or ended is StopReason.END_TOKEN
            if self.text.push(tokens[: len(tokens) - hidden], last=self.finish is not None):
                count, self.finish, self.stop_reason = self.text.count, "stop", self.text.stop
            self.whole_text = self.text.text
        new = count - before
        self.tokens += tokens[:new]
        self.logprobs += logprobs[:new]
        self.versions += versions[:new]


@dataclass(frozen=True, slots=True)
class Update:
    """New tokens of a sample. The last update of a sample has `sample.finish`."""

    sample: Sample
    start: int
    """Index of the first new token."""
    text: str
    """The new text; "" if texts do not come piece by piece."""


class Generation:
    """Prompts of one client and their samples in flight. `updates` yields what comes; `close` gives up on the rest.

    The constructor raises ApiError (429) if the server has too many responses in flight.
    """

    def __init__(self, served: Served, *, sequences: int, streams: bool, name: str, texts: bool = True) -> None:
        """`sequences`: how many responses it will hold; `texts`: whether their texts are wanted."""
        self.served, self.streams, self.name, self.texts = served, streams, name, texts
        served.admission.take(sequences)
        self._admitted = sequences
        self.samples: list[Sample] = []
        self._events: asyncio.Queue[tuple[Work, Event]] = asyncio.Queue()
        self._works: dict[int, tuple[Work, list[Sample]]] = {}
        """Requests of the engine with unfinished samples, by identity."""

    def add(self, prompt: list[int], asked: Asked, max_tokens: int) -> None:
        """Submit a prompt; its samples are the next choices of the answer."""
        served, by_piece = self.served, self.streams or asked.cuts
        # The engine's own text is that of the whole response, without special tokens.
        decodes = bool(asked.stops) or (self.texts and (by_piece or not asked.skip_special))
        samples = [
            Sample(
                index=len(self.samples) + place,
                prompt=prompt,
                asked=asked,
                text=TextStream(served.tokenizer, asked.stops, asked.keep_stop, asked.skip_special) if decodes else None,
            )
            for place in range(len(asked.seeds))
        ]
        self.samples += samples
        if max_tokens == 0:
            for sample in samples:
                sample.finish = "length"
            return
        work = Work(
            request=Request(prompt=_as_tensor(prompt), seeds=asked.seeds),
            sampling=asked.sampling,
            limits=_limits(max_tokens, asked.end_ids),
            watched=by_piece,
            deliver=lambda event: self._events.put_nowait((work, event)),
            name=self.name,
        )
        self._works[id(work)] = (work, samples)
        served.thread.submit(work)

    def close(self) -> None:
        """Give up on samples that have not ended, and let other clients in."""
        self.served.admission.give_back(self._admitted)
        self._admitted = 0
        for work, _ in self._works.values():
            self.served.thread.cancel(work)
        self._works.clear()

    async def updates(self) -> AsyncIterator[Update]:
        """New tokens of the samples until all have ended; ApiError (500) if the engine fails."""
        while self._works:
            work, event = await self._events.get()
            if id(work) not in self._works:
                continue
            for update in self._take(event, self._works[id(work)][1]):
                yield update
            samples = self._works[id(work)][1]
            if all(sample.finish is not None for sample in samples):
                del self._works[id(work)]
                if self.served.recording is not None:
                    self.served.recording.add(samples)
                if any(sample.stop_reason is not None for sample in samples):
                    self.served.thread.cancel(work)  # the engine may still be writing

    def _take(self, event: Event, samples: list[Sample]) -> list[Update]:
        if isinstance(event, Failed):
            raise ApiError(500, event.reason)
        if isinstance(event, Aborted):
            unfinished = [sample for sample in samples if sample.finish is None]
            for sample in unfinished:
                sample.add([], [], [], StopReason.ABORTED)
            return [self._update(sample, len(sample.tokens)) for sample in unfinished]
        sample = samples[event.place]
        if sample.finish is not None:
            return []
        before = len(sample.tokens)
        if isinstance(event, NewTokens):
            known = before - event.start  # an engine that ran out of memory reports tokens twice
            assert known >= 0, "tokens are reported without a gap"
            sample.add(event.tokens[known:], event.logprobs[known:], event.versions[known:], None)
        else:
            self._complete(sample, event)
        return [self._update(sample, before)] if len(sample.tokens) > before or sample.finish is not None else []

    def _complete(self, sample: Sample, event: Complete) -> None:
        response, known = event.response, len(sample.tokens)
        if response.kept_logmass is not None:
            sample.kept_logmass = response.kept_logmass.tolist()
        if sample.text is None:
            sample.whole_text = response.text
        sample.add(
            response.tokens[known:].tolist(),
            response.logprobs[known:].tolist(),
            response.version[known:].tolist(),
            response.stop,
        )

    @staticmethod
    def _update(sample: Sample, start: int) -> Update:
        text = "" if sample.text is None else sample.text.take(last=sample.finish is not None)
        return Update(sample, start, text)
