"""Which parts of a prompt to bring back, and from where.  Pure: nothing is changed and nothing native is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skippy._radix import Match, Node
from skippy.speeds import Speeds

__all__ = ["Part", "Plan", "make_plan"]


@dataclass(frozen=True)
class Part:
    """The tokens [start, end), about `nbytes`, to be taken from the resident or the segment that `node` carries."""

    tier: str  # "resident" or "ram"
    node: Node
    payload: Any
    start: int
    end: int
    nbytes: int = 0


@dataclass(frozen=True)
class Plan:
    """`parts` in order, without gaps from 0 to `length`; `reason` as in a ReuseReport."""

    parts: tuple[Part, ...]
    matched: int
    reason: str

    @property
    def length(self) -> int:
        """How many leading tokens will be restored."""
        return self.parts[-1].end if self.parts else 0


def make_plan(match: Match, prompt_tokens: int, *, min_tokens: int, speeds: Speeds) -> Plan:
    """Plan for a dense model: the longest restorable prefix, at most `prompt_tokens - 1`, that is worth it.

    One token is always left to evaluate, because logits are not kept.  The resident part comes first, then
    segments for as long as they go on without a gap and are cheaper to bring back than to evaluate.
    O(nodes of the matched path).
    """
    matched = match.matched
    wanted = min(matched, prompt_tokens - 1)
    if matched == 0:
        return Plan((), 0, "never_seen")
    if matched < min_tokens:
        return Plan((), matched, "below_min_tokens")
    parts: list[Part] = []
    length = min(match.resident_length, wanted)
    if length > 0 and match.resident is not None:
        parts.append(Part("resident", match.resident, None, 0, length))
    worthless = False
    for span in match.segments:
        if span.start > length or length >= wanted:
            break
        end = min(span.reach, wanted)
        if end <= length:
            continue
        if span.payload.damaged:
            break
        nbytes = span.payload.nbytes * (end - length) // (span.end - span.start)
        if not speeds.worth_restoring(nbytes, end - length):
            worthless = True
            break
        parts.append(Part("ram", span.node, span.payload, length, end, nbytes))
        length = end
    if not parts:
        return Plan((), matched, "not_worth_it" if worthless else "evicted_recently")
    reason = "hit" if length == wanted else "partial"
    return Plan(tuple(parts), matched, reason)
