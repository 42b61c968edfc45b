"""Selects the form of the local engine: slots and graphs on a GPU with Triton, the plain engine elsewhere."""

from collections.abc import Sequence
from importlib.util import find_spec

from legato.core.world import OneProcess, World
from legato.errors import InputError
from legato.policy.policy import Policy
from legato.rollouts.engine import Engine
from legato.rollouts.local.agreement import disagreement
from legato.rollouts.local.engine import LocalEngine


def local_engine(
    policy: Policy,
    rows_at_once: int,
    *,
    kv_memory_share: float = 0.5,
    record_routes: bool = False,
    training_bytes: int = 0,
    exact: str = "off",
    world: World | None = None,
) -> Engine:
    """The fastest engine that supports this policy on its device. A fallback is added to the policy's notes.

    `training_bytes`: device memory that training will still allocate. `exact`: whether its log-probs must equal the
    trainer's to the bit ("on"), shall where they can ("auto"), or need not ("off"); all ranks of `world` do the same.
    """
    engine = _select_engine(
        policy, rows_at_once, kv_memory_share=kv_memory_share, record_routes=record_routes, training_bytes=training_bytes
    )
    policy.exact = False  # an earlier engine of this policy may have been exact
    if exact != "off":
        _apply_exactness(policy, engine, exact, OneProcess() if world is None else world)
    return engine


def _apply_exactness(policy: Policy, engine: Engine, exact: str, world: World) -> None:
    """Make the engine exact where it can be; otherwise note why not, or refuse if it must be."""
    if policy.device.type != "cuda":
        reason: str | None = f"the model is on the {policy.device.type}; a Hopper GPU is needed"
    elif isinstance(engine, LocalEngine):
        reason = "the plain engine is used"
    else:
        from legato.rollouts.gpu.engine import GraphedEngine
        from legato.rollouts.gpu.exactness import make_exact

        assert isinstance(engine, GraphedEngine)
        reason = make_exact(policy, engine)
    if world.agree(int(reason is not None)) and reason is None:
        policy.exact, reason = False, "it is not exact on another rank"
    if reason is None:
        policy.notes.append("the engine is exact: its log-probs have the trainer's bits (rollouts.exact)")
    elif exact == "on":
        raise InputError(
            f"expected an engine that equals the trainer to the bit, got one that cannot (rollouts.exact = 'on'): {reason}."
            " Use rollouts.exact=auto"
        )
    elif policy.device.type == "cuda":
        policy.notes.append(f"engine and trainer are not equal to the bit (rollouts.exact): {reason}")


def _select_engine(
    policy: Policy,
    rows_at_once: int,
    *,
    kv_memory_share: float,
    record_routes: bool,
    training_bytes: int,
) -> Engine:
    if policy.device.type != "cuda" or not policy.views:
        return LocalEngine(policy, rows_at_once, record_routes=record_routes)
    if find_spec("triton") is None:
        policy.notes.append("the plain engine is used (Triton is not installed): slower, not measured how much")
        return LocalEngine(policy, rows_at_once, record_routes=record_routes)
    return first_supported_engine(
        policy, rows_at_once, kv_memory_share, record_routes=record_routes, training_bytes=training_bytes
    )


def first_supported_engine(
    policy: Policy,
    rows_at_once: int,
    kv_memory_share: float,
    graphs: Sequence[bool] = (True, False),
    *,
    record_routes: bool = False,
    training_bytes: int = 0,
) -> Engine:
    """The first engine whose log-probs match the policy: slots with captured graphs, slots without, or the plain engine.

    Experts of a mixture are grouped if that works, with graphs and without. Any choice but the first adds one line to the
    policy's notes.
    """
    from legato.rollouts.gpu.engine import GraphedEngine, own_experts_note

    reasons: list[str] = []
    for captured in graphs:
        ungrouped: str | None = None
        for grouped in (True, False):
            notes: list[str] = []
            engine = GraphedEngine(
                policy,
                rows_at_once,
                graphs=captured,
                grouped=grouped,
                kv_memory_share=kv_memory_share,
                record_routes=record_routes,
                training_bytes=training_bytes,
                say=notes.append,
            )
            wrong = disagreement(engine, policy)
            engine.forget()
            if wrong is None:
                policy.notes += notes
                if ungrouped is not None:
                    policy.notes.append(own_experts_note(ungrouped))
                if reasons:
                    policy.notes.append(
                        f"the engine decodes without captured graphs ({reasons[0]}): slower, not measured how much"
                    )
                engine.say = policy.notes.append
                return engine
            if engine.grouped is None:
                break  # no experts were grouped: without grouping it is the same engine
            ungrouped = wrong
        assert wrong is not None
        reasons.append(wrong)
    family = type(policy.body).__name__
    policy.notes.append(
        f"the plain engine is used: the slot engine does not support {family} ({reasons[-1]}); slower, not measured how much"
    )
    return LocalEngine(policy, rows_at_once, record_routes=record_routes)
