"""From a lane to a cached path: what was evaluated becomes a resident, sharing all cells that can be shared."""

from __future__ import annotations

from collections.abc import Iterable

from skippy._radix import Match, Node
from skippy.errors import Locked, NativeError
from skippy.history import Tokens, common_length
from skippy.lease import Lease, release
from skippy.space import Space

__all__ = ["Recorder"]


class Recorder:
    """Records the lanes of `leases`, the requests that are running; `max_resident_tokens` 0 means no cap.

    NativeError where llama.cpp fails; nothing of what failed is in the tree then.
    """

    def __init__(self, space: Space, leases: Iterable[Lease], *, max_resident_tokens: int) -> None:
        self.space = space
        self.tree = space.tree
        self.pool = space.pool
        self.max_resident_tokens = max_resident_tokens
        self._leases = leases

    def save(self, lease: Lease, tokens: Tokens) -> bool:
        """Keep what the lane holds in RAM alone; whether all of it is there."""
        self.space.shelf.save_state(lease.namespace, tokens, lease.lane)
        match = self.tree.match(lease.namespace, tokens)
        deepest = match.segments[-1].node if match.segments else match.checkpoint
        if deepest is not None:
            self.tree.touch(deepest)
        held = match.segment_length == len(tokens) or not self.pool.shape.has_attention
        return held and (not self.pool.shape.needs_checkpoints or match.checkpoint is not None)

    def keep(self, lease: Lease, tokens: Tokens) -> bool:
        """Keep what the lane holds in the pool, what is beyond the cap in RAM; whether all of it is kept."""
        n = len(tokens)
        keep = min(n, self.max_resident_tokens) if self.max_resident_tokens else n
        match = self.tree.match(lease.namespace, tokens)
        if match.resident is not None and match.resident_length >= keep:
            self.tree.touch(match.resident)
        else:
            self._keep_resident(lease, tokens[:keep], match)
        if keep < n and self.space.shelf.keep_saved:
            self.space.shelf.save_path(self.tree.insert(lease.namespace, tokens), lease.lane, weigh=True)
        while self.max_resident_tokens and self.tree.cells > self.max_resident_tokens:
            if not self.space.evict_resident("resident_cap", self.tree.cells - self.max_resident_tokens):
                break
        return self.tree.match(lease.namespace, tokens).matched == n

    def save_ahead(self, lease: Lease, tokens: Tokens, next_request: int = 256) -> None:
        """Save what was kept if it had better leave when the next request comes, of about `next_request` tokens."""
        node = self.tree.match(lease.namespace, tokens).resident
        if node is not None:
            self.space.save_ahead(node, next_request)

    def _keep_resident(self, lease: Lease, tokens: Tokens, match: Match) -> None:
        """Make the lane's first tokens a resident; what others hold of them in the pool is taken from them."""
        shared, n = match.resident_length, len(tokens)
        profile = self.space.usage.of_path(lease.namespace, tokens)
        sources: list[tuple[int, int]] = []  # (sequence, up to which length it is taken)
        seq: int | None = None
        if match.resident is not None:
            sources.append((self.space.sequence_of(match.resident), shared))
            if match.resident.length == shared:
                seq = self._grow(lease, match.resident)
        grown = seq is not None
        running = self._running(lease, tokens, shared)
        if running is not None:
            sources.append(running)
        sources.append((lease.lane, n))
        guard = self.tree.lock(match.resident) if match.resident is not None and not grown else None
        try:
            if seq is None:
                seq = self._resident_id()
            if seq is None:
                return
            start = shared if grown else 0
            try:
                for source, end in sources:
                    if end > start:
                        self.pool.append(source, seq, start, end)
                        start = end
            except BaseException:
                self._give_up(seq)
                raise
        finally:
            if guard is not None:
                self.tree.unlock(guard)
        node = self.tree.insert(lease.namespace, tokens)
        self.tree.put(node, "resident", seq)
        self.space.usage.set_resident(seq, profile)
        release(self.tree, lease)
        for ancestor in self.tree.covered(node):
            self.space.drop_resident(ancestor)
        # The lane lives on, and shares with the new resident all but what it evaluated beside somebody else.
        taken = max([shared, *(end for _, end in sources[:-1])])
        lease.lock = self.tree.lock(node, cells=True)
        lease.held = n - max(0, taken - lease.held)

    def _grow(self, lease: Lease, holder: Node) -> int | None:
        """The sequence of a resident whose whole path is the head of a new one, which goes on with its id.

        None where another request uses the holder: then the new path takes an id of its own.
        """
        held = lease.held
        release(self.tree, lease)
        try:
            return int(self.tree.take(holder, "resident"))
        except Locked:
            return None
        finally:
            lease.held = held

    def _running(self, lease: Lease, tokens: Tokens, beyond: int) -> tuple[int, int] | None:
        """The lane of the request that shares most of this path, if more than `beyond`, and how much.

        What such a request took from a resident that has left since is still in the pool, and counted: a new
        resident has to take it from there, or there would be two copies of what counts once.
        """
        best: tuple[int, int] | None = None
        for other in self._leases:
            if other is lease or other.lock is None or other.namespace != lease.namespace:
                continue
            held = self.tree.tokens(other.lock.node)[: min(other.held, len(tokens))]
            if len(held) <= beyond or other.lock.length != other.held:
                continue
            common = common_length(held, tokens)
            if common > beyond:
                best, beyond = (other.lane, common), common
        return best

    def _give_up(self, seq: int) -> None:
        self.space.usage.resident_left(seq)
        try:
            self.pool.give_back(seq)
        except NativeError:  # set aside and counted by the pool
            self.space.failures["drop"] += 1

    def _resident_id(self) -> int | None:
        """A free id for a cached path, for which the least recent resident leaves; None if none can."""
        while (seq := self.pool.take_resident()) is None:
            if not self.space.evict_resident("entries"):
                return None
        return seq
