"""The token radix tree in use: recency, locks and cells.  Each test runs on the compiled tree and on its twin."""

from __future__ import annotations

from typing import Any

import pytest

from skippy import _radix
from skippy.errors import Locked
from tests import radix_twin
from tests.test_radix import KINDS, store


@pytest.fixture(params=[_radix, radix_twin], ids=["compiled", "twin"])
def tree(request: pytest.FixtureRequest) -> Any:
    made = request.param.RadixTree()
    yield made
    made.check()


# -- recency ----------------------------------------------------------------------------------------------------------


def test_the_victim_is_the_deepest_of_the_least_recent_path(tree: Any) -> None:
    for tokens in ([1], [1, 2], [1, 2, 3], [7], [7, 8]):
        store(tree, tokens, payload=tokens)
    tree.touch(tree.match("n", [1, 2]).resident)
    order = []
    while (node := tree.victim("resident")) is not None:
        order.append(tree.take(node, "resident"))
        tree.check()
    # [1, 2, 3] was put last of its path and not touched since; its ancestors are never less recent than it.
    assert sorted(order[:3]) == [[1, 2, 3], [7], [7, 8]]
    assert order.index([7, 8]) < order.index([7])
    assert order.index([1, 2, 3]) < order.index([1, 2]) < order.index([1])


def test_touching_a_branch_keeps_the_segment_that_covers_its_beginning(tree: Any) -> None:
    trunk = store(tree, list(range(10)), "segment", "trunk")
    branch = store(tree, [0, 1, 2, 99], "segment", "branch")
    other = store(tree, [5], "segment", "other")
    tree.touch(branch)
    assert tree.entries("segment") == [other, branch, trunk]


def test_a_victim_loop_reaches_its_target(tree: Any) -> None:
    """Residents that share all of their cells free nothing one by one; the loop must go on until it has enough."""
    for end in (100, 200, 300):
        store(tree, list(range(end)))
    store(tree, [9000 + i for i in range(50)])
    freed = []
    while tree.cells > 60:
        node = tree.victim("resident")
        gain = tree.exclusive_cells(node)
        before = tree.cells
        tree.take(node, "resident")
        assert before - tree.cells == gain
        freed.append(gain)
    assert (sum(freed), tree.cells) == (300, 50)


def test_entries_are_ordered_and_filtered(tree: Any) -> None:
    a, b, c = store(tree, [1]), store(tree, [2]), store(tree, [3], namespace="m")
    tree.touch(a)
    lock = tree.lock(b)
    assert tree.entries("resident") == [c, a, b]
    assert tree.entries("resident", "n") == [a, b]
    assert (tree.entries("resident", "x"), tree.entries("logits")) == ([], [])
    tree.unlock(lock)
    assert tree.entries("resident") == [c, a, b]


# -- locks ------------------------------------------------------------------------------------------------------------


def test_what_a_request_uses_cannot_be_taken(tree: Any) -> None:  # E12
    node = store(tree, [1, 2, 3])
    for kind in KINDS[1:]:
        tree.put(node, kind, "p")
    lock = tree.lock(node)
    before = tree.stats()
    for kind in KINDS:
        assert tree.victim(kind) is None
        with pytest.raises(Locked):
            tree.take(node, kind)
    assert tree.stats() == before
    assert [before[kind]["locked"] for kind in KINDS] == [1] * 4
    tree.unlock(lock)
    assert [tree.victim(kind) for kind in KINDS] == [node] * 4
    assert [tree.stats()[kind]["locked"] for kind in KINDS] == [0] * 4


def test_unlocking_twice_raises_and_changes_nothing(tree: Any) -> None:
    node = store(tree, [1, 2, 3])
    lock, other = tree.lock(node), tree.lock(node)
    tree.unlock(lock)
    before = tree.stats()
    with pytest.raises(ValueError, match="before"):
        tree.unlock(lock)
    assert (tree.stats(), before["locks"], lock.alive, other.alive) == (before, 1, False, True)
    with pytest.raises(Locked):
        tree.take(node, "resident")
    tree.unlock(other)
    with pytest.raises(ValueError, match="before"):
        tree.unlock(lock)  # its slot is free again


def test_unlocking_a_node_that_has_no_lock_is_refused(tree: Any) -> None:
    node = store(tree, [1, 2, 3])
    for wrong in (node, None, 1):
        with pytest.raises((TypeError, ValueError)):
            tree.unlock(wrong)
    assert tree.stats()["locks"] == 0


@pytest.mark.parametrize("length", [0, -1, 4])
def test_the_length_of_a_lock_is_checked(tree: Any, length: int) -> None:
    node = store(tree, [1, 2, 3])
    with pytest.raises(ValueError, match=f"length {length}"):
        tree.lock(node, length)
    assert tree.stats()["locks"] == 0


def test_only_the_covered_part_is_protected(tree: Any) -> None:
    nodes = [store(tree, list(range(n))) for n in (2, 4, 6)]
    lock = tree.lock(nodes[2], 3)
    assert (lock.length, lock.node, lock.cells) == (3, nodes[2], False)
    assert tree.victim("resident") == nodes[2]
    assert tree.take(nodes[2], "resident") == "p"
    for node in nodes[:2]:
        with pytest.raises(Locked):
            tree.take(node, "resident")
    tree.unlock(lock)
    assert [tree.take(node, "resident") for node in nodes[:2]] == ["p", "p"]


