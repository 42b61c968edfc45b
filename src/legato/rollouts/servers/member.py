"""One server of a fleet, as the fleet sees it."""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from legato.rollouts.engine import Handle, Job
from legato.rollouts.servers.dialects.base import ServerFacts
from legato.rollouts.servers.http import HttpClient
from legato.rollouts.servers.started import StartedServer


class State(Enum):
    """What a fleet does with a server."""

    UP = "up"
    SUSPECT = "suspect"
    """A request failed: it gets no new ones until it has answered that it is alive."""
    DOWN = "down"
    """Dropped; looked at now and then, and taken back with the right weights."""
    GONE = "gone"
    """Given up: a server of this run that could not be started again."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One response to fetch: a seed of a request."""

    job: Job
    place: int
    version: int
    """The version of the policy when it was asked for: no token may be older."""
    failures: int = 0
    refusals: int = 0
    """How often in a row a server was too busy for it."""
    waited: float = 0.0
    """Seconds that it waited for busy servers, while none of them took any request (`taken`)."""
    taken: int = 0
    """How many requests of the fleet servers had taken when these waits began."""
    not_before: float = 0.0
    done: bool = False

    @property
    def key(self) -> tuple[Handle, int]:
        return self.job.handle, self.place


@dataclass(eq=False, slots=True)
class Attempt:
    """A ticket sent to a server."""

    ticket: Ticket
    server: "Server"
    life: int
    """The life of the server to which it was sent (`Server.life`)."""
    started: float
    over: bool = False
    """Whether its ticket was given to others, because the server was dropped."""


class Published(NamedTuple):
    """Weights that servers may load."""

    version: int
    folder: Path
    name: str
    """What a server calls them."""


@dataclass(eq=False, slots=True)
class Check:
    """A server that is suspected is asked whether it is alive."""

    server: "Server"
    life: int


@dataclass(eq=False, slots=True)
class Look:
    """A server is asked which weights it has."""

    server: "Server"
    life: int
    published: Published
    """The weights that it should have."""


@dataclass(eq=False, slots=True)
class Rejoin:
    """A server is brought back."""

    server: "Server"
    published: Published
    """The weights that it gets."""


@dataclass(slots=True)
class Counts:
    """What happened at a server since the last report."""

    responses: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Summed over responses."""
    retries: int = 0
    drops: int = 0
    rejoins: int = 0
    restarts: int = 0
    duplicates: int = 0


@dataclass(eq=False, slots=True)
class Server:
    """A server and its state."""

    number: int
    client: HttpClient
    started: StartedServer | None = None
    """Its process, if this process has started it."""
    is_own: bool = False
    """Whether this run has started it, on any rank."""
    facts: ServerFacts | None = None
    state: State = State.DOWN
    life: int = 0
    """Counts restarts and drops: failures of an earlier life say nothing of this one."""
    version: int | None = None
    """The version of the policy that it was last seen to have."""
    scores: Tensor | None = None
    """Its log-probs of the probe's texts at that version."""
    gap: float = 0.0
    """The mean difference between them and the trainer's."""
    queue: deque[Ticket] = field(default_factory=deque)
    running: set[Attempt] = field(default_factory=set)
    strikes: int = 0
    """Failures since the last response."""
    answered_at: float = -math.inf
    """When its last response came."""
    busy_until: float = -math.inf
    """Until when it gets no new requests if others may take them: it was too busy for one."""
    checking: bool = False
    """Whether a check or a restart is under way."""
    next_check: float = 0.0
    checks: int = 0
    """Checks that failed since it was dropped."""
    reloads: bool = True
    """False: it keeps old weights when new ones are loaded, so it is restarted at every publish."""
    problem: str = ""
    """Why it was dropped."""
    counts: Counts = field(default_factory=Counts)

    @property
    def load(self) -> int:
        return len(self.queue) + len(self.running)

    @property
    def takes(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.state is State.UP

    def describe(self) -> dict[str, Any]:
        """For status lines and records."""
        return {"server": self.client.url, "state": self.state.value, "problem": self.problem}
