"""Who may look at the dashboard: the browser that was handed the key, from this machine's own address, and no other page.

Every route goes through here. The key in the printed address works once; it is exchanged for a cookie that no script can
read, and the next key is made. A name that some other site lets point to this machine fails at Host; a page that asks from
elsewhere fails at Origin and Sec-Fetch-Site.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src {styles}; img-src 'self' data: blob:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}
# A redirect would still count as asked from where the address was clicked, and a strict cookie would not be sent.
_ENTERED = (
    b'<!DOCTYPE html><meta http-equiv="refresh" content="0;url=/"><link rel="icon" href="data:,">'
    b'<title>Legato</title><a href="/">Enter</a>'
)


class Guard:
    """In front of the app."""

    def __init__(self, app: App, port: int, renewed: Callable[[str], None], styles: Sequence[str] = ()) -> None:
        """`renewed` is told the next address; `styles` are digests of style sheets beside those of the app's own files."""
        self.app, self.port, self._renewed = app, port, renewed
        self.headers = {"content-security-policy": POLICY.format(styles=" ".join(["'self'", *styles])), **_HEADERS}
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self.key, self._cookie = secrets.token_urlsafe(24), secrets.token_urlsafe(32)

    @property
    def address(self) -> str:
        """Where to enter, once."""
        return f"http://127.0.0.1:{self.port}/?key={self.key}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await self._answer(send, *refusal)
            return
        offered = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("key", [""])[0]
        # Something that looks a link over before it is followed asks for HEAD; that must not use the key up.
        entering = scope["path"] == "/" and scope["method"] == "GET"
        if entering and hmac.compare_digest(offered.encode(), self.key.encode()):
            self.key = secrets.token_urlsafe(24)
            self._renewed(self.address)
            cookie = f"{self._name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"
            await self._answer(send, 200, _ENTERED, {"set-cookie": cookie, "content-type": "text/html; charset=utf-8"})
            return
        # After the key: one that a known browser opened would stay in its history, and good.
        if self._known(headers):
            await self.app(scope, receive, self._sending(send))
            return
        await self._answer(send, 403, b"This needs the address that `legato dashboard` printed last; a key works once.\n")

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, bytes] | None:
        host = headers.get("host", "")
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return 405, b"The dashboard only reads.\n"
        if host not in self.hosts:
            return 403, b"This address is not this machine's own: use 127.0.0.1 or localhost with the port printed.\n"
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and origin != f"http://{host}":
            return 403, b"Asked by a page of another origin.\n"
        # Following an address from elsewhere is how one enters; everything else is asked by our own page.
        if site not in (None, "same-origin", "none") and headers.get("sec-fetch-mode") != "navigate":
            return 403, b"Asked by a page of another site.\n"
        return None

    @property
    def _name(self) -> str:
        # Cookies do not tell ports apart: two dashboards would take each other's.
        return f"legato-{self.port}"

    def _known(self, headers: dict[str, str]) -> bool:
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(
            name == self._name and hmac.compare_digest(value.encode("latin-1"), self._cookie.encode())
            for name, _, value in pairs
        )

    def _sending(self, send: Send) -> Send:
        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                more = {"cache-control": "no-store", **self.headers}
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in more.items() if name.encode() not in there),
                ]
            await send(message)

        return sending

    async def _answer(self, send: Send, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **(more or {})}
        sending = self._sending(send)
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await sending({"type": "http.response.start", "status": status, "headers": encoded})
        await sending({"type": "http.response.body", "body": body})
