"""Plan, restore, record: what makes a request over a stored prefix short.

A failure in here costs time and never the request: the lane is emptied, the reason counted, and the prompt
evaluated from zero.  The caller holds the context's lock around every call.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from skippy._radix import Lock, Match, Node, RadixTree
from skippy.config import CacheConfig
from skippy.errors import ContextFull, Locked, NativeError, StateError
from skippy.history import PartingHistory
from skippy.plan import Part, Plan, make_plan
from skippy.pool import Pool
from skippy.report import TIERS, Explanation
from skippy.segments import RamStore
from skippy.space import Space
from skippy.speeds import Speeds

__all__ = ["Cache", "Lease", "Observer"]

log = logging.getLogger("skippy")

Tokens = npt.NDArray[np.int32]


@dataclass(eq=False)
class Lease:
    """A lane in use: `length` tokens of `namespace` are in sequence `lane`, `held` of them shared with residents."""

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


class Observer(Protocol):
    """Somebody who looks on, for tests and for the demonstration; called with the context's lock held."""

    def restored(self, lease: Lease, tokens: Tokens) -> None:
        """The prompt `tokens` was looked up, and the lane holds its first `lease.length`."""

    def evaluated(self, lease: Lease, tokens: Tokens) -> None:
        """A request ended, and the lane holds `tokens`; it is recorded and emptied next."""


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
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self.pool = pool
        self.config = config
        self.unable = unable
        self.max_resident_tokens = max_resident_tokens
        self.tree = RadixTree()
        self.store = RamStore(0 if self.off or config.payload == "resident-kv" else config.saved_bytes_cap())
        self.space = Space(
            self.tree,
            pool,
            self.store,
            lane_cells=lambda: sum(lease.length - lease.held for lease in self._leases),
            keep_saved=self.store.arena.capacity > 0,
            emit=self._emit,
        )
        self.speeds = Speeds()
        self.history = PartingHistory()
        self.tokens: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.observer: Observer | None = None
        self._leases: set[Lease] = set()
        self._on_event = on_event

    @property
    def off(self) -> bool:
        """Whether nothing is ever looked up or recorded."""
        return self.config.mode == "disabled" or self.unable is not None

    def _emit(self, event: str, **details: Any) -> None:
        if self._on_event is not None:
            self._on_event(event, details)

    # -- looking up and restoring -----------------------------------------------------------------------

    def begin(self, namespace: str, tokens: Tokens, *, reuse: bool = True, room: int = 1) -> Lease | None:
        """Take a lane and bring back as much of the prompt `tokens` (int32 [n]) as is stored; None if no lane is free.

        Afterwards the lane holds tokens[:lease.length] exactly, verified, and there are cells for the rest of the
        prompt and for `room` tokens more.  ContextFull where they cannot be had (the lane is free again then).
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
            self.reserve(len(tokens) - lease.length + room)
        except BaseException:
            self.end(lease)
            raise
        self.tokens["prompt"] += len(tokens)
        for tier, n in lease.by_tier.items():
            self.tokens[f"cached:{tier}"] += n
        self.tokens["cached"] += lease.restored
        self.tokens["evaluated"] += len(tokens) - lease.restored
        self.reasons[lease.reason] += 1
        self._emit("lookup", prompt_tokens=len(tokens), cached_tokens=lease.restored, reason=lease.reason)
        return lease

    def _restore(self, lease: Lease, tokens: Tokens) -> None:
        trouble: str | None = None
        while True:
            match = self.tree.match(lease.namespace, tokens)
            plan = make_plan(match, len(tokens), min_tokens=self.config.min_tokens, speeds=self.speeds)
            if trouble is None:
                self._note_parting(lease, match, tokens)
            bad = self._execute(lease, plan, tokens) if plan.parts else None
            if bad is None:
                break
            trouble = bad[0]
            self._clean(lease)
            if bad[1] is None:  # nothing to drop: trying again would fail again
                plan = Plan((), plan.matched, trouble)
                break
        lease.reason = trouble or plan.reason
        if lease.reason == "hit" and lease.diverged_at is not None:
            lease.reason = "partial"

    def _note_parting(self, lease: Lease, match: Match, tokens: Tokens) -> None:
        if not 0 < match.matched < len(tokens):
            return
        stored = self.tree.following(lease.namespace, tokens, 512)
        if len(stored):
            lease.diverged_at = match.matched
            self.history.note(lease.namespace, match.matched, stored, tokens[match.matched :][:512])

    def _execute(self, lease: Lease, plan: Plan, tokens: Tokens) -> tuple[str, Part | None] | None:
        """Restore `plan` into the lane.  None if it worked; else why not, and the part that is to blame, if one is."""
        # The resident part comes first and needs no room, so nothing can be evicted before it is taken.
        saved = [part for part in plan.parts if part.tier != "resident"]
        locks = [self.tree.lock(part.node, min(part.end, part.node.length)) for part in saved]
        failure: tuple[str, Part | None] | None = None
        try:
            for part in plan.parts:
                try:
                    self._execute_part(lease, part, tokens)
                except ContextFull:  # other requests hold the cells: go on from what is there
                    break
                except StateError as error:
                    failure = ("corrupt", part)
                    log.warning("stored state failed its check and is dropped: %s", error)
                except NativeError as error:
                    failure = ("corrupt", None)
                    log.warning("restoring failed, the prompt is evaluated from zero: %s", error)
                if failure:
                    break
                lease.length = lease.restored = part.end
                lease.by_tier[part.tier] += part.end - part.start
        finally:
            for lock in reversed(locks):
                self.tree.unlock(lock)
        if failure:
            self.space.failures["restore"] += 1
            bad = failure[1]
            if bad is not None and bad.tier == "ram":
                self.space.drop_segment(bad.node, "corrupt")
            elif bad is not None:
                self.space.drop_resident(bad.node)
        return failure

    def _execute_part(self, lease: Lease, part: Part, tokens: Tokens) -> None:
        if part.tier == "resident":
            self.pool.append(self.space.sequence_of(part.node), lease.lane, 0, part.end)
            # From now on the lane holds these cells too: they count once, whatever residents come and go.
            lease.lock = self.tree.lock(self.tree.insert(lease.namespace, tokens[: part.end]), cells=True)
            lease.held = lease.length = part.end
            return
        segment = part.payload
        self.space.make_cells(part.end - part.start)
        began = time.perf_counter()
        self.store.restore(self.pool, segment, lease.lane, part.start, part.end)
        nbytes = part.nbytes
        self.speeds.restored(nbytes, time.perf_counter() - began)
        self._emit("restore", tier="ram", tokens=part.end - part.start, bytes=nbytes)

    def _clean(self, lease: Lease) -> None:
        """Empty the lane of a lease and forget what it shared."""
        self.pool.empty(lease.lane)
        if lease.lock is not None:
            self.tree.unlock(lease.lock)
        lease.lock = None
        lease.length = lease.restored = lease.held = 0
        lease.by_tier = dict.fromkeys(TIERS, 0)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more in any lane; residents leave if they must.  ContextFull if they can't."""
        self.space.make_cells(tokens)

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
                return self._record_saved(lease, tokens)
            return self._record_resident(lease, tokens)
        except NativeError as error:
            self.space.failures["record"] += 1
            log.warning("an evaluated path was not recorded: %s", error)
            return False

    def _record_saved(self, lease: Lease, tokens: Tokens) -> bool:
        node = self.tree.insert(lease.namespace, tokens)
        self.space.save_path(node, lease.lane)
        if node.alive and self.tree.segments(node):
            self.tree.touch(node)
        return bool(node.alive and self.tree.match(lease.namespace, tokens).segment_length == len(tokens))

    def _record_resident(self, lease: Lease, tokens: Tokens) -> bool:
        n = len(tokens)
        keep = min(n, self.max_resident_tokens) if self.max_resident_tokens else n
        match = self.tree.match(lease.namespace, tokens)
        if match.resident is not None and match.resident_length >= keep:
            self.tree.touch(match.resident)
        else:
            self._keep_resident(lease, tokens[:keep], match)
        if keep < n and self.store.arena.capacity:
            self.space.save_path(self.tree.insert(lease.namespace, tokens), lease.lane)
        while self.max_resident_tokens and self.tree.cells > self.max_resident_tokens:
            if not self.space.evict_resident("resident_cap"):
                break
        return self.tree.match(lease.namespace, tokens).matched == n

    def _keep_resident(self, lease: Lease, tokens: Tokens, match: Match) -> None:
        """Make the lane's first tokens a resident; what another resident holds of them is taken from it."""
        holder, shared = match.resident, match.resident_length
        grows = holder is not None and holder.length == shared
        guard = self.tree.lock(holder) if holder is not None else None  # it must not leave for the new one's id
        try:
            # A holder whose whole path is the head of this one grows: its id goes on, none is spent.
            seq = self.space.sequence_of(holder) if holder is not None and grows else self._resident_id()
            if seq is None:
                return
            try:
                if holder is not None and not grows:
                    self.pool.append(self.space.sequence_of(holder), seq, 0, shared)
                self.pool.append(lease.lane, seq, shared, len(tokens))
            except NativeError:
                if not grows:
                    self.pool.give_back(seq)
                raise
        finally:
            if guard is not None:
                self.tree.unlock(guard)
        node = self.tree.insert(lease.namespace, tokens)
        self.tree.put(node, "resident", seq)
        self._release(lease)
        if holder is not None and grows:
            self.tree.take(holder, "resident")
        for ancestor in self.tree.covered(node):
            self.space.drop_resident(ancestor)

    def _resident_id(self) -> int | None:
        """A free id for a cached path, for which the least recent resident leaves; None if none can."""
        while (seq := self.pool.take_resident()) is None:
            if not self.space.evict_resident("entries"):
                return None
        return seq

    def _release(self, lease: Lease) -> None:
        if lease.lock is not None:
            self.tree.unlock(lease.lock)
            lease.lock = None

    def end(self, lease: Lease) -> None:
        """Empty the lane of `lease` and free it.  What was not recorded is gone.  Ending twice does nothing."""
        if lease not in self._leases:
            return
        self._leases.discard(lease)
        self._release(lease)
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
        match = self.tree.match(namespace, tokens)
        plan = make_plan(match, len(tokens), min_tokens=self.config.min_tokens, speeds=self.speeds)
        at = match.matched
        stored = self.tree.following(namespace, tokens, around) if 0 < at < len(tokens) else tokens[:0]
        parted = len(stored) > 0
        before = tokens[max(0, at - around) : at]
        volatile = self.history.volatile_index(namespace, at)
        return Explanation(
            prompt_tokens=len(tokens),
            matched_tokens=at,
            cached_tokens=0 if self.off else plan.length,
            reason=self._off_reason() or ("partial" if plan.reason == "hit" and parted else plan.reason),
            diverged_at=at if parted else None,
            stored_text=show(np.concatenate([before, stored])) if parted else None,
            prompt_text=show(np.concatenate([before, tokens[at : at + around]])) if parted else None,
            hint=None if volatile is None else "volatile_prefix",
        )

    def _off_reason(self) -> str | None:
        if self.config.mode in ("disabled", "record"):
            return "disabled"
        return "no_checkpoint" if self.unable else None

    def stats(self) -> dict[str, Any]:
        """Counters in tokens, cells, bytes and seconds; see docs/stats.md for each."""
        return {
            "mode": self.config.mode,
            "unable": self.unable,
            "tokens": {name: self.tokens[name] for name in ("prompt", "cached", "evaluated")}
            | {f"cached_{tier}": self.tokens[f"cached:{tier}"] for tier in TIERS},
            "requests": dict(self.reasons),
            "cells": {
                "capacity": self.pool.n_cells,
                "in_use": self.space.cells_in_use,
                "resident": self.tree.cells,
                "lost": self.pool.lost_cells,
                "resident_cap": self.max_resident_tokens,
            },
            "ram": {
                "capacity": self.store.arena.capacity,
                "in_use": self.store.arena.used,
                "peak": self.store.arena.peak,
                "bytes_saved": self.store.bytes_saved,
                "bytes_restored": self.store.bytes_restored,
                "seconds_saving": self.store.seconds_saving,
                "seconds_restoring": self.store.seconds_restoring,
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
