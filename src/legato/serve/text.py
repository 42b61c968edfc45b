"""Turns tokens into text as they come: stable text only, and no text that may belong to a stop string.

Texts of single tokens do not always join to the text of all: a character may need several tokens, and some tokenizers drop
the space of a first word. So each new text is the difference of two decodes that start a few tokens earlier.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_CONTEXT = 6
"""How many settled tokens each decode starts with."""
_MOST_UNSETTLED = 64
"""A model that writes bytes which are no text must not make every decode longer."""
_BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no whole character yet."""


@dataclass(slots=True)
class TextStream:
    """The text of one response. `push` takes its tokens, one list after the other."""

    tokenizer: Any
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    """Whether the stop string belongs to the text."""
    skip_special: bool = True
    """Whether special tokens are no text."""
    text: str = ""
    """All text so far, without what follows a stop string."""
    stop: str | None = None
    """The stop string that was found."""
    count: int = 0
    """How many tokens were pushed, up to and including the one that completed a stop string."""
    _tokens: list[int] = field(default_factory=list)
    _settled: int = 0
    """How many tokens have their text in `text`."""
    _sent: int = 0
    """How many characters `take` has returned."""

    def push(self, tokens: Sequence[int], last: bool = False) -> bool:
        """Add tokens; `last`: none will follow. Returns whether a stop string was found, after which nothing is added."""
        # Token by token only where it matters which of them completes a stop string.
        pieces: Sequence[Sequence[int]] = [[token] for token in tokens] if self.stops else [tokens]
        for piece in pieces:
            if self.stop is not None:
                break
            self._tokens += piece
            self.count += len(piece)
            self._decode(last=False)
        if last and self.stop is None:
            self._decode(last=True)
        return self.stop is not None

    def take(self, last: bool = False) -> str:
        """The text since the last call that no later token can change or turn into a stop string."""
        end = len(self.text)
        if not last and self.stop is None:
            end -= self._held_back()
        new = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return new

    def _decode(self, last: bool) -> None:
        start = max(0, self._settled - _CONTEXT)
        before, now = (
            self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special)
            for tokens in (self._tokens[start : self._settled], self._tokens[start:])
        )
        unsettled = len(self._tokens) - self._settled
        if not last and unsettled < _MOST_UNSETTLED and (len(now) <= len(before) or now.endswith(_BROKEN)):
            return
        searched = max(0, len(self.text) - max((len(stop) for stop in self.stops), default=0))
        self.text += now[len(before) :]
        self._settled = len(self._tokens)
        places = [(place, stop) for stop in self.stops if (place := self.text.find(stop, searched)) >= 0]
        if places:
            place, self.stop = min(places)
            self.text = self.text[: place + (len(self.stop) if self.keep_stop else 0)]

    def _held_back(self) -> int:
        """The length of the longest end of the text that is the beginning of a stop string."""
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
