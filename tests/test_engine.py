"""Several requests at once: one batch for all lanes, fair, and never another's answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
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
    answers = after_the_first_batch(batches, lambda: list(stream), lambda: rt.generate(long, max_tokens=1))
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
        while not any(request.generated for request in list(rt.engine.running)):  # else its prompt is not kept
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


# --- who waits, and what goes wrong meanwhile -------------------------------------------------------------------------


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Later:
    """A call in a thread of its own; `result()` gives what it gives, or raises what it raises."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 - it is raised by who asks
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(60)
        assert self.done, "it waits for ever"
        if self._error is not None:
            raise self._error
        return self._value


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_needs_no_evaluation_and_ends_with_its_first_token(open_tiny: Open, stream: bool) -> None:
    rt = open_tiny(cache={"logits_bytes": 4 * 384})
    prompt = words(50)
    first = rt.generate(prompt, max_tokens=1)
    request = rt.request(prompt, max_tokens=1)
    answer = Later(lambda: list(request.run()) if stream else request.complete()).result()
    assert request.generated == first.tokens
    assert (request.report.evaluated_tokens, request.finish_reason) == (0, "length")
    assert answer
    assert not rt.engine.running


def test_those_who_wait_do_not_keep_each_other_awake(open_tiny: Open) -> None:
    rt = open_tiny(lanes=1)
    stream = rt.generate(words(30), stream=True)
    next(stream)
    steps = []
    rt.engine.at_each_step = lambda: steps.append(threading.get_ident())
    answers = [Later(lambda i=i: rt.generate(words(30, i), max_tokens=2)) for i in (1, 2, 3)]  # type: ignore[misc]
    wait_until(lambda: len(rt.engine._idle) == 3)
    before = len(steps)
    time.sleep(0.2)
    assert len(steps) == before < 20
    stream.close()
    assert [len(answer.result().tokens) for answer in answers] == [2, 2, 2]


def test_a_reader_that_never_reads_again_stops_nobody(open_tiny: Open) -> None:
    rt = open_tiny(lanes=2)
    expected = rt.generate(words(40, 2), max_tokens=20, cache_prompt=False).tokens
    never = rt.generate(words(40, 1), stream=True)
    next(never)
    slow = rt.generate(words(40, 3), max_tokens=20, stream=True)
    tokens: list[int] = []
    answer = Later(lambda: rt.generate(words(40, 2), max_tokens=20).tokens)
    for chunk in slow:
        tokens += chunk.tokens
        time.sleep(0.005)
    assert answer.result() == expected
    assert len(tokens) == 20
    never.close()


def test_threads_that_wait_for_each_other_are_told(open_tiny: Open) -> None:
    """Each holds a lane and wants one more: one of them is refused, and the other gets its lane."""
    rt = open_tiny(lanes=2)
    both = threading.Barrier(2)

    def greedy(seed: int) -> Callable[[], Any]:
        def run() -> Any:
            stream = rt.generate(words(30, seed), stream=True)
            next(stream)
            both.wait(30)
            try:
                return rt.generate(words(30, seed + 10), max_tokens=3).tokens
            finally:
                stream.close()

        return run

    answers = together(greedy(1), greedy(2))
    refused = [answer for answer in answers if isinstance(answer, skippy.LanesBusy)]
    assert len(refused) == 1
    assert [len(answer) for answer in answers if answer not in refused] == [3]


def test_streams_of_asyncio_on_one_lane_wait_for_each_other(open_tiny: Open) -> None:
    """The threads that serve them belong to nobody: one of them may read the one stream, then wait for the other."""
    rt = open_tiny(lanes=1)

    async def main() -> None:
        first = await rt.agenerate(words(30), max_tokens=30, stream=True)
        await first.__anext__()
        second = asyncio.create_task(rt.agenerate(words(30, 1), max_tokens=2))
        while not rt.engine.waiting:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert not second.done()
        await first.aclose()
        assert len((await second).tokens) == 2
        third = await rt.agenerate(words(30, 2), stream=True)
        await third.__anext__()
        with pytest.raises(skippy.LanesBusy):  # a task that holds the lane itself
            await rt.agenerate(words(30, 3))
        await third.aclose()

    asyncio.run(main())