def test_a_lock_does_not_pin_a_longer_edge_for_ever(tree: Any) -> None:
    """An insert splits the edge in which the lock ends: what lies below the lock's end is free from then on."""
    long = store(tree, list(range(100)))
    lock = tree.lock(long, 60)
    with pytest.raises(Locked):
        tree.take(long, "resident")
    short = store(tree, [*range(60), 999], payload="q")
    assert tree.stats()["resident"]["locked"] == 0
    assert [tree.take(node, "resident") for node in (long, short)] == ["p", "q"]
    assert (long.alive, short.alive, len(tree)) == (False, False, 1)  # the locked part stays
    assert tree.match("n", list(range(100))).matched == 60
    tree.unlock(lock)
    assert (len(tree), tree.stats()["locks"]) == (0, 0)


def test_a_split_above_the_end_of_a_lock_keeps_both_parts_protected(tree: Any) -> None:
    long = store(tree, list(range(100)))
    lock = tree.lock(long, 61)
    store(tree, [*range(60), 999], payload="q")
    with pytest.raises(Locked):
        tree.take(long, "resident")
    tree.unlock(lock)
    assert tree.take(long, "resident") == "p"


def test_no_count_goes_negative_after_a_split_under_a_lock(tree: Any) -> None:
    node = store(tree, list(range(100)))
    locks = [tree.lock(node, length) for length in (100, 80, 50, 20)]
    for cut in (30, 50, 70):
        store(tree, [*range(cut), 999])
    for lock in locks:
        tree.unlock(lock)
        tree.check()
    assert [tree.stats()[name] for name in ("locks", "cells")] == [0, 103]
    assert tree.stats()["resident"] == {"count": 4, "bytes": 0, "locked": 0}


def test_a_lock_keeps_a_bare_node_and_gives_it_up(tree: Any) -> None:
    node = tree.insert("n", [1, 2, 3])
    lock = tree.lock(node)
    assert tree.discard(node) is False
    tree.unlock(lock)
    assert (node.alive, len(tree)) == (False, 0)


def test_a_lock_protects_every_segment_it_overlaps(tree: Any) -> None:
    first, second = store(tree, [1, 2], "segment", "a"), store(tree, [1, 2, 3, 4], "segment", "b")
    third = store(tree, [1, 2, 3, 4, 5], "segment", "c")
    side = store(tree, [1, 2, 3, 9], "segment", "d")
    lock = tree.lock(side, 3)  # a, and the first half of b
    for node in (first, second):
        with pytest.raises(Locked):
            tree.take(node, "segment")
    assert [tree.take(node, "segment") for node in (third, side)] == ["c", "d"]
    tree.unlock(lock)
    assert tree.take(second, "segment") == "b"


def test_what_is_put_under_a_lock_is_protected(tree: Any) -> None:
    node = tree.insert("n", [1, 2, 3])
    lock = tree.lock(node)
    tree.put(node, "resident", "p")
    assert (tree.victim("resident"), tree.stats()["resident"]["locked"]) == (None, 1)
    tree.unlock(lock)
    assert tree.victim("resident") == node


def test_unlocking_makes_recent(tree: Any) -> None:
    old, new = store(tree, [1]), store(tree, [2])
    tree.unlock(tree.lock(old))
    assert tree.entries("resident") == [new, old]


# -- cells ------------------------------------------------------------------------------------------------------------


def test_shared_cells_are_counted_once(tree: Any) -> None:
    a, b = store(tree, [*range(60), 1, 1]), store(tree, [*range(60), 2, 2, 2])
    assert (tree.cells, tree.exclusive_cells(a), tree.exclusive_cells(b)) == (65, 2, 3)
    c = store(tree, list(range(60)))
    assert (tree.cells, tree.exclusive_cells(c)) == (65, 0)
    tree.take(a, "resident")
    assert (tree.cells, tree.exclusive_cells(b), tree.exclusive_cells(c)) == (63, 3, 0)
    tree.take(c, "resident")
    assert (tree.cells, tree.exclusive_cells(b)) == (63, 63)
    tree.take(b, "resident")
    assert tree.cells == 0


def test_a_lock_with_cells_counts_them_while_it_lives(tree: Any) -> None:
    resident = store(tree, list(range(60)))
    with pytest.raises(ValueError, match="length 10"):
        tree.lock(resident, 10, cells=True)
    part = tree.insert("n", list(range(40)))
    lock = tree.lock(part, cells=True)
    assert (lock.cells, tree.cells, tree.exclusive_cells(resident)) == (True, 60, 20)
    tree.take(resident, "resident")
    assert tree.cells == 40
    again = store(tree, list(range(50)))
    assert tree.cells == 50
    tree.unlock(lock)
    assert (tree.cells, tree.exclusive_cells(again)) == (50, 50)
    assert tree.exclusive_cells(tree.insert("n", [0])) == 0


def test_a_growing_chat_does_not_use_up_a_sequence_per_turn(tree: Any) -> None:
    free, used = list(range(3)), 0
    for turn in range(1, 30):
        node = tree.insert("n", list(range(10 * turn)))
        tree.put(node, "resident", free.pop())
        used = max(used, tree.count("resident"))
        free += [tree.take(covered, "resident") for covered in tree.covered(node)]
        tree.check()
        assert (tree.cells, len(tree), tree.exclusive_cells(node)) == (10 * turn, 1, 10 * turn)
    assert (used, sorted(free)) == (2, [n for n in range(3) if n != tree.get(node, "resident")])


def test_covered_leaves_out_what_is_locked(tree: Any) -> None:
    nodes = [store(tree, list(range(n))) for n in (2, 4, 6)]
    bare = tree.insert("n", list(range(8)))
    lock = tree.lock(nodes[0])
    assert (tree.covered(nodes[2]), tree.covered(bare)) == ([nodes[1]], [])
    tree.unlock(lock)
    assert tree.covered(nodes[2]) == nodes[:2]
