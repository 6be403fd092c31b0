"""One request from prompt to answer: restore, evaluate the rest, decode, record."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from skippy.cache import Cache, Lease
from skippy.errors import ContextFull, NativeError
from skippy.model import ABORTED, Model, ModelContext
from skippy.report import ReuseReport
from skippy.sampling import Sampler
from skippy.text import TextStream

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

    `prompt` is int32 [n], n >= 1.  `step` is held around every use of the context, never while a chunk is
    handed out.  `should_stop` is asked before each batch of the prompt, in the middle of one, and before each further
    token.  `begin` takes the lane, waiting for one if it must; `end` gives it back, and gets the tokens
    that are in it if they are to be kept.
    """

    def __init__(
        self,
        prompt: Tokens,
        *,
        cache: Cache,
        context: ModelContext,
        model: Model,
        sampler: Sampler,
        stops: tuple[str, ...],
        max_tokens: int | None,
        record: bool,
        message_starts: Sequence[int] = (),
        should_stop: Callable[[], bool] | None = None,
        step: Callable[[Lease], AbstractContextManager[object]],
        begin: Callable[[], Lease],
        end: Callable[[Lease, Tokens | None], None],
    ) -> None:
        self.generated: list[int] = []
        self.report = ReuseReport(prompt_tokens=len(prompt))
        self.finish_reason: str | None = None
        self._prompt = prompt
        self._cache = cache
        self._context = context
        self._model = model
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._keep = record
        self._message_starts = message_starts
        self._kept_at = 0  # length of the lane when its state was last kept
        self._should_stop = should_stop
        self._step = step
        self._begin = begin
        self._end = end
        self._text = TextStream(stops)
        self._started = False

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens."""
        return [int(token) for token in self._prompt]

    @property
    def text(self) -> str:
        """The answer so far, as far as it is final."""
        return self._text.text

    def run(self) -> Generator[Chunk, None, None]:
        """Serve the request.  Closing the generator early keeps what was evaluated.  RuntimeError the second time."""
        if self._started:
            raise RuntimeError("this request has been run; make another one")
        self._started = True
        return self._serve()

    def _serve(self) -> Generator[Chunk, None, None]:
        started = time.perf_counter()
        lease: Lease | None = None
        tokens: list[int] = []
        text = ""
        try:
            lease = self._begin()
            self._note(lease)
            token = self._prefill(lease)
            if self.finish_reason != "stopped":
                self.report.ttft_ms = 1e3 * (time.perf_counter() - started)
            while token is not None:
                text += self._accept(token, tokens)
                if self.finish_reason is not None:
                    break
                if text:
                    yield Chunk(text, tokens)
                    text, tokens = "", []
                if self._stopping():
                    break
                token = self._advance(lease, token)
            yield Chunk(text + self._text.finish(), tokens, self.finish_reason, self.report)
        finally:
            self._sampler.close()
            if lease is not None:
                self._end(lease, self._path(lease) if self._keep else None)

    def _path(self, lease: Lease) -> Tokens:
        """The tokens that the lane holds."""
        return np.concatenate([self._prompt, np.array(self.generated, np.int32)])[: lease.length]

    def complete(self) -> Completion:
        """Serve the request to its end."""
        for _ in self.run():
            pass
        return Completion(self.text, self.generated, self.finish_reason or "stop", self.report)

    def _note(self, lease: Lease) -> None:
        report = self.report
        report.cached_tokens = lease.restored
        report.evaluated_tokens = len(self._prompt) - lease.restored
        report.by_tier = dict(lease.by_tier)
        report.restore_ms = lease.restore_ms
        report.reason = lease.reason
        report.diverged_at = lease.diverged_at

    def _prefill(self, lease: Lease) -> int | None:
        """Evaluate what of the prompt was not restored; the first token of the answer, None if there is none."""
        n = len(self._prompt)
        token: int | None = None
        seconds = 0.0
        if lease.length == n and lease.logits is not None and self._max_tokens != 0:
            token = self._choose(lease.logits)
        with self._step(lease):
            pauses = self._cache.stops(lease, self._prompt, self._message_starts) if self._keep else []
        while lease.length < n and not self._stopping():
            end = min(lease.length + self._context.sequences.n_batch, n)
            end = next((pause for pause in pauses if lease.length < pause < end), end)
            with self._step(lease):
                began = time.perf_counter()
                if not self._evaluate_or_stop(lease, self._prompt[lease.length : end], "last" if end == n else "none"):
                    break
                if end == n and self._max_tokens != 0:
                    token = self._choose()
                seconds += time.perf_counter() - began
                if self._keep:
                    self._keep_state(lease, end in pauses)
        if self._max_tokens == 0 and self.finish_reason is None:
            self.finish_reason = "length"
        self.report.prefill_ms = 1e3 * seconds
        if lease.length > lease.restored:
            self._cache.speeds.prefilled(lease.length - lease.restored, seconds)
        return token

    def _keep_state(self, lease: Lease, pause: bool) -> None:
        """Keep what cannot be had later: the logits after the prompt, and the state of the lane where it is of use."""
        end = lease.length == len(self._prompt)
        if end:
            self._cache.note_logits(lease, self._context.logits, self._model.n_vocab)
        if self._cache.is_of_use(end or pause):
            self._cache.checkpoint(lease, self._prompt[: lease.length])
        self._kept_at = lease.length

    def _stopping(self) -> bool:
        """Whether the request is to end here."""
        if self._should_stop is None or not self._should_stop():
            return False
        self.finish_reason = "stopped"
        return True

    def _evaluate_or_stop(self, lease: Lease, tokens: Tokens, outputs: Literal["none", "last"]) -> bool:
        """Evaluate `tokens`; False if the request was stopped in the middle of them, which are out again then."""
        if self._should_stop is None:
            self._evaluate(lease, tokens, outputs)
            return True
        with self._context.stop_when(self._should_stop) as stop:
            try:
                self._evaluate(lease, tokens, outputs)
            except NativeError as error:
                if error.code != ABORTED or not stop.said:
                    raise
                self.finish_reason = "stopped"
                return False
        return True

    def _choose(self, logits: npt.NDArray[np.float32] | None = None) -> int | None:
        token = self._sampler.sample(self._context, logits)
        if token is None:  # the grammar has come to its end
            self.finish_reason = "stop"
        return token

    def _accept(self, token: int, tokens: list[int]) -> str:
        """Take a token into the answer; the text that became final."""
        if self._model.is_end(token):
            self.finish_reason = "stop"
            return ""
        self.generated.append(token)
        tokens.append(token)
        text = self._text.feed(self._model.piece(token))
        if self._text.stopped:
            self.finish_reason = "stop"
        elif self._max_tokens is not None and len(self.generated) >= self._max_tokens:
            self.finish_reason = "length"
        return text

    def _advance(self, lease: Lease, token: int) -> int | None:
        """Evaluate `token` and choose the next; None where the context is full or the grammar ends."""
        with self._step(lease):
            began = time.perf_counter()
            try:
                self._evaluate(lease, np.array([token], np.int32), "last")
            except ContextFull:
                self.finish_reason = "length"
                self.report.reason = "context_full"
                return None
            following = self._choose()  # which waits for the backend
            self._cache.decoded(lease, time.perf_counter() - began)
            if self._keep and self._cache.wants_checkpoint(lease, self._kept_at):
                self._cache.checkpoint(lease, self._path(lease))
                self._kept_at = lease.length
            return following

    def _evaluate(self, lease: Lease, tokens: Tokens, outputs: Literal["none", "last"]) -> None:
        """Decode `tokens` at the end of the lane.  Room is made before; if llama.cpp finds none all the same, again."""
        self._cache.reserve(len(tokens))
        code = 0
        try:
            while (code := self._context.sequences.decode(lease.lane, lease.length, tokens, outputs)) == 1:
                if not self._cache.space.evict_resident("decode"):
                    raise ContextFull(f"llama.cpp found no room for {len(tokens)} tokens, and nothing can leave")
            if code != 0:
                raise NativeError(f"evaluating {len(tokens)} tokens at {lease.length} failed with {code}", code)
        except BaseException:
            self._cache.undo(lease, code)
            raise
        lease.length += len(tokens)
