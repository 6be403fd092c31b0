"""Plan, restore, record: what makes a request over a stored prefix short.

A failure in here costs time and never the request: the lane is emptied, the reason counted, and the prompt
evaluated from zero.  The caller holds the context's lock around every call.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from skippy._radix import Match, Node, RadixTree
from skippy.capability import Capability
from skippy.config import CacheConfig, PrefixCandidatePolicy
from skippy.errors import ContextFull, Locked, NativeError, StateError
from skippy.history import PartingHistory, Tokens
from skippy.lease import Lease, Observer, release
from skippy.plan import Plan, make_plan
from skippy.pool import Pool
from skippy.recorder import Recorder
from skippy.report import TIERS, Explanation
from skippy.restorer import Failure, LaneLost, Restorer
from skippy.segments import Logits, RamStore
from skippy.shelf import ALL_KINDS, KINDS
from skippy.space import Space
from skippy.speeds import Speeds
from skippy.spill import Spill
from skippy.stops import prefill_stops
from skippy.store import DiskTier
from skippy.store.tier import Found

__all__ = ["Cache", "Lease", "Observer"]

log = logging.getLogger("skippy")


class Cache:
    """The cache of one context.

    `unable` is the reason why this context's state cannot be reused, or None; then, and with mode
    "disabled", requests run as if there were no cache.  `max_resident_tokens` 0 means no cap.  With `logits_bytes` the
    logits of whole prompts are kept, if they take no more than that each: the same prompt again needs no evaluation.
    """

    def __init__(
        self,
        pool: Pool,
        config: CacheConfig,
        *,
        max_resident_tokens: int,
        logits_bytes: int = 0,
        unable: str | None = None,
        capability: Capability | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self.pool = pool
        self.config = config
        # Those that are never kept must not stand in for the checkpoint before the last token.
        self.logits_bytes = logits_bytes if logits_bytes and 4 * pool.context.n_vocab <= logits_bytes else 0
        self.capability = Capability(unable) if capability is None else capability
        self.unable = self.capability.unable
        if self.unable is None and not self.capability.residents and not config.saved_bytes_cap():
            self.unable = "nothing of such a model can be kept without RAM, and `ram` is 0"
        self._leases: set[Lease] = set()
        self.tree = RadixTree()
        self.speeds = Speeds()
        self.speeds.saved(*self.capability.saved)
        self.speeds.restored(*self.capability.restored)
        only_residents = config.payload == "resident-kv" and self.capability.residents
        self.store = RamStore(0 if self.off or only_residents else config.saved_bytes_cap(), self.capability)
        if self.unable is None and self.store.arena.capacity:
            self.store.prepare(pool)
        self.space = Space(
            self.tree,
            pool,
            self.store,
            lane_cells=lambda: sum(lease.length - lease.held for lease in self._leases),
            promised_cells=lambda: sum(lease.promised for lease in self._leases),
            held_cells=lambda: [lease.held for lease in self._leases],
            keep_saved=self.store.arena.capacity > 0,
            emit=self._emit,
            speeds=self.speeds,
            bytes_per_cell=self.capability.bytes_per_token,
            min_tokens=config.min_tokens,
            by_worth=config.eviction == "worth",
            remembered=2 * (max_resident_tokens or pool.n_cells)
            + 2 * self.store.arena.capacity // max(64, self.capability.bytes_per_token),
        )
        self.shelf = self.space.shelf
        self.recorder = Recorder(self.space, self._leases, max_resident_tokens=max_resident_tokens)
        self.seconds_looking_up = 0.0
        self.history = PartingHistory()
        self.tokens: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.disk: DiskTier | None = None
        self.spill: Spill | None = None
        if config.disk is not None and not self.off:
            self.disk = DiskTier(
                config.disk,
                capacity=config.disk_bytes,
                min_free=config.disk_min_free,
                write=config.mode != "lookup",
            )
            self.spill = Spill(self.space, self.disk)
        self.restorer = Restorer(self.space, self._emit, self.disk)
        self.policy = PrefixCandidatePolicy.from_cache(config)
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
                self.space.usage.request(namespace, tokens, lease.restored)
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
        except LaneLost:  # it is set aside; another one serves the prompt from zero
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

        def plan(disk: Found) -> Plan:
            return make_plan(
                match,
                len(tokens),
                min_tokens=self.config.min_tokens,
                speeds=self.speeds,
                shape=self.capability,
                payload=self.tree.get,
                logits=self.logits_bytes > 0,
                disk=disk,
            )

        first = plan(Found())
        if self.disk is None or first.length >= len(tokens) - 1:
            return match, first
        found = self.disk.find(namespace, tokens, match.matched)
        return match, plan(found) if found.reach > first.length else first

    def _restore(self, lease: Lease, tokens: Tokens) -> None:
        lease.diverged_at = self.note_parting(lease.namespace, tokens)
        trouble: Failure | None = None
        while True:
            began = time.perf_counter()
            match, plan = self._plan(lease.namespace, tokens)
            self.seconds_looking_up += time.perf_counter() - began
            if plan.length == len(tokens) and not self._take_logits(lease, match):
                continue  # they were damaged, and are not offered again
            failure = self.restorer.execute(lease, plan, tokens) if plan.parts else None
            if failure is None:
                break
            trouble = failure
            self.restorer.clean(lease)
            if not self.restorer.mend(failure):  # trying again would fail again
                break
        if lease.length < len(tokens):
            lease.logits = None
        lease.reason = trouble.reason if trouble else plan.reason
        if lease.reason == "hit" and lease.restored < plan.length:
            lease.reason = "partial"
        self._count_lost(lease, tokens)
        if lease.reason == "not_worth_it":
            self.speeds.declined()
        if lease.reason == "hit" and lease.diverged_at is not None:
            lease.reason = "partial"

    def _take_logits(self, lease: Lease, match: Match) -> bool:
        """Read the logits after this very prompt; False, and they are gone, if they are damaged."""
        assert match.logits is not None
        saved = self.tree.get(match.logits, "logits")
        assert isinstance(saved, Logits)
        try:
            lease.logits, lease.prompt_end = saved.read(), match.logits.length
        except StateError as error:
            log.warning("stored logits failed their check and are dropped: %s", error)
            saved.damaged = True
            self.space.failures["restore"] += 1
            with suppress(Locked):
                self.shelf.drop(match.logits, "logits", "corrupt")
            return False
        return True

    def _count_lost(self, lease: Lease, tokens: Tokens) -> None:
        """Tokens that a larger budget would have kept; where nothing was restored, that is the reason."""
        lost = min(self.shelf.tombstones.longest(lease.namespace, tokens), len(tokens) - 1) - lease.restored
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

    # -- keeping what is evaluated --------------------------------------------------------------------------

    def stops(self, lease: Lease, tokens: Tokens, message_starts: Iterable[int] = ()) -> list[int]:
        """Lengths of the prompt `tokens` at which its evaluation must pause for `checkpoint`, rising.

        `message_starts` are the lengths at which its messages begin.  Plain attention needs none: it is cut anywhere.
        A window that is at least as long as a batch neither: the end of each batch will do.
        """
        shape = self.capability
        if not self.keeps_points or (shape.window and shape.window >= self.pool.context.n_batch):
            return []
        return prefill_stops(
            lease.length,
            len(tokens),
            branch=self.tree.branch_point(lease.namespace, tokens),
            message_starts=message_starts,
            shared=self.policy.shared_checkpoint(len(tokens)),
            least=max(1, self.config.min_tokens),
            before_last=shape.needs_checkpoints and not self.logits_bytes,
        )

    @property
    def keeps_points(self) -> bool:
        """Whether state must be kept while the lane stands where it belongs, because it cannot be had later."""
        return not self.off and self.config.mode != "lookup" and not self.capability.residents

    def checkpoint(self, lease: Lease, tokens: Tokens) -> None:
        """The lane holds `tokens` (int32 [lease.length]): keep what can be kept only now.  Never raises for failures.

        With point state that is the state of this length, with a window what the lane still has of it.  O(bytes).
        """
        if not self.keeps_points or len(tokens) < max(1, self.config.min_tokens):
            return
        if self.capability.needs_checkpoints:  # its attention stays in the lane, and is saved at the end
            self.shelf.save_point(lease.namespace, tokens, lease.lane)
        else:
            self.shelf.save_state(lease.namespace, tokens, lease.lane)
        if self.observer is not None:
            self.observer.evaluated(lease, tokens)

    def keep_state(self, lease: Lease, prompt_tokens: int, path: Callable[[int], Tokens]) -> None:
        """A batch has ended in the lane: keep what can be kept only now, where that is of use.

        In a prompt of `prompt_tokens` that is at its pauses and its end, and with a window at the end of each batch;
        behind it where a part of the window is about to be lost.  `path(n)` gives the first n tokens of the lane.
        """
        n = lease.length
        if not self.keeps_points:
            return
        if n <= prompt_tokens:
            wanted = n == prompt_tokens or n in lease.pauses or not self.capability.needs_checkpoints
        else:
            wanted = 0 < self.capability.window <= n - lease.kept_at + 1
        if wanted:
            self.checkpoint(lease, path(n))
            lease.kept_at = n

    def undo(self, lease: Lease, code: int = 2) -> None:
        """A batch failed: what of it went into the lane goes out again, or all does where it cannot be cut.

        `code` is llama_decode's: after 1 and -1 nothing has changed, else a recurrent state may be half computed.
        """
        if code in (1, -1) and self.pool.length(lease.lane) == lease.length:
            return
        if not self.capability.needs_checkpoints:
            try:
                self.pool.trim(lease.lane, lease.length)
                return
            except NativeError as error:
                log.warning("a lane is emptied after a failed batch: %s", error)
        self.restorer.clean(lease)

    def note_logits(self, lease: Lease, logits: Callable[[], npt.NDArray[np.float32]]) -> None:
        """The prompt has been evaluated to its end: keep its logits with it, if any are kept."""
        if not self.off and self.config.mode != "lookup" and self.logits_bytes:
            lease.logits, lease.prompt_end = logits(), lease.length

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
        if self.spill is not None and lease.restored:
            self.spill.path(lease.namespace, tokens[: lease.restored])
        try:
            if self.pool.length(lease.lane) != n:
                raise NativeError(f"the lane holds {self.pool.length(lease.lane)} tokens, {n} were evaluated")
            if lease.logits is not None and self.config.min_tokens <= lease.prompt_end <= n:
                self.shelf.keep_logits(lease.namespace, tokens[: lease.prompt_end], lease.logits)
            if self.config.payload == "full-state" or not self.capability.residents:
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
        if self.disk is not None and lease.files:
            self.disk.touch(lease.files)
        release(self.tree, lease)
        try:
            self.pool.give_back(lease.lane)
        except NativeError:  # set aside and counted by the pool
            self.space.failures["lane"] += 1

    # -- looking from outside ---------------------------------------------------------------------------

    def clear(self, namespace: str | None = None) -> None:
        """Drop everything that no request is using: residents, then what is saved.  Other namespaces stay."""
        for node in self.tree.entries("resident", namespace):
            with self._unless_locked(node, "resident"):
                self.space.drop_resident(node)
        for kind in KINDS:
            for node in self.tree.entries(kind, namespace):
                with self._unless_locked(node, kind):
                    self.shelf.drop(node, kind, "cleared")
        if self.disk is not None:
            self.disk.erase(None if namespace is None else {namespace})
        self.store.arena.release_pages()

    def write_out(self, namespace: str, tokens: Tokens, *, from_pool: bool = False) -> None:
        """Queue for the disk what of a path is in RAM: whoever held it is done with it.

        With `from_pool` also what of it is in the pool alone, which goes into RAM first.
        """
        if self.spill is None:
            return
        match = self.tree.match(namespace, tokens)
        if from_pool and match.resident is not None and match.segment_length < match.resident_length:
            path = self.tree.insert(namespace, tokens[: match.resident_length])
            self.shelf.save_path(path, self.space.sequence_of(match.resident))
        self.spill.path(namespace, tokens)

    def forget_saved(self, namespace: str, tokens: Tokens) -> int:
        """Erase on disk what is stored of prompts that begin with `tokens`; how many files."""
        return 0 if self.disk is None else self.disk.erase_prompt(namespace, tokens)

    @contextmanager
    def _unless_locked(self, node: Node, kind: str) -> Iterator[None]:
        try:
            yield
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
        if cached == 0 and reason == "never_seen" and self.shelf.tombstones.longest(namespace, tokens):
            reason = "evicted_recently"
        speed = self.speeds.prefill
        return Explanation(
            prompt_tokens=len(tokens),
            matched_tokens=max(at, plan.matched),
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

    @property
    def entries(self) -> int:
        """How many residents, segments, checkpoints and logits there are."""
        return sum(self.tree.count(kind) for kind in ALL_KINDS)

    def close(self) -> None:
        """Give the memory of saved state back.  The context goes with its owner; nothing can be asked afterwards."""
        try:
            if self.spill is not None:
                self.spill.everything()
        except BaseException:  # Ctrl-C: the rest is not waited for either
            if self.disk is not None:
                self.disk.close(flush=False)
            raise
        finally:
            try:
                if self.disk is not None:
                    self.disk.close()
            finally:
                self.store.close()

    def describe(self, namespace: str, **label: str) -> None:
        """What people call a namespace: model, tenant.  It is written beside what is stored on disk."""
        if self.disk is not None:
            self.disk.labels[namespace] = json.dumps(label)

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
            "disk": None if self.disk is None else self.disk.stats(),
            "residents": self.tree.count("resident"),
            "segments": self.tree.count("segment"),
            "checkpoints": self.tree.count("checkpoint"),
            "logits": self.tree.count("logits"),
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
        self.space.usage.check(set(ids))
        for node, seq in zip(residents, ids, strict=True):
            assert self.pool.length(seq) == node.length, f"sequence {seq} and its entry differ in length"
        for lease in self._leases:
            assert self.pool.length(lease.lane) == lease.length, f"lane {lease.lane} and its lease differ in length"
        used = sum(self.shelf.saved(node, kind).nbytes for kind in KINDS for node in self.tree.entries(kind))
        assert used == self.store.arena.used, "what the tree says is saved is not what the arena has lent"
        in_use = self.space.cells_in_use - self.pool.lost_cells  # of lost ones there may be fewer than were counted
        assert in_use <= self.pool.n_cells, "more cells are in use than there are"
