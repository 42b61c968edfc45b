"""Which form of the local engine a policy gets: slots and graphs on a GPU with Triton, the plain one elsewhere."""

from collections.abc import Sequence
from importlib.util import find_spec

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
) -> Engine:
    """The fastest engine that serves this policy here; what was decided is added to the policy's notes.

    `training_bytes`: memory of the device that training will still ask for.
    """
    if policy.device.type != "cuda" or not policy.views:
        return LocalEngine(policy, rows_at_once, record_routes=record_routes)
    if find_spec("triton") is None:
        policy.notes.append("the engine is the plain one (Triton is not installed): slower, not measured how much")
        return LocalEngine(policy, rows_at_once, record_routes=record_routes)
    return first_that_serves(
        policy, rows_at_once, kv_memory_share, record_routes=record_routes, training_bytes=training_bytes
    )


def first_that_serves(
    policy: Policy,
    rows_at_once: int,
    kv_memory_share: float,
    graphs: Sequence[bool] = (True, False),
    *,
    record_routes: bool = False,
    training_bytes: int = 0,
) -> Engine:
    """Slots with captured graphs, slots without, or the plain engine: the first whose log-probs are the policy's own.

    One line is noted where it is not the first.
    """
    from legato.rollouts.gpu.engine import GraphedEngine

    reasons: list[str] = []
    for captured in graphs:
        notes: list[str] = []
        engine = GraphedEngine(
            policy,
            rows_at_once,
            graphs=captured,
            kv_memory_share=kv_memory_share,
            record_routes=record_routes,
            training_bytes=training_bytes,
            say=notes.append,
        )
        wrong = disagreement(engine, policy)
        engine.forget()
        if wrong is None:
            policy.notes += notes
            if reasons:
                policy.notes.append(
                    f"the engine decodes without captured graphs ({reasons[0]}): slower, not measured how much"
                )
            engine.say = policy.notes.append
            return engine
        reasons.append(wrong)
    family = type(policy.body).__name__
    policy.notes.append(
        f"the engine is the plain one: keys and values in slots do not serve {family} ({reasons[-1]}); slower, not measured"
        " how much"
    )
    return LocalEngine(policy, rows_at_once, record_routes=record_routes)
