"""Choosing the next token with llama.cpp's own samplers and its own grammar."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as lib

from skippy.model import Model, ModelContext

__all__ = ["Sampler"]

_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: llama.cpp draws one


class Sampler:
    """A chain of llama.cpp's samplers: grammar, then greedy, or top-k, top-p, min-p, temperature and a draw.

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
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        try:
            if grammar is not None:
                self._add_grammar(model, grammar)
            if temperature == 0:
                self._add(lib.llama_sampler_init_greedy())
            else:
                self._add(lib.llama_sampler_init_top_k(top_k))
                self._add(lib.llama_sampler_init_top_p(top_p, 1))
                self._add(lib.llama_sampler_init_min_p(min_p, 1))
                self._add(lib.llama_sampler_init_temp(temperature))
                self._add(lib.llama_sampler_init_dist(_RANDOM_SEED if seed is None else seed))
        except BaseException:
            self.close()
            raise

    def _add(self, sampler: lib.llama_sampler_p) -> None:
        lib.llama_sampler_chain_add(self._chain, sampler)

    def _add_grammar(self, model: Model, grammar: Any) -> None:
        text = grammar if isinstance(grammar, str) else getattr(grammar, "_grammar", None)
        if not isinstance(text, str):
            raise TypeError(f"grammar is {type(grammar).__name__}, expected GBNF text or a LlamaGrammar")
        sampler = lib.llama_sampler_init_grammar(model.vocab, text.encode(), b"root")
        if not sampler:
            raise ValueError(f"grammar is not GBNF that llama.cpp can parse: {text[:80]!r}")
        self._add(sampler)

    def sample(self, context: ModelContext) -> int:
        """The token chosen from the last logits of `context`; the chain takes note of it."""
        return int(lib.llama_sampler_sample(self._chain, context.live, -1))

    def close(self) -> None:
        """Free the chain.  Closing twice does nothing."""
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
            self._chain = None
