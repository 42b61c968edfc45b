"""Log-probs in the shapes of the endpoints, and the names of tokens in them.

All log-probs of sampled tokens are of softmax(z / temperature), before top-p, top-k and min-p, at the temperature of the
request (at 1 if it is 0): the distribution that training needs. Log-probs of prompt tokens are at temperature 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson

from legato.rollouts.scoring import TextScores

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write, as in vLLM."""


def json_logprob(value: float) -> float | None:
    """A log-prob as JSON can write it: NaN becomes null, minus infinity LOWEST."""
    if math.isnan(value):
        return None
    return max(value, LOWEST)


class TokenNames:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._names: dict[tuple[int, bool], tuple[str, list[int]]] = {}

    def name(self, token: int, as_id: bool) -> tuple[str, list[int]]:
        """The text of a token, or `token_id:5` with `as_id`, and its bytes in UTF-8."""
        key = (token, as_id)
        if key not in self._names:
            text: str = self.tokenizer.decode([token], skip_special_tokens=False)
            data = self._bytes(token) if "\ufffd" in text else list(text.encode())
            self._names[key] = (f"token_id:{token}" if as_id else text, data)
        return self._names[key]

    def _bytes(self, token: int) -> list[int]:
        """The bytes of a token that is no whole character: by the byte alphabet of BPE, or written as <0xE2>."""
        piece = str(self.tokenizer.convert_ids_to_tokens(token))
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return [int(piece[3:5], 16)]
        alphabet = _byte_alphabet()
        if all(character in alphabet for character in piece):
            return [alphabet[character] for character in piece]
        return list(piece.encode())


@cache
def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE: printable ones for themselves, the others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that might stand in a place."""

    token: int
    logprob: float
    rank: int | None


def own_only(tokens: Sequence[int], logprobs: Sequence[float]) -> list[list[Alternative]]:
    """For each place the token that stands there, and no other."""
    return [[Alternative(token, logprob, None)] for token, logprob in zip(tokens, logprobs, strict=True)]


def alternatives(
    scores: TextScores,
    start: int,
    tokens: Sequence[int],
    logprobs: Sequence[float] | None,
    count: int,
    known: Sequence[bool],
) -> list[list[Alternative]]:
    """For each place its own token first, then the `count` likeliest others, likeliest first.

    `scores` are of a text whose scored token `start` is the first of `tokens`. `logprobs` are what the engine reported for
    them, None: take those of `scores`. A place that is not `known` was sampled from other weights than were scored: it has
    its own token alone.
    """
    places = []
    for place, token in enumerate(tokens):
        scored = start + place
        own = float(scores.logprobs[scored]) if logprobs is None else logprobs[place]
        listed = [Alternative(token, own, int(scores.ranks[scored]) if known[place] else None)]
        if known[place]:
            top = zip(scores.top[scored].tolist(), scores.top_logprobs[scored].tolist(), strict=True)
            for rank, (other, logprob) in enumerate(top, 1):
                if other != token and rank <= count:
                    listed.append(Alternative(other, logprob, rank))
        places.append(listed)
    return places


def chat_logprobs(names: TokenNames, places: Sequence[Sequence[Alternative]], count: int, as_ids: bool) -> dict[str, Any]:
    """The `logprobs` of a chat choice. `count` alternatives each; the own token is among them if it is likely enough."""
    content = []
    for listed in places:
        ranked = sorted(listed, key=lambda each: -each.logprob)[:count]
        content.append(
            {**_chat_entry(names, listed[0], as_ids), "top_logprobs": [_chat_entry(names, each, as_ids) for each in ranked]}
        )
    return {"content": content}


def _chat_entry(names: TokenNames, each: Alternative, as_ids: bool) -> dict[str, Any]:
    name, data = names.name(each.token, as_ids)
    return {"token": name, "logprob": json_logprob(each.logprob), "bytes": data}


def completion_logprobs(
    names: TokenNames, places: Sequence[Sequence[Alternative] | None], tokens: Sequence[int], as_ids: bool, offset: int = 0
) -> dict[str, Any]:
    """The `logprobs` of a completion choice; None for a place that nothing predicts. `offset`: characters before it."""
    texts, own, top, offsets = [], [], [], []
    for token, listed in zip(tokens, places, strict=True):
        name, _ = names.name(token, as_ids)
        texts.append(name)
        offsets.append(offset)
        offset += len(name)
        own.append(None if listed is None else json_logprob(listed[0].logprob))
        # Two tokens may have one name; the likelier of them counts.
        ranked = [] if listed is None else sorted(listed, key=lambda each: each.logprob)
        table = {names.name(each.token, as_ids)[0]: json_logprob(each.logprob) for each in ranked}
        top.append(None if listed is None else table)
    return {"tokens": texts, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def generate_logprobs(places: Sequence[Sequence[Alternative]], count: int) -> dict[str, Any]:
    """The `logprobs` of a choice of /inference/v1/generate: token ids, the own token first, then the likeliest.

    As in vLLM 0.32, `top_logprobs` has max(1, count) entries. `token` is for clients of older versions.
    """
    return {
        "content": [
            {
                **_generate_entry(listed[0]),
                "token": f"token_id:{listed[0].token}",
                "top_logprobs": [_generate_entry(each) for each in listed[: max(1, count)]],
            }
            for listed in places
        ]
    }


@dataclass(frozen=True, slots=True)
class Fragment:
    """JSON that is written already (`http.encode`): a dictionary for each token would cost more than all the rest."""

    text: str


def generate_own_logprobs(tokens: Sequence[int], logprobs: Sequence[float]) -> Fragment:
    """`generate_logprobs` of sampled tokens alone."""
    values = _write_numbers(logprobs)
    entries = [
        f'{{"token_id":{token},"logprob":{value},"rank":null,"token":"token_id:{token}",'
        f'"top_logprobs":[{{"token_id":{token},"logprob":{value},"rank":null}}]}}'
        for token, value in zip(tokens, values, strict=True)
    ]
    return Fragment('{"content":[' + ",".join(entries) + "]}")


def _write_numbers(logprobs: Sequence[float]) -> list[str]:
    """Each log-prob as JSON writes it."""
    if math.isfinite(sum(logprobs)) and min(logprobs, default=0.0) >= LOWEST:
        # One call for all of them takes a fraction of the time.
        return orjson.dumps(logprobs).decode()[1:-1].split(",") if logprobs else []
    return ["null" if math.isnan(value) else repr(max(value, LOWEST)) for value in logprobs]


def _generate_entry(each: Alternative) -> dict[str, Any]:
    return {"token_id": each.token, "logprob": json_logprob(each.logprob), "rank": each.rank}


def prompt_logprobs(names: TokenNames, prompt: Sequence[int], scores: TextScores, count: int) -> list[Any]:
    """`prompt_logprobs` as vLLM writes them: null for the first token, then by token id the token and its alternatives."""
    known = [True] * (len(prompt) - 1)
    listed = alternatives(scores, 0, prompt[1:], None, count, known)
    return [
        None,
        *(
            {
                str(each.token): {
                    "logprob": json_logprob(each.logprob),
                    "rank": each.rank,
                    "decoded_token": names.name(each.token, False)[0],
                }
                for each in place
            }
            for place in listed
        ),
    ]
