"""The verb `serve`."""

import os
from collections.abc import Sequence

from legato.errors import InputError
from legato.run.serve import KEY_VARIABLE, ServeOptions, serve
from legato.run.target import find

SHORTEST_KEY = 8


def serve_command(
    target: str,
    words: Sequence[str],
    *,
    step: int | None,
    host: str,
    port: int,
    key: str | None,
    name: str | None,
    follow: float | None,
    context: int | None,
    max_tokens: int | None,
    max_requests: int | None,
) -> None:
    key = key if key is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and (len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key):
        raise InputError(
            f"expected a key of at least {SHORTEST_KEY} printable ASCII characters without spaces, got another one (--key or"
            f" {KEY_VARIABLE}); without one a random key is made"
        )
    if step is not None and follow is not None:
        raise InputError("expected --step or --follow, got both; --follow serves the newest checkpoint")
    options = ServeOptions(
        host=host,
        port=port,
        key=key,
        name=name,
        follow_seconds=follow,
        context_tokens=context,
        response_tokens=max_tokens,
        sequences=max_requests,
    )
    serve(lambda: find(target, words, step), target, options, lambda text: print(text, flush=True))
