"""A model with its cache: what people start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from skippy._binding import BUILD, VERSION
from skippy.aio import Cancellable, acomplete, astream
from skippy.cache import Cache
from skippy.capability import Capability
from skippy.config import Adapter as AdapterIdentity
from skippy.config import CacheConfig, ResidentCacheConfig, StageConfig
from skippy.engine import Engine
from skippy.errors import PromptTooLong
from skippy.exits import close_at_exit
from skippy.holding import Holding, Pin
from skippy.identity import KvIdentity, MessageBase
from skippy.metrics import prometheus_text
from skippy.model import AdapterFile, Model
from skippy.pool import Pool
from skippy.probe import probe
from skippy.report import Explanation, ReuseReport
from skippy.request import Chunk, Completion, Request
from skippy.sampling import Sampler
from skippy.session import Session
from skippy.starts import message_starts
from skippy.steps import Steps
from skippy.template import ChatTemplate, Message
from skippy.text import as_stops

__all__ = ["Runtime"]

log = logging.getLogger("skippy")

Prompt = str | Sequence[int]
Tokens = npt.NDArray[np.int32]
Adapters = Sequence[str | os.PathLike[str] | tuple[str | os.PathLike[str], float]]

# Cells that are made free for an answer before it begins; more are made free while it grows.
_ROOM_AHEAD = 256


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Runtime:
    """Loads a GGUF model and answers prompts, evaluating of each only what was never evaluated before.

    `n_ctx` is the size of the pool in cells, shared by running requests and cached prefixes; `lanes` how many
    requests can be open at once; `lora` paths, or pairs of path and scale; `chat_template` Jinja text for models that
    have none, or instead of theirs.  `flash_attn` "auto" is on where the
    model and the backend allow it; `stats()` says what was decided.  `on_event(name, details)` is called for
    "lookup", "miss", "restore", "save" and "evict" (docs/stats.md), and must not use the Runtime.  Use it as a
    context manager, or call `close()`.

    ModelError for a model that cannot be loaded, ConfigError for settings that are not allowed.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_ctx: int = 8192,
        lanes: int = 4,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_gpu_layers: int = 0,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: str = "auto",
        swa_full: bool | None = None,
        lora: Adapters = (),
        chat_template: str | None = None,
        cache: CacheConfig | None = None,
        on_event: Callable[[str, dict[str, Any]], None] | None = None,
        queue: int = 256,
        prompt_budget: int = 128,
    ) -> None:
        self._steps = Steps("Runtime")
        config = CacheConfig() if cache is None else cache
        for name, value in (("lanes", lanes), ("queue", queue), ("prompt_budget", prompt_budget)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        adapters = tuple(AdapterFile.read(spec) for spec in lora)
        self.n_threads = _usable_cpus() if n_threads is None else n_threads
        self.model = Model(model_path, n_gpu_layers=n_gpu_layers)
        try:
            stage = StageConfig.model_validate(
                {
                    "model_id": Path(model_path).name,
                    "model_path": self.model.path,
                    "ctx_size": n_ctx,
                    "lane_count": lanes,
                    "layer_end": self.model.n_layer,
                    "n_batch": n_batch,
                    "n_ubatch": n_ubatch,
                    "n_gpu_layers": n_gpu_layers,
                    "cache_type_k": type_k,
                    "cache_type_v": type_v,
                    "flash_attn_type": flash_attn,
                    "swa_full": swa_full,
                    "adapters": tuple(AdapterIdentity(digest=a.digest, scale=a.scale) for a in adapters),
                    "llama_build": BUILD,
                    "kv_cache": config,
                }
            )
            caps = ResidentCacheConfig.from_stage(stage, config)
            if swa_full is None and self.model.window:
                swa_full = False  # a window is all that reuse needs of such a layer
            if self.model.family != "dense" or config.mode == "disabled" or config.payload == "full-state":
                residents = 0
            else:  # a batch must have a token for each sequence id
                residents = max(0, min(caps.max_entries, min(n_batch, n_ctx) - lanes - 1))
            self.context = self.model.new_context(
                n_ctx=n_ctx,
                n_batch=n_batch,
                n_ubatch=n_ubatch,
                n_seq_max=lanes + 1 + residents,
                n_threads=self.n_threads,
                type_k=type_k,
                type_v=type_v,
                flash_attn=flash_attn,
                swa_full=swa_full,
                adapters=adapters,
            )
        except BaseException:
            self.model.close()
            raise
        try:
            self._attach(config, stage, caps, residents, None if on_event is None else self._steps.event(on_event))
            self.engine = Engine(
                self.cache, self.context, self._steps, lanes=lanes, queue=queue, prompt_budget=prompt_budget
            )
        except BaseException:
            self.context.close()
            self.model.close()
            raise
        self.holding = Holding(self.cache, self._steps, self.engine.freed)
        self.engine.at_each_step = self.holding.expire
        self._template: ChatTemplate | None = None
        self._template_source = chat_template
        self._namespaces: dict[str, str] = {}
        if self.cache.disk is not None:
            close_at_exit(self)

    def _attach(
        self,
        config: CacheConfig,
        stage: StageConfig,
        caps: ResidentCacheConfig,
        residents: int,
        on_event: Callable[[str, dict[str, Any]], None] | None,
    ) -> None:
        """Find out what the context can do, and put the cache over it."""
        self.capability = Capability(None)
        if config.mode != "disabled":
            self.capability = probe(
                self.context.sequences,
                bos=self.model.bos,
                unified=True,
                family=self.model.family,
                window=self.model.window,
                second=stage.lane_count,
            )
        if self.capability.flash_attn is not None:
            stage = stage.model_copy(update={"flash_attn_type": "on" if self.capability.flash_attn else "off"})
        self.stage = stage
        kind: Literal["dense", "recurrent"] = "recurrent" if self.capability.needs_checkpoints else "dense"
        self._identity = KvIdentity(stage, kind)  # looks at the model file now: it may be replaced later
        self.cache = Cache(
            Pool(self.context.sequences, lanes=stage.lane_count, residents=residents, shape=self.capability),
            config,
            max_resident_tokens=caps.max_resident_tokens,
            logits_bytes=config.logits_bytes,
            capability=self.capability,
            on_event=on_event,
        )
        if self.cache.unable:
            log.warning("prefix reuse is off: %s", self.cache.unable)

    # -- answering --------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = False, **options: Any) -> Completion: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **options: Any) -> Iterator[Chunk]: ...
    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Any) -> list[Completion]: ...
    def generate(
        self, prompt: Prompt, *, stream: bool = False, n: int | None = None, **options: Any
    ) -> Completion | Iterator[Chunk] | list[Completion]:
        """Go on from `prompt`: text, or token ids.  `options` are those of `request`.

        With `stream` an iterator of chunks, which may be closed at any time; with `n` a list of so many answers, for
        which the prompt is evaluated once (answer number i has the seed + i); else a Completion.
        """
        if n is None:
            request = self.request(prompt, **options)
            return request.run() if stream else request.complete()
        if n < 1 or stream:
            raise ValueError(f"n is {n}, expected at least 1" if n < 1 else "n answers cannot be streamed")
        seed = options.pop("seed", None)
        requests = [self.request(prompt, **options, seed=None if seed is None else seed + i) for i in range(n)]
        answers = []
        try:
            for request in requests:
                request.enter()
            for request in requests:
                answers.append(request.complete())
        finally:
            for request in requests:
                self.engine.leave(request)
        return answers

    async def agenerate(self, prompt: Prompt, *, stream: bool = False, **options: Any) -> Any:
        """`generate` for asyncio: a Completion, or with `stream` an asynchronous iterator of chunks.

        A task that is cancelled ends its request at the next token, or in the middle of its prompt; what was evaluated
        is kept.
        """
        stop = Cancellable(options.pop("should_stop", None))
        request = self.request(prompt, **options, should_stop=stop)
        return astream(request, stop, self._pool) if stream else await acomplete(request, stop, self._pool)

    async def achat(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, **options: Any) -> Any:
        """`chat` for asyncio, as `agenerate`."""
        prompt, starts = self.render_with_starts(messages, tools=tools)
        return await self.agenerate(prompt, **{"message_starts": starts, **options})

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        most = self.engine.lanes + self.engine.queue
        return ThreadPoolExecutor(max_workers=most, thread_name_prefix="skippy")

    def warm(self, prompt: Prompt, *, namespace: str = "", priority: int = -1) -> ReuseReport:
        """Evaluate `prompt` and keep it, so that who begins with it need not; what there was to be done.

        It waits behind requests of a higher priority; to do it in the background, call it in a thread.
        """
        return self.request(prompt, namespace=namespace, max_tokens=0, priority=priority).complete().reuse

    def pin(self, prompt: Prompt, *, ttl: float | None = None, namespace: str = "") -> Pin:
        """Keep the state of `prompt` until the pin is closed, or for `ttl` seconds; what is not stored is evaluated.

        ValueError where there is no room for it, or nothing is kept at all.
        """
        tokens = self._as_tokens(prompt)
        if ttl is not None and ttl <= 0:
            raise ValueError(f"ttl is {ttl}, expected seconds above 0, or None")
        least = self.cache.config.min_tokens
        if len(tokens) < least:
            raise ValueError(f"the prompt has {len(tokens)} tokens: fewer than min_tokens={least} are not kept")
        self.warm(tokens.tolist(), namespace=namespace, priority=0)
        return self.holding.pin(self.namespace_hash(namespace), tokens, ttl)

    def forget(self, prompt: Prompt | None = None, *, namespace: str = "") -> int:
        """Drop what is stored of prompts that begin with `prompt`, or of the whole namespace; how many entries went.

        What running requests use, and what is pinned, stays.
        """
        if prompt is not None:
            tokens = self._as_tokens(prompt)
            dropped = self.holding.forget(self.namespace_hash(namespace), tokens)
            with self._step():
                return dropped + self.cache.forget_saved(self.namespace_hash(namespace), tokens)
        with self._step():
            before = self.cache.entries
            self.cache.clear(self.namespace_hash(namespace))
            dropped = before - self.cache.entries
        self.engine.freed()
        return dropped

    def request(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 128,
        temperature: float = 0.0,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        grammar: Any = None,
        namespace: str = "",
        cache_prompt: bool = True,
        message_starts: Sequence[int] = (),
        should_stop: Callable[[], bool] | None = None,
        priority: int = 0,
    ) -> Request:
        """A request that has not begun: `run()` it for chunks, or `complete()` it.

        `max_tokens` None: until the model ends or the context is full; 0: evaluate the prompt only.  `temperature`
        0 is greedy.  `stop` texts are not part of the answer.  `grammar` is GBNF text or a LlamaGrammar.
        `namespace` keeps tenants apart: nothing is shared across it.  `cache_prompt` False neither looks up nor
        records.

        `message_starts` are indices of prompt tokens at which a later prompt may part from this one; `chat` and
        sessions fill it in.  They matter for models with state that cannot be cut, which is kept there.
        `should_stop` ends the request, with what it has and finish_reason "stopped", when it returns true.  It is
        asked between tokens, and while the prompt is evaluated between the operations of llama.cpp (on a CPU; other
        backends finish a batch first), not while a lane is waited for; it must be quick, and not use the Runtime.
        Of a prompt that is stopped so, the whole batches that were evaluated are kept, the text is empty, and
        `reuse.ttft_ms` 0; its `evaluated_tokens` then count what was to be evaluated.  What it raises ends the
        request, and is raised.

        ValueError for an empty prompt or arguments that make no sense, PromptTooLong for a prompt above the
        context.  While it runs: ContextFull where other open streams hold the cells, NativeError where llama.cpp
        fails, LanesBusy where the calling thread itself holds all lanes open.
        """
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}, expected 0 or more, or None for no limit")
        stops = as_stops(stop)
        tokens = self._as_tokens(prompt)
        wanted = _ROOM_AHEAD if max_tokens is None else min(max_tokens, _ROOM_AHEAD)
        room = min(wanted, self.context.sequences.n_ctx - len(tokens))
        sampler = Sampler(
            self.model, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, grammar=grammar
        )
        return Request(
            tokens,
            engine=self.engine,
            model=self.model,
            sampler=sampler,
            stops=stops,
            max_tokens=max_tokens,
            namespace=self.namespace_hash(namespace),
            keep=cache_prompt,
            room=room,
            message_starts=message_starts,
            should_stop=should_stop,
            priority=priority,
        )

    def chat(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, **options: Any) -> Any:
        """Answer a conversation (OpenAI messages) with the model's own template; `options` as in `generate`.

        ModelError where the model has no template.
        """
        prompt, starts = self.render_with_starts(messages, tools=tools)
        return self.generate(prompt, **{"message_starts": starts, **options})

    def render(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> list[int]:
        """The prompt tokens that `chat` would answer."""
        return self.render_with_starts(messages, tools=tools)[0]

    def render_with_starts(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """The prompt tokens that `chat` would answer, and the indices at which its messages begin.

        Only models with state that cannot be cut ask for these; for others there are none.
        """
        text = self.template.render(messages, tools)
        prompt = self.model.tokenize(text, add_bos=not self.template.begins_with_bos(text))
        if not self.cache.keeps_points:
            return prompt, []
        return prompt, message_starts(messages, [self.model.piece(token, special=True) for token in prompt])

    def session(self, system: str | None = None, *, name: str | None = None, namespace: str = "") -> Session:
        """A conversation that keeps its tokens as they were generated.  Needs a chat template (ModelError).

        With a `name` it is kept in the disk tier after every answer, and goes on where it was left, in another
        process too.  Two that are open at once under one name do not see each other: the last to answer is kept.
        ConfigError (a ValueError) without a disk tier, for a name that is not allowed, and for a `system` prompt that
        is not the one it was kept with.  What is damaged is ignored with a warning; the session begins anew.
        """
        return Session(self, self.template, system=system, name=name, namespace=namespace)

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template.  ModelError where it has none."""
        if self._template is None:
            self._template = ChatTemplate(self.model, self._template_source)
        return self._template

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a prompt text, with what the model's settings put before it."""
        return self.model.tokenize(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens left out."""
        return self.model.detokenize(tokens)

    # -- looking into the cache -------------------------------------------------------------------------

    def explain(self, prompt: Prompt, *, namespace: str = "") -> Explanation:
        """Where `prompt` leaves what is stored, as token index and as text, and how much of it would be reused now.

        Changes nothing.  O(prompt).
        """
        tokens = self._as_tokens(prompt)
        with self._step():
            return self.cache.explain(self.namespace_hash(namespace), tokens, self._show)

    def _show(self, tokens: Tokens) -> str:
        return self.model.detokenize([int(token) for token in tokens], special=True)

    def stats(self) -> dict[str, Any]:
        """Counters and settings as plain data; docs/stats.md describes each."""
        with self._step():
            return {
                "model": {
                    "path": self.model.path,
                    "description": self.model.description,
                    "family": self.model.family,
                    "flash_attn": self.capability.flash_attn,
                    "bytes_per_token": self.capability.bytes_per_token,
                    "bytes_per_checkpoint": self.capability.point_state_bytes,
                    "bytes_of_recurrent_memory": self._recurrent_memory,
                    "window": self.capability.window,
                },
                "llama_cpp_python": VERSION,
                "llama_cpp": BUILD,
                **self.cache.stats(),
                "lanes": {
                    "capacity": self.engine.lanes,
                    "running": len(self.engine.running),
                    "waiting": len(self.engine.waiting),
                    "refused": self.engine.refused,
                },
                "pins": len(self.holding),
            }

    @property
    def _recurrent_memory(self) -> int:
        """Bytes that llama.cpp has allocated for recurrent state: one for each sequence id, used or not."""
        if self.model.family not in ("recurrent", "hybrid"):
            return 0
        return self.capability.point_state_bytes * self.context.sequences.n_seq_max

    def metrics(self) -> str:
        """The counters as Prometheus text, labelled with the model's file name.  No token and no text is in it."""
        return prometheus_text(self.stats(), model=Path(self.model.path).name)

    def check(self) -> None:
        """Prove that the tree, the pool and the saved state agree; AssertionError with the reason where not."""
        with self._step():
            self.cache.check()

    def clear(self, *, namespace: str | None = None) -> None:
        """Drop what is cached, of one namespace or of all, but for what running requests use."""
        with self._step():
            self.cache.clear(None if namespace is None else self.namespace_hash(namespace))
        self.engine.freed()

    def namespace_hash(self, namespace: str) -> str:
        """The identity under which prompts of `namespace` are stored: model, build, settings, template, namespace."""
        found = self._namespaces.get(namespace)
        if found is None:
            base = MessageBase(namespace=namespace or None)
            found = self._namespaces[namespace] = self._identity.namespace(base)
            self.cache.describe(found, model=Path(self.model.path).name, tenant=namespace)
        return found

    # -- inside -----------------------------------------------------------------------------------------

    def _as_tokens(self, prompt: Prompt) -> Tokens:
        if isinstance(prompt, str):
            ids: Any = self.tokenize(prompt)
        else:
            ids = prompt
        tokens = np.asarray(ids)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise TypeError(f"prompt is {type(prompt).__name__}, expected text or a sequence of token ids")
        if tokens.size == 0:
            raise ValueError("the prompt has no tokens: expected at least one")
        outside = np.flatnonzero((tokens < 0) | (tokens >= self.model.n_vocab))
        if outside.size:
            i = int(outside[0])
            raise ValueError(f"token {tokens[i]} at index {i} is not in the vocabulary (0 to {self.model.n_vocab - 1})")
        if tokens.size > self.context.sequences.n_ctx:
            raise PromptTooLong(int(tokens.size), self.context.sequences.n_ctx)
        if tokens.size > 1 and tokens[0] == tokens[1] == self.model.bos:
            log.warning("the prompt begins with two BOS tokens; it shares nothing with the same prompt with one")
        return np.array(tokens, np.int32)  # a copy: the caller may use its buffer for the next prompt

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._steps.closed

    def _step(self) -> Steps:
        """One use of the cache and the context: `with self._step():`."""
        return self._steps

    def close(self) -> None:
        """Free the context and the model.  Open streams cannot go on.  Closing twice does nothing.

        From within a step of the same thread (a signal's handler, `should_stop`) it happens at the end of the step.
        """
        if self._steps.closed:
            return
        if self._steps.inside:
            self._steps.later(self.close)
            return
        with self._steps:
            self._steps.close()
            self.cache.close()
            self.context.close()
            self.model.close()
        self.engine.wake()
        if "_pool" in self.__dict__:
            self._pool.shutdown(wait=False)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
