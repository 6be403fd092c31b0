"""`Llama`: llama_cpp.Llama with prefix reuse, for programs that are written for it."""

from __future__ import annotations

import ctypes
import inspect
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from skippy._binding import BUILD
from skippy._llama import SEQ_LIMIT, Context
from skippy.cache import Cache, Lease
from skippy.config import Adapter, CacheConfig, ResidentCacheConfig, StageConfig
from skippy.errors import SkippyError, StateError
from skippy.identity import KvIdentity, MessageBase
from skippy.layout import MAGIC
from skippy.llama_cache import LlamaPrefixCache
from skippy.metrics import prometheus_text
from skippy.model import KV_TYPES, AdapterFile, family_of
from skippy.pool import Pool
from skippy.probe import Capability, probe
from skippy.report import Explanation, ReuseReport

__all__ = ["Llama", "PrefixCache"]

log = logging.getLogger("skippy")

_LANE, _CAPTURE = 0, 1
_GENERATE = inspect.signature(llama_cpp.Llama.generate)
_KV_NAMES = {number: name for name, number in KV_TYPES.items()}


@dataclass(frozen=True)
class _Options:
    """What a call said about the cache: whether to look up, whether to keep, and for whom."""

    look_up: bool = True
    keep: bool = True
    key: str = ""


class PrefixCache:
    """What a `Llama` keeps of the prompts it has seen: counters, explanations, and how to empty it."""

    def __init__(self, cache: Cache, identity: KvIdentity, show: Callable[[list[int]], str]) -> None:
        self.cache = cache
        self._identity = identity
        self._show = show
        self._namespaces: dict[str, str] = {}

    def namespace_hash(self, key: str = "") -> str:
        """The identity under which prompts are stored: model, build, settings, and the caller's key."""
        found = self._namespaces.get(key)
        if found is None:
            found = self._namespaces[key] = self._identity.namespace(MessageBase(namespace=key or None))
        return found

    def stats(self) -> dict[str, Any]:
        """Counters as plain data; docs/stats.md describes each.  O(1)."""
        return self.cache.stats()

    def metrics(self) -> str:
        """The counters as Prometheus text."""
        return prometheus_text(self.stats())

    def explain(self, tokens: Sequence[int], *, prompt_cache_key: str = "") -> Explanation:
        """Where the prompt `tokens` would leave what is stored, as index and as text.  Changes nothing."""
        array = np.array(tokens, np.int32)
        if array.ndim != 1 or array.size == 0:
            raise ValueError("tokens is empty, expected the token ids of a prompt")
        return self.cache.explain(
            self.namespace_hash(prompt_cache_key), array, lambda part: self._show([int(token) for token in part])
        )

    def clear(self, prompt_cache_key: str | None = None) -> None:
        """Drop what is stored, for one key or for all."""
        self.cache.clear(None if prompt_cache_key is None else self.namespace_hash(prompt_cache_key))

    def check(self) -> None:
        """Prove that the tree, the pool and the saved state agree; AssertionError with the reason where not."""
        self.cache.check()


