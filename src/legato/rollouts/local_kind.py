"""`rollouts.engine = "local"`: the model being trained samples, or a copy of it that differs on purpose."""

from legato.core.parts import part
from legato.policy.policy import Policy
from legato.rollouts.copied import CopiedEngine
from legato.rollouts.engine import Engine
from legato.rollouts.local.select import local_engine
from legato.rollouts.mismatch import MismatchedEngine
from legato.rollouts.registry import EngineKind, EngineOptions


@part("engine", "local")
class Local(EngineKind):
    """Samples from the very tensors being trained: on a GPU with captured graphs, elsewhere in plain PyTorch."""

    def build(self, policy: Policy, options: EngineOptions) -> Engine:
        if options.mismatch.kind == "none" and options.copied:
            return CopiedEngine(
                policy,
                options.rows_at_once,
                options.kv_memory_share,
                record_routes=options.records_routes,
                training_bytes=options.training_bytes,
                # Only layers are divided.
                shared=[name for name, _ in policy.model.named_parameters() if ".layers." not in name],
            )
        if options.mismatch.kind == "none":
            return local_engine(
                policy,
                options.rows_at_once,
                kv_memory_share=options.kv_memory_share,
                record_routes=options.records_routes,
                training_bytes=options.training_bytes,
                exact=options.exact,
                world=options.world,
            )
        return MismatchedEngine(
            policy,
            options.mismatch,
            options.rows_at_once,
            options.kv_memory_share,
            record_routes=options.records_routes,
            training_bytes=options.training_bytes,
            seed=options.run_seed,
        )
