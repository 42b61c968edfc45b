"""DAPO's soft punishment for overlong responses, added to the reward.

0 up to L_max - L_c; falling linearly to -1 at L_max; -1 beyond; times `factor`.
"""

from legato.core.parts import Part, number, part
from legato.core.shapes import PerSequence, RowIds
from legato.errors import InputError


@part("shaping", "overlong-punishment")
class OverlongPunishment(Part):
    """max_response_tokens is L_max, cache_tokens is L_c."""

    max_response_tokens: float = number(default=20480, says="L_max: the length at which the punishment is full.", above=0.0)
    cache_tokens: float = number(default=4096, says="L_c: over how many tokens before L_max it grows.", above=0.0)
    factor: float = number(default=1.0, says="Weight of the punishment.", minimum=0.0)

    def __post_init__(self) -> None:
        if self.cache_tokens > self.max_response_tokens:
            raise InputError(
                f"shaping 'overlong-punishment': cache_tokens = {self.cache_tokens} exceeds"
                f" max_response_tokens = {self.max_response_tokens}"
            )

    def punishment(self, lengths: RowIds) -> PerSequence:
        """What is added to the reward of each response, by its length in tokens."""
        free = self.max_response_tokens - self.cache_tokens
        return self.factor * ((free - lengths.double()) / self.cache_tokens).clamp(-1.0, 0.0)
