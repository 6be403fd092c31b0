"""What is kept, and what leaves: the cells of the pool, the bytes of RAM, and the order of leaving.

Everything has a hard cap.  Room is made before it is used; what leaves the pool goes into RAM; an entry
leaves the tree only after its native part is gone, and what failed natively is not in the tree.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress

from skippy._radix import Node, RadixTree, Span
from skippy.arena import Block
from skippy.errors import ContextFull, Locked, NativeError
from skippy.history import Tokens, Tombstones
from skippy.pool import Pool
from skippy.segments import RamStore, Segment
from skippy.speeds import Speeds

__all__ = ["Space"]

log = logging.getLogger("skippy")

Emit = Callable[..., None]


class Space:
    """Owns what the tree points at: residents in `pool` and segments in `store`.

    `lane_cells()` tells how many cells running requests hold that the tree does not know of, `held_cells()` how
    many of the tree's each of them shares; `keep_saved` is False where nothing is to be saved (payload "resident-kv").
    `bytes_per_cell` is what one token takes when it is saved.
    """

    def __init__(
        self,
        tree: RadixTree,
        pool: Pool,
        store: RamStore,
        *,
        lane_cells: Callable[[], int],
        held_cells: Callable[[], Iterable[int]] = tuple,
        keep_saved: bool,
        emit: Emit,
        speeds: Speeds | None = None,
        bytes_per_cell: int = 0,
    ) -> None:
        self.tree = tree
        self.pool = pool
        self.store = store
        self.keep_saved = keep_saved
        self.evictions: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.tombstones = Tombstones()
        self._lane_cells = lane_cells
        self._held_cells = held_cells
        self._emit = emit
        self.speeds = Speeds() if speeds is None else speeds
        self.bytes_per_cell = bytes_per_cell

    @property
    def cells_in_use(self) -> int:
        """Cells of the pool that hold something: of residents (shared ones once), of lanes, and lost ones."""
        return self.tree.cells + self._lane_cells() + self.pool.lost_cells

    def sequence_of(self, node: Node) -> int:
        """The sequence id of the resident at `node`.  KeyError if it has none."""
        seq = self.tree.get(node, "resident")
        if seq is None:
            raise KeyError(f"{node!r} has no resident")
        return int(seq)

    def segment_of(self, node: Node) -> Segment:
        """The segment that `node` carries.  KeyError if it has none."""
        segment = self.tree.get(node, "segment")
        if not isinstance(segment, Segment):
            raise KeyError(f"{node!r} has no segment")
        return segment

    def make_cells(self, needed: int) -> None:
        """Let unlocked residents leave until `needed` more cells are free.  ContextFull if that is not enough."""
        at_most = self.tree.cells - max(self._held_cells(), default=0)  # could leave, if nothing else were locked
        hopeless = self.cells_in_use + needed - at_most > self.pool.n_cells
        while self.cells_in_use + needed > self.pool.n_cells:
            if hopeless or not self.evict_resident("cells"):
                raise ContextFull(
                    f"{needed} cells are needed, {self.pool.n_cells - self.cells_in_use} of {self.pool.n_cells} are "
                    f"free, and everything else is in use"
                )

    def evict_resident(self, reason: str) -> bool:
        """Let the least recent unlocked resident leave the pool, into RAM where it fits; False if there is none."""
        node = self.tree.victim("resident")
        if node is None:
            return False
        self._leave(node, reason)
        return True

    def _leave(self, node: Node, reason: str) -> None:
        self.save_path(node, self.sequence_of(node))
        path = self.tree.tokens(node)
        self.drop_resident(node)
        self._bury(node.namespace, path)
        self.evictions[f"resident:{reason}"] += 1
        self._emit("evict", tier="resident", reason=reason, tokens=node.length)

    def relieve(self, tokens: int) -> None:
        """Let residents leave for RAM that would cost more while `tokens` are evaluated than coming back will.

        Nothing that is saved leaves for it, and locked ones stay.  O(residents and their paths).
        """
        if not self.keep_saved:
            return
        unlocked = self.tree.count("resident") - self.tree.stats()["resident"]["locked"]
        for node in self.tree.entries("resident")[:unlocked]:  # locked ones are last
            if self._better_saved(self.tree.exclusive_cells(node), self._unsaved_cells(node), tokens):
                self._leave(node, "price")

    def save_ahead(self, node: Node, tokens: int) -> None:
        """Save what is resident at `node` now if it had better not stay while `tokens` come: then it can leave at once.

        That is for after an answer, when nobody waits.  O(bytes saved).
        """
        unsaved = self._unsaved_cells(node)
        if unsaved and self._better_saved(unsaved, unsaved, tokens):
            self.save_path(node, self.sequence_of(node))

    def _unsaved_cells(self, node: Node) -> int:
        return sum(end - start for start, end in self._unsaved(node))

    def _better_saved(self, cells: int, unsaved: int, tokens: int) -> bool:
        """Whether `cells`, of which `unsaved` are not in RAM, had better be there, and fit, while `tokens` come."""
        arena, each = self.store.arena, self.bytes_per_cell
        return self.keep_saved and (
            unsaved * each <= arena.capacity - arena.used
            and self.speeds.staying_costs_more(cells, unsaved * each, cells * each, tokens, each)
        )

    def drop_resident(self, node: Node) -> None:
        """Forget a resident and free its cells.  If they cannot be freed, its id is set aside.

        Locked where a request uses it.  The entry goes first: were this interrupted, an id would be lost, and never
        be handed out while the tree still points at it.
        """
        seq = self.tree.take(node, "resident")
        try:
            self.pool.give_back(seq)
        except NativeError:  # the pool has set it aside and counts its cells as lost
            self.failures["drop"] += 1

    def drop_vanished(self) -> int:
        """Drop residents whose cells somebody else has removed (a call that cleared the memory); how many."""
        dropped = 0
        for node in self.tree.entries("resident"):
            if self.pool.length(self.sequence_of(node)) != node.length:
                with suppress(Locked):
                    self.drop_resident(node)
                    dropped += 1
        if dropped:
            self.evictions["resident:vanished"] += dropped
        return dropped

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
            gap = next((gap for gap in self._unsaved(node) if gap[0] >= done), None)
            if gap is None:
                break
            start, done = gap
            target = node if done == node.length else self.tree.insert(node.namespace, path[:done])
            self._save_range(target, seq, start, done)
        self.tree.discard(node)  # which does nothing unless it was made for this and carries nothing

    def _unsaved(self, node: Node) -> list[tuple[int, int]]:
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
        lock = self.tree.lock(node)  # making room in RAM must not drop the head of the very path that is saved
        try:
            segment = self._save(seq, begin, end)
            if segment is None and joined:
                segment = self._save(seq, start, end)
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

    def _save(self, seq: int, start: int, end: int) -> Segment | None:
        began = time.perf_counter()
        try:
            segment = self.store.save(self.pool, seq, start, end, self._make_block)
        except NativeError as error:
            self.failures["save"] += 1
            log.warning("saving [%d, %d) of sequence %d failed: %s", start, end, seq, error)
            return None
        if segment is None:
            self.evictions["segment:refused"] += 1
        else:
            self.speeds.saved(segment.nbytes, time.perf_counter() - began)
        return segment

    def _bury(self, namespace: str, path: Tokens) -> None:
        """Remember a path that something has just left, if not all of it can be brought back any more."""
        match = self.tree.match(namespace, path)
        if max(match.resident_length, match.segment_length) < len(path):
            self.tombstones.add(namespace, path)

    def _make_block(self, size: int) -> Block | None:
        """A block of `size` bytes, for which the least recent segments leave; None if that is not enough."""
        while True:
            block = self.store.arena.allocate(size)
            if block is not None:
                return block
            node = self.tree.victim("segment")
            if node is None:
                return None
            self.drop_segment(node, "bytes")

    def drop_segment(self, node: Node, reason: str) -> None:
        """Free the memory of a segment, then its entry."""
        segment = self.segment_of(node)
        length = segment.end - segment.start
        path = self.tree.tokens(node)
        self.tree.take(node, "segment")
        self.store.drop(segment)
        if reason == "bytes":
            self._bury(node.namespace, path)
        self.evictions[f"segment:{reason}"] += 1
        self._emit("evict", tier="ram", reason=reason, tokens=length)
