"""The weights of a server and the names of their versions.

The engine counts versions. Clients name them, as text: after new weights were read, `name` gives them a name. Tokens that
were sampled before that carry the same name, since they come from the same weights.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from legato.errors import InputError
from legato.policy.model.load import copy_weights, read_weights
from legato.policy.policy import Policy
from legato.rollouts.engine import Engine


@runtime_checkable
class Checkpoints(Protocol):
    """The checkpoints of the run that is served."""

    def newest_step(self) -> int | None:
        """The step of the newest checkpoint; None without one. Cheap: no file is read."""

    def model_folder(self, step: int | None) -> tuple[int, Path]:
        """The step and the model folder of a checkpoint, the newest whole one if `step` is None; InputError without one."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a response that come from one version."""

    version: str
    start: int
    end: int


class Weights:
    """The weights being served. `publish` and `rename` run on the engine's thread, `read` on any other."""

    def __init__(
        self,
        policy: Policy,
        engine: Engine,
        name: str,
        *,
        checkpoints: Checkpoints | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self.policy, self.engine, self.checkpoints, self._trust = policy, engine, checkpoints, trust_remote_code
        self.names = {engine.version: name}
        """engine version -> its name"""
        self._named = True
        """Whether the current version has been named by a client."""
        self.lock = asyncio.Lock()
        """Held while weights are changed: one change at a time."""

    @property
    def name(self) -> str:
        """The name of the version that samples now."""
        return self.names.get(self.engine.version, str(self.engine.version))

    def spans(self, versions: list[int]) -> list[Span]:
        """The version of each token as spans."""
        spans, start = [], 0
        while start < len(versions):
            version = versions[start]
            # Nearly all responses have one version; comparing token by token would cost more than the rest of an answer.
            end = len(versions) if versions[-1] == version else bisect_right(versions, version, start)
            spans.append(Span(self.names.get(version, str(version)), start, end))
            start = end
        return spans

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights of a model folder, for `publish`; InputError if they are not weights of this model."""
        if not folder.is_dir():
            # A name that is no folder would be looked for on the hub.
            raise InputError(f"expected the folder of a model, got {folder}: there is no such folder")
        return read_weights(self.policy, folder, self._trust)

    def publish(self, weights: Mapping[str, Tensor], name: str | None) -> str:
        """Sample from these weights from the next token on; returns their name, which a client may still give."""
        copy_weights(self.policy, weights)
        return self._publish(name)

    def _publish(self, name: str | None) -> str:
        version = self.engine.version + 1
        # Named first: other threads ask for the name of the engine's version.
        self.names[version] = f"unnamed-{version}" if name is None else name
        self._named = name is not None
        self.engine.publish(self.policy.model.named_parameters(), version)
        return self.names[version]

    def rename(self, name: str) -> None:
        """Name the version that samples now. A version that has a name already ends: later tokens are of a new one."""
        if self._named:
            self._publish(name)
        else:
            self.names[self.engine.version] = name
            self._named = True
