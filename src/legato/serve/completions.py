"""POST /v1/completions: texts or token ids in, their continuations out."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from legato.serve.answers import Scored, count_usage, fingerprint, ignore_usual, read_usage, score_samples, version_spans
from legato.serve.errors import bad_value, whole_answers_only
from legato.serve.generation import Asked, Generation, Sample, Update, fit_response, read_asked, read_max_tokens
from legato.serve.http import EventStream, json_response, read_body, until_gone
from legato.serve.logprobs import TokenNames, alternatives, completion_logprobs, own_only, prompt_logprobs
from legato.serve.models import check_model
from legato.serve.prompts import Prompts
from legato.serve.served import Served
from legato.serve.values import Body, token_ids

DEFAULT_TOKENS = 16
"""The most tokens of a response if the request does not say, as in OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFields:
    """The fields of a request but for its prompts."""

    asked: Asked
    max_tokens: int
    logprobs: int | None
    """How many alternatives to each token; None: no log-probs."""
    prompt_logprobs: int | None
    """The same for the prompt."""
    echo: bool
    stream: bool
    usage: bool
    """Whether a stream ends with the numbers of tokens."""
    token_ids: bool
    """Whether the answer holds token ids."""
    names_as_ids: bool
    """Whether tokens in log-probs are named by their ids."""

    @property
    def scored_prompts(self) -> int | None:
        """How many alternatives to each prompt token are needed; None: prompts are not scored."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)


def read_fields(body: Body, served: Served) -> CompletionFields:
    """Read and check the fields; ApiError for what this server cannot do."""
    asked = read_asked(body, served)
    echo, stream = body.flag("echo"), body.flag("stream")
    max_tokens = read_max_tokens(body, ["max_tokens"], DEFAULT_TOKENS, zero=echo)
    assert max_tokens is not None
    body.only("best_of", 1, len(asked.seeds), advice="expected n or nothing; every sample is returned")
    body.only("suffix", "", advice="texts are continued at their end")
    ignore_usual(body)
    most = served.limits.top_logprobs
    fields = CompletionFields(
        asked=asked,
        max_tokens=max_tokens,
        logprobs=body.integer("logprobs", None, minimum=0, maximum=most),
        prompt_logprobs=body.integer("prompt_logprobs", None, minimum=0, maximum=most),
        echo=echo,
        stream=stream,
        usage=read_usage(body, stream),
        token_ids=body.flag("return_token_ids"),
        names_as_ids=body.flag("return_tokens_as_token_ids"),
    )
    if stream and (fields.scored_prompts is not None or fields.logprobs):
        raise whole_answers_only("logprobs = 0")
    return fields


async def read_prompts(body: Body, served: Served) -> list[list[int]]:
    """The prompts of a request as token ids: from a text, several texts, a list of ids, or several lists."""
    prompt, most = body.raw("prompt"), served.limits.prompts
    add, parse = body.flag("add_special_tokens", True), body.flag("parse_special_tokens", True)
    alone = isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int))
    prompts = [prompt] if alone else prompt
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= most:
        raise bad_value("prompt", f"a text, token ids, or a list of 1 to {most} of them", prompt)
    return [await _read_prompt(each, served, add, parse) for each in prompts]


async def _read_prompt(prompt: Any, served: Served, add: bool, parse: bool) -> list[int]:
    if isinstance(prompt, list) and prompt:
        return token_ids(prompt, served.vocabulary, "prompt")
    if not isinstance(prompt, str) or not prompt:
        raise bad_value("prompt", "a text or a list of token ids, not empty", prompt)
    served.check_length(prompt, "prompt")

    def encode(prompts: Prompts) -> list[int]:
        if served.recording is not None:
            return served.recording.encode_text(prompts, prompt, add, parse)
        return prompts.encode_text(prompt, add_special_tokens=add, parse_special_tokens=parse, param="prompt")

    return await served.encode(encode)


async def complete(request: Request, served: Served) -> Response:
    """The endpoint."""
    body = await read_body(request, served.limits)
    check_model(body, served)
    fields = read_fields(body, served)
    prompts = await read_prompts(body, served)
    body.refuse_unknown()
    fitting = [fit_response(served, prompt, fields.max_tokens, "prompt") for prompt in prompts]
    answer = _Answer(served, fields, prompts, fitting)
    if fields.stream:
        return EventStream(answer.chunks(), answer.generation.close)
    try:
        return json_response(await until_gone(request.receive, answer.whole()))
    finally:
        answer.generation.close()


class _Answer:
    """The answer to one request, whole or chunk by chunk."""

    def __init__(self, served: Served, fields: CompletionFields, prompts: list[list[int]], fitting: list[int]) -> None:
        """`fitting`: the most tokens of a response to each prompt."""
        self.served, self.fields, self.prompts, self.fitting = served, fields, prompts, fitting
        name = f"cmpl-{uuid.uuid4().hex}"
        self.head = {"id": name, "object": "text_completion", "created": int(time.time()), "model": served.name}
        self.names = TokenNames(served.tokenizer)
        sequences = len(prompts) * len(fields.asked.seeds)
        self.generation = Generation(served, sequences=sequences, streams=fields.stream, name=name)

    def _start(self) -> None:
        for prompt, most in zip(self.prompts, self.fitting, strict=True):
            self.generation.add(prompt, self.fields.asked, most)

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        self._start()
        async for _ in self.generation.updates():
            pass
        samples, fields = self.generation.samples, self.fields
        scored = await score_samples(self.served, samples, prompts=fields.scored_prompts, others=fields.logprobs or 0)
        return {
            **self.head,
            "choices": [self._choice(sample, scores) for sample, scores in zip(samples, scored, strict=True)],
            "usage": count_usage(self.prompts, samples),
            "system_fingerprint": fingerprint(self.served),
        }

    def _choice(self, sample: Sample, scored: Scored) -> dict[str, Any]:
        fields = self.fields
        choice: dict[str, Any] = {
            "index": sample.index,
            "text": self._echo(sample) + sample.whole_text,
            "logprobs": None,
            "finish_reason": sample.finish,
            "stop_reason": sample.stop_reason,
            "weight_versions": version_spans(self.served, sample),
        }
        if fields.logprobs is not None:
            tokens, places = sample.tokens, list[Any](scored.places)
            if fields.echo:
                assert scored.prompt is not None
                rest = sample.prompt[1:]
                first = alternatives(scored.prompt, 0, rest, None, fields.logprobs, [True] * len(rest))
                tokens, places = sample.prompt + tokens, [None, *first, *places]
            choice["logprobs"] = completion_logprobs(self.names, places, tokens, fields.names_as_ids)
        if fields.prompt_logprobs is not None:
            assert scored.prompt is not None
            choice["prompt_logprobs"] = prompt_logprobs(self.names, sample.prompt, scored.prompt, fields.prompt_logprobs)
        if fields.token_ids:
            choice |= {"token_ids": sample.tokens, "prompt_token_ids": sample.prompt}
        return choice

    def _echo(self, sample: Sample) -> str:
        """The prompt as text, if the answer repeats it."""
        text: str = self.served.tokenizer.decode(sample.prompt, skip_special_tokens=True) if self.fields.echo else ""
        return text

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks."""
        self._start()
        begun: set[int] = set()
        offsets: dict[int, int] = {}
        for sample in self.generation.samples:
            # With max_tokens = 0 a sample has ended already.
            if self.fields.echo or sample.finish is not None:
                yield self._chunk(sample, {"text": self._echo(sample), "logprobs": None, "finish_reason": sample.finish})
        async for update in self.generation.updates():
            choice = self._delta(update, offsets)
            if choice is not None:
                if self.fields.token_ids and update.sample.index not in begun:
                    choice["prompt_token_ids"] = update.sample.prompt
                begun.add(update.sample.index)
                yield self._chunk(update.sample, choice)
        if self.fields.usage:
            usage = count_usage(self.prompts, self.generation.samples)
            yield {**self.head, "choices": [], "usage": usage, "system_fingerprint": fingerprint(self.served)}

    def _chunk(self, sample: Sample, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self.head, "choices": [{"index": sample.index, **choice}]}

    def _delta(self, update: Update, offsets: dict[int, int]) -> dict[str, Any] | None:
        """The choice of a chunk; None if there is nothing to say yet. `offsets`: characters so far, by sample."""
        fields, sample = self.fields, update.sample
        tokens = sample.tokens[update.start :]
        choice: dict[str, Any] = {"text": update.text, "logprobs": None, "finish_reason": sample.finish}
        if fields.logprobs is not None:
            offset = offsets.get(sample.index, 0)
            places = own_only(tokens, sample.logprobs[update.start :])
            choice["logprobs"] = completion_logprobs(self.names, places, tokens, fields.names_as_ids, offset)
            offsets[sample.index] = offset + sum(map(len, choice["logprobs"]["tokens"]))
        if fields.token_ids:
            choice["token_ids"] = tokens
        if sample.finish is not None:
            return choice | {"stop_reason": sample.stop_reason, "weight_versions": version_spans(self.served, sample)}
        silent = not update.text and fields.logprobs is None and not fields.token_ids
        return None if silent else choice
