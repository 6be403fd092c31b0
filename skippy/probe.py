"""What a context can do, found out by doing it once on scratch sequences when it is attached."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from skippy._llama import PARTIAL
from skippy.capability import Capability
from skippy.errors import SkippyError
from skippy.layout import check_positions, cut, v_transposed, without_ids
from skippy.pool import NativeContext

__all__ = ["Capability", "probe"]


class _Refused(Exception):
    pass


def _expect(condition: bool, why: str) -> None:
    if not condition:
        raise _Refused(why)


def probe(context: NativeContext, *, bos: int, unified: bool, first: int = 0, second: int = 1) -> Capability:
    """Decode a few tokens on sequence `first` and try what reuse needs: slicing, saving, restoring beside another.

    `first` and `second` must be empty and are empty afterwards.  Whatever fails is the reason in `unable`; the
    calls come in an order in which none of them can abort.
    """
    try:
        _expect(unified, "the context is not unified: copies of sequences cannot be saved")
        _expect(context.n_batch >= 2, f"batches of {context.n_batch} token are too small to find out what it can do")
        return _try(context, max(bos, 0), first, second, min(8, context.n_batch))
    except _Refused as refusal:
        return Capability(str(refusal))
    except SkippyError as error:
        return Capability(f"a call of llama.cpp failed: {error}")
    finally:
        context.seq_rm(first)
        context.seq_rm(second)


def _save(context: NativeContext, seq: int) -> bytearray:
    out = bytearray(context.state_size(seq))
    written = context.save(seq, out)
    _expect(written == len(out), f"a saved state took {written} bytes, {len(out)} were announced")
    return out


def _try(context: NativeContext, bos: int, first: int, second: int, n: int) -> Capability:
    half = n // 2
    empty = context.state_size(first)
    code = context.decode(first, 0, np.full(n, bos, np.int32))
    _expect(code == 0, f"decoding {n} tokens failed with {code}")
    whole = _save(context, first)
    try:
        check_positions(whole, 0, n)
    except SkippyError:
        _expect(False, "its state is not plain attention state")
    context.seq_cp(first, second)
    _expect(
        np.array_equal(without_ids(_save(context, second)), without_ids(whole)),
        "a copied sequence does not hold what the original does",
    )
    _expect(
        context.seq_rm(second, half) and context.seq_pos_max(second) == half - 1,
        "a sequence cannot be cut in the middle",
    )
    context.seq_rm(second)
    context.seq_cp(first, second, half, n)
    tail = _save(context, second)
    check_positions(tail, half, n)
    context.seq_rm(second)
    context.seq_cp(first, second, 0, half)
    head = _save(context, second)
    load_seconds = _seconds(lambda: context.load(second, whole))
    _expect(context.seq_pos_max(second) == n - 1, "a restored sequence does not end where it was saved")
    _expect(np.array_equal(without_ids(_save(context, second)), without_ids(whole)), "a restored sequence differs")
    _expect(
        np.array_equal(without_ids(_save(context, first)), without_ids(whole)), "restoring changed another sequence"
    )
    per_token = (len(whole) - len(head)) // (n - half)
    _expect(
        len(head) - empty > 0 and len(head) + len(tail) - len(whole) == len(whole) - n * per_token,
        "the sizes of saved states do not add up",
    )
    _expect(
        np.array_equal(without_ids(cut(whole, half, n)), without_ids(tail)),
        "a saved state cannot be cut at a token: its layout is not the known one",
    )
    partial = context.state_size(first, PARTIAL)
    _expect(partial <= len(whole), f"its partial state takes {partial} bytes, all of it {len(whole)}")
    transposed = v_transposed(whole)
    return Capability(
        None,
        None if transposed is None else not transposed,
        per_token,
        0 if partial == len(whole) else partial,  # a model without such state saves everything
        saved=(len(whole), _seconds(lambda: context.save(first, whole))),
        restored=(len(whole), load_seconds),
    )


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
