"""Saved segments and their budget, without a model: the context is a stand-in whose states are made of numbers."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from skippy._radix import RadixTree
from skippy.capability import Capability
from skippy.errors import StateError
from skippy.layout import MAGIC, Layout
from skippy.pool import Pool
from skippy.segments import RamStore
from skippy.space import Space

MB = 1_000_000


class NumberedContext:
    """Sequences that are ranges of positions, and states of `bytes_per_token` bytes for each of them."""

    n_ctx, n_batch, n_seq_max = 10_000, 512, 8

    def __init__(self, bytes_per_token: int) -> None:
        self.bytes_per_token = bytes_per_token
        self.ranges: dict[int, tuple[int, int]] = {}
        self.saves = 0

    def seq_cp(self, src: int, dst: int, start: int = 0, end: int = -1) -> None:
        begin = min(start, self.ranges[dst][0]) if dst in self.ranges else start
        self.ranges[dst] = (begin, self.ranges[src][1] if end == -1 else end)

    def seq_rm(self, seq: int, start: int = 0, end: int = -1) -> bool:
        self.ranges.pop(seq, None)
        return True

    def seq_pos_min(self, seq: int) -> int:
        return self.ranges[seq][0] if seq in self.ranges else -1

    def seq_pos_max(self, seq: int) -> int:
        return self.ranges[seq][1] - 1 if seq in self.ranges else -1

    def state_size(self, seq: int, flags: int = 0) -> int:
        start, end = self.ranges[seq]
        return self.bytes_per_token * (end - start)

    def save(self, seq: int, out: Any, flags: int = 0) -> int:
        self.saves += 1
        start, end = self.ranges[seq]
        head = struct.pack("<IiII", MAGIC, seq, 1, end - start)
        head += b"".join(struct.pack("<iIi", position, 1, seq) for position in range(start, end))
        head += struct.pack("<II", 0, 0)
        out[: len(head)] = head
        return len(out)

    def load(self, seq: int, data: Any, flags: int = 0) -> None:
        n = len(data) // self.bytes_per_token
        (first,) = struct.unpack_from("<i", data, 16)
        self.ranges[seq] = (first, first + n)

    def decode(self, *args: Any) -> int:
        return 0


class Shelf:
    """A tree, a pool and a store, and paths that are saved as soon as they are named."""

    def __init__(self, capacity: int, tokens: int, size: int, by_worth: bool = True) -> None:
        assert size % tokens == 0
        self.context = NumberedContext(size // tokens)
        self.tokens = tokens
        self.pool = Pool(self.context, lanes=1, residents=4)
        self.tree = RadixTree()
        self.store = RamStore(capacity)
        self.space = Space(
            self.tree,
            self.pool,
            self.store,
            lane_cells=lambda: 0,
            keep_saved=True,
            emit=lambda *args, **kwargs: None,
            by_worth=by_worth,
        )

    def save(self, name: int, tokens: int | None = None) -> bool:
        path = [name * 1000 + i for i in range(tokens or self.tokens)]
        self.context.ranges[0] = (0, len(path))
        node = self.tree.insert("ns", path)
        self.space.shelf.save_path(node, 0)
        self.tree.check()
        self.store.arena.check()
        assert self.store.arena.used == self.tree.bytes_of("segment")
        return self.tree.match("ns", path).segment_length == len(path)


@pytest.mark.parametrize("by_worth", [True, False])
def test_t11_a_cap_of_ten_megabytes(by_worth: bool) -> None:
    shelf = Shelf(10 * MB, tokens=100, size=3 * MB, by_worth=by_worth)
    for i in range(1, 11):
        assert shelf.save(i)
        assert shelf.store.arena.peak <= 10 * MB
        assert shelf.tree.count("segment") == min(i, 3)
    assert shelf.space.evictions == {"segment:bytes": 7}
    saves = shelf.context.saves

    assert not shelf.save(11, tokens=400)  # 12 MB: refused before anything is allocated or evicted for it
    assert shelf.context.saves == saves
    assert shelf.tree.count("segment") == 3
    assert shelf.space.evictions == {"segment:bytes": 7, "segment:refused": 1}
    assert [shelf.tree.match("ns", [i * 1000 + j for j in range(100)]).segment_length for i in (7, 8, 9, 10)] == [
        0,
        100,
        100,
        100,
    ]

    for node in shelf.tree.entries("segment"):
        shelf.space.shelf.drop(node, "segment", "cleared")
    assert (shelf.store.arena.used, len(shelf.tree)) == (0, 0)


@pytest.mark.parametrize("by_worth", [True, False])
def test_t11_thirty_two_states_of_one_megabyte(by_worth: bool) -> None:
    shelf = Shelf(10 * MB, tokens=50, size=MB, by_worth=by_worth)
    for i in range(32):
        assert shelf.save(i + 1)
        assert shelf.store.arena.peak <= 10 * MB
    kept = [i for i in range(32) if shelf.tree.match("ns", [(i + 1) * 1000 + j for j in range(50)]).segment_length]
    assert kept == list(range(22, 32))


@pytest.mark.parametrize("by_worth", [True, False])
def test_what_is_locked_is_never_evicted_for_bytes(by_worth: bool) -> None:
    shelf = Shelf(7 * MB, tokens=100, size=3 * MB, by_worth=by_worth)
    assert shelf.save(1)
    assert shelf.save(2)
    lock = shelf.tree.lock(shelf.tree.entries("segment")[0])
    assert shelf.save(3)
    kept = {node.length and int(shelf.tree.tokens(node)[0]) // 1000 for node in shelf.tree.entries("segment")}
    assert kept == {1, 3}
    other = shelf.tree.lock(shelf.tree.match("ns", [3000 + j for j in range(100)]).segments[0].node)
    assert not shelf.save(4)
    shelf.tree.unlock(lock)
    shelf.tree.unlock(other)
    assert shelf.save(4)


def test_a_state_that_is_not_as_long_as_announced_is_not_kept() -> None:
    shelf = Shelf(10 * MB, tokens=100, size=3 * MB)
    shelf.context.save = lambda seq, out, flags=0: len(out) - 1  # type: ignore[method-assign, assignment]
    shelf.context.ranges[0] = (0, 100)
    with pytest.raises(StateError, match="took 2999999 bytes, 3000000 were announced"):
        shelf.store.save(shelf.pool, 0, 0, 100)
    assert shelf.store.arena.used == 0
    assert not shelf.save(1)
    assert shelf.space.failures == {"save": 1}


def test_positions_are_checked_when_saved() -> None:
    shelf = Shelf(10 * MB, tokens=100, size=3 * MB)
    real = shelf.context.save

    def shifted(seq: int, out: Any, flags: int = 0) -> int:
        written = real(seq, out, flags)
        out[16:20] = struct.pack("<i", 7777)
        return written

    shelf.context.save = shifted  # type: ignore[method-assign]
    shelf.context.ranges[0] = (0, 100)
    with pytest.raises(StateError, match="100 cells at positions 1 to 7777, expected 0 to 99"):
        shelf.store.save(shelf.pool, 0, 0, 100)
    assert shelf.store.arena.used == 0


# --- checkpoints ------------------------------------------------------------------------------------------------------


class PointContext(NumberedContext):
    """A recurrent model: a state of 1,000 bytes for each sequence, whatever its length, and nothing else."""

    def __init__(self) -> None:
        super().__init__(1)

    def state_size(self, seq: int, flags: int = 0) -> int:
        return 1000

    def save(self, seq: int, out: Any, flags: int = 0) -> int:
        out[: len(out)] = bytes([self.ranges[seq][1] % 251]) * len(out)
        return len(out)


def recurrent(capacity: int) -> tuple[PointContext, RadixTree, Space]:
    context = PointContext()
    shape = Capability(None, point_state_bytes=1000, layout=Layout(0, opaque=True))
    pool = Pool(context, lanes=1, residents=0, shape=shape)
    store = RamStore(capacity, shape)
    tree = RadixTree()
    return (
        context,
        tree,
        Space(tree, pool, store, lane_cells=lambda: 0, keep_saved=True, emit=lambda *args, **kwargs: None),
    )


def test_checkpoints_of_a_recurrent_model_may_take_all_there_is() -> None:
    context, tree, space = recurrent(32 * 1024)
    path = np.arange(4000, dtype=np.int32)
    for n in range(100, 4001, 100):
        context.ranges[0] = (0, n)
        assert space.shelf.save_point("n", path[:n], 0)
        assert space.store.arena.used == tree.bytes_of("checkpoint") <= space.store.arena.peak <= 32 * 1024
    assert tree.count("segment") == 0
    each = tree.bytes_of("checkpoint") // tree.count("checkpoint")
    assert 1000 <= each <= 1024
    assert tree.count("checkpoint") == 32 * 1024 // each
    assert space.evictions == {"checkpoint:bytes": 40 - tree.count("checkpoint")}
    # They lie closer together towards the end, where prompts part; none is refused, the last one least of all.
    kept = [0, *sorted(node.length for node in tree.entries("checkpoint"))]
    gaps = [b - a for a, b in pairwise(kept)]
    assert kept[-10:] == list(range(3100, 4001, 100))
    assert max(gaps) == gaps[0] <= 500
    # The same again is there already, and costs nothing.
    saves = space.store.saves
    assert space.shelf.save_point("n", path, 0)
    assert space.store.saves == saves


def test_inner_checkpoints_of_one_path_go_before_its_ends() -> None:
    context, tree, space = recurrent(8 * 1024)
    shared, one, two = list(range(100)), list(range(1000, 1100)), list(range(2000, 2100))
    for path in (shared, shared + one, shared + two, shared + two + one, shared + two + one + two):
        context.ranges[0] = (0, len(path))
        assert space.shelf.save_point("n", np.array(path, np.int32), 0)
    before = tree.count("checkpoint")
    context.ranges[0] = (0, 50)
    others = 0
    while tree.count("checkpoint") == before + others:
        others += 1
        assert space.shelf.save_point("n", np.arange(5000 + 100 * others, 5050 + 100 * others, dtype=np.int32), 0)
    kept = {node.length for node in tree.entries("checkpoint")}
    assert 100 in kept  # two paths go on from it
    assert 200 in kept  # the end of one of them, and both ends of a chain
    assert 400 in kept


def test_a_checkpoint_of_another_length_than_its_sequence_is_refused() -> None:
    context, tree, space = recurrent(64 * 1024)
    context.ranges[0] = (0, 99)
    assert not space.shelf.save_point("n", np.arange(100, dtype=np.int32), 0)
    assert space.failures == {"save": 1}
    assert (tree.count("checkpoint"), space.store.arena.used) == (0, 0)


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_leaves() -> None:
    context, tree, space = recurrent(2 * 1024)
    context.ranges[0] = (0, 100)
    assert space.shelf.save_point("n", np.arange(100, dtype=np.int32), 0)
    kept = tree.count("checkpoint")
    context.state_size = lambda seq, flags=0: 4000  # type: ignore[method-assign]
    assert not space.shelf.save_point("n", np.arange(500, 600, dtype=np.int32), 0)
    assert tree.count("checkpoint") == kept == 1
    assert space.evictions == {"checkpoint:refused": 1}


def test_damaged_logits_are_not_read() -> None:
    store = RamStore(1 << 20)
    kept = store.save_logits(np.arange(100, dtype=np.float32))
    assert kept is not None
    assert np.array_equal(kept.read(), np.arange(100, dtype=np.float32))
    kept.block.view[33] ^= 1
    with pytest.raises(StateError, match="the saved logits does not match its checksum"):
        kept.read()
    store.drop(kept)
    assert store.arena.used == 0
