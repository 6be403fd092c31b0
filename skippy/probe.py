"""What a context can do, found out by doing it once on scratch sequences when it is attached."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from skippy._llama import PARTIAL
from skippy.capability import Capability
from skippy.errors import SkippyError
from skippy.layout import (
    Layout,
    attention_bytes,
    check_positions,
    cut,
    read_sections,
    v_transposed,
    without_ids,
)
from skippy.pool import NativeContext

__all__ = ["Capability", "probe"]

PLAIN, WINDOW = Layout(1), Layout(2)
HYBRID, HYBRID_WINDOW, RECURRENT = Layout(1, opaque=True), Layout(2, opaque=True), Layout(0, opaque=True)
_ID_BYTES = 8  # magic and sequence id, before what a state holds


class _Refused(Exception):
    pass


def _expect(condition: bool, why: str) -> None:
    if not condition:
        raise _Refused(why)


def probe(
    context: NativeContext,
    *,
    bos: int,
    unified: bool,
    family: str = "dense",
    window: int = 0,
    first: int = 0,
    second: int = 1,
) -> Capability:
    """Decode a few tokens on sequence `first` and try what reuse needs of a model of `family`.

    Slicing, saving, cutting, and restoring beside another sequence, byte for byte; `window` is the number of tokens
    that its sliding window sees.  `first` and `second` must be empty and are empty afterwards.  Whatever fails is the
    reason in `unable`, also where the state is not of the family that the model claims; the calls come in an order in
    which none of them can abort.
    """
    try:
        _expect(unified, "the context is not unified: copies of sequences cannot be saved")
        _expect(context.n_batch >= 2, f"batches of {context.n_batch} token are too small to find out what it can do")
        trial = _Trial(context, max(bos, 0), first, second)
        if family in ("hybrid", "recurrent"):
            return trial.of_checkpoints(family, window)
        _expect(family in ("dense", "window"), f"models of the family {family!r} are not known")
        return trial.of_slices(window if family == "window" else 0)
    except _Refused as refusal:
        return Capability(str(refusal))
    except SkippyError as error:
        return Capability(f"a call of llama.cpp failed: {error}")
    finally:
        context.seq_rm(first)
        context.seq_rm(second)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class _Trial:
    def __init__(self, context: NativeContext, bos: int, first: int, second: int) -> None:
        self.context, self.bos, self.first, self.second = context, bos, first, second
        self.n = min(8, context.n_batch)
        self.half = self.n // 2

    def save(self, seq: int, flags: int = 0) -> bytearray:
        out = bytearray(self.context.state_size(seq, flags))
        written = self.context.save(seq, out, flags)
        _expect(written == len(out), f"a saved state took {written} bytes, {len(out)} were announced")
        return out

    def decode(self, start: int, end: int) -> None:
        code = self.context.decode(self.first, start, np.full(end - start, self.bos, np.int32))
        _expect(code == 0, f"decoding {end - start} tokens failed with {code}")

    def of_slices(self, window: int) -> Capability:
        """A model whose state is attention alone: of any range a state can be saved, and cut out of a larger one."""
        context, first, second, n, half = self.context, self.first, self.second, self.n, self.half
        layout = WINDOW if window else PLAIN
        empty = context.state_size(first)
        self.decode(0, n)
        whole = self.save(first)
        try:
            held_from = check_positions(whole, 0, n, layout)
        except SkippyError:
            kind = "attention state with a window" if window else "plain attention state"
            raise _Refused(f"its state is not {kind}") from None
        _expect(held_from == max(0, n - window) if window else True, "its window holds other tokens than its size says")
        context.seq_cp(first, second)
        _expect(
            np.array_equal(without_ids(self.save(second), layout), without_ids(whole, layout)),
            "a copied sequence does not hold what the original does",
        )
        _expect(
            context.seq_rm(second, half) and context.seq_pos_max(second) == half - 1,
            "a sequence cannot be cut in the middle",
        )
        context.seq_rm(second)
        context.seq_cp(first, second, half, n)
        tail = self.save(second)
        check_positions(tail, half, n, layout)
        context.seq_rm(second)
        context.seq_cp(first, second, 0, half)
        head = self.save(second)
        load_seconds = _seconds(lambda: context.load(second, whole))
        _expect(context.seq_pos_max(second) == n - 1, "a restored sequence does not end where it was saved")
        self._expect_equal(second, whole, layout, "a restored sequence differs")
        self._expect_equal(first, whole, layout, "restoring changed another sequence")
        if window == 0 or window >= n:
            per_token = (len(whole) - len(head)) // (n - half)
            _expect(
                len(head) - empty > 0 and len(head) + len(tail) - len(whole) == len(whole) - n * per_token,
                "the sizes of saved states do not add up",
            )
            _expect(
                np.array_equal(without_ids(cut(whole, half, n, layout=layout), layout), without_ids(tail, layout)),
                "a saved state cannot be cut at a token: its layout is not the known one",
            )
        else:
            per_token = sum(section.bytes_per_token for section in read_sections(whole, layout))
        windowed = read_sections(whole, layout)[-1]
        partial = context.state_size(first, PARTIAL)
        _expect(partial <= len(whole), f"its partial state takes {partial} bytes, all of it {len(whole)}")
        _expect(window > 0 or partial == len(whole), "a part of its state cannot be cut at a token")
        transposed = v_transposed(whole)
        return Capability(
            None,
            None if transposed is None else not transposed,
            per_token,
            0,
            window,
            layout,
            window_bytes_per_token=windowed.bytes_per_token if window else 0,
            saved=(len(whole), _seconds(lambda: context.save(first, whole))),
            restored=(len(whole), load_seconds),
        )

    def _expect_equal(self, seq: int, state: bytearray, layout: Layout, why: str) -> None:
        _expect(np.array_equal(without_ids(self.save(seq), layout), without_ids(state, layout)), why)

    def of_checkpoints(self, family: str, window: int) -> Capability:
        """A model with a state that belongs to one length: it is saved there, and put on top of sliced attention."""
        context, first, second, n, half = self.context, self.first, self.second, self.n, self.half
        attention = family == "hybrid"
        layout = (HYBRID_WINDOW if window else HYBRID) if attention else RECURRENT
        flags = PARTIAL if attention else 0
        empty = bytes(self.save(second, PARTIAL))
        self.decode(0, half)
        at_half, point_at_half = self.save(first), self.save(first, flags)
        self.decode(half, n)
        whole = self.save(first)
        point_bytes = len(self.save(first, PARTIAL))
        per_token = 0
        if attention:
            try:
                split = attention_bytes(whole)
                check_positions(whole, 0, n, HYBRID)
            except SkippyError:
                raise _Refused("its state does not begin with attention state") from None
            _expect(split + point_bytes - _ID_BYTES == len(whole), "its partial state is not the end of its state")
            _expect(point_bytes > len(empty), "it has no state besides attention, which its family should have")
            per_token = (split - attention_bytes(at_half)) // (n - half)
        else:
            _expect(len(whole) == point_bytes, "it has state besides its recurrent one, which its family should not")
            _expect(len(at_half) == len(whole), "its recurrent state grows with its length")
        _expect(context.seq_rm(first, half) is False, "its state can be cut in the middle, which its family's cannot")
        load_seconds = 0.0
        if attention:
            segment = bytes(whole[:split]) + empty[_ID_BYTES:]  # with the point state of an empty sequence
            load_seconds = _seconds(lambda: context.load(second, cut(segment, 0, half, layout=HYBRID)))
        load_seconds += _seconds(lambda: context.load(second, point_at_half, flags))
        _expect(context.seq_rm(second, half), "a checkpoint cannot be put on top of attention that ends with it")
        _expect(context.seq_pos_max(second) == half - 1, "a restored checkpoint does not end where it was saved")
        self._expect_equal(second, at_half, layout, "a restored checkpoint differs")
        self._expect_equal(first, whole, layout, "restoring changed another sequence")
        transposed = v_transposed(whole) if attention else None
        return Capability(
            None,
            None if transposed is None else not transposed,
            per_token,
            point_bytes,
            0,
            layout,
            saved=(len(whole), _seconds(lambda: context.save(first, whole))),
            restored=(len(at_half), load_seconds),
        )
