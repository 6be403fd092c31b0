"""What only the compiled tree can get wrong: depth, memory, lent buffers, and looking like a Python class."""

from __future__ import annotations

import ast
import doctest
import gc
import inspect
import pickle
import weakref
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippy import _radix
from skippy._radix import KINDS, Lock, Match, Node, RadixTree, Span


def store(tree: RadixTree, tokens: Any, kind: Any = "resident", payload: Any = "p") -> Node:
    node = tree.insert("n", tokens)
    tree.put(node, kind, payload)
    return node


# -- depth -----------------------------------------------------------------------------------------------------------


def test_a_chain_100_000_nodes_deep() -> None:  # E16
    """No recursion, and a look-up compares each edge once: per token it costs what it costs anywhere."""
    depth = 100_000
    tree = RadixTree()
    path = np.arange(2 * depth, dtype=np.int32)
    # From the bottom up: each insert splits the topmost edge, so that building the chain is not quadratic.
    nodes = [tree.insert("n", path[:end]) for end in range(2 * depth, 0, -2)]
    deepest, shallowest = nodes[0], nodes[-1]
    for node in (nodes[i] for i in range(depth - 1, -1, -depth // 20)):
        tree.put(node, "checkpoint", node.length)
    tree.put(deepest, "resident", 1)
    found = tree.match("n", path)
    assert (found.matched, found.steps, len(tree)) == (2 * depth, depth, depth)
    assert (found.resident, found.checkpoints[0], len(found.checkpoints)) == (deepest, shallowest, 20)
    assert tree.match("n", path[: 2 * 500]).steps == 500
    assert tree.cells == tree.exclusive_cells(deepest) == 2 * depth
    tree.unlock(tree.lock(deepest, 3, cells=False))
    tree.unlock(tree.lock(deepest, cells=True))
    tree.touch(deepest)
    assert np.array_equal(tree.tokens(deepest), path)
    assert tree.following("n", path[:1], 2 * depth).size == 2 * depth - 1
    tree.check()
    assert tree.take(deepest, "resident") == 1
    assert len(tree.clear()) == 20
    assert (len(tree), tree.stats()["tokens"], tree.stats()["buffer_bytes"]) == (0, 0, 0)
    tree.check()


def test_a_checkpoint_on_every_node_of_a_chain() -> None:
    tree = RadixTree()
    path = np.arange(3000, dtype=np.int32)
    nodes = [store(tree, path[:end], "checkpoint") for end in range(1, 3001)]
    found = tree.match("n", path)
    assert (found.steps, found.checkpoint, list(found.checkpoints)) == (3000, nodes[-1], nodes)
    for node in reversed(nodes):
        assert tree.victim("checkpoint") == node
        tree.take(node, "checkpoint")
    assert len(tree) == 0


# -- memory ----------------------------------------------------------------------------------------------------------


def failing(tree: RadixTree, call: Any) -> int:
    """Let the first allocation of a call fail, then the second, and so on until it succeeds; how many there are."""
    for count in range(100):
        before = tree.stats()
        tree._fail_allocation_after(count)
        try:
            call()
        except MemoryError:
            tree.check()
            after = tree.stats()
            assert {k: v for k, v in after.items() if k != "index_bytes"} == {
                k: v for k, v in before.items() if k != "index_bytes"
            }
        else:
            tree._fail_allocation_after(-1)
            tree.check()
            return count
    raise AssertionError("it never succeeds")


def test_a_failed_allocation_leaves_the_tree_as_it_was() -> None:
    tree = RadixTree()
    seen = {"insert": 0, "put": 0, "lock": 0, "match": 0}
    for i in range(40):
        tokens = [i % 3, i % 5, *range(1000 * i, 1000 * i + i + 1)]
        seen["insert"] += failing(tree, lambda t=tokens: tree.insert("n", t))
        seen["insert"] += failing(tree, lambda t=tokens: tree.insert("n", t[:2]))
        seen["insert"] += failing(tree, lambda t=tokens, i=i: tree.insert(f"n{i}", t))
        node = tree.insert("n", tokens)
        seen["put"] += failing(tree, lambda n=node: tree.put(n, "checkpoint", "p"))
        seen["lock"] += failing(tree, lambda n=node: tree.lock(n))
        seen["match"] += failing(tree, lambda t=tokens: tree.match("n", [*t, *range(100)]))
    assert all(seen.values()), seen  # each of them did fail


def test_taking_never_fails_for_want_of_memory() -> None:
    """Two edges that cannot be joined stay apart, and everything else goes on."""
    tree = RadixTree()
    upper = store(tree, [1, 2, 3])
    lower = store(tree, [1, 2, 3, 4, 5], payload="q")
    tree._fail_allocation_after(0)
    assert tree.take(upper, "resident") == "p"
    tree.check()
    assert (len(tree), tree.match("n", [1, 2, 3, 4, 5]).resident) == (2, lower)
    assert tree.take(lower, "resident") == "q"
    tree.check()
    assert len(tree) == 0


def test_what_is_removed_gives_its_tokens_back() -> None:
    """Edges share buffers; what is left of one holds at most as many unused tokens as used ones."""
    tree = RadixTree()
    path = np.arange(10_000, dtype=np.int32)
    long = store(tree, path)
    short = store(tree, path[:100])
    middle = store(tree, path[:5_000], payload="m")
    assert tree.stats()["buffer_bytes"] == 4 * 10_000
    tree.take(long, "resident")
    tree.check()
    assert tree.stats()["buffer_bytes"] == 4 * 5_000
    tree.take(middle, "resident")
    tree.check()
    assert tree.stats()["buffer_bytes"] == 4 * 100
    assert np.array_equal(tree.tokens(short), path[:100])
    grown = store(tree, path[:150])
    deep = store(tree, path[:9_000])
    fork = store(tree, [*path[:200], 7])
    tree.take(short, "resident")
    tree.check()
    tree.take(grown, "resident")
    tree.check()
    assert np.array_equal(tree.tokens(deep), path[:9_000])
    assert tree.tokens(fork).tolist() == [*range(200), 7]
    assert tree.stats()["buffer_bytes"] <= 2 * 4 * tree.stats()["tokens"]


def test_index_memory_per_unique_token() -> None:
    tree = RadixTree()
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 32_000, 4_096).astype(np.int32)
    for _ in range(1_600):
        store(tree, np.concatenate([prefix, rng.integers(0, 32_000, 64).astype(np.int32)]))
    assert tree.stats()["tokens"] > 100_000
    assert tree.stats()["index_bytes"] / tree.stats()["tokens"] <= 8


def test_slots_are_used_again() -> None:
    tree = RadixTree()
    sizes = set()
    for i in range(300):
        nodes = [store(tree, [1, 2, i, k]) for k in range(8)]
        locks = [tree.lock(node) for node in nodes]
        for lock in locks:
            tree.unlock(lock)
        sizes.add(tree.stats()["index_bytes"])
        for node in nodes:
            tree.take(node, "resident")
        tree.check()
    assert len(sizes) == 1


def test_a_payload_lives_as_long_as_it_is_held() -> None:
    class Payload:
        pass

    tree = RadixTree()
    kept, dropped, cleared = Payload(), Payload(), Payload()
    seen = [weakref.ref(payload) for payload in (kept, dropped, cleared)]
    node = store(tree, [1, 2], payload=kept)
    other = store(tree, [1, 3], payload=dropped)
    store(tree, [4], payload=cleared)
    del kept, dropped, cleared
    found = tree.match("n", [1, 2])
    tree.take(other, "resident")
    gc.collect()
    assert [ref() is None for ref in seen] == [False, True, False]
    assert tree.get(node, "resident") is seen[0]()
    tree.clear()
    assert [ref() is None for ref in seen] == [True, True, True]
    assert found.matched == 2


def test_a_cycle_through_a_payload_is_collected() -> None:
    class Payload:
        pass

    tree = RadixTree()
    payload = Payload()
    payload.tree = tree  # type: ignore[attr-defined]
    store(tree, [1], payload=payload)
    gone = weakref.ref(tree)
    del tree, payload
    gc.collect()
    assert gone() is None


# -- what callers lend -----------------------------------------------------------------------------------------------


def test_no_buffer_stays_lent() -> None:
    tree = RadixTree()
    tokens = array("i", [1, 2, 3])
    store(tree, tokens)
    tree.match("n", tokens)
    for wrong in (array("i", [1, -1]), array("h", [1])):
        for call in (tree.insert, tree.match):
            with pytest.raises((TypeError, ValueError)):
                call("n", wrong)
        wrong.append(1)
    tokens.append(4)  # BufferError if a view were still open


def test_tokens_whose_index_changes_the_tree_and_the_list() -> None:
    tree = RadixTree()
    store(tree, [1, 2, 3, 4])

    class Sly:
        def __index__(self) -> int:
            tokens.clear()
            store(tree, [1, 2, 3, 4, *range(1000)])
            tree.clear()
            return 3

    tokens: list[Any] = [1, 2, Sly(), 4]
    assert tree.match("n", tokens).matched == 0
    tree.check()
    tokens = [1, 2, Sly(), 4]
    node = tree.insert("n", tokens)
    assert tree.tokens(node).tolist() == [1, 2, 3, 4]
    tree.check()


# -- like a Python class ---------------------------------------------------------------------------------------------

STUB = ast.parse(Path(_radix.__file__).with_name("_radix.pyi").read_text())
CLASSES = {part.name: part for part in STUB.body if isinstance(part, ast.ClassDef)}
COMPILED = [RadixTree, Node, Lock, Match, Span]


@pytest.mark.parametrize("compiled", COMPILED)
def test_the_stub_is_in_step(compiled: type) -> None:
    stub = {part.name: part for part in CLASSES[compiled.__name__].body if isinstance(part, ast.FunctionDef)}
    public = {name for name in vars(compiled) if not name.startswith("__")}
    assert public - set(stub) == set()
    assert set(stub) - set(dir(compiled)) == set()
    for name, part in stub.items():
        member = inspect.getattr_static(compiled, name)
        is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in part.decorator_list)
        assert inspect.isdatadescriptor(member) == is_property, name
        if not is_property and not name.startswith("__"):
            signature = inspect.signature(member)
            wanted = [a.arg for a in (*part.args.args, *part.args.kwonlyargs)]
            assert list(signature.parameters) == wanted, name
            keyword_only = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
            assert keyword_only == [a.arg for a in part.args.kwonlyargs], name
            defaults = [p.default for p in signature.parameters.values() if p.default is not p.empty]
            stubbed = [*part.args.defaults, *(d for d in part.args.kw_defaults if d is not None)]
            assert defaults == [ast.literal_eval(default) for default in stubbed], name


