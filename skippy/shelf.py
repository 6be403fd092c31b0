"""What is put into RAM: segments, checkpoints and logits on the nodes of the tree.

Room is made before it is used; what was never going to fit is refused before anything leaves for it; what failed
natively is not in the tree.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from skippy._radix import Node, RadixTree, Span
from skippy.arena import Block
from skippy.errors import Locked, NativeError
from skippy.history import Tokens
from skippy.leaving import Leaving
from skippy.plan import window_reach
from skippy.pool import Pool
from skippy.room import ALL_KINDS, KINDS, Emit, Kind, Room
from skippy.segments import RamStore, Saved, Segment
from skippy.speeds import Speeds
from skippy.usage import Usage
from skippy.worth import Profile, Use, clip, last_part

__all__ = ["ALL_KINDS", "KINDS", "Emit", "Kind", "Shelf"]

log = logging.getLogger("skippy")


class Shelf(Room):
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
        super().__init__(tree, store, usage, leaving, emit)
        self.pool = pool
        self.keep_saved = keep_saved
        self.speeds = speeds
        self.failures: Counter[str] = Counter()

    # -- paths ------------------------------------------------------------------------------------------

    def save_path(self, node: Node, seq: int, *, weigh: bool = False) -> None:
        """Save into RAM what of the path of `node` no segment holds yet, from sequence `seq`, which holds it.

        With `weigh` only what is worth more than what would have to leave for it.  A tail that is at least as long as
        the segment before it on an unbranched path is saved together with it, so that a path of n tokens is a chain of
        O(log n) segments.  Failures are counted, never raised.
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
            if self.leaving.cuts:
                done = self._first_branch(node, start, done)
            target = node if done == node.length else self.tree.insert(node.namespace, path[:done])
            if not self._save_range(target, seq, start, done, weigh) and self.leaving.cuts:
                break  # what is worth more than that is in the way, and what is behind a gap is of no use
        if node.alive:
            self.tree.discard(node)  # which does nothing unless it was made for this and carries nothing

    def _first_branch(self, node: Node, start: int, end: int) -> int:
        """Where the first other path leaves [start, end): what several need is not saved in one with what one needs."""
        at, least = self.tree.parent(node), max(1, self.leaving.min_tokens)
        while at is not None and at.length >= start + least:
            if at.length <= end - least and self.tree.children(at) > 1:
                end = at.length
            at = self.tree.parent(at)
        return end

    def unsaved(self, node: Node) -> list[tuple[int, int]]:
        gaps, position = [], 0
        for span in self.tree.segments(node):
            if span.start > position:
                gaps.append((position, span.start))
            position = max(position, span.reach)
        if position < node.length:
            gaps.append((position, node.length))
        return gaps

    def _save_range(self, node: Node, seq: int, start: int, end: int, weigh: bool) -> bool:
        """Whether it is saved up to `end`."""
        joined = self._joinable(node, start, end)
        begin = joined[0].start if joined else start
        path = self.tree.tokens(node)
        profile = self.usage.of_path(node.namespace, path)
        # Making room in RAM must not drop the head of the very path that is saved; what another path adds may go.
        lock = None
        if self.leaving.cuts:
            self.leaving.saving = (node.namespace, path)
        else:
            lock = self.tree.lock(node)
        try:
            segment = self._save(seq, begin, end, profile, beyond=start, weigh=weigh)
            if segment is None and joined:
                segment = self._save(seq, start, end, profile, beyond=start, weigh=weigh)
        finally:
            self.leaving.saving = None
            if lock is not None:
                self.tree.unlock(lock)
        if node.alive and (segment is None or segment.end < end):
            self.tree.discard(node)  # if it was made for this
        if segment is None:
            return False
        if not node.alive or segment.end < end:  # it carried nothing, and only the lock kept it
            node = self.tree.insert(node.namespace, path[: segment.end])
        hold = self._hold(node.namespace, path[: segment.start])
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
        self._emit("save", tier="ram", tokens=segment.end - segment.start, bytes=segment.nbytes)
        return segment.end == end

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

    def _save(self, seq: int, start: int, end: int, profile: Profile, *, beyond: int, weigh: bool) -> Segment | None:
        """Save [start, end), or as much of it, more than up to `beyond`, as is worth more than what leaves for it."""
        stop: int | None = end
        while stop is not None and stop > beyond:
            asked: list[int] = []
            _, use = last_part(profile, start, stop)

            def worth(size: int, tokens: int = stop - start, use: Use = use, asked: list[int] = asked) -> float:
                asked.append(size)
                return self.leaving.worth_of_tokens(tokens, size, use) if weigh else math.inf

            began = time.perf_counter()
            try:
                segment = self.store.save(self.pool, seq, start, stop, self._room("segment", worth))
            except NativeError as error:
                self.failures["save"] += 1
                log.warning("saving [%d, %d) of sequence %d failed: %s", start, stop, seq, error)
                return None
            if segment is not None:
                segment.profile = clip(profile, stop, start)
                self.speeds.saved(segment.nbytes, time.perf_counter() - began)
                return segment
            stop = self._shorter(start, stop, profile, asked[0]) if asked and weigh else None
        self.evictions["segment:refused"] += 1
        return None

    def _shorter(self, start: int, stop: int, profile: Profile, size: int) -> int | None:
        """Where [start, stop), of `size` bytes, is to end so that it may fit; None where it cannot be cut."""
        if not self.leaving.cuts:
            return None
        part, use = last_part(profile, start, stop)
        limit = self.leaving.worth_of_tokens(stop - start, size, use)
        room = self.store.arena.capacity - self.store.arena.used + self.leaving.bytes_below(limit)
        end = start + int(
            min(room / size, 1.0) * (stop - start) * 0.98
        )  # each state has a head, and blocks are rounded
        return end if part < end < stop and end - start >= self.leaving.min_tokens else part

    def save_state(self, namespace: str, path: Tokens, seq: int) -> None:
        """Keep all that sequence `seq`, which holds `path`, can be brought back with to this very length."""
        shape = self.store.shape
        if not self.keep_saved:
            return
        if shape.has_attention:
            node = self.tree.insert(namespace, path)
            self.save_path(node, seq, weigh=True)
        if shape.needs_checkpoints or (shape.window and not self._window_is_held(namespace, path)):
            self.save_point(namespace, path, seq)

    def _window_is_held(self, namespace: str, path: Tokens) -> bool:
        """Whether segments bring `path` back with its window; not where they were saved at another place."""
        spans = self.tree.match(namespace, path).segments
        return window_reach(spans, self.store.shape.window, len(path)) == len(path)

    # -- points -----------------------------------------------------------------------------------------

    def save_point(self, namespace: str, path: Tokens, seq: int) -> bool:
        """Keep the point state of `path`, which sequence `seq` holds; whether it is there.  Failures are counted."""
        asked: list[int] = []

        def save(room: Callable[[int], Block | None]) -> Saved | None:
            def noting(size: int) -> Block | None:
                asked.append(size)
                return room(size)

            return self.store.save_point(self.pool, seq, len(path), noting)

        if not self.keep_saved:
            return False
        kept = self._put(namespace, path, "checkpoint", save)
        if kept is None and asked and self._thin(namespace, path, asked[0]):
            kept = self._put(namespace, path, "checkpoint", save)
        return self._count_refused(kept, "checkpoint")

    def _thin(self, namespace: str, path: Tokens, size: int) -> bool:
        """Drop a checkpoint of `size` bytes inside `path`, for whose end there is no room; False if none is to spare.

        A path that has taken all the room there is goes on so: its checkpoints stay where others go on from them, and
        else lie the closer together the nearer its end is, because there prompts part.  O(checkpoints of the path).
        """
        if size > self._cap("checkpoint"):
            return False
        nodes = list(self.tree.match(namespace, path).checkpoints)
        lengths = [0, *(node.length for node in nodes), len(path)]
        # The gap that each would leave, beside its distance from the end.
        gaps = [(lengths[i + 2] - lengths[i]) / (len(path) - lengths[i + 1]) for i in range(len(nodes))]
        for _, node in sorted(zip(gaps, nodes, strict=True), key=lambda each: each[0]):
            if self.tree.children(node) <= 1 and self.saved(node, "checkpoint").nbytes >= size:
                with suppress(Locked):  # where a request is using it
                    self.drop(node, "checkpoint", "bytes")
                    return True
        return False

    def keep_logits(self, namespace: str, path: Tokens, logits: npt.NDArray[np.float32]) -> bool:
        """Keep the logits after the last token of `path`; whether they are there."""
        if not self.keep_saved:
            return False
        kept = self._put(namespace, path, "logits", lambda room: self.store.save_logits(logits, room))
        return self._count_refused(kept, "logits")

    def _count_refused(self, kept: bool | None, kind: Kind) -> bool:
        if kept is None:
            self.evictions[f"{kind}:refused"] += 1
        return bool(kept)

    def _put(
        self,
        namespace: str,
        path: Tokens,
        kind: Kind,
        save: Callable[[Callable[[int], Block | None]], Saved | None],
    ) -> bool | None:
        """Put what `save` makes on the node of `path`; whether it is there, None where there is no room for it."""
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
            saved = save(self._room(kind, value))
            if saved is None:
                return None
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
