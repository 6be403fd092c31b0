"""The cache over cells that can be counted: several open requests, and what interleaving them can break.

After every step the ledger is compared with the cells that are in use, and the memory of every lane and every
resident with what evaluating its tokens would have given.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from skippy.cache import Cache, Lease
from skippy.capability import Capability
from skippy.config import CacheConfig
from skippy.errors import ContextFull, StateError
from skippy.pool import Pool
from tests.cell_context import CellContext, chain
from tests.conftest import failing


class World:
    def __init__(
        self,
        n_ctx: int = 1000,
        lanes: int = 3,
        residents: int = 4,
        cap: int = 0,
        capability: Capability | None = None,
        **config: Any,
    ) -> None:
        self.context = CellContext(n_ctx, lanes + 1 + residents)
        self.pool = Pool(self.context, lanes=lanes, residents=residents)
        self.cache = Cache(
            self.pool,
            CacheConfig(**{"min_tokens": 4, "ram": "1MB", **config}),
            max_resident_tokens=cap,
            capability=capability,
        )
        self.open: dict[Lease, list[int]] = {}

    def check(self, exact: bool = True) -> None:
        self.cache.check()
        ledger, physical = self.cache.space.cells_in_use, self.context.physical
        assert ledger == physical if exact else ledger >= physical, f"ledger {ledger}, in use {physical}"
        for lease, tokens in self.open.items():
            assert self.context.content(lease.lane) == chain(tokens[: lease.length])
        for node in self.cache.tree.entries("resident"):
            tokens = self.cache.tree.tokens(node)
            assert self.context.content(self.cache.space.sequence_of(node)) == chain(tokens)

    def begin(self, tokens: list[int], namespace: str = "n", **options: Any) -> Lease:
        lease = self.cache.begin(namespace, np.array(tokens, np.int32), **options)
        assert lease is not None
        self.open[lease] = tokens
        return lease

    def evaluate(self, lease: Lease, upto: int | None = None) -> None:
        tokens = self.open[lease]
        end = len(tokens) if upto is None else min(upto, len(tokens))
        if end > lease.length:
            self.cache.reserve(end - lease.length)
            assert self.context.decode(lease.lane, lease.length, tokens[lease.length : end]) == 0
            lease.length = end

    def end(self, lease: Lease, record: bool = True) -> None:
        tokens = self.open.pop(lease)[: lease.length]
        if record:
            self.cache.record(lease, np.array(tokens, np.int32))
        self.cache.end(lease)

    def run(self, tokens: list[int], namespace: str = "n") -> Lease:
        lease = self.begin(tokens, namespace)
        self.check()
        self.evaluate(lease)
        self.end(lease)
        self.check()
        return lease


def path(*runs: tuple[int, int]) -> list[int]:
    return [name * 1000 + i for name, length in runs for i in range(length)]


def test_clearing_while_a_request_is_open_hands_out_no_id_that_is_in_use() -> None:
    world = World()
    world.run(path((1, 100)))
    lease = world.begin(path((1, 100), (2, 10)))
    world.cache.clear()
    world.check()
    other = world.run(path((7, 100)), "another tenant")
    assert other.restored == 0
    world.evaluate(lease)
    world.end(lease)
    world.check()
    assert world.run(path((1, 100), (2, 10), (3, 1))).restored == 110


@pytest.mark.parametrize("evict", [False, True])
def test_two_open_requests_that_extend_one_path(evict: bool) -> None:
    world = World()
    world.run(path((1, 100)))
    one, two = world.begin(path((1, 100), (2, 20))), world.begin(path((1, 100), (3, 20)))
    world.evaluate(one)
    world.evaluate(two, 110)
    world.check()
    world.end(one)
    world.check()
    if evict:
        while world.cache.space.evict_resident("test"):
            world.check()
    world.run(path((7, 50)), "another tenant")
    world.evaluate(two)
    world.check()
    world.end(two)
    world.check()
    assert world.run(path((1, 100), (2, 20), (4, 1))).restored == 120
    assert world.run(path((1, 100), (3, 20), (4, 1))).restored == 120


def test_cells_that_only_an_open_request_holds_are_found_again_and_counted_once() -> None:
    world = World()
    world.run(path((1, 300), (9, 10)))
    holder = world.begin(path((1, 300), (2, 1)))
    assert world.cache.space.evict_resident("test")
    world.check()
    again = world.begin(path((1, 300), (3, 50)))
    assert again.by_tier["ram"] == 300
    world.evaluate(again)
    world.check()
    world.end(again)
    world.check()
    assert world.context.physical == 350
    world.end(holder)
    world.check()
    assert world.context.physical == 350


def test_a_damaged_segment_below_a_resident_costs_time_and_not_the_request() -> None:
    world = World()
    world.run(path((1, 300), (2, 200)))
    world.cache.space.evict_resident("test")
    world.run(path((1, 300), (3, 30)))
    segment = next(
        world.cache.space.shelf.segment(node) for node in world.cache.tree.entries("segment") if node.length == 500
    )
    segment.block.view[-1] ^= 1
    blocker = world.begin(path((1, 300), (2, 1)))  # shares the resident's part of that path
    lease = world.begin(path((1, 300), (2, 200)))
    world.check()
    assert lease.reason == "corrupt"
    assert lease.restored == 300
    world.end(lease, record=False)
    world.end(blocker, record=False)
    assert world.begin(path((1, 300), (2, 200))).restored == 300  # and it is not offered again


def test_a_resident_whose_cells_are_gone_is_dropped_and_ram_serves() -> None:
    world = World()
    world.run(path((1, 100)))
    world.cache.space.evict_resident("test")
    world.run(path((1, 100), (2, 50)))
    for seq in world.context.sequences:
        world.context.seq_rm(seq)
    lease = world.begin(path((1, 100), (2, 50), (3, 1)))
    assert (lease.restored, lease.by_tier["ram"], lease.reason) == (100, 100, "corrupt")
    world.check()
    world.evaluate(lease)
    world.end(lease)
    assert world.run(path((1, 100), (2, 50), (3, 1))).reason == "hit"


def test_a_head_that_was_lost_does_not_keep_its_tail_from_being_saved_again() -> None:
    world = World(lanes=1)
    world.run(path((1, 100)))
    world.cache.space.evict_resident("test")
    world.run(path((1, 100), (2, 80)))
    world.cache.space.evict_resident("test")
    assert world.cache.tree.count("segment") == 2
    head = next(node for node in world.cache.tree.entries("segment") if node.length == 100)
    world.cache.space.shelf.drop(head, "segment", "corrupt")
    world.run(path((1, 100), (2, 80), (3, 90)))
    saves = []

    def fail_once(real: Any, seq: int, out: Any, flags: int = 0) -> int:
        saves.append(seq)
        if len(saves) == 1:
            raise StateError("made to fail")
        return int(real(seq, out, flags))

    with failing(world.pool, save=fail_once):
        assert world.cache.space.evict_resident("test")
    world.check()
    assert world.run(path((1, 100), (2, 80), (3, 90), (4, 1))).restored == 0  # the head was not saved
    world.cache.space.evict_resident("test")
    world.check()
    assert world.run(path((1, 100), (2, 80), (3, 90), (4, 1), (5, 1))).restored == 271


def test_nothing_is_evicted_for_what_cannot_fit_anyway() -> None:
    world = World(n_ctx=500)
    world.run(path((1, 150)))
    world.run(path((2, 150)))
    running = world.begin(path((3, 180)))
    world.evaluate(running)
    before = world.cache.tree.count("resident")
    with pytest.raises(ContextFull):
        world.begin(path((4, 330)))
    assert world.cache.tree.count("resident") == before
    world.check()
    smaller = world.begin(path((4, 310)), room=200)  # the room is a wish
    assert smaller.length == 0


def test_a_callback_that_raises_costs_nothing() -> None:
    world = World()

    def on_event(name: str, details: dict[str, Any]) -> None:
        raise RuntimeError(name)

    world.cache._on_event = on_event
    world.run(path((1, 100)))
    world.cache.space.evict_resident("test")
    assert world.run(path((1, 100), (2, 1))).restored == 100


def test_a_lane_that_cannot_be_emptied_after_a_failed_restore_costs_time_alone() -> None:
    world = World()
    world.run(path((1, 100)))
    world.cache.space.evict_resident("test")
    world.run(path((1, 100), (2, 50)))
    world.cache.space.evict_resident("test")
    tail = next(node for node in world.cache.tree.entries("segment") if node.length == 150)
    world.cache.space.shelf.segment(tail).block.view[-1] ^= 1
    stuck = []

    def refuse(real: Any, seq: int, start: int = 0, end: int = -1) -> bool:
        if seq == 0 and not stuck:
            stuck.append(seq)
            return False
        return bool(real(seq, start, end))

    with failing(world.pool, seq_rm=refuse):
        lease = world.begin(path((1, 100), (2, 50), (3, 1)))  # the head is in the lane when the tail fails
    assert stuck == [0]
    assert lease.restored == 0
    assert not world.pool.set_aside  # the second try emptied it
    world.evaluate(lease)
    world.end(lease)
    world.cache.check()


def test_prompts_that_come_once_do_not_pile_up_in_the_pool() -> None:
    """Where staying costs more than coming back, each leaves for the next one, however many there were before."""
    world = World(n_ctx=4000, lanes=1, residents=40, capability=Capability(None, bytes_per_token=28))
    speeds = world.cache.speeds
    for i in range(1, 40):
        speeds.prefilled(100, 1.0)
        speeds.restored(28 * 10**6, 1.0)  # a token takes a microsecond to restore, and a sixteenth of it to stay
        speeds.saved(28 * 10**6, 1.0)
        lease = world.begin(path((i, 100)))
        world.evaluate(lease)
        world.end(lease)
        assert world.cache.tree.cells <= 100
    assert world.cache.space.evictions["resident:price"] == 38
    assert world.begin(path((7, 100), (99, 1))).by_tier["ram"] == 100


@pytest.mark.parametrize("eviction", ["worth", "lru"])
@pytest.mark.parametrize("seed", range(12))
def test_many_requests_side_by_side(seed: int, eviction: str) -> None:
    """Random requests over a few paths: begun, continued, ended, dropped, evicted, cleared, damaged."""
    rng = random.Random(seed)
    world = World(
        n_ctx=rng.choice([220, 400, 900]), lanes=3, residents=rng.choice([1, 3, 6]), cap=rng.choice([0, 0, 120]),
        ram=rng.choice(["3KB", "12KB", "1MB"]), payload=rng.choice(["auto", "auto", "full-state", "resident-kv"]),
        eviction=eviction,
    )  # fmt: skip
    reused = 0
    for _ in range(400):
        action = rng.choices(
            ["begin", "evaluate", "end", "drop", "evict", "damage", "clear", "vanish"], [30, 40, 22, 4, 6, 2, 1, 1]
        )[0]
        if action == "begin" and len(world.open) < 3:
            tails = [(rng.randint(3, 5), rng.choice([1, 7, 30])) for _ in range(rng.randint(0, 3))]
            tokens = path((rng.randint(1, 2), 40), *tails)[: rng.randint(5, 130)]
            try:
                lease = world.begin(tokens, rng.choice("ab"), room=rng.choice([1, 20]))
            except ContextFull:
                continue
            reused += lease.restored
        elif action in ("evaluate", "end", "drop") and world.open:
            lease = rng.choice(list(world.open))
            with suppress(ContextFull):
                world.evaluate(lease, None if action == "end" else lease.length + rng.randint(1, 40))
            if action != "evaluate":
                world.end(lease, record=action == "end")
        elif action == "evict":
            world.cache.space.evict_resident("test")
        elif action == "damage" and (nodes := world.cache.tree.entries("segment")):
            world.cache.space.shelf.segment(rng.choice(nodes)).block.view[-1] ^= 1
        elif action == "clear":
            world.cache.clear(rng.choice([None, "a"]))
        elif action == "vanish" and not world.open:
            for seq in list(world.context.sequences):
                world.context.seq_rm(seq)
            world.cache.space.drop_vanished()
        # Two requests may evaluate the same tokens side by side: those cells are counted for both until they end.
        world.check(exact=False)
    for lease in list(world.open):
        world.end(lease)
    world.check()
    assert reused > 0
    world.cache.clear()
    assert (world.context.physical, world.cache.store.arena.used, len(world.cache.tree)) == (0, 0, 0)
    assert not world.pool.set_aside
