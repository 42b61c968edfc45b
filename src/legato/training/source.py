"""Where the groups of a step come from, as the trainer and a recovery see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from legato.core.rollout import Group


class ExhaustedError(Exception):
    """No problem is left to train on."""


@dataclass(slots=True)
class Tally:
    """What was seen while collecting a step, before anything was dropped."""

    rollouts: int = 0
    unscorable: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    truncated: int = 0
    groups: int = 0
    all_right: int = 0
    all_wrong: int = 0
    flat: int = 0
    too_few: int = 0
    too_long: int = 0
    rounds: int = 0
    components: dict[str, list[float]] = field(default_factory=dict)


@runtime_checkable
class RolloutSource(Protocol):
    """Scored groups of rollouts, in the order their problems were drawn.

    `collect.py` samples them when they are asked for. A source that samples ahead answers the same calls.
    """

    def next(self, count: int) -> tuple[list[Group], Tally]:
        """So many groups of at least two scored rollouts each, and what was seen on the way; fewer only where not enough
        were found. ExhaustedError where no problem is left."""

    @property
    def version(self) -> int:
        """Of the policy that was published last."""

    def on_publish(self, version: int) -> None:
        """The policy's weights have changed and are this version from now on."""

    def before_update(self) -> None:
        """The policy's weights are about to change."""

    @property
    def settled(self) -> bool:
        """Whether the sampler is what it is going to be, so that what is measured of it now will stay true."""

    @property
    def drawn(self) -> int:
        """How many problems have been drawn."""

    def go_to(self, drawn: int) -> None:
        """Go on as if so many problems had been drawn."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it: numbers and texts."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave. The policy has the weights of the checkpoint by then; they are published again."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold of the sampler beside the policy's weights."""

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave; before `load`."""
