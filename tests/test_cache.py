"""Plan, restore, record and evict, on a real context, without a decode loop around them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from skippy.cache import Cache, Lease
from skippy.config import CacheConfig
from skippy.demo.evidence import Witness
from skippy.errors import ContextFull, Locked, NativeError, StateError
from skippy.model import ModelContext
from skippy.pool import Pool
from tests.conftest import THREADS, evaluate, failing, state_of, words

Fresh = Callable[..., ModelContext]


class Driver:
    """A cache over a context, and requests that only evaluate their prompt."""

    def __init__(self, context: ModelContext, *, residents: int = 5, cap: int = 0, **config: Any) -> None:
        self.context = context
        self.pool = Pool(context.sequences, lanes=2, residents=residents)
        self.cache = Cache(
            self.pool, CacheConfig(**{"min_tokens": 8, "ram": "64MiB", **config}), max_resident_tokens=cap
        )
        self.witness = Witness(context.sequences)
        self.cache.observer = self.witness

    def begin(self, tokens: list[int], namespace: str = "ns", **options: Any) -> Lease:
        lease = self.cache.begin(namespace, np.array(tokens, np.int32), **options)
        assert lease is not None
        assert self.witness.wrong == 0
        self.cache.check()
        return lease

    def finish(self, lease: Lease, tokens: list[int]) -> Lease:
        evaluate(self.context, lease.lane, lease.length, tokens[lease.length :])
        lease.length = len(tokens)
        self.cache.check()
        self.cache.record(lease, np.array(tokens, np.int32))
        self.cache.end(lease)
        self.cache.check()
        return lease

    def run(self, tokens: list[int], namespace: str = "ns", **options: Any) -> Lease:
        """One request; afterwards everything agrees and the restored tokens were the evaluated ones."""
        return self.finish(self.begin(tokens, namespace, **options), tokens)

    def evict_all(self) -> None:
        while self.cache.space.evict_resident("test"):
            self.cache.check()


@pytest.fixture
def driver(fresh: Fresh) -> Iterator[Callable[..., Driver]]:
    made: list[Driver] = []

    def make(n_ctx: int = 1024, **settings: Any) -> Driver:
        made.append(Driver(fresh(n_ctx=n_ctx, n_threads=THREADS), **settings))
        return made[-1]

    yield make
    for each in made:
        each.cache.check()
        each.cache.clear()
        assert each.cache.store.arena.used == 0
        assert each.cache.space.cells_in_use == each.pool.lost_cells
        assert each.cache.tree.stats()["nodes"] == 0


def test_t3_the_same_prompt_twice(driver: Callable[..., Driver]) -> None:
    d = driver(min_tokens=64)
    tokens = words(64)
    first = d.run(tokens)
    assert (first.restored, first.reason) == (0, "never_seen")
    second = d.run(tokens)
    assert (second.restored, second.reason, second.by_tier["resident"]) == (63, "hit", 63)


def test_t4_a_short_prompt_over_a_long_stored_path(driver: Callable[..., Driver]) -> None:
    d = driver(min_tokens=64)
    system, rest, other = words(64), words(640, 1), words(16, 2)
    d.run(system + rest)
    lease = d.run(system + other)
    assert (lease.restored, lease.reason, lease.diverged_at) == (64, "partial", 64)
    assert d.cache.tree.match("ns", np.array(system + rest, np.int32)).resident_length == 704
    assert d.cache.tree.cells == 704 + 16
    again = d.run(system + rest)
    assert again.restored == 703


def test_e4_the_head_of_a_stored_path(driver: Callable[..., Driver]) -> None:
    d = driver()
    tokens = words(64)
    d.run(tokens)
    lease = d.run(tokens[:40])
    assert (lease.restored, lease.reason) == (39, "hit")
    assert d.cache.tree.cells == 64  # the head is covered by the longer path, nothing new is kept
    assert d.cache.tree.count("resident") == 1


@pytest.mark.parametrize("evict", [False, True], ids=["resident", "ram"])
def test_e7_prompts_that_part_step_by_step(driver: Callable[..., Driver], evict: bool) -> None:
    d = driver(min_tokens=1)
    one = words(60)
    a, b, c = one, one[:50] + words(10, 5), one[:30] + words(30, 6)
    for tokens, restored in ((a, 0), (a, 59), (b, 50), (c, 30)):
        lease = d.run(tokens)
        assert lease.restored == restored
        if evict:
            d.evict_all()
            assert d.cache.tree.cells == 0


def test_e8_growing_prompts_in_alternation(driver: Callable[..., Driver]) -> None:
    d = driver()
    left, right = words(60, 1), words(60, 2)
    known = {1: 0, 2: 0}
    for n in range(41, 61):
        for which, source in ((1, left), (2, right)):
            lease = d.run(source[:n])
            assert lease.restored == min(known[which], n - 1)
            known[which] = n
    assert d.cache.tree.count("resident") == 2  # a growing path keeps one sequence id
    assert d.cache.tree.cells == 120


def test_below_min_tokens_is_neither_stored_nor_restored(driver: Callable[..., Driver]) -> None:
    d = driver(min_tokens=32)
    tokens = words(31)
    d.run(tokens)
    assert len(d.cache.tree) == 0
    d.run(words(40, 3))
    lease = d.run([*words(40, 3)[:31], 5, 6])
    assert (lease.restored, lease.reason) == (0, "below_min_tokens")


def test_segments_are_deltas_and_the_system_prompt_is_saved_once(driver: Callable[..., Driver]) -> None:
    d = driver(n_ctx=2048)
    system = words(200)
    tails = [words(40, i) for i in (1, 2, 3)]
    for tail in tails:
        d.run(system + tail)
    assert d.cache.tree.cells == 200 + 3 * 40  # in the pool once
    d.evict_all()
    per_token = 23040 + 12  # SmolLM2: 30 layers of 2 x 192 half floats, and the cell's entry
    tokens_saved = 200 + 3 * 40
    overhead = 744 + 64  # header and layer entries, and the arena's rounding
    assert tokens_saved * per_token <= d.cache.store.arena.used <= tokens_saved * per_token + 4 * overhead
    assert d.cache.tree.count("segment") == 4  # what they share, and the tail of each
    for tail in tails:
        lease = d.run([*system, *tail, 1])
        assert (lease.restored, lease.by_tier["resident"] + lease.by_tier["ram"]) == (240, 240)


def test_a_growing_path_stays_a_short_chain(driver: Callable[..., Driver]) -> None:
    d = driver(n_ctx=2048)
    tokens = words(640)
    for n in range(40, 641, 40):
        lease = d.run(tokens[:n])
        assert lease.restored == max(0, n - 40)
        d.evict_all()
    spans = d.cache.tree.match("ns", np.array(tokens, np.int32)).segments
    assert [span.start for span in spans] == [0, *[span.end for span in spans[:-1]]]
    assert spans[-1].end == 640
    assert len(spans) <= 5  # 16 turns, O(log) segments
    assert d.cache.store.arena.used < 640 * 23052 + 5 * 2000


def test_a_plan_mixes_tiers(driver: Callable[..., Driver]) -> None:
    d = driver(n_ctx=2048)
    system, tail = words(100), words(60, 1)
    d.run(system + tail)
    d.evict_all()
    d.run(system + words(30, 2))  # brings the system prompt back into the pool
    lease = d.run([*system, *tail, 9])
    assert lease.by_tier == {"resident": 100, "ram": 60, "disk": 0}


def weighing(d: Driver, *, restore: float) -> Driver:
    """Let `d` know what moving costs: a cell takes 23,052 bytes, 1 GB is saved in a second, `restore` come back."""
    d.cache.space.bytes_per_cell = 23_052
    d.cache.speeds.saved(10**9, 1.0)
    d.cache.speeds.restored(int(restore), 1.0)
    return d


def test_what_costs_more_than_coming_back_leaves_before_the_next_request(driver: Callable[..., Driver]) -> None:
    d = weighing(driver(), restore=1e9)
    first, second = words(200), words(300, 1)
    d.run(first)
    saves = d.cache.store.saves
    assert saves == 1  # ahead, after the answer: at the next request nothing is left to be saved
    lease = d.begin(second)
    assert d.cache.store.saves == saves
    assert d.cache.tree.count("resident") == 0
    assert d.cache.space.evictions["resident:price"] == 1
    d.finish(lease, second)
    assert d.run(first).by_tier == {"resident": 0, "ram": 199, "disk": 0}


def test_what_the_next_request_uses_stays(driver: Callable[..., Driver]) -> None:
    d = weighing(driver(), restore=1e9)
    first = words(200)
    d.run(first)
    lease = d.run(first + words(300, 1))
    assert lease.by_tier["resident"] == 200
    assert d.cache.space.evictions["resident:price"] == 0


def test_what_would_come_back_slowly_stays(driver: Callable[..., Driver]) -> None:
    d = weighing(driver(), restore=1e6)
    for _ in range(1000):  # measured: a cell of others costs 10 ns a token
        for others in (0, 1000):
            d.cache.speeds.decoded(others, 100, 5e-3 + 1e-8 * others)
    first, second = words(200), words(300, 1)
    d.run(first)
    d.run(second)
    assert d.cache.store.saves == 0
    assert d.run(first).by_tier["resident"] == 199


def test_nothing_leaves_by_price_that_ram_has_no_room_for(driver: Callable[..., Driver]) -> None:
    d = weighing(driver(ram="1MiB"), restore=1e9)
    first, second = words(200), words(300, 1)
    d.run(first)
    d.run(second)
    assert d.run(first).by_tier["resident"] == 199


def test_keeping_can_be_asked_for(driver: Callable[..., Driver]) -> None:
    d = weighing(driver(residency="keep"), restore=1e9)
    first = words(200)
    d.run(first)
    d.run(words(300, 1))
    assert d.run(first).by_tier["resident"] == 199
    assert d.cache.store.saves == 0


def test_e15_a_path_longer_than_the_resident_cap(driver: Callable[..., Driver]) -> None:
    d = driver(cap=128)
    tokens = words(300)
    d.run(tokens)
    assert d.cache.tree.cells == 128
    lease = d.run([*tokens, 7])
    assert lease.by_tier == {"resident": 128, "ram": 172, "disk": 0}


def test_the_resident_cap_is_hard(driver: Callable[..., Driver]) -> None:
    d = driver(cap=128)
    for i in range(4):
        d.run(words(90, i))
        assert d.cache.tree.cells <= 128
    assert d.run([*words(90, 0), 1]).by_tier["ram"] == 90


def test_entries_are_a_hard_cap(driver: Callable[..., Driver]) -> None:
    d = driver(residents=2)
    for i in range(5):
        d.run(words(40, i))
        assert d.cache.tree.count("resident") <= 2
    assert d.cache.space.evictions["resident:entries"] == 3
    assert [d.run([*words(40, i), 1]).restored for i in range(5)] == [40] * 5


@pytest.mark.parametrize(
    ("name", "shared", "prompt", "evicted"),
    [("a", 0, 200, 2), ("b", 0, 400, 3), ("c", 100, 200, 0)],
)
def test_t9_room_is_made_before_the_first_decode(
    driver: Callable[..., Driver], name: str, shared: int, prompt: int, evicted: int
) -> None:
    d = driver(n_ctx=512)
    assert d.pool.n_cells == 512
    head = words(shared, 50)
    for i in range(3):
        d.run(head + words(150 - shared, i))
    assert d.cache.space.cells_in_use == (450 if not shared else 250)
    lease = d.begin(words(prompt, 9), room=32)
    assert d.cache.space.evictions["resident:cells"] == evicted
    assert d.cache.space.cells_in_use + prompt + 32 <= 512
    d.finish(lease, words(prompt, 9))
    assert [d.run([*head, *words(150 - shared, i), 3]).restored for i in range(3)] == [150] * 3


def test_the_ledger_is_what_llama_cpp_has(driver: Callable[..., Driver]) -> None:
    """Fill the pool to its last cell: the ledger's free cells fit, one more does not."""
    d = driver(n_ctx=256, residents=4)
    d.run(words(60, 1))
    d.run([*words(60, 1)[:40], *words(30, 2)])
    lease = d.begin([*words(60, 1)[:50], *words(10, 3)])
    free = 256 - d.cache.space.cells_in_use
    assert free == 256 - (60 + 30)  # what the lane holds is the resident's
    evaluate(d.context, lease.lane, 50, np.ones(free, np.int32))
    assert d.context.sequences.decode(lease.lane, 50 + free, np.ones(1, np.int32)) == 1
    d.context.sequences.seq_rm(lease.lane, 50)
    d.cache.end(lease)


