"""What can be read in a saved sequence state: where its cells stand, and each token's rows.

The layout is llama.cpp's own (`state_write` of its memories; little endian):

    magic u32, sequence i32, then one section per attention cache (two where a window slides: base, window):
        n_stream u32 = 1, cells u32, and unless there are none:
        per cell: position i32, sequences u32 = 1 [, 12 bytes where positions are 2-D], sequence i32,
        v_transposed u32, layers u32,
        per layer: type i32, row bytes u64, the K rows of all cells,
        per layer: type i32, row bytes u64, the V rows;
            or, transposed: type i32, element bytes u32, width u32, V columns
    then, where there is a recurrent state, its bytes, which are not read here.

The cells stand in the order of the pool, which is not always that of their positions.  Sequence ids are
written into the bytes, so two saves of one state differ there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skippy.errors import StateError

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int32]

__all__ = [
    "MAGIC",
    "PLAIN",
    "Layout",
    "Section",
    "attention_bytes",
    "check_positions",
    "cut",
    "read_rows",
    "read_sections",
    "v_transposed",
    "without_ids",
]

MAGIC = 0xAF143CD8
_PLAIN_CELL, _EXTENDED_CELL = 3, 6  # 32-bit words per cell
_HEADER = 8  # bytes before the first section
_COUNTS = 8  # bytes of a section before its first cell


@dataclass(frozen=True)
class Layout:
    """How the states of a context are built: `sections` of attention, and `opaque` bytes of another kind after them.

    One section for plain attention, two where some layers see a window only, none for a recurrent model.
    """

    sections: int = 1
    opaque: bool = False


PLAIN = Layout()


@dataclass(frozen=True)
class Section:
    """One attention cache in a state: its bytes are [start, end); `positions` int32 [n]; its first cell is at `cells`.

    `words` are the 32-bit words of a cell, `blocks` the K and V rows of each layer.
    """

    start: int
    end: int
    positions: Positions
    words: int
    blocks: tuple[_Block, ...]

    @property
    def cells(self) -> slice:
        """Where the cells lie in the state."""
        first = self.start + _COUNTS
        return slice(first, first + 4 * self.words * self.positions.size)

    @property
    def counts(self) -> slice:
        """Where v_transposed and layers lie; empty if there are no cells."""
        return slice(self.cells.stop, self.cells.stop + (8 if self.positions.size else 0))

    @property
    def bytes_per_token(self) -> int:
        """What one token takes in it: its cell, and its K and V."""
        return 4 * self.words + sum(block.element * block.columns for block in self.blocks)

    def rows(self, data: Bytes) -> Bytes:
        """K and V of each token, in all layers: uint8 [n, bytes per token], ordered by position.  O(bytes)."""
        n = self.positions.size
        if not self.blocks:  # no cells; or no layers, where all of them slide
            return np.empty((n, 0), np.uint8)
        parts = [block.grid(data, n).transpose(1, 0, 2).reshape(n, -1) for block in self.blocks]
        return np.concatenate(parts, axis=1)[np.argsort(self.positions, kind="stable")]


@dataclass(frozen=True)
class _Block:
    """K or V of one layer: `width` columns of `element` bytes each for every cell; V can lie column by column."""

    header: slice
    data: slice
    element: int
    columns: int

    def grid(self, data: Bytes, n: int) -> Bytes:
        return data[self.data].reshape(self.columns, n, self.element)


def read_sections(state: Any, layout: Layout = PLAIN) -> list[Section]:
    """The attention sections of a state, in order.  O(cells + layers).

    StateError, naming what was found, where it is not such a state or does not end where its layout says.
    """
    data = np.frombuffer(state, np.uint8)
    _check_header(data)
    sections: list[Section] = []
    offset = _HEADER
    for _ in range(layout.sections):
        sections.append(_section(data, offset))
        offset = sections[-1].end
    if offset != data.size and not layout.opaque:
        raise StateError(f"a saved state has {data.size} bytes, {offset} of them are attention rows")
    return sections


def _check_header(data: Bytes) -> None:
    if data.size < _HEADER + _COUNTS:
        raise StateError(f"a saved state of {data.size} bytes is shorter than its header of {_HEADER + _COUNTS}")
    magic = int(data[:4].view("<u4")[0])
    if magic != MAGIC:
        raise StateError(f"a saved state begins with {magic:#x}, expected {MAGIC:#x}")


def _cells(data: Bytes, start: int) -> tuple[Positions, int]:
    """Positions and words per cell of the section that begins at `start`."""
    if start + _COUNTS > data.size:
        raise StateError(f"a saved state of {data.size} bytes ends before its section at {start}")
    n_stream, n = (int(word) for word in data[start : start + _COUNTS].view("<u4"))
    if n_stream != 1:
        raise StateError(f"a saved state has {n_stream} streams, expected 1 (a unified context)")
    first = start + _COUNTS
    for words in (_PLAIN_CELL, _EXTENDED_CELL):
        end = first + 4 * words * n
        if end > data.size:
            break
        table = data[first:end].view("<i4").reshape(n, words)
        if (table[:, 1] == 1).all() and _plausible_body(data, end, n):
            return table[:, 0].astype(np.int32), words
    raise StateError(f"the {n} cells of a saved state of {data.size} bytes cannot be read")


def _plausible_body(data: Bytes, offset: int, n: int) -> bool:
    if n == 0:
        return True
    if offset + 8 > data.size:
        return False
    v_transposed, layers = (int(word) for word in data[offset : offset + 8].view("<u4"))
    return v_transposed in (0, 1) and 0 <= layers <= 4096


def _section(data: Bytes, start: int) -> Section:
    positions, words = _cells(data, start)
    n = positions.size
    offset = start + _COUNTS + 4 * words * n
    if n == 0:
        return Section(start, offset, positions, words, ())
    transposed, layers = (int(word) for word in data[offset : offset + 8].view("<u4"))
    offset += 8
    blocks = []
    for i in range(2 * layers):
        header = slice(offset, offset + 12)
        if header.stop > data.size:
            raise StateError(f"a saved state of {data.size} bytes ends inside its rows, at {header.stop}")
        if transposed and i >= layers:
            _, element, columns = (int(word) for word in data[header].view("<u4"))
        else:
            element, columns = int(data[header][4:].view("<u8")[0]), 1
        offset = header.stop + n * element * columns
        if offset > data.size:
            raise StateError(f"a saved state of {data.size} bytes ends inside its rows, at {offset}")
        blocks.append(_Block(header, slice(header.stop, offset), element, columns))
    return Section(start, offset, positions, words, tuple(blocks))


def check_positions(state: Any, start: int, end: int, layout: Layout = PLAIN) -> int:
    """StateError unless the cells of `state` are exactly the positions start .. end-1, in whatever order.

    Of a window, only the last ones need be there, without a gap: returned is the position from which on it has all,
    `start` where there is no window and `end` where it has none.  O(cells).
    """
    data = np.frombuffer(state, np.uint8)
    if layout.sections < 2:
        _check_header(data)
        _expect_run(_cells(data, _HEADER)[0], start, end)
        return start
    base, window = read_sections(data, layout)
    _expect_run(base.positions, start, end)
    held_from = end - window.positions.size
    if held_from < end:
        _expect_run(window.positions, held_from, end)
    return held_from


def _expect_run(positions: Positions, start: int, end: int) -> None:
    expected = np.arange(start, end, dtype=np.int32)
    if not np.array_equal(positions, expected) and not np.array_equal(np.sort(positions), expected):
        found = f"{positions.min()} to {positions.max()}" if positions.size else "none"
        raise StateError(
            f"a saved state holds {positions.size} cells at positions {found}, expected {start} to {end - 1}"
        )


def attention_bytes(state: Any) -> int:
    """How many bytes of a state its header and its first section take.  O(layers)."""
    data = np.frombuffer(state, np.uint8)
    _check_header(data)
    return _section(data, _HEADER).end


def v_transposed(state: Any) -> bool | None:
    """Whether V is stored transposed, which llama.cpp does where flash attention is off; None for no cells."""
    data = np.frombuffer(state, np.uint8)
    _check_header(data)
    section = _section(data, _HEADER)
    return bool(data[section.counts][:4].view("<u4")[0]) if section.positions.size else None


def without_ids(state: Any, layout: Layout = PLAIN) -> Bytes:
    """A copy of a saved state with the sequence ids in it set to 0: equal states give equal bytes."""
    data = np.frombuffer(state, np.uint8).copy()
    data[4:8] = 0
    for section in read_sections(data, Layout(layout.sections, opaque=True)):
        data[section.cells].view("<i4").reshape(-1, section.words)[:, -1] = 0
    return data


def read_rows(state: Any, layout: Layout = PLAIN) -> Bytes:
    """What the first section keeps of each token: uint8 [n, bytes per token], ordered by position.  O(bytes).

    K and V of all its layers, as they lie in the state; equal rows mean equal memory of that token.
    StateError where the state does not end where its layout says.
    """
    data = np.frombuffer(state, np.uint8)
    return read_sections(data, layout)[0].rows(data)


def cut(
    state: Any,
    start: int,
    end: int,
    room: Callable[[int], Bytes] | None = None,
    *,
    layout: Layout = PLAIN,
    window: int | None = None,
) -> Bytes:
    """The saved state of the tokens [start, end) alone, out of a saved state that holds them.  O(bytes of the cut).

    It is what llama.cpp would have saved of that range, byte for byte but for sequence ids.  `room(size)` gives
    the memory that it is written into (uint8, at least `size`), by default new memory.  Of a second section only the
    positions from `window` on are taken (by default all that are there).  Opaque bytes stay as they are.  StateError
    where the first section does not hold exactly one cell for each of these positions.
    """
    data = np.frombuffer(state, np.uint8)
    sections = read_sections(data, layout)
    picks: list[tuple[Section, Any, int]] = []  # (section, which of its cells, how many)
    size = _HEADER
    for i, section in enumerate(sections):
        low = start if i == 0 or window is None else max(start, window)
        chosen = np.flatnonzero((section.positions >= low) & (section.positions < end))
        if i == 0 and (end <= start or not np.array_equal(np.sort(section.positions[chosen]), np.arange(start, end))):
            raise StateError(f"a saved state holds {chosen.size} of the cells [{start}, {end}), expected {end - start}")
        in_a_row = chosen.size > 0 and chosen[-1] - chosen[0] + 1 == chosen.size
        pick: Any = slice(int(chosen[0]), int(chosen[-1]) + 1) if in_a_row else chosen
        picks.append((section, pick, chosen.size))
        size += _COUNTS + 4 * section.words * chosen.size
        if chosen.size:
            size += 8 + sum(12 + chosen.size * block.element * block.columns for block in section.blocks)
    tail = data[sections[-1].end if sections else _HEADER :]
    size += tail.size
    target = np.empty(size, np.uint8) if room is None else room(size)[:size]
    target[:_HEADER] = data[:_HEADER]
    offset = _HEADER
    for section, pick, n in picks:
        offset = _put_section(data, section, pick, n, target, offset)
    target[offset:] = tail
    return target


def _put_section(data: Bytes, section: Section, pick: Any, wanted: int, target: Bytes, offset: int) -> int:
    """Write the chosen cells of a section at `offset`; where it ends."""
    target[offset : offset + 4] = data[section.start : section.start + 4]
    target[offset + 4 : offset + 8].view("<u4")[0] = wanted
    offset += _COUNTS
    if wanted == 0:
        return offset
    n = section.positions.size
    stop = offset + 4 * section.words * wanted
    table = data[section.cells].view("<i4").reshape(n, section.words)
    target[offset:stop].view("<i4").reshape(wanted, section.words)[:] = table[pick]
    target[stop : stop + 8] = data[section.counts]
    offset = stop + 8
    for block in section.blocks:
        target[offset : offset + 12] = data[block.header]
        offset += 12
        stop = offset + wanted * block.element * block.columns
        target[offset:stop].reshape(block.columns, wanted, block.element)[:] = block.grid(data, n)[:, pick]
        offset = stop
    return offset
