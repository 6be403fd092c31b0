"""Saved state without a model: random bytes under random paths, for the tests of the folder itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from skippy.store import DiskTier
from skippy.store.known import Found

Tokens = npt.NDArray[np.int32]

NAMESPACE = "a" * 64
OTHER = "b" * 64


def open_tier(folder: Path, **settings: Any) -> DiskTier:
    return DiskTier(folder, **{"capacity": 64 * 2**20, "min_free": 0, **settings})


def path_of(n: int, seed: int) -> Tokens:
    return np.random.default_rng([seed, 6]).integers(3, 30_000, n).astype(np.int32)


def bytes_of(path: Tokens, start: int, per_token: int) -> npt.NDArray[np.uint8]:
    """The "state" of [start, len(path)): the same for the same path."""
    seed = xxhash.xxh3_64_intdigest(path.tobytes() + bytes([start % 251]))
    return np.random.default_rng(seed).integers(0, 256, per_token * max(1, len(path) - start), np.uint8)


def offer(tier: DiskTier, path: Tokens, start: int = 0, *, namespace: str = NAMESPACE, per_token: int = 64) -> None:
    """Offer the segment [start, len(path)), or what of it is not there yet."""

    def state(begin: int) -> tuple[Any, int]:
        data = bytes_of(path, begin, per_token)
        return data, xxhash.xxh3_64_intdigest(data)

    tier.offer_segment(namespace, path, start, start, per_token * (len(path) - start), state)


def offer_checkpoint(
    tier: DiskTier, path: Tokens, nbytes: int = 1000, *, namespace: str = NAMESPACE, flags: int = 0
) -> None:
    def state() -> tuple[Any, int]:
        data = bytes_of(path, len(path) - 1, nbytes)
        return data, xxhash.xxh3_64_intdigest(data)

    tier.offer_checkpoint(namespace, path, flags, nbytes, state)


def put(tier: DiskTier, path: Tokens, start: int = 0, **options: Any) -> None:
    """Offer it, and wait until it is written."""
    offer(tier, path, start, **options)
    tier.flush()


def read(tier: DiskTier, found: Found, path: Tokens, per_token: int = 64) -> list[tuple[int, int]]:
    """Open all segments that were found and prove their bytes; what they cover of the path."""
    covered = []
    for span in found.spans:
        state = span.payload
        file = tier.open(state)
        owner = state.row.entry
        head = np.concatenate([path[: span.start], owner.tokens])
        assert bytes(file.view) == bytes_of(head, span.start, per_token).tobytes()
        file.close()
        covered.append((span.start, span.reach))
    return covered


def reach(tier: DiskTier, path: Tokens, namespace: str = NAMESPACE) -> int:
    return tier.find(namespace, path).reach


def sizes(folder: Path) -> int:
    """Bytes of all files in the folder, of the index as well."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def kv_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))