def test_a_task_that_is_cancelled_while_it_waits_for_a_lane(open_tiny: Open) -> None:
    rt = open_tiny(lanes=1)
    stream = rt.generate(words(30), stream=True)
    next(stream)

    async def main() -> None:
        task = asyncio.create_task(rt.agenerate(words(30, 1)))
        while not rt.engine.waiting:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)
        assert not rt.engine.waiting

    Later(lambda: asyncio.run(main())).result()
    assert len(list(stream)) > 10
    assert not rt.engine.running


def test_who_was_refused_may_come_again(open_tiny: Open) -> None:
    rt = open_tiny(lanes=1, queue=1)
    requests = [rt.request(words(20, seed), max_tokens=1) for seed in range(3)]
    for request in requests[:2]:
        request.enter()
    with pytest.raises(skippy.Overloaded):
        requests[2].enter()
    for request in requests:
        assert len(Later(request.complete).result().tokens) == 1


def test_should_stop_may_not_ask_the_runtime_but_may_close_it(open_tiny: Open) -> None:
    rt = open_tiny()

    def asks() -> bool:
        rt.generate(words(20, 1))
        return False

    request = rt.request(words(20), should_stop=asks)
    with pytest.raises(RuntimeError, match="from within one of its own steps"):
        Later(request.complete).result()
    assert not rt.engine.waiting

    def closes() -> bool:
        rt.close()
        return False

    with pytest.raises(ValueError, match="is closed"):
        rt.generate(words(20), max_tokens=8, should_stop=closes)
    assert rt.closed


