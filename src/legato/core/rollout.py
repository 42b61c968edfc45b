"""The data of a run: a problem, a rollout of it, and the group of its rollouts.

One alignment rule: entry t of every per-token field belongs to token t itself. A rollout's tokens run from the first sampled
token to the last; the prompt is separate; tool and template tokens inside have mask 0 and turn -1.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

Message = Mapping[str, str]
"""{"role": "user", "content": "..."}"""


class StopReason(Enum):
    """Why a rollout ended; the value is the sentence shown to a person."""

    END_TOKEN = "the model wrote an end token"
    STOP_STRING = "the text reached a stop string"
    LENGTH = "the response reached the length limit"
    TURNS = "the episode reached the limit of turns"
    TIME = "the episode reached the limit of time"
    ENVIRONMENT = "the environment ended the episode"
    ABORTED = "the engine gave up on the request"

    @property
    def truncated(self) -> bool:
        """Whether the response ended before the model was done."""
        return self in TRUNCATED


TRUNCATED = frozenset({StopReason.LENGTH, StopReason.ABORTED, StopReason.TURNS, StopReason.TIME})
"""The stop reasons where the response was cut off."""


class Author(Enum):
    """Who wrote a token."""

    POLICY = 0
    TEMPLATE = 1
    TOOL = 2


START_STATE = 0
"""The id of the state in which every episode of a problem begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A prompt with its answer. `prompt` is text or chat messages; `fields` are the other columns of its data set."""

    prompt: str | Sequence[Message]
    answer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A name that depends on the prompt alone: equal prompts are one problem, on any machine and in any order."""
        text = self.prompt if isinstance(self.prompt, str) else json.dumps([dict(m) for m in self.prompt], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The experts an engine chose for each token: M layers with a router, K of `count` experts each."""

    tokens: Int[Tensor, "S"]  # noqa: F821
    """The token of each entry; -1 where there is no record."""
    experts: Integer[Tensor, "S M K"]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A prompt with the tokens that follow it: what one row of a batch holds. The fields are those of `Rollout`."""

    prompt_tokens: Int[Tensor, "P"]  # noqa: F821
    tokens: Int[Tensor, "T"]  # noqa: F821
    sampler_logprobs: Float[Tensor, "T"]  # noqa: F821
    version: Int[Tensor, "T"]  # noqa: F821
    mask: Bool[Tensor, "T"]  # noqa: F821
    turn: Int[Tensor, "T"]  # noqa: F821
    author: Int[Tensor, "T"]  # noqa: F821
    kept_logmass: Float[Tensor, "T"] | None = None  # noqa: F821
    routes: Routes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sample of a policy on a problem.

    An example: prompt "2+3=", response "5" and an end token, sampled at temperature 1 by version 7 of the policy:
        tokens            [12, 1]
        mask              [True, True]
        sampler_logprobs  [-0.4, -0.01]
        kept_logmass      None            (no top-p, top-k or min-p)
        turn, author      [0, 0], [0, 0]
        version           [7, 7]
        text              "5"

    Two turns with an environment: "5" and an end token, then "no:" from the environment, then "6" and an end token:
        tokens            [12, 1, 40, 41, 13, 1]
        mask              [True, True, False, False, True, True]
        turn              [0, 0, -1, -1, 1, 1]
        author            [0, 0, 2, 2, 0, 0]
        version           [7, 7, -1, -1, 7, 7]
        text              "6"
        dialogue          ("5", "no:", "6")
        turn_rewards      (0.0, 1.0)
    """

    problem: Problem
    rollout_id: int
    """Unique in the run. Training counts up from 0; evaluations count down from -1 (`training/evaluate.py`)."""
    prompt_tokens: Int[Tensor, "P"]  # noqa: F821
    tokens: Int[Tensor, "T"]  # noqa: F821
    sampler_logprobs: Float[Tensor, "T"]  # noqa: F821
    """Before truncation, of softmax(z / temperature)."""
    version: Int[Tensor, "T"]  # noqa: F821
    """Which version of the policy sampled each token; -1 where the policy did not write it."""
    text: str
    """The last turn as text, end tokens and stop strings removed: the whole response where there is one turn."""
    stop: StopReason
    temperature: float
    mask: Bool[Tensor, "T"]  # noqa: F821
    turn: Int[Tensor, "T"]  # noqa: F821
    author: Int[Tensor, "T"]  # noqa: F821
    kept_logmass: Float[Tensor, "T"] | None = None  # noqa: F821
    routes: Routes | None = None
    """The routes of every token the engine read, if it records them: S = P + T - 1, since the last was never read."""
    turn_rewards: tuple[float, ...] | None = None
    """The environment's reward for each turn of the policy; None if it gave none."""
    turn_states: tuple[int, ...] | None = None
    """The environment's state at the start of each turn, as a number: equal numbers are one state. None: a single turn."""
    dialogue: tuple[str, ...] | None = None
    """The texts of policy and environment in turn, the policy's first; None: a single turn."""
    server: str | None = None
    """The server that sampled it; None: there is none, there is only one, or its turns come from several."""
    fault: str | None = None
    """Why the episode could not be finished. Such a rollout is not scored."""
    earlier: tuple[Row, ...] = ()
    """Rows before this one. A chat template that renders earlier turns differently later (Qwen3 drops the reasoning of past
    turns) starts a new row: its prompt is the conversation as the template renders it then, its turns count on."""

    @property
    def rows(self) -> "tuple[Row | Rollout, ...]":
        """All rows in the order of their turns; the rollout itself is the last."""
        return (*self.earlier, self)

    @property
    def length(self) -> int:
        """Tokens of all rows after their prompts."""
        return len(self.tokens) + sum([len(row.tokens) for row in self.earlier] if self.earlier else ())

    @property
    def sampled(self) -> int:
        """Tokens that the policy wrote."""
        return sum([int(row.mask.sum()) for row in self.rows])


@dataclass(frozen=True, slots=True)
class Unscorable:
    """The reward could not be computed. The rollout leaves its group; it is never scored 0."""

    reason: str


@dataclass(frozen=True, slots=True)
class TurnScores:
    """What a reward returns that scores each turn of the policy by itself: one number for each turn."""

    scores: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The reward for training, the unshaped accuracy for filters and evaluation, and the reward's components."""

    reward: float
    accuracy: float
    """The mean of the components that judge the answer: any number. Filters compare it within a group."""
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] | None = None
    """`reward` divided among the turns; None: all of it is at the last turn."""
    absent: tuple[str, ...] = ()
    """Names of rewards that do not apply to this rollout: they returned None."""

    @property
    def correctness(self) -> float:
        """`accuracy` limited to 0 to 1, for all that is shown as an accuracy: many rewards pay 2 or subtract points."""
        return min(1.0, max(0.0, self.accuracy))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A rollout with its score."""

    rollout: Rollout
    score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The scored rollouts of one problem, at least two: advantages compare them."""

    problem: Problem
    members: tuple[Scored, ...]
