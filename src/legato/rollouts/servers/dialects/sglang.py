"""SGLang 0.5.11 and later, written from the request schema of 0.5.23; 0.5.17 was tried on a GPU (docs/engines.md).

    python -m sglang.launch_server --model-path FOLDER --sampling-backend pytorch

Log-probs of sampled tokens are at the temperature of the request and before truncation, as here; the kept mass is not
reported, so a run may not truncate. Adapters are merged. Seeds count only with --enable-deterministic-inference.

A publish ends what is being sampled (`load`), and each request is continued: its prompt and the tokens so far are sent anew.
SGLang could instead keep the requests and compute their tokens anew (mode "retract"), but then it cannot empty its cache of
prefixes, which holds keys and values of the old weights (0.5.17 crashes if it is asked to); nor does it say which tokens are
of which weights. A request that was continued has a version for every token.
"""

import time
import uuid
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.errors import InputError
from legato.rollouts.engine import Response
from legato.rollouts.servers.dialect import (
    Ask,
    make_response,
    read_logprob,
    read_stop,
    read_tokens,
    read_versions,
)
from legato.rollouts.servers.dialects.base import (
    CHECK_SECONDS,
    Dialect,
    Reading,
    ServerFacts,
    StartPlan,
    check_version,
    read_scores,
)
from legato.rollouts.servers.errors import BadReplyError, FailedError, RefusedError, ServerError
from legato.rollouts.servers.http import HttpClient

LOWEST = (0, 5, 11)
PATH = "/generate"
SPARE = 6
"""Tokens of its context that SGLang lets no request fill: a prompt must end more than six before the end of the context, and
a response that is continued becomes part of a prompt. Without a publish two would do."""
ABORTED = "abort"
"""Why a response ended that a publish ended."""
ENDED = (HTTPStatus.BAD_REQUEST, 499)
"""The answers to a request that had not begun when a publish ended all requests: SGLang ends them again and again until none
is left, so that a request that is continued at once waits for the end of the publish and is then refused, once."""
_BETWEEN_ASKS = 0.02
"""Seconds before a request is continued; the server holds it back until the publish is over."""


