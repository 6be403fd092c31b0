"""One region of memory with a fixed size, from which blocks are lent and to which they return.

Fresh pages cost several times the copy of the bytes that go into them, so what was touched once stays
mapped.  The size of the region is the cap: no path exists on which more is handed out.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_left, insort
from contextlib import suppress

__all__ = ["ALIGNMENT", "Arena", "Block"]

ALIGNMENT = 64  # bytes; a cache line, and what vector code likes


class Block:
    """`size` bytes lent by an arena.  `view` is writable memory; it is released when the block is given back."""

    __slots__ = ("reserved", "size", "start", "view")

    def __init__(self, start: int, size: int, reserved: int, view: memoryview) -> None:
        self.start = start
        self.size = size
        self.reserved = reserved
        self.view = view


class Arena:
    """Lends blocks out of `capacity` bytes (rounded down to 64), best fit, neighbours joined when they return.

    `used` counts the bytes lent, each block rounded up to 64.  Lending and giving back cost O(log n) searches
    and one O(n) list insertion in the number n of free gaps.

    >>> arena = Arena(1024)
    >>> block = arena.allocate(100)
    >>> arena.used, arena.allocate(2000)
    (128, None)
    >>> arena.free(block); arena.used
    0
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity}, expected a number of bytes from 0")
        self.capacity = capacity - capacity % ALIGNMENT
        self.used = 0
        self.peak = 0
        self._lent: dict[int, Block] = {}
        self._gaps: list[tuple[int, int]] = []  # (size, start), sorted: the best fit is found by bisection
        self._gap_at: dict[int, int] = {}  # start -> size
        self._gap_ending: dict[int, int] = {}  # end -> start
        self._map: mmap.mmap | None = None
        self._memory: memoryview | None = None
        if self.capacity:
            self._map = self._reserve(self.capacity)
            self._memory = memoryview(self._map)
            self._add_gap(0, self.capacity)

    @staticmethod
    def _reserve(size: int) -> mmap.mmap:
        """Address space only: pages come when they are touched, in large ones where the system has them."""
        if sys.platform == "win32":
            return mmap.mmap(-1, size)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        region = mmap.mmap(-1, size, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without large pages
                region.madvise(mmap.MADV_HUGEPAGE)
        return region

    def _add_gap(self, start: int, size: int) -> None:
        insort(self._gaps, (size, start))
        self._gap_at[start] = size
        self._gap_ending[start + size] = start

    def _remove_gap(self, start: int) -> int:
        size = self._gap_at.pop(start)
        del self._gap_ending[start + size]
        del self._gaps[bisect_left(self._gaps, (size, start))]
        return size

    def fits(self, size: int) -> bool:
        """Whether `size` bytes could be lent if nothing else were."""
        return 0 < size <= self.capacity

    def allocate(self, size: int) -> Block | None:
        """Lend `size` bytes, or None where no gap is large enough.  ValueError unless size is at least 1."""
        if size < 1:
            raise ValueError(f"size is {size}, expected at least 1 byte")
        reserved = -(-size // ALIGNMENT) * ALIGNMENT
        i = bisect_left(self._gaps, (reserved, 0))
        if i == len(self._gaps) or self._memory is None:
            return None
        gap, start = self._gaps[i]
        self._remove_gap(start)
        if gap > reserved:
            self._add_gap(start + reserved, gap - reserved)
        block = Block(start, size, reserved, self._memory[start : start + size])
        self._lent[start] = block
        self.used += reserved
        self.peak = max(self.peak, self.used)
        return block

    def gather(self, size: int) -> bool:
        """Move blocks together until `size` bytes are in one gap; False, and nothing moves, if less are free.

        As few bytes move as can be.  The views of the blocks that move are new ones: nobody may look through an old
        one, or an array made of it, afterwards.  O(blocks), and the bytes that move.
        """
        wanted = -(-size // ALIGNMENT) * ALIGNMENT
        if wanted > self.capacity - self.used or self._memory is None:
            return False
        blocks = sorted(self._lent.values(), key=lambda block: block.start)
        # Between the gap before block i and the gap before block j lie the blocks i .. j-1, which have to move.
        ends = [0, *(block.start + block.reserved for block in blocks)]
        gaps = [
            start - end for end, start in zip(ends, [*(block.start for block in blocks), self.capacity], strict=True)
        ]
        best: tuple[int, int, int] | None = None
        i = free = moved = 0
        for j, gap in enumerate(gaps):
            free += gap
            if j:
                moved += blocks[j - 1].reserved
            while free >= wanted:
                best = min(best or (moved, i, j), (moved, i, j))
                free -= gaps[i]
                moved -= blocks[i].reserved if i < j else 0
                i += 1
        if best is None:
            return False
        _, first, last = best
        at = ends[first]
        for j in range(first, last + 1):
            if gaps[j]:
                self._remove_gap(ends[j])
        for block in blocks[first:last]:
            if block.start != at:
                block.view.release()
                self._memory[at : at + block.size] = self._memory[block.start : block.start + block.size]
                del self._lent[block.start]
                block.start, block.view = at, self._memory[at : at + block.size]
                self._lent[at] = block
            at += block.reserved
        self._add_gap(at, sum(gaps[first : last + 1]))
        return True

    def shrink(self, block: Block, size: int) -> None:
        """Take all but the first `size` bytes of a block back; its view is a new one.  ValueError if it has less."""
        if self._lent.get(block.start) is not block or not 0 < size <= block.size:
            raise ValueError(f"the block at {block.start} is not lent by this arena, or has no {size} bytes")
        assert self._memory is not None
        reserved = -(-size // ALIGNMENT) * ALIGNMENT
        block.view.release()
        block.view = self._memory[block.start : block.start + size]
        freed, block.size, block.reserved = block.reserved - reserved, size, reserved
        if not freed:
            return
        self.used -= freed
        end = block.start + reserved
        after = self._remove_gap(end + freed) if end + freed in self._gap_at else 0
        self._add_gap(end, freed + after)

    def free(self, block: Block) -> None:
        """Take a block back.  ValueError if it is not lent (given back twice, or another arena's)."""
        if self._lent.get(block.start) is not block:
            raise ValueError(f"the block at {block.start} is not lent by this arena")
        block.view.release()
        del self._lent[block.start]
        self.used -= block.reserved
        start, size = block.start, block.reserved
        before = self._gap_ending.get(start)
        if before is not None:
            size += self._remove_gap(before)
            start = before
        if start + size in self._gap_at:
            size += self._remove_gap(start + size)
        self._add_gap(start, size)

    def release_pages(self) -> None:
        """Give the pages of an arena from which nothing is lent back to the system; the addresses stay."""
        if self.used == 0 and self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self, *, abandon: bool = False) -> None:
        """Unmap everything.  ValueError while blocks are lent, unless they are abandoned: none can be read then."""
        if abandon:
            for block in list(self._lent.values()):
                self.free(block)
        if self._lent:
            raise ValueError(f"{len(self._lent)} blocks are still lent")
        if self._memory is not None and self._map is not None:
            self._memory.release()
            with suppress(BufferError):  # the traceback of an error still looks at it: it goes with that
                self._map.close()
            self._memory = self._map = None
            self._gaps.clear()
            self._gap_at.clear()
            self._gap_ending.clear()

    def check(self) -> None:
        """Prove that lent blocks and gaps tile the region without overlap, and that the counter is right."""
        assert self.used == sum(block.reserved for block in self._lent.values()), "used is not the sum of blocks lent"
        assert self.used <= self.capacity, "more is lent than there is"
        pieces = sorted(
            [(b.start, b.reserved, True) for b in self._lent.values()]
            + [(start, size, False) for start, size in self._gap_at.items()]
        )
        position, gap_before = 0, False
        for start, size, lent in pieces:
            assert start == position, f"a hole or an overlap at {position}"
            assert lent or not gap_before, f"two gaps meet at {start}"
            position, gap_before = start + size, not lent
        assert position == (self.capacity if self._map is not None else 0), "the end of the region is missing"
        assert self._gaps == sorted((size, start) for start, size in self._gap_at.items()), "the gap list is not sorted"
        assert self._gap_ending == {start + size: start for start, size in self._gap_at.items()}, "gap ends differ"
