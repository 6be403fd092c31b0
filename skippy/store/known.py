"""What is in the folder, in memory: which files go on from which, and what they hold of a prompt."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from skippy.history import common_length
from skippy.store.format import ROOT, Entry, Tokens
from skippy.store.index import Row

__all__ = ["DiskSpan", "DiskState", "Found", "Known", "least_worth", "of_prompt", "onward"]

_SETTLED = 600.0  # seconds after which what leads from the first token to an entry is not written any more


class DiskState:
    """What a plan takes of a file: as a Segment or a Checkpoint, but for its bytes, which `DiskTier.open` maps."""

    tier = "disk"

    def __init__(self, row: Row) -> None:
        entry = row.entry
        self.row = row
        self.damaged = False
        self.opened = False
        self.nbytes = entry.nbytes
        self.start, self.end, self.length = entry.start, entry.end, entry.end
        self.window_from, self.flags = entry.window_from, entry.flags


@dataclass(frozen=True)
class DiskSpan:
    """A segment on disk: it holds [start, end), of which [start, reach) is on the path that was asked for."""

    start: int
    end: int
    reach: int
    payload: DiskState
    node: None = None


@dataclass(frozen=True)
class Found:
    """What the folder holds of a prompt: segments in order, and checkpoints on the path, shallow to deep."""

    spans: tuple[DiskSpan, ...] = ()
    checkpoints: tuple[DiskState, ...] = ()

    @property
    def reach(self) -> int:
        """How many leading tokens of the prompt something is held of."""
        ends = [span.reach for span in self.spans] + [state.length for state in self.checkpoints]
        return max(ends, default=0)


class Known:
    """The entries of a folder by their names, and where their paths lie.  For one thread at a time."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        # By namespace, path before and first token: as in a radix tree, two seldom share all of these.
        self._segments: dict[tuple[str, str, int], list[Row]] = {}
        self._checkpoints: dict[tuple[str, str], Row] = {}  # by namespace and path
        self._places: dict[str, Counter[int]] = {}  # namespace -> where segments begin and checkpoints lie
        self._sorted: dict[str, list[int]] = {}
        self._lengths: dict[str, Counter[int]] = {}  # namespace -> lengths of its checkpoints
        self.written = 0  # entries that have an id

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self._rows.values()))

    def get(self, name: str) -> Row | None:
        """The entry with this file name."""
        return self._rows.get(name)

    def holds(self, row: Row) -> bool:
        """Whether it is this very row that is known under its name."""
        return self._rows.get(row.name) is row

    def add(self, row: Row) -> None:
        """Note an entry, in the place of what had its name.  O(1) where its place is known."""
        old = self._rows.get(row.name)
        if old is not None:
            self.remove(old)
        self._rows[row.name] = row
        self.written += row.id != 0
        entry = row.entry
        if entry.kind == "segment":
            self._segments.setdefault(_place(entry), []).append(row)
        else:
            self._checkpoints[entry.namespace, entry.path] = row
            self._lengths.setdefault(entry.namespace, Counter())[entry.end] += 1
        self._count(entry, 1)

    def remove(self, row: Row) -> None:
        """Forget an entry, if it is the one that is known."""
        if not self.holds(row):
            return
        del self._rows[row.name]
        self.written -= row.id != 0
        entry = row.entry
        if entry.kind == "segment":
            siblings = self._segments[_place(entry)]
            siblings.remove(row)
            if not siblings:
                del self._segments[_place(entry)]
        else:
            del self._checkpoints[entry.namespace, entry.path]
            lengths = self._lengths[entry.namespace]
            lengths[entry.end] -= 1
            if not lengths[entry.end]:
                del lengths[entry.end]
        self._count(entry, -1)

    def _count(self, entry: Entry, by: int) -> None:
        places = self._places.setdefault(entry.namespace, Counter())
        before = places[entry.start]
        places[entry.start] = before + by
        if not places[entry.start]:
            del places[entry.start]
        if not before or entry.start not in places:
            self._sorted.pop(entry.namespace, None)

    def places(self, namespace: str) -> list[int]:
        """Where segments of a namespace begin and its checkpoints lie, rising.  O(1) where nothing changed."""
        found = self._sorted.get(namespace)
        if found is None:
            found = self._sorted[namespace] = sorted(self._places.get(namespace, ()))
        return found

    def has_checkpoint(self, namespace: str, path: str) -> bool:
        """Whether there is a checkpoint of the path with this digest, or one waits to be written."""
        return (namespace, path) in self._checkpoints

    def find(self, namespace: str, tokens: Tokens, held: int = 0, *, queued: bool = False) -> Found:
        """What is held of a path whose first `held` tokens are somewhere else; with `queued` what waits to be written.

        O(tokens + places of the namespace).
        """
        lengths = self._lengths.get(namespace, Counter())
        spans: list[DiskSpan] = []
        checkpoints: list[DiskState] = []
        text = np.ascontiguousarray(tokens, np.int32).data.cast("B")
        state, at, reach = xxhash.xxh3_128(namespace.encode()), 0, held
        for place in self.places(namespace):
            if place > len(tokens):
                break
            if place > reach and place not in lengths:
                continue  # behind a gap
            if place > at:
                state.update(text[4 * at : 4 * place])
                at = place
            path = state.hexdigest() if place else ROOT
            following = (namespace, path, int(tokens[place]) if place < len(tokens) else -1)
            for row in self._segments.get(following, ()) if place <= reach else ():
                common = common_length(row.entry.tokens, tokens[place : row.entry.end])
                if common and (row.id or queued):
                    spans.append(DiskSpan(place, row.entry.end, place + common, DiskState(row)))
                    reach = max(reach, place + common)
            point = self._checkpoints.get((namespace, path))
            if point is not None and (point.id or queued):
                checkpoints.append(DiskState(point))
        return Found(tuple(spans), tuple(checkpoints))


