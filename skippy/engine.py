"""The decode loop: lanes, the queue before them, and what goes into each batch.

There is no thread of its own.  Whoever waits for a chunk takes a step for everybody: admits who waits for a lane,
puts the next token of each lane and some tokens of new prompts into one batch, evaluates it, and hands the chunks out.
Steps are taken one at a time, in the order in which threads come.  A stream that nobody reads does not go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from skippy.cache import Cache
from skippy.errors import ContextFull, LanesBusy, NativeError, Overloaded, SkippyError
from skippy.history import common_length
from skippy.lease import Lease
from skippy.model import ABORTED, ModelContext, Stop
from skippy.request import Chunk, Request, Tokens
from skippy.steps import Steps

__all__ = ["Engine"]

log = logging.getLogger("skippy")

_AHEAD = 4
"""Chunks that a lane may be ahead of its reader while others run: else readers would take turns, not share batches."""


@dataclass
class _Item:
    """The tokens of one request in a batch; `index` is that of its last token."""

    request: Request
    tokens: Tokens
    outputs: Literal["none", "last"]
    index: int = -1


class Engine:
    """Evaluates requests on the lanes of `cache`, up to `queue` more wait.

    While lanes are decoding, prompts get `prompt_budget` tokens of each batch, so that a long one does not stop the
    others.  `steps` is held around every use of cache and context.
    """

    def __init__(
        self, cache: Cache, context: ModelContext, steps: Steps, *, lanes: int, queue: int, prompt_budget: int
    ) -> None:
        self.cache = cache
        self.context = context
        self.steps = steps
        self.lanes = lanes
        self.queue = queue
        self.prompt_budget = prompt_budget
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.refused = 0
        self.at_each_step: Callable[[], object] = lambda: None
        # Never taken within a step: the garbage collector may close a stream, which takes a step, while it is held.
        self._changed = threading.Condition()
        self._version = 0
        self._idle: set[object] = set()  # who has looked since the last change, and can do nothing but wait
        self._leader: Request | None = None  # what is asked for by the thread that takes the steps
        self._freed = 0  # how often cells were set free that were in use
        self._went_on = True  # whether the last step did anything

    # -- for whoever asks ---------------------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Put a request into the queue.  Overloaded if it is full; nothing has been touched then."""
        self._check_outside()
        with self.steps:
            free = self.lanes - len(self.running)
            if len(self.waiting) >= self.queue + free:
                self.refused += 1
                raise Overloaded(len(self.waiting), self._retry_after())
            self.waiting.append(request)
            self.waiting.sort(key=lambda each: -each.priority)  # which keeps the order of those of one priority
        self.wake()

    def _check_outside(self) -> None:
        self.steps.check()
        if self.steps.inside:  # it would wait for a step that cannot end before it has returned
            raise RuntimeError("this Runtime is being asked from within one of its own steps (a should_stop)")

    def _retry_after(self) -> float | None:
        """Seconds until a place in the queue is free, if prompts take as long as they did."""
        speed = self.cache.speeds.prefill
        if speed is None:
            return None
        return sum(len(request.tokens) for request in self.waiting) / speed / max(1, len(self.waiting))

    def next(self, request: Request, *, whole: bool = False) -> Chunk | None:
        """The next chunk of `request`, None at its end; with `whole` nothing before its end.

        One of those who ask leads: it takes steps for everybody until it has what it asked for.  Raises what ended the
        request: ContextFull, NativeError, LanesBusy, or what its callbacks raised.
        """
        self._check_outside()
        request.asked(whole=whole)
        self.wake()
        try:
            while True:
                with self._changed:
                    while not request.has_news and self._leader is not None and not self.steps.closed:
                        self._changed.wait()
                    if not request.has_news:
                        self._leader = request
                if request.has_news:
                    return request.take_news()
                self._lead(request)
        finally:
            request.wanted = False
            self._let_lead(request)  # where it was interrupted before it began

    def _lead(self, request: Request) -> None:
        """Take steps until there is news of `request`, or nothing goes on; then wait until something has changed."""
        stuck = False
        version = 0
        try:
            while not (stuck or request.has_news):
                with self.steps:
                    version = self._version
                    if not self._step():
                        stuck = True
                        self._check_stuck(request)
                if not stuck:
                    self.wake()
        except BaseException:
            self.wake()  # the step may have done something before it was interrupted
            raise
        finally:
            self._let_lead(request)
        if stuck:
            self._wait(version)

    def _let_lead(self, request: Request) -> None:
        """Who asked for `request` does not lead any more, if it did: another one may."""
        with self._changed:
            if self._leader is request:
                self._leader = None
                self._changed.notify_all()

    def leave(self, request: Request) -> None:
        """The request is over, or given up: what was evaluated is kept, and its lane is free."""
        if self.steps.inside:  # a stream that the garbage collector closes in the middle of a step of this thread
            self.steps.later(lambda: self.leave(request))
            return
        if self.steps.closed:
            return
        try:
            with self.steps:
                if request in self.waiting:
                    self.waiting.remove(request)
                self._retire(request)
        except ValueError:
            if not self.steps.closed:  # it was closed meanwhile: there is nothing left to give back
                raise
        self.wake()

    # -- waiting ------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something has changed: whoever waits looks again.  Not within a step."""
        with self._changed:
            self._version += 1
            self._idle.clear()
            self._changed.notify_all()

    def freed(self) -> None:
        """Something may leave the pool that could not before."""
        self._freed += 1
        if not self.steps.inside:
            self.wake()

    def _wait(self, version: int) -> None:
        """Wait until something has changed since `version`.

        A step in which nothing went on is no change: those who wait would wake each other for ever.
        """
        with self._changed:
            while self._version == version and not self.steps.closed:
                self._changed.wait()

    def _check_stuck(self, request: Request) -> None:
        """Nothing went on.  Raise where nobody can: the streams that hold the lanes belong to threads that wait.

        Within the step, so that of those who come to wait at once the last one sees all others.
        """
        self._idle.add(request.asker)
        if request not in self.waiting or not {each.asker for each in self.running} <= self._idle:
            return
        self.waiting.remove(request)
        blocked = next((each.blocked for each in (request, *self.waiting) if each.blocked is not None), None)
        if blocked is not None:
            raise blocked
        raise LanesBusy(f"all {self.lanes} lanes are held by streams that nobody else can end")

    # -- a step -------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Admit who waits and evaluate one batch; whether anything went on."""
        self.at_each_step()
        freed = self._freed
        try:
            ended = self._end_what_is_over()
            admitted = self._admit()
            ready = [request for request in self.running if self._is_ready(request)]
            stopped = [request for request in ready if self._stops(request)]
            for request in stopped:
                self._retire(request)
            items = self._choose([request for request in ready if request not in stopped])
            self._evaluate(items)
        except BaseException:
            self._settle()
            raise
        self._went_on = bool(ended or admitted or stopped or items or self._freed != freed)
        return self._went_on

    def _end_what_is_over(self) -> bool:
        """Free the lanes of those whose end a step did not come to, and give up who waits and was cancelled."""
        over = [each for each in self.running if each.finish_reason is not None or each.error is not None]
        for request in over:
            self._retire(request)
        cancelled = [each for each in self.waiting if each.cancelled]
        for request in cancelled:
            self.waiting.remove(request)
            request.finish("stopped")
            self._retire(request)
        return bool(over or cancelled)

    def _settle(self) -> None:
        """After a step that was interrupted: no lane holds anything that its request does not know of."""
        for request in list(self.running):
            lease = request.lease
            if lease is not None and self.cache.pool.length(lease.lane) != lease.length:
                self._undo(request)

    def _undo(self, request: Request, code: int = 2) -> None:
        """What a failed batch left in the lane goes."""
        self._take_out(request, lambda lease: self.cache.undo(lease, code))

    def _take_out(self, request: Request, act: Callable[[Lease], object]) -> None:
        """Take something out of the lane; a request whose lane is lost with it is at its end."""
        lease = request.lease
        assert lease is not None
        try:
            act(lease)
        except NativeError as error:
            request.error = error
            self._retire(request)
        if lease.length == 0 and request in self.running:
            lease.promised = len(request.tokens)

    def _is_ready(self, request: Request) -> bool:
        if request.finish_reason is not None or request.error is not None:
            return False
        ahead = len(self.running) > 1 and len(request.outbox) < _AHEAD
        asked = request.wanted and (request.whole or not request.outbox)
        return asked or ahead or request.publish_at is not None

    def _stops(self, request: Request) -> bool:
        try:
            return request.stopping()
        except BaseException as error:  # noqa: BLE001 - its caller's code, which another thread may be running
            self._blame(request, error)
            return True

    def _blame(self, request: Request, error: BaseException) -> None:
        """It is the end of `request`; but Ctrl-C is for whoever is running here."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        request.error = error

    def _admit(self) -> bool:
        """Give lanes to requests that wait, in order; whether any got one."""
        admitted = False
        for request in list(self.waiting):
            if len(self.running) >= self.lanes:
                break
            if request.blocked is not None and request.blocked_at == self._freed and self._went_on:
                break  # looking again before anybody has ended would restore all of it again, in vain, at each step
            if self._evaluated_by_another(request):
                continue
            try:
                lease = self.cache.begin(request.namespace, request.tokens, reuse=request.keep, room=request.room)
            except ContextFull as error:
                if self.running:  # those who hold the cells may end; who came later may not go before
                    request.blocked, request.blocked_at = error, self._freed
                    break
                self._fail(request, error)
                admitted = True
                continue
            except Exception as error:  # noqa: BLE001 - it is this request's alone, and another thread may be here
                self._fail(request, error)
                admitted = True
                continue
            if lease is None:
                break
            self.waiting.remove(request)
            request.blocked = None
            request.begun(lease)
            lease.promised = len(request.tokens) - lease.length
            self.running.append(request)
            admitted = True
            self._begin(request)
        return admitted

    def _fail(self, request: Request, error: BaseException) -> None:
        request.error = error
        self.waiting.remove(request)

    def _begin(self, request: Request) -> None:
        """What a request needs before its first batch."""
        lease = request.lease
        assert lease is not None
        if request.keep:
            lease.pauses = self.cache.stops(lease, request.tokens, request.message_starts)
        if request.evaluated:
            if not request.wants_token:
                request.finish("length")
            elif lease.logits is not None:
                self._accept(request, -1, lease.logits)
        if request.finish_reason is not None or request.error is not None:
            self._retire(request)

    def _evaluated_by_another(self, request: Request) -> bool:
        """Whether to wait because a running request is evaluating the head of this prompt; it is told to publish it."""
        cache = self.cache
        if not request.keep or cache.off or cache.config.mode != "lookup-record":
            return False
        held = -1
        for other in self.running:
            if not other.keep or other.namespace != request.namespace:
                continue
            common = common_length(request.tokens[:-1], other.tokens)  # one token is always evaluated
            if held < 0:
                held = cache.lookup(request.namespace, request.tokens)
            if common - held < max(1, cache.config.min_tokens):
                continue
            if common <= other.length:
                if cache.capability.residents:  # else nothing can be cut out of it
                    self._publish(other)
                    held = cache.lookup(request.namespace, request.tokens)
                continue
            other.publish_at = min(common, other.publish_at or common)
            return True
        return False

    def _publish(self, request: Request) -> None:
        """Record what a running request has evaluated so far, for somebody who waits for it."""
        request.publish_at = None
        self._record(request)

    def _record(self, request: Request) -> None:
        """Keep what its lane holds.  What fails costs time, and nobody an answer."""
        lease = request.lease
        assert lease is not None
        if request.keep and lease.length:
            try:
                self.cache.record(lease, request.path(lease.length))
            except SkippyError:
                log.exception("what a lane holds was not recorded")
                self.cache.space.failures["record"] += 1

    def _choose(self, ready: list[Request]) -> list[_Item]:
        """The next batch: a token of each lane that decodes, and tokens of prompts in the order they came."""
        items = []
        for request in ready:
            if request.evaluated:  # its logits were lost, because a step was interrupted: once more from zero
                self._take_out(request, self.cache.restorer.clean)
        ready = [request for request in ready if not request.done]
        decoding = [request for request in ready if not request.in_prompt]
        room = self.context.sequences.n_batch - len(decoding)
        budget = min(room, self.prompt_budget) if decoding else room
        for request in decoding:
            items.append(self._item(request, 1))
        for request in ready:
            if request.in_prompt and budget > 0:
                items.append(self._item(request, budget))
                budget -= len(items[-1].tokens)
        return self._with_room(items)

    @staticmethod
    def _item(request: Request, most: int) -> _Item:
        tokens = request.next_tokens(most)
        return _Item(request, tokens, "last" if request.length + len(tokens) == request.total else "none")

    def _with_room(self, items: list[_Item]) -> list[_Item]:
        """Those for whose tokens there are cells; an answer for which there are none is at its end."""
        kept: list[_Item] = []
        total = 0
        for item in items:
            request, n = item.request, len(item.tokens)
            assert request.lease is not None
            request.lease.promised = max(0, request.lease.promised - n)
            try:
                self.cache.reserve(total + n)
            except ContextFull as error:
                self._out_of_room(request, error)
                continue
            kept.append(item)
            total += n
        return kept

    def _out_of_room(self, request: Request, error: ContextFull) -> None:
        if request.in_prompt:
            request.error = error
        else:
            request.report.reason = "context_full"
            request.finish("length")
        self._retire(request)

    # -- a batch ------------------------------------------------------------------------------------------

    def _evaluate(self, items: list[_Item]) -> None:
        if not items:
            return
        began = time.perf_counter()
        done = self._decode(items)
        if not done and len(items) > 1:  # one of them is to blame, or there is too little room: each by itself
            for item in items:
                self._once_more(item)
            return
        if not done:
            return
        index = -1
        for item in items:
            lease = item.request.lease
            assert lease is not None
            lease.length += len(item.tokens)
            index += len(item.tokens)
            item.index = index if len(items) > 1 else -1
        prompts = [item for item in items if item.request.length <= len(item.request.tokens)]
        for item in items:
            if item.outputs == "last":
                self._chosen(item)
        seconds = time.perf_counter() - began
        self._note(items, prompts, seconds)
        for item in items:
            self._keep_state(item.request)
        for item in items:
            if item.request.finish_reason is not None or item.request.error is not None:
                self._retire(item.request)

    def _once_more(self, item: _Item) -> None:
        """Evaluate what a failed batch was to evaluate of one request, by itself; from zero, where its lane is lost."""
        request = item.request
        if request.error is not None or request.finish_reason is not None:
            return
        self._evaluate(self._with_room([self._item(request, len(item.tokens))]))

    def _note(self, items: list[_Item], prompts: list[_Item], seconds: float) -> None:
        """Learn from a batch what evaluating costs, where it says so."""
        for item in prompts:
            item.request.prefill_seconds += seconds
        if len(prompts) == len(items):
            self.cache.speeds.prefilled(sum(len(item.tokens) for item in items), seconds)
        elif len(items) == 1 and items[0].request.lease is not None:
            self.cache.decoded(items[0].request.lease, seconds)

    def _decode(self, items: list[_Item]) -> bool:
        """Evaluate a batch.  False if it failed: no lane has anything of it then, and one by itself has its error."""
        request = items[0].request
        alone = len(items) == 1
        code = 0
        stop: Stop | None = None
        asking: Any = nullcontext()
        if alone and request.in_prompt and request.should_stop is not None:
            asking = self.context.stop_when(request.should_stop)
        try:
            with asking as stop:
                while (code := self._call(items)) == 1:
                    if not self.cache.space.evict_resident("decode"):
                        n = sum(len(item.tokens) for item in items)
                        raise ContextFull(f"llama.cpp found no room for {n} tokens, and nothing can leave")
                if code != 0:
                    n, at = len(items[0].tokens), request.length
                    raise NativeError(f"evaluating {n} tokens at {at} failed with {code}", code)
        except BaseException as error:
            for item in items:
                self._undo(item.request, code)
            asked = stop is not None and error is stop.error  # raised by should_stop, and not by Ctrl-C
            if isinstance(error, KeyboardInterrupt) or not (isinstance(error, Exception) or asked):
                raise  # it is for whoever is running here
            if alone:
                self._failed(request, error, stopped=code == ABORTED and stop is not None and stop.said)
            else:
                log.warning("a batch of %d requests failed, each is evaluated by itself: %s", len(items), error)
            return False
        return True

    def _call(self, items: list[_Item]) -> int:
        sequences = self.context.sequences
        parts: list[tuple[int, int, Any, Literal["none", "last", "all"]]] = []
        for item in items:
            lease = item.request.lease
            assert lease is not None
            self.cache.pool.expect(lease.lane, lease.length + len(item.tokens))
            parts.append((lease.lane, lease.length, item.tokens, item.outputs))
        return sequences.decode(*parts[0]) if len(parts) == 1 else sequences.decode_many(parts)

    def _failed(self, request: Request, error: BaseException, *, stopped: bool) -> None:
        if stopped and isinstance(error, NativeError):
            request.finish("stopped")
        elif isinstance(error, ContextFull):
            self._out_of_room(request, error)
            return
        else:
            request.error = request.error or error
        self._retire(request)

    def _chosen(self, item: _Item) -> None:
        """The lane of a request holds all of it: choose its next token."""
        request = item.request
        lease = request.lease
        assert lease is not None
        if request.keep and not request.generated:
            self.cache.note_logits(lease, lambda: self.context.logits(item.index))
        if request.wants_token:
            self._accept(request, item.index)
        else:
            request.finish("length")

    def _accept(self, request: Request, index: int, logits: Any = None) -> None:
        try:
            request.accept(request.sampler.sample(self.context, index, logits))
        except Exception as error:  # noqa: BLE001 - it is this request's alone, and another thread may be here
            request.error = error

    def _keep_state(self, request: Request) -> None:
        """Keep what cannot be had later, and what somebody waits for."""
        lease = request.lease
        if not request.keep or lease is None or lease.length == 0:
            return
        self.cache.keep_state(lease, len(request.tokens), request.path)
        if request.publish_at is not None and lease.length >= request.publish_at:
            self._publish(request)

    def _retire(self, request: Request) -> None:
        """Record what its lane holds, if it is to be kept, and free the lane.  Twice does nothing."""
        request.done = True
        request.sampler.close()
        if request not in self.running:
            return
        self.running.remove(request)
        self._freed += 1
        lease = request.lease
        assert lease is not None
        lease.promised = 0
        try:
            self._record(request)
        finally:
            self.cache.end(lease)