def test_the_module_exports_what_the_stub_declares() -> None:
    assert sorted(_radix.__all__) == sorted({"KINDS", *(compiled.__name__ for compiled in COMPILED)})
    assert KINDS == ("resident", "segment", "checkpoint", "logits")


@pytest.mark.parametrize("compiled", COMPILED)
def test_everything_public_has_a_docstring(compiled: type) -> None:
    assert compiled.__doc__
    for name, member in vars(compiled).items():
        if not name.startswith("_") and callable(member):
            assert member.__doc__, name
            assert member.__name__ == name
            assert member.__qualname__ == f"{compiled.__name__}.{name}"


def test_every_operation_states_its_complexity() -> None:
    for part in CLASSES["RadixTree"].body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            assert "O(" in (ast.get_docstring(part) or ""), part.name


def test_doctests() -> None:
    results = doctest.testmod(_radix)
    assert (results.failed, results.attempted) == (0, 5)


def test_handles_are_made_by_the_tree_alone() -> None:
    for handle in (Node, Lock, Match):
        with pytest.raises(TypeError, match="come from RadixTree"):
            handle()
    with pytest.raises(TypeError):
        pickle.dumps(RadixTree())


def test_handles_describe_themselves() -> None:
    tree = RadixTree()
    node = store(tree, [1, 2], "segment")
    lock = tree.lock(node)
    span = tree.segments(node)[0]
    assert repr(node) == "<Node 2 tokens in 'n'>"
    assert repr(lock) == "<Lock 2 tokens of <Node 2 tokens in 'n'>>"
    assert repr(span) == "Span(<Node 2 tokens in 'n'>, 0, 2, 2, 'p')"
    assert (
        span == Span(node, 0, 2, 2, "p"),
        span == Span(node, 0, 1, 1, "p"),
        hash(span) == hash(Span(node, 0, 2, 2, "p")),
    ) == (
        True,
        False,
        True,
    )
    assert repr(tree.match("n", [1])) == "<Match 1 tokens in 'n': resident 0, segments 1, checkpoint None>"
    tree.unlock(lock)
    tree.take(node, "segment")
    assert repr(node) == "<Node 2 tokens in 'n', gone>"
    assert repr(lock) == "<Lock 2 tokens of <Node 2 tokens in 'n', gone>, released>"
