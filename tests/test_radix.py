"""The token radix tree, case by case: look up, shape, payloads; each on the compiled tree and on its twin."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from skippy import _radix
from skippy.errors import Locked, StaleHandle
from tests import radix_twin

KINDS = _radix.KINDS


@pytest.fixture(params=[_radix, radix_twin], ids=["compiled", "twin"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.fixture
def tree(module: ModuleType) -> Any:
    made = module.RadixTree()
    yield made
    made.check()


def store(
    tree: Any, tokens: Any, kind: str = "resident", payload: Any = "p", namespace: str = "n", **keywords: Any
) -> Any:
    node = tree.insert(namespace, tokens)
    tree.put(node, kind, payload, **keywords)
    tree.check()
    return node


# -- look up ----------------------------------------------------------------------------------------------------------


def test_match_ends_inside_the_edge_and_a_longer_resident_serves_it(tree: Any) -> None:  # T1
    node = store(tree, list(range(100)))
    found = tree.match("n", [*range(80), *[999] * 20])
    assert (found.matched, found.resident_length, found.resident) == (80, 80, node)
    assert (found.segment_length, found.segments, found.checkpoint, found.logits) == (0, (), None, None)
    assert len(tree) == 1


def test_the_longer_sibling_does_not_hide_the_checkpoint_of_the_prefix(tree: Any) -> None:  # T2
    prefix, a, b = list(range(200)), [500] * 30, [600] * 30
    store(tree, prefix + a, "checkpoint")
    system = store(tree, prefix, "checkpoint")
    found = tree.match("n", prefix + b)
    assert (found.matched, found.checkpoint, found.checkpoints) == (200, system, (system,))


def test_a_checkpoint_counts_only_where_it_ends_on_the_prompt(tree: Any) -> None:
    shallow = store(tree, [1, 2], "checkpoint")
    deep = store(tree, [1, 2, 3, 4], "checkpoint")
    assert tree.match("n", [1, 2, 3]).checkpoints == (shallow,)
    assert tree.match("n", [1, 2, 3, 4, 5]).checkpoints == (shallow, deep)
    assert tree.match("n", [1]).checkpoint is None


def test_the_same_tokens_in_four_namespaces_miss_first(tree: Any) -> None:  # T7
    tokens = list(range(64))
    for count, namespace in enumerate(("adapter", "adapter at 0.5", "", "another tenant")):
        found = tree.match(namespace, tokens)
        assert (found.matched, found.resident, found.resident_length) == (0, None, 0)
        store(tree, tokens, namespace=namespace, payload=namespace)
        assert tree.get(tree.match(namespace, tokens).resident, "resident") == namespace
        assert (tree.cells, len(tree.namespaces())) == (64 * (count + 1), count + 1)


def test_reuse_goes_to_the_first_difference(tree: Any) -> None:  # E7
    matched = []
    for prompt in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9], [1, 2, 3, 9, 9, 9]):
        found = tree.match("n", prompt)
        matched.append((found.matched, found.resident_length))
        node = tree.insert("n", prompt)
        if tree.get(node, "resident") is None:
            tree.put(node, "resident", len(matched))
    assert matched == [(0, 0), (6, 6), (5, 5), (3, 3)]


def test_a_resident_serves_less_when_the_path_below_is_not_resident(tree: Any) -> None:
    base = store(tree, [1, 2, 3])
    store(tree, [1, 2, 3, 4, 5], "segment", start=3)
    found = tree.match("n", [1, 2, 3, 4, 5])
    assert (found.matched, found.resident, found.resident_length, found.segment_length) == (5, base, 3, 0)
    assert [(span.start, span.end) for span in found.segments] == [(3, 5)]


def test_the_holder_is_repaired_when_it_leaves(tree: Any) -> None:
    left, right = store(tree, [1, 2, 3], payload="left"), store(tree, [1, 2, 4], payload="right")
    for gone, kept in ((left, right), (right, None)):
        tree.take(gone, "resident")
        tree.check()
        found = tree.match("n", [1, 2])
        assert (found.resident, found.resident_length) == (kept, 2 if kept else 0)


def test_match_changes_nothing(tree: Any) -> None:
    first, second = store(tree, [1, 2, 3, 4]), store(tree, [1, 2, 9])
    before = tree.stats()
    for prompt in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 9, 9], [7], []):
        tree.match("n", prompt)
        tree.branch_point("n", prompt)
        tree.following("n", prompt, 3)
    assert tree.stats() == before
    assert tree.entries("resident") == [first, second]


def test_a_match_does_not_follow_later_changes(tree: Any) -> None:
    node = store(tree, [1, 2, 3], "checkpoint")
    tree.put(node, "segment", "saved")
    found = tree.match("n", [1, 2, 3])
    assert (tree.take(node, "segment"), tree.take(node, "checkpoint")) == ("saved", "p")
    assert (found.segments[0].payload, found.checkpoint, found.checkpoint.alive) == ("saved", node, False)


def test_logits_only_for_the_very_prompt(tree: Any) -> None:
    node = store(tree, [1, 2, 3], "logits")
    assert tree.match("n", [1, 2, 3]).logits == node
    assert [tree.match("n", prompt).logits for prompt in ([1, 2], [1, 2, 3, 4], [1, 2, 4])] == [None] * 3


def test_branch_point(tree: Any) -> None:
    store(tree, [1, 2, 3, 4])
    assert tree.branch_point("n", [1, 2, 9]) == 2  # inside an edge
    assert tree.branch_point("n", [1, 2]) == 2  # would end inside an edge
    assert tree.branch_point("n", [1, 2, 3, 4, 5]) == 0  # goes on where nothing does
    assert tree.branch_point("n", [1, 2, 3, 4]) == 0
    assert tree.branch_point("n", [9]) == tree.branch_point("other", [1]) == tree.branch_point("n", []) == 0
    store(tree, [1, 2, 5])
    assert tree.branch_point("n", [1, 2, 6]) == 2  # a third branch
    assert tree.branch_point("n", [1, 2]) == 0  # a node is there


def test_following_takes_the_most_recent_branch(tree: Any) -> None:
    old, new = store(tree, [1, 2, 3, 4, 5]), store(tree, [1, 2, 6, 7])
    assert tree.following("n", [1, 9], 2).tolist() == [2, 6]
    assert tree.following("n", [1, 2], 9).tolist() == [6, 7]
    tree.touch(old)
    assert tree.following("n", [], 9).tolist() == [1, 2, 3, 4, 5]
    tree.touch(new)
    assert tree.following("n", [1, 2, 3], 1).tolist() == [4]
    assert tree.following("n", [1, 2, 6, 7, 8], 5).dtype == np.int32
    assert [tree.following(n, t, c).size for n, t, c in (("n", [1, 2, 6, 7], 5), ("n", [1], 0), ("x", [1], 5))] == [
        0
    ] * 3
    with pytest.raises(ValueError, match="count -1"):
        tree.following("n", [1], -1)


def test_tokens_parent_and_children(tree: Any) -> None:
    node, other = store(tree, [1, 2, 3, 4]), store(tree, [1, 2, 9])
    fork = tree.parent(node)
    assert (fork.length, fork.namespace, tree.parent(other), tree.parent(fork)) == (2, "n", fork, None)
    assert (tree.children(fork), tree.children(node)) == (2, 0)
    path = tree.tokens(node)
    assert (path.dtype, path.tolist()) == (np.int32, [1, 2, 3, 4])
    path[:] = 0
    assert tree.tokens(node).tolist() == [1, 2, 3, 4]


# -- shape ------------------------------------------------------------------------------------------------------------


def test_insert_finds_what_is_there(tree: Any) -> None:
    node = tree.insert("n", [1, 2])
    assert tree.insert("n", [1, 2]) == node
    assert hash(tree.insert("n", [1, 2])) == hash(node)
    assert node != tree.insert("m", [1, 2])
    assert node != tree.insert("n", [1])
    assert node != "node"
    assert len(tree) == 3


def test_discard(tree: Any) -> None:
    kept = store(tree, [1, 2, 3])
    bare = tree.insert("n", [1, 2, 9, 9])
    inner = tree.insert("n", [1])
    assert (len(tree), tree.discard(kept), tree.discard(bare), tree.discard(inner)) == (4, False, True, True)
    assert (len(tree), kept.alive, bare.alive, inner.alive) == (1, True, False, False)
    assert tree.match("n", [1, 2, 3]).steps == 1


def test_an_empty_path_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        tree.insert("n", [])
    assert (tree.namespaces(), len(tree)) == ([], 0)


def test_a_stale_handle_is_refused_and_changes_nothing(tree: Any) -> None:
    node = store(tree, [1, 2, 3])
    tree.take(node, "resident")
    again = store(tree, [1, 2, 3])  # the same place in memory, another node
    before = tree.stats()
    calls = [(call, (node,)) for call in ("touch", "tokens", "parent", "children", "covered", "exclusive_cells")]
    calls += [(call, (node,)) for call in ("discard", "lock", "segments", "start")]
    calls += [(call, (node, "resident")) for call in ("take", "get", "bytes")]
    calls += [("put", (node, "logits", 1))]
    for call, arguments in calls:
        with pytest.raises(StaleHandle):
            getattr(tree, call)(*arguments)
    assert tree.stats() == before
    assert (node.alive, again.alive, node == again, node.length, node.namespace) == (False, True, False, 3, "n")


def test_a_handle_of_another_tree_is_refused(module: ModuleType, tree: Any) -> None:
    other = module.RadixTree()
    node = store(other, [1, 2, 3])
    store(tree, [1, 2, 3])
    lock = other.lock(node)
    for call in (lambda: tree.take(node, "resident"), lambda: tree.lock(node), lambda: tree.unlock(lock)):
        with pytest.raises(ValueError, match="another tree"):
            call()
    assert (lock.alive, tree.count("resident"), other.count("resident")) == (True, 1, 1)


def test_a_namespace_goes_with_its_last_node(tree: Any) -> None:
    a, b = store(tree, [1], namespace="a"), store(tree, [1], namespace="b")
    assert tree.namespaces() == ["a", "b"]
    tree.take(a, "resident")
    assert tree.namespaces() == ["b"]
    store(tree, [1], namespace="a")
    assert tree.namespaces() == ["b", "a"]
    assert b.alive


def test_clear_returns_each_payload_once(tree: Any) -> None:
    store(tree, [1, 2, 3], payload="r")
    store(tree, [1, 2, 3, 4], "segment", "s")
    store(tree, [1, 5], "checkpoint", "c")
    other = store(tree, [1], "logits", "l", namespace="m")
    assert sorted(tree.clear("n")) == [("checkpoint", "c"), ("resident", "r"), ("segment", "s")]
    assert (tree.clear("n"), tree.clear("never"), tree.namespaces(), len(tree)) == ([], [], ["m"], 1)
    lock = tree.lock(other)
    for namespace in ("m", None):
        with pytest.raises(Locked):
            tree.clear(namespace)
    assert tree.get(other, "logits") == "l"
    tree.unlock(lock)
    assert (tree.clear(), tree.clear(), len(tree), tree.cells) == ([("logits", "l")], [], 0, 0)


# -- payloads ---------------------------------------------------------------------------------------------------------


def test_put_get_take(tree: Any) -> None:
    node = tree.insert("n", [1, 2, 3])
    for size, kind in enumerate(KINDS):
        assert (tree.get(node, kind), tree.bytes(node, kind)) == (None, 0)
        tree.put(node, kind, kind.upper(), bytes=size)
    assert [(tree.get(node, k), tree.bytes(node, k), tree.bytes_of(k), tree.count(k)) for k in KINDS] == [
        ("RESIDENT", 0, 0, 1),
        ("SEGMENT", 1, 1, 1),
        ("CHECKPOINT", 2, 2, 1),
        ("LOGITS", 3, 3, 1),
    ]
    assert [tree.take(node, kind) for kind in KINDS] == [kind.upper() for kind in KINDS]
    assert (node.alive, len(tree), tree.stats()["tokens"]) == (False, 0, 0)


def test_put_refuses_and_changes_nothing(tree: Any) -> None:
    node = store(tree, [1, 2, 3])
    store(tree, [1, 2, 3, 4], "segment")
    before = tree.stats()
    for arguments, keywords in (
        ((node, "resident", 2), {}),  # occupied
        ((node, "logits", None), {}),
        ((node, "logits", 1), {"bytes": -1}),
        ((node, "logits", 1), {"start": 0}),
        ((node, "segments", 1), {}),
    ):
        with pytest.raises(ValueError):  # noqa: PT011  # each refusal has its own message in the compiled tree
            tree.put(*arguments, **keywords)
    assert tree.stats() == before
    for call in (tree.take, tree.get, tree.bytes):
        with pytest.raises(ValueError, match="'none'"):
            call(node, "none")
    for call in (tree.victim, tree.count, tree.bytes_of, tree.entries):
        with pytest.raises(ValueError, match="'none'"):
            call("none")


def test_a_payload_is_given_out_once(tree: Any) -> None:
    payload = object()
    node = store(tree, [1, 2, 3], payload=payload)
    assert tree.take(node, "resident") is payload
    with pytest.raises(LookupError):
        tree.take(node, "resident")
    keeper = store(tree, [1], "logits")
    with pytest.raises(KeyError):
        tree.take(keeper, "resident")
    assert tree.clear() == [("logits", "p")]


def test_a_segment_covers_both_halves_after_a_split(tree: Any) -> None:
    node = store(tree, list(range(10)), "segment", "s")
    side = store(tree, [0, 1, 2, 3, 99], "segment", "t")
    span = (node, 0, 10, 4, "s")  # it holds ten tokens, and four of them are this path's
    assert [(s.node, s.start, s.end, s.reach, s.payload) for s in tree.segments(side)] == [span, (side, 4, 5, 5, "t")]
    found = tree.match("n", [0, 1, 2, 3, 99, 100])
    assert [(s.node, s.start, s.end, s.reach, s.payload) for s in found.segments] == [span, (side, 4, 5, 5, "t")]
    assert [s.reach for s in tree.match("n", [0, 1, 2, 77]).segments] == [3]
    assert [s.reach for s in tree.match("n", [0, 1, 2, 3, 4, 5, 66]).segments] == [6]
    assert found.segment_length == 5
    tree.take(node, "segment")  # and its upper half with it
    found = tree.match("n", [0, 1, 2, 3, 99])
    assert (found.segment_length, [s.payload for s in found.segments]) == (0, ["t"])
    assert (tree.start(side), side.alive, node.alive) == (4, True, False)


def test_a_segment_may_span_several_edges(tree: Any) -> None:
    first, second = store(tree, [1, 2], "logits"), store(tree, [1, 2, 3, 4], "logits")
    third = store(tree, [1, 2, 3, 4, 5, 6], "logits")
    for start in (1, 3, 4, 6, -1):
        with pytest.raises(ValueError, match=f"start {start}"):
            tree.put(second, "segment", "x", start=start)
    tree.put(third, "segment", "s", start=2)
    assert tree.match("n", [1, 2, 3, 4, 5]).segment_length == 0
    for start in (0, 2, None):
        with pytest.raises(ValueError, match="already"):
            tree.put(second, "segment", "x", start=start)
    tree.put(first, "segment", "r", start=0)
    found = tree.match("n", [1, 2, 3, 4, 5])
    assert [(s.start, s.end, s.reach) for s in found.segments] == [(0, 2, 2), (2, 6, 5)]
    assert (found.segment_length, tree.start(third)) == (5, 2)
    with pytest.raises(KeyError):
        tree.start(second)


def test_what_a_segment_held_apart_is_merged_when_it_goes(tree: Any) -> None:
    above = store(tree, [1, 2], "logits")
    node = store(tree, [1, 2, 3, 4], "segment")
    tree.put(node, "resident", "r")
    tree.take(above, "logits")
    assert (len(tree), above.alive) == (2, True)  # a segment begins there
    tree.take(node, "segment")
    assert (len(tree), above.alive, tree.tokens(node).tolist()) == (1, False, [1, 2, 3, 4])


def test_what_a_segment_ended_at_is_merged_when_it_goes(tree: Any) -> None:
    bottom = store(tree, [1, 2, 3, 4], "segment", start=0)
    side = store(tree, [1, 2, 9])
    below = store(tree, [1, 2, 3, 4, 5])
    tree.take(side, "resident")
    tree.check()
    assert len(tree) == 2
    tree.take(bottom, "segment")
    assert (len(tree), below.alive, tree.tokens(below).tolist()) == (1, True, [1, 2, 3, 4, 5])
