"""The routes of `legato dashboard`. Every request passes `guard.py` first."""

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.dashboard.board import configs, curves, findings
from legato.dashboard.runs import Folder
from legato.dashboard.stored import Filter, list_rollouts, newest_measured_step, show_rollout, steps_of
from legato.errors import InputError
from legato.pages.page import STYLE, THEMED, plotly_library, plotly_styles

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


def application(folder: Folder) -> "Starlette":
    """Return the web app over a folder of runs. Requests are answered in threads, so that reading a file blocks no other."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    answers: dict[str, Callable[[Request], Any]] = {
        "/api/runs": lambda request: [run.row() for run in folder.runs()],
        "/api/curves": lambda request: curves(
            folder,
            _values(request, "run"),
            _values(request, "key"),
            _integer(request, "points", 300),
            "join" in request.query_params,
        ),
        "/api/health": lambda request: findings(folder, _values(request, "run")),
        "/api/configs": lambda request: configs(folder, _values(request, "run")),
        "/api/steps": lambda request: list(steps_of(folder.run(_value(request, "run")).directory)),
        "/api/measured": lambda request: newest_measured_step(folder.run(_value(request, "run")).directory),
        "/api/rollouts": lambda request: _rollouts(folder, request),
        "/api/rollout": lambda request: show_rollout(
            folder.run(_value(request, "run")).directory,
            _integer(request, "step", 0),
            _integer(request, "index", 0),
            whole="whole" in request.query_params,
        ),
    }
    routes = [Route(path, _json_endpoint(folder, answer)) for path, answer in answers.items()]
    routes += [Route(path, _file_endpoint(*content)) for path, content in _files().items()]
    return Starlette(routes=routes)


def _json_endpoint(folder: Folder, answer: "Callable[[Request], Any]") -> "Callable[[Request], Response]":
    def endpoint(request: "Request") -> "Response":
        from starlette.responses import Response

        folder.open_requests += 1
        try:
            status, body = 200, answer(request)
        except (ValueError, OSError) as error:
            status, body = 400 if isinstance(error, ValueError) else 500, {"error": str(error)}
        except RecursionError:
            status, body = 400, {"error": "expected records of a few levels, got one that is nested too deeply to be shown"}
        finally:
            folder.open_requests -= 1
        return Response(json.dumps(body, allow_nan=False, separators=(",", ":")), status, media_type="application/json")

    return endpoint


def _file_endpoint(text: str, kind: str, cacheable: bool) -> "Callable[[Request], Response]":
    def endpoint(request: "Request") -> "Response":
        from starlette.responses import Response

        # The browser may cache only a file whose address holds a version.
        headers = {"cache-control": "private, max-age=31536000, immutable"} if cacheable and request.url.query else None
        return Response(text, media_type=kind, headers=headers)

    return endpoint


def _files() -> Mapping[str, tuple[str, str, bool]]:
    place = files("legato.dashboard") / "static"
    scripts = ("board.js", "charts.js", "rollouts.js")
    plotly = plotly_library()
    page = (place / "index.html").read_text(encoding="utf-8").replace("PLOTLY_VERSION", str(len(plotly)))
    return {
        "/": (page, "text/html", False),
        "/board.css": (STYLE + (place / "board.css").read_text(encoding="utf-8"), "text/css", False),
        "/themed.js": (THEMED, "text/javascript", False),
        "/plotly.js": (plotly, "text/javascript", True),
        **{f"/{name}": ((place / name).read_text(encoding="utf-8"), "text/javascript", False) for name in scripts},
    }


def _rollouts(folder: Folder, request: "Request") -> dict[str, Any]:
    directory = folder.run(_value(request, "run")).directory
    parameters = request.query_params
    steps = list(steps_of(directory))
    if parameters.get("step", "all") != "all":
        steps = [_integer(request, "step", 0)]
    rollout_filter = Filter(
        text=parameters.get("text", ""),
        verdict=parameters.get("verdict", ""),
        stop=parameters.get("stop", ""),
        shortest=_integer(request, "shortest", None),
        longest=_integer(request, "longest", None),
        group=_integer(request, "group", None),
    )
    return list_rollouts(directory, steps, rollout_filter, parameters.get("order", "stored"))


def _values(request: "Request", name: str) -> list[str]:
    return list(dict.fromkeys(request.query_params.getlist(name)))


def _value(request: "Request", name: str) -> str:
    return request.query_params.get(name, "")


def _integer(request: "Request", name: str, default: Any) -> Any:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise InputError(f"expected a whole number of at most 15 digits, got {text[:40]!r} ({name})")
    return int(text)


def serve(folder: Path, port: int, say: Callable[[str], None], on_ready: Callable[[str], object] | None = None) -> None:
    """Serve until interrupted. `on_ready` is called with the address once it answers."""
    try:
        import uvicorn
    except ImportError as error:
        raise InputError("the dashboard needs starlette and uvicorn: pip install 'legato[dashboard]'") from error
    import asyncio
    import socket

    from legato.dashboard.guard import Guard

    runs = Folder(folder)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
            listening.listen()  # from here on requests wait instead of being refused
        except OSError as error:
            raise InputError(f"port {port} cannot be used: {error.strerror}; --port 0 takes a free one") from error
        guard = Guard(
            application(runs),
            listening.getsockname()[1],
            lambda address: say(f"For another browser: {address}"),
            plotly_styles(plotly_library()),
        )
        say(f"{folder} is shown at {guard.address}")
        config = uvicorn.Config(guard, log_level="warning", access_log=False, server_header=False, ws="none")
        if on_ready is not None:
            on_ready(guard.address)
        asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))