class Sglang(Dialect):
    """A server of SGLang."""

    name = "sglang"
    option = "python -m sglang.launch_server --model-path FOLDER"

    def facts(self, client: HttpClient, seconds: float) -> ServerFacts:
        info = client.get("/server_info", seconds=seconds)
        if "version" not in info:
            raise InputError(f"expected SGLang at {client.url}, got another server (rollouts.engine = 'sglang')")
        version = check_version("SGLang", client.url, info["version"], LOWEST)
        model = client.get("/model_info", seconds=seconds)
        context, most_input = info.get("context_length"), info.get("max_req_input_len")
        usable = context - SPARE if isinstance(context, int) else most_input
        vocabulary = info.get("vocab_size")
        return ServerFacts(
            software=f"SGLang {version}",
            model=str(model.get("model_path")),
            context_tokens=usable if isinstance(usable, int) else None,
            vocabulary=vocabulary if isinstance(vocabulary, int) else None,
        )

    def check_alive(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> None:
        # /health generates a token: it takes a second, and waits as long as the server is paused. This asks the scheduler.
        client.tell("GET", "/server_info", seconds=seconds)

    def weights_name(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> str | None:
        name = client.get("/model_info", seconds=seconds).get("weight_version")
        return name if isinstance(name, str) else None

    def sample(self, client: HttpClient, ask: Ask, reading: Reading, seconds: float) -> Response:
        ends, sampled = time.monotonic() + seconds, _Sampled()
        while True:
            rest = sampled.rest_of(ask)
            try:
                reply = client.post(PATH, request_body(rest), seconds=ends - time.monotonic())
            except RefusedError as error:
                if error.status not in ENDED or "was aborted" not in error.message:
                    raise
                time.sleep(_BETWEEN_ASKS)
                continue
            reason = sampled.add(reply, rest, reading)
            aborted = reason == ABORTED
            stop = sampled.found_stop(ask, reading.tokenizer) if aborted else read_stop(reason, sampled.tokens, ask.limits)
            if stop is not None:
                return sampled.response(stop, ask, reading.tokenizer)
            time.sleep(_BETWEEN_ASKS)

    def score(self, client: HttpClient, tokens: Sequence[int], name: str, seconds: float) -> list[float]:
        body = {
            "rid": name,
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        entries = _meta(client.post(PATH, body, seconds=seconds), name).get("input_token_logprobs")
        if not isinstance(entries, list) or len(entries) != len(tokens):
            raise BadReplyError(f"expected input_token_logprobs of {len(tokens)} tokens, got {str(entries)[:100]}")
        # Of a prompt, SGLang calls the last token of the vocabulary 0 (seen in 0.5.17). Its log-prob is right.
        scores = [_entry(entry, token, 0) for entry, token in zip(entries, tokens, strict=True)]
        return read_scores(scores[1:], len(tokens) - 1)

    def load(self, client: HttpClient, folder: Path, name: str, *, adapters: bool, seconds: float) -> None:
        client.tell("POST", "/pause_generation", {"mode": "abort"}, seconds=seconds)
        try:
            body = {"model_path": str(folder), "weight_version": name, "flush_cache": True, "abort_all_requests": False}
            reply = client.post("/update_weights_from_disk", body, seconds=seconds)
            if reply.get("success") is not True:
                raise FailedError(200, f"weights were not loaded: {str(reply.get('message'))[:300]}")
        except ServerError:
            # A server that stays paused would answer nobody.
            self.resume(client)
            raise
        self.resume(client, seconds)

    def resume(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> None:
        client.tell("POST", "/continue_generation", {}, seconds=seconds)

    def rename(self, client: HttpClient, name: str, seconds: float) -> None:
        body = {"new_version": name, "abort_all_requests": False}
        client.tell("POST", "/update_weight_version", body, seconds=seconds)

    def command(self, plan: StartPlan) -> tuple[list[str], Mapping[str, str]]:
        words = [
            *(plan.python, "-m", "sglang.launch_server", "--model-path", str(plan.model)),
            *("--host", "127.0.0.1", "--port", str(plan.port), "--dtype", plan.dtype),
            *("--context-length", str(plan.context_tokens + SPARE), "--api-key", plan.key),
        ]
        # The spare tokens may be beyond the context of the model; no request reaches them.
        return [*words, *plan.arguments], {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def request_body(ask: Ask) -> dict[str, Any]:
    """The request for a response."""
    parameters: dict[str, Any] = {
        "max_new_tokens": ask.limits.max_response_tokens,
        "temperature": ask.sampling.temperature,
        "top_p": ask.sampling.top_p,
        "top_k": ask.sampling.top_k or -1,
        "min_p": ask.sampling.min_p,
        "n": 1,
        "sampling_seed": ask.seed,
        "stop_token_ids": list(ask.limits.end_tokens),
        "stop": list(ask.limits.stop),
        "no_stop_trim": True,
        # In SGLang this switches stop_token_ids off too.
        "ignore_eos": not ask.limits.end_tokens,
    }
    return {
        "rid": ask.name or uuid.uuid4().hex,
        "input_ids": list(ask.prompt),
        "sampling_params": parameters,
        "return_logprob": True,
    }


def _meta(reply: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    meta = reply.get("meta_info")
    if not isinstance(meta, dict) or meta.get("id") != name:
        got = meta.get("id") if isinstance(meta, dict) else meta
        raise BadReplyError(f"expected the reply to request {name}, got that to {str(got)[:100]}")
    return meta


def _entry(entry: Any, token: int, *aliases: int) -> Any:
    """The log-prob in [log-prob, token id, text] of a token, which may also be called by one of its aliases."""
    if not isinstance(entry, list | tuple) or len(entry) < 2 or entry[1] not in (token, *aliases):
        raise BadReplyError(f"expected the log-prob of token {token}, got {str(entry)[:100]}")
    return entry[0]


@dataclass(slots=True)
class _Sampled:
    """What was sampled for a request so far, in one reply or, where a publish came between, in several."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Tensor] = field(default_factory=list)

    def rest_of(self, ask: Ask) -> Ask:
        """The request for what is missing, under a name of its own."""
        if not self.tokens:
            return replace(ask, name=uuid.uuid4().hex)
        limits = replace(ask.limits, max_response_tokens=ask.limits.max_response_tokens - len(self.tokens))
        return replace(ask, prompt=[*ask.prompt, *self.tokens], limits=limits, name=uuid.uuid4().hex)

    def add(self, reply: Mapping[str, Any], ask: Ask, reading: Reading) -> Any:
        """Add the tokens of a reply; returns why it ended."""
        meta = _meta(reply, ask.name)
        reason = meta.get("finish_reason")
        reason = reason.get("type") if isinstance(reason, dict) else reason
        if reason == ABORTED and not reply.get("output_ids"):
            return reason
        tokens = read_tokens(reply.get("output_ids"), ask, reading.vocabulary)
        entries = meta.get("output_token_logprobs")
        if not isinstance(entries, list) or len(entries) != len(tokens):
            count = len(entries) if isinstance(entries, list) else "none"
            raise BadReplyError(f"expected {len(tokens)} log-probs, got {count}")
        self.logprobs += [read_logprob(_entry(entry, token)) for entry, token in zip(entries, tokens, strict=True)]
        spans = meta.get("weight_versions")
        if spans is None:
            spans = [{"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}]
        self.versions.append(read_versions(spans, len(tokens), reading.version_of))
        self.tokens += tokens
        return reason

    def found_stop(self, ask: Ask, tokenizer: Any) -> StopReason | None:
        """Why the response is complete though its last reply was ended by a publish; None if tokens are missing."""
        if self.tokens and self.tokens[-1] in ask.limits.end_tokens:
            return StopReason.END_TOKEN
        if ask.limits.stop and ask.limits.before_stop(tokenizer.decode(self.tokens, skip_special_tokens=True)) is not None:
            return StopReason.STOP_STRING
        return StopReason.LENGTH if len(self.tokens) >= ask.limits.max_response_tokens else None

    def response(self, stop: StopReason, ask: Ask, tokenizer: Any) -> Response:
        count = len(self.tokens)
        if ask.limits.stop and len(self.versions) > 1:
            # The server looks for stop strings in the tokens of one request: it misses those that a publish cut in two.
            ends = range(len(self.versions[0]) + 1, count + (stop is not StopReason.END_TOKEN))

            def has_stop(end: int) -> bool:
                text = tokenizer.decode(self.tokens[:end], skip_special_tokens=True)
                return ask.limits.before_stop(text) is not None

            # A text keeps its stop string as it grows. Decoding every beginning would take seconds for a long response.
            place = bisect_left(ends, True, key=has_stop)
            if place < len(ends):
                count, stop = ends[place], StopReason.STOP_STRING
        versions = torch.cat(self.versions)[:count]
        return make_response(self.tokens[:count], self.logprobs[:count], stop, ask, tokenizer, versions, None)
