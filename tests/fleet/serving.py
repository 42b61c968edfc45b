"""Fleets for tests: over `legato serve` in threads of this process, with or without faults."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from legato.policy.policy import Policy
from legato.rollouts.servers.dialects.own import Own
from legato.rollouts.servers.fleet import Fleet
from legato.rollouts.servers.settings import ServerSettings
from legato.serve.weights import Weights
from tests.serve.faults import FaultPlan
from tests.serve.running import KEY, RunningServer, chat_policy, make_served, running

_LOADING = threading.Lock()
_read = Weights.read


def _read_alone(weights: Weights, folder: Path) -> Any:
    """transformers cannot load two models at once in one process. Servers are processes; here they are threads."""
    with _LOADING:
        return _read(weights, folder)


@contextlib.contextmanager
def servers(policies: list[Policy], **options: Any) -> Iterator[tuple[list[RunningServer], list[FaultPlan]]]:
    """A server for each policy, each with a plan of faults."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("LEGATO_SERVER_KEY", KEY)
        patch.setattr(Weights, "read", _read_alone)
        plans, started = [FaultPlan() for _ in policies], []
        for policy, plan in zip(policies, plans, strict=True):
            served = make_served(policy, **options)
            started.append(stack.enter_context(running(served, wrap=plan.wrap(served))))
        yield started, plans


@contextlib.contextmanager
def fleet_of(policy: Policy, started: list[RunningServer], **options: Any) -> Iterator[Fleet]:
    """A fleet over servers; `options` are of `rollouts.servers`."""
    rows = options.pop("rows_at_once", 8)
    settings = ServerSettings(urls=tuple(server.url for server in started), **{"request_seconds": 20.0, **options})
    fleet = Fleet(policy, Own(), settings, rows_at_once=rows, context_tokens=64, seed=1)
    fleet._random.uniform = lambda low, high: 0.1  # type: ignore[method-assign]
    try:
        yield fleet
    finally:
        fleet.close()


@contextlib.contextmanager
def two_servers(**options: Any) -> Iterator[tuple[Fleet, Policy, list[RunningServer], list[FaultPlan]]]:
    """A policy, two servers with other weights, and a fleet over them."""
    policy = chat_policy(3)
    with servers([chat_policy(4), chat_policy(5)]) as (started, plans), fleet_of(policy, started, **options) as fleet:
        yield fleet, policy, started, plans
