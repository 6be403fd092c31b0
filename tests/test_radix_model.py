"""The compiled tree against its twin: long random sequences of all operations, compared after every one of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy._radix import KINDS, RadixTree
from skippy.errors import Locked, StaleHandle
from tests import radix_twin

# Two or three tokens and short paths, so that most inserts split and most removals merge.
TOKENS = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2**31 - 1]), min_size=1, max_size=9)
NAMESPACES = st.sampled_from(["one", "one", "two"])
KIND = st.sampled_from(KINDS)
PICK = st.integers(0, 2**16)
CONTAINERS: list[Callable[[list[int]], Any]] = [list, tuple, lambda t: array("i", t), lambda t: np.array(t, np.int32)]
ERRORS = (ValueError, KeyError, StaleHandle, Locked)
SHARED_COUNTERS = ("nodes", "namespaces", "tokens", "cells", "locks", "clock", *KINDS)


class TreeAndTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.twin = radix_twin.RadixTree()
        self.nodes: list[tuple[Any, Any]] = []
        self.locks: list[tuple[Any, Any]] = []
        self.serial = 0

    def both(self, name: str, *pairs: Any, **keywords: Any) -> Any:
        """Call a method of both; they return alike, or raise alike.  A pair is an argument that each has its own of."""
        outcomes = []
        for i, tree in enumerate((self.tree, self.twin)):
            arguments = [pair[i] if isinstance(pair, tuple) and len(pair) == 2 else pair for pair in pairs]
            try:
                outcomes.append((None, getattr(tree, name)(*arguments, **keywords)))
            except ERRORS as error:
                outcomes.append((type(error), None))
        assert outcomes[0][0] is outcomes[1][0], (name, pairs, keywords, outcomes)
        return None if outcomes[0][0] else (outcomes[0][1], outcomes[1][1])

    def place(self, node: Any) -> Any:
        """A node of either tree as namespace and path."""
        if node is None:
            return None
        return node.namespace, tuple(
            node.path if isinstance(node, radix_twin.Node) else self.tree.tokens(node).tolist()
        )

    def span(self, span: Any) -> Any:
        return self.place(span.node), span.start, span.end, span.reach, span.payload

    @rule(namespace=NAMESPACES, tokens=TOKENS, container=st.sampled_from(CONTAINERS))
    def insert(self, namespace: str, tokens: list[int], container: Callable[[list[int]], Any]) -> None:
        given = container(tokens)
        made = self.both("insert", namespace, (given, given))
        assert self.place(made[0]) == self.place(made[1]) == (namespace, tuple(tokens))
        self.nodes.append(made)

    @precondition(lambda self: self.nodes)
    @rule(pick=PICK, cut=st.integers(0, 9), tokens=TOKENS)
    def insert_near(self, pick: int, cut: int, tokens: list[int]) -> None:
        """A path that leaves a stored one somewhere, or ends on it."""
        near = self.nodes[pick % len(self.nodes)][1]
        self.insert(near.namespace, [*near.path[: 1 + cut % near.length], *tokens[: pick % 4]], list)

    @precondition(lambda self: self.nodes)
    @rule(pick=PICK, kind=KIND, size=st.integers(0, 99), start=st.none() | st.integers(-1, 6))
    def put(self, pick: int, kind: str, size: int, start: int | None) -> None:
        self.serial += 1
        start = start if kind == "segment" else None
        self.both("put", self.nodes[pick % len(self.nodes)], kind, self.serial, bytes=size, start=start)

    @precondition(lambda self: self.nodes)
    @rule(pick=PICK, kind=KIND)
    def take(self, pick: int, kind: str) -> None:
        taken = self.both("take", self.nodes[pick % len(self.nodes)], kind)
        assert taken is None or taken[0] == taken[1]

    @rule(pick=PICK, kind=KIND)
    def take_any(self, pick: int, kind: str) -> None:
        """One that is there, so that the call seldom fails."""
        pairs = list(zip(*self.both("entries", kind), strict=True))
        if pairs:
            taken = self.both("take", pairs[pick % len(pairs)], kind)
            assert taken is None or taken[0] == taken[1]

    @rule(kind=KIND)
    def evict(self, kind: str) -> None:
        victims = self.both("victim", kind)
        assert self.place(victims[0]) == self.place(victims[1])
        if victims[0] is not None:
            taken = self.both("take", victims, kind)
            assert taken[0] == taken[1]

    @precondition(lambda self: self.nodes)
    @rule(pick=PICK)
    def touch(self, pick: int) -> None:
        self.both("touch", self.nodes[pick % len(self.nodes)])

    @precondition(lambda self: self.nodes)
    @rule(pick=PICK)
    def discard(self, pick: int) -> None:
        gone = self.both("discard", self.nodes[pick % len(self.nodes)])
        assert gone is None or gone[0] == gone[1]

    @precondition(lambda self: self.nodes)
    @rule(pick=PICK, length=st.none() | st.integers(0, 9), cells=st.booleans())
    def lock(self, pick: int, length: int | None, cells: bool) -> None:
        locked = self.both("lock", self.nodes[pick % len(self.nodes)], length, cells=cells and length is None)
        if locked is not None:
            assert locked[0].length == locked[1].length
            self.locks.append(locked)

    @precondition(lambda self: self.locks)
    @rule(pick=PICK)
    def unlock(self, pick: int) -> None:
        """Given back locks are not forgotten, so that some are given back twice."""
        lock = self.locks[pick % len(self.locks)]
        self.both("unlock", lock)
        assert lock[0].alive is lock[1].alive is False

    @rule(namespace=NAMESPACES)
    def clear(self, namespace: str) -> None:
        payloads = self.both("clear", namespace)
        assert payloads is None or sorted(payloads[0]) == sorted(payloads[1])

    @rule(namespace=NAMESPACES, tokens=TOKENS, container=st.sampled_from(CONTAINERS))
    def match(self, namespace: str, tokens: list[int], container: Callable[[list[int]], Any]) -> None:
        self.probe(namespace, container(tokens))

    def probe(self, namespace: str, given: Any) -> None:
        found, wanted = self.both("match", namespace, (given, given))
        for name in ("matched", "resident_length", "segment_length", "steps"):
            assert getattr(found, name) == getattr(wanted, name), name
        assert (found.resident is None) == (found.resident_length == 0)
        if found.resident is not None:
            assert self.tree.get(found.resident, "resident") is not None
            assert self.place(found.resident)[1][: found.resident_length] == tuple(given[: found.resident_length])
        assert [self.span(span) for span in found.segments] == [self.span(span) for span in wanted.segments]
        assert [self.place(n) for n in found.checkpoints] == [self.place(n) for n in wanted.checkpoints]
        assert self.place(found.checkpoint) == self.place(wanted.checkpoint)
        assert self.place(found.logits) == self.place(wanted.logits)
        assert len(set(self.both("branch_point", namespace, (given, given)))) == 1
        after = self.both("following", namespace, (given, given), 7)
        assert after[0].dtype == after[1].dtype == np.int32
        assert after[0].tolist() == after[1].tolist()

    @invariant()
    def sound(self) -> None:
        self.tree.check()

    @invariant()
    def alike(self) -> None:
        stats, wanted = self.tree.stats(), self.twin.stats()
        assert {name: stats[name] for name in SHARED_COUNTERS} == wanted
        assert len(self.tree) == len(self.twin)
        assert self.tree.cells == self.twin.cells
        assert self.tree.namespaces() == self.twin.namespaces()
        for kind in KINDS:
            entries = self.both("entries", kind)
            assert [self.place(node) for node in entries[0]] == [self.place(node) for node in entries[1]]
            assert self.place(self.tree.victim(kind)) == self.place(self.twin.victim(kind))
            assert self.tree.count(kind) == self.twin.count(kind)
            assert self.tree.bytes_of(kind) == self.twin.bytes_of(kind)
        for node, other in self.nodes:
            assert node.alive == other.alive
        for _, other in self.nodes[-3:]:
            for prompt in (other.path, other.path[: (other.length + 1) // 2], [*other.path[:-1], 1, 0]):
                self.probe(other.namespace, list(prompt))
        for pair in {other.path: (node, other) for node, other in self.nodes if other.alive}.values():
            node, other = pair
            assert node.length == other.length
            assert self.tree.children(node) == self.twin.children(other)
            assert self.tree.exclusive_cells(node) == self.twin.exclusive_cells(other)
            assert self.place(self.tree.parent(node)) == self.place(self.twin.parent(other))
            covered = self.both("covered", pair)
            assert [self.place(n) for n in covered[0]] == [self.place(n) for n in covered[1]]
            segments = self.both("segments", pair)
            assert [self.span(s) for s in segments[0]] == [self.span(s) for s in segments[1]]
            starts = self.both("start", pair)
            assert starts is None or starts[0] == starts[1]
            for kind in KINDS:
                assert self.tree.get(node, kind) == self.twin.get(other, kind)
                assert self.tree.bytes(node, kind) == self.twin.bytes(other, kind)

    def teardown(self) -> None:
        """Whatever happened, giving everything back leaves nothing."""
        for lock in self.locks:
            if lock[1].alive:
                self.both("unlock", lock)
        for kind in KINDS:
            while self.tree.victim(kind) is not None:
                self.evict(kind)
        for pair in self.nodes:
            self.both("discard", pair)
        self.tree.check()
        assert len(self.tree) == len(self.twin) == 0
        assert self.tree.stats()["tokens"] == self.tree.stats()["buffer_bytes"] == self.tree.cells == 0


TestTreeAndTwin = TreeAndTwin.TestCase
TestTreeAndTwin.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


# Hypothesis shrinks what it finds, but draws short sequences; these are long, and fill and empty the tree by turns.
ACTIONS = {
    "insert": 4,
    "insert_near": 12,
    "put": 24,
    "take": 2,
    "take_any": 14,
    "evict": 4,
    "touch": 4,
    "discard": 6,
    "lock": 6,
}
ACTIONS |= {"unlock": 8, "clear": 0.2}


@pytest.mark.parametrize("seed", range(20))
def test_long_sequences(seed: int) -> None:
    random = Random(seed)
    machine = TreeAndTwin()
    names = list(ACTIONS)
    for step in range(220):
        emptying = step % 80 > 60
        weights = [
            w * (3 if emptying and name in ("take_any", "evict", "unlock", "discard") else 1)
            for name, w in ACTIONS.items()
        ]
        name = random.choices(names, weights)[0]
        pick, tokens = random.randrange(2**16), [random.choice([0, 0, 0, 1, 1, 2]) for _ in range(random.randint(1, 9))]
        namespace, kind = random.choice(["one", "one", "two"]), random.choice(KINDS)
        if len(machine.nodes) > 40:
            stale = [pair for pair in machine.nodes if not pair[1].alive]
            machine.nodes = [pair for pair in machine.nodes if pair[1].alive] + stale[-6:]
        if name == "insert":
            machine.insert(namespace, tokens, random.choice(CONTAINERS))
        elif name == "evict":
            machine.evict(kind)
        elif name == "take_any":
            machine.take_any(pick, kind)
        elif name == "clear":
            machine.clear(namespace)
        elif machine.nodes:
            if name == "insert_near":
                machine.insert_near(pick, random.randrange(9), tokens)
            elif name == "put":
                machine.put(pick, kind, random.randrange(99), random.choice([None, None, *range(6)]))
            elif name == "take":
                machine.take(pick, kind)
            elif name == "lock":
                machine.lock(pick, random.choice([None, *range(9)]), random.random() < 0.4)
            elif name == "unlock" and machine.locks:
                machine.unlock(pick)
            elif name in ("touch", "discard"):
                getattr(machine, name)(pick)
        machine.sound()
        machine.alike()
    machine.teardown()