class Llama(llama_cpp.Llama):
    """llama_cpp.Llama that never evaluates a prompt prefix twice.

    Takes what the parent takes, and `cache` (a CacheConfig).  Where the caller does not say otherwise, flash
    attention is on where the model allows it; the context is unified and has sequence ids for cached prefixes.
    Responses carry `usage["prompt_tokens_details"]["cached_tokens"]`; `last_reuse` is the report of the last
    request, `prefix_cache` what is stored (None with mode "disabled", which changes nothing of the parent).

    One request at a time: other threads wait for their turn; a stream that is still open when the same thread
    begins another request is at its end, and says so when it is asked for more.
    """

    def __init__(self, model_path: str, *, cache: CacheConfig | None = None, **kwargs: Any) -> None:
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
        self._of_thread = threading.local()
        self._turn = threading.Lock()
        self._turn_thread = 0
        self._turn_number = 0
        self._inside_thread = 0
        self._bytes_per_token = 0
        self._set_cache: Any = None
        super().__init__(model_path, **kwargs)
        if self._on:
            self._attach()

    # -- making the context -----------------------------------------------------------------------------

    # The parent fills this structure, loads the model, and reads it again right before it makes the context.
    @property
    def context_params(self) -> Any:
        """llama.cpp's parameters of the context."""
        if self._on and "_model" in self.__dict__ and "_ctx" not in self.__dict__:
            self._prepare(self._params)
        return self._params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._params = params

    def _prepare(self, params: Any) -> None:
        if family_of(self._model.model) != "dense":
            return
        if not params.embeddings:
            params.n_seq_max = max(1, min(2 + self._config.max_entries, params.n_batch, SEQ_LIMIT))
        params.kv_unified = True
        params.n_rs_seq = 0
        if "flash_attn" not in self._asked:
            params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_AUTO

    def _attach(self) -> None:
        params = self._params
        family = family_of(self._model.model)
        address = ctypes.cast(self._ctx.ctx, ctypes.c_void_p).value or 0
        unable = None if family == "dense" else f"reuse for {family} models is not built yet"
        if unable is None and params.n_seq_max < 3:
            unable = f"n_batch of {params.n_batch} leaves no sequence ids for cached prefixes"
        capability = Capability(unable)
        if unable is None:
            self._sequences = Context(address, unified=bool(params.kv_unified), owner=self._ctx)
            capability = probe(self._sequences, bos=self.token_bos(), unified=True, second=_CAPTURE)
        if capability.unable:
            log.warning("prefix reuse is off: %s", capability.unable)
            self._on = False
            return
        assert self._sequences is not None
        self._bytes_per_token = capability.bytes_per_token
        stage = self._stage(capability)
        caps = ResidentCacheConfig.from_stage(stage, self._config)
        pool = Pool(self._sequences, lanes=1, residents=min(caps.max_entries, self._sequences.n_seq_max - 2))
        cache = Cache(pool, self._config, max_resident_tokens=caps.max_resident_tokens)
        model = weakref.ref(self)

        def show(tokens: list[int]) -> str:
            llama = model()
            return "" if llama is None else llama.detokenize(tokens, special=True).decode("utf-8", "replace")

        context = weakref.ref(self._ctx)

        def clear_all() -> None:
            llama, ctx = model(), context()
            if llama is not None:
                llama._memory_is_cleared()
            if ctx is not None:
                type(ctx).kv_cache_clear(ctx)  # type: ignore[no-untyped-call]

        self.prefix_cache = PrefixCache(cache, KvIdentity(stage, "dense"), show)
        # embed() and the multimodal handlers clear the whole memory through this call.
        self._ctx.kv_cache_clear = clear_all  # type: ignore[method-assign]

    def _stage(self, capability: Capability) -> StageConfig:
        params = self._params
        adapters = []
        if self.lora_path:
            adapter = AdapterFile.read((self.lora_path, self.lora_scale))
            adapters.append(Adapter(digest=adapter.digest, scale=adapter.scale))
        return StageConfig.model_validate(
            {
                "model_id": Path(self.model_path).name,
                "model_path": os.fspath(self.model_path),
                "ctx_size": self.n_ctx(),
                "lane_count": 1,
                "n_batch": self.n_batch,
                "n_ubatch": params.n_ubatch,
                "n_gpu_layers": min(self.model_params.n_gpu_layers, 2**31 - 1),
                "cache_type_k": _KV_NAMES.get(params.type_k, str(params.type_k)),
                "cache_type_v": _KV_NAMES.get(params.type_v, str(params.type_v)),
                "flash_attn_type": "on" if capability.flash_attn else "off",
                "swa_full": bool(params.swa_full),
                "rope": {
                    "freq_base": params.rope_freq_base or None,
                    "freq_scale": params.rope_freq_scale or None,
                    "yarn_ext_factor": params.yarn_ext_factor,
                    "yarn_attn_factor": params.yarn_attn_factor,
                    "yarn_beta_fast": params.yarn_beta_fast,
                    "yarn_beta_slow": params.yarn_beta_slow,
                    "yarn_orig_ctx": params.yarn_orig_ctx,
                },
                "adapters": tuple(adapters),
                "llama_build": BUILD,
                "kv_cache": self._config,
            }
        )

    # -- turns ------------------------------------------------------------------------------------------

    def _begin_turn(self) -> int:
        """Wait for other threads; an open stream of this thread is at its end.  The number of the new turn."""
        me = threading.get_ident()
        if not (self._turn.locked() and self._turn_thread == me):
            self._turn.acquire()
        else:
            self._record()
        self._turn_thread = me
        self._turn_number += 1
        return self._turn_number

    def _end_turn(self, number: int) -> None:
        if number == self._turn_number and self._turn.locked():
            self._record()
            self._turn_thread = 0
            self._turn.release()

    def _check_turn(self, number: int) -> None:
        if number != self._turn_number:
            raise RuntimeError("this stream is at its end: the same Llama has begun another request meanwhile")

    @contextmanager
    def _within(self, number: int) -> Iterator[None]:
        """What runs in here belongs to turn `number`: a generate() inside joins it instead of taking its own."""
        self._check_turn(number)
        before, self._inside_thread = self._inside_thread, threading.get_ident()
        try:
            yield
        finally:
            self._inside_thread = before

    # -- generating -------------------------------------------------------------------------------------

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """As the parent's: yields tokens.  What is stored of the prompt is restored, and what was evaluated kept."""
        bound = _GENERATE.bind(self, tokens, *args, **kwargs)
        if self.prefix_cache is None or not bound.arguments.get("reset", True):
            yield from super().generate(tokens, *args, **kwargs)
            return
        mine = self._inside_thread != threading.get_ident()
        number = self._begin_turn() if mine else self._turn_number
        inner: Generator[int, Sequence[int] | None, None] | None = None
        try:
            started = time.perf_counter()
            report = self._restore(list(tokens))
            bound.arguments["tokens"] = list(tokens)
            inner = super().generate(*bound.args[1:], **bound.kwargs)
            sent: Sequence[int] | None = None
            first = True
            while True:
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
                self._check_turn(number)
        finally:
            if inner is not None:
                inner.close()
            if mine:
                self._end_turn(number)
            elif number == self._turn_number:
                self._record()

    def _restore(self, tokens: list[int]) -> ReuseReport:
        """Bring sequence 0 and the parent's view of it to the longest prefix of `tokens` that is to be had."""
        assert self.prefix_cache is not None
        cache = self.prefix_cache.cache
        options = self._options
        kept, wanted = self._keep, options.look_up
        self._keep = options.keep
        self._produced = 0
        namespace = self.prefix_cache.namespace_hash(options.key)
        array = np.array(tokens, np.int32)
        if self._foreign and self.n_tokens > 0 and self._live_prefix(array) == self.n_tokens:
            # What is in the memory did not come through eval() alone (an image): it is gone on from, and not kept.
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
        if lease is not None and live >= max(1, cache.lookup(namespace, array)):
            return self._go_on(lease, array, live)
        self._drop_lease()
        self._foreign = False
        lease = cache.begin(namespace, array, reuse=wanted, room=0)
        assert lease is not None, "there is one lane, and it was given back"
        self._lease = lease
        self.n_tokens = lease.length
        self.input_ids[: lease.length] = array[: lease.length]
        self._requires_eval = True
        report = ReuseReport(
            prompt_tokens=len(tokens),
            cached_tokens=lease.restored,
            evaluated_tokens=len(tokens) - lease.restored,
            by_tier=dict(lease.by_tier),
            restore_ms=lease.restore_ms,
            reason=lease.reason,
            diverged_at=lease.diverged_at,
        )
        self.last_reuse = report
        return report

    def _live_prefix(self, array: npt.NDArray[np.int32]) -> int:
        n = min(self.n_tokens, len(array))
        differ = np.flatnonzero(self.input_ids[:n] != array[:n])
        return int(differ[0]) if differ.size else n

    def _go_on(self, lease: Lease | None, array: npt.NDArray[np.int32], live: int) -> ReuseReport:
        """Sequence 0 holds as much as the cache could restore: the parent goes on from it as it always does."""
        assert self.prefix_cache is not None
        n = len(array)
        whole = live == n
        reused = n if whole and self.n_tokens == n and not self._requires_eval else live - whole
        report = ReuseReport(n, reused, n - reused, reason="hit" if live == self.n_tokens or whole else "partial")
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
        cache = prefix.cache
        if self._lease is None:  # called by itself, not from generate()
            self._lease = cache.begin(prefix.namespace_hash(""), np.zeros(0, np.int32), reuse=False, room=0)
            assert self._lease is not None
        lease = self._lease
        if lease.length != self.n_tokens:
            cache.rewind(lease, self.input_ids[: self.n_tokens].astype(np.int32))
        cache.reserve(len(tokens))
        try:
            super().eval(tokens)
        except BaseException:
            cache.pool.trim(lease.lane, self.n_tokens)
            raise
        finally:
            lease.length = self.n_tokens

    def _memory_is_cleared(self) -> None:
        """Everything in llama.cpp's memory is about to go: what is cached there moves into RAM first."""
        if self.prefix_cache is None:
            return
        self._drop_lease()
        while self.prefix_cache.cache.space.evict_resident("cleared"):
            pass
        self._foreign = True

    # -- requests ---------------------------------------------------------------------------------------

    @property
    def _options(self) -> _Options:
        """What the request that the calling thread is serving asked for."""
        return getattr(self._of_thread, "options", _Options())

    def _asked_for(self, cache_prompt: bool | None, prompt_cache_key: str | None) -> _Options:
        """The options of a call; what it does not say is inherited from the call around it."""
        options = self._options
        if cache_prompt is not None:
            options = replace(options, look_up=cache_prompt, keep=cache_prompt)
        return options if prompt_cache_key is None else replace(options, key=prompt_cache_key)

    @contextmanager
    def _with_options(self, options: _Options) -> Iterator[None]:
        before = self._options
        self._of_thread.options = options
        try:
            yield
        finally:
            self._of_thread.options = before

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if self.prefix_cache is None:
            yield from super()._create_completion(*args, **kwargs)
            return
        options = self._options
        stream = bool(kwargs.get("stream"))
        if kwargs.get("echo") and kwargs.get("logprobs") is not None:
            options = replace(options, look_up=False)  # logits of all prompt tokens are wanted: evaluate them all
        number = self._begin_turn()
        inner: Any = super()._create_completion(*args, **kwargs)
        try:
            while True:
                with self._within(number), self._with_options(options):
                    try:
                        response = next(inner)
                    except StopIteration:
                        return
                    self._describe(response, stream)
                yield response
        finally:
            inner.close()
            self._end_turn(number)

    def _describe(self, response: Any, stream: bool) -> None:
        """Add what was reused to the usage of a response, and to the last chunk of a stream."""
        reuse = self.last_reuse
        if reuse is None:
            return
        details = {"cached_tokens": reuse.cached_tokens}
        if "usage" in response:
            response["usage"]["prompt_tokens_details"] = details
        elif stream and response["choices"] and response["choices"][0]["finish_reason"] is not None:
            response["usage"] = {
                "prompt_tokens": reuse.prompt_tokens,
                "completion_tokens": self._produced,
                "total_tokens": reuse.prompt_tokens + self._produced,
                "prompt_tokens_details": details,
            }

    def create_completion(
        self, *args: Any, cache_prompt: bool | None = None, prompt_cache_key: str | None = None, **kwargs: Any
    ) -> Any:
        """As the parent's.  `cache_prompt` False: no look-up, no record; `prompt_cache_key` keeps tenants apart."""
        options = self._asked_for(cache_prompt, prompt_cache_key)
        with self._with_options(options):
            response = super().create_completion(*args, **kwargs)
        return response if isinstance(response, dict) else self._stream(response, options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `create_completion`."""
        return self.create_completion(*args, **kwargs)

    def create_chat_completion(
        self, *args: Any, cache_prompt: bool | None = None, prompt_cache_key: str | None = None, **kwargs: Any
    ) -> Any:
        """As the parent's.  `cache_prompt` False: no look-up, no record; `prompt_cache_key` keeps tenants apart."""
        options = self._asked_for(cache_prompt, prompt_cache_key)
        with self._with_options(options):
            response = super().create_chat_completion(*args, **kwargs)
        if isinstance(response, dict):
            return response
        return self._stream(response, options, describe=True)

    def _stream(self, chunks: Iterator[Any], options: _Options, describe: bool = False) -> Iterator[Any]:
        """Hand out chunks; whenever the next one is made, the options of the call hold."""
        try:
            while True:
                with self._with_options(options):
                    try:
                        chunk = next(chunks)
                    except StopIteration:
                        return
                if describe and self.prefix_cache is not None and "usage" not in chunk:
                    self._describe(chunk, stream=True)
                yield chunk
        finally:
            chunks.close()  # type: ignore[attr-defined]

    # -- set_cache ---------------------------------------------------------------------------------------

    @property
    def cache(self) -> Any:
        """What `set_cache` was given.  A LlamaPrefixCache stays out of the parent's sight while it completes: the
        parent would save the state after every request, and all that is to be kept is kept already.
        """
        hidden = isinstance(self._set_cache, LlamaPrefixCache) and self._inside_thread == threading.get_ident()
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
        return cache.tree.cells * self._bytes_per_token + cache.store.arena.used

    def restorable(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of a prompt could be restored now."""
        if self.prefix_cache is None or not len(tokens):
            return 0
        cache = self.prefix_cache.cache
        return cache.lookup(self.prefix_cache.namespace_hash(), np.array(tokens, np.int32))

    def restored_state(self, tokens: Sequence[int]) -> Any:
        """A LlamaState of the longest stored prefix of `tokens`, which is in the context afterwards."""
        number = self._begin_turn()
        try:
            self._drop_lease()
            self._foreign = False
            self.n_tokens = 0
            self._restore(list(tokens))
            return self.save_state()
        finally:
            self._end_turn(number)

    # -- what would destroy cached sequences ------------------------------------------------------------

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As the parent's, which clears the memory: what is cached moves into RAM first."""
        if self.prefix_cache is None:
            return super().embed(*args, **kwargs)
        number = self._begin_turn()
        try:
            return super().embed(*args, **kwargs)
        finally:
            self._drop_lease()
            self._foreign = False
            self._end_turn(number)

    def save_state(self) -> Any:
        """The state of the current sequence; what else is cached is not part of it."""
        if self._sequences is None or self.prefix_cache is None:
            return super().save_state()
        out = bytearray(self._sequences.state_size(_LANE))
        n = self._sequences.save(_LANE, out)
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
        cache = self.prefix_cache.cache
        if int.from_bytes(state.llama_state[:4], "little") != MAGIC:
            self._memory_is_cleared()
            super().load_state(state)
            return
        self._drop_lease()
        self.n_tokens = 0
        lease = cache.begin(self.prefix_cache.namespace_hash(""), np.zeros(0, np.int32), reuse=False, room=0)
        assert lease is not None
        self._lease = lease
        cache.reserve(state.n_tokens)
        if state.n_tokens:
            self._sequences.load(_LANE, state.llama_state)
        if cache.pool.length(_LANE) != state.n_tokens:
            self._drop_lease()
            raise StateError(f"the saved state does not hold the {state.n_tokens} tokens it should")
        self.scores[: state.n_tokens, :] = state.scores
        self.input_ids[: len(state.input_ids)] = state.input_ids
        self.n_tokens = lease.length = state.n_tokens
        self._requires_eval = True
        self._foreign = True  # nothing proves that these tokens gave this state: it is gone on from, and not kept
        self._seed = state.seed

    def __getstate__(self) -> dict[str, Any]:
        """What pickle keeps: the arguments, not what is cached."""
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        if "flash_attn" not in self._asked:
            state.pop("flash_attn", None)
        return {**state, "cache": self._config}

    def close(self) -> None:
        """Free the context and the model.  Closing twice does nothing."""
        sequences = self.__dict__.get("_sequences")
        if sequences is not None:
            sequences.close()
            self._sequences = self.prefix_cache = None
        if "_stack" in self.__dict__:
            super().close()


try:  # for editors and for packages that look at the constructor: the parent's arguments, and ours
    _parent = inspect.signature(llama_cpp.Llama.__init__)
    _cache = inspect.Parameter("cache", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=CacheConfig)
    _own = [p for p in _parent.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    _rest = [p for p in _parent.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    Llama.__init__.__signature__ = _parent.replace(parameters=[*_own, _cache, *_rest])  # type: ignore[attr-defined]
except ValueError as error:
    raise SkippyError(f"the constructor of llama_cpp.Llama has another form than expected: {error}") from error
