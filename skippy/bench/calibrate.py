"""What this machine needs for a token that is evaluated, restored from RAM or from disk: and what follows from it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import skippy
from skippy.bench.attention import attention
from skippy.bench.machine import machine
from skippy.bench.play import Settings
from skippy.bench.tiers import leave_pool, leave_ram, open_runtime

__all__ = ["break_even", "calibrate"]

_LENGTHS = (128, 512, 1024)


def break_even(prefill: float, fixed_ms: float, ms_per_token: float) -> int | None:
    """From how many tokens restoring is faster than evaluating: the least n with n/prefill > fixed + n * per token.

    None where it never is.

    >>> break_even(1000.0, 2.0, 0.01), break_even(1000.0, 2.0, 1.5)
    (3, None)
    """
    gain = 1e3 / prefill - ms_per_token
    return None if gain <= 0 else max(1, int(fixed_ms / gain) + 1)


class _Bench:
    """A runtime whose prompts can be sent to one tier and asked for again."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        config = skippy.CacheConfig(ram=settings.ram_bytes, disk=folder, min_tokens=16, logits_bytes=0)
        self.rt = open_runtime(settings.as_dict(), config)
        # Whether it is worth it is what is being asked.
        self.rt.cache.speeds.worth_restoring = lambda *_: True  # type: ignore[method-assign]
        self.rng = np.random.default_rng(1)

    def words(self, n: int) -> list[int]:
        vocabulary = self.rt.model.n_vocab
        return [int(token) for token in self.rng.integers(vocabulary // 4, vocabulary // 2, n)]

    def seconds(self, prompt: list[int]) -> tuple[float, skippy.ReuseReport]:
        began = time.perf_counter()
        reuse = self.rt.generate(prompt, max_tokens=0).reuse
        return time.perf_counter() - began, reuse


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Milliseconds fixed and per token, by least squares; nothing below zero."""
    n, ms = np.array(points, float).T
    per_token, fixed = np.polyfit(n, ms, 1)
    return max(0.0, float(fixed)), max(0.0, float(per_token))


def calibrate(settings: Settings, *, rounds: int = 3) -> dict[str, Any]:
    """Measure a model on this machine: {"machine", "tiers", "bytes", "advice", ...}.

    `prefill_tokens_per_second` is by prompt length; each tier has milliseconds fixed and per token, and the prefix
    length from which it pays off; `flash_attention` is what `attention` says, None for a model that has no attention.
    Medians of `rounds`.
    """
    with tempfile.TemporaryDirectory(prefix="skippy-bench-") as made:
        bench = _Bench(settings, Path(made))
        try:
            return _measure(bench, settings, rounds)
        finally:
            bench.rt.close()


def _measure(bench: _Bench, settings: Settings, rounds: int) -> dict[str, Any]:
    lengths = [n for n in _LENGTHS if n + 64 < settings.n_ctx]
    bench.seconds(bench.words(32))  # the first batch pays for its buffers
    prefill: dict[int, list[float]] = {}
    restores: dict[str, list[tuple[int, float]]] = {"ram": [], "disk": []}
    moves = {"ram": (leave_pool,), "disk": (leave_pool, leave_ram)}
    for _ in range(rounds):
        for n in lengths:
            prompt = bench.words(n)
            seconds, _reuse = bench.seconds(prompt)
            prefill.setdefault(n, []).append(n / seconds)
            for tier, out_of in moves.items():
                for leave in out_of:
                    leave(bench.rt)
                _, reuse = bench.seconds([*prompt, *bench.words(8)])
                if reuse.by_tier[tier]:
                    restores[tier].append((reuse.by_tier[tier], reuse.restore_ms))
        bench.rt.clear()
    shape = bench.rt.capability
    speed = {n: sorted(values)[len(values) // 2] for n, values in prefill.items()}
    slowest = min(speed.values())
    tiers: dict[str, Any] = {}
    for tier, points in restores.items():
        if len({n for n, _ in points}) < 2:
            tiers[tier] = {"measured": False}
            continue
        fixed, per_token = _line(points)
        tiers[tier] = {
            "measured": True,
            "ms_fixed": fixed,
            "ms_per_token": per_token,
            "bytes_per_second": 1e3 * shape.bytes_per_token / per_token if per_token else None,
            "pays_off_from": break_even(slowest, fixed, per_token),
        }
    each = shape.bytes_per_token * settings.n_ctx + shape.point_state_bytes
    return {
        "machine": machine(settings.model, bench.rt.model),
        "settings": settings.as_dict() | {"model": settings.model.name},
        "prefill_tokens_per_second": speed,
        "flash_attention": attention(bench.rt.model, settings) if shape.bytes_per_token else None,
        "bytes": {
            "per_token": shape.bytes_per_token,
            "per_checkpoint": shape.point_state_bytes,
            "of_a_full_context": each,
        },
        "tiers": tiers,
        "advice": _advice(tiers, shape.bytes_per_token, shape.point_state_bytes, settings),
    }


def _advice(tiers: dict[str, Any], per_token: int, per_checkpoint: int, settings: Settings) -> dict[str, Any]:
    """Settings that follow from it: the shortest prefix worth keeping, and bytes for eight full conversations."""
    paying = [tier["pays_off_from"] for tier in tiers.values() if tier["measured"] and tier["pays_off_from"]]
    conversations = 8
    nbytes = conversations * (per_token * settings.n_ctx + 6 * per_checkpoint)
    return {
        "min_tokens": max(16, min(paying)) if paying else None,
        "ram_bytes_for_eight_full_contexts": nbytes,
        "disk_bytes_for_eighty": 10 * nbytes,
    }
