"""Sampling at a server instead of in this process, for `sample --server` and `eval --server`."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from legato.errors import InputError
from legato.policy.policy import Policy
from legato.rollouts.engine import Engine
from legato.rollouts.servers.engine import ServerEngine, ServerModel, ask_model
from legato.rollouts.servers.errors import ServerError
from legato.rollouts.servers.http import HttpClient
from legato.run import wire
from legato.run.serve import KEY_VARIABLE
from legato.run.target import Target, warn


@contextmanager
def policy_and_engine(
    target: Target, server: str | None, say: Callable[[str], None] = warn
) -> Iterator[tuple[Policy, Engine]]:
    """The policy of a target and the engine that samples from it, here or at the server with this address.

    The target gives tokenizer, templates and settings; a server gives the weights, which may be of a later step: `say` gets
    a line about them.
    """
    if server is None:
        policy = target.policy()
        yield policy, wire.sampling_engine(target.resolved.config, policy)
        return
    policy = target.policy_without_weights()
    with closing(HttpClient(server, os.environ.get(KEY_VARIABLE))) as client:
        model = _check_model(target, policy, client)
        say(f"sampling at {client.url}: {model.name}, version {model.version or 'unknown'}")
        with closing(ServerEngine(client, policy.tokenizer, policy.vocabulary)) as engine:
            yield policy, engine
            _warn_of_changes(model, engine.weights, say)


def _warn_of_changes(model: ServerModel, weights: set[str], say: Callable[[str], None]) -> None:
    """Say so if responses are of other weights than the server named at first, as may be with `legato serve --follow`."""
    if len(weights) > 1 or (model.version is not None and weights - {model.version}):
        names = " and ".join(sorted(weights, key=lambda name: (len(name), name)))
        say(f"warning: the server changed its weights meanwhile: responses are of version {names}")


def _check_model(target: Target, policy: Policy, client: HttpClient) -> ServerModel:
    """The model of a server; InputError if there is none or if it cannot be that of the target."""
    try:
        model = ask_model(client)
    except ServerError as error:
        advice = f"; give its key in {KEY_VARIABLE}" if "401" in str(error) else ""
        raise InputError(f"expected a server at {client.url}, got {error} (--server){advice}") from None
    if model.vocabulary is not None and model.vocabulary != policy.vocabulary:
        raise InputError(
            f"expected a server of {policy.name}, got one of {model.name}, whose vocabulary has {model.vocabulary} tokens,"
            f" not {policy.vocabulary} (--server); name the run or model that it serves"
        )
    longest = target.resolved.config.rollouts.max_response_tokens
    if model.context_tokens is not None and longest >= model.context_tokens:
        raise InputError(
            f"expected responses that fit in the {model.context_tokens} tokens of the server, got"
            f" rollouts.max_response_tokens = {longest}; lower it, or start the server with --context"
        )
    return model
