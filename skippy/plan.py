"""Which parts of a prompt to bring back, and from where.  Pure: nothing is changed and nothing native is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from skippy._radix import Match, Node, Span
from skippy.capability import Capability
from skippy.speeds import Speeds
from skippy.store.tier import DiskSpan, Found

__all__ = ["Part", "Plan", "make_plan", "window_end", "window_reach"]

DENSE = Capability(None)
NOTHING = Found()
AnySpan: TypeAlias = Span | DiskSpan
GetPayload = Callable[[Node, Literal["checkpoint", "logits"]], Any]


def _nothing(node: Node, kind: str) -> None:
    return None


@dataclass(frozen=True)
class Part:
    """The tokens [start, end), about `nbytes`, to be taken from the payload `kind` that `node` carries.

    `kind` is "resident", "segment", or "checkpoint": the point state at `end`, which goes on top of what came before.
    """

    tier: str  # "resident", "ram" or "disk"
    kind: str
    node: Node | None  # None for what is on disk
    payload: Any
    start: int
    end: int
    nbytes: int = 0


@dataclass(frozen=True)
class Plan:
    """`parts` in order, without gaps from 0 to `length`; `reason` as in a ReuseReport.

    `window` is the first position of which segments bring back layers with a sliding window; None where all is.
    """

    parts: tuple[Part, ...]
    matched: int
    reason: str
    window: int | None = None

    @property
    def length(self) -> int:
        """How many leading tokens will be restored."""
        return self.parts[-1].end if self.parts else 0


def make_plan(
    match: Match,
    prompt_tokens: int,
    *,
    min_tokens: int,
    speeds: Speeds,
    shape: Capability = DENSE,
    payload: GetPayload = _nothing,
    logits: bool = False,
    disk: Found = NOTHING,
) -> Plan:
    """The longest restorable prefix that is worth it; `payload(node, kind)` tells what a node carries.

    At most `prompt_tokens - 1`, because one token must be evaluated to get logits; with `logits`, where those of this
    very prompt are kept, all of it.  Residents come first, then segments for as long as they go on without a gap and
    are cheaper to bring back than to evaluate.  With a sliding window the prefix ends where the stored window reaches
    back far enough, with point state at a checkpoint.  O(nodes of the matched path).
    """
    matched = max(match.matched, disk.reach)
    spans: list[AnySpan] = [*match.segments, *disk.spans]
    kept = payload(match.logits, "logits") if logits and match.logits is not None else None
    wanted = min(matched, prompt_tokens if kept is not None and not kept.damaged else prompt_tokens - 1)
    if matched == 0:
        return Plan((), 0, "never_seen")
    if matched < min_tokens:
        return Plan((), matched, "below_min_tokens")
    if shape.needs_checkpoints:
        return _at_a_checkpoint(match, disk, wanted, matched, min_tokens, speeds, shape, payload)
    parts: list[Part] = []
    length = min(match.resident_length, wanted)
    if length > 0 and match.resident is not None:
        parts.append(Part("resident", "resident", match.resident, None, 0, length))
    found, worthless = _segments(spans, length, wanted, speeds)
    if shape.window and disk.spans:  # what RAM holds of a longer path lacks the window here, which the disk may have
        other, dear = _segments(spans, length, wanted, speeds, whole=True)
        if window_end(other, shape.window) > window_end(found, shape.window):
            found, worthless = other, dear
    parts += found
    window = None
    if shape.window and parts:
        at_checkpoint = _at_a_checkpoint(match, disk, wanted, matched, min_tokens, speeds, shape, payload)
        length = window_end(parts, shape.window)
        if at_checkpoint.length > length:
            return at_checkpoint
        window = max(0, length - shape.window)
        parts = _cut(parts, length) if length >= min_tokens else []
    if not parts:
        reason = "not_worth_it" if worthless else "no_checkpoint" if found else "evicted_recently"
        return Plan((), matched, reason)
    reason = "hit" if parts[-1].end == wanted else "partial"
    return Plan(tuple(parts), matched, reason, window)


def _segments(
    spans: Sequence[AnySpan], length: int, wanted: int, speeds: Speeds | None, *, whole: bool = False
) -> tuple[list[Part], bool]:
    """Parts that go on from `length` without a gap, and whether they end because more is not worth it.

    What is in RAM comes before what is on disk, and of these what reaches farthest; with `whole` those come first that
    are on the path to their end.
    """
    parts: list[Part] = []
    while length < wanted:
        going_on = [span for span in spans if span.start <= length < span.reach and not span.payload.damaged]
        if not going_on:
            break
        span = max(going_on, key=lambda x: (whole and x.reach == x.end, x.payload.tier == "ram", x.reach))
        end = min(span.reach, wanted)
        nbytes = span.payload.nbytes * (end - length) // (span.end - span.start)
        if speeds is not None and not speeds.worth_restoring(nbytes, end - length, span.payload.tier):
            return parts, True
        parts.append(Part(span.payload.tier, "segment", span.node, span.payload, length, end, nbytes))
        length = end
    return parts, False


def window_reach(spans: Sequence[Span], window: int, length: int) -> int:
    """The longest prefix, at most `length`, that the segments on a path hold with its window.  O(segments)."""
    parts, _ = _segments(spans, 0, length, None)
    return window_end(parts, window)


def window_end(parts: Sequence[Part], window: int) -> int:
    """The longest prefix at whose end the layers with a window have all that the next token sees.

    That are the `window - 1` tokens before it, or all of them.  Each segment holds the end of what it covers, from
    its `window_from` on.  0 if there is no such prefix.  O(parts).
    """
    end: int | None = None  # of the run of held positions that is being followed back
    for part in reversed(parts):
        held_from = max(part.payload.window_from, part.start)
        if held_from >= part.end:  # nothing of the window is held here
            end = None
            continue
        if end is None:
            end = part.end
        if held_from == 0 or end >= held_from + window - 1:
            return end
        if held_from > part.start:  # a gap: the run ends here
            end = None
    return 0


def _cut(parts: Sequence[Part], length: int) -> list[Part]:
    """The parts up to `length` tokens."""
    kept = []
    for part in parts:
        if part.start >= length:
            break
        end = min(part.end, length)
        nbytes = part.nbytes * (end - part.start) // (part.end - part.start)
        kept.append(Part(part.tier, part.kind, part.node, part.payload, part.start, end, nbytes))
    return kept


def _at_a_checkpoint(
    match: Match,
    disk: Found,
    wanted: int,
    matched: int,
    min_tokens: int,
    speeds: Speeds,
    shape: Capability,
    payload: GetPayload,
) -> Plan:
    """The deepest checkpoint whose attention is held from the first token on; of equal ones that in RAM."""
    held = _segments([*match.segments, *disk.spans], 0, wanted, None)[0] if shape.has_attention else []
    covered = held[-1].end if held else 0
    worthless = False
    places: list[tuple[int, bool, Node | None, Any]] = [
        (node.length, True, node, payload(node, "checkpoint")) for node in match.checkpoints
    ]
    places += [(state.length, False, None, state) for state in disk.checkpoints]
    for length, in_ram, node, checkpoint in sorted(places, key=lambda place: (-place[0], not place[1])):
        if shape.window and length == wanted + 1:
            length = wanted  # a window is saved with one token more than the next one sees: it can lose its last
        if length > wanted or (shape.has_attention and length > covered):
            continue
        if length < min_tokens:
            break
        if checkpoint is None or checkpoint.damaged:
            continue
        start, tier = length if shape.has_attention else 0, "ram" if in_ram else "disk"
        parts = [*_cut(held, length), Part(tier, "checkpoint", node, checkpoint, start, length, checkpoint.nbytes)]
        slowest = "disk" if any(part.tier == "disk" for part in parts) else "ram"
        if speeds.worth_restoring(sum(part.nbytes for part in parts), length, slowest):
            reason = "hit" if length == wanted else "partial"
            return Plan(tuple(parts), matched, reason, length if shape.window else None)
        worthless = True
    return Plan((), matched, "not_worth_it" if worthless else "no_checkpoint")
