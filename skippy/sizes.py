"""Sizes in bytes: how they are written, and how much memory there is."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path

__all__ = ["MAX_SIZE", "available_memory", "parse_size"]

MAX_SIZE = 2**63 - 1
"""The largest size that is accepted: what fits into a signed 64-bit count of bytes."""

_ALLOWED = "expected bytes as a whole number from 0, or text such as '512MB' (powers of 1000) or '1.5 GiB' (of 1024)"
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?(b?)", re.ASCII | re.IGNORECASE)


def parse_size(value: object) -> int:
    """Bytes of a size given as an int or as text; parts of a byte are dropped.  O(1).

    Raises ValueError for everything else: a negative size, a float, a unit without its B ("2G" has two meanings).

    >>> parse_size("2GiB"), parse_size("512MB"), parse_size("1.5 GiB"), parse_size(4096)
    (2147483648, 512000000, 1610612736, 4096)
    """
    if isinstance(value, str):
        found = _TEXT.fullmatch(value.strip())
        if found is None or (found[2] and not found[4]):
            raise ValueError(_ALLOWED)
        power = " kmgt".index((found[2] or " ").lower())
        size = int(Fraction(found[1]) * (1024 if found[3] else 1000) ** power)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise ValueError(_ALLOWED)
    if not 0 <= size <= MAX_SIZE:
        raise ValueError(f"{_ALLOWED}, at most {MAX_SIZE}")
    return size


def available_memory() -> int | None:
    """Bytes that this process may still use, or None where the system does not say.  O(1), two small files read.

    Linux: `MemAvailable`, or the limit of the container where that is lower; elsewhere the free pages.
    """
    known = [size for size in (_mem_available() or _free_pages(), _container_limit()) if size is not None]
    return min(known, default=None)


def _mem_available(path: str = "/proc/meminfo") -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _free_pages() -> int | None:
    try:
        pages, page_size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no sysconf on Windows, no such name on macOS
        return None
    return pages * page_size if pages > 0 and page_size > 0 else None


def _container_limit(
    paths: tuple[str, ...] = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
) -> int | None:
    for path in paths:
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return None
