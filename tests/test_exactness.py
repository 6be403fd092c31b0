"""Logits to the bit: an uninterrupted run against one that was saved, dropped and restored.

The same cuts, the same placement (fresh context, cells from 0, or the next multiple of 64) and one thread on
both sides; each piece has at least 64 tokens, so that llama.cpp uses the same kernel for it, and then single
tokens are decoded one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import skippy
from skippy.layout import without_ids
from skippy.model import ModelContext
from skippy.pool import Pool
from skippy.segments import RamStore, Segment
from tests.conftest import evaluate, state_of, words

Fresh = Callable[..., ModelContext]
Logits = list[npt.NDArray[np.float32]]

PREFIX, SUFFIX, SINGLES = 256, 64, 4
TOKENS = np.array(words(PREFIX + SUFFIX + SINGLES, 7), np.int32)
SETTINGS = [
    pytest.param({"flash_attn": "on"}, id="flash-f16"),
    pytest.param({"flash_attn": "off"}, id="noflash-f16"),
    pytest.param({"flash_attn": "on", "type_k": "q8_0", "type_v": "q8_0"}, id="flash-q8_0"),
]


def go_on(context: ModelContext, seq: int) -> Logits:
    """Evaluate the suffix and the single tokens after the prefix; the logits of each step."""
    found = []
    end = PREFIX + SUFFIX
    evaluate(context, seq, PREFIX, TOKENS[PREFIX:end])
    found.append(context.logits())
    for at in range(end, end + SINGLES):
        evaluate(context, seq, at, TOKENS[at : at + 1])
        found.append(context.logits())
    return found


def uninterrupted(context: ModelContext) -> Logits:
    evaluate(context, 0, 0, TOKENS[:PREFIX])
    return go_on(context, 0)


def pool_of(context: ModelContext) -> Pool:
    return Pool(context.sequences, lanes=1, residents=6)


def saved(context: ModelContext, store: RamStore, *cuts: int) -> list[Segment]:
    """Evaluate the prefix in `context`, save it in pieces that end at `cuts` and at its end, and drop it."""
    pool = pool_of(context)
    evaluate(context, 0, 0, TOKENS[:PREFIX])
    found = []
    for start, end in zip((0, *cuts), (*cuts, PREFIX), strict=True):
        segment = store.save(pool, 0, start, end)
        assert segment is not None
        found.append(segment)
    pool.empty(0)
    return found


def resident_slice(fresh: Fresh, settings: dict[str, str]) -> ModelContext:
    context = fresh(**settings)
    pool = pool_of(context)
    seq = pool.take_resident()
    assert seq is not None
    evaluate(context, seq, 0, [*TOKENS[:PREFIX], *words(128, 8)], PREFIX)  # longer than what is asked for
    pool.append(seq, 0, 0, PREFIX)
    return context


def resident_of_the_same_length(fresh: Fresh, settings: dict[str, str]) -> ModelContext:
    context = fresh(**settings)
    pool = pool_of(context)
    evaluate(context, 3, 0, TOKENS[:PREFIX])
    pool.append(3, 0, 0, PREFIX)
    return context


def one_segment(fresh: Fresh, settings: dict[str, str]) -> ModelContext:
    store = RamStore(64 << 20)
    (segment,) = saved(fresh(**settings), store)
    context = fresh(**settings)
    store.restore(pool_of(context), segment, 0, 0, PREFIX)
    return context


def one_segment_in_the_same_context(fresh: Fresh, settings: dict[str, str]) -> ModelContext:
    store, context = RamStore(64 << 20), fresh(**settings)
    (segment,) = saved(context, store)
    store.restore(pool_of(context), segment, 0, 0, PREFIX)
    return context


def chain_of_three(fresh: Fresh, settings: dict[str, str]) -> ModelContext:
    store = RamStore(64 << 20)
    segments = saved(fresh(**settings), store, 70, 201)
    context = fresh(**settings)
    pool = pool_of(context)
    for segment in segments:
        store.restore(pool, segment, 0, segment.start, segment.end)
    return context


def resident_then_segments(fresh: Fresh, settings: dict[str, str]) -> ModelContext:
    store = RamStore(64 << 20)
    segments = saved(fresh(**settings), store, 128, 192)
    context = fresh(**settings)
    pool = pool_of(context)
    evaluate(context, 3, 0, TOKENS[:128])
    pool.append(3, 0, 0, 128)
    for segment in segments[1:]:
        store.restore(pool, segment, 0, segment.start, segment.end)
    return context


WAYS = [
    resident_slice,
    resident_of_the_same_length,
    one_segment,
    one_segment_in_the_same_context,
    chain_of_three,
    resident_then_segments,
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_logits_after_a_restore_equal_an_uninterrupted_run_to_the_bit(fresh: Fresh, settings: dict[str, str]) -> None:
    reference = fresh(**settings)
    evaluate(reference, 0, 0, TOKENS[:PREFIX])
    evaluated = without_ids(state_of(reference, 0))
    expected = go_on(reference, 0)
    for way in WAYS:
        # The prefix of the mixed way is evaluated in two pieces, as its resident is.
        if way is resident_then_segments:
            reference = fresh(**settings)
            evaluate(reference, 0, 0, TOKENS[:PREFIX], 128)
        context = way(fresh, settings)
        restored = without_ids(state_of(context, 0))
        if way is not resident_slice:
            assert np.array_equal(restored, evaluated), f"{way.__name__}: the restored state is not the evaluated one"
        for step, (logits, wanted) in enumerate(zip(go_on(context, 0), expected, strict=True)):
            assert np.array_equal(logits, wanted), (
                f"{way.__name__}: logits differ at step {step} by {np.abs(logits - wanted).max()}"
            )
        context.close()


def test_through_the_runtime_resident_ram_and_mixed(open_runtime: Callable[..., skippy.Runtime], fresh: Fresh) -> None:
    """The whole way: plan, restore, evaluate.  The prefix is evaluated as 192 and 64, the suffix as 64."""
    head = 192
    context = fresh(flash_attn="on", n_ctx=2048)
    evaluate(context, 0, 0, TOKENS[: PREFIX + SUFFIX], head, PREFIX)
    expected = context.logits()
    prompt = [int(token) for token in TOKENS[: PREFIX + SUFFIX]]

    def ask(tiers: dict[str, int], *before: Callable[[skippy.Runtime], object]) -> None:
        rt = open_runtime(n_threads=1)
        rt.generate(prompt[:head], max_tokens=0)
        for action in before:
            action(rt)
        reuse = rt.generate(prompt, max_tokens=0).reuse
        assert {tier: n for tier, n in reuse.by_tier.items() if n} == tiers
        assert reuse.evaluated_tokens == SUFFIX
        assert np.array_equal(rt.context.logits(), expected)
        rt.close()

    def extend(rt: skippy.Runtime) -> None:
        assert rt.generate(prompt[:PREFIX], max_tokens=0).reuse.cached_tokens == head

    def evict(rt: skippy.Runtime) -> None:
        assert rt.cache.space.evict_resident("test")

    def bring_the_head_back(rt: skippy.Runtime) -> None:
        other = [*prompt[:head], *words(64, 8)]  # 64 cells of another path between, so that placement stays a multiple
        assert rt.generate(other, max_tokens=0).reuse.by_tier["ram"] == head

    ask({"resident": PREFIX}, extend)
    ask({"ram": PREFIX}, extend, evict)
    ask({"ram": PREFIX}, evict, extend, evict)  # a chain of two
    ask({"resident": head, "ram": PREFIX - head}, evict, extend, evict, bring_the_head_back)
