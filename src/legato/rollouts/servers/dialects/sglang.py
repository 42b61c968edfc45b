"""SGLang 0.5.23, written from the request schema of its package. It was never run against a real server of SGLang.

    python -m sglang.launch_server --model-path FOLDER --sampling-backend pytorch

Log-probs of sampled tokens are at the temperature of the request and before truncation, as here; the kept mass is not
reported, so a run may not truncate. Adapters are merged.
"""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from legato.rollouts.servers.errors import BadReplyError, FailedError, ServerError
from legato.rollouts.servers.http import HttpClient

LOWEST = (0, 5, 11)
PATH = "/generate"


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
        context = info.get("context_length") or info.get("max_req_input_len")
        vocabulary = info.get("vocab_size")
        return ServerFacts(
            software=f"SGLang {version}",
            model=str(model.get("model_path")),
            context_tokens=context if isinstance(context, int) else None,
            vocabulary=vocabulary if isinstance(vocabulary, int) else None,
        )

    def weights_name(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> str | None:
        name = client.get("/model_info", seconds=seconds).get("weight_version")
        return name if isinstance(name, str) else None

    def sample(self, client: HttpClient, ask: Ask, reading: Reading, seconds: float) -> Response:
        return _read_response(client.post(PATH, request_body(ask), seconds=seconds), ask, reading)

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
        return read_scores([_entry(entry, token) for entry, token in zip(entries, tokens, strict=True)][1:], len(tokens) - 1)

    def load(self, client: HttpClient, folder: Path, name: str, *, adapters: bool, seconds: float) -> None:
        client.tell("POST", "/pause_generation", {"mode": "retract"}, seconds=seconds)
        try:
            body = {"model_path": str(folder), "weight_version": name, "flush_cache": True, "abort_all_requests": False}
            reply = client.post("/update_weights_from_disk", body, seconds=seconds)
            if reply.get("success") is not True:
                raise FailedError(200, f"weights were not loaded: {str(reply.get('message'))[:300]}")
        except ServerError:
            # A server that stays paused would answer nobody.
            client.tell("POST", "/continue_generation", {}, seconds=CHECK_SECONDS)
            raise
        client.tell("POST", "/continue_generation", {}, seconds=seconds)

    def rename(self, client: HttpClient, name: str, seconds: float) -> None:
        body = {"new_version": name, "abort_all_requests": False}
        client.tell("POST", "/update_weight_version", body, seconds=seconds)

    def command(self, plan: StartPlan) -> tuple[list[str], Mapping[str, str]]:
        words = [
            *(plan.python, "-m", "sglang.launch_server", "--model-path", str(plan.model)),
            *("--host", "127.0.0.1", "--port", str(plan.port), "--dtype", plan.dtype),
            *("--context-length", str(plan.context_tokens), "--api-key", plan.key),
        ]
        return [*words, *plan.arguments], {}


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


def _entry(entry: Any, token: int) -> Any:
    """The log-prob in [log-prob, token id, text] of a token."""
    if not isinstance(entry, list | tuple) or len(entry) < 2 or entry[1] != token:
        raise BadReplyError(f"expected the log-prob of token {token}, got {str(entry)[:100]}")
    return entry[0]


def _read_response(reply: Mapping[str, Any], ask: Ask, reading: Reading) -> Response:
    meta = _meta(reply, ask.name)
    tokens = read_tokens(reply.get("output_ids"), ask, reading.vocabulary)
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(tokens):
        count = len(entries) if isinstance(entries, list) else "none"
        raise BadReplyError(f"expected {len(tokens)} log-probs, got {count}")
    logprobs = [read_logprob(_entry(entry, token)) for entry, token in zip(entries, tokens, strict=True)]
    reason = meta.get("finish_reason")
    stop: StopReason = read_stop(reason.get("type") if isinstance(reason, dict) else reason, tokens, ask.limits)
    spans = meta.get("weight_versions")
    if spans is None:
        spans = [{"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}]
    versions = read_versions(spans, len(tokens), reading.version_of)
    return make_response(tokens, logprobs, stop, ask, reading.tokenizer, versions, None)
