"""Access control of the dashboard: only a browser that was given the key, on this machine's own address, is answered.

Every request passes here. The key in the printed address works once: it is exchanged for a cookie that scripts cannot read,
and a new key is made. A foreign host name that points to this machine fails the Host check; a request by a page of another
site fails the checks of Origin and Sec-Fetch-Site.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from legato.pages.page import digest

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
# After a redirect the browser would still count the request as cross-site and not send the SameSite=Strict cookie. The part
# of the address after # names the runs and the view; it never reaches the server, so a script carries it on.
_ENTER = 'location.replace("/" + location.hash);'
_ENTRY_PAGE = (
    f'<!DOCTYPE html><link rel="icon" href="data:,"><title>Legato</title><script>{_ENTER}</script>'
    '<noscript><meta http-equiv="refresh" content="0;url=/"></noscript><a href="/">Enter</a>'
)
_REFUSED = "This needs the address that `legato dashboard` printed last; a key works once."
# Someone who opens a bookmarked view pastes the address or its key, and arrives at that view.
_ASK = """document.querySelector("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = document.querySelector("input").value.trim(), key = /[?&]key=([^&#]+)/.exec(text);
  location.assign("/?key=" + (key ? key[1] : encodeURIComponent(text)) + location.hash);
});"""
_KEY_PAGE = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>Legato</title></head><body>
<h1>Legato</h1><p>{_REFUSED}</p>
<form><label>Address or key: <input autofocus autocomplete="off" size="40"></label> <button>Open</button></form>
<script>{_ASK}</script></body></html>
"""
_SCRIPT_POLICY = (
    "default-src 'none'; script-src {digest}; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Guard:
    """ASGI middleware that checks every request before the app sees it."""

    def __init__(self, app: App, port: int, on_new_address: Callable[[str], None], styles: Sequence[str] = ()) -> None:
        """`on_new_address` is called with each new address; `styles` are digests of style sheets from elsewhere."""
        self.app, self.port, self._on_new_address = app, port, on_new_address
        self.headers = {"content-security-policy": POLICY.format(styles=" ".join(["'self'", *styles])), **_HEADERS}
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self.key, self._cookie = secrets.token_urlsafe(24), secrets.token_urlsafe(32)

    @property
    def address(self) -> str:
        """The address that lets one browser in, once."""
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
        key_offered = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("key", [""])[0]
        # Link previews send HEAD; that must not use up the key.
        entering = scope["path"] == "/" and scope["method"] == "GET"
        if entering and hmac.compare_digest(key_offered.encode(), self.key.encode()):
            self.key = secrets.token_urlsafe(24)
            self._on_new_address(self.address)
            cookie = f"{self._cookie_name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"
            await self._answer_page(send, 200, _ENTRY_PAGE, _ENTER, {"set-cookie": cookie})
            return
        # Checked after the key: a key that a known browser opened would otherwise stay valid, and in its history.
        if self._has_cookie(headers):
            await self.app(scope, receive, self._add_headers(send))
            return
        if entering:
            await self._answer_page(send, 403, _KEY_PAGE, _ASK)
        else:
            await self._answer(send, 403, f"{_REFUSED}\n".encode())

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, bytes] | None:
        host = headers.get("host", "")
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return 405, b"The dashboard only reads.\n"
        if host not in self.hosts:
            return 403, b"This address is not this machine's own: use 127.0.0.1 or localhost with the port printed.\n"
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and origin != f"http://{host}":
            return 403, b"Asked by a page of another origin.\n"
        # Following a link from elsewhere is how a browser enters; every other request comes from our own page.
        if site not in (None, "same-origin", "none") and headers.get("sec-fetch-mode") != "navigate":
            return 403, b"Asked by a page of another site.\n"
        return None

    @property
    def _cookie_name(self) -> str:
        # Cookies do not tell ports apart: two dashboards would take each other's.
        return f"legato-{self.port}"

    def _has_cookie(self, headers: dict[str, str]) -> bool:
        pairs = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        return any(
            name == self._cookie_name and hmac.compare_digest(value.encode("latin-1"), self._cookie.encode())
            for name, _, value in pairs
        )

    def _add_headers(self, send: Send) -> Send:
        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                more = {"cache-control": "no-store", **self.headers}
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in more.items() if name.encode() not in present),
                ]
            await send(message)

        return send_with_headers

    async def _answer_page(
        self, send: Send, status: int, page: str, script: str, more: dict[str, str] | None = None
    ) -> None:
        """Answer with a page that may run this one script."""
        policy = _SCRIPT_POLICY.format(digest=digest(script))
        headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy, **(more or {})}
        await self._answer(send, status, page.encode(), headers)

    async def _answer(self, send: Send, status: int, body: bytes, more: dict[str, str] | None = None) -> None:
        headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **(more or {})}
        send_with_headers = self._add_headers(send)
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send_with_headers({"type": "http.response.start", "status": status, "headers": encoded})
        await send_with_headers({"type": "http.response.body", "body": body})
