"""A lane in use, and what one may look on at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from skippy._radix import Lock, RadixTree
from skippy.history import Tokens
from skippy.report import TIERS, ReuseReport

Logits = npt.NDArray[np.float32]

__all__ = ["Lease", "Observer", "release"]


@dataclass(eq=False)
class Lease:
    """A lane in use: `length` tokens of `namespace` are in sequence `lane`, `held` of them shared with residents.

    `promised` cells of the pool are still to be used by its prompt, and are nobody else's.
    `pauses` are lengths of its prompt at which its state is to be kept, at `kept_at` that was done last.
    `files` are what was restored from disk for it.
    `logits` (float32 [n_vocab]) are those after token `prompt_end`, the end of its prompt, where they are known.
    """

    lane: int
    namespace: str
    length: int = 0
    restored: int = 0
    held: int = 0
    by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    reason: str = "never_seen"
    diverged_at: int | None = None
    restore_ms: float = 0.0
    lock: Lock | None = None
    logits: Logits | None = None
    prompt_end: int = 0
    promised: int = 0
    pauses: list[int] = field(default_factory=list)
    kept_at: int = 0
    files: list[Any] = field(default_factory=list)

    def tell(self, report: ReuseReport) -> None:
        """Put into the report of its prompt what was restored, and from where."""
        report.cached_tokens = self.restored
        report.evaluated_tokens = report.prompt_tokens - self.restored
        report.by_tier = dict(self.by_tier)
        report.restore_ms = self.restore_ms
        report.reason = self.reason
        report.diverged_at = self.diverged_at


def release(tree: RadixTree, lease: Lease) -> None:
    """Give back the lock on the cells that a lane shares with residents."""
    if lease.lock is not None:
        tree.unlock(lease.lock)
        lease.lock = None


class Observer(Protocol):
    """Somebody who looks on, for tests and for the demonstration; called with the context's lock held."""

    def restored(self, lease: Lease, tokens: Tokens) -> None:
        """The prompt `tokens` was looked up, and the lane holds its first `lease.length`."""

    def evaluated(self, lease: Lease, tokens: Tokens) -> None:
        """A request ended, and the lane holds `tokens`; it is recorded and emptied next."""
