"""Saved state in RAM: segments, checkpoints and logits, each with its checksum, in memory that stays mapped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from skippy.arena import Arena, Block
from skippy.capability import Capability
from skippy.errors import NativeError, StateError
from skippy.layout import Bytes, Layout, attention_bytes, check_positions, cut, read_sections
from skippy.pool import Pool
from skippy.worth import Profile, clip

__all__ = ["PARTIAL", "Checkpoint", "LoadRefused", "Logits", "RamStore", "Saved", "Segment"]

PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_ID_BYTES = 8  # magic and sequence id, before what a state holds
_SEGMENT = Layout(1, opaque=True)  # attention, and the point state of an empty sequence

MakeRoom = Callable[[int], "Block | None"]


class LoadRefused(StateError):
    """llama.cpp did not take a state whose checksum is right."""


@dataclass(eq=False)
class Saved:
    """Bytes in RAM: `block` holds them, `checksum` proves them."""

    block: Block
    checksum: int
    damaged: bool = False  # it failed its check while a request was using it: never to be offered again
    profile: Profile = ()  # how its tokens are used

    tier: ClassVar[str] = "ram"

    @property
    def nbytes(self) -> int:
        """Bytes that it takes from the budget (its block, rounded up)."""
        return self.block.reserved

    def verify(self, what: str) -> None:
        """StateError unless the bytes are those that were saved.  O(bytes)."""
        if xxhash.xxh3_64_intdigest(self.block.view) != self.checksum:
            raise StateError(f"the saved {what} does not match its checksum")


@dataclass(eq=False, kw_only=True)
class Segment(Saved):
    """The saved attention state of the tokens [start, end) of a path.

    Of layers with a sliding window it holds the tokens [window_from, end) only.
    """

    start: int
    end: int
    window_from: int


@dataclass(eq=False, kw_only=True)
class Checkpoint(Saved):
    """The point state of a path of `length` tokens, saved with `flags`, which its bytes do not tell."""

    length: int
    flags: int


@dataclass(eq=False, kw_only=True)
class Logits(Saved):
    """Logits after the last token of a path: float32 [n_vocab]."""

    def read(self) -> npt.NDArray[np.float32]:
        """A copy of them.  StateError if they are damaged."""
        self.verify("logits")
        return np.frombuffer(self.block.view, np.float32).copy()


class Source(Protocol):
    """What says which tokens a state holds: a Segment, or a file on disk."""

    start: int
    end: int
    window_from: int


class RamStore:
    """Saves state of the kind `shape` into at most `capacity` bytes and brings it back.

    `seconds_saving`, `seconds_restoring`, `bytes_saved` and `bytes_restored` grow while it works.
    """

    def __init__(self, capacity: int, shape: Capability | None = None) -> None:
        self.arena = Arena(capacity)
        self.shape = Capability(None) if shape is None else shape
        self.seconds_saving = 0.0
        self.seconds_restoring = 0.0
        self.saves = 0
        self.restores = 0
        self.bytes_saved = 0
        self.bytes_restored = 0
        self.scratch: Bytes = np.empty(0, np.uint8)
        self._empty_point: Bytes | None = None

    # -- saving -----------------------------------------------------------------------------------------

    def save(self, pool: Pool, src: int, start: int, end: int, make_room: MakeRoom | None = None) -> Segment | None:
        """Save the attention of the tokens [start, end) of sequence `src`; None where it does not fit.

        `make_room(size)` is asked for the block; it is not asked for what could never fit.
        O(bytes).  StateError or NativeError where llama.cpp fails; then nothing is kept.
        """
        began = time.perf_counter()
        block: Block | None = None
        try:
            with pool.capture(src, start, end) as temp:
                if self.shape.needs_checkpoints:
                    state = self._attention_of(pool, temp)
                    block = self._block(state.size, make_room)
                    if block is None:
                        return None
                    np.frombuffer(block.view, np.uint8)[:] = state
                else:
                    size = pool.context.state_size(temp)
                    block = self._block(size, make_room)
                    if block is None:
                        return None
                    self._expect_size(pool.context.save(temp, block.view), size, src)
            window_from = check_positions(block.view, start, end, self._layout)
            checksum = xxhash.xxh3_64_intdigest(block.view)
        except BaseException:
            if block is not None:
                self.arena.free(block)
            raise
        self._count_save(block.size, began)
        return Segment(block, checksum, start=start, end=end, window_from=window_from)

    def save_point(self, pool: Pool, src: int, length: int, make_room: MakeRoom | None = None) -> Checkpoint | None:
        """Save the point state of sequence `src`, which has `length` tokens; as `save` else."""
        began = time.perf_counter()
        flags = PARTIAL if self.shape.has_attention else 0
        if pool.length(src) != length:
            raise NativeError(f"sequence {src} has {pool.length(src)} tokens, expected {length} for a checkpoint")
        size = pool.context.state_size(src, flags)
        block = self._block(size, make_room)
        if block is None:
            return None
        try:
            self._expect_size(pool.context.save(src, block.view, flags), size, src)
            checksum = xxhash.xxh3_64_intdigest(block.view)
        except BaseException:
            self.arena.free(block)
            raise
        self._count_save(size, began)
        return Checkpoint(block, checksum, length=length, flags=flags)

    def save_logits(self, logits: npt.NDArray[np.float32], make_room: MakeRoom | None = None) -> Logits | None:
        """Keep `logits`; None where they do not fit."""
        block = self._block(logits.nbytes, make_room)
        if block is None:
            return None
        np.frombuffer(block.view, np.float32)[:] = logits
        return Logits(block, xxhash.xxh3_64_intdigest(block.view))

    def _block(self, size: int, make_room: MakeRoom | None) -> Block | None:
        if not self.arena.fits(size):
            return None
        return make_room(size) if make_room else self.arena.allocate(size)

    @staticmethod
    def _expect_size(written: int, size: int, src: int) -> None:
        if written != size:
            raise StateError(f"the state of sequence {src} took {written} bytes, {size} were announced")

    def _count_save(self, size: int, began: float) -> None:
        self.seconds_saving += time.perf_counter() - began
        self.saves += 1
        self.bytes_saved += size

    def shorten(self, segment: Segment, end: int) -> Segment:
        """Keep the tokens before `end` of `segment`, which is of plain attention, where they are; the rest is free.

        StateError, and nothing changes, if it is damaged.  O(bytes).
        """
        self.verify(segment)
        state = cut(segment.block.view, segment.start, end, self._room, layout=self._layout)
        self.arena.shrink(segment.block, len(state))
        np.frombuffer(segment.block.view, np.uint8)[:] = state
        checksum = xxhash.xxh3_64_intdigest(segment.block.view)
        return Segment(
            segment.block,
            checksum,
            profile=clip(segment.profile, end),
            start=segment.start,
            end=end,
            window_from=min(segment.window_from, end),
        )

    @property
    def _layout(self) -> Layout:
        """How segments are built; of a hybrid's window nothing is read, it belongs to the point state."""
        return _SEGMENT if self.shape.needs_checkpoints else self.shape.layout

    def _attention_of(self, pool: Pool, temp: int) -> Bytes:
        """The state of `temp` with the point state of an empty sequence: what llama.cpp loads without the dear part."""
        if self._empty_point is None:
            raise NativeError("the point state of an empty sequence was not taken: call prepare() first")
        size = pool.context.state_size(temp)
        room = self._room(size + self._empty_point.size)
        self._expect_size(pool.context.save(temp, room[:size]), size, temp)
        end = attention_bytes(room[:size])
        stop = end + self._empty_point.size
        room[end:stop] = self._empty_point
        return room[:stop]

    def prepare(self, pool: Pool) -> None:
        """Take what saving needs from an empty sequence.  Once, before the first save."""
        if self.shape.needs_checkpoints and self.shape.has_attention:
            with pool.scratch() as temp:
                state = np.empty(pool.context.state_size(temp, PARTIAL), np.uint8)
                self._expect_size(pool.context.save(temp, state, PARTIAL), state.size, temp)
            self._empty_point = state[_ID_BYTES:]

    # -- restoring --------------------------------------------------------------------------------------

    def verify(self, segment: Segment) -> None:
        """StateError unless the bytes are those that were saved and hold the positions they should.  O(bytes)."""
        segment.verify(f"state of [{segment.start}, {segment.end})")
        check_positions(segment.block.view, segment.start, segment.end, self._layout)

    def restore(self, pool: Pool, segment: Segment, dst: int, start: int, end: int, window: int | None = None) -> None:
        """Append the tokens [start, end) of `segment` to sequence `dst`, which ends at `start`.  O(bytes).

        Of a sliding window only what is at `window` and behind it is brought back.  Where there is point state, or a
        window, `dst` is not whole before `finish`; else it is verified.  StateError where the segment is damaged
        (nothing has reached llama.cpp then), LoadRefused where llama.cpp does not take it: for want of cells, or
        because it is of another kind.  `dst` is then as before, or empty if `start` is 0.
        """
        self.verify(segment)
        self.restore_state(pool, segment, segment.block.view, dst, start, end, window)

    def restore_state(
        self, pool: Pool, source: Source, state: Any, dst: int, start: int, end: int, window: int | None = None
    ) -> None:
        """As `restore`, of a `state` whose bytes have been verified already; `source` says what it holds."""
        began = time.perf_counter()
        check_positions(state, source.start, source.end, self._layout)
        if (start, end) != (source.start, source.end) or (window is not None and source.window_from < window):
            # Cut here, not in the pool: there it would take cells for tokens that nobody asked for.
            state = cut(state, start, end, self._room, layout=self._layout, window=window)
        pool.expect(dst, end)
        if start == 0:
            self._load(pool, dst, state)
        else:
            with pool.scratch(end - start) as temp:
                self._load(pool, temp, state)
                if self.shape.residents:
                    pool.append(temp, dst, start, end)
                else:
                    each = read_sections(state, self._layout)[0].bytes_per_token
                    self._append(pool, temp, dst, start, end, each)
        if self.shape.residents and (pool.context.seq_pos_min(dst) != 0 or pool.length(dst) != end):
            raise StateError(f"sequence {dst} has {pool.length(dst)} tokens after a restore, expected {end}")
        self._count_restore(len(state), began)

    def _append(self, pool: Pool, src: int, dst: int, start: int, end: int, each: int) -> None:
        """As `Pool.append`, where positions do not show attention: `dst` must grow by `each` bytes for each token."""
        expected = self._attention_size(pool, dst) + each * (end - start)
        pool.context.seq_cp(src, dst, start, end)
        found = self._attention_size(pool, dst)
        if found != expected:
            raise NativeError(
                f"the attention of sequence {dst} takes {found} bytes after copying [{start}, {end}) of {src}, "
                f"expected {expected}"
            )

    @staticmethod
    def _attention_size(pool: Pool, seq: int) -> int:
        """Bytes of the attention that is no point state, in a state of `seq`.  O(cells), nothing is copied."""
        return pool.context.state_size(seq) - pool.context.state_size(seq, PARTIAL)

    def cut_out(self, segment: Segment, start: int, end: int) -> Any:
        """The bytes of the tokens [start, end) of a segment, in memory of their own where they are cut.  O(bytes).

        Not in working memory: room is made for a state that is just being saved, and may lie there.
        """
        if (start, end) == (segment.start, segment.end):
            return segment.block.view
        return cut(segment.block.view, start, end, layout=self._layout)

    def restore_point(self, pool: Pool, checkpoint: Checkpoint, dst: int, end: int | None = None) -> None:
        """Put a checkpoint on top of the attention of its path in `dst` (an empty `dst` where there is no attention).

        `end` is where `dst` shall end, by default at its length; a window can be cut by one token, a state cannot.
        StateError as `restore`; `dst` is then to be emptied.  O(bytes).
        """
        checkpoint.verify(f"checkpoint at {checkpoint.length}")
        self.restore_point_state(pool, checkpoint.block.view, checkpoint.flags, checkpoint.length, dst, end)

    def restore_point_state(
        self, pool: Pool, state: Any, flags: int, length: int, dst: int, end: int | None = None
    ) -> None:
        """As `restore_point`, of a `state` whose bytes have been verified already."""
        began = time.perf_counter()
        self._load(pool, dst, state, flags)
        # In this order: the other one is wrong on hybrids, and nothing says so.
        end = length if end is None else end
        if not pool.context.seq_rm(dst, end):
            raise StateError(f"sequence {dst} cannot end at {end} tokens, with a checkpoint of {length}")
        self._count_restore(len(state), began)

    def _count_restore(self, size: int, began: float) -> None:
        self.seconds_restoring += time.perf_counter() - began
        self.restores += 1
        self.bytes_restored += size

    def _room(self, size: int) -> Bytes:
        """Working memory for a cut; kept, and as large as the largest cut was.  It is no part of the budget."""
        if self.scratch.size < size:
            self.scratch = np.empty(size, np.uint8)
        return self.scratch

    @staticmethod
    def _load(pool: Pool, seq: int, state: Any, flags: int = 0) -> None:
        try:
            pool.context.load(seq, state, flags)
        except StateError as error:
            raise LoadRefused(str(error)) from error

    def close(self) -> None:
        """Give all memory back; nothing that is saved can be read any more."""
        self.arena.close(abandon=True)
        self.scratch = np.empty(0, np.uint8)

    def drop(self, saved: Saved) -> None:
        """Give the memory of a segment, a checkpoint or logits back."""
        self.arena.free(saved.block)
