"""DAPO's soft punishment for overlong responses, added to the reward.

0 up to L_max - L_c; falling linearly to -1 at L_max; -1 beyond; times `factor`. L_max is the longest response of the run.
"""

from legato.core.fields import number
from legato.core.settings import settings
from legato.core.shapes import PerSequence, RowIds


@settings()
class OverlongPunishment:
    """DAPO's soft punishment of responses that come near the limit."""

    cache_share: float = number(
        default=0.2,
        says="The last share of rollouts.max_response_tokens over which the punishment grows from 0 to full.",
        above=0.0,
        maximum=1.0,
    )
    factor: float = number(default=1.0, says="The full punishment.", above=0.0, maximum=1e6)

    def punishment(self, lengths: RowIds, longest: int) -> PerSequence:
        """The term added to the reward of each response, by its length in tokens. L_max is `longest`."""
        cache = self.cache_share * longest
        return self.factor * ((longest - cache - lengths.double()) / cache).clamp(-1.0, 0.0)
