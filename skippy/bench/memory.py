"""How much memory a process has, and how much there is."""

from __future__ import annotations

import os
import resource
import sys

__all__ = ["available_kib", "memory_kib", "peak_kib"]


def _field(path: str, name: str) -> int | None:
    try:
        with open(path) as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)
    except OSError:
        return None


def memory_kib(pid: int | str = "self") -> int:
    """Resident memory of a process now, in KiB; 0 where the system does not say."""
    return _field(f"/proc/{pid}/status", "VmRSS:") or 0


def peak_kib(pid: int | str = "self") -> int:
    """The most resident memory that a process had, in KiB; of another one 0 where the system does not say."""
    peak = _field(f"/proc/{pid}/status", "VmHWM:")
    if peak is None and pid == "self":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak // 1024 if sys.platform == "darwin" else peak
    return peak or 0


def available_kib() -> int:
    """Memory that processes can still take, in KiB; half of the machine's where the system does not say."""
    found = _field("/proc/meminfo", "MemAvailable:")
    return found if found is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2048
