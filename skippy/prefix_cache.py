"""`PrefixCache`: what a `Llama` keeps of the prompts it has seen, to look into and to empty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from skippy.cache import Cache
from skippy.identity import KvIdentity, MessageBase
from skippy.metrics import prometheus_text
from skippy.report import Explanation

__all__ = ["PrefixCache"]

Tokens = npt.NDArray[np.int32]


class PrefixCache:
    """What a `Llama` keeps of the prompts it has seen: counters, explanations, and how to empty it.

    May be used from any thread, also while another one generates: a call then waits for the step that is running,
    the evaluation of a prompt or of one token, and not for the answer.  RuntimeError from within an `on_event`
    callback, ValueError once the Llama is closed.
    """

    def __init__(
        self,
        cache: Cache,
        identity: KvIdentity,
        *,
        tokenize: Callable[[str], list[int]],
        show: Callable[[list[int]], str],
        n_vocab: int,
        step: AbstractContextManager[None],
    ) -> None:
        """Made by `Llama`.  `step` is held around every use of the cache, and can be entered again and again."""
        self.cache = cache
        self._identity = identity
        self._tokenize = tokenize
        self._show = show
        self._n_vocab = n_vocab
        self._step = step
        self._namespaces: dict[str, str] = {}

    def namespace_hash(self, key: str = "") -> str:
        """The identity under which prompts are stored: model, build, settings, and the caller's key.  O(1)."""
        found = self._namespaces.get(key)
        if found is None:
            found = self._namespaces[key] = self._identity.namespace(MessageBase(namespace=key or None))
            self.cache.describe(found, model=self._identity.config.model_id or "", tenant=key)
        return found

    def stats(self) -> dict[str, Any]:
        """Counters as plain data; docs/stats.md describes each.  O(1)."""
        with self._step:
            return self.cache.stats()

    def metrics(self) -> str:
        """The counters as Prometheus text; no token and no text of a prompt is in it.  O(counters)."""
        return prometheus_text(self.stats())

    def explain(self, prompt: str | Sequence[int], *, prompt_cache_key: str = "") -> Explanation:
        """Where `prompt` would leave what is stored, as token index and as text.  Changes nothing.  O(prompt).

        Text is tokenised as `create_completion` does it, a BOS before it where the model asks for one; token ids
        are taken as they are.  TypeError for anything else, ValueError for no tokens at all or for ids that are not
        in the vocabulary.
        """
        if not isinstance(prompt_cache_key, str):
            raise TypeError(f"prompt_cache_key is {prompt_cache_key!r}, expected text")
        with self._step:
            tokens = self._as_tokens(prompt)
            return self.cache.explain(
                self.namespace_hash(prompt_cache_key), tokens, lambda part: self._show([int(token) for token in part])
            )

    def _as_tokens(self, prompt: str | Sequence[int]) -> Tokens:
        if isinstance(prompt, str):
            return self._checked(self._tokenize(prompt))
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, (Sequence, np.ndarray)):
            raise TypeError(f"prompt is {prompt!r:.80}, expected text or a sequence of token ids")
        ids: Sequence[Any] = prompt
        for index, token in enumerate(ids):
            if isinstance(token, (bool, np.bool_)) or not isinstance(token, (int, np.integer)):
                raise TypeError(f"prompt[{index}] is {token!r:.80}, expected a token id")
        return self._checked(ids)

    def _checked(self, tokens: Sequence[int]) -> Tokens:
        if len(tokens) == 0:
            raise ValueError("the prompt has no tokens: expected at least one")
        for index, token in enumerate(tokens):
            if not 0 <= token < self._n_vocab:
                raise ValueError(f"token {token} at index {index} is not in the vocabulary (0 to {self._n_vocab - 1})")
        return np.array(tokens, np.int32)

    def clear(self, prompt_cache_key: str | None = None) -> None:
        """Drop what is stored, for one key or for all, but for what a running request uses.  O(entries)."""
        with self._step:
            self.cache.clear(None if prompt_cache_key is None else self.namespace_hash(prompt_cache_key))

    def check(self) -> None:
        """Prove that the tree, the pool and the saved state agree; AssertionError with the reason where not."""
        with self._step:
            self.cache.check()
