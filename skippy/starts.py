"""Where the messages of a chat begin in its prompt, by tokens, whatever template it was rendered with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

__all__ = ["message_starts"]

_NEWEST = 3


def message_starts(messages: Sequence[Mapping[str, Any]], pieces: Sequence[bytes]) -> list[int]:
    """Indices of the tokens with which the contents of messages begin: of the second one, and of the last three.

    Those are the places where conversations part: after what they share, and where the newest messages are edited.
    `pieces` are the bytes of the prompt's tokens, control tokens as text.  The contents are looked for one after the
    other; one that the template changed is passed over, and a wrong place costs a pause and nothing else.
    O(prompt in bytes + messages).

    >>> pieces = [b"<u>", b"Hi", b"</u>", b"<a>", b"Hello", b"</a>", b"<u>", b"Bye", b"</u>", b"<a>"]
    >>> message_starts([{"content": "Hi"}, {"content": "Hello"}, {"content": "Bye"}], pieces)
    [1, 4, 7]
    """
    text = b"".join(pieces)
    begins = [0, *accumulate(len(piece) for piece in pieces)]
    starts: dict[int, int] = {}
    at = 0
    for i, message in enumerate(messages):
        content = _text(message.get("content")).strip().encode("utf-8")
        found = text.find(content, at) if content else -1
        if found >= 0:
            starts[i] = bisect_right(begins, found) - 1
            at = found + len(content)
    wanted = {1, *range(len(messages) - _NEWEST, len(messages))}
    return sorted({start for i, start in starts.items() if i in wanted and start > 0})


def _text(content: Any) -> str:
    """The text of a message: it may be a list of parts, of which the first text counts."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                return str(part["text"])
    return ""
