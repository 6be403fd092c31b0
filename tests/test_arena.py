from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippy.arena import ALIGNMENT, Arena, Block


def test_capacity_is_rounded_down_and_blocks_up() -> None:
    arena = Arena(1000)
    assert arena.capacity == 960
    block = arena.allocate(65)
    assert block is not None
    assert (block.size, block.reserved, len(block.view), arena.used) == (65, 128, 65, 128)
    assert block.start % ALIGNMENT == 0
    arena.free(block)
    arena.check()
    assert arena.used == 0


def test_best_fit_takes_the_smallest_gap_that_is_large_enough() -> None:
    arena = Arena(64 * 20)
    blocks = [arena.allocate(64 * n) for n in (3, 1, 2, 1, 5)]
    assert all(blocks)
    arena.free(blocks[0])
    arena.free(blocks[2])
    arena.check()
    found = arena.allocate(64 * 2)
    assert found is not None
    assert found.start == 64 * 4  # the gap of two, not that of three or the rest


def test_neighbours_join_whatever_the_order() -> None:
    arena = Arena(64 * 6)
    blocks = [arena.allocate(64) for _ in range(6)]
    for i in (0, 2, 1, 5, 3, 4):
        block = blocks[i]
        assert block is not None
        arena.free(block)
        arena.check()
    assert arena.allocate(64 * 6) is not None


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    arena = Arena(640)
    block = arena.allocate(600)
    assert block is not None
    assert arena.allocate(64) is None
    assert not arena.fits(641)
    assert arena.fits(640)
    with pytest.raises(ValueError, match="size is 0"):
        arena.allocate(0)
    arena.check()
    assert arena.used == 640


def test_giving_back_twice_or_another_arenas_block() -> None:
    arena, other = Arena(640), Arena(640)
    block, foreign = arena.allocate(64), other.allocate(64)
    assert block is not None
    assert foreign is not None
    arena.free(block)
    with pytest.raises(ValueError, match="not lent"):
        arena.free(block)
    with pytest.raises(ValueError, match="not lent"):
        arena.free(foreign)
    arena.check()


def test_a_block_that_was_given_back_cannot_be_read_any_more() -> None:
    arena = Arena(640)
    block = arena.allocate(64)
    assert block is not None
    arena.free(block)
    with pytest.raises(ValueError, match="released"):
        block.view[0]


def test_blocks_do_not_overlap_in_memory() -> None:
    arena = Arena(64 * 8)
    blocks = [arena.allocate(50) for _ in range(8)]
    for i, block in enumerate(blocks):
        assert block is not None
        block.view[:] = bytes([i]) * 50
    assert [set(block.view) for block in blocks if block] == [{i} for i in range(8)]


def test_an_arena_of_nothing_lends_nothing() -> None:
    arena = Arena(0)
    assert arena.allocate(1) is None
    assert not arena.fits(1)
    arena.check()
    with pytest.raises(ValueError, match="capacity is -1"):
        Arena(-1)


def test_closing_wants_everything_back() -> None:
    arena = Arena(640)
    block = arena.allocate(10)
    assert block is not None
    with pytest.raises(ValueError, match="1 blocks are still lent"):
        arena.close()
    arena.free(block)
    arena.release_pages()
    arena.close()
    assert arena.allocate(1) is None


@given(st.lists(st.one_of(st.integers(1, 700), st.integers(-20, -1)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_order_of_lending_and_giving_back(actions: list[int]) -> None:
    """Positive: lend so many bytes; negative: give back the block of that rank."""
    arena = Arena(4096)
    lent: list[Block] = []
    for action in actions:
        if action > 0:
            gap = max((size for size, _ in arena._gaps), default=0)
            block = arena.allocate(action)
            assert (block is not None) == (gap >= action)  # refused only where no gap is large enough
            if block is not None:
                lent.append(block)
        elif lent:
            arena.free(lent.pop(action % len(lent)))
        arena.check()
        assert arena.used == sum(block.reserved for block in lent) <= arena.capacity
        assert arena.peak >= arena.used
    for block in lent:
        arena.free(block)
    arena.check()
    assert arena.allocate(4096) is not None


def test_a_block_that_shrinks_keeps_its_beginning_and_frees_its_end() -> None:
    arena = Arena(640)
    block, after = arena.allocate(300), arena.allocate(64)
    assert block is not None
    assert after is not None
    block.view[:] = bytes(range(250)) + bytes(50)
    arena.shrink(block, 100)
    arena.check()
    assert (block.size, block.reserved, arena.used) == (100, 128, 192)
    assert bytes(block.view) == bytes(range(100))
    assert arena.allocate(192) is not None  # between the two
    arena.shrink(after, 64)
    arena.check()
    with pytest.raises(ValueError, match="has no 101 bytes"):
        arena.shrink(block, 101)


def test_gathering_moves_as_little_as_can_be() -> None:
    arena = Arena(64 * 10)
    blocks = [arena.allocate(64 * n) for n in (1, 2, 1, 3, 1, 2)]
    small = [block for block in blocks if block is not None]
    for i, block in enumerate(small):
        block.view[:] = bytes([i]) * block.size
    arena.free(small[0])
    arena.free(small[2])
    arena.free(small[4])
    assert arena.allocate(128) is None
    assert not arena.gather(256)
    assert arena.gather(128)
    arena.check()
    assert (small[1].start, small[3].start) == (0, 256)  # the shorter of the two that lie between gaps
    assert arena.allocate(128) is not None
    assert [set(small[i].view) for i in (1, 3, 5)] == [{1}, {3}, {5}]


@given(st.lists(st.tuples(st.sampled_from(["lend", "free", "shrink", "gather"]), st.integers(1, 900)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_order_of_shrinking_and_gathering_keeps_what_the_blocks_hold(actions: list[tuple[str, int]]) -> None:
    arena = Arena(4096)
    lent: dict[Block, bytes] = {}
    for name, number in actions:
        block = list(lent)[number % len(lent)] if lent else None
        if name == "lend" and (new := arena.allocate(number)) is not None:
            new.view[:] = lent[new] = random.Random(number).randbytes(number)
        elif name == "free" and block is not None:
            arena.free(block)
            del lent[block]
        elif name == "shrink" and block is not None:
            size = 1 + number % block.size
            arena.shrink(block, size)
            lent[block] = lent[block][:size]
        elif name == "gather":
            free = arena.capacity - arena.used
            assert arena.gather(number) == (-(-number // 64) * 64 <= free)
            assert number > free or max(size for size, _ in arena._gaps) >= number
        arena.check()
        assert all(bytes(block.view) == content for block, content in lent.items())
