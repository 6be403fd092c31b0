"""What the token radix tree means, in plain Python: the specification of `skippy._radix`, and the tests' oracle.

Nothing is kept that can be worked out.  A tree is a set of nodes, each a path of tokens with the payloads put on it,
and a list of locks; every answer is read off these by going through all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skippy.errors import Locked, StaleHandle

KINDS = ("resident", "segment", "checkpoint", "logits")
Path = tuple[int, ...]


@dataclass
class Entry:
    """A payload.  `start` matters to segments alone: one covers the tokens [start, length of its node's path)."""

    payload: Any
    bytes: int
    start: int
    tick: int = 0


@dataclass(eq=False)
class Place:
    """A node: what was put on it, and whether it was handed out by `insert` and not used since."""

    entries: dict[str, Entry] = field(default_factory=dict)
    fresh: bool = False


@dataclass(frozen=True)
class Node:
    tree: RadixTree = field(repr=False)
    namespace: str
    path: Path
    place: Place = field(repr=False)

    @property
    def length(self) -> int:
        return len(self.path)

    @property
    def alive(self) -> bool:
        return self.tree.spaces.get(self.namespace, {}).get(self.path) is self.place


@dataclass(eq=False)
class Lock:
    tree: RadixTree
    node: Node
    length: int
    cells: bool

    @property
    def path(self) -> Path:
        return self.node.path[: self.length]

    @property
    def alive(self) -> bool:
        return self in self.tree.locks


@dataclass(frozen=True)
class Span:
    node: Node
    start: int
    end: int
    reach: int
    payload: Any


@dataclass(frozen=True)
class Match:
    matched: int
    resident: Node | None
    resident_length: int
    segments: tuple[Span, ...]
    segment_length: int
    checkpoints: tuple[Node, ...]
    logits: Node | None
    steps: int

    @property
    def checkpoint(self) -> Node | None:
        return self.checkpoints[-1] if self.checkpoints else None


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two paths share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class RadixTree:
    def __init__(self) -> None:
        self.spaces: dict[str, dict[Path, Place]] = {}
        self.locks: list[Lock] = []
        self.used: dict[tuple[str, Path], int] = {}  # of every stored prefix: when it was made or last touched
        self.clock = 0

    # What follows from the nodes alone

    def above(self, namespace: str, path: Path) -> Path:
        """The nearest node above, or () for the root."""
        return next((path[:n] for n in range(len(path) - 1, 0, -1) if path[:n] in self.spaces[namespace]), ())

    def below(self, namespace: str, path: Path) -> list[Path]:
        return [other for other in self.spaces[namespace] if self.above(namespace, other) == path and other != path]

    def edges(self, namespace: str, path: Path, length: int) -> list[Path]:
        """The nodes whose edge holds one of the first `length` tokens of this path, from the root down."""
        space = self.spaces.get(namespace, {})
        found = [
            other
            for other in space
            if len(self.above(namespace, other)) < length and other[:length] == path[: min(length, len(other))]
        ]
        return sorted(found, key=len)

    def stored(self) -> set[tuple[str, Path]]:
        return {
            (name, path[:n]) for name, space in self.spaces.items() for path in space for n in range(1, len(path) + 1)
        }

    def cover(self, namespace: str, path: Path) -> tuple[Path, Entry] | None:
        """The segment that covers the edge that ends here, and the node that carries it."""
        for other, place in self.spaces[namespace].items():
            entry = place.entries.get("segment")
            if entry and other[: len(path)] == path and entry.start <= len(self.above(namespace, path)):
                return other, entry
        return None

    def is_locked(self, namespace: str, path: Path) -> bool:
        """Whether a lock reaches into the edge that ends here."""
        return any(
            lock.node.namespace == namespace and path in self.edges(namespace, lock.path, lock.length)
            for lock in self.locks
        )

    def is_protected(self, namespace: str, path: Path, kind: str) -> bool:
        if kind != "segment":
            return self.is_locked(namespace, path)
        start = self.spaces[namespace][path].entries["segment"].start
        return any(lock.node.namespace == namespace and common(lock.path, path) > start for lock in self.locks)

    def all_entries(self) -> Iterator[tuple[str, Path, str, Entry]]:
        for namespace, space in self.spaces.items():
            for path, place in space.items():
                for kind, entry in place.entries.items():
                    yield namespace, path, kind, entry

    def node(self, namespace: str, path: Path) -> Node:
        return Node(self, namespace, path, self.spaces[namespace][path])

    def spans(self, namespace: str, edges: list[Path], length: int) -> tuple[Span, ...]:
        """The segments over these edges of a path, of which `length` tokens are asked for."""
        reach: dict[Path, int] = {}
        for edge in edges:
            if cover := self.cover(namespace, edge):
                reach[cover[0]] = min(len(edge), length)
        found = ((path, self.spaces[namespace][path].entries["segment"]) for path in reach)
        return tuple(Span(self.node(namespace, p), e.start, len(p), reach[p], e.payload) for p, e in found)

    # Look up

    def depart(self, namespace: str, tokens: Any) -> tuple[Path, bool]:
        """The leading tokens that agree with something stored, and whether the prompt goes on after them."""
        prefixes = {path for name, path in self.stored() if name == namespace}
        matched: Path = ()
        items = sequence_of(tokens)
        for index, item in enumerate(items):
            value = token_of(item, index)
            if (*matched, value) not in prefixes:
                break
            matched = (*matched, value)
        return matched, len(matched) < len(items)

    def match(self, namespace: str, tokens: Any) -> Match:
        path, goes_on = self.depart(namespace, tokens)
        matched = len(path)
        edges = self.edges(namespace, path, matched)
        whole = [edge for edge in edges if len(edge) <= matched]
        space = self.spaces.get(namespace, {})
        holders = [other for other, place in space.items() if "resident" in place.entries]
        holder = max(holders, key=lambda other: common(other, path), default=())
        segment_length = 0
        for edge in edges:
            if self.cover(namespace, edge) is None:
                break
            segment_length = min(len(edge), matched)
        return Match(
            matched,
            self.node(namespace, holder) if common(holder, path) else None,
            common(holder, path),
            self.spans(namespace, edges, matched),
            segment_length,
            tuple(self.node(namespace, edge) for edge in whole if "checkpoint" in space[edge].entries),
            self.node(namespace, path) if not goes_on and path in space and "logits" in space[path].entries else None,
            len(edges),
        )

    def branch_point(self, namespace: str, tokens: Any) -> int:
        path, goes_on = self.depart(namespace, tokens)
        if not path:
            return 0
        inside = path not in self.spaces[namespace]
        return len(path) if inside or (goes_on and self.below(namespace, path)) else 0

    def following(self, namespace: str, tokens: Any, count: int) -> np.ndarray:
        if count < 0:
            raise ValueError(f"count {count}: expected 0 or more")
        path, _ = self.depart(namespace, tokens)
        found = path
        while len(found) < len(path) + count:
            after = [(tick, p) for (n, p), tick in self.used.items() if n == namespace and p[:-1] == found]
            if not after:
                break
            found = max(after)[1]
        return np.array(found[len(path) :], np.int32)

    def tokens(self, node: Node) -> np.ndarray:
        return np.array(self.own(node).path, np.int32)

    def parent(self, node: Node) -> Node | None:
        above = self.above(self.own(node).namespace, node.path)
        return self.node(node.namespace, above) if above else None

    def children(self, node: Node) -> int:
        return len(self.below(self.own(node).namespace, node.path))

    def own(self, node: Node) -> Node:
        if node.tree is not self:
            raise ValueError(f"{node} belongs to another tree")
        if not node.alive:
            raise StaleHandle(f"{node} is no longer in the tree")
        return node

    # Change the shape

    def insert(self, namespace: str, tokens: Any) -> Node:
        path = tuple(token_of(item, index) for index, item in enumerate(sequence_of(tokens)))
        if not path:
            raise ValueError("tokens: a path of 0 tokens cannot be stored")
        stored = self.stored()
        space = self.spaces.setdefault(namespace, {})
        fork = max((common(other, path) for other in space), default=0)
        locked = {other for other in space if self.is_locked(namespace, other)}
        if fork and path[:fork] not in space:
            space[path[:fork]] = Place()
        place = space.setdefault(path, Place())
        place.fresh = not place.entries
        self.clock += 1
        for prefix in self.stored() - stored:
            self.used[prefix] = self.clock
        for other in locked:  # at most one: what lies below a split, where all its locks end above
            if not self.is_locked(namespace, other):
                self.touch_path(namespace, other)
        self.tidy()
        return self.node(namespace, path)

    def discard(self, node: Node) -> bool:
        if self.own(node).place.entries or self.is_locked(node.namespace, node.path):
            return False
        node.place.fresh = False
        self.tidy()
        return not node.alive

    def tidy(self) -> None:
        """Remove what nothing keeps, until there is no more of it."""
        while True:
            for namespace, space in self.spaces.items():
                gone = next((path for path in space if not self.is_kept(namespace, path)), None)
                if gone:
                    del space[gone]
                    break
            else:
                break
        self.spaces = {namespace: space for namespace, space in self.spaces.items() if space}
        stored = self.stored()
        self.used = {prefix: tick for prefix, tick in self.used.items() if prefix in stored}

    def is_kept(self, namespace: str, path: Path) -> bool:
        place = self.spaces[namespace][path]
        below = self.below(namespace, path)
        if place.entries or place.fresh or len(below) > 1 or self.is_locked(namespace, path):
            return True
        return len(below) == 1 and self.cover(namespace, below[0]) != self.cover(namespace, path)

    def clear(self, namespace: str | None = None) -> list[tuple[str, Any]]:
        if any(namespace in (None, lock.node.namespace) for lock in self.locks):
            raise Locked("in use")
        payloads = [(kind, entry.payload) for name, _, kind, entry in self.all_entries() if namespace in (None, name)]
        self.spaces = {name: space for name, space in self.spaces.items() if namespace not in (None, name)}
        self.tidy()
        return payloads

    # Payloads

    def put(self, node: Node, kind: str, payload: Any, *, bytes: int = 0, start: int | None = None) -> None:
        namespace, path = self.own(node).namespace, node.path
        known(kind)
        if payload is None or bytes < 0 or kind in node.place.entries or (start is not None and kind != "segment"):
            raise ValueError("this cannot be put")
        first = len(self.above(namespace, path)) if start is None else start
        if kind == "segment":
            nodes = self.edges(namespace, path, len(path))
            if first not in {len(self.above(namespace, other)) for other in nodes}:
                raise ValueError(f"start {start}: no node above {node} ends there")
            if any(self.cover(namespace, other) for other in nodes if len(other) > first):
                raise ValueError("a part already belongs to a segment")
        node.place.entries[kind] = Entry(payload, bytes, first)
        node.place.fresh = False
        self.touch_path(namespace, path)

    def take(self, node: Node, kind: str) -> Any:
        known(kind)
        if kind not in self.own(node).place.entries:
            raise KeyError(f"{node} has no {kind}")
        if self.is_protected(node.namespace, node.path, kind):
            raise Locked(f"the {kind} of {node} is in use")
        payload = node.place.entries.pop(kind).payload
        self.tidy()
        return payload

    def get(self, node: Node, kind: str) -> Any:
        entry = self.own(node).place.entries.get(known(kind))
        return entry.payload if entry else None

    def bytes(self, node: Node, kind: str) -> int:
        entry = self.own(node).place.entries.get(known(kind))
        return entry.bytes if entry else 0

    def start(self, node: Node) -> int:
        return self.own(node).place.entries["segment"].start

    def segments(self, node: Node) -> tuple[Span, ...]:
        edges = self.edges(self.own(node).namespace, node.path, node.length)
        return self.spans(node.namespace, edges, node.length)

    # Recency and locks

    def touch(self, node: Node) -> None:
        self.touch_path(self.own(node).namespace, node.path)

    def touch_path(self, namespace: str, path: Path) -> None:
        """Deepest first; a segment counts where it begins, since its end may lie off the path."""
        self.clock += 1
        for n in range(1, len(path) + 1):
            self.used[namespace, path[:n]] = self.clock
        for edge in reversed(self.edges(namespace, path, len(path))):
            cover = self.cover(namespace, edge)
            for kind in KINDS:
                entry = self.spaces[namespace][edge].entries.get(kind)
                if kind == "segment":
                    entry = cover[1] if cover and cover[1].start == len(self.above(namespace, edge)) else None
                if entry:
                    self.clock += 1
                    entry.tick = self.clock

    def victim(self, kind: str) -> Node | None:
        known(kind)
        free = [(e.tick, n, p) for n, p, k, e in self.all_entries() if k == kind and not self.is_protected(n, p, k)]
        return self.node(*min(free)[1:]) if free else None

    def lock(self, node: Node, length: int | None = None, *, cells: bool = False) -> Lock:
        self.own(node)
        length = node.length if length is None else length
        if not 1 <= length <= node.length or (cells and length != node.length):
            raise ValueError(f"length {length}: expected 1..{node.length}, with cells {node.length}")
        lock = Lock(self, node, length, cells)
        self.locks.append(lock)
        if len(self.above(node.namespace, node.path)) < length:
            node.place.fresh = False
        return lock

    def unlock(self, lock: Lock) -> None:
        if lock not in self.locks:
            raise ValueError("this lock has been given back before, or is another tree's")
        deepest = self.edges(lock.node.namespace, lock.path, lock.length)[-1]
        self.locks.remove(lock)
        self.touch_path(lock.node.namespace, deepest)
        self.tidy()

    # Accounting

    @property
    def cells(self) -> int:
        held = [(n, p) for n, p, kind, _ in self.all_entries() if kind == "resident"]
        held += [(lock.node.namespace, lock.path) for lock in self.locks if lock.cells]
        return len({(namespace, path[:n]) for namespace, path in held for n in range(1, len(path) + 1)})

    def exclusive_cells(self, node: Node) -> int:
        entries = self.own(node).place.entries
        if "resident" not in entries:
            return 0
        with_it, resident = self.cells, entries.pop("resident")
        without_it = self.cells
        entries["resident"] = resident
        return with_it - without_it

    def covered(self, node: Node) -> list[Node]:
        if "resident" not in self.own(node).place.entries:
            return []
        nodes = [self.node(node.namespace, path) for path in self.edges(node.namespace, node.path, node.length)[:-1]]
        free = [n for n in nodes if not self.is_locked(n.namespace, n.path)]
        return [n for n in free if "resident" in n.place.entries]

    def count(self, kind: str) -> int:
        return len(self.entries(kind))

    def bytes_of(self, kind: str) -> int:
        return sum(self.bytes(node, kind) for node in self.entries(kind))

    def entries(self, kind: str, namespace: str | None = None) -> list[Node]:
        known(kind)
        found = [
            (self.is_protected(name, path, kind), entry.tick, name, path)
            for name, path, k, entry in self.all_entries()
            if k == kind and namespace in (None, name)
        ]
        return [self.node(name, path) for _, _, name, path in sorted(found)]

    def namespaces(self) -> list[str]:
        return list(self.spaces)

    def __len__(self) -> int:
        return sum(len(space) for space in self.spaces.values())

    def stats(self) -> dict[str, Any]:
        counters: dict[str, Any] = {
            "nodes": len(self),
            "namespaces": len(self.spaces),
            "tokens": len(self.stored()),
            "cells": self.cells,
            "locks": len(self.locks),
            "clock": self.clock,
        }
        for kind in KINDS:
            locked = [n for n in self.entries(kind) if self.is_protected(n.namespace, n.path, kind)]
            counters[kind] = {"count": self.count(kind), "bytes": self.bytes_of(kind), "locked": len(locked)}
        return counters

    def check(self) -> None:
        """There is nothing that could be inconsistent."""


def known(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    return kind


def sequence_of(tokens: Any) -> list[Any]:
    try:
        view = memoryview(tokens)
    except TypeError:
        if not isinstance(tokens, Sequence):
            raise TypeError(f"tokens: expected a buffer of int32 or a sequence of ints, got {tokens!r}") from None
        return list(tokens)
    if not view.c_contiguous:
        raise ValueError("tokens: expected a C-contiguous buffer of int32")
    if view.ndim != 1 or view.itemsize != 4 or view.format.lstrip("@=<") not in ("i", "l"):
        raise TypeError(f"tokens: expected a one-dimensional buffer of int32, got {view.format!r}")
    return np.frombuffer(view, np.int32).tolist() if len(view) else []


def token_of(item: Any, index: int) -> int:
    try:
        value = operator.index(item)
    except TypeError:
        raise TypeError(f"token {item!r} at index {index}: expected an int") from None
    if not 0 <= value < 2**31:
        raise ValueError(f"token {value} at index {index}: expected 0..2147483647")
    return value
