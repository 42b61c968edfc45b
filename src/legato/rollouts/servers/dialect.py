"""The words of /inference/v1/generate: a prompt and a seed become a request, the reply becomes a checked response.

vLLM 0.28 and later and `legato serve` speak them. A reply is checked before it is believed: as many log-probs as tokens, all
of them finite, ids of the vocabulary, an end that fits the tokens, and a version for every token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from legato.core.rollout import StopReason
from legato.rollouts.engine import Limits, Response
from legato.rollouts.sampling import Sampling
from legato.rollouts.servers.errors import BadReplyError

PATH = "/inference/v1/generate"
ABOVE_ZERO = 1e-3
"""How far above 0 a log-prob may be, from rounding in 16 bits; it is then taken for 0."""
NO_LOGPROB = -9999.0
"""What a server writes for a log-prob that it does not have."""
UNKNOWN_VERSION = -1
"""The version of tokens whose server names its weights otherwise than by a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One response to ask for."""

    prompt: Sequence[int]
    seed: int
    sampling: Sampling
    limits: Limits
    name: str
    """An id that no other request has. The server repeats it, so that a reply to another request is noticed."""

    def body(self) -> dict[str, Any]:
        """The request."""
        parameters: dict[str, Any] = {
            "n": 1,
            "seed": self.seed,
            "max_tokens": self.limits.max_response_tokens,
            "temperature": self.sampling.temperature,
            "logprobs": 0,
            "stop_token_ids": list(self.limits.end_tokens),
            # The limits name every token that ends a response: those of the server's own configuration do not count.
            "ignore_eos": True,
        }
        if self.sampling.top_p < 1.0:
            parameters["top_p"] = self.sampling.top_p
        if self.sampling.top_k > 0:
            parameters["top_k"] = self.sampling.top_k
        if self.sampling.min_p > 0.0:
            parameters["min_p"] = self.sampling.min_p
        if self.limits.stop:
            parameters["stop"] = list(self.limits.stop)
        else:
            parameters["detokenize"] = False
        return {"request_id": self.name, "token_ids": list(self.prompt), "sampling_params": parameters}


def version_number(name: Any) -> int:
    """The version that a name stands for: its number, or UNKNOWN_VERSION."""
    text = str(name)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else UNKNOWN_VERSION


def read_reply(
    reply: Mapping[str, Any],
    ask: Ask,
    tokenizer: Any,
    vocabulary: int,
    version_of: Callable[[Any], int] = version_number,
    *,
    kept: bool = True,
) -> Response:
    """The response in a reply; BadReplyError if it cannot be one to what was asked.

    `version_of` reads the server's names of weights. `kept`: whether the server says how much truncation kept.
    """
    # vLLM puts a word before the id.
    if not str(reply.get("request_id")).endswith(ask.name):
        raise BadReplyError(f"expected the reply to request {ask.name}, got that to {str(reply.get('request_id'))[:100]}")
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadReplyError(f"expected one choice, got {str(choices)[:200]}")
    choice = choices[0]
    tokens = read_tokens(choice.get("token_ids"), ask, vocabulary)
    logprobs = _read_logprobs(choice.get("logprobs"), tokens)
    stop = read_stop(choice.get("finish_reason"), tokens, ask.limits)
    return make_response(
        tokens,
        logprobs,
        stop,
        ask,
        tokenizer,
        read_versions(choice.get("weight_versions"), len(tokens), version_of),
        _read_kept(choice.get("kept_logmass"), tokens, ask.sampling) if kept else None,
    )


def make_response(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    stop: StopReason,
    ask: Ask,
    tokenizer: Any,
    version: Tensor,
    kept_logmass: Tensor | None,
) -> Response:
    """A response of checked tokens. Its text is decoded here; the tokens are those of the server."""
    visible = tokens[: len(tokens) - (stop is StopReason.END_TOKEN)]
    text: str = tokenizer.decode(visible, skip_special_tokens=True)
    if stop is StopReason.STOP_STRING:
        before = ask.limits.before_stop(text)
        if before is None:
            raise BadReplyError(f"expected a stop string or an end token at the end of {text[-80:]!r}, got neither")
        text = before
    return Response(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        kept_logmass=kept_logmass,
        text=text,
        stop=stop,
        version=version,
    )


def read_tokens(values: Any, ask: Ask, vocabulary: int) -> list[int]:
    """Token ids, checked against what was asked."""
    most = ask.limits.max_response_tokens
    if not isinstance(values, list) or not 1 <= len(values) <= most:
        count = len(values) if isinstance(values, list) else "none"
        raise BadReplyError(f"expected 1 to {most} tokens, got {count}")
    for value in values:
        if type(value) is not int or not 0 <= value < vocabulary:
            raise BadReplyError(f"expected token ids below {vocabulary}, got {value!r}")
    ends = set(ask.limits.end_tokens)
    if any(value in ends for value in values[:-1]):
        raise BadReplyError("expected an end token at the end only, got one before it")
    return values


def _read_logprobs(table: Any, tokens: Sequence[int]) -> list[float]:
    content = table.get("content") if isinstance(table, dict) else None
    if not isinstance(content, list) or len(content) != len(tokens):
        count = len(content) if isinstance(content, list) else "none"
        raise BadReplyError(f"expected {len(tokens)} log-probs, got {count}")
    logprobs = []
    for entry, token in zip(content, tokens, strict=True):
        value = entry.get("logprob") if isinstance(entry, dict) else None
        known = entry.get("token_id", token) if isinstance(entry, dict) else token
        if known != token:
            raise BadReplyError(f"expected the log-prob of token {token}, got that of {known!r}")
        logprobs.append(read_logprob(value))
    return logprobs


def read_logprob(value: Any) -> float:
    """The log-prob of a token, checked."""
    bad = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    if bad or value > ABOVE_ZERO or value == NO_LOGPROB:
        raise BadReplyError(f"expected a log-prob of at most 0, got {value!r}")
    return min(0.0, float(value))


def _read_kept(values: Any, tokens: Sequence[int], sampling: Sampling) -> Tensor | None:
    if not sampling.truncates:
        return None
    if not isinstance(values, list) or len(values) != len(tokens):
        raise BadReplyError("expected the mass that top-p, top-k and min-p kept (kept_logmass), got none")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadReplyError(f"expected a finite log of kept mass, got {value!r}")
    return torch.tensor(values, dtype=torch.float32)


def read_stop(reason: Any, tokens: Sequence[int], limits: Limits) -> StopReason:
    """Why a response ended, from a server's "stop" or "length"."""
    ended = tokens[-1] in limits.end_tokens
    if reason == "stop":
        return StopReason.END_TOKEN if ended else StopReason.STOP_STRING
    if reason == "length" and len(tokens) == limits.max_response_tokens:
        return StopReason.END_TOKEN if ended else StopReason.LENGTH
    raise BadReplyError(f"expected a response that ended, got {len(tokens)} tokens and finish_reason {reason!r}")


def read_versions(spans: Any, count: int, version_of: Callable[[Any], int] = version_number) -> Tensor:
    """[count]: the version of each token from spans {version, start, end}; BadReplyError unless they cover all tokens."""
    versions = torch.full((count,), UNKNOWN_VERSION, dtype=torch.int64)
    if spans is None:
        return versions
    place = 0
    for span in spans if isinstance(spans, list) else [None]:
        fields = span if isinstance(span, dict) else {}
        end = fields.get("end")
        if fields.get("start") != place or not isinstance(end, int) or not place < end <= count:
            raise BadReplyError(f"expected versions for {count} tokens, got {str(spans)[:200]}")
        versions[place:end] = version_of(fields.get("version"))
        place = end
    if place != count:
        raise BadReplyError(f"expected versions for {count} tokens, got {str(spans)[:200]}")
    return versions