def test_cells_of_an_evicted_resident_that_a_lane_shares_are_still_counted(driver: Callable[..., Driver]) -> None:
    d = driver(n_ctx=256)
    d.run(words(100))
    lease = d.begin([*words(100)[:60], 1, 2])
    assert d.cache.space.cells_in_use == 100
    assert d.cache.space.evict_resident("test")
    assert d.cache.space.cells_in_use == 60
    d.cache.check()
    d.finish(lease, [*words(100)[:60], 1, 2])
    assert d.cache.space.cells_in_use == 62


def test_e12_what_a_request_uses_is_not_evicted(driver: Callable[..., Driver]) -> None:
    d = driver()
    d.run(words(64))
    d.evict_all()
    node = d.cache.tree.entries("segment")[0]
    lock = d.cache.tree.lock(node, 10)
    assert d.cache.tree.victim("segment") is None
    with pytest.raises(Locked):
        d.cache.space.shelf.drop(node, "segment", "test")
    with pytest.raises(Locked):
        d.cache.tree.take(node, "segment")
    d.cache.check()
    d.cache.tree.unlock(lock)
    d.cache.space.shelf.drop(node, "segment", "test")
    assert d.cache.store.arena.used == 0


def test_namespaces_share_nothing(driver: Callable[..., Driver]) -> None:
    d = driver()
    tokens = words(64)
    for namespace in ("a", "b", "c"):
        lease = d.run(tokens, namespace)
        assert (lease.restored, lease.reason) == (0, "never_seen")
    for namespace in ("a", "b", "c"):
        assert d.run(tokens, namespace).restored == 63
    d.cache.clear("b")
    assert [d.run(tokens, namespace).restored for namespace in ("a", "b", "c")] == [63, 0, 63]


