"""Engines by name: `rollouts.engine` is a registered name or "file.py:Name" of the user's.

An engine is one file. It declares a class whose `build` makes the engine for a policy:

    @part("engine", "mine")                       # only for engines of ours; a user's file needs no name
    class Mine(EngineKind):
        def build(self, policy: Policy, options: EngineOptions) -> Engine:
            return MyEngine(policy, options.rows_at_once)

Files of ours in `legato/rollouts/` are imported when an engine is asked for by name. `tests/contracts` checks what an engine
must do; `examples/piped_engine.py` is one in another process.
"""

import functools
import pkgutil
from dataclasses import dataclass, field
from importlib import import_module
from typing import ClassVar

import legato.rollouts
from legato.core.importing import is_import_path, make_imported
from legato.core.parts import Part, lookup, names
from legato.core.world import OneProcess, World
from legato.errors import InputError
from legato.policy.policy import Policy
from legato.rollouts.engine import Engine, EngineSettings
from legato.rollouts.mismatch import Mismatch
from legato.rollouts.servers.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineSettings):
    """The options that a run passes to its engine."""

    training_bytes: int = 0
    """Memory of the policy's device that training will still allocate; 0 without training."""
    mismatch: Mismatch = field(default_factory=Mismatch)
    """How the sampler differs from the policy on purpose; only the engine "local" does that."""
    copied: bool = False
    """Whether the engine must hold weights of its own, because the policy's are divided among ranks."""
    run_seed: int = 0
    """Seed of the run. Requests carry the seeds of their responses."""
    context_tokens: int = 0
    """The most tokens of a prompt with its response; 0: not known."""
    servers: ServerSettings = field(default_factory=ServerSettings)
    """The servers of engines that sample elsewhere."""
    world: World = field(default_factory=OneProcess)
    """The ranks of the run. Each has an engine for its share of the groups."""

    @property
    def records_routes(self) -> bool:
        """Whether responses carry the experts of every token, where there are any."""
        return self.record_routes is not False


class EngineKind(Part):
    """A kind of engine, selected by `rollouts.engine`."""

    __slots__ = ()
    remote: ClassVar[bool] = False
    """Whether it samples at servers, whose weights are not those of this process until they are published."""

    def build(self, policy: Policy, options: EngineOptions) -> Engine:
        """The engine for a policy."""
        raise NotImplementedError


@functools.cache
def _register_engines() -> None:
    """Import all engine modules, which registers their engines."""
    for module in pkgutil.iter_modules(legato.rollouts.__path__):
        if not module.ispkg:
            import_module(f"legato.rollouts.{module.name}")


def engine_names() -> list[str]:
    """The engines that `rollouts.engine` may name."""
    _register_engines()
    return names("engine")


def is_remote(name: str) -> bool:
    """Whether an engine of ours samples at servers."""
    _register_engines()
    return not is_import_path(name) and name in names("engine") and bool(getattr(lookup("engine", name), "remote", False))


def build_engine(name: str, policy: Policy, options: EngineOptions) -> Engine:
    """The engine of a registered name or of a path "file.py:Name"."""
    if is_import_path(name):
        kind = make_imported("rollouts.engine", name)
    else:
        _register_engines()
        kind = lookup("engine", name)()
    if not callable(getattr(kind, "build", None)):
        raise InputError(
            f"expected a class with build(policy, options), got {name!r} (rollouts.engine); docs/engines.md shows one"
        )
    engine = kind.build(policy, options)
    if not isinstance(engine, Engine):
        raise InputError(
            f"expected a legato.rollouts.engine.Engine from {name}.build, got {type(engine).__name__} (rollouts.engine);"
            " subclass Engine, or QueuedEngine where all requests are answered at once"
        )
    return engine
