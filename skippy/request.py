"""One request: its prompt, its answer so far, and what is to be evaluated next.  The engine evaluates it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from skippy.lease import Lease
from skippy.model import Model
from skippy.report import ReuseReport
from skippy.sampling import Sampler
from skippy.text import TextStream

if TYPE_CHECKING:
    from skippy.engine import Engine

__all__ = ["Chunk", "Completion", "Request"]

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Completion:
    """An answer: its text, its tokens as generated (without the end token), why it ended, and what was reused.

    `finish_reason` is "stop" (end token or stop text), "length" (max_tokens, or the context is full) or "stopped"
    (`should_stop` said so).
    """

    text: str
    tokens: list[int]
    finish_reason: str
    reuse: ReuseReport


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer while it is made.  The last one has a `finish_reason` and the `reuse` report."""

    text: str
    tokens: list[int]
    finish_reason: str | None = None
    reuse: ReuseReport | None = None


class Request:
    """The state of one request.  `run()` yields chunks; what was evaluated is recorded however it ends.

    `prompt` is int32 [n], n >= 1; `namespace` the identity under which it is looked up, if `look_up`, and recorded,
    if `keep`.  `room` cells for the answer are wanted before it begins.  `should_stop` is asked before each batch of
    the prompt, in the middle of one that is evaluated alone, and before each further token.  Of waiting requests the
    one with the highest `priority` comes first.
    """

    def __init__(
        self,
        prompt: Tokens,
        *,
        engine: Engine,
        model: Model,
        sampler: Sampler,
        stops: tuple[str, ...],
        max_tokens: int | None,
        namespace: str,
        keep: bool = True,
        room: int = 1,
        message_starts: Sequence[int] = (),
        should_stop: Callable[[], bool] | None = None,
        priority: int = 0,
    ) -> None:
        self.generated: list[int] = []
        self.report = ReuseReport(prompt_tokens=len(prompt))
        self.finish_reason: str | None = None
        self.tokens = prompt
        self.namespace = namespace
        self.keep = keep
        self.room = room
        self.message_starts = message_starts
        self.should_stop = should_stop
        self.priority = priority
        self.sampler = sampler
        # What the engine keeps of it while it runs.
        self.lease: Lease | None = None
        self.outbox: deque[Chunk] = deque()
        self.error: BaseException | None = None
        self.blocked: BaseException | None = None  # why it still waits although a lane is free
        self.blocked_at = 0  # the engine's count of what was set free when that was found
        self.cancelled = False  # it is not wanted any more, and gives up its place in the queue
        self.done = False
        self.wanted = False  # somebody waits for the next chunk
        self.whole = False  # for all of it
        self.asker: object = None  # who waits for it: a thread or task; itself where it goes from thread to thread
        self.task: object = None  # the task of asyncio that asks, through some thread
        self.publish_at: int | None = None  # where somebody waits for what this one is evaluating
        self.prefill_seconds = 0.0
        self._engine = engine
        self._model = model
        self._max_tokens = max_tokens
        self._text = TextStream(stops)
        self._pending_text = ""
        self._pending: list[int] = []
        self._began = 0.0
        self._started = False

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return [int(token) for token in self.tokens]

    @property
    def text(self) -> str:
        """The answer so far, as far as it is final."""
        return self._text.text

    # -- for whoever asks ---------------------------------------------------------------------------------

    def run(self) -> Generator[Chunk, None, None]:
        """Serve the request.  Closing the generator early keeps what was evaluated.  RuntimeError the second time."""
        if self._started:
            raise RuntimeError("this request has been run; make another one")
        self._started = True
        return self._serve()

    def _serve(self) -> Generator[Chunk, None, None]:
        self.enter()
        try:
            while (chunk := self._engine.next(self)) is not None:
                yield chunk
        finally:
            self._engine.leave(self)

    def enter(self) -> None:
        """Take a place in the queue; `run` does it by itself.  Overloaded if it is full."""
        if self._began == 0.0:
            began = time.perf_counter()
            self.asked(wanted=False)
            self._engine.enter(self)
            self._began = began

    def complete(self) -> Completion:
        """Serve the request to its end.  RuntimeError the second time."""
        if self._started:
            raise RuntimeError("this request has been run; make another one")
        self._started = True
        self.enter()
        try:
            self._engine.next(self, whole=True)
        finally:
            self._engine.leave(self)
        return Completion(self.text, self.generated, self.finish_reason or "stop", self.report)

    def asked(self, *, wanted: bool = True, whole: bool = False) -> None:
        """The calling thread, or the task for which it works, asks for the next chunk, or for all of it."""
        who = self.task or threading.get_ident()
        # Of a stream that goes from thread to thread none can be said to hold it: the next chunk may go to another.
        self.asker = who if self.task or self.asker in (None, who) else self
        self.wanted, self.whole = wanted, whole

    def cancel(self) -> None:
        """Give up the place in the queue; a request that is running asks its `should_stop`."""
        self.cancelled = True
        self._engine.wake()

    @property
    def has_news(self) -> bool:
        """Whether who waits for it can go on."""
        return self.done or self.error is not None or bool(self.outbox and not self.whole)

    def take_news(self) -> Chunk | None:
        """The next chunk, None at the end; raises what ended it."""
        if self.outbox and not self.whole:
            return self.outbox.popleft()
        if self.error is not None:
            raise self.error
        return None

    # -- for the engine -----------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """How many tokens its lane holds."""
        return 0 if self.lease is None else self.lease.length

    @property
    def in_prompt(self) -> bool:
        """Whether tokens of the prompt are still to be evaluated."""
        return self.length < len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.tokens) + len(self.generated)

    def path(self, end: int, begin: int = 0) -> Tokens:
        """The tokens [begin, end) of prompt and answer: int32 [end - begin].  Within the prompt a view of it."""
        n = len(self.tokens)
        if end <= n:
            return self.tokens[begin:end]
        answer = np.array(self.generated[max(0, begin - n) : end - n], np.int32)
        return answer if begin >= n else np.concatenate([self.tokens[begin:], answer])

    def next_tokens(self, most: int) -> Tokens:
        """What is to be evaluated next, at most `most` tokens, to the next pause at the farthest."""
        begin = self.length
        end = min(self.total, begin + most)
        pauses = () if self.lease is None else self.lease.pauses
        end = next((pause for pause in pauses if begin < pause < end), end)
        if self.publish_at is not None and begin < self.publish_at < end:
            end = self.publish_at
        return self.path(end, begin)

    @property
    def evaluated(self) -> bool:
        """Whether the lane holds all of it, so that the next token can be chosen."""
        return self.length == self.total

    def begun(self, lease: Lease) -> None:
        """It has a lane, with what was restored."""
        self.lease = lease
        lease.tell(self.report)

    @property
    def wants_token(self) -> bool:
        """Whether a token is to be chosen after the prompt; else it is evaluated, and that is all."""
        return self._max_tokens != 0

    def accept(self, token: int | None) -> None:
        """Take the chosen token into the answer; None ends it (the grammar has come to its end)."""
        if not self.generated and self.report.ttft_ms == 0.0:
            self.report.ttft_ms = 1e3 * (time.perf_counter() - self._began)
            self.report.prefill_ms = 1e3 * self.prefill_seconds
        if token is None or self._model.is_end(token):
            self.finish("stop")
            return
        self.generated.append(token)
        self._pending.append(token)
        self._pending_text += self._text.feed(self._model.piece(token))
        if self._text.stopped:
            self.finish("stop")
        elif self._max_tokens is not None and len(self.generated) >= self._max_tokens:
            self.finish("length")
        elif self._pending_text:
            self._put(Chunk(self._pending_text, self._pending))

    def _put(self, chunk: Chunk) -> None:
        self.outbox.append(chunk)
        self._pending_text, self._pending = "", []

    def finish(self, reason: str) -> None:
        """It is at its end; the last chunk says why."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.report.prefill_ms = 1e3 * self.prefill_seconds
            self._put(Chunk(self._pending_text + self._text.finish(), self._pending, reason, self.report))

    def stopping(self) -> bool:
        """Whether `should_stop` says so; the request is finished then."""
        if self.should_stop is None or not self.should_stop():
            return False
        self.finish("stopped")
        return True
