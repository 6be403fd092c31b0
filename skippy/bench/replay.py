"""Replays prompts through skippy's cache without a model: what a budget of cells or of saved state finds again."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from skippy.cache import Cache
from skippy.capability import Capability
from skippy.config import CacheConfig
from skippy.layout import MAGIC
from skippy.pool import Pool

__all__ = ["BYTES", "Positions", "Tier", "replay"]

Tier = Literal["pool", "ram", "both"]
Path = tuple[npt.NDArray[np.int32], int]
"""A prompt and what was answered, and how many of it are the prompt."""

_ROW = 26  # bytes of K and of V for a token, so that it takes 64 bytes when it is saved
BYTES = 12 + 2 * _ROW
_RESTORE = 1e9  # bytes per second


class Positions:
    """A context whose sequences are ranges of positions: what `_llama.Context` does, without cells and memory."""

    n_batch = 512
    n_vocab = 1

    def __init__(self, n_ctx: int, n_seq_max: int) -> None:
        self.n_ctx, self.n_seq_max = n_ctx, n_seq_max
        self.ranges: dict[int, tuple[int, int]] = {}

    def seq_cp(self, src: int, dst: int, start: int = 0, end: int = -1) -> None:
        """Share a range of positions."""
        first, last = self.ranges[src]
        first, last = max(first, start), last if end == -1 else min(last, end)
        if dst in self.ranges:
            first, last = min(first, self.ranges[dst][0]), max(last, self.ranges[dst][1])
        self.ranges[dst] = (first, last)

    def seq_rm(self, seq: int, start: int = 0, end: int = -1) -> bool:
        """Drop positions from `start` on."""
        first, last = self.ranges.pop(seq, (0, 0))
        if first < start < last:
            self.ranges[seq] = (first, start)
        elif start >= last > first:
            self.ranges[seq] = (first, last)
        return True

    def seq_pos_min(self, seq: int) -> int:
        """The first position, or -1."""
        return self.ranges[seq][0] if seq in self.ranges else -1

    def seq_pos_max(self, seq: int) -> int:
        """The last position, or -1."""
        return self.ranges[seq][1] - 1 if seq in self.ranges else -1

    def decode(self, seq: int, start: int, tokens: Any, outputs: Any = "last") -> int:
        """Append tokens, whatever they are."""
        assert start == self.seq_pos_max(seq) + 1
        self.ranges[seq] = (self.ranges.get(seq, (start, 0))[0], start + len(tokens))
        return 0

    def state_size(self, seq: int, flags: int = 0) -> int:
        """Bytes of a saved state."""
        first, last = self.ranges.get(seq, (0, 0))
        return 16 + 8 + 24 + (last - first) * BYTES

    def save(self, seq: int, out: Any, flags: int = 0) -> int:
        """Write a state whose rows are zero."""
        first, last = self.ranges[seq]
        n = last - first
        data = np.frombuffer(out, np.uint8)
        data[:16] = np.frombuffer(struct.pack("<IiII", MAGIC, seq, 1, n), np.uint8)
        cells = np.stack([np.arange(first, last), np.full(n, 1), np.full(n, seq)], axis=1).astype("<i4")
        offset = 16 + 12 * n
        data[16:offset] = np.frombuffer(cells.tobytes(), np.uint8)
        data[offset : offset + 8] = np.frombuffer(struct.pack("<II", 0, 1), np.uint8)
        offset += 8
        for _ in range(2):
            data[offset : offset + 12] = np.frombuffer(struct.pack("<iQ", 0, _ROW), np.uint8)
            data[offset + 12 : offset + 12 + _ROW * n] = 0
            offset += 12 + _ROW * n
        return offset

    def load(self, seq: int, data: Any, flags: int = 0) -> None:
        """Take the positions of a state."""
        raw = np.frombuffer(data, np.uint8)
        (n,) = struct.unpack_from("<I", raw.data, 12)
        (first,) = struct.unpack_from("<i", raw.data, 16)
        self.ranges[seq] = (first, first + n)


def replay(
    paths: Sequence[Path],
    eviction: Literal["worth", "lru"],
    tier: Tier,
    budget: int,
    *,
    prefill: float,
    tokens_each: int = 1,
    min_tokens: int = 16,
) -> dict[str, float]:
    """`hits`, the tokens of the prompts that were found with `budget` cells, or as much saved state ("ram"), or both.

    `prefill` is in tokens per second; where a token stands for several, for `tokens_each`.  "both" is a quarter cells.
    What a running request needs is not part of the budget.  O(tokens).
    """
    longest = max(len(path) for path, _ in paths) + 8
    cells = {"pool": budget, "ram": 0, "both": budget // 4}[tier]
    residents = 200
    context = Positions(cells + 2 * longest, residents + 2)
    config = CacheConfig(
        mode="lookup-record",
        payload={"pool": "resident-kv", "ram": "full-state", "both": "auto"}[tier],  # type: ignore[arg-type]
        ram=(budget - cells) * BYTES,
        min_tokens=min_tokens,
        eviction=eviction,
        residency="keep",
        max_bytes=0,
        logits_bytes=0,
        disk=None,
    )
    pool = Pool(context, lanes=1, residents=residents)
    cache = Cache(pool, config, max_resident_tokens=cells, capability=Capability(None, bytes_per_token=BYTES))
    speeds = cache.speeds
    speeds.prefilled(int(prefill), tokens_each)
    speeds.restored(int(_RESTORE), 1.0)
    speeds.saved(int(_RESTORE), 1.0)
    for learn in ("prefilled", "restored", "saved"):  # this machine's speed is not looked at
        setattr(speeds, learn, lambda *_: None)
    hits = 0
    began = time.perf_counter()
    for path, prompt in paths:
        lease = cache.begin("replay", path[:prompt])
        assert lease is not None
        hits += lease.restored
        context.decode(lease.lane, lease.length, path[lease.length :])
        lease.length = len(path)
        cache.record(lease, path)
        cache.end(lease)
    seconds = time.perf_counter() - began
    cache.check()
    used = cache.tree.cells + cache.store.arena.used / BYTES
    assert used <= budget, f"{used} cells are kept, the budget is {budget}"
    cache.close()
    return {"hits": hits, "ms_per_request": 1e3 * seconds / len(paths)}
