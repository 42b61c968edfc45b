"""How much a client may ask of a server."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """The bounds of requests. A request beyond them is answered with 400, 413 or 429."""

    context_tokens: int
    """The most tokens of a prompt with its response."""
    response_tokens: int
    """The most tokens of a response if the request does not say."""
    body_bytes: int = 16 * 2**20
    body_seconds: float = 60.0
    """How long a client may take to send a body."""
    json_depth: int = 32
    """The most levels of a JSON body."""
    sequences: int = 2048
    """The most responses that decode or wait, over all clients."""
    prompts: int = 1024
    """The most prompts of one request."""
    messages: int = 4096
    """The most messages of a chat."""
    samples: int = 256
    """The most samples (`n`) of one prompt."""
    stops: int = 16
    """The most stop strings, and the most stop token ids, of one request."""
    stop_characters: int = 256
    """The longest stop string."""
    top_logprobs: int = 20
    """The most alternatives to each token."""
    scored_tokens: int = 2**18
    """The most prompt tokens of one request that are scored."""
