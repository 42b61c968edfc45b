"""Legato trains language models by reinforcement learning with ratio, clip and credit over the whole response.

    run = legato.train(model="tiny", problems=[...], reward=fn, algorithm="gspo", **{"training.lr": 1e-4})
    outcome = legato.loss("gspo", logprobs=new, old_logprobs=old, advantages=A, mask=mask, group=ids)
    outcome.loss.backward()

Names are loaded when they are first used, so that `import legato` and `legato --help` do not load torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from legato.algorithms.algorithm import Algorithm
    from legato.api import Advantages, advantages, algorithm, counts, loss
    from legato.core.counts import Counts
    from legato.core.outcome import Outcome
    from legato.core.rollout import Problem, Rollout, TurnScores, Unscorable
    from legato.run.train import Run, train

_HOME = {
    "Advantages": "legato.api",
    "Algorithm": "legato.algorithms.algorithm",
    "Counts": "legato.core.counts",
    "Outcome": "legato.core.outcome",
    "Problem": "legato.core.rollout",
    "Rollout": "legato.core.rollout",
    "Run": "legato.run.train",
    "TurnScores": "legato.core.rollout",
    "Unscorable": "legato.core.rollout",
    "advantages": "legato.api",
    "algorithm": "legato.api",
    "counts": "legato.api",
    "loss": "legato.api",
    "train": "legato.run.train",
}

__all__ = [
    "Advantages",
    "Algorithm",
    "Counts",
    "Outcome",
    "Problem",
    "Rollout",
    "Run",
    "TurnScores",
    "Unscorable",
    "__version__",
    "advantages",
    "algorithm",
    "counts",
    "loss",
    "train",
]


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the room `legato.advantages` would bind the module over the public function of that name.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'legato' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
