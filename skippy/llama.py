"""`Llama`: llama_cpp.Llama with prefix reuse, for programs that are written for it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_cpp as lib

from skippy.config import CacheConfig
from skippy.errors import SkippyError
from skippy.llama_cache import LlamaPrefixCache
from skippy.llama_calls import Options, OptionsOfThreads, describe
from skippy.llama_lane import LlamaWithLane
from skippy.llama_turns import Turns
from skippy.prefix_cache import PrefixCache

__all__ = ["Llama", "PrefixCache"]

_GENERATE = inspect.signature(llama_cpp.Llama.generate)


class Llama(LlamaWithLane):
    """llama_cpp.Llama that never evaluates a prompt prefix twice.

    Takes what the parent takes, `cache` (a CacheConfig), and `on_event(name, details)`, which is called for "lookup",
    "miss", "restore", "save" and "evict" (docs/stats.md) and must not use the Llama; pickle leaves it out.  Where the
    caller does not say otherwise, flash attention is on where the model allows it; the context is unified and has
    sequence ids for cached prefixes.  Responses carry `usage["prompt_tokens_details"]["cached_tokens"]`; `last_reuse`
    is the report of the last request, `prefix_cache` what is stored (None with mode "disabled", which changes nothing
    of the parent).

    One request at a time: other threads wait for their turn; a stream that is still open when the same thread
    begins another request is at its end, and says so when it is asked for more.  Looking into `prefix_cache` waits
    for the token that is being made, not for the answer.
    """

    def __init__(
        self,
        model_path: str,
        *,
        cache: CacheConfig | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
        **kwargs: Any,
    ) -> None:
        self._options = OptionsOfThreads()
        self._turns = Turns()
        self._set_cache: Any = None
        super().__init__(model_path, cache=cache, on_event=on_event, **kwargs)

    # -- turns ------------------------------------------------------------------------------------------

    def _begin_turn(self) -> int:
        """Wait for other threads; an open stream of this thread is at its end.  The number of the new turn."""
        self._steps.check()
        if self._turns.mine:
            self._record()
        return self._turns.begin()

    def _end_turn(self, number: int) -> None:
        if self._steps.inside:  # a stream that the garbage collector closes in the middle of a step of this thread
            self._steps.later(lambda: self._end_turn(number))
        elif self._turns.holds(number):
            try:
                self._record()
            finally:
                self._turns.end(number)

    # -- generating -------------------------------------------------------------------------------------

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """As the parent's: yields tokens.  What is stored of the prompt is restored, and what was evaluated kept."""
        bound = _GENERATE.bind(self, tokens, *args, **kwargs)
        if self.prefix_cache is None or not bound.arguments.get("reset", True):
            yield from super().generate(tokens, *args, **kwargs)
            return
        mine = not self._turns.inside
        number = self._begin_turn() if mine else self._turns.number
        inner: Generator[int, Sequence[int] | None, None] | None = None
        try:
            started = time.perf_counter()
            with self._steps:
                report = self._restore(list(tokens), self._options.current)
            bound.arguments["tokens"] = list(tokens)
            inner = super().generate(*bound.args[1:], **bound.kwargs)
            sent: Sequence[int] | None = None
            first = True
            while True:
                with self._steps:
                    try:
                        token = inner.send(sent)
                    except StopIteration:
                        return
                    if first:
                        report.ttft_ms = 1e3 * (time.perf_counter() - started)
                        report.prefill_ms = report.ttft_ms - report.restore_ms
                        self.prefix_cache.cache.speeds.prefilled(report.evaluated_tokens, report.prefill_ms / 1e3)
                        first = False
                self._produced += not lib.llama_vocab_is_eog(self._model.vocab, token)
                sent = yield token
                self._turns.check(number)
        finally:
            if inner is not None:
                inner.close()
            if mine:
                self._end_turn(number)
            elif number == self._turns.number:
                self._record()

    # -- requests ---------------------------------------------------------------------------------------

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if self.prefix_cache is None:
            yield from super()._create_completion(*args, **kwargs)
            return
        options = self._options.current
        stream = bool(kwargs.get("stream"))
        if kwargs.get("echo") and kwargs.get("logprobs") is not None:
            options = replace(options, look_up=False)  # logits of all prompt tokens are wanted: evaluate them all
        number = self._begin_turn()
        inner: Any = super()._create_completion(*args, **kwargs)
        try:
            while True:
                with self._turns.within(number), self._options.hold(options):
                    try:
                        response = next(inner)
                    except StopIteration:
                        return
                    describe(response, self.last_reuse, self._produced, stream=stream)
                yield response
        finally:
            inner.close()
            self._end_turn(number)

    def create_completion(
        self, *args: Any, cache_prompt: bool | None = None, prompt_cache_key: str | None = None, **kwargs: Any
    ) -> Any:
        """As the parent's.  `cache_prompt` False: no look-up, no record; `prompt_cache_key` keeps tenants apart."""
        options = self._options.asked_for(cache_prompt, prompt_cache_key)
        with self._options.hold(options):
            response = super().create_completion(*args, **kwargs)
        return response if isinstance(response, dict) else self._stream(response, options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `create_completion`."""
        return self.create_completion(*args, **kwargs)

    def create_chat_completion(
        self, *args: Any, cache_prompt: bool | None = None, prompt_cache_key: str | None = None, **kwargs: Any
    ) -> Any:
        """As the parent's.  `cache_prompt` False: no look-up, no record; `prompt_cache_key` keeps tenants apart."""
        options = self._options.asked_for(cache_prompt, prompt_cache_key)
        options = replace(options, messages=tuple(args[0] if args else kwargs.get("messages", ())))
        with self._options.hold(options):
            response = super().create_chat_completion(*args, **kwargs)
        if isinstance(response, dict):
            return response
        return self._stream(response, options, usage=True)

    def _stream(self, chunks: Iterator[Any], options: Options, usage: bool = False) -> Iterator[Any]:
        """Hand out chunks; whenever the next one is made, the options of the call hold."""
        try:
            while True:
                with self._options.hold(options):
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        return
                if usage and self.prefix_cache is not None and "usage" not in chunk:
                    describe(chunk, self.last_reuse, self._produced, stream=True)
                yield chunk
        finally:
            chunks.close()  # type: ignore[attr-defined]

    # -- set_cache ---------------------------------------------------------------------------------------

    @property
    def cache(self) -> Any:
        """What `set_cache` was given.  A LlamaPrefixCache stays out of the parent's sight while it completes: the
        parent would save the state after every request, and all that is to be kept is kept already.
        """
        hidden = isinstance(self._set_cache, LlamaPrefixCache) and self._turns.inside
        return None if hidden else self._set_cache

    @cache.setter
    def cache(self, cache: Any) -> None:
        self._set_cache = cache
        if isinstance(cache, LlamaPrefixCache):
            cache.bind(self)

    @property
    def cached_bytes(self) -> int:
        """Bytes of cached state: cells of residents, and saved state in RAM."""
        if self.prefix_cache is None:
            return 0
        cache = self.prefix_cache.cache
        with self._steps:
            return cache.tree.cells * self._bytes_per_token + cache.store.arena.used

    def restorable(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt could be restored now."""
        if self.prefix_cache is None or not len(tokens):
            return 0
        cache = self.prefix_cache.cache
        with self._steps:
            return cache.lookup(self.prefix_cache.namespace_hash(), np.array(tokens, np.int32))

    def restored_state(self, tokens: Sequence[int]) -> Any:
        """A LlamaState of the longest stored prefix of `tokens`, which is in the context afterwards."""
        number = self._begin_turn()
        try:
            with self._steps:
                self._drop_lease()
                self._foreign = False
                self.n_tokens = 0
                self._restore(list(tokens), self._options.current)
                return self.save_state()
        finally:
            self._end_turn(number)

    # -- the rest of the parent ---------------------------------------------------------------------------

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's, which clears the memory: what is cached moves into RAM first."""
        if self.prefix_cache is None:
            return super().embed(*args, **kwargs)
        number = self._begin_turn()
        try:
            with self._steps:
                try:
                    return super().embed(*args, **kwargs)
                finally:
                    self._drop_lease()
                    self._foreign = False
        finally:
            self._end_turn(number)

    def __getstate__(self) -> dict[str, Any]:
        """What pickle keeps: the arguments, without `on_event` (few callbacks can be pickled), and nothing cached."""
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        if "flash_attn" not in self._asked:
            state.pop("flash_attn", None)
        return {**state, "cache": self._config}


try:  # for editors and for packages that look at the constructor: the parent's arguments, and ours
    _parent = inspect.signature(llama_cpp.Llama.__init__)
    _cache = inspect.Parameter("cache", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=CacheConfig)
    _listen = inspect.Parameter("on_event", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Callable)
    _own = [p for p in _parent.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    _rest = [p for p in _parent.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    Llama.__init__.__signature__ = _parent.replace(parameters=[*_own, _cache, _listen, *_rest])  # type: ignore[attr-defined]
except ValueError as error:
    raise SkippyError(f"the constructor of llama_cpp.Llama has another form than expected: {error}") from error
