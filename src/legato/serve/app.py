"""The routes of `legato serve`. Every request passes `guard.py` first."""

import asyncio
import contextlib
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.serve import control
from legato.serve.chat import chat
from legato.serve.completions import complete
from legato.serve.errors import ApiError
from legato.serve.follow import follow
from legato.serve.generate import generate
from legato.serve.guard import Guard
from legato.serve.http import ClientGone, error_response, json_response
from legato.serve.models import find_model, list_models
from legato.serve.recording import Recording
from legato.serve.served import Served

Endpoint = Callable[[Request, Served], Awaitable[Response]]


async def _models(request: Request, served: Served) -> Response:
    return json_response(list_models(served))


async def _model(request: Request, served: Served) -> Response:
    return json_response(find_model(request.path_params["name"], served))


SAMPLING: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/v1/chat/completions", chat),
    ("POST", "/v1/completions", complete),
    ("POST", "/inference/v1/generate", generate),
)
"""Method, path and endpoint of what samples."""
ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    *SAMPLING,
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{name:path}", _model),
    ("GET", "/health", control.health),
    ("GET", "/version", control.version),
    ("POST", "/pause", control.pause),
    ("POST", "/resume", control.resume),
    ("GET", "/is_paused", control.is_paused),
    ("POST", "/abort_requests", control.abort_requests),
    ("POST", "/collective_rpc", control.collective_rpc),
    ("POST", "/reset_prefix_cache", control.reset_prefix_cache),
    ("POST", "/update_weight_version", control.update_weight_version),
    ("GET", "/weight_info", control.weight_info),
    ("POST", "/reload_checkpoint", control.reload_checkpoint),
)
"""Method, path and endpoint of everything that is answered."""
RECORDED = (*(path for _, path, _ in SAMPLING), "/v1/models")
"""Paths that agents of a run find below /episodes/NAME."""


def application(
    served: Served,
    *,
    key: str,
    hosts: Sequence[str] | None,
    follow_seconds: float | None = None,
    recordings: Mapping[str, Recording] | None = None,
) -> Guard:
    """The web app of a server. With `follow_seconds` it looks for a newer checkpoint that often.

    With `recordings`, the episodes of a run by name, it answers their agents and nobody else.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        served.start()
        following = None if follow_seconds is None else asyncio.create_task(follow(served, follow_seconds))
        try:
            yield
        finally:
            if following is not None:
                following.cancel()
            served.stop()

    if recordings is None:
        routes = [Route(path, _bind(endpoint, served), methods=[method]) for method, path, endpoint in ROUTES]
    else:
        routes = [
            Route(f"/episodes/{{episode}}{path}", _bind(_record(endpoint, recordings), served), methods=[method])
            for method, path, endpoint in ROUTES
            if path in RECORDED
        ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _explain_route})
    app.router.redirect_slashes = False
    quick = {} if recordings is not None else {path: _bind(endpoint, served) for _, path, endpoint in SAMPLING}
    return Guard(_QuickPaths(app, quick), key, hosts)


class _QuickPaths:
    """The app, with a way around its middleware and routes for the paths that sample: they answer most requests."""

    def __init__(self, app: ASGIApp, quick: Mapping[str, Callable[[Request], Awaitable[Response]]]) -> None:
        self._app, self._quick = app, quick

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._quick.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
        else:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)


def _record(endpoint: Endpoint, recordings: Mapping[str, Recording]) -> Endpoint:
    """The endpoint for requests of an episode, which are recorded."""

    async def recorded(request: Request, served: Served) -> Response:
        recording = recordings.get(request.path_params["episode"])
        if recording is None:
            raise ApiError(404, "there is no such episode, or it has ended", code="episode_ended")
        return await endpoint(request, served.recorded_by(recording))

    return recorded


def _bind(endpoint: Endpoint, served: Served) -> Callable[[Request], Awaitable[Response]]:
    async def answer_request(request: Request) -> Response:
        try:
            return await endpoint(request, served)
        except ApiError as error:
            return error_response(error)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        except Exception:
            # A fault of ours. The client learns that it was none of its own; the report stays on this machine.
            traceback.print_exc(file=sys.stderr)
            return error_response(ApiError(500, "The server had an error while processing your request"))

    return answer_request


async def _explain_route(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    request_line = f"{request.method} {request.url.path}"[:200]
    if error.status_code == 405:
        answer = ApiError(405, f"Not allowed: {request_line}; docs/serve.md lists the methods", code="method_not_supported")
    else:
        answer = ApiError(404, f"Unknown request URL: {request_line}; docs/serve.md lists the paths", code="unknown_url")
    return error_response(answer)
