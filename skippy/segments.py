"""Saved state in RAM: delta segments of paths, each with its checksum, in memory that stays mapped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from skippy.arena import Arena, Block
from skippy.errors import StateError
from skippy.layout import Bytes, check_positions, cut
from skippy.pool import Pool

__all__ = ["LoadRefused", "RamStore", "Segment"]


class LoadRefused(StateError):
    """llama.cpp did not take a state whose checksum is right."""


@dataclass(eq=False)
class Segment:
    """The saved attention state of the tokens [start, end) of a path: `block` holds it, `checksum` proves it."""

    start: int
    end: int
    block: Block
    checksum: int
    damaged: bool = False  # it failed its check while a request was using it: never to be offered again

    @property
    def nbytes(self) -> int:
        """Bytes that this segment takes from the budget (its block, rounded up)."""
        return self.block.reserved


class RamStore:
    """Saves ranges of sequences into at most `capacity` bytes and brings them back.

    `seconds_saving`, `seconds_restoring`, `bytes_saved` and `bytes_restored` grow while it works.
    """

    def __init__(self, capacity: int) -> None:
        self.arena = Arena(capacity)
        self.seconds_saving = 0.0
        self.seconds_restoring = 0.0
        self.saves = 0
        self.restores = 0
        self.bytes_saved = 0
        self.bytes_restored = 0
        self.scratch: Bytes = np.empty(0, np.uint8)

    def save(
        self, pool: Pool, src: int, start: int, end: int, make_room: Callable[[int], Block | None] | None = None
    ) -> Segment | None:
        """Save the tokens [start, end) of sequence `src`; None where they do not fit.

        `make_room(size)` is asked for a block where none is free; it is not asked for what could never fit.
        O(bytes).  StateError or NativeError where llama.cpp fails; then nothing is kept.
        """
        began = time.perf_counter()
        block: Block | None = None
        try:
            with pool.capture(src, start, end) as temp:
                size = pool.context.state_size(temp)
                if not self.arena.fits(size):
                    return None
                block = self.arena.allocate(size) or (make_room(size) if make_room else None)
                if block is None:
                    return None
                written = pool.context.save(temp, block.view)
                if written != size:
                    raise StateError(f"the state of sequence {src} took {written} bytes, {size} were announced")
            check_positions(block.view, start, end)
            checksum = xxhash.xxh3_64_intdigest(block.view)
        except BaseException:
            if block is not None:
                self.arena.free(block)
            raise
        self.seconds_saving += time.perf_counter() - began
        self.saves += 1
        self.bytes_saved += size
        return Segment(start, end, block, checksum)

    def verify(self, segment: Segment) -> None:
        """StateError unless the bytes are those that were saved and hold the positions they should.  O(bytes)."""
        if xxhash.xxh3_64_intdigest(segment.block.view) != segment.checksum:
            raise StateError(f"the saved state of [{segment.start}, {segment.end}) does not match its checksum")
        check_positions(segment.block.view, segment.start, segment.end)

    def restore(self, pool: Pool, segment: Segment, dst: int, start: int, end: int) -> None:
        """Append the tokens [start, end) of `segment` to sequence `dst`, which ends at `start`.  O(bytes).

        StateError where the segment is damaged (nothing has reached llama.cpp then), LoadRefused where llama.cpp
        does not take it: for want of cells, or because it is of another kind.  `dst` is then as before, or empty
        if `start` is 0.
        """
        began = time.perf_counter()
        self.verify(segment)
        state: Any = segment.block.view
        if (start, end) != (segment.start, segment.end):
            # Cut here, not in the pool: there it would take cells for tokens that nobody asked for.
            state = cut(state, start, end, self._room)
        if start == 0:
            self._load(pool, dst, state)
        else:
            with pool.scratch() as temp:
                self._load(pool, temp, state)
                pool.append(temp, dst, start, end)
        if pool.context.seq_pos_min(dst) != 0 or pool.length(dst) != end:
            raise StateError(f"sequence {dst} has {pool.length(dst)} tokens after a restore, expected {end}")
        self.seconds_restoring += time.perf_counter() - began
        self.restores += 1
        self.bytes_restored += len(state)

    def _room(self, size: int) -> Bytes:
        """Working memory for a cut; kept, and as large as the largest cut was.  It is no part of the budget."""
        if self.scratch.size < size:
            self.scratch = np.empty(size, np.uint8)
        return self.scratch

    @staticmethod
    def _load(pool: Pool, seq: int, state: Any) -> None:
        try:
            pool.context.load(seq, state)
        except StateError as error:
            raise LoadRefused(str(error)) from error

    def close(self) -> None:
        """Give all memory back; nothing that is saved can be read any more."""
        self.arena.close(abandon=True)
        self.scratch = np.empty(0, np.uint8)

    def drop(self, segment: Segment) -> None:
        """Give the memory of a segment back."""
        self.arena.free(segment.block)
