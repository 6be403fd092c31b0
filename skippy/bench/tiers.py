"""A runtime for the benchmark, and moving what it holds out of one tier into the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skippy.config import CacheConfig
from skippy.room import KINDS
from skippy.runtime import Runtime

__all__ = ["leave_pool", "leave_ram", "open_runtime"]


def open_runtime(settings: Mapping[str, Any], cache: CacheConfig) -> Runtime:
    """A runtime of one lane with the `settings` that all arms have in common."""
    return Runtime(
        settings["model"],
        n_ctx=settings["n_ctx"],
        n_batch=settings["n_batch"],
        n_ubatch=settings["n_batch"],
        n_threads=settings["threads"],
        n_gpu_layers=settings["n_gpu_layers"],
        flash_attn=settings["flash_attn"],
        lanes=1,
        cache=cache,
    )


def leave_pool(rt: Runtime) -> None:
    """Let all residents leave for RAM.  O(bytes saved)."""
    with rt._step():
        while rt.cache.space.evict_resident("benchmark", weigh=False):
            pass


def leave_ram(rt: Runtime) -> None:
    """Let everything leave for disk, where there is one; waits until it is written.  O(bytes)."""
    with rt._step():
        cache = rt.cache
        if cache.spill is None or cache.disk is None:
            return
        cache.spill.everything()
        cache.disk.flush()
        for kind in KINDS:
            for node in cache.tree.entries(kind):
                cache.shelf.drop(node, kind, "benchmark")
