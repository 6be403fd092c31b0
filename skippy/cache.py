"""Plan, restore, record: what makes a request over a stored prefix short.

A failure in here costs time and never the request: the lane is emptied, the reason counted, and the prompt
evaluated from zero.  The caller holds the context's lock around every call.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from skippy._radix import Match, Node, RadixTree
from skippy.capability import Capability
from skippy.config import CacheConfig
from skippy.errors import ContextFull, Locked, NativeError, StateError
from skippy.history import PartingHistory, Tokens
from skippy.lease import Lease, Observer, release
from skippy.plan import Part, Plan, make_plan
from skippy.pool import Pool
from skippy.recorder import Recorder
from skippy.report import TIERS, Explanation
from skippy.segments import LoadRefused, RamStore
from skippy.space import Space
from skippy.speeds import Speeds

__all__ = ["Cache", "Lease", "Observer"]

log = logging.getLogger("skippy")


@dataclass(frozen=True)
class _Failure:
    """Why a restore failed, and the part of the plan that is to blame, if one is."""

    reason: str
    part: Part | None


class _LaneLost(NativeError):
    """A lane could not be emptied, and is set aside."""


class Cache:
    """The cache of one context.

    `unable` is the reason why this context's state cannot be reused, or None; then, and with mode
    "disabled", requests run as if there were no cache.  `max_resident_tokens` 0 means no cap.
    """

    def __init__(
        self,
        pool: Pool,
        config: CacheConfig,
        *,
        max_resident_tokens: int,
        unable: str | None = None,
        capability: Capability | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self.pool = pool
        self.config = config
        self.capability = Capability(unable) if capability is None else capability
        self.unable = self.capability.unable
        self._leases: set[Lease] = set()
        self.tree = RadixTree()
        self.speeds = Speeds()
        self.speeds.saved(*self.capability.saved)
        self.speeds.restored(*self.capability.restored)
        self.store = RamStore(0 if self.off or config.payload == "resident-kv" else config.saved_bytes_cap())
        self.space = Space(
            self.tree,
            pool,
            self.store,
            lane_cells=lambda: sum(lease.length - lease.held for lease in self._leases),
            held_cells=lambda: [lease.held for lease in self._leases],
            keep_saved=self.store.arena.capacity > 0,
            emit=self._emit,
            speeds=self.speeds,
            bytes_per_cell=self.capability.bytes_per_token,
        )
        self.recorder = Recorder(self.space, self._leases, max_resident_tokens=max_resident_tokens)
        self.seconds_looking_up = 0.0
        self.history = PartingHistory()
        self.tokens: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.observer: Observer | None = None
        self._on_event = on_event

    @property
    def off(self) -> bool:
        """Whether nothing is ever looked up or recorded."""
        return self.config.mode == "disabled" or self.unable is not None

    @property
    def weighs_residency(self) -> bool:
        """Whether cells leave the pool for RAM where that is cheaper, before their room is needed."""
        return self.config.residency == "auto" and not self.off

    def _emit(self, event: str, **details: Any) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event, details)
        except Exception:  # somebody else's code: it must not cost the request
            log.exception("on_event(%r) raised", event)

    # -- looking up and restoring -----------------------------------------------------------------------

    def begin(self, namespace: str, tokens: Tokens, *, reuse: bool = True, room: int = 1) -> Lease | None:
        """Take a lane and bring back as much of the prompt `tokens` (int32 [n]) as is stored; None if no lane is free.

        Afterwards the lane holds tokens[:lease.length] exactly, verified, and there are cells for the rest of the
        prompt, and for `room` tokens more where that can be had, else for one.  ContextFull where not even that can
        be (the lane is free again then).
        """
        lane = self.pool.take_lane()
        if lane is None:
            return None
        lease = Lease(lane, namespace)
        self._leases.add(lease)
        try:
            off = self._off_reason() or (None if reuse else "disabled")
            if off is not None:
                lease.reason = off
            else:
                began = time.perf_counter()
                self._restore(lease, tokens)
                lease.restore_ms = 1e3 * (time.perf_counter() - began)
            if self.observer is not None:
                self.observer.restored(lease, tokens)
            needed = len(tokens) - lease.length
            if self.weighs_residency:
                self.space.relieve(needed + room)
            try:
                self.reserve(needed + room)
            except ContextFull:
                self.reserve(needed + min(room, 1))
        except _LaneLost:  # it is set aside; another one serves the prompt from zero
            self.end(lease)
            return self.begin(namespace, tokens, reuse=False, room=room)
        except BaseException:
            self.end(lease)
            raise
        if len(tokens):
            self.count(len(tokens), lease.by_tier, lease.reason)
        return lease

    def count(self, prompt_tokens: int, by_tier: dict[str, int], reason: str) -> None:
        """Note in the counters that a prompt was looked up, and tell whoever listens."""
        cached = sum(by_tier.values())
        self.tokens["prompt"] += prompt_tokens
        self.tokens["cached"] += cached
        self.tokens["evaluated"] += prompt_tokens - cached
        for tier, n in by_tier.items():
            self.tokens[f"cached:{tier}"] += n
        self.reasons[reason] += 1
        self._emit("lookup", prompt_tokens=prompt_tokens, cached_tokens=cached, reason=reason)
        if cached == 0 and reason != "disabled" and self._off_reason() is None:
            self._emit("miss", prompt_tokens=prompt_tokens, reason=reason)

    def lookup(self, namespace: str, tokens: Tokens) -> int:
        """How many leading tokens of a prompt `begin` would restore now.  Changes nothing."""
        if self._off_reason():
            return 0
        return self._plan(namespace, tokens)[1].length

    def _plan(self, namespace: str, tokens: Tokens) -> tuple[Match, Plan]:
        """What is held of a prompt, and what of it is worth bringing back.  Changes nothing."""
        match = self.tree.match(namespace, tokens)
        return match, make_plan(match, len(tokens), min_tokens=self.config.min_tokens, speeds=self.speeds)

    def _restore(self, lease: Lease, tokens: Tokens) -> None:
        lease.diverged_at = self.note_parting(lease.namespace, tokens)
        trouble: _Failure | None = None
        while True:
            began = time.perf_counter()
            _, plan = self._plan(lease.namespace, tokens)
            self.seconds_looking_up += time.perf_counter() - began
            failure = self._execute(lease, plan, tokens) if plan.parts else None
            if failure is None:
                break
            trouble = failure
            self._clean(lease)
            if not self._mend(failure):  # trying again would fail again
                break
        lease.reason = trouble.reason if trouble else plan.reason
        self._count_lost(lease, tokens)
        if lease.reason == "not_worth_it":
            self.speeds.declined()
        if lease.reason == "hit" and lease.diverged_at is not None:
            lease.reason = "partial"

    def _count_lost(self, lease: Lease, tokens: Tokens) -> None:
        """Tokens that a larger budget would have kept; where nothing was restored, that is the reason."""
        lost = min(self.space.tombstones.longest(lease.namespace, tokens), len(tokens) - 1) - lease.restored
        if lost > 0:
            self.tokens["lost"] += lost
            if lease.restored == 0 and lease.reason in ("never_seen", "below_min_tokens"):
                lease.reason = "evicted_recently"

    def note_parting(self, namespace: str, tokens: Tokens) -> int | None:
        """At which index the prompt `tokens` leaves a stored path, or None; the history takes note of it."""
        matched = self.tree.match(namespace, tokens).matched
        if not 0 < matched < len(tokens):
            return None
        stored = self.tree.following(namespace, tokens, 512)
        if not len(stored):
            return None
        self.history.note(namespace, matched, stored, tokens[matched:][:512])
        return matched

    def _execute(self, lease: Lease, plan: Plan, tokens: Tokens) -> _Failure | None:
        """Restore `plan` into the lane.  None if it worked, or what did not; the lane is to be emptied then."""
        locks = []
        for part in plan.parts:
            whole = part.tier == "resident"
            locks.append(self.tree.lock(part.node, part.node.length if whole else min(part.end, part.node.length)))
        try:
            for part in plan.parts:
                try:
                    self._execute_part(lease, part, tokens)
                except ContextFull:  # other requests hold the cells: go on from what is there
                    return None
                except StateError as error:
                    log.warning("stored state failed its check and is dropped: %s", error)
                    return _Failure("corrupt", part)
                except NativeError as error:
                    log.warning("restoring failed: %s", error)
                    return _Failure("corrupt", None)
                finally:
                    self.tree.unlock(locks.pop(0))  # what has been taken may leave again
                lease.length = lease.restored = part.end
                lease.by_tier[part.tier] += part.end - part.start
        finally:
            for lock in locks:
                self.tree.unlock(lock)
        return None

    def _mend(self, failure: _Failure) -> bool:
        """Drop what a restore failed on, once the lane is empty; whether another plan may succeed."""
        self.space.failures["restore"] += 1
        part = failure.part
        if part is None:
            return False
        try:
            if part.tier == "resident":
                self.space.drop_resident(part.node)
                self.space.drop_vanished()
            else:
                part.payload.damaged = True
                self.space.drop_segment(part.node, "corrupt")
        except Locked:  # another request uses its path; a damaged segment is not offered again all the same
            return part.tier != "resident"
        return True

    def _execute_part(self, lease: Lease, part: Part, tokens: Tokens) -> None:
        if part.tier == "resident":
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
            self.store.restore(self.pool, part.payload, lease.lane, part.start, part.end)
        except LoadRefused:
            # For want of cells that the ledger did not see, if at all: once more with one resident less.
            if not self.space.evict_resident("load"):
                raise
            self.store.restore(self.pool, part.payload, lease.lane, part.start, part.end)
        self.speeds.restored(part.nbytes, time.perf_counter() - began)
        self._emit("restore", tier="ram", tokens=part.end - part.start, bytes=part.nbytes)

    def _clean(self, lease: Lease) -> None:
        """Empty the lane of a lease and forget what it shared."""
        try:
            self.pool.empty(lease.lane)
        except NativeError as error:
            raise _LaneLost(str(error)) from error
        finally:
            release(self.tree, lease)
        lease.length = lease.restored = lease.held = 0
        lease.by_tier = dict.fromkeys(TIERS, 0)

    def rewind(self, lease: Lease, tokens: Tokens) -> None:
        """The lane of `lease` is about to be cut to `tokens`, its first ones, or goes on from there."""
        lease.length = len(tokens)
        if len(tokens) < lease.held:
            before, lease.held = lease.lock, len(tokens)
            # The shared cells before the cut stay shared: they are counted at a node that ends there.
            lease.lock = self.tree.lock(self.tree.insert(lease.namespace, tokens), cells=True) if len(tokens) else None
            if before is not None:
                self.tree.unlock(before)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more in any lane; residents leave if they must.  ContextFull if they can't."""
        self.space.make_cells(tokens)

    def decoded(self, lease: Lease, seconds: float) -> None:
        """Note that one token took `seconds` in the lane of `lease`."""
        self.speeds.decoded(self.space.cells_in_use - lease.length, lease.length, seconds)

    # -- recording --------------------------------------------------------------------------------------

    def record(self, lease: Lease, tokens: Tokens) -> bool:
        """Keep what the lane holds, `tokens` (int32 [lease.length]), as a resident path; whether it is kept.

        A prompt longer than the cap of resident tokens is kept up to the cap, the rest in RAM.  Never raises
        for native failures: they are counted, and nothing of them is in the tree.
        """
        n = len(tokens)
        if n != lease.length:
            raise ValueError(f"{n} tokens to record, but the lane holds {lease.length}")
        if self.observer is not None:
            self.observer.evaluated(lease, tokens)
        if self.off or self.config.mode == "lookup" or n < max(1, self.config.min_tokens):
            return False
        try:
            if self.pool.length(lease.lane) != n:
                raise NativeError(f"the lane holds {self.pool.length(lease.lane)} tokens, {n} were evaluated")
            if self.config.payload == "full-state":
                return self.recorder.save(lease, tokens)
            kept = self.recorder.keep(lease, tokens)
            if self.weighs_residency:
                self.recorder.save_ahead(lease, tokens)
            return kept
        except NativeError as error:
            self.space.failures["record"] += 1
            log.warning("an evaluated path was not recorded: %s", error)
            return False

    def end(self, lease: Lease) -> None:
        """Empty the lane of `lease` and free it.  What was not recorded is gone.  Ending twice does nothing."""
        if lease not in self._leases:
            return
        self._leases.discard(lease)
        release(self.tree, lease)
        try:
            self.pool.give_back(lease.lane)
        except NativeError:  # set aside and counted by the pool
            self.space.failures["lane"] += 1

    # -- looking from outside ---------------------------------------------------------------------------

    def clear(self, namespace: str | None = None) -> None:
        """Drop everything that no request is using: residents, then segments.  Other namespaces stay."""
        for node in self.tree.entries("resident", namespace):
            self._drop_if_unlocked(node, "resident")
        for node in self.tree.entries("segment", namespace):
            self._drop_if_unlocked(node, "segment")
        self.store.arena.release_pages()

    def _drop_if_unlocked(self, node: Node, kind: str) -> None:
        try:
            if kind == "resident":
                self.space.drop_resident(node)
            else:
                self.space.drop_segment(node, "cleared")
        except Locked:
            log.info("a %s of %d tokens stays: a request is using it", kind, node.length)

    def explain(self, namespace: str, tokens: Tokens, show: Callable[[Tokens], str], around: int = 8) -> Explanation:
        """Where the prompt `tokens` would leave what is stored; `show` turns tokens into text.  Changes nothing."""
        match, plan = self._plan(namespace, tokens)
        at = match.matched
        stored = self.tree.following(namespace, tokens, around) if 0 < at < len(tokens) else tokens[:0]
        parted = len(stored) > 0
        before = tokens[max(0, at - around) : at]
        volatile = self.history.volatile_index(namespace, at)
        cached = 0 if self._off_reason() else plan.length
        reason = "partial" if plan.reason == "hit" and parted else plan.reason
        if cached == 0 and reason == "never_seen" and self.space.tombstones.longest(namespace, tokens):
            reason = "evicted_recently"
        speed = self.speeds.prefill
        return Explanation(
            prompt_tokens=len(tokens),
            matched_tokens=at,
            cached_tokens=cached,
            evaluated_tokens=len(tokens) - cached,
            seconds=None if speed is None else (len(tokens) - cached) / speed,
            reason=self._off_reason() or reason,
            diverged_at=at if parted else None,
            stored_text=show(np.concatenate([before, stored])) if parted else None,
            prompt_text=show(np.concatenate([before, tokens[at : at + around]])) if parted else None,
            hint=None if volatile is None else "volatile_prefix",
        )

    def _off_reason(self) -> str | None:
        if self.config.mode in ("disabled", "record"):
            return "disabled"
        return "no_checkpoint" if self.unable else None

    def close(self) -> None:
        """Give the memory of saved state back.  The context goes with its owner; nothing can be asked afterwards."""
        self.store.close()

    def stats(self) -> dict[str, Any]:
        """Counters in tokens, cells, bytes and seconds; see docs/stats.md for each."""
        return {
            "mode": self.config.mode,
            "unable": self.unable,
            "seconds_looking_up": self.seconds_looking_up,
            "tokens": {name: self.tokens[name] for name in ("prompt", "cached", "evaluated", "lost")}
            | {f"cached_{tier}": self.tokens[f"cached:{tier}"] for tier in TIERS},
            "requests": dict(self.reasons),
            "cells": {
                "capacity": self.pool.n_cells,
                "in_use": self.space.cells_in_use,
                "resident": self.tree.cells,
                "lost": self.pool.lost_cells,
                "resident_cap": self.recorder.max_resident_tokens,
            },
            "ram": {
                "capacity": self.store.arena.capacity,
                "in_use": self.store.arena.used,
                "peak": self.store.arena.peak,
                "saves": self.store.saves,
                "restores": self.store.restores,
                "bytes_saved": self.store.bytes_saved,
                "bytes_restored": self.store.bytes_restored,
                "seconds_saving": self.store.seconds_saving,
                "seconds_restoring": self.store.seconds_restoring,
                "scratch": self.store.scratch.size,
            },
            "residents": self.tree.count("resident"),
            "segments": self.tree.count("segment"),
            "evictions": dict(self.space.evictions),
            "failures": dict(self.space.failures),
            "sequences_set_aside": len(self.pool.set_aside),
            "prefill_tokens_per_second": self.speeds.prefill,
            "restore_bytes_per_second": self.speeds.restore,
            "tree": self.tree.stats(),
        }

    def check(self) -> None:
        """Prove that tree, pool and arena agree; AssertionError with the reason where they do not.  O(everything)."""
        self.tree.check()
        self.store.arena.check()
        residents = self.tree.entries("resident")
        ids = [self.space.sequence_of(node) for node in residents]
        assert len(set(ids)) == len(ids), "two entries of the tree share a sequence id"
        for node, seq in zip(residents, ids, strict=True):
            assert self.pool.length(seq) == node.length, f"sequence {seq} and its entry differ in length"
        for lease in self._leases:
            assert self.pool.length(lease.lane) == lease.length, f"lane {lease.lane} and its lease differ in length"
        used = sum(self.space.segment_of(node).nbytes for node in self.tree.entries("segment"))
        assert used == self.store.arena.used, "the tree's segments are not the arena's blocks"
        assert self.space.cells_in_use <= self.pool.n_cells, "more cells are in use than there are"