@pytest.mark.parametrize("name", ["llama", "gemma3", "falconh1", "mamba"])
@pytest.mark.parametrize("evaluated", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
def test_ctrl_c_in_a_batch_is_for_who_leads(open_tiny: Open, name: str, evaluated: bool, alone: bool) -> None:
    """It comes while the main thread, which waits for its own answer, evaluates tokens of somebody else."""
    rt = open_tiny(name, lanes=1 if alone else 4)
    prompt = words(60, 2)
    expected = rt.generate(prompt, max_tokens=12, cache_prompt=False).tokens
    other = rt.request(prompt, max_tokens=12)
    others = other.run()
    next(others)
    other.wanted = other.whole = True  # as if a thread waited for all of it
    real = rt.engine._call
    interrupted = []

    def call(items: list[_Item]) -> int:
        if not interrupted and other in [item.request for item in items] and len(items) == 2 - alone:
            interrupted.append(True)
            if evaluated:
                real(items)
            raise KeyboardInterrupt
        return real(items)

    rt.engine._call = call  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rt.generate(words(60, 3), max_tokens=40)
    assert rt.engine.running == [other]
    rt.check()
    list(others)
    assert other.generated == expected


@pytest.mark.parametrize("name", ["llama", "falconh1"])
def test_ctrl_c_between_a_batch_and_what_is_noted_of_it(open_tiny: Open, name: str) -> None:
    rt = open_tiny(name)
    prompt = words(60, 2)
    expected = rt.generate(prompt, max_tokens=12, cache_prompt=False).tokens
    other = rt.request(prompt, max_tokens=12)
    others = other.run()
    next(others)
    other.wanted = other.whole = True
    real = rt.engine._decode

    def decode(items: list[_Item]) -> bool:
        done = real(items)
        if len(items) == 2:
            rt.engine._decode = real  # type: ignore[method-assign]
            raise KeyboardInterrupt
        return done

    rt.engine._decode = decode  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rt.generate(words(60, 3), max_tokens=40)
    rt.check()
    list(others)
    assert other.generated == expected


def test_ctrl_c_in_the_should_stop_of_another(open_tiny: Open) -> None:
    rt = open_tiny()
    expected = rt.generate(words(60, 2), max_tokens=12, cache_prompt=False).tokens
    raised = []

    def should_stop() -> bool:
        if other.generated and not raised and threading.current_thread() is threading.main_thread():
            raised.append(True)
            raise KeyboardInterrupt
        return False

    other = rt.request(words(60, 2), max_tokens=12, should_stop=should_stop)
    others = other.run()
    Later(lambda: next(others)).result()
    with pytest.raises(KeyboardInterrupt):
        rt.generate(words(60, 1), max_tokens=40)
    Later(lambda: list(others)).result()
    assert other.generated == expected


def test_what_fails_for_one_that_is_admitted_is_not_raised_by_another(open_tiny: Open) -> None:
    rt = open_tiny()
    real = rt.cache.begin
    bad = words(60, 2)

    def begin(namespace: str, tokens: Any, **options: Any) -> Any:
        if tokens[0] == bad[0]:
            raise NativeError("made to fail")
        return real(namespace, tokens, **options)

    rt.cache.begin = begin  # type: ignore[method-assign]
    batches = Batches(rt)
    fine, failed = after_the_first_batch(
        batches, lambda: rt.generate(words(60, 1), max_tokens=40), lambda: rt.generate(bad)
    )
    assert len(fine.tokens) == 40
    assert isinstance(failed, NativeError)


def test_what_is_not_recorded_costs_nobody_an_answer(open_tiny: Open) -> None:
    rt = open_tiny()

    def record(*_: Any) -> bool:
        raise skippy.SkippyError("made to fail")

    rt.cache.record = record  # type: ignore[method-assign]
    answers = together(*(lambda i=i: rt.generate(words(40, i), max_tokens=4) for i in range(3)))  # type: ignore[misc]
    assert [len(answer.tokens) for answer in answers] == [4, 4, 4]
    assert rt.stats()["failures"] == {"record": 3}


@pytest.mark.parametrize("name", ["llama", "falconh1"])
def test_a_lane_that_is_lost_with_a_batch_is_the_end_of_its_request_alone(open_tiny: Open, name: str) -> None:
    rt = open_tiny(name)
    prompts = words(60, 1), words(60, 2)
    expected = rt.generate(prompts[0], max_tokens=12, cache_prompt=False).tokens
    fine, lost = (rt.request(prompt, max_tokens=12) for prompt in prompts)
    streams = fine.run(), lost.run()
    for stream in streams:
        next(stream)
    assert lost.lease is not None
    lane = lost.lease.lane
    real = rt.engine._call
    failed = []

    def call(items: list[_Item]) -> int:
        code = real(items)
        if len(items) == 2 and not failed:
            failed.append(True)
            return 2
        return code

    def refuse(native: Any, seq: int, start: int = 0, end: int = -1) -> bool:
        return False if seq == lane else bool(native(seq, start, end))

    rt.engine._call = call  # type: ignore[method-assign]
    with failing(rt.cache.pool, seq_rm=refuse):
        list(streams[0])
        with pytest.raises(NativeError, match="could not be emptied"):
            list(streams[1])
        assert rt.stats()["sequences_set_aside"] == 1
        rt.check()
    assert fine.generated == expected
    rt.clear()
    held = [rt.generate(words(20, seed), stream=True) for seed in range(4)]
    for stream in held:
        next(stream)  # the lane that was set aside can be emptied again
    assert rt.stats()["sequences_set_aside"] == 0
    for stream in held:
        stream.close()


def test_who_does_not_fit_is_looked_up_again_when_somebody_ends(open_tiny: Open) -> None:
    rt = open_tiny(n_ctx=256, lanes=2)
    begun = []
    real = rt.cache.begin

    def begin(namespace: str, tokens: Any, **options: Any) -> Any:
        begun.append(len(tokens))
        return real(namespace, tokens, **options)

    rt.cache.begin = begin  # type: ignore[method-assign]
    batches = Batches(rt)
    first, second = after_the_first_batch(
        batches, lambda: rt.generate(words(150, 1), max_tokens=40), lambda: rt.generate(words(151, 2), max_tokens=4)
    )
    assert (len(first.tokens), len(second.tokens)) == (40, 4)
    assert 2 <= begun.count(151) <= 4  # and not with each of forty tokens


def test_a_pin_that_is_closed_lets_who_waits_look_again(open_tiny: Open) -> None:
    rt = open_tiny(n_ctx=256, lanes=2, cache={"payload": "resident-kv"})
    pin = rt.pin(words(120))
    stream = rt.generate(words(60, 1), max_tokens=20, stream=True)
    next(stream)
    answer = Later(lambda: rt.generate(words(120, 2), max_tokens=2))
    wait_until(lambda: rt.engine.waiting and rt.engine.waiting[0].blocked is not None)
    assert not answer.done
    pin.close()
    assert len(answer.result().tokens) == 2
    stream.close()


def test_a_stream_that_the_garbage_collector_closes_at_a_bad_moment(open_tiny: Open) -> None:
    """The thread that waits for its turn to lead holds a lock; the step that it waits for must not need it."""
    rt = open_tiny()
    other = rt.request(words(30, 2))
    stream = other.run()
    next(stream)
    batches = Batches(rt)
    batches.go.clear()
    answer = Later(lambda: rt.generate(words(30, 1), max_tokens=1))
    assert batches.reached.wait(30)
    threading.Timer(0.1, batches.go.set).start()

    def collect() -> None:
        with rt.engine._changed:
            stream.close()

    Later(collect).result()
    assert len(answer.result().tokens) == 1


def test_closing_while_some_wait_and_a_batch_runs(open_tiny: Open) -> None:
    rt = open_tiny(lanes=1)
    stream = rt.generate(words(20, 9), stream=True)
    next(stream)
    batches = Batches(rt)
    batches.go.clear()
    running = Later(lambda: list(stream))
    assert batches.reached.wait(30)
    waiting = [Later(lambda i=i: rt.generate(words(20, i))) for i in range(3)]  # type: ignore[misc]

    async def task() -> None:
        await rt.agenerate(words(20, 5))

    waiting.append(Later(lambda: asyncio.run(task())))
    time.sleep(0.05)
    closing = Later(rt.close)
    time.sleep(0.05)
    batches.go.set()
    closing.result()
    for each in (running, *waiting):
        with pytest.raises(ValueError, match="closed"):
            each.result()
    stream.close()


def test_a_stream_of_asyncio_whose_runtime_is_closed(open_tiny: Open) -> None:
    rt = open_tiny()

    async def main() -> None:
        chunks = await rt.agenerate(words(30), stream=True)
        await chunks.__anext__()
        rt.close()
        with pytest.raises(ValueError, match="closed"):
            await chunks.__anext__()

    asyncio.run(main())


@pytest.mark.parametrize("ends", ["del rt, chunks, chunk; gc.collect()", "pass"], ids=["dropped", "kept"])
def test_a_runtime_that_is_never_closed_does_not_hang(tiny: Callable[[str], Path], ends: str) -> None:
    code = f"""
import asyncio, gc, sys, threading, time
import skippy

rt = skippy.Runtime({str(tiny("llama"))!r}, n_ctx=512, n_threads=1, lanes=2)
chunks = rt.generate(list(range(5, 40)), stream=True)
chunk = next(chunks)
asyncio.run(rt.agenerate(list(range(6, 40)), max_tokens=2))
assert threading.active_count() > 1
{ends}
if {ends != "pass"}:
    deadline = time.monotonic() + 20
    while threading.active_count() > 1:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
