"""From tokens to text while they arrive: characters that come in pieces, and stop texts across tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

__all__ = ["TextStream", "as_stops"]


def as_stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop texts as a tuple.  ValueError for an empty one, which would stop everything."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop holds {text!r}, expected texts of at least one character")
    return stops


class TextStream:
    r"""Takes the bytes of tokens and gives out text that is final.

    Text is held back while it is half a character or could be the beginning of a stop text.  `text` is all
    that was given out; once `stopped`, it ends right before the stop text.

    >>> stream = TextStream(("END",))
    >>> stream.feed(b"caf\xc3"), stream.feed(b"\xa9 E"), stream.feed(b"ND of"), stream.stopped
    ('caf', 'é ', '', True)
    >>> stream.text
    'café '
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.text = ""
        self.stopped = False

    def feed(self, piece: bytes) -> str:
        """Add the bytes of a token; returns the text that has become final.  O(held text and stops)."""
        return self._take(self._decoder.decode(piece))

    def finish(self) -> str:
        """No more tokens come: returns what was held back; half a character becomes U+FFFD."""
        final = self._take(self._decoder.decode(b"", True))
        if not self.stopped:
            final += self._held
            self.text += self._held
        self._held = ""
        return final

    def _take(self, new: str) -> str:
        if self.stopped:
            return ""
        held = self._held + new
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            final, self._held = held[: min(found)], ""
        else:
            keep = max((self._overlap(held, stop) for stop in self._stops), default=0)
            final, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += final
        return final

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a beginning of `stop`."""
        for n in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:n]):
                return n
        return 0
