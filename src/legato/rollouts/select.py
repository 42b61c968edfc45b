"""Which form of the local engine a policy gets: slots and graphs on a GPU with Triton, the plain one elsewhere."""

from importlib.util import find_spec

from legato.policy.policy import Policy
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

    return GraphedEngine(policy, rows_at_once, say=policy.notes.append)
