"""Sequence ids of one context: lanes for requests, residents for cached paths, one for captures.

Every call here leaves the sequences it names in a known state: copies and loads are verified by position,
and a sequence that cannot be emptied is set aside, with its cells counted as lost, and never used again.
The caller holds the context's lock.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from skippy.capability import Capability
from skippy.errors import NativeError, SkippyError

__all__ = ["NativeContext", "Pool"]

log = logging.getLogger("skippy")


class NativeContext(Protocol):
    """What the pool needs of `skippy._llama.Context`; tests put a failing one in its place."""

    n_ctx: int
    n_batch: int
    n_seq_max: int
    n_vocab: int

    def seq_cp(self, src: int, dst: int, start: int = 0, end: int = -1) -> None: ...
    def seq_rm(self, seq: int, start: int = 0, end: int = -1) -> bool: ...
    def seq_pos_min(self, seq: int) -> int: ...
    def seq_pos_max(self, seq: int) -> int: ...
    def state_size(self, seq: int, flags: int = 0) -> int: ...
    def save(self, seq: int, out: Any, flags: int = 0) -> int: ...
    def load(self, seq: int, data: Any, flags: int = 0) -> None: ...
    def decode(self, seq: int, start: int, tokens: Any, outputs: Any = "last") -> int: ...


class Pool:
    """Hands out sequence ids of `context` and moves cells between them.

    Ids 0 .. lanes-1 are lanes, the next is for captures, the next `residents` are for cached paths.  `shape` is what
    the probe found; it says how much the positions of a sequence tell.
    """

    def __init__(self, context: NativeContext, *, lanes: int, residents: int, shape: Capability | None = None) -> None:
        needed = lanes + 1 + residents
        if lanes < 1 or residents < 0 or needed > context.n_seq_max:
            raise ValueError(
                f"{lanes} lanes, 1 capture and {residents} residents need {needed} sequence ids, "
                f"the context has {context.n_seq_max}"
            )
        self.context = context
        self.shape = Capability(None) if shape is None else shape
        self.n_cells = context.n_ctx
        self.set_aside: dict[int, int] = {}  # sequence id -> cells that could not be freed
        self._at_most: dict[int, int] = {}  # sequence id -> cells it may hold that its positions do not show
        self._lanes = list(range(lanes))
        self._capture: int | None = lanes
        self._residents = list(range(lanes + 1, needed))
        self._lane_ids = frozenset(self._lanes)
        self._busy_lanes: set[int] = set()

    @property
    def lost_cells(self) -> int:
        """Cells of sequences that were set aside; cells that two of them share count twice, so it is never too few."""
        return sum(self.set_aside.values())

    @property
    def free_residents(self) -> int:
        """How many ids for cached paths are free."""
        return len(self._residents)

    def take_lane(self) -> int | None:
        """The lowest free lane, or None."""
        if not self._lanes:
            self.recover()
        if not self._lanes:
            return None
        lane = heapq.heappop(self._lanes)
        self._busy_lanes.add(lane)
        return lane

    def take_resident(self) -> int | None:
        """The lowest free id for a cached path, or None."""
        return heapq.heappop(self._residents) if self._residents else None

    def give_back(self, seq: int) -> None:
        """Empty `seq` and make its id free again; NativeError, with the id set aside, if it cannot be emptied."""
        self._busy_lanes.discard(seq)
        self.empty(seq)
        if self._capture is None and seq not in self._lane_ids:  # all others are taken
            self._capture = seq
        else:
            heapq.heappush(self._lanes if seq in self._lane_ids else self._residents, seq)

    def expect(self, seq: int, cells: int) -> None:
        """`seq` is about to be given cells: up to `cells` in all, should what is being done break off halfway."""
        if not self.shape.residents:
            self._at_most[seq] = max(cells, self._at_most.get(seq, 0))

    def recover(self) -> None:
        """Try once more to empty the ids that were set aside: what failed once need not fail for ever.

        Lanes that a request still has are its own to give back.
        """
        for seq in list(self.set_aside.keys() - self._busy_lanes):
            with suppress(NativeError):
                self.give_back(seq)
                log.info("sequence %d could be emptied after all", seq)

    def length(self, seq: int) -> int:
        """Tokens in `seq`, counted from position 0: its highest position and one."""
        return self.context.seq_pos_max(seq) + 1

    def empty(self, seq: int) -> None:
        """Drop all cells of `seq`, which is not set aside any more.  NativeError, and it is, if some remain."""
        cells = 0
        try:
            if self.shape.residents:
                if self.context.seq_pos_max(seq) == -1:
                    self._emptied(seq)
                    return
                cells = self.context.seq_pos_max(seq) - self.context.seq_pos_min(seq) + 1
            else:  # a sequence can have cells that its positions do not show, while it is being restored
                cells = max(self.context.seq_pos_max(seq) + 1, self._at_most.get(seq, 0))
            if self.context.seq_rm(seq) and self.context.seq_pos_max(seq) == -1:
                self._emptied(seq)
                return
            reason = "its cells remain"
        except (SkippyError, RuntimeError) as error:
            reason = str(error)
        self._put_aside(seq, cells)
        raise NativeError(f"sequence {seq} could not be emptied ({reason}); it is set aside with {cells} cells")

    def _emptied(self, seq: int) -> None:
        self._at_most.pop(seq, None)
        self.set_aside.pop(seq, None)  # it could not be emptied before, and could now

    def _put_aside(self, seq: int, cells: int) -> None:
        if seq not in self.set_aside:
            log.warning("sequence %d could not be emptied: set aside, %d cells lost", seq, cells)
        self.set_aside[seq] = max(cells, self.set_aside.get(seq, 0))
        if seq == self._capture:
            self._capture = self.take_resident()

    def trim(self, seq: int, length: int) -> None:
        """Cut `seq` after its first `length` tokens.  NativeError if it does not end there afterwards."""
        if length == 0:
            self.empty(seq)
            return
        if self.length(seq) == length:
            return  # also where it could not be cut any shorter
        if not self.context.seq_rm(seq, length) or self.length(seq) != length or not self.is_whole(seq, length):
            raise NativeError(f"sequence {seq} could not be cut to {length} tokens: it has {self.length(seq)}")

    def is_whole(self, seq: int, length: int) -> bool:
        """Whether `seq`, which ends at `length`, has what the next token needs to see.  O(1).

        A recurrent state stands at one position.  A window of W tokens must reach back to length - W + 1.
        """
        first = self.context.seq_pos_min(seq)
        if self.shape.needs_checkpoints:
            return first >= 0
        return 0 <= first <= (max(0, length - self.shape.window + 1) if self.shape.window else 0)

    def append(self, src: int, dst: int, start: int, end: int) -> None:
        """Let `dst`, which ends at `start`, share the cells [start, end) of `src`.  Metadata only.

        NativeError, with `dst` cut back to `start`, if it does not end at `end` afterwards.
        """
        if self.length(dst) != start:
            raise NativeError(f"sequence {dst} has {self.length(dst)} tokens, expected {start} before appending")
        self.context.seq_cp(src, dst, start, end)
        if self.length(dst) != end:
            found = self.length(dst)
            self.trim(dst, start)
            raise NativeError(f"sequence {dst} has {found} tokens after copying [{start}, {end}) of {src}")

    @contextmanager
    def capture(self, src: int, start: int, end: int) -> Iterator[int]:
        """A sequence that shares the cells [start, end) of `src` alone, for as long as the block runs."""
        with self.scratch(end - start) as temp:
            self.context.seq_cp(src, temp, start, end)
            if self.shape.residents and (self.context.seq_pos_min(temp) != start or self.length(temp) != end):
                raise NativeError(f"the capture of [{start}, {end}) of sequence {src} holds other positions")
            yield temp

    @contextmanager
    def scratch(self, cells: int = 0) -> Iterator[int]:
        """The empty sequence for captures, for up to `cells`; it is emptied when the block ends, however it ends."""
        if self._capture is None:
            if not self._residents:
                self.recover()
            if self._capture is None:  # else it was recovered
                self._capture = self.take_resident()
        temp = self._capture
        if temp is None:
            raise NativeError("no sequence id is left for captures")
        self.empty(temp)
        self.expect(temp, cells)
        try:
            yield temp
        finally:
            self.empty(temp)
