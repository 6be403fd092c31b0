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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skippy.errors import StateError

Bytes = npt.NDArray[np.uint8]

__all__ = ["MAGIC", "Cells", "check_positions", "cut", "read_cells", "read_rows", "v_transposed", "without_ids"]

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


def _plausible_body(data: Bytes, offset: int, n: int) -> bool:
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


def without_ids(state: Any) -> Bytes:
    """A copy of a saved state with the sequence ids in it set to 0: equal states give equal bytes."""
    data = np.frombuffer(state, np.uint8).copy()
    cells = read_cells(data)
    data[4:8] = 0
    table = data[_HEADER : cells.body].view("<i4").reshape(-1, cells.words)
    table[:, cells.words - 1] = 0
    return data


@dataclass(frozen=True)
class _Block:
    """K or V of one layer: `width` columns of `element` bytes each for every cell; V can lie column by column."""

    header: slice
    data: slice
    element: int
    columns: int
    transposed: bool


def _blocks(data: Bytes, cells: Cells) -> Iterator[_Block]:
    """The attention blocks of a state, in order.  StateError where it does not end where its layout says."""
    n = cells.positions.size
    transposed, layers = (int(word) for word in data[cells.body : cells.body + 8].view("<u4"))
    offset = cells.body + 8
    for i in range(2 * layers):
        by_column = bool(transposed) and i >= layers
        header = slice(offset, offset + 12)
        if header.stop > data.size:
            raise StateError(f"a saved state of {data.size} bytes ends inside its rows, at {header.stop}")
        if by_column:
            _, element, columns = (int(word) for word in data[header].view("<u4"))
        else:
            element, columns = int(data[header][4:].view("<u8")[0]), 1
        offset = header.stop + n * element * columns
        if offset > data.size:
            raise StateError(f"a saved state of {data.size} bytes ends inside its rows, at {offset}")
        yield _Block(header, slice(header.stop, offset), element, columns, by_column)
    if offset != data.size:
        raise StateError(f"a saved state has {data.size} bytes, {offset} of them are attention rows")


def read_rows(state: Any) -> Bytes:
    """What attention keeps of each token: uint8 [n, bytes per token], ordered by position.  O(bytes).

    K and V of all layers, as they lie in the state; equal rows mean equal memory of that token.
    StateError where the state does not end where its layout says.
    """
    data = np.frombuffer(state, np.uint8)
    cells = read_cells(data)
    n = cells.positions.size
    if n == 0:
        return np.empty((0, 0), np.uint8)
    parts = []
    for block in _blocks(data, cells):
        grid = data[block.data].reshape(block.columns, n, block.element)
        parts.append(grid.transpose(1, 0, 2).reshape(n, block.columns * block.element))
    return np.concatenate(parts, axis=1)[np.argsort(cells.positions, kind="stable")]


def cut(state: Any, start: int, end: int, room: Callable[[int], Bytes] | None = None) -> Bytes:
    """The saved state of the tokens [start, end) alone, out of a saved state that holds them.  O(bytes of the cut).

    It is what llama.cpp would have saved of that range, byte for byte but for sequence ids.  `room(size)` gives
    the memory that it is written into (uint8, at least `size`), by default new memory.  StateError where the state
    does not hold exactly one cell for each of these positions.
    """
    data = np.frombuffer(state, np.uint8)
    cells = read_cells(data)
    n, wanted = cells.positions.size, end - start
    chosen = np.flatnonzero((cells.positions >= start) & (cells.positions < end))
    if wanted < 1 or not np.array_equal(np.sort(cells.positions[chosen]), np.arange(start, end, dtype=np.int32)):
        raise StateError(f"a saved state holds {chosen.size} of the cells [{start}, {end}), expected {wanted}")
    in_a_row = chosen[-1] - chosen[0] + 1 == wanted
    pick: Any = slice(int(chosen[0]), int(chosen[-1]) + 1) if in_a_row else chosen
    blocks = list(_blocks(data, cells))
    size = _HEADER + 4 * cells.words * wanted + 8
    size += sum(12 + wanted * block.element * block.columns for block in blocks)
    target = np.empty(size, np.uint8) if room is None else room(size)[:size]
    target[:_HEADER] = data[:_HEADER]
    target[12:_HEADER].view("<u4")[0] = wanted
    offset = _HEADER + 4 * cells.words * wanted
    table = data[_HEADER : cells.body].view("<i4").reshape(n, cells.words)
    target[_HEADER:offset].view("<i4").reshape(wanted, cells.words)[:] = table[pick]
    target[offset : offset + 8] = data[cells.body : cells.body + 8]
    offset += 8
    for block in blocks:
        target[offset : offset + 12] = data[block.header]
        offset += 12
        stop = offset + wanted * block.element * block.columns
        grid = data[block.data].reshape(block.columns, n, block.element)
        target[offset:stop].reshape(block.columns, wanted, block.element)[:] = grid[:, pick]
        offset = stop
    return target
