"""Sequence 0 of a llama_cpp.Llama as the lane of a cache: what is restored into it, evaluated in it, and kept of it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from skippy._llama import Context
from skippy.cache import Cache, Lease
from skippy.config import CacheConfig
from skippy.errors import StateError
from skippy.exits import close_at_exit
from skippy.history import common_length
from skippy.layout import MAGIC
from skippy.llama_calls import Options
from skippy.llama_context import LANE, attach, prepare
from skippy.model import piece_of
from skippy.prefix_cache import PrefixCache
from skippy.report import ReuseReport
from skippy.starts import message_starts
from skippy.steps import Steps

__all__ = ["LlamaWithLane"]


class LlamaWithLane(llama_cpp.Llama):
    """A Llama whose one sequence is lent by a cache; `Llama`, above it, says when to restore and when to record.

    Every use of the cache and the context is a step (`Steps`).
    """

    def __init__(
        self,
        model_path: str,
        *,
        cache: CacheConfig | None,
        on_event: Callable[[str, dict[str, Any]], None] | None,
        **kwargs: Any,
    ) -> None:
        self._config = CacheConfig() if cache is None else cache
        self._asked = frozenset(kwargs)
        self._on = self._config.mode != "disabled" and not kwargs.get("vocab_only")
        self.last_reuse: ReuseReport | None = None
        self.prefix_cache: PrefixCache | None = None
        self._sequences: Context | None = None
        self._lease: Lease | None = None
        self._foreign = False
        self._keep = True
        self._produced = 0
        self._prompt_end = 0  # tokens of the prompt, while state is kept in it and behind it; else 0
        self._steps = Steps()
        self._bytes_per_token = 0
        super().__init__(model_path, **kwargs)
        if self._on:
            self._attach(on_event)

    # -- making the context -----------------------------------------------------------------------------

    # The parent fills this structure, loads the model, and reads it again right before it makes the context.
    @property
    def context_params(self) -> Any:
        """llama.cpp's parameters of the context."""
        if self._on and "_model" in self.__dict__ and "_ctx" not in self.__dict__:
            prepare(self._params, self._model.model, self._config, self._asked)
        return self._params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._params = params

    def _attach(self, on_event: Callable[[str, dict[str, Any]], None] | None) -> None:
        listening = None if on_event is None else self._steps.event(on_event)
        attached = attach(self, self._config, on_event=listening)
        if attached is None:
            self._on = False
            return
        self._sequences = attached.sequences
        self._bytes_per_token = attached.bytes_per_token
        # Nothing that the Llama holds may hold the Llama: its memory is to be freed when the caller lets go of it.
        model, context = weakref.ref(self), weakref.ref(self._ctx)

        def tokenize(text: str) -> list[int]:
            llama = model()
            return [] if llama is None else llama._prompt_tokens(text)

        def show(tokens: list[int]) -> str:
            llama = model()
            return "" if llama is None else llama.detokenize(tokens, special=True).decode("utf-8", "replace")

        def clear_all() -> None:
            llama, ctx = model(), context()
            if llama is not None:
                llama._memory_is_cleared()
            if ctx is not None:
                type(ctx).kv_cache_clear(ctx)  # type: ignore[no-untyped-call]

        self.prefix_cache = PrefixCache(
            attached.cache,
            attached.identity,
            tokenize=tokenize,
            show=show,
            n_vocab=self.n_vocab(),
            step=self._steps,
        )
        if attached.cache.disk is not None:
            close_at_exit(self)
        # embed() and the multimodal handlers clear the whole memory through this call.
        self._ctx.kv_cache_clear = clear_all  # type: ignore[method-assign]

    def _prompt_tokens(self, text: str) -> list[int]:
        """The tokens that `create_completion` makes of a prompt, as the parent's `_create_completion` has it."""
        model = self._model
        bos = next((token for token in (model.token_cls(), self.token_bos()) if token != -1), None)
        eos = next((token for token in (model.token_sep(), self.token_eos()) if token != -1), None)
        tokens = self.tokenize(text.encode("utf-8"), add_bos=False, special=True) if text else []
        if bos is not None and model.add_bos_token():
            tokens = [bos, *tokens]
        if eos is not None and (model.add_eos_token() or model.token_sep() != -1):
            tokens = [*tokens, eos]
        return tokens

    # -- restoring, evaluating, recording ---------------------------------------------------------------

    def _restore(self, tokens: list[int], options: Options) -> ReuseReport:
        """Bring sequence 0 and the parent's view of it to the longest prefix of `tokens` that is to be had."""
        assert self.prefix_cache is not None
        cache = self.prefix_cache.cache
        kept, wanted = self._keep, options.look_up
        self._keep = options.keep
        self._produced = 0
        namespace = self.prefix_cache.namespace_hash(options.key)
        array = np.array(tokens, np.int32)
        if self._foreign and self.n_tokens > 0 and self._live_prefix(array) == self.n_tokens:
            # What is in the memory did not come through eval() alone (an image): it is gone on from, and not kept.
            self._plan_pauses(cache, None, array, options)
            return self._go_on(None, array, self.n_tokens)
        lease = self._lease
        keep_live = (
            wanted
            and kept
            and not self._foreign
            and lease is not None
            and lease.namespace == namespace
            and cache.config.mode in ("lookup-record", "lookup")
        )
        live = self._live_prefix(array) if keep_live else 0
        if not cache.capability.residents and (live < self.n_tokens or (live == len(array) and self._requires_eval)):
            live = 0  # it cannot be cut
        if lease is not None and live >= max(1, cache.lookup(namespace, array)):
            self._plan_pauses(cache, lease, array, options)
            return self._go_on(lease, array, live)
        self._drop_lease()
        self._foreign = False
        lease = cache.begin(namespace, array, reuse=wanted, room=0)
        assert lease is not None, "there is one lane, and it was given back"
        self._lease = lease
        self.n_tokens = lease.length
        self.input_ids[: lease.length] = array[: lease.length]
        self._requires_eval = True
        report = ReuseReport(prompt_tokens=len(tokens))
        lease.tell(report)
        self.last_reuse = report
        self._plan_pauses(cache, lease, array, options)
        return report

    def _plan_pauses(self, cache: Cache, lease: Lease | None, array: npt.NDArray[np.int32], options: Options) -> None:
        """Where the evaluation of the prompt `array` pauses so that its state can be kept."""
        self._prompt_end = 0
        if lease is None or not self._keep or self._foreign or not cache.keeps_points:
            return
        tokens = array.tolist() if options.messages else []
        bytes_of = {token: piece_of(self._model.vocab, token, special=True) for token in set(tokens)}
        starts = message_starts(options.messages, [bytes_of[token] for token in tokens])
        lease.pauses, lease.kept_at = cache.stops(lease, array, starts), 0
        self._prompt_end = len(array)

    def _live_prefix(self, array: npt.NDArray[np.int32]) -> int:
        return common_length(self.input_ids[: self.n_tokens], array)

    def _go_on(self, lease: Lease | None, array: npt.NDArray[np.int32], live: int) -> ReuseReport:
        """Sequence 0 holds as much as the cache could restore: the parent goes on from it as it always does."""
        assert self.prefix_cache is not None
        n = len(array)
        whole = live == n
        reused = n if whole and self.n_tokens == n and not self._requires_eval else live - whole
        reason = "hit" if live == self.n_tokens or whole else "partial"
        report = ReuseReport(n, reused, n - reused, reason=reason if reused else "below_min_tokens")
        report.by_tier["resident"] = reused
        if lease is not None:
            report.diverged_at = self.prefix_cache.cache.note_parting(lease.namespace, array)
        self.prefix_cache.cache.count(report.prompt_tokens, report.by_tier, report.reason)
        self.last_reuse = report
        if lease is not None:
            lease.restored = reused
        return report

    def _record(self) -> None:
        """Keep what is in sequence 0, if it is to be kept."""
        lease, prefix = self._lease, self.prefix_cache
        if prefix is None or lease is None or self._foreign or not self._keep or self.n_tokens == 0:
            return
        if self._steps.inside:  # the end of the turn, which has been put off, sees to it
            return
        with self._steps:
            path = self.input_ids[: self.n_tokens].astype(np.int32)
            prefix.cache.rewind(lease, path)
            prefix.cache.record(lease, path)

    def _drop_lease(self) -> None:
        if self._lease is not None and self.prefix_cache is not None:
            self.prefix_cache.cache.end(self._lease)
        self._lease = None

    def eval(self, tokens: Sequence[int]) -> None:
        """As the parent's; room is made before, and what failed midway is taken out again."""
        prefix = self.prefix_cache
        if prefix is None:
            super().eval(tokens)
            return
        with self._steps:
            self._evaluate(prefix.cache, prefix.namespace_hash(""), tokens)

    def _evaluate(self, cache: Cache, namespace: str, tokens: Sequence[int]) -> None:
        if self._lease is None:  # called by itself, not from generate()
            self._lease = cache.begin(namespace, np.zeros(0, np.int32), reuse=False, room=0)
            assert self._lease is not None
        lease = self._lease
        if lease.length != self.n_tokens:
            cache.rewind(lease, self.input_ids[: self.n_tokens].astype(np.int32))
        cache.reserve(len(tokens))
        try:
            for piece in self._pieces(cache, lease, tokens):
                super().eval(piece)
                lease.length = self.n_tokens
                if self._prompt_end and not self._foreign:
                    cache.keep_state(lease, self._prompt_end, lambda n: self.input_ids[:n].astype(np.int32))
        except BaseException:
            lease.length = self.n_tokens
            cache.undo(lease)
            self.n_tokens = lease.length
            raise

    def _pieces(self, cache: Cache, lease: Lease, tokens: Sequence[int]) -> list[Sequence[int]]:
        """`tokens` in pieces that end where state is to be kept."""
        if not self._prompt_end:
            return [tokens]
        begin, end = self.n_tokens, self.n_tokens + len(tokens)
        ends = {pause for pause in (*lease.pauses, self._prompt_end) if begin < pause < end} | {end}
        if cache.capability.window:
            ends |= set(range(begin + self.n_batch, end, self.n_batch))
        at = [begin, *sorted(ends)]
        return [tokens[start - begin : stop - begin] for start, stop in itertools.pairwise(at)]

    def _memory_is_cleared(self) -> None:
        """Everything in llama.cpp's memory is about to go: what is cached there moves into RAM first."""
        if self.prefix_cache is None:
            return
        with self._steps:
            self._drop_lease()
            while self.prefix_cache.cache.space.evict_resident("cleared"):
                pass
            self._foreign = True
            self.n_tokens = 0  # who clears the memory by itself may not say so
            self._requires_eval = True

    # -- states -----------------------------------------------------------------------------------------

    def save_state(self) -> Any:
        """The state of the current sequence; what else is cached is not part of it."""
        if self._sequences is None or self.prefix_cache is None:
            return super().save_state()
        with self._steps:
            out = bytearray(self._sequences.state_size(LANE))
            n = self._sequences.save(LANE, out)
        return llama_cpp.LlamaState(
            scores=self._scores.copy(),
            input_ids=self.input_ids.copy(),
            n_tokens=self.n_tokens,
            llama_state=bytes(out[:n]),
            llama_state_size=n,
            seed=self._seed,
        )

    def load_state(self, state: Any) -> None:
        """Go on from a saved state.  One of llama_cpp.Llama's replaces all memory: what is cached moves into RAM."""
        if self._sequences is None or self.prefix_cache is None:
            super().load_state(state)
            return
        with self._steps:
            self._load(state, self._sequences, self.prefix_cache)

    def _load(self, state: Any, sequences: Context, prefix: PrefixCache) -> None:
        cache = prefix.cache
        if int.from_bytes(state.llama_state[:4], "little") != MAGIC:
            self._memory_is_cleared()
            super().load_state(state)
            return
        self._drop_lease()
        self.n_tokens = 0
        lease = cache.begin(prefix.namespace_hash(""), np.zeros(0, np.int32), reuse=False, room=0)
        assert lease is not None
        self._lease = lease
        cache.reserve(state.n_tokens)
        if state.n_tokens:
            sequences.load(LANE, state.llama_state)
        if cache.pool.length(LANE) != state.n_tokens:
            self._drop_lease()
            raise StateError(f"the saved state does not hold the {state.n_tokens} tokens it should")
        self.scores[: state.n_tokens, :] = state.scores
        self.input_ids[: len(state.input_ids)] = state.input_ids
        self.n_tokens = lease.length = state.n_tokens
        self._requires_eval = True
        self._foreign = True  # nothing proves that these tokens gave this state: it is gone on from, and not kept
        self._seed = state.seed

    def close(self) -> None:
        """Free the context and the model.  Closing twice does nothing."""
        sequences = self.__dict__.get("_sequences")
        if sequences is not None:
            with self._steps:
                if self.prefix_cache is not None:
                    self.prefix_cache.cache.close()
                sequences.close()
                self._sequences = self.prefix_cache = None
                self._steps.close()
        if "_stack" in self.__dict__:
            super().close()
