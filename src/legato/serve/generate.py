"""POST /inference/v1/generate: token ids in, token ids and log-probs out, in the words of vLLM 0.32.

{"token_ids": [...], "sampling_params": {"seed": 7, "max_tokens": 64, "logprobs": 0, "temperature": 1.0}}
"""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from legato.serve.answers import Scored, count_usage, ignore_usual, read_usage, score_samples, version_spans
from legato.serve.errors import ApiError, whole_answers_only
from legato.serve.generation import Asked, Generation, Sample, Update, fit_response, read_asked, read_max_tokens
from legato.serve.http import EventStream, json_response, read_body, until_gone
from legato.serve.logprobs import (
    Fragment,
    TokenNames,
    generate_logprobs,
    generate_own_logprobs,
    json_logprob,
    prompt_logprobs,
)
from legato.serve.models import check_model
from legato.serve.served import Served
from legato.serve.values import Body, token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFields:
    """The fields of a request."""

    prompt: list[int]
    asked: Asked
    max_tokens: int
    logprobs: int | None
    """How many tokens are listed in each place, the sampled one among them; None: no log-probs."""
    prompt_logprobs: int | None
    """How many alternatives to each prompt token; None: no scores of the prompt."""
    stream: bool
    usage: bool
    """Whether a stream ends with the numbers of tokens."""
    prompt_ids: bool
    """Whether the answer repeats the prompt."""
    text: bool
    """Whether the answer holds texts."""
    name: str

    @property
    def others(self) -> int:
        """How many alternatives to the sampled token are needed."""
        return max(0, (self.logprobs or 0) - 1)


def read_fields(body: Body, served: Served) -> GenerateFields:
    """Read and check the fields; ApiError for what this server cannot do."""
    most, stream = served.limits.top_logprobs, body.flag("stream")
    prompt = token_ids(body.items("token_ids", most=served.limits.context_tokens), served.vocabulary, "token_ids")
    if not prompt:
        raise ApiError(400, "expected at least one token id, got none (token_ids)", param="token_ids")
    for name in ("features", "content_parts", "reasoning_ended", "reasoning_parser_kwargs", "token_offsets"):
        body.only(name, advice="prompts are token ids")
    mode = body.text("output_mode", "tokens")
    if mode not in ("tokens", "text"):
        raise ApiError(400, f"expected 'tokens' or 'text', got {mode!r} (output_mode)", param="output_mode")
    # vLLM requires the table; an empty one has its defaults.
    sampling = Body(body.table("sampling_params"), "sampling_params.")
    name = body.text("request_id", longest=200) or uuid.uuid4().hex
    ignore_usual(body)
    wanted = read_max_tokens(sampling, ["max_tokens"], None)
    fields = GenerateFields(
        prompt=prompt,
        asked=read_asked(sampling, served),
        max_tokens=fit_response(served, prompt, wanted, "token_ids"),
        logprobs=sampling.integer("logprobs", None, minimum=0, maximum=most),
        prompt_logprobs=sampling.integer("prompt_logprobs", None, minimum=0, maximum=most),
        stream=stream,
        usage=read_usage(body, stream),
        prompt_ids=body.flag("return_token_ids"),
        text=mode == "text",
        name=name,
    )
    sampling.ignore("skip_clone", "extra_args", "watermarking", "routed_experts_prompt_start")
    sampling.refuse_unknown()
    if stream and (fields.prompt_logprobs is not None or fields.others):
        raise whole_answers_only("logprobs = 1")
    return fields


async def generate(request: Request, served: Served) -> Response:
    """The endpoint."""
    body = await read_body(request, served.limits)
    check_model(body, served)
    fields = read_fields(body, served)
    body.refuse_unknown()
    answer = _Answer(served, fields)
    if fields.stream:
        return EventStream(answer.chunks(), answer.generation.close)
    try:
        return json_response(await until_gone(request.receive, answer.whole()))
    finally:
        answer.generation.close()


class _Answer:
    """The answer to one request, whole or chunk by chunk."""

    def __init__(self, served: Served, fields: GenerateFields) -> None:
        self.served, self.fields = served, fields
        self.generation = Generation(
            served, sequences=len(fields.asked.seeds), streams=fields.stream, name=fields.name, texts=fields.text
        )

    def _head(self) -> dict[str, Any]:
        return {"request_id": self.fields.name, "output_mode": "text" if self.fields.text else "tokens"}

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        fields = self.fields
        self.generation.add(fields.prompt, fields.asked, fields.max_tokens)
        async for _ in self.generation.updates():
            pass
        samples = self.generation.samples
        scored = await score_samples(
            self.served, samples, prompts=fields.prompt_logprobs, others=fields.others, wanted=False
        )
        of_prompt = None
        if fields.prompt_logprobs is not None:
            assert scored[0].prompt is not None
            names = TokenNames(self.served.tokenizer)
            of_prompt = prompt_logprobs(names, fields.prompt, scored[0].prompt, fields.prompt_logprobs)
        return {
            **self._head(),
            "model": self.served.name,
            "created": int(time.time()),
            "choices": [self._choice(sample, scores) for sample, scores in zip(samples, scored, strict=True)],
            "usage": count_usage([fields.prompt], samples),
            "prompt_logprobs": of_prompt,
            "prompt_token_ids": fields.prompt if fields.prompt_ids else None,
        }

    def _choice(self, sample: Sample, scored: Scored) -> dict[str, Any]:
        fields = self.fields
        choice: dict[str, Any] = {
            "index": sample.index,
            "token_ids": sample.tokens,
            "logprobs": self._logprobs(sample, scored),
            "finish_reason": sample.finish,
            "stop_reason": sample.stop_reason,
            "weight_versions": version_spans(self.served, sample),
            "routed_experts": None,
        }
        if sample.kept_logmass is not None:
            # The log of the probability that top-p, top-k and min-p left; vLLM has no such field.
            choice["kept_logmass"] = [json_logprob(value) for value in sample.kept_logmass[: len(sample.tokens)]]
        return choice | ({"text": sample.whole_text} if fields.text else {})

    def _logprobs(self, sample: Sample, scored: Scored) -> dict[str, Any] | Fragment | None:
        if self.fields.logprobs is None:
            return None
        if self.fields.others:
            return generate_logprobs(scored.places, self.fields.logprobs)
        return generate_own_logprobs(sample.tokens, sample.logprobs)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks. The last of each choice holds the versions of all its tokens."""
        fields = self.fields
        self.generation.add(fields.prompt, fields.asked, fields.max_tokens)
        first = {"prompt_token_ids": fields.prompt} if fields.prompt_ids else {}
        async for update in self.generation.updates():
            yield {**self._head(), "choices": [self._delta(update)], **first}
            first = {}
        if fields.usage:
            yield {**self._head(), "choices": [], "usage": count_usage([fields.prompt], self.generation.samples)}

    def _delta(self, update: Update) -> dict[str, Any]:
        fields, sample = self.fields, update.sample
        tokens = sample.tokens[update.start :]
        logprobs = None
        if fields.logprobs is not None:
            logprobs = generate_own_logprobs(tokens, sample.logprobs[update.start :])
        ended = sample.finish is not None
        choice: dict[str, Any] = {
            "index": sample.index,
            "token_ids": tokens,
            "logprobs": logprobs,
            "finish_reason": sample.finish,
            "stop_reason": sample.stop_reason,
            "weight_versions": version_spans(self.served, sample) if ended else None,
        }
        return choice | ({"text": update.text} if fields.text else {})
