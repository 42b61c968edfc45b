"""Endpoints that control the server, in vLLM's words: pause, load weights, name their version, resume.

    POST /pause?mode=keep
    POST /collective_rpc {"method": "reload_weights", "kwargs": {"weights_path": "FOLDER"}}
    POST /reset_prefix_cache
    POST /update_weight_version {"new_version": "12"}
    POST /resume

Of our own: POST /reload_checkpoint takes the newest checkpoint of the run that is served, or that of a step. Whoever has the
key may call them: they load any model folder that this process can read.
"""

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from legato.errors import InputError
from legato.serve.engine_thread import MODES
from legato.serve.errors import ApiError, bad_value
from legato.serve.http import json_response, read_body, read_optional_body
from legato.serve.served import Served
from legato.serve.values import Body

ATTEMPTS = 3
"""How often a checkpoint is looked for while the run prunes those before it."""


async def pause(request: Request, served: Served) -> Response:
    """Stop decoding. `mode` says what becomes of requests in flight: abort (the default, as in vLLM), wait or keep."""
    mode = request.query_params.get("mode", "abort")
    if mode not in MODES:
        raise bad_value("mode", f"one of {', '.join(MODES)}", mode)
    await served.thread.pause(mode)
    return json_response({"status": "paused"})


async def resume(request: Request, served: Served) -> Response:
    """Go on decoding."""
    await served.thread.resume()
    return json_response({"status": "resumed"})


async def is_paused(request: Request, served: Served) -> Response:
    """Whether decoding is stopped."""
    return json_response({"is_paused": served.thread.mode != "running"})


async def abort_requests(request: Request, served: Served) -> Response:
    """End requests with what they have, by their ids; all of them without ids."""
    body = await read_optional_body(request, served.limits)
    names = body.items("request_ids", most=served.limits.sequences)
    for name in names:
        if not isinstance(name, str):
            raise bad_value("request_ids", "texts", name)
    body.refuse_unknown()
    return json_response({"status": "aborted", "aborted": await served.thread.abort(names)})


async def collective_rpc(request: Request, served: Served) -> Response:
    """The one method that vLLM's clients call by this name here: reload_weights from a folder."""
    body = await read_body(request, served.limits)
    method = body.text("method")
    if method != "reload_weights":
        raise bad_value("method", "'reload_weights'", method)
    body.only("args", [], advice="give weights_path by name, in kwargs")
    body.ignore("timeout")
    arguments = Body(body.table("kwargs"), "kwargs.")
    folder = arguments.text("weights_path", longest=4096)
    arguments.only("is_checkpoint_format", True, advice="a folder as transformers saves it is needed")
    arguments.refuse_unknown()
    body.refuse_unknown()
    if not folder:
        raise bad_value("kwargs.weights_path", "the folder of a model", folder)
    await reload_weights(served, Path(folder), None)
    return json_response({"results": [None]})


async def reload_weights(served: Served, folder: Path, name: str | None) -> str:
    """Take the weights of a folder over and return their name. The engine decodes while the files are read.

    ApiError (400) if they cannot be read or are not weights of this model; then nothing has changed.
    """
    async with served.weights.lock:
        try:
            weights = await served.read_files(lambda: served.weights.read(folder))
        except (InputError, OSError) as error:
            raise ApiError(400, str(error), param="weights_path", code="weights_not_loaded") from None
        return await served.thread.run(lambda: served.weights.publish(weights, name))


async def reset_prefix_cache(request: Request, served: Served) -> Response:
    """Nothing is left to reset: new weights drop every stored key, and stored keys of the same weights stay right."""
    return json_response({"success": True})


async def update_weight_version(request: Request, served: Served) -> Response:
    """Name the weights that sample now."""
    body = await read_body(request, served.limits)
    name = body.text("new_version", longest=200)
    body.refuse_unknown()
    if not name:
        raise bad_value("new_version", "a name", name)
    async with served.weights.lock:
        await served.thread.run(lambda: served.weights.rename(name))
    return json_response({"success": True, "new_version": name})


async def weight_info(request: Request, served: Served) -> Response:
    """The name of the weights that sample now."""
    return json_response({"weight_version": served.weights.name})


async def reload_checkpoint(request: Request, served: Served) -> Response:
    """Take over the newest checkpoint of the run that is served, or that of `step`."""
    body = await read_optional_body(request, served.limits)
    step = body.integer("step", None, minimum=0)
    body.refuse_unknown()
    changed = await follow_checkpoint(served, step)
    return json_response({"weight_version": served.weights.name, "changed": changed})


async def follow_checkpoint(served: Served, step: int | None = None) -> bool:
    """Take over a checkpoint unless it is served already; returns whether the weights have changed."""
    checkpoints = served.weights.checkpoints
    if checkpoints is None:
        raise ApiError(400, "expected a server of a run, got one of a model: it has no checkpoints to follow")
    for attempt in range(ATTEMPTS):
        try:
            checkpoint, folder = await served.read_files(lambda: checkpoints.model_folder(step))
        except InputError as error:
            raise ApiError(400, str(error), param="step") from None
        if str(checkpoint) == served.weights.name:
            return False
        try:
            await reload_weights(served, folder, str(checkpoint))
            return True
        except ApiError:
            # A run prunes old checkpoints, also while they are read; then there is a newer one.
            if folder.exists() or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


async def version(request: Request, served: Served) -> Response:
    """The version of Legato. `server` tells it from vLLM, whose answer has `version` alone."""
    return json_response({"version": served.software, "server": "legato"})


async def health(request: Request, served: Served) -> Response:
    """200 while requests are answered, 503 once the engine has failed; with the key also what the server does."""
    problem = served.thread.fault or served.thread.failure
    status: dict[str, Any] = {"status": "ok" if problem is None else "failed"}
    if request.scope.get("legato.key"):
        status |= {
            "model": served.name,
            "weight_version": served.weights.name,
            "mode": served.thread.mode,
            "running": served.thread.running,
            "waiting": served.thread.waiting,
            "sequences": served.admission.taken,
            "most_sequences": served.admission.most,
            "refused": served.admission.refused,
            "problem": problem,
        }
    return json_response(status, 200 if problem is None else 503)
