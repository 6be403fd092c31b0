"""How room is made in RAM: under one cap of bytes, what is worth least leaves, or its end."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Literal

from skippy._radix import Lock, Node, RadixTree
from skippy.arena import Block
from skippy.errors import StateError
from skippy.history import Tokens, Tombstones
from skippy.leaving import Leaving
from skippy.segments import Checkpoint, Logits, RamStore, Saved, Segment
from skippy.usage import Usage
from skippy.worth import Profile

__all__ = ["ALL_KINDS", "KINDS", "Emit", "Kind", "Room"]

log = logging.getLogger("skippy")

Emit = Callable[..., None]
Kind = Literal["segment", "checkpoint", "logits"]
KINDS: tuple[Kind, ...] = ("segment", "checkpoint", "logits")
ALL_KINDS: tuple[Literal["resident"] | Kind, ...] = ("resident", *KINDS)

_OF_CLASS: dict[Kind, type[Saved]] = {"segment": Segment, "checkpoint": Checkpoint, "logits": Logits}


class Room:
    """What `store` holds on the nodes of `tree`, and what `leaving` says is to leave it."""

    def __init__(self, tree: RadixTree, store: RamStore, usage: Usage, leaving: Leaving, emit: Emit) -> None:
        self.tree = tree
        self.store = store
        self.usage = usage
        self.tombstones = Tombstones()
        self.leaving = leaving
        self.evictions: Counter[str] = Counter()
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

    def _room(self, kind: Kind, worth: Callable[[int], float]) -> Callable[[int], Block | None]:
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
            while (over := arena.used + size - arena.capacity) > 0:
                if not any(self._evict(each, over, limit) for each in self._leaving_order()):
                    return None
            block = arena.allocate(size)
            if block is None and arena.gather(size):
                block = arena.allocate(size)
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
            log.warning("a segment cannot be cut and leaves as a whole: %s", error)
            self.drop(node, "segment", "bytes")
            return
        hold = self._hold(node.namespace, path[:start])
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
            self.tombstones.add(namespace, path)
            self.usage.ghosts.add(namespace, path, profile)

    def _hold(self, namespace: str, path: Tokens) -> Lock | None:
        """Keep the node at which a segment begins while others around it go; it is made if there is none."""
        return self.tree.lock(self.tree.insert(namespace, path)) if len(path) else None
