"""Long conversations on a model with a sliding window: the pool does not fill with what the window has left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from tests.ledger import Answers
from tests.tiny_models import N_CONTROL, N_VOCAB

TURN, ANSWER = 256, 256  # tokens of a question and of its answer
OTHER = 100


def tokens(n: int, *seed: int) -> list[int]:
    return np.random.default_rng([9, *seed]).integers(N_CONTROL, N_VOCAB, n).tolist()


def open_runtime(path: Path, *, n_batch: int, ram: int, **settings: Any) -> skippy.Runtime:
    config = skippy.CacheConfig(min_tokens=16, ram=ram, logits_bytes=0)
    settings = {"n_ctx": 8192 + 512, "n_ubatch": n_batch, "lanes": 3, "n_threads": 1, **settings}
    rt = skippy.Runtime(path, n_batch=n_batch, cache=config, **settings)
    rt.cache.speeds.worth_restoring = lambda *_: True  # type: ignore[method-assign]
    return rt


@pytest.mark.parametrize(("length", "n_batch", "swa_full"), [(8192, 128, False), (2048, 128, True), (2048, 32, False)])
def test_a_long_conversation_with_others_in_between(
    tiny: Callable[[str], Path], length: int, n_batch: int, swa_full: bool
) -> None:
    path = tiny("gemma3")
    with open_runtime(path, n_batch=n_batch, ram=32 << 20, n_ctx=length + 512, swa_full=swa_full) as rt:
        conversation: list[int] = []
        other = tokens(OTHER, 0)
        for turn in range(length // (TURN + ANSWER)):
            before = len(conversation)
            conversation += tokens(TURN, 1, turn)
            # The end of an answer is not evaluated before somebody goes on from it.
            new = TURN + (1 if before else 0)
            stream = rt.generate(other + tokens(20, 2, turn), max_tokens=None, stream=True)
            next(stream)  # it stays open, and keeps its lane, while the long one is answered
            done = rt.generate(conversation, max_tokens=ANSWER)
            stream.close()
            assert done.reuse.evaluated_tokens == new, f"turn {turn}"
            assert len(done.tokens) == ANSWER
            conversation += done.tokens
            fork = rt.generate([*conversation[: before + TURN], *tokens(30, 3, turn)], max_tokens=3)
            assert fork.reuse.evaluated_tokens == 30, f"turn {turn}"
            rt.check()
        assert len(conversation) == length
        assert rt.stats()["failures"] == {}
        assert rt.stats()["sequences_set_aside"] == 0
        # What was stored first is still to be had, and right.
        again = conversation[:TURN] + tokens(4, 4)
        done = rt.generate(again, max_tokens=4)
        assert done.reuse.evaluated_tokens == 4
        answers = Answers(path, n_batch=128, flash_attn="on", n_ctx=8448)
        answers.check(again, done.tokens, 4)
        last = rt.generate(conversation[:-1] + tokens(4, 5), max_tokens=4)
        assert last.reuse.evaluated_tokens == 4
        answers.check(conversation[:-1] + tokens(4, 5), last.tokens, 4)
        answers.close()


@pytest.mark.parametrize("n_batch", [32, 128])
def test_a_small_budget_is_kept_at_every_moment(tiny: Callable[[str], Path], n_batch: int) -> None:
    """A budget for some 600 tokens: the head of a long conversation stays, the rest is evaluated again."""
    path = tiny("gemma3")
    capacity = 600_000
    answers = Answers(path, n_batch=128, flash_attn="on", n_ctx=2560)
    with open_runtime(path, n_batch=n_batch, ram=capacity, n_ctx=2560) as rt:
        conversation: list[int] = []
        for turn in range(8):
            conversation += tokens(TURN - 8, 1, turn)
            done = rt.generate(conversation, max_tokens=8)
            answers.check(conversation, done.tokens, 8)
            conversation += done.tokens
            rt.generate(tokens(150, 2, turn), max_tokens=4)
            rt.check()
            assert rt.cache.store.arena.peak <= rt.cache.store.arena.capacity == capacity
        assert rt.stats()["evictions"]["segment:bytes"] > 10
        assert rt.stats()["failures"] == {}
        rt.clear()
        assert rt.cache.store.arena.used == 0
    answers.close()
