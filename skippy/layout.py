"""What can be read in a saved sequence state: where its cells stand, and each token's rows.

The layout is llama.cpp's own (`state_write` of its KV cache; little endian):

    magic u32, sequence i32, n_stream u32 = 1, cells u32,
    per cell: position i32, sequences u32 = 1 [, 12 bytes where positions are 2-D], sequence i32,
    v_transposed u32, layers u32,
    per layer: type i32, row bytes u64, the K rows of all cells,
    per layer: type i32, row bytes u64, the V rows; or, transposed: type i32, element bytes u32, width u32, V columns

The cells stand in the order of the pool, which is not always that of their positions.  Sequence ids are
written into the bytes, so two saves of one state differ there and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skippy.errors import StateError

__all__ = ["MAGIC", "Cells", "check_positions", "read_cells", "read_rows", "v_transposed", "without_ids"]

MAGIC = 0xAF143CD8
_PLAIN, _EXTENDED = 3, 6  # 32-bit words per cell
_HEADER = 16  # bytes before the first cell


@dataclass(frozen=True)
class Cells:
    """The cells of the attention part of a saved state: `positions` int32 [n], and where their rows begin."""

    positions: npt.NDArray[np.int32]
    words: int  # 32-bit words of metadata per cell
    body: int  # offset in bytes of what follows the cells


def read_cells(state: Any) -> Cells:
    """Read the header and the cells of a unified attention state.  O(cells).

    `state` is a buffer of bytes.  StateError, naming what was found, where it is not such a state.
    """
    data = np.frombuffer(state, np.uint8)
    if data.size < _HEADER:
        raise StateError(f"a saved state of {data.size} bytes is shorter than its header of {_HEADER}")
    magic, _, n_stream, n = (int(word) for word in data[:_HEADER].view("<u4"))
    if magic != MAGIC:
        raise StateError(f"a saved state begins with {magic:#x}, expected {MAGIC:#x}")
    if n_stream != 1:
        raise StateError(f"a saved state has {n_stream} streams, expected 1 (a unified context)")
    for words in (_PLAIN, _EXTENDED):
        end = _HEADER + 4 * words * n
        if end > data.size:
            break
        table = data[_HEADER:end].view("<i4").reshape(n, words)
        if (table[:, 1] == 1).all() and _plausible_body(data, end, n):
            return Cells(table[:, 0].astype(np.int32), words, end)
    raise StateError(f"the {n} cells of a saved state of {data.size} bytes cannot be read")


def _plausible_body(data: npt.NDArray[np.uint8], offset: int, n: int) -> bool:
    if n == 0:
        return True
    if offset + 8 > data.size:
        return False
    v_transposed, layers = (int(word) for word in data[offset : offset + 8].view("<u4"))
    return v_transposed in (0, 1) and 0 <= layers <= 4096


def check_positions(state: Any, start: int, end: int) -> None:
    """StateError unless the cells of `state` are exactly the positions start .. end-1, in whatever order."""
    positions = read_cells(state).positions
    expected = np.arange(start, end, dtype=np.int32)
    if not np.array_equal(positions, expected) and not np.array_equal(np.sort(positions), expected):
        found = f"{positions.min()} to {positions.max()}" if positions.size else "none"
        raise StateError(
            f"a saved state holds {positions.size} cells at positions {found}, expected {start} to {end - 1}"
        )


def v_transposed(state: Any) -> bool | None:
    """Whether V is stored transposed, which llama.cpp does where flash attention is off; None for no cells."""
    cells = read_cells(state)
    if not cells.positions.size:
        return None
    return bool(np.frombuffer(state, np.uint8)[cells.body : cells.body + 4].view("<u4")[0])


def without_ids(state: Any) -> npt.NDArray[np.uint8]:
    """A copy of a saved state with the sequence ids in it set to 0: equal states give equal bytes."""
    data = np.frombuffer(state, np.uint8).copy()
    cells = read_cells(data)
    data[4:8] = 0
    table = data[_HEADER : cells.body].view("<i4").reshape(-1, cells.words)
    table[:, cells.words - 1] = 0
    return data


def read_rows(state: Any) -> npt.NDArray[np.uint8]:
    """What attention keeps of each token: uint8 [n, bytes per token], ordered by position.  O(bytes).

    K and V of all layers, as they lie in the state; equal rows mean equal memory of that token.
    StateError where the state does not end where its layout says.
    """
    data = np.frombuffer(state, np.uint8)
    cells = read_cells(data)
    n = cells.positions.size
    if n == 0:
        return np.empty((0, 0), np.uint8)
    transposed, layers = (int(word) for word in data[cells.body : cells.body + 8].view("<u4"))
    offset = cells.body + 8
    parts = []

    def take(size: int) -> npt.NDArray[np.uint8]:
        nonlocal offset
        if offset + size > data.size:
            raise StateError(f"a saved state of {data.size} bytes ends inside its rows, at {offset + size}")
        piece = data[offset : offset + size]
        offset += size
        return piece

    for _ in range(layers):
        row = int(take(12)[4:].view("<u8")[0])
        parts.append(take(n * row).reshape(n, row))
    for _ in range(layers):
        if transposed:
            _, element, width = (int(word) for word in take(12).view("<u4"))
            columns = take(n * element * width).reshape(width, n, element)
            parts.append(columns.transpose(1, 0, 2).reshape(n, width * element))
        else:
            row = int(take(12)[4:].view("<u8")[0])
            parts.append(take(n * row).reshape(n, row))
    if offset != data.size:
        raise StateError(f"a saved state has {data.size} bytes, {offset} of them are attention rows")
    return np.concatenate(parts, axis=1)[np.argsort(cells.positions, kind="stable")]
