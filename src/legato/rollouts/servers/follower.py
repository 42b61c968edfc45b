"""The engine of the ranks that train beside the one with the fleet: it asks for nothing and takes part in publishing.

Of several ranks the first speaks to the servers (`fleet.py`), and all get its rollouts. Where every rank holds the whole
weights, a publish needs nobody else. Where layers are divided, weights are gathered and texts are scored by all ranks
together: the first says what is scored, the others follow until it says that it is done.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from legato.core.world import World
from legato.policy.policy import Policy
from legato.rollouts.engine import Capabilities, Engine, Finished, Handle, Limits, Request
from legato.rollouts.sampling import Sampling
from legato.rollouts.scoring import TextScores, score_texts
from legato.rollouts.servers.dialects.base import Dialect


class Scorer:
    """Scores texts under the policy on the first rank, with the help of the others where layers are divided."""

    def __init__(self, policy: Policy, world: World) -> None:
        self.policy, self.world = policy, world

    @property
    def _is_shared(self) -> bool:
        return self.world.size > 1 and self.policy.divided

    def score(self, texts: Sequence[Tensor], temperatures: Sequence[float] | None = None) -> list[TextScores]:
        """The scores of each text, at its temperature or at 1."""
        if self._is_shared:
            self.world.gather([[text.tolist() for text in texts], temperatures])
        return score_texts(self.policy, texts, temperatures)

    def finish(self) -> None:
        """Let the other ranks go on."""
        if self._is_shared:
            self.world.gather(None)

    def follow(self) -> None:
        """Score what the first rank scores until it is done; called by the other ranks."""
        while self._is_shared and (told := self.world.gather(None)[0]) is not None:
            texts, temperatures = told
            score_texts(self.policy, [torch.tensor(text) for text in texts], temperatures)


class Follower(Engine):
    """Has no requests; takes part in the publishes of the first rank."""

    def __init__(self, policy: Policy, dialect: Dialect, world: World) -> None:
        self.name = dialect.name
        self.capabilities = Capabilities(
            truncation=dialect.truncation, holds_weights=True, concurrent=True, first_rank_only=True
        )
        self._scorer = Scorer(policy, world)

    def submit(self, requests: Sequence[Request], sampling: Sampling, limits: Limits) -> list[Handle]:
        if requests:
            raise RuntimeError("the first rank asks for all responses")
        return []

    def poll(self) -> list[Finished]:
        return []

    def cancel(self, handle: Handle) -> None:
        pass

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        deque(weights, maxlen=0)  # divided layers are gathered one after the other by all ranks
        self._scorer.follow()
        self.version = version
