"""GET /v1/models: the one model of a server, its context and the version of its weights."""

from typing import Any

from legato.serve.errors import ApiError
from legato.serve.served import Served
from legato.serve.values import Body


def check_model(body: Body, served: Served) -> str:
    """The name of the model; ApiError (404) if the request names another."""
    name = body.text("model", served.name)
    if name != served.name:
        raise _not_found(name, served)
    return served.name


def list_models(served: Served) -> dict[str, Any]:
    """The answer of /v1/models."""
    return {"object": "list", "data": [describe_model(served)]}


def find_model(name: str, served: Served) -> dict[str, Any]:
    """The answer of /v1/models/NAME."""
    if name != served.name:
        raise _not_found(name, served)
    return describe_model(served)


def describe_model(served: Served) -> dict[str, Any]:
    """The card of the model."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "legato",
        "root": served.policy.name,
        "parent": None,
        "max_model_len": served.limits.context_tokens,
        "weight_version": served.weights.name,
        "vocabulary": served.vocabulary,
        "end_token_ids": list(served.end_tokens),
        # Whether reload_weights takes adapters instead of whole weights.
        "adapters": hasattr(served.policy.model, "disable_adapter"),
    }


def _not_found(name: str, served: Served) -> ApiError:
    message = f"The model `{name[:100]}` does not exist; this server has `{served.name}`"
    return ApiError(404, message, param="model", code="model_not_found")