def _place(entry: Entry) -> tuple[str, str, int]:
    return entry.namespace, entry.before, int(entry.tokens[0]) if len(entry.tokens) else -1


def onward(rows: Iterable[Row]) -> tuple[dict[Row, list[tuple[int, Row]]], set[Row]]:
    """What goes on from each entry, and at which length; and the entries that some chain from the first token leads to.

    O(entries + their tokens + places within them).
    """
    segments: dict[tuple[str, str], list[Row]] = {}
    checkpoints: dict[tuple[str, str], Row] = {}
    places: dict[str, set[int]] = {}
    reached: set[Row] = set()
    for row in rows:
        entry = row.entry
        places.setdefault(entry.namespace, set()).add(entry.start)
        if entry.kind == "segment":
            segments.setdefault((entry.namespace, entry.before), []).append(row)
        else:
            checkpoints[entry.namespace, entry.path] = row
            if not entry.flags:  # it holds everything itself
                reached.add(row)
    in_order = {namespace: sorted(found) for namespace, found in places.items()}
    children: dict[Row, list[tuple[int, Row]]] = {}
    stack: list[tuple[Row, Any]] = []
    for (namespace, before), found in segments.items():
        if before == ROOT:
            stack += [(row, xxhash.xxh3_128(namespace.encode())) for row in found]
            reached.update(found)
    while stack:
        row, state = stack.pop()
        entry = row.entry
        at, text = entry.start, np.ascontiguousarray(entry.tokens).data.cast("B")
        order = in_order[entry.namespace]
        for place in order[bisect_right(order, entry.start) : bisect_right(order, entry.end)]:
            state.update(text[4 * (at - entry.start) : 4 * (place - entry.start)])
            at = place
            key = entry.namespace, state.hexdigest()
            for child in segments.get(key, ()):
                children.setdefault(row, []).append((place, child))
                if child not in reached:
                    reached.add(child)
                    stack.append((child, state.copy()))
            point = checkpoints.get(key)
            if point is not None:
                children.setdefault(row, []).append((place, point))
                reached.add(point)
    return children, reached


def least_worth(
    rows: list[Row], wanted: int, now: float, use: Callable[[Row], tuple[float, int]] | None = None
) -> list[Row]:
    """Which entries are to leave so that `wanted` bytes come free, all that may if that is not enough.

    What others go on from stays while they do, and so does what leads to an entry that waits to be written.  Of
    the rest those of the least worth go: the number of uses over the time since the last one; first what nothing leads
    to any more.  `use(row)` tells when it was used last and how often.
    """
    children, reached = onward(rows)
    parents: dict[Row, list[Row]] = {}
    for row, found in children.items():
        for _, child in found:
            parents.setdefault(child, []).append(row)
    left = {row: len(found) for row, found in children.items()}

    def key(row: Row) -> tuple[float, float, int]:
        used, hits = (row.used, row.hits) if use is None else use(row)
        lost = row not in reached and now - row.created > _SETTLED
        return (-1.0 if lost else (hits + 1) / (1 + max(0.0, now - used)), used, row.id)

    heap = [(key(row), i) for i, row in enumerate(rows) if row.id and not left.get(row)]
    number = {row: i for i, row in enumerate(rows)}
    heapq.heapify(heap)
    leaving: list[Row] = []
    while heap and wanted > 0:
        row = rows[heapq.heappop(heap)[1]]
        leaving.append(row)
        wanted -= row.size
        for parent in parents.get(row, ()):
            left[parent] -= 1
            if not left[parent] and parent.id:
                heapq.heappush(heap, (key(parent), number[parent]))
    return leaving


def of_prompt(rows: list[Row], found: Found, length: int) -> set[Row]:
    """Which of the entries of a namespace go with a prompt of `length` tokens, of which `found` is held.

    What holds its end, what goes on from there, and of its head what nobody else is known to go on from.
    """
    children, _ = onward(rows)
    gone: set[Row] = set()
    stack = [span.payload.row for span in found.spans if span.reach == length]
    stack += [state.row for state in found.checkpoints if state.length == length]
    while stack:
        row = stack.pop()
        if row not in gone:
            gone.add(row)
            stack += [child for place, child in children.get(row, ()) if place >= length]
    whole = [span for span in found.spans if span.reach == span.end]
    for span in sorted(whole, key=lambda span: -span.end):
        head = span.payload.row
        if all(child in gone or child.entry.kind == "checkpoint" for _, child in children.get(head, ())):
            gone.add(head)
    for state in found.checkpoints:
        at = state.length
        if state.flags:  # beside attention: somebody else's, where some of that is left
            shared = any(span.reach >= at and span.payload.row not in gone for span in found.spans)
        else:  # nothing tells which of the deeper ones go on from it
            shared = any(row not in gone and row.entry.end > at for row in rows)
        if not shared:
            gone.add(state.row)
    return gone
