"""Which form of the local engine a policy gets: slots and graphs on a GPU with Triton, the plain one elsewhere."""

from importlib.util import find_spec

from legato.policy.policy import Policy
from legato.rollouts.agreement import disagreement
from legato.rollouts.engine import Engine
from legato.rollouts.local import LocalEngine


def local_engine(policy: Policy, rows_at_once: int) -> Engine:
    """The fastest engine that serves this policy here; what was decided is added to the policy's notes."""
    if policy.device.type != "cuda" or not policy.views:
        return LocalEngine(policy, rows_at_once)
    if find_spec("triton") is None:
        policy.notes.append("the engine is the plain one: Triton is not installed")
        return LocalEngine(policy, rows_at_once)
    from legato.rollouts.graphed import GraphedEngine

    for graphs in (True, False):
        engine = GraphedEngine(policy, rows_at_once, graphs=graphs, say=policy.notes.append)
        wrong = disagreement(engine, policy)
        engine.forget()
        if wrong is None:
            return engine
        form = "with captured graphs" if graphs else "with slots"
        policy.notes.append(
            f"the engine {form} does not serve {type(policy.body).__name__} ({wrong}); a plainer one is tried"
        )
    return LocalEngine(policy, rows_at_once)
