"""Several requests at once: one batch for all lanes, fair, and never another's answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from skippy.engine import _Item
from skippy.errors import NativeError
from tests.conftest import failing

Open = Callable[..., skippy.Runtime]


@pytest.fixture
def open_tiny(tiny: Callable[[str], Path]) -> Iterator[Open]:
    """Opens runtimes on tiny models: four lanes, 1,024 cells, batches of 128."""
    opened: list[skippy.Runtime] = []

    def open_(name: str = "llama", cache: dict[str, Any] | None = None, **settings: Any) -> skippy.Runtime:
        config = skippy.CacheConfig(
            **{"min_tokens": 16, "ram": "64MiB", "residency": "keep", "logits_bytes": 0, **(cache or {})}
        )
        settings = {"n_ctx": 1024, "n_batch": 128, "n_threads": 1, "lanes": 4, **settings}
        opened.append(skippy.Runtime(tiny(name), cache=config, **settings))
        return opened[-1]

    yield open_
    for rt in opened:
        if not rt.closed:
            rt.check()
            assert not rt.engine.running
            assert not rt.engine.waiting
        rt.close()


def words(n: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, 384, n)]


class Batches:
    """Notes what is in each batch, and can hold the first one back until `go` is set."""

    def __init__(self, rt: skippy.Runtime) -> None:
        self.seen: list[list[tuple[int, int]]] = []  # of each batch, (first token of the prompt, how many tokens)
        self.go = threading.Event()
        self.go.set()
        self.reached = threading.Event()
        real = rt.engine._call

        def call(items: list[_Item]) -> int:
            self.seen.append([(int(item.request.tokens[0]), len(item.tokens)) for item in items])
            self.reached.set()
            assert self.go.wait(60)
            return real(items)

        rt.engine._call = call  # type: ignore[method-assign]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls give, each in a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:  # noqa: BLE001 - it is looked at by the test
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


def after_the_first_batch(batches: Batches, first: Callable[[], Any], *rest: Callable[[], Any]) -> Any:
    """The first call begins; the others come while its first batch is being evaluated."""
    batches.go.clear()
    batches.reached.clear()

    def late(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            assert batches.reached.wait(60)
            return call()

        return run

    def let_go() -> None:
        assert batches.reached.wait(60)
        time.sleep(0.2)  # the others have come by now; were they late, less would be shared, and the test fail
        batches.go.set()

    return together(first, *(late(call) for call in rest), let_go)[:-1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "falconh1", "mamba"])
def test_e13_lanes_share_batches_and_each_gets_its_own_answer(open_tiny: Open, name: str) -> None:
    rt = open_tiny(name)
    prompts = [words(60, seed) for seed in range(4)]
    expected = [rt.generate(prompt, max_tokens=12, cache_prompt=False).tokens for prompt in prompts]
    batches = Batches(rt)
    calls = [lambda p=prompt: rt.generate(p, max_tokens=12) for prompt in prompts]  # type: ignore[misc]
    answers = after_the_first_batch(batches, *calls)
    assert [answer.tokens for answer in answers] == expected
    assert max(len(batch) for batch in batches.seen) == 4
    assert len(batches.seen) < 24  # 4 times 12 by themselves
    assert all(sum(n for _, n in batch) <= 128 for batch in batches.seen)


@pytest.mark.parametrize("name", ["llama", "falconh1"])
def test_e17_a_prefix_that_two_requests_share_is_evaluated_once(open_tiny: Open, name: str) -> None:
    rt = open_tiny(name)
    system = words(300)
    first, second, third = system + words(20, 1), system + words(20, 2), system + words(30, 3)
    expected = [rt.generate(p, max_tokens=6, cache_prompt=False).tokens for p in (first, second, third)]
    batches = Batches(rt)
    answers = after_the_first_batch(
        batches,
        lambda: rt.generate(first, max_tokens=6),
        lambda: rt.generate(second, max_tokens=6),
        lambda: rt.generate(third, max_tokens=6),
    )
    assert [answer.tokens for answer in answers] == expected
    assert [answer.reuse.evaluated_tokens for answer in answers] == [320, 20, 30]
    assert [answer.reuse.cached_tokens for answer in answers] == [0, 300, 300]


def test_e17_also_where_the_other_is_already_decoding(open_tiny: Open) -> None:
    rt = open_tiny()
    system = words(100)
    stream = rt.generate(system + words(10, 1), max_tokens=8, stream=True)
    next(stream)
    other = rt.generate(system + words(10, 2), max_tokens=2)
    assert (other.reuse.cached_tokens, other.reuse.evaluated_tokens) == (100, 10)
    assert len(list(stream)) > 0


def test_a_long_prompt_does_not_stop_the_others(open_tiny: Open) -> None:
    rt = open_tiny(prompt_budget=16)
    batches = Batches(rt)
    stream = rt.generate(words(20, 1), max_tokens=40, stream=True)
    next(stream)
    batches.seen.clear()
    long = words(320, 2)
    answers = together(lambda: list(stream), lambda: rt.generate(long, max_tokens=1))
    assert sum(len(chunk.tokens) for chunk in answers[0]) == 39
    mixed = [batch for batch in batches.seen if len(batch) == 2]
    assert len(mixed) > 10
    assert all(sorted(n for _, n in batch) == [1, 16] for batch in mixed)


def test_priorities_then_who_came_first(open_tiny: Open) -> None:
    rt = open_tiny(lanes=1)
    order: list[str] = []

    def ask(name: str, seed: int, priority: int = 0) -> Callable[[], Any]:
        def run() -> Any:
            request = rt.request(words(20, seed), max_tokens=2, priority=priority)
            answer = request.complete()
            order.append(name)
            return answer

        return run

    batches = Batches(rt)
    batches.go.clear()
    threads = []
    for name, seed, priority in (("running", 1, 0), ("first", 2, 0), ("second", 3, 0), ("urgent", 4, 5)):
        threads.append(threading.Thread(target=ask(name, seed, priority)))
        threads[-1].start()
        assert batches.reached.wait(30)
        deadline = time.monotonic() + 30
        while name != "running" and len(rt.engine.waiting) + 1 < len(threads) and time.monotonic() < deadline:
            batches.go.set()  # entering takes a step's turn
            time.sleep(0.001)
            batches.go.clear()
            if not rt.engine.running:
                break
    batches.go.set()
    for thread in threads:
        thread.join(60)
    assert sorted(order) == ["first", "running", "second", "urgent"]
    assert order.index("first") < order.index("second")


def test_the_queue_has_an_end(open_tiny: Open) -> None:
    rt = open_tiny(lanes=1, queue=2)
    requests = [rt.request(words(20, seed), max_tokens=1) for seed in range(4)]
    for request in requests[:3]:
        request.enter()
    with pytest.raises(skippy.Overloaded, match="3 requests wait for a lane already") as refused:
        requests[3].enter()
    assert (refused.value.waiting, refused.value.retry_after) == (3, None)
    assert rt.stats()["lanes"] == {"capacity": 1, "running": 0, "waiting": 3, "refused": 1}
    for request in requests[:3]:
        assert request.complete().finish_reason == "length"
    more = [rt.request(words(20, 10 + seed)) for seed in range(4)]
    for request in more[:3]:
        request.enter()
    with pytest.raises(skippy.Overloaded) as refused:
        more[3].enter()
    assert refused.value.retry_after is not None
    for request in list(rt.engine.waiting):
        rt.engine.leave(request)


def test_best_of_n_evaluates_the_prompt_once(open_tiny: Open) -> None:
    rt = open_tiny()
    prompt = words(200)
    answers = rt.generate(prompt, n=8, max_tokens=6, temperature=1.0, seed=7)
    assert len(answers) == 8
    assert [answer.reuse.evaluated_tokens for answer in answers] == [200, *[1] * 7]
    alone = rt.generate(prompt, max_tokens=6, temperature=1.0, seed=10, cache_prompt=False)
    assert answers[3].tokens == alone.tokens
    assert len({tuple(answer.tokens) for answer in answers}) > 1
    for arguments, message in (({"n": 0}, "n is 0, expected at least 1"), ({"n": 2, "stream": True}, "streamed")):
        with pytest.raises(ValueError, match=message):
            rt.generate(prompt, **arguments)


def test_eight_forks_hold_a_prefix_once(open_tiny: Open) -> None:
    rt = open_tiny(lanes=8, n_ctx=4096)
    prefix = words(2000)
    rt.generate(prefix, max_tokens=0)
    streams = [rt.generate([*prefix, 5 + i], max_tokens=20, stream=True) for i in range(8)]
    for stream in streams:
        next(stream)
    assert rt.stats()["cells"]["in_use"] <= 2000 + 8 * 8
    rt.check()
    for stream in streams:
        stream.close()


def test_an_answer_that_meets_the_end_of_the_pool_frees_its_cells(open_tiny: Open) -> None:
    rt = open_tiny(n_ctx=256, lanes=2)
    answers = together(
        lambda: rt.generate(words(100, 1), max_tokens=None), lambda: rt.generate(words(100, 2), max_tokens=None)
    )
    for answer in answers:
        assert (answer.finish_reason, answer.reuse.reason) == ("length", "context_full")
    assert sum(100 + len(answer.tokens) - 1 for answer in answers) >= 256  # the second one had what the first one left
    rt.clear()
    assert rt.stats()["cells"]["in_use"] == 0


def test_who_does_not_fit_now_waits_until_it_does(open_tiny: Open) -> None:
    rt = open_tiny(n_ctx=256, lanes=2)
    batches = Batches(rt)
    first, second = after_the_first_batch(
        batches, lambda: rt.generate(words(150, 1), max_tokens=8), lambda: rt.generate(words(150, 2), max_tokens=8)
    )
    assert (first.finish_reason, second.finish_reason) == ("length", "length")
    assert all(len(batch) == 1 for batch in batches.seen)
    stream = rt.generate(words(150, 3), max_tokens=50, stream=True)
    next(stream)
    with pytest.raises(skippy.ContextFull, match="everything else is in use"):  # its own stream would never end
        rt.generate(words(150, 4), max_tokens=8)
    stream.close()
    with pytest.raises(skippy.PromptTooLong, match="the prompt has 257 tokens"):
        rt.generate(words(257))


@pytest.mark.parametrize("name", ["llama", "gemma3", "falconh1", "mamba"])
@pytest.mark.parametrize("outcome", [-1, 1, 2, -2, RuntimeError("torn")], ids=str)
def test_a_batch_that_fails_costs_only_who_is_to_blame(open_tiny: Open, name: str, outcome: Any) -> None:
    """Two lanes in one batch; what holds the second prompt fails whenever it is evaluated."""
    rt = open_tiny(name)
    good, bad = words(60, 1), words(60, 2)
    expected = rt.generate(good, max_tokens=8, cache_prompt=False).tokens
    batches = Batches(rt)
    real = rt.engine._call

    def call(items: list[_Item]) -> int:
        if any(item.request.tokens[0] == bad[0] for item in items):
            real(items)  # it went in before it failed
            if isinstance(outcome, Exception):
                raise outcome
            return int(outcome)
        return real(items)

    rt.engine._call = call  # type: ignore[method-assign]
    fine, failed = after_the_first_batch(
        batches, lambda: rt.generate(good, max_tokens=8), lambda: rt.generate(bad, max_tokens=8)
    )
    assert fine.tokens == expected
    assert isinstance(failed, (NativeError, RuntimeError))
    rt.check()
    rt.engine._call = real  # type: ignore[method-assign]
    again = rt.generate(bad, max_tokens=4)
    assert again.tokens == rt.generate(bad, max_tokens=4, cache_prompt=False).tokens
    rt.clear()
    assert rt.stats()["cells"]["in_use"] == 0


def test_pins_stay_and_run_out(open_tiny: Open) -> None:
    rt = open_tiny(n_ctx=512, cache={"ram": "256kB", "eviction": "lru"})
    system = words(100)
    with rt.pin(system) as pin:
        assert (pin.tokens, rt.stats()["pins"]) == (100, 1)
        for seed in range(1, 12):  # 11 times 200 tokens through a pool of 512 and RAM for 480
            rt.generate(words(200, seed), max_tokens=1)
            rt.check()
        assert rt.generate(system + words(10, 50), max_tokens=1).reuse.cached_tokens == 100
    assert rt.stats()["pins"] == 0
    for seed in range(1, 12):
        rt.generate(words(200, seed + 20), max_tokens=1)
    assert rt.generate(system + words(10, 51), max_tokens=1).reuse.cached_tokens == 0
    brief = rt.pin(system, ttl=0.01)
    time.sleep(0.02)
    rt.generate(words(20), max_tokens=1)
    assert rt.stats()["pins"] == 0
    brief.close()
    for arguments, message in (({"ttl": 0}, "ttl is 0"), ({}, "fewer than min_tokens=16")):
        with pytest.raises(ValueError, match=message):
            rt.pin(system if arguments else words(8), **arguments)


def test_a_pin_without_ram_keeps_its_cells(open_tiny: Open) -> None:
    rt = open_tiny(n_ctx=512, cache={"payload": "resident-kv"})
    system = words(100)
    rt.generate(system + words(20, 1), max_tokens=1)
    with rt.pin(system):
        for seed in range(1, 8):
            rt.generate(words(200, seed), max_tokens=1)
        assert rt.generate(system + words(10, 50), max_tokens=1).reuse.cached_tokens == 100


def test_warming_in_the_background(open_tiny: Open) -> None:
    rt = open_tiny()
    system = words(300)
    report = rt.warm(system)
    assert (report.evaluated_tokens, report.reason) == (300, "never_seen")
    assert rt.generate(system + words(5, 1), max_tokens=1).reuse.cached_tokens == 300
    thread = threading.Thread(target=rt.warm, args=(words(200, 9),))
    thread.start()
    thread.join(60)
    assert rt.generate([*words(200, 9), 7], max_tokens=1).reuse.cached_tokens == 200


@pytest.mark.parametrize("name", ["llama", "gemma3", "falconh1", "mamba"])
def test_forgetting_a_prompt_and_a_tenant(open_tiny: Open, name: str) -> None:
    rt = open_tiny(name)
    system = words(100)
    one, other = system + words(40, 1), system + words(40, 2)
    for prompt in (system, one, other):
        rt.generate(prompt, max_tokens=1)
        rt.generate(prompt, max_tokens=1, namespace="tenant")
    assert rt.forget(one) > 0
    rt.check()
    assert rt.generate(one, max_tokens=1, cache_prompt=True).reuse.cached_tokens <= 100
    assert rt.generate(other, max_tokens=1).reuse.cached_tokens == 139 if name != "falconh1" else True
    assert rt.forget(namespace="tenant") > 0
    assert rt.generate(one, max_tokens=1, namespace="tenant").reuse.reason == "never_seen"
    assert rt.forget(words(30, 77)) == 0
    assert rt.forget(system) > 0
    assert rt.generate(other, max_tokens=0).reuse.cached_tokens == 0


def test_asyncio_and_cancelling(open_tiny: Open) -> None:
    rt = open_tiny()
    prompts = [words(60, seed) for seed in range(3)]
    expected = [rt.generate(prompt, max_tokens=8, cache_prompt=False).tokens for prompt in prompts]

    async def main() -> None:
        answers = await asyncio.gather(*(rt.agenerate(prompt, max_tokens=8) for prompt in prompts))
        assert [answer.tokens for answer in answers] == expected
        seen: list[int] = []
        async for chunk in await rt.agenerate(prompts[0], max_tokens=8, stream=True):
            seen += chunk.tokens
        assert seen == expected[0]
        task = asyncio.create_task(rt.agenerate(words(50, 8), max_tokens=900))
        while not rt.engine.running:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not rt.engine.running  # it was waited for
        assert rt.generate([*words(50, 8), 6], max_tokens=1).reuse.cached_tokens == 50
        answer = await rt.achat([{"role": "user", "content": "Who are you?"}], max_tokens=3)
        assert len(answer.tokens) == 3

    asyncio.run(main())


def test_a_stream_for_asyncio_that_is_left_early(open_tiny: Open) -> None:
    rt = open_tiny()

    async def main() -> None:
        chunks = await rt.agenerate(words(40), max_tokens=500, stream=True)
        async for _ in chunks:
            break
        await chunks.aclose()
        assert not rt.engine.running

    asyncio.run(main())


def test_saving_and_dropping_that_fail_while_lanes_run(open_tiny: Open) -> None:
    rt = open_tiny()
    prompts = [words(80, seed) for seed in range(4)]
    expected = [rt.generate(prompt, max_tokens=6, cache_prompt=False).tokens for prompt in prompts]

    def fails(*_: Any, **__: Any) -> Any:
        raise NativeError("made to fail")

    with failing(rt.cache.pool, save=fails, seq_cp=fails):
        answers = together(*(lambda p=prompt: rt.generate(p, max_tokens=6) for prompt in prompts))  # type: ignore[misc]
    assert [answer.tokens for answer in answers] == expected
    rt.check()
