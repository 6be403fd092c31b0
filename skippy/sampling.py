"""Choosing the next token with llama.cpp's own samplers and its own grammar."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as lib

from skippy.model import Model, ModelContext

__all__ = ["Sampler"]

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: llama.cpp draws one


class Sampler:
    """A chain of llama.cpp's samplers: greedy, or top-k, top-p, min-p, temperature and a draw; before it a grammar.

    `temperature` 0 is greedy.  `grammar` is GBNF text, or a `llama_cpp.LlamaGrammar`.  ValueError, naming the
    argument, for values that make no sense and for a grammar that llama.cpp cannot parse.
    """

    def __init__(
        self,
        model: Model,
        *,
        temperature: float = 0.0,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        seed: int | None = None,
        grammar: Any = None,
    ) -> None:
        if not temperature >= 0:
            raise ValueError(f"temperature is {temperature}, expected 0 (greedy) or more")
        for name, value in (("top_p", top_p), ("min_p", min_p)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}, expected 0 to 1")
        if seed is not None and not 0 <= seed < _RANDOM_SEED:
            raise ValueError(f"seed is {seed}, expected 0 to {_RANDOM_SEED - 1}, or None for a random one")
        self._n_vocab = model.n_vocab
        self._grammar = None if grammar is None else _Native(self._parse(model, grammar))
        self._chain = _Native(lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params()))
        if temperature == 0:
            self._add(lib.llama_sampler_init_greedy())
        else:
            self._add(lib.llama_sampler_init_top_k(top_k))
            self._add(lib.llama_sampler_init_top_p(top_p, 1))
            self._add(lib.llama_sampler_init_min_p(min_p, 1))
            self._add(lib.llama_sampler_init_temp(temperature))
            self._add(lib.llama_sampler_init_dist(_RANDOM_SEED if seed is None else seed))

    def _add(self, sampler: Any) -> None:
        lib.llama_sampler_chain_add(self._chain.live, sampler)

    @staticmethod
    def _parse(model: Model, grammar: Any) -> Any:
        text = grammar if isinstance(grammar, str) else getattr(grammar, "_grammar", None)
        if not isinstance(text, str):
            raise TypeError(f"grammar is {type(grammar).__name__}, expected GBNF text or a LlamaGrammar")
        with model.guard:
            sampler = lib.llama_sampler_init_grammar(model.vocab, text.encode(), b"root")
        if not sampler:
            raise ValueError(f"grammar is not GBNF that llama.cpp can parse: {text[:80]!r}")
        return sampler

    def sample(
        self, context: ModelContext, index: int = -1, logits: npt.NDArray[np.float32] | None = None
    ) -> int | None:
        """The token chosen from `logits` (float32 [n_vocab]), or from those at `index` of the last batch; -1: the last.

        The chain takes note of it.  None where the grammar allows nothing any more: llama.cpp would end the process on
        whatever is chosen then.
        """
        if self._grammar is None and logits is None:
            return int(lib.llama_sampler_sample(self._chain.live, context.live, index))
        candidates = np.zeros(self._n_vocab, _CANDIDATE)
        candidates["id"] = np.arange(self._n_vocab)
        candidates["logit"] = context.logits(index) if logits is None else logits
        array = lib.llama_token_data_array(candidates.ctypes.data_as(lib.llama_token_data_p), self._n_vocab, -1, False)
        if self._grammar is not None:
            lib.llama_sampler_apply(self._grammar.live, ctypes.byref(array))
        if not np.isfinite(candidates["logit"]).any():
            return None
        lib.llama_sampler_apply(self._chain.live, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        if self._grammar is not None:
            lib.llama_sampler_accept(self._grammar.live, token)
        lib.llama_sampler_accept(self._chain.live, token)
        return token

    def close(self) -> None:
        """Free the chain.  Closing twice does nothing; one that is never closed is freed when it is forgotten."""
        self._chain.close()
        if self._grammar is not None:
            self._grammar.close()


class _Native:
    """Owns a llama_sampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._finalizer = weakref.finalize(self, lib.llama_sampler_free, sampler)

    @property
    def live(self) -> Any:
        if not self._finalizer.alive:
            raise ValueError("this sampler is closed")
        return self._sampler

    def close(self) -> None:
        self._finalizer()
