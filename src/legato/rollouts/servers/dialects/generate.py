"""The endpoints that vLLM and `legato serve` share: /inference/v1/generate, pause, reload, name, resume."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from legato.rollouts.engine import Response
from legato.rollouts.servers.dialect import PATH, Ask, read_reply
from legato.rollouts.servers.dialects.base import CHECK_SECONDS, Dialect, Reading, read_scores
from legato.rollouts.servers.errors import BadReplyError, ServerError
from legato.rollouts.servers.http import HttpClient

ADAPTER = "legato-adapter"
"""The name under which adapters are loaded."""


class GenerateDialect(Dialect):
    """A server of tokens in, tokens out."""

    def weights_name(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> str | None:
        name = client.get("/weight_info", seconds=seconds).get("weight_version")
        return name if isinstance(name, str) else None

    def sample(self, client: HttpClient, ask: Ask, reading: Reading, seconds: float) -> Response:
        reply = client.post(PATH, self.prepare(client, ask.body()), seconds=seconds)
        return read_reply(reply, ask, reading.tokenizer, reading.vocabulary, reading.version_of, kept=self.truncation)

    def prepare(self, client: HttpClient, body: dict[str, Any]) -> dict[str, Any]:
        """A request as this server needs it."""
        return body

    def score(self, client: HttpClient, tokens: Sequence[int], name: str, seconds: float) -> list[float]:
        parameters = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False, "seed": 0}
        body = {"request_id": name, "token_ids": list(tokens), "sampling_params": parameters}
        return _read_prompt(client.post(PATH, self.prepare(client, body), seconds=seconds), tokens, name)

    def load(self, client: HttpClient, folder: Path, name: str, *, adapters: bool, seconds: float) -> None:
        client.tell("POST", "/pause?mode=keep", seconds=seconds)
        try:
            self.load_paused(client, folder, adapters, seconds)
            client.tell("POST", "/reset_prefix_cache", seconds=seconds)
            self.rename(client, name, seconds)
        except ServerError:
            # A server that stays paused would answer nobody.
            self.resume(client)
            raise
        self.resume(client, seconds)

    def resume(self, client: HttpClient, seconds: float = CHECK_SECONDS) -> None:
        client.tell("POST", "/resume", seconds=seconds)

    def load_paused(self, client: HttpClient, folder: Path, adapters: bool, seconds: float) -> None:
        """Load the weights of a folder into a server that does not decode."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        client.tell("POST", "/collective_rpc", body, seconds=seconds)

    def rename(self, client: HttpClient, name: str, seconds: float) -> None:
        client.tell("POST", "/update_weight_version", {"new_version": name}, seconds=seconds)


def _read_prompt(reply: Any, tokens: Sequence[int], name: str) -> list[float]:
    """The log-probs of a text in a reply."""
    if not str(reply.get("request_id")).endswith(name):
        raise BadReplyError(f"expected the reply to request {name}, got that to {str(reply.get('request_id'))[:100]}")
    places = reply.get("prompt_logprobs")
    if not isinstance(places, list) or len(places) != len(tokens):
        raise BadReplyError(f"expected prompt_logprobs of {len(tokens)} tokens, got {str(places)[:100]}")
    values = []
    for place, token in zip(places[1:], tokens[1:], strict=True):
        entry = place.get(str(token)) if isinstance(place, dict) else None
        values.append(entry.get("logprob") if isinstance(entry, dict) else None)
    return read_scores(values, len(tokens) - 1)
