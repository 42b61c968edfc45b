"""`rollouts.engine = "vllm"`, `"sglang"` and `"legato"`: servers sample (docs/engines.md)."""

from legato.core.parts import part
from legato.policy.policy import Policy
from legato.rollouts.engine import Engine
from legato.rollouts.registry import EngineKind, EngineOptions
from legato.rollouts.servers.dialects.base import Dialect
from legato.rollouts.servers.dialects.own import Own
from legato.rollouts.servers.dialects.sglang import Sglang
from legato.rollouts.servers.dialects.vllm import Vllm
from legato.rollouts.servers.fleet import Fleet


def _fleet(policy: Policy, options: EngineOptions, dialect: Dialect) -> Engine:
    return Fleet(
        policy,
        dialect,
        options.servers,
        rows_at_once=options.rows_at_once,
        context_tokens=options.context_tokens,
        world=options.world,
    )


@part("engine", "vllm")
class VllmKind(EngineKind):
    """Samples at one or many vLLM servers (0.28 and later), given by address or started by the run."""

    remote = True

    def build(self, policy: Policy, options: EngineOptions) -> Engine:
        return _fleet(policy, options, Vllm())


@part("engine", "sglang")
class SglangKind(EngineKind):
    """Samples at one or many SGLang servers (0.5.11 and later). Version 0.5.17 was tried on a GPU (docs/engines.md)."""

    remote = True

    def build(self, policy: Policy, options: EngineOptions) -> Engine:
        return _fleet(policy, options, Sglang())


@part("engine", "legato")
class LegatoKind(EngineKind):
    """Samples at one or many `legato serve`, given by address or started by the run."""

    remote = True

    def build(self, policy: Policy, options: EngineOptions) -> Engine:
        return _fleet(policy, options, Own())
