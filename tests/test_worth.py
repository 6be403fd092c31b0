"""What leaves first: the arithmetic, what profiles of paths say, and that the cache does as they say.  All counted."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy.errors import ContextFull, Locked
from skippy.speeds import Speeds
from skippy.worth import (
    Part,
    Prices,
    Profile,
    Use,
    again,
    clip,
    fresh,
    join,
    last_part,
    worth,
)
from tests.test_cache_model import World, path

uses = st.builds(
    lambda first, gap, n: Use(first, first + gap * (n - 1), n),
    st.integers(0, 50),
    st.integers(1, 20),
    st.integers(1, 9),
)
NOW = 250


# ---- the arithmetic ------------------------------------------------------------------------------------------------


@given(uses, st.floats(0.001, 100), st.floats(1.01, 10), st.integers(1, 10**6))
def test_what_costs_more_is_worth_more_and_what_takes_more_less(
    use: Use, seconds: float, more: float, size: int
) -> None:
    value = worth(seconds, size, use, NOW)
    assert worth(seconds * more, size, use, NOW) > value
    assert worth(seconds, size * 2, use, NOW) < value


@given(uses, st.integers(1, 50))
def test_what_was_used_more_recently_is_worth_more(use: Use, later: int) -> None:
    moved = Use(use.first + later, use.last + later, use.uses)
    assert worth(1.0, 1, moved, NOW) > worth(1.0, 1, use, NOW)
    assert worth(1.0, 1, use, NOW + later) < worth(1.0, 1, use, NOW)


@given(st.integers(1, 30), st.integers(0, 29))
def test_a_second_use_promotes_until_it_is_overdue(interval: int, age: int) -> None:
    use = Use(1, 1).again(1 + interval)
    just_now = Use(use.last + age, use.last + age)
    if age <= 2 * interval:
        assert worth(1.0, 1, use, use.last + age) > worth(1.0, 1, just_now, use.last + age)
    else:
        assert worth(1.0, 1, use, use.last + age) < worth(1.0, 1, just_now, use.last + age)


def test_a_request_counts_once() -> None:
    assert Use(3, 3).again(3) == Use(3, 3)
    assert Use(3, 3).again(7) == Use(3, 7, 2)


def test_prices_until_measured_and_after() -> None:
    speeds = Speeds()
    speeds.restored(1000, 1.0)
    speeds.saved(500, 1.0)
    assert Prices.of(speeds) == Prices()
    assert Prices().restoring(1000, 10) == 10
    speeds.prefilled(100, 1.0)
    prices = Prices.of(speeds)
    assert (prices.token, prices.restored, prices.saved) == pytest.approx((0.01, 0.001, 0.002))
    assert prices.restoring(50, 10) == pytest.approx(0.05)
    assert prices.restoring(5000, 10) == pytest.approx(0.1)  # dearer than evaluating: it is evaluated


# ---- profiles ------------------------------------------------------------------------------------------------------


class Model:
    """A path of 60 tokens, of each of which every use is known."""

    def __init__(self) -> None:
        self.tokens: list[Use | None] = [None] * 60
        self.profile: Profile = ()

    def record(self, length: int, now: int) -> None:
        self.profile = join(self.profile, fresh(length, now))
        self.tokens[:length] = [
            Use(now, now) if use is None else Use(use.first, now, use.uses) for use in self.tokens[:length]
        ]

    def use(self, length: int, now: int) -> None:
        self.profile = again(self.profile, length, now)
        self.tokens[:length] = [use and use.again(now) for use in self.tokens[:length]]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60)), min_size=1, max_size=7))
def test_a_profile_says_how_each_token_was_used(actions: list[tuple[bool, int]]) -> None:
    model = Model()
    for now, (is_new, length) in enumerate(actions, 1):
        (model.record if is_new else model.use)(length, now)
    ends = [part.end for part in model.profile]
    assert ends == sorted(set(ends))
    said = [part.use for before, part in zip([0, *ends], model.profile, strict=False) for _ in range(part.end - before)]
    assert said == [use for use in model.tokens if use is not None]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80))
def test_a_profile_stays_short_and_never_claims_too_much(lengths: list[int]) -> None:
    profile = fresh(1000, 0)
    for now, length in enumerate(lengths, 1):
        profile = again(profile, length, now)
        assert len(profile) <= 8
        assert profile[-1].end == 1000
    for part in profile:
        assert part.use.uses <= 1 + sum(length >= part.end for length in lengths)


def test_clipping_joining_and_the_last_part() -> None:
    hot, cold = Use(1, 9, 4), Use(9, 9)
    profile = (Part(10, hot), Part(30, cold))
    assert clip(profile, 20) == (Part(10, hot), Part(20, cold))
    assert clip(profile, 30, 10) == (Part(30, cold),)
    assert clip(profile, 10) == (Part(10, hot),)
    assert last_part(profile, 0, 30) == (10, cold)
    assert last_part(profile, 0, 10) == (0, hot)
    assert last_part(profile, 5, 10) == (5, hot)
    assert last_part(profile, 0, 40) == (30, Use(0, 0))
    assert last_part((), 3, 40) == (3, Use(0, 0))
    assert join(profile, ()) == profile == join((), profile)


# ---- the cache -----------------------------------------------------------------------------------------------------


def tight(**config: Any) -> World:
    """A pool of ten prompts of 100 tokens, and RAM for as many; 28 bytes a token, 64 for a state and its rounding."""
    config = {"ram": 10 * (2800 + 128), "min_tokens": 16, **config}
    return World(n_ctx=1110, lanes=1, residents=40, cap=1000, **config)


def system_prompt_among_one_shots(world: World) -> list[int]:
    """What is restored of a system prompt that is used after every 20 prompts which come once."""
    found = []
    for i in range(200):
        world.run(path((100 + i, 100)))
        if i % 20 == 0:
            found.append(world.run(path((1, 100), (400 + i, 5))).restored)
    return found


@pytest.mark.parametrize("tier", [{}, {"ram": 0}, {"payload": "full-state"}])
def test_prompts_that_come_once_do_not_displace_what_is_used_again_and_again(tier: dict[str, Any]) -> None:
    """The second use comes too late for it to be there still, but it promotes: every one after it is served."""
    assert system_prompt_among_one_shots(tight(eviction="worth", **tier))[2:] == [100] * 8
    assert system_prompt_among_one_shots(tight(eviction="lru", **tier)) == [0] * 10


def test_what_was_evicted_and_comes_again_is_used_for_the_second_time() -> None:
    world = tight(payload="resident-kv")
    world.run(path((1, 100)))
    for i in range(12):
        world.run(path((100 + i, 100)))
    assert world.run(path((1, 100), (2, 5))).restored == 0
    for i in range(12):
        world.run(path((200 + i, 100)))
    assert world.run(path((1, 100), (3, 5))).restored == 100


def test_of_a_long_prompt_the_end_leaves_and_the_beginning_stays() -> None:
    world = tight(payload="resident-kv")
    world.run(path((1, 900)))
    world.run(path((2, 300)))
    assert world.cache.tree.cells <= 1000
    assert world.run(path((1, 900))).restored >= 600
    assert world.cache.space.evictions["resident:resident_cap"] > 0


def test_of_a_long_segment_the_end_leaves_and_the_beginning_stays() -> None:
    world = tight(payload="full-state")
    world.run(path((1, 900)))
    world.run(path((2, 300)))
    assert world.cache.space.evictions["segment:cut"] == 1
    assert 600 <= world.run(path((1, 900))).restored < 900
    for node in world.cache.tree.entries("segment"):
        world.cache.store.verify(world.cache.shelf.segment(node))


def test_a_chain_loses_its_outer_segments_before_its_inner_ones() -> None:
    """Whatever leaves, what is left of each path begins at its beginning."""
    rng = random.Random(3)
    for eviction in ("worth", "lru"):
        world = World(n_ctx=900, lanes=1, residents=4, ram="6KB", min_tokens=4, payload="full-state", eviction=eviction)
        for _ in range(150):
            tails = [(rng.randint(3, 9), rng.choice([5, 20, 40])) for _ in range(rng.randint(0, 4))]
            world.run(path((rng.randint(1, 2), 30), *tails))
            for node in world.cache.tree.entries("segment"):
                spans = world.cache.tree.segments(node)
                assert spans[0].start == 0
                assert all(one.reach == other.start for one, other in itertools.pairwise(spans))
        assert world.cache.space.evictions["segment:bytes"] > 20


def test_what_several_paths_need_is_saved_apart_from_what_one_needs() -> None:
    world = tight(ram="1MB")
    world.run(path((1, 100), (2, 50)))
    world.run(path((1, 100), (3, 50)))
    while world.cache.space.evict_resident("test"):
        world.check()
    assert sorted(node.length for node in world.cache.tree.entries("segment")) == [100, 150, 150]


def test_what_is_pinned_never_leaves() -> None:
    for eviction in ("worth", "lru"):
        world = tight(eviction=eviction)
        world.run(path((1, 300)))
        world.run(path((2, 300)))
        saved = world.cache.tree.match("n", np.array(path((2, 300)), np.int32)).resident
        assert saved is not None
        world.cache.shelf.save_path(saved, world.cache.space.sequence_of(saved))
        world.cache.space.drop_resident(saved)
        held = [world.cache.tree.match("n", np.array(path((name, 300)), np.int32)) for name in (1, 2)]
        assert held[0].resident is not None
        locks = [world.cache.tree.lock(held[0].resident), world.cache.tree.lock(held[1].segments[-1].node)]
        for i in range(60):
            world.run(path((100 + i, 100), (50, 20)))
        for name in (1, 2):
            assert world.cache.lookup("n", np.array(path((name, 300)), np.int32)) == 299
        with pytest.raises(Locked):
            world.cache.space.drop_resident(held[0].resident)
        with pytest.raises(ContextFull):
            world.begin(path((7, 900)))
        world.check()
        for lock in locks:
            world.cache.tree.unlock(lock)


def test_what_is_pinned_goes_into_ram_whatever_has_to_leave_there() -> None:
    world = tight(ram=3000)
    for i in range(4):
        world.run(path((1, 100), (10 + i, 1)))  # used again and again
    while world.cache.space.evict_resident("test"):
        pass
    world.run(path((2, 100)))
    node = world.cache.tree.match("n", np.array(path((2, 100)), np.int32)).resident
    assert node is not None
    world.cache.shelf.save_path(node, world.cache.space.sequence_of(node), weigh=True)
    assert world.cache.tree.match("n", np.array(path((2, 100)), np.int32)).segment_length == 0
    world.cache.shelf.save_path(node, world.cache.space.sequence_of(node))
    assert world.cache.tree.match("n", np.array(path((2, 100)), np.int32)).segment_length == 100


def test_what_is_dearer_to_restore_than_to_evaluate_is_not_saved_until_it_is_tried_again() -> None:
    world = tight(ram="1MB")
    world.cache.space.bytes_per_cell = 28
    world.cache.speeds.prefilled(1000, 1.0)
    world.cache.speeds.restored(28 * 500, 1.0)  # half as fast
    world.run(path((1, 100)))
    assert world.cache.space.evict_resident("test")
    assert world.cache.tree.count("segment") == 0
    for i in range(8):
        world.run(path((2 + i, 100)))
        world.cache.space.evict_resident("test")
    assert world.cache.tree.count("segment") > 0


def test_a_segment_that_is_in_the_pool_too_leaves_before_one_that_is_not() -> None:
    world = tight(ram=2 * (2800 + 128))
    for speeds in [world.cache.speeds]:
        speeds.prefilled(100, 1.0)
        speeds.saved(10**6, 1.0)
        speeds.restored(10**6, 1.0)
    world.run(path((1, 100)))
    world.cache.space.evict_resident("test")
    world.run(path((2, 100)))
    node = world.cache.tree.match("n", np.array(path((2, 100)), np.int32)).resident
    assert node is not None
    world.cache.shelf.save_path(node, world.cache.space.sequence_of(node))  # more recent, and resident
    world.run(path((3, 100)))
    third = world.cache.tree.match("n", np.array(path((3, 100)), np.int32)).resident
    assert third is not None
    world.cache.shelf.save_path(third, world.cache.space.sequence_of(third))
    kept = {int(world.cache.tree.tokens(node)[0]) // 1000 for node in world.cache.tree.entries("segment")}
    assert 1 in kept
    assert 3 in kept
