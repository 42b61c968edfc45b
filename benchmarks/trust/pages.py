"""The dashboard: every route with missing, absurd and hostile parameters over runs that are whole, torn or hostile."""

import asyncio
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

from benchmarks.trust.damage import ACTIONS, finished_run
from benchmarks.trust.trial import Case

ROUTES = (
    "/api/runs",
    "/api/curves",
    "/api/health",
    "/api/configs",
    "/api/steps",
    "/api/measured",
    "/api/rollouts",
    "/api/rollout",
)
VALUES = (
    "run",
    "",
    "nothing",
    "../run",
    "/etc/passwd",
    "%2e%2e/run",
    "\x00",
    "run\n",
    "<script>alert(1)</script>",
    "-1",
    "1",
    "999999999999999999999",
    "1e400",
    "nan",
    "a" * 10_000,
    "💥",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
)
NAMES = ("run", "key", "points", "join", "step", "index", "whole", "text", "order", "offset", "least", "most")


def requests(source: random.Random) -> Iterator[Case]:
    """All routes with absurd and hostile parameters over whole and damaged runs: status 200, 400 or 404, no leak."""
    while True:
        route = source.choice(ROUTES)
        query = [(source.choice(NAMES), source.choice(VALUES)) for _ in range(source.randint(0, 4))]
        damage = source.choice([None, None, *ACTIONS])
        seed = source.random()
        shown = urlencode(query, errors="replace")[:60]
        yield Case(
            name=f"{route}?{shown}{'' if damage is None else ', damaged run'}", check=_request(route, query, damage, seed)
        )


def _request(
    route: str, query: list[tuple[str, str]], damage: Callable[[Path, random.Random], None] | None, seed: float
) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        from legato.dashboard.app import application
        from legato.dashboard.runs import Folder

        runs, source = folder / "runs", random.Random(seed)
        shutil.copytree(finished_run("plain", folder), runs / "run")
        if damage is not None:
            files = sorted(path for path in (runs / "run").rglob("*") if path.is_file() and path.stat().st_size)
            damage(source.choice(files), source)
        status, body = asyncio.run(_get(application(Folder(runs)), route, urlencode(query, errors="replace")))
        if status not in (200, 400, 404):
            return f"status {status}: {body[:200]!r}"
        if route.startswith("/api/") and status == 200:
            json.loads(body)
        if b"root:" in body:
            return "it served a file of the system"
        return None

    return check


async def _get(app: Callable[..., object], path: str, query: str) -> tuple[int, bytes]:
    """Ask a web application without a server."""
    messages: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        messages.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [],
        "server": ("localhost", 80),
        "scheme": "http",
    }
    await app(scope, receive, send)  # type: ignore[misc]
    status = next(int(str(message["status"])) for message in messages if message["type"] == "http.response.start")
    parts = [message.get("body", b"") for message in messages if message["type"] == "http.response.body"]
    return status, b"".join(part for part in parts if isinstance(part, bytes))
