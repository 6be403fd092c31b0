"""What flash attention costs or saves on this machine: llama.cpp has other kernels with it, and without."""

from __future__ import annotations

import time

import numpy as np

from skippy.bench.play import Settings
from skippy.errors import NativeError
from skippy.history import Tokens
from skippy.model import Model, ModelContext

__all__ = ["SUFFIX", "attention"]

SUFFIX = 32  # tokens of a short new end of a prompt
_BEHIND = 1024


def attention(model: Model, settings: Settings, *, rounds: int = 3) -> dict[str, dict[str, float]]:
    """Milliseconds with flash attention "on" and "off": the best of `rounds`, which take turns.

    `suffix_ms` to evaluate SUFFIX tokens behind `behind` others, `token_ms` a single one there, and `token_beside_ms`
    the same while as many cells of another sequence lie in the pool.  Uses two contexts of 2 * `behind` cells and a
    little.
    """
    behind = min(_BEHIND, settings.n_ctx // 2 - 2 * SUFFIX)
    rng = np.random.default_rng(2)
    held, other = (rng.integers(model.n_vocab // 4, model.n_vocab // 2, behind, np.int32) for _ in range(2))
    found: dict[str, dict[str, float]] = {}
    contexts = {}
    try:
        for name in ("on", "off"):
            contexts[name] = model.new_context(
                n_ctx=2 * behind + 2 * SUFFIX, n_batch=settings.n_batch, n_ubatch=settings.n_batch, n_seq_max=3,
                n_threads=settings.threads, flash_attn=name,
            )  # fmt: skip
            found[name] = {"behind": behind}
            _fill(contexts[name], 0, held, settings.n_batch)
        for what, tokens in (("suffix_ms", SUFFIX), ("token_ms", 1), ("token_beside_ms", 1)):
            if what == "token_beside_ms":
                for context in contexts.values():
                    _fill(context, 2, other, settings.n_batch)
            for _ in range(rounds):
                for name, context in contexts.items():
                    ms = _time(context, behind, held[:tokens])
                    found[name][what] = min(ms, found[name].get(what, ms))
    finally:
        for context in contexts.values():
            context.close()
    return found


def _fill(context: ModelContext, seq: int, tokens: Tokens, n_batch: int) -> None:
    for start in range(0, len(tokens), n_batch):
        _decode(context, seq, start, tokens[start : start + n_batch])


def _time(context: ModelContext, behind: int, tokens: Tokens) -> float:
    """Milliseconds for `tokens` behind what sequence 0 holds, which stays as it is."""
    sequences = context.sequences
    sequences.seq_cp(0, 1)
    began = time.perf_counter()
    _decode(context, 1, behind, tokens)
    sequences.synchronize()
    elapsed = 1e3 * (time.perf_counter() - began)
    sequences.seq_rm(1)
    return elapsed


def _decode(context: ModelContext, seq: int, start: int, tokens: Tokens) -> None:
    code = context.sequences.decode(seq, start, tokens)
    if code != 0:
        raise NativeError(f"evaluating {len(tokens)} tokens at {start} failed with {code}", code)
