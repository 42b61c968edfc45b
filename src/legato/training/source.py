"""The interface of a rollout source, from which the trainer takes the groups of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from legato.core.rollout import Group
from legato.errors import InputError


class ExhaustedError(Exception):
    """No problem is left to train on."""


class NothingScoredError(InputError):
    """The reward scored none of the first rollouts."""


@dataclass(slots=True)
class Tally:
    """Counts and values of all rollouts of a step, before any group was dropped."""

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
    sampler: dict[str, float] = field(default_factory=dict)
    """What the engine measured, by the keys of metrics."""


@runtime_checkable
class RolloutSource(Protocol):
    """Scored groups of rollouts, in the order their problems were drawn.

    `collect.py` samples them when they are asked for. A source that samples ahead answers the same calls.
    """

    def next(self, count: int) -> tuple[list[Group], Tally]:
        """`count` groups of at least two scored rollouts each, and the tally of all rollouts.

        Fewer groups only if refills did not find enough. ExhaustedError if no problem is left.
        """

    @property
    def version(self) -> int:
        """The version of the policy that was published last."""

    def on_publish(self, version: int) -> None:
        """The policy's weights have changed and are this version from now on."""

    def before_update(self) -> None:
        """The policy's weights are about to change."""

    @property
    def settled(self) -> bool:
        """Whether the sampler has its full weight history, so that a noise floor measured now stays valid."""

    @property
    def drawn(self) -> int:
        """How many problems have been drawn."""

    def go_to(self, drawn: int) -> None:
        """Continue as if `drawn` problems had been drawn."""

    def state(self) -> dict[str, Any]:
        """The state of the source for a checkpoint: numbers and texts."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned. The policy must have the checkpoint's weights already; they are published again."""

    def tensors(self) -> dict[str, Tensor]:
        """The sampler's tensors for a checkpoint, beside the policy's weights."""

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned; call it before `load`."""
