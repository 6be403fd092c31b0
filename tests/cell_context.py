"""A context made of cells that can be counted and read: what `_llama.Context` does, without a model.

The memory of a token is a number that depends on all tokens before it, so that a wrong restore shows.
"""

from __future__ import annotations

import struct
from typing import Any

from skippy.errors import StateError
from skippy.layout import MAGIC


def chain(tokens: Any, seed: int = 0) -> list[int]:
    """The number that stands for each token's memory."""
    values = []
    for token in tokens:
        seed = hash((seed, int(token))) & (2**63 - 1)
        values.append(seed)
    return values


class CellContext:
    """`n_ctx` cells; a sequence maps positions to cells, and a cell is free when no sequence holds it."""

    def __init__(self, n_ctx: int, n_seq_max: int, n_batch: int = 512) -> None:
        self.n_ctx, self.n_seq_max, self.n_batch = n_ctx, n_seq_max, n_batch
        self.sequences: dict[int, dict[int, int]] = {seq: {} for seq in range(n_seq_max)}
        self.values: dict[int, int] = {}

    @property
    def physical(self) -> int:
        """Cells that some sequence holds."""
        return len({cell for cells in self.sequences.values() for cell in cells.values()})

    def content(self, seq: int) -> list[int]:
        """The values of a sequence, by position."""
        return [self.values[cell] for _, cell in sorted(self.sequences[seq].items())]

    def _free(self, n: int) -> list[int] | None:
        used = {cell for cells in self.sequences.values() for cell in cells.values()}
        free = [cell for cell in range(self.n_ctx) if cell not in used][:n]
        return free if len(free) == n else None

    def seq_cp(self, src: int, dst: int, start: int = 0, end: int = -1) -> None:
        for position, cell in self.sequences[src].items():
            if start <= position and (end == -1 or position < end):
                self.sequences[dst][position] = cell

    def seq_rm(self, seq: int, start: int = 0, end: int = -1) -> bool:
        cells = self.sequences[seq]
        for position in [p for p in cells if start <= p and (end == -1 or p < end)]:
            del cells[position]
        return True

    def seq_pos_min(self, seq: int) -> int:
        return min(self.sequences[seq], default=-1)

    def seq_pos_max(self, seq: int) -> int:
        return max(self.sequences[seq], default=-1)

    def decode(self, seq: int, start: int, tokens: Any, outputs: Any = "last") -> int:
        assert start == self.seq_pos_max(seq) + 1
        cells = self._free(len(tokens))
        if cells is None:
            return 1
        before = self.values[self.sequences[seq][start - 1]] if start else 0
        for i, (cell, value) in enumerate(zip(cells, chain(tokens, before), strict=True)):
            self.sequences[seq][start + i] = cell
            self.values[cell] = value
        return 0

    def state_size(self, seq: int, flags: int = 0) -> int:
        return 16 + 8 + 2 * 12 + len(self.sequences[seq]) * (12 + 16)

    def save(self, seq: int, out: Any, flags: int = 0) -> int:
        cells = sorted(self.sequences[seq].items())
        blob = struct.pack("<IiII", MAGIC, seq, 1, len(cells))
        blob += b"".join(struct.pack("<iIi", position, 1, seq) for position, _ in cells)
        blob += struct.pack("<II", 0, 1)
        for _ in range(2):
            blob += struct.pack("<iQ", 0, 8) + b"".join(struct.pack("<Q", self.values[cell]) for _, cell in cells)
        out[: len(blob)] = blob
        return len(blob)

    def load(self, seq: int, data: Any, flags: int = 0) -> None:
        raw = bytes(data)
        self.sequences[seq].clear()
        (n,) = struct.unpack_from("<I", raw, 12)
        cells = self._free(n)
        if cells is None:
            raise StateError("not enough cells")
        for i, cell in enumerate(cells):
            self.sequences[seq][struct.unpack_from("<i", raw, 16 + 12 * i)[0]] = cell
            (self.values[cell],) = struct.unpack_from("<Q", raw, 16 + 12 * n + 8 + 12 + 8 * i)
