"""Access control of the server: the key, the host, and the page that asks.

Every request passes here. It needs `Authorization: Bearer KEY`, except GET /health, which says little without. On loopback
a foreign host name that points to this machine is refused, and so is a request by a page of another site, key or not.
"""

import hmac
from collections.abc import MutableMapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.serve.errors import ApiError
from legato.serve.http import error_response

OPEN = ("/health",)
"""Paths that need no key."""
_CHECKED = (b"host", b"origin", b"authorization")


class Guard:
    """ASGI middleware that checks every request before the app sees it."""

    def __init__(self, app: ASGIApp, key: str, hosts: Sequence[str] | None) -> None:
        """`hosts` are the Host headers that are answered; None: any, for a server that listens beyond loopback."""
        self.app, self.key, self.hosts = app, key, None if hosts is None else set(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, _with_headers(send))

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        """ApiError for a request that must not be answered. Notes in the scope whether it has the key."""
        headers: dict[bytes, list[str]] = {name: [] for name in _CHECKED}
        for name, value in scope["headers"]:
            if (lower := name.lower()) in headers:
                headers[lower].append(value.decode("latin-1"))
        host = headers[b"host"] or [""]
        if len(host) != 1 or (self.hosts is not None and host[0].lower() not in self.hosts):
            raise ApiError(403, "this address is not this machine's own: use 127.0.0.1 or localhost with the port printed")
        if any(origin != f"http://{host[0]}" for origin in headers[b"origin"]):
            raise ApiError(403, "asked by a page of another origin")
        authorization = headers[b"authorization"]
        scheme, _, key = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
        has_key = scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self.key.encode())
        scope["legato.key"] = has_key
        if not has_key and scope["path"] not in OPEN:
            raise ApiError(
                401,
                "expected the key of this server as `Authorization: Bearer KEY`, got none or another; `legato serve` prints"
                " the key when it starts",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _with_headers(send: Send) -> Send:
    """Sends an answer that no browser takes for anything but what it says it is."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
        await send(message)

    return send_with_headers