# -- damaged and failing state ------------------------------------------------------------------------------


def flip_a_byte(d: Driver, segment: Any) -> None:
    segment.block.view[len(segment.block.view) // 2] ^= 1


def shorten(d: Driver, segment: Any) -> None:
    segment.block.view = segment.block.view[:-1]


def empty(d: Driver, segment: Any) -> None:
    segment.block.view = segment.block.view[:0]


def other_positions(d: Driver, segment: Any) -> None:
    import xxhash

    segment.block.view[16:20] = (5000).to_bytes(4, "little")
    segment.checksum = xxhash.xxh3_64_intdigest(segment.block.view)


def another_type(d: Driver, segment: Any) -> None:
    """The state of a q8_0 context, with a checksum that fits: llama.cpp itself has to refuse it."""
    import xxhash

    other = d.context.model.new_context(n_ctx=256, n_seq_max=2, type_k="q8_0", type_v="q8_0")
    evaluate(other, 0, 0, words(64))
    state = state_of(other, 0)
    other.close()
    assert len(state) < len(segment.block.view)
    segment.block.view = memoryview(state)
    segment.checksum = xxhash.xxh3_64_intdigest(state)


@pytest.mark.parametrize("damage", [flip_a_byte, shorten, empty, other_positions, another_type])
def test_t8_damaged_state_is_dropped_and_never_offered_again(
    driver: Callable[..., Driver], damage: Callable[[Driver, Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    d = driver()
    stored, other = words(64), words(50, 1)
    d.run(stored)
    d.evict_all()
    d.run(other)
    running = d.begin([*other, 1])  # a live conversation beside it
    before = state_of(d.context, running.lane)
    node = d.cache.tree.entries("segment")[0]
    segment = d.cache.tree.get(node, "segment")
    view = segment.block.view
    damage(d, segment)
    with caplog.at_level(logging.WARNING, "skippy"):
        lease = d.cache.begin("ns", np.array([*stored, 1], np.int32))
    assert lease is not None
    segment.block.view = view
    assert (lease.restored, lease.length, lease.reason) == (0, 0, "corrupt")
    assert "failed its check" in caplog.text
    assert d.cache.tree.count("segment") == 0
    assert d.cache.store.arena.used == 0
    assert d.cache.space.failures["restore"] == 1
    assert state_of(d.context, running.lane) == before
    d.finish(lease, [*stored, 1])
    d.finish(running, [*other, 1])
    assert d.run([*stored, 1, 2]).restored == 65


def test_a_damaged_tail_leaves_the_head_usable(driver: Callable[..., Driver]) -> None:
    d = driver()
    d.run(words(64))
    d.evict_all()
    d.run([*words(64), *words(20, 1)])
    d.evict_all()
    tail = [node for node in d.cache.tree.entries("segment") if node.length == 84]
    assert len(tail) == 1
    flip_a_byte(d, d.cache.tree.get(tail[0], "segment"))
    lease = d.run([*words(64), *words(20, 1), 5])
    assert (lease.restored, lease.reason) == (64, "corrupt")


def raises(*_: Any, **__: Any) -> None:
    raise StateError("made to fail")


@pytest.mark.parametrize(
    "calls",
    [
        {"save": raises},
        {"state_size": raises},
        {"seq_cp": lambda real, src, dst, start=0, end=-1: None},
        {"load": raises},
        {"seq_pos_min": lambda real, seq: real(seq) + 1},
    ],
    ids=["save", "size", "copy", "load", "positions"],
)
def test_native_failures_cost_time_and_nothing_else(driver: Callable[..., Driver], calls: dict[str, Any]) -> None:
    d = driver()
    d.cache.observer = None  # it makes the very calls that fail
    stored = words(64)
    d.run(stored)
    if "load" in calls:
        d.evict_all()
    with failing(d.pool, **calls):
        d.cache.space.evict_resident("test")
        lease = d.cache.begin("ns", np.array([*stored, 1], np.int32))
        assert lease is not None
        assert lease.length == lease.restored
    d.cache.check()
    d.finish(lease, [*stored, 1])
    assert d.run([*stored, 1, 2]).restored == 65
    assert not d.pool.set_aside


def test_a_sequence_that_cannot_be_emptied_is_set_aside_and_its_cells_stay_counted(
    driver: Callable[..., Driver],
) -> None:
    d = driver(n_ctx=256, residents=3)
    d.cache.observer = None
    d.run(words(64))
    with failing(d.pool, seq_rm=lambda real, seq, start=0, end=-1: False):
        assert d.cache.space.evict_resident("test") is True
    # The capture sequence shares its cells with the resident, so 64 are lost; what is counted is never less.
    assert d.pool.lost_cells == d.cache.space.cells_in_use == 128
    assert d.cache.space.failures == {"drop": 1, "save": 1}
    assert len(d.pool.set_aside) == 2  # the capture sequence held the same cells and could not be emptied either
    assert d.run(words(64)).restored == 0
    d.cache.check()


def test_recording_that_fails_leaves_no_entry(driver: Callable[..., Driver]) -> None:
    d = driver()
    d.cache.observer = None
    lease = d.begin(words(64))
    evaluate(d.context, lease.lane, 0, words(64))
    lease.length = 64
    with failing(d.pool, seq_cp=lambda real, src, dst, start=0, end=-1: None):
        assert d.cache.record(lease, np.array(words(64), np.int32)) is False
    d.cache.end(lease)
    assert len(d.cache.tree) == 0
    assert d.cache.space.failures["record"] == 1
    assert d.pool.free_residents == 5


def test_no_room_is_a_typed_error_and_the_lane_is_free_again(driver: Callable[..., Driver]) -> None:
    d = driver(n_ctx=256)
    running = d.begin(words(200))
    evaluate(d.context, running.lane, 0, words(200))
    running.length = 200
    with pytest.raises(ContextFull, match="61 cells are needed, 56 of 256 are free"):
        d.cache.begin("ns", np.array(words(60, 1), np.int32))
    d.cache.check()
    again = d.begin(words(50, 1))
    d.cache.end(again)
    d.cache.end(again)
    d.cache.end(running)


def test_lanes_run_out_and_come_back(driver: Callable[..., Driver]) -> None:
    d = driver()
    one, two = d.begin([1]), d.begin([2])
    assert {one.lane, two.lane} == {0, 1}
    assert d.cache.begin("ns", np.array([3], np.int32)) is None
    d.cache.end(one)
    assert d.begin([3]).lane == one.lane


@pytest.mark.parametrize(
    ("mode", "stores", "reuses"),
    [("lookup-record", True, True), ("lookup", False, False), ("record", True, False), ("disabled", False, False)],
)
def test_modes(driver: Callable[..., Driver], mode: str, stores: bool, reuses: bool) -> None:
    d = driver(mode=mode)
    d.run(words(64))
    assert (d.cache.tree.count("resident") == 1) is stores
    lease = d.run(words(64))
    assert (lease.restored == 63) is reuses
    assert lease.reason == {"lookup-record": "hit", "lookup": "never_seen"}.get(mode, "disabled")


@pytest.mark.parametrize(("payload", "tier"), [("resident-kv", "resident"), ("full-state", "ram")])
def test_payloads(driver: Callable[..., Driver], payload: str, tier: str) -> None:
    d = driver(payload=payload)
    d.run(words(64))
    assert d.run([*words(64), 1]).by_tier[tier] == 64
    if payload == "full-state":
        assert d.cache.tree.cells == 0
    else:
        assert d.cache.store.arena.capacity == 0
        d.evict_all()
        assert d.run(words(64)).reason == "never_seen"


def test_a_restore_that_is_dearer_than_evaluating_is_not_made(driver: Callable[..., Driver]) -> None:
    d = driver()
    d.run(words(64))
    d.evict_all()
    d.cache.speeds.prefilled(10_000_000, 0.001)
    d.cache.speeds.restored(1, 10.0)
    lease = d.run([*words(64), 1])
    assert (lease.restored, lease.reason) == (0, "not_worth_it")


@pytest.mark.parametrize("eviction", ["worth", "lru"])
def test_saved_bytes_are_a_hard_cap(driver: Callable[..., Driver], eviction: str) -> None:
    cap = 3_000_000  # room for two paths of 60 tokens
    d = driver(n_ctx=1024, max_bytes=cap, eviction=eviction)
    for i in range(5):
        d.run(words(60, i))
        d.evict_all()
        assert d.cache.store.arena.peak <= cap
    if eviction == "lru":
        assert d.cache.tree.count("segment") == 2
        assert d.cache.space.evictions["segment:bytes"] == 3
    else:  # the beginning of one more
        assert d.cache.tree.count("segment") == 3
        assert d.cache.space.evictions["segment:cut"] > 0
    count = d.cache.tree.count("segment")
    d.run(words(200, 9))
    evicted = dict(d.cache.space.evictions)
    d.evict_all()  # 4.6 MB can never fit: refused, and nothing leaves for it
    assert d.cache.tree.count("segment") == count
    assert d.cache.space.evictions["segment:bytes"] == evicted["segment:bytes"]
    assert d.cache.space.evictions["segment:refused"] == 1
    assert [d.run([*words(60, i), 1]).restored for i in (3, 4)] == [60, 60]


def test_recording_checks_its_arguments(driver: Callable[..., Driver]) -> None:
    d = driver()
    lease = d.begin(words(64))
    with pytest.raises(ValueError, match="64 tokens to record, but the lane holds 0"):
        d.cache.record(lease, np.array(words(64), np.int32))
    d.cache.end(lease)


def test_a_lane_that_is_not_as_long_as_it_should_be_is_not_recorded(driver: Callable[..., Driver]) -> None:
    d = driver()
    d.cache.observer = None
    lease = d.begin(words(64))
    evaluate(d.context, lease.lane, 0, words(60))
    lease.length = 64
    assert d.cache.record(lease, np.array(words(64), np.int32)) is False
    lease.length = 60
    d.cache.end(lease)
    assert len(d.cache.tree) == 0


def test_the_pool_refuses_more_ids_than_there_are(fresh: Fresh) -> None:
    with pytest.raises(ValueError, match="2 lanes, 1 capture and 6 residents need 9 sequence ids, the context has 8"):
        Pool(fresh().sequences, lanes=2, residents=6)


def test_appending_verifies_both_ends(fresh: Fresh) -> None:
    context = fresh()
    pool = Pool(context.sequences, lanes=2, residents=5)
    evaluate(context, 3, 0, words(20))
    with pytest.raises(NativeError, match="sequence 0 has 0 tokens, expected 5 before appending"):
        pool.append(3, 0, 5, 10)
    with pytest.raises(NativeError, match=r"sequence 0 has 20 tokens after copying \[0, 30\) of 3"):
        pool.append(3, 0, 0, 30)
    assert pool.length(0) == 0
    pool.append(3, 0, 0, 7)
    assert pool.length(0) == 7
