"""An environment of two turns that an untrained model earns some of in both."""

from legato.core.rollout import Problem, StopReason
from legato.rollouts.episodes import Reply


class Early:
    """Two turns, each worth the share of its characters that are no letters."""

    max_turns = 2
    deterministic = True

    def episode(self, problem: Problem) -> "Turns":
        return Turns()


class Turns:
    """One episode."""

    def __init__(self) -> None:
        self.count = 0

    def reply(self, text: str, stop: StopReason) -> Reply:
        self.count += 1
        share = sum(not sign.isalpha() for sign in text) / max(1, len(text))
        return Reply(content="again:", reward=share, state=text[:1], done=self.count == 2)
