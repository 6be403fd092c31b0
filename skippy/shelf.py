"""What lies in RAM: segments, checkpoints and logits on the nodes of the tree, under one cap of bytes.

Room is made before it is used; what was never going to fit is refused before anything leaves for it; what failed
natively is not in the tree.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from skippy._radix import Node, RadixTree, Span
from skippy.arena import Block
from skippy.errors import Locked, NativeError, StateError
from skippy.history import Tokens
from skippy.leaving import Leaving
from skippy.plan import window_reach
from skippy.pool import Pool
from skippy.segments import Checkpoint, Logits, RamStore, Saved, Segment
from skippy.speeds import Speeds
from skippy.usage import Usage
from skippy.worth import Profile, Use, clip, last_part

__all__ = ["ALL_KINDS", "KINDS", "Emit", "Kind", "Shelf"]

log = logging.getLogger("skippy")

Emit = Callable[..., None]
Kind = Literal["segment", "checkpoint", "logits"]
KINDS: tuple[Kind, ...] = ("segment", "checkpoint", "logits")
ALL_KINDS: tuple[Literal["resident"] | Kind, ...] = ("resident", *KINDS)

_OF_CLASS: dict[Kind, type[Saved]] = {"segment": Segment, "checkpoint": Checkpoint, "logits": Logits}


class Shelf:
    """Puts saved state of `pool` into `store` and on the nodes of `tree`, and takes it off again.

    `keep_saved` is False where nothing is to be saved (payload "resident-kv").  `leaving` says what makes room.
    """

    def __init__(
        self,
        tree: RadixTree,
        pool: Pool,
        store: RamStore,
        *,
        keep_saved: bool,
        emit: Emit,
        speeds: Speeds,
        usage: Usage,
        leaving: Leaving,
    ) -> None:
        self.tree = tree
        self.pool = pool
        self.store = store
        self.keep_saved = keep_saved
        self.speeds = speeds
        self.evictions: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.usage = usage
        self.tombstones = usage.tombstones
        self.leaving = leaving
        self._emit = emit
        self.on_leaving: Callable[[str, Tokens, Saved], None] = lambda namespace, path, saved: None

    def saved(self, node: Node, kind: Kind) -> Saved:
        """What `node` carries of a kind.  KeyError if it has none."""
        saved = self.tree.get(node, kind)
        if not isinstance(saved, _OF_CLASS[kind]):
            raise KeyError(f"{node!r} has no {kind}")
        return saved

    def segment(self, node: Node) -> Segment:
        """The segment that `node` carries.  KeyError if it has none."""
        saved = self.saved(node, "segment")
        assert isinstance(saved, Segment)
        return saved

    def _cap(self, kind: Kind) -> int:
        """Bytes that a kind may take.  Checkpoints beside attention share with it; logits are a convenience."""
        capacity = self.store.arena.capacity
        if kind == "checkpoint":
            return capacity // 2 if self.store.shape.has_attention else capacity
        return capacity // 8 if kind == "logits" else capacity

    # -- paths ------------------------------------------------------------------------------------------

    def save_path(self, node: Node, seq: int) -> None:
        """Save into RAM what of the path of `node` no segment holds yet, from sequence `seq`, which holds it.

        A tail that is at least as long as the segment before it on an unbranched path is saved together with
        it, so that a path of n tokens is a chain of O(log n) segments.  Failures are counted, never raised.
        """
        if not self.keep_saved:
            return
        path = self.tree.tokens(node)
        done = 0
        while True:  # making room for one range may drop what was saved of another: look again each time
            if not node.alive:
                node = self.tree.insert(node.namespace, path)
            gap = next((gap for gap in self.unsaved(node) if gap[0] >= done), None)
            if gap is None:
                break
            start, done = gap
            target = node if done == node.length else self.tree.insert(node.namespace, path[:done])
            self._save_range(target, seq, start, done)
        self.tree.discard(node)  # which does nothing unless it was made for this and carries nothing

    def unsaved(self, node: Node) -> list[tuple[int, int]]:
        gaps, position = [], 0
        for span in self.tree.segments(node):
            if span.start > position:
                gaps.append((position, span.start))
            position = max(position, span.reach)
        if position < node.length:
            gaps.append((position, node.length))
        return gaps

    def _save_range(self, node: Node, seq: int, start: int, end: int) -> None:
        joined = self._joinable(node, start, end)
        begin = joined[0].start if joined else start
        path = self.tree.tokens(node)
        profile = self.usage.of_path(node.namespace, path)
        lock = self.tree.lock(node)  # making room in RAM must not drop the head of the very path that is saved
        try:
            segment = self._save(seq, begin, end, profile)
            if segment is None and joined:
                segment = self._save(seq, start, end, profile)
        finally:
            self.tree.unlock(lock)
        if segment is None:
            return
        if not node.alive:  # it carried nothing, and only the lock kept it
            node = self.tree.insert(node.namespace, path)
        # The node where it begins must not be merged away while the segments after it are taken.
        boundary = self._ancestor(node, segment.start)
        hold = self.tree.lock(boundary) if boundary is not None else None
        try:
            for span in reversed(joined):
                if segment.start > span.start:
                    break
                try:
                    old = self.tree.take(span.node, "segment")
                except Locked:  # another request is restoring it: both stay, and the new one begins after it
                    break
                self.store.drop(old)
                start = span.start
            self.tree.put(node, "segment", segment, bytes=segment.nbytes, start=start)
        except BaseException:
            self.store.drop(segment)
            raise
        finally:
            if hold is not None:
                self.tree.unlock(hold)
        self._emit("save", tier="ram", tokens=end - segment.start, bytes=segment.nbytes)

    def _ancestor(self, node: Node, length: int) -> Node | None:
        """The node on the path of `node` that ends at `length` tokens, or None."""
        at: Node | None = node
        while at is not None and at.length > length:
            at = self.tree.parent(at)
        return at if at is not None and at.length == length else None

    def _joinable(self, node: Node, start: int, end: int) -> list[Span]:
        """The segments right before [start, end), in order, that are better saved again together with it."""
        joined: list[Span] = []
        if self.store.shape.window:  # saved again, the older part would be without its window
            return joined
        for span in reversed(self.tree.segments(node)):
            if span.start >= start:
                continue
            if span.end != start or span.end - span.start > end - start or self._branches(span):
                break
            joined.insert(0, span)
            start = span.start
        return joined

    def _branches(self, span: Span) -> bool:
        """Whether another path leaves `span`, or goes on from its end beside the one that is saved."""
        at: Node | None = span.node
        while at is not None and at.length > span.start:
            if self.tree.children(at) > 1:
                return True
            at = self.tree.parent(at)
        return False

    def _save(self, seq: int, start: int, end: int, profile: Profile) -> Segment | None:
        began = time.perf_counter()
        _, use = last_part(profile, start, end)
        try:
            room = self._room_for("segment", lambda size: self.leaving.worth_of_tokens(end - start, size, use))
            segment = self.store.save(self.pool, seq, start, end, room)
        except NativeError as error:
            self.failures["save"] += 1
            log.warning("saving [%d, %d) of sequence %d failed: %s", start, end, seq, error)
            return None
        if segment is None:
            self.evictions["segment:refused"] += 1
        else:
            segment.profile = clip(profile, end, start)
            self.speeds.saved(segment.nbytes, time.perf_counter() - began)
        return segment

    def save_state(self, namespace: str, path: Tokens, seq: int) -> None:
        """Keep all that sequence `seq`, which holds `path`, can be brought back with to this very length."""
        shape = self.store.shape
        if not self.keep_saved:
            return
        if shape.has_attention:
            node = self.tree.insert(namespace, path)
            self.save_path(node, seq)
        if shape.needs_checkpoints or (shape.window and not self._window_is_held(namespace, path)):
            self.save_point(namespace, path, seq)

    def _window_is_held(self, namespace: str, path: Tokens) -> bool:
        """Whether segments bring `path` back with its window; not where they were saved at another place."""
        spans = self.tree.match(namespace, path).segments
        return window_reach(spans, self.store.shape.window, len(path)) == len(path)

    # -- points -----------------------------------------------------------------------------------------

    def save_point(self, namespace: str, path: Tokens, seq: int) -> bool:
        """Keep the point state of `path`, which sequence `seq` holds; whether it is there.  Failures are counted."""

        def save(room: Callable[[int], Block | None]) -> Saved | None:
            return self.store.save_point(self.pool, seq, len(path), room)

        return self.keep_saved and self._put(namespace, path, "checkpoint", save)

    def keep_logits(self, namespace: str, path: Tokens, logits: npt.NDArray[np.float32]) -> bool:
        """Keep the logits after the last token of `path`; whether they are there."""
        return self.keep_saved and self._put(
            namespace, path, "logits", lambda room: self.store.save_logits(logits, room)
        )

    def _put(
        self,
        namespace: str,
        path: Tokens,
        kind: Kind,
        save: Callable[[Callable[[int], Block | None]], Saved | None],
    ) -> bool:
        node = self.tree.insert(namespace, path)
        if self.tree.get(node, kind) is not None:
            self.tree.touch(node)
            return True
        profile = self.usage.of_path(namespace, path)[-1:]
        lock = self.tree.lock(node)  # making room must not drop what lies on the very path
        began = time.perf_counter()

        def value(size: int) -> float:
            use = profile[0].use if profile else Use(0, 0)
            return self.leaving.worth_of_point(node, size, use) if kind == "checkpoint" else math.inf

        saved: Saved | None = None
        try:
            saved = save(self._room_for(kind, value))
            if saved is None:
                self.evictions[f"{kind}:refused"] += 1
                return False
            saved.profile = profile
            self.tree.put(node, kind, saved, bytes=saved.nbytes)
        except NativeError as error:
            self.failures["save"] += 1
            log.warning("saving a %s of %d tokens failed: %s", kind, len(path), error)
            return False
        except BaseException:
            if saved is not None:
                self.store.drop(saved)
            raise
        finally:
            self.tree.unlock(lock)
        if kind == "checkpoint":
            self.speeds.saved(saved.nbytes, time.perf_counter() - began)
            self._emit("save", tier="ram", tokens=0, bytes=saved.nbytes)
        return True

    # -- room -------------------------------------------------------------------------------------------

    def _room_for(self, kind: Kind, worth: Callable[[int], float]) -> Callable[[int], Block | None]:
        """Makes a block of some size, for which what is worth less leaves; None if that is not enough.

        `worth(size)` is what the block will hold, in seconds for each byte.
        """

        def make(size: int) -> Block | None:
            cap, arena = self._cap(kind), self.store.arena
            if size > cap:
                return None
            limit = worth(size) if self.leaving.by_worth else math.inf
            over = max(self.tree.bytes_of(kind) + size - cap, arena.used + size - arena.capacity)
            if over > 0 and self.leaving.bytes_below(limit) < over:
                return None  # before anything leaves for it in vain
            while cap < arena.capacity and (over := self.tree.bytes_of(kind) + size - cap) > 0:
                if not self._evict(kind, over, limit):
                    return None
            while (block := arena.allocate(size)) is None:
                if not any(self._evict(each, size, limit) for each in self._leaving_order()):
                    return None
            return block

        return make

    def _leaving_order(self) -> tuple[Kind, ...]:
        """Logits are the cheapest to get again; checkpoints go before segments where they take more than a quarter."""
        many = self.tree.bytes_of("checkpoint") * 4 > self.store.arena.capacity
        return ("logits", "checkpoint", "segment") if many else ("logits", "segment", "checkpoint")

    def _evict(self, kind: Kind, nbytes: int, limit: float) -> bool:
        """Let something of a kind leave, or its end, of `nbytes` if it can be cut; False if all is worth more."""
        choice = self.leaving.saved(kind, nbytes)
        if choice is None or choice.worth > limit:
            return False
        if choice.length:
            self._shorten(choice.node, choice.length)
        else:
            self.drop(choice.node, kind, "bytes")
        return True

    def _shorten(self, node: Node, length: int) -> None:
        """Cut the segment of `node`, behind which there is none, to its tokens before `length`."""
        segment, path, start = self.segment(node), self.tree.tokens(node), self.tree.start(node)
        self.on_leaving(node.namespace, path, segment)
        try:
            shorter = self.store.shorten(segment, length)
        except StateError as error:
            log.warning("a segment to be cut failed its check and is dropped: %s", error)
            self.drop(node, "segment", "corrupt")
            return
        boundary = self._ancestor(node, start)
        hold = self.tree.lock(boundary) if boundary is not None else None
        try:
            head = self.tree.insert(node.namespace, path[:length])
            self.tree.take(node, "segment")
            self.tree.put(head, "segment", shorter, bytes=shorter.nbytes, start=start)
        finally:
            if hold is not None:
                self.tree.unlock(hold)
        self.bury(node.namespace, path, segment.profile)
        self.evictions["segment:cut"] += 1
        self._emit("evict", tier="ram", reason="bytes", tokens=len(path) - length)

    def drop(self, node: Node, kind: Kind, reason: str) -> None:
        """Take what `node` carries of a kind off the tree and free its memory.  Locked where a request uses it."""
        saved = self.saved(node, kind)
        path = self.tree.tokens(node)
        self.tree.take(node, kind)
        if reason == "bytes":
            self.on_leaving(node.namespace, path, saved)
        self.store.drop(saved)
        if kind == "segment":
            self.usage.hand_over(node.namespace, path, saved.profile)
        if reason == "bytes" and kind != "logits":
            self.bury(node.namespace, path, saved.profile)
        self.evictions[f"{kind}:{reason}"] += 1
        tokens = saved.end - saved.start if isinstance(saved, Segment) else 0
        self._emit("evict", tier="ram", reason=reason, tokens=tokens)

    def bury(self, namespace: str, path: Tokens, profile: Profile) -> None:
        """Remember a path that something has just left, if not all of it can be brought back any more."""
        match = self.tree.match(namespace, path)
        if max(match.resident_length, match.segment_length) < len(path):
            self.tombstones.add(namespace, path, profile)
