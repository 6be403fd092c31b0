"""Carrying out a plan: from residents and saved state into a lane, verified, or why not."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from skippy._radix import Lock
from skippy.errors import ContextFull, Locked, NativeError, StateError
from skippy.history import Tokens
from skippy.lease import Lease, release
from skippy.plan import Part, Plan
from skippy.report import TIERS
from skippy.segments import LoadRefused
from skippy.shelf import Emit
from skippy.space import Space
from skippy.store import DiskTier

__all__ = ["Failure", "LaneLost", "Restorer"]

log = logging.getLogger("skippy")


@dataclass(frozen=True)
class Failure:
    """Why a restore failed, and the part of the plan that is to blame, if one is."""

    reason: str
    part: Part | None


class LaneLost(NativeError):
    """A lane could not be emptied, and is set aside."""


class Restorer:
    """Brings plans into lanes.  What fails leaves the lane to be cleaned, and the rest of the pool as it was."""

    def __init__(self, space: Space, emit: Emit, disk: DiskTier | None = None) -> None:
        self.space = space
        self.disk = disk
        self.tree = space.tree
        self.pool = space.pool
        self.store = space.store
        self.whole_at_once = not self.pool.shape.residents  # with point state or a window nothing less is of use
        self._emit = emit

    def execute(self, lease: Lease, plan: Plan, tokens: Tokens) -> Failure | None:
        """Restore `plan` into the lane.  None if it worked, or what did not; the lane is to be cleaned then.

        Where other requests hold the cells, plain attention goes on from what is there; else nothing is restored.
        """
        locks: list[Lock | None] = []
        for part in plan.parts:
            node = part.node
            if node is None:  # on disk: who deletes it does not take it away from who reads it
                locks.append(None)
            else:
                end = node.length if part.kind == "resident" else min(part.end, node.length)
                locks.append(self.tree.lock(node, end))
        try:
            for part in plan.parts:
                try:
                    self._part(lease, part, tokens, plan.window)
                except ContextFull:
                    if self.whole_at_once:
                        self.clean(lease)
                    return None
                except StateError as error:
                    if part.tier != "disk":  # where that has been said
                        log.warning("stored state failed its check and is dropped: %s", error)
                    return Failure("corrupt", part)
                except NativeError as error:
                    log.warning("restoring failed: %s", error)
                    return Failure("corrupt", None)
                finally:
                    self._unlock(locks.pop(0))  # what has been taken may leave again
                lease.length = lease.restored = part.end
                lease.by_tier[part.tier] += part.end - part.start
        finally:
            for lock in locks:
                self._unlock(lock)
        if self.whole_at_once and not (
            self.pool.length(lease.lane) == plan.length and self.pool.is_whole(lease.lane, plan.length)
        ):
            log.warning("lane %d does not hold the %d tokens that were restored", lease.lane, plan.length)
            return Failure("corrupt", None)
        return None

    def _unlock(self, lock: Lock | None) -> None:
        if lock is not None:
            self.tree.unlock(lock)

    def _part(self, lease: Lease, part: Part, tokens: Tokens, window: int | None) -> None:
        if part.kind == "resident":
            assert part.node is not None
            seq = self.space.sequence_of(part.node)
            if self.pool.length(seq) != part.node.length:
                raise StateError(f"sequence {seq} has {self.pool.length(seq)} tokens, its entry {part.node.length}")
            self.pool.append(seq, lease.lane, 0, part.end)
            # From now on the lane holds these cells too: they count once, whatever residents come and go.
            lease.lock = self.tree.lock(self.tree.insert(lease.namespace, tokens[: part.end]), cells=True)
            lease.held = lease.length = part.end
            return
        self.space.make_cells(part.end - part.start)
        began = time.perf_counter()
        try:
            self._load(lease, part, window)
        except LoadRefused:
            # For want of cells that the ledger did not see, if at all: once more with one resident less.
            if not self.space.evict_resident("load"):
                raise
            self._load(lease, part, window)
        self.space.speeds.restored(part.nbytes, time.perf_counter() - began, part.tier)
        self._emit("restore", tier=part.tier, tokens=part.end - part.start, bytes=part.nbytes)

    def _load(self, lease: Lease, part: Part, window: int | None) -> None:
        if part.tier == "disk":
            self._load_file(lease, part, window)
        elif part.kind == "checkpoint":
            self.store.restore_point(self.pool, part.payload, lease.lane, part.end)
        else:
            self.store.restore(self.pool, part.payload, lease.lane, part.start, part.end, window)

    def _load_file(self, lease: Lease, part: Part, window: int | None) -> None:
        assert self.disk is not None
        file, what = self.disk.open(part.payload), part.payload
        try:
            if part.kind == "checkpoint":
                self.store.restore_point_state(self.pool, file.view, what.flags, what.length, lease.lane, part.end)
            else:
                self.store.restore_state(self.pool, what, file.view, lease.lane, part.start, part.end, window)
        finally:
            file.close()
        lease.files.append(what)

    def mend(self, failure: Failure) -> bool:
        """Drop what a restore failed on, once the lane is empty; whether another plan may succeed."""
        self.space.failures["restore"] += 1
        part = failure.part
        if part is None:
            return False
        try:
            if part.tier == "disk":
                part.payload.damaged = True  # and the tier has set it aside
                if self.disk is not None:
                    self.disk.give_up(part.payload)
            elif part.kind == "resident":
                assert part.node is not None
                self.space.drop_resident(part.node)
                self.space.drop_vanished()
            else:
                assert part.node is not None
                part.payload.damaged = True
                self.space.shelf.drop(part.node, "checkpoint" if part.kind == "checkpoint" else "segment", "corrupt")
        except Locked:  # another request uses its path; damaged state is not offered again all the same
            return part.kind != "resident"
        return True

    def clean(self, lease: Lease) -> None:
        """Empty the lane of a lease and forget what it shared.  LaneLost if it cannot be emptied."""
        try:
            self.pool.empty(lease.lane)
        except NativeError as error:
            raise LaneLost(str(error)) from error
        finally:  # cells that remain are counted with those of the ids that are set aside
            release(self.tree, lease)
            lease.length = lease.restored = lease.held = 0
            lease.by_tier = dict.fromkeys(TIERS, 0)
