"""POST /v1/chat/completions: messages in, the next message of the assistant out."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from legato.serve.answers import Scored, count_usage, fingerprint, ignore_usual, read_usage, score_samples, version_spans
from legato.serve.errors import ApiError, whole_answers_only
from legato.serve.generation import Asked, Generation, Sample, Update, fit_response, read_asked, read_max_tokens
from legato.serve.http import EventStream, json_response, read_body, until_gone
from legato.serve.logprobs import TokenNames, chat_logprobs, own_only, prompt_logprobs
from legato.serve.models import check_model
from legato.serve.prompts import read_messages, read_template_arguments
from legato.serve.recording import Conversation
from legato.serve.served import Served
from legato.serve.tools import message_of, read_tools
from legato.serve.values import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFields:
    """The fields of a request but for its messages."""

    asked: Asked
    max_tokens: int | None
    logprobs: int | None
    """How many alternatives to each token; None: no log-probs."""
    prompt_logprobs: int | None
    """The same for the prompt."""
    stream: bool
    usage: bool
    """Whether a stream ends with the numbers of tokens."""
    token_ids: bool
    """Whether the answer holds token ids."""
    names_as_ids: bool
    """Whether tokens in log-probs are named by their ids."""
    tools: list[dict[str, Any]]
    """What the model may call; []: the response is text."""


def read_fields(body: Body, served: Served) -> ChatFields:
    """Read and check the fields; ApiError for what this server cannot do."""
    most, stream = served.limits.top_logprobs, body.flag("stream")
    logprobs, others = body.flag("logprobs"), body.integer("top_logprobs", 0, minimum=0, maximum=most)
    if others and not logprobs:
        raise ApiError(400, "expected top_logprobs only with logprobs = true", param="top_logprobs")
    body.only("functions", [], advice="send them as tools")
    body.only("function_call", "none", "auto", advice="send functions as tools")
    body.only("tool_choice", "none", "auto", advice="the model decides whether it calls a tool")
    tools = [] if body.raw("tool_choice") == "none" else read_tools(body)
    body.ignore("tools")
    body.only("modalities", ["text"], advice="responses are texts")
    for name in ("audio", "prediction", "web_search_options"):
        body.only(name, advice="responses are texts sampled from the model")
    body.only("reasoning_effort", advice="give the variable that the template reads in chat_template_kwargs")
    body.only("echo", False, advice="expected false or nothing")
    body.only("add_generation_prompt", True, advice="expected true or nothing")
    body.only("continue_final_message", False, advice="expected false or nothing; /v1/completions continues texts")
    body.only("add_special_tokens", False, advice="the chat template writes them")
    body.only("chat_template", advice="the template of the model is used; chat_template_kwargs gives it variables")
    body.only("documents", [], advice="put their texts into messages")
    body.ignore("parallel_tool_calls", "include_reasoning", "verbosity")
    ignore_usual(body)
    fields = ChatFields(
        asked=read_asked(body, served),
        max_tokens=read_max_tokens(body, ["max_completion_tokens", "max_tokens"], None),
        logprobs=others if logprobs else None,
        prompt_logprobs=body.integer("prompt_logprobs", None, minimum=0, maximum=most),
        stream=stream,
        usage=read_usage(body, stream),
        token_ids=body.flag("return_token_ids"),
        names_as_ids=body.flag("return_tokens_as_token_ids"),
        tools=tools,
    )
    if stream and (fields.prompt_logprobs is not None or fields.logprobs):
        raise whole_answers_only("top_logprobs = 0")
    return fields


async def chat(request: Request, served: Served) -> Response:
    """The endpoint."""
    body = await read_body(request, served.limits)
    check_model(body, served)
    fields = read_fields(body, served)
    messages, arguments = read_messages(body, served.limits.messages), read_template_arguments(body)
    body.refuse_unknown()
    served.check_length("".join(message["content"] for message in messages), "messages")

    conversation: Conversation | None = None
    if served.recording is not None:
        record = served.recording.converse
        conversation = await served.encode(lambda prompts: record(prompts, messages, arguments, fields.tools))
        prompt = conversation.prompt
    else:
        prompt = await served.encode(lambda prompts: prompts.encode_chat(messages, arguments, fields.tools))
    max_tokens = fit_response(served, prompt, fields.max_tokens, "messages")
    answer = _Answer(served, fields, prompt, max_tokens, conversation)
    if fields.stream:
        return EventStream(answer.chunks(), answer.generation.close)
    try:
        return json_response(await until_gone(request.receive, answer.whole()))
    finally:
        answer.generation.close()


class _Answer:
    """The answer to one request, whole or chunk by chunk."""

    def __init__(
        self,
        served: Served,
        fields: ChatFields,
        prompt: list[int],
        max_tokens: int,
        conversation: Conversation | None = None,
    ) -> None:
        self.served, self.fields, self.prompt, self.max_tokens = served, fields, prompt, max_tokens
        self.conversation = conversation
        """Of an episode that is recorded; None: nobody records."""
        self.name, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self.names = TokenNames(served.tokenizer)
        sequences = len(fields.asked.seeds)
        self.generation = Generation(served, sequences=sequences, streams=fields.stream, name=self.name)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.served.name}

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        self.generation.add(self.prompt, self.fields.asked, self.max_tokens)
        async for _ in self.generation.updates():
            pass
        samples, fields = self.generation.samples, self.fields
        scored = await score_samples(self.served, samples, prompts=fields.prompt_logprobs, others=fields.logprobs or 0)
        answer = {
            **self._head("chat.completion"),
            "choices": [self._choice(sample, scores) for sample, scores in zip(samples, scored, strict=True)],
            "usage": count_usage([self.prompt], samples),
            "system_fingerprint": fingerprint(self.served),
        }
        if fields.prompt_logprobs is not None:
            assert scored[0].prompt is not None
            answer["prompt_logprobs"] = prompt_logprobs(self.names, self.prompt, scored[0].prompt, fields.prompt_logprobs)
        if fields.token_ids:
            answer["prompt_token_ids"] = self.prompt
        return answer

    def _choice(self, sample: Sample, scored: Scored) -> dict[str, Any]:
        fields = self.fields
        message = self._message(sample)
        choice: dict[str, Any] = {
            "index": sample.index,
            "message": message,
            "logprobs": None,
            "finish_reason": "tool_calls" if "tool_calls" in message else sample.finish,
            "stop_reason": sample.stop_reason,
            "weight_versions": version_spans(self.served, sample),
        }
        if fields.logprobs is not None:
            choice["logprobs"] = chat_logprobs(self.names, scored.places, fields.logprobs, fields.names_as_ids)
        if fields.token_ids:
            choice["token_ids"] = sample.tokens
        return choice

    def _message(self, sample: Sample) -> dict[str, Any]:
        """The message of a response, with the calls that it makes if it may call tools."""
        turn = self.served.read_turn(sample.tokens, sample.whole_text, by_text=isinstance(sample.stop_reason, str))
        message = message_of(turn, None if self.served.has_channels else sample.whole_text, self.fields.tools)
        if self.conversation is not None and self.served.recording is not None:
            self.served.recording.answered(self.conversation, message, turn)
        return message

    async def _whole_in_chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in one chunk for each choice: calls are read from whole responses."""
        whole = await self.whole()
        head = self._head("chat.completion.chunk")
        for choice in whole["choices"]:
            delta = choice.pop("message")
            for place, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = place
            finish = choice.pop("finish_reason")
            yield {**head, "choices": [{**choice, "delta": delta, "finish_reason": None}]}
            yield {**head, "choices": [{"index": choice["index"], "delta": {}, "finish_reason": finish}]}
        if self.fields.usage:
            yield {**head, "choices": [], "usage": whole["usage"], "system_fingerprint": whole["system_fingerprint"]}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks. The first of each choice names the role."""
        if self.fields.tools or self.conversation is not None:
            async for chunk in self._whole_in_chunks():
                yield chunk
            return
        self.generation.add(self.prompt, self.fields.asked, self.max_tokens)
        head = self._head("chat.completion.chunk")
        for sample in self.generation.samples:
            first = {"index": sample.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            more = {"prompt_token_ids": self.prompt} if self.fields.token_ids and sample.index == 0 else {}
            yield {**head, "choices": [{**first, "logprobs": None}], **more}
        async for update in self.generation.updates():
            choice = self._delta(update)
            if choice is not None:
                yield {**head, "choices": [{"index": update.sample.index, **choice}]}
        if self.fields.usage:
            usage = count_usage([self.prompt], self.generation.samples)
            yield {**head, "choices": [], "usage": usage, "system_fingerprint": fingerprint(self.served)}

    def _delta(self, update: Update) -> dict[str, Any] | None:
        """The choice of a chunk; None if there is nothing to say yet."""
        fields, sample = self.fields, update.sample
        tokens = sample.tokens[update.start :]
        delta = {"content": update.text} if update.text else {}
        choice: dict[str, Any] = {"delta": delta, "logprobs": None, "finish_reason": sample.finish}
        if fields.logprobs is not None:
            places = own_only(tokens, sample.logprobs[update.start :])
            choice["logprobs"] = chat_logprobs(self.names, places, 0, fields.names_as_ids)
        if fields.token_ids:
            choice["token_ids"] = tokens
        if sample.finish is not None:
            return choice | {"stop_reason": sample.stop_reason, "weight_versions": version_spans(self.served, sample)}
        silent = not update.text and fields.logprobs is None and not fields.token_ids
        return None if silent else choice
