"""The logits of whole prompts, on every memory family: the same prompt again needs no evaluation at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from tests.ledger import Answers, Ledger
from tests.tiny_models import FAMILIES, N_CONTROL, N_VOCAB

BYTES = 4 * N_VOCAB
N, ANSWER = 200, 12
PROMPT: list[int] = np.random.default_rng([1, 12]).integers(N_CONTROL, N_VOCAB, N).tolist()
CASES: list[Any] = [
    *(pytest.param(name, 128, id=name) for name in FAMILIES),
    pytest.param("gemma3", 32, id="gemma3-32"),
]
Open = Callable[..., skippy.Runtime]


@pytest.fixture
def open_tiny(tiny: Callable[[str], Path]) -> Iterator[Open]:
    opened: list[tuple[skippy.Runtime, Ledger]] = []

    def open_(name: str, n_batch: int, *, logits_bytes: int = BYTES, **cache: Any) -> skippy.Runtime:
        config = skippy.CacheConfig(
            **{"min_tokens": 16, "ram": "64MiB", "residency": "keep", "logits_bytes": logits_bytes, **cache}
        )
        rt = skippy.Runtime(
            tiny(name), n_ctx=1024, n_batch=n_batch, n_ubatch=n_batch, lanes=2, n_threads=1, cache=config
        )
        rt.cache.speeds.worth_restoring = lambda *_: True  # type: ignore[method-assign]
        opened.append((rt, Ledger.watch(rt)))
        return rt

    yield open_
    for rt, ledger in opened:
        rt.check()
        assert ledger.wrong == []
        rt.clear()
        assert rt.cache.store.arena.used == 0
        rt.close()


def logits_node(rt: skippy.Runtime, length: int = N) -> Any:
    return next(node for node in rt.cache.tree.entries("logits") if node.length == length)


@pytest.mark.parametrize(("name", "n_batch"), CASES)
def test_the_same_prompt_again_evaluates_nothing(
    open_tiny: Open, tiny: Callable[[str], Path], name: str, n_batch: int
) -> None:
    rt = open_tiny(name, n_batch)
    answers = Answers(tiny(name), n_batch=128, flash_attn="on")
    first = rt.generate(PROMPT, max_tokens=ANSWER)
    assert first.reuse.evaluated_tokens == N
    answers.check(PROMPT, first.tokens, ANSWER)
    for _ in range(2):
        again = rt.generate(PROMPT, max_tokens=ANSWER)
        assert (again.reuse.cached_tokens, again.reuse.evaluated_tokens, again.reuse.reason) == (N, 0, "hit")
        assert again.tokens[0] == first.tokens[0]  # out of the very same logits
        answers.check(PROMPT, again.tokens, ANSWER)
    assert rt.stats()["logits"] == 1
    # Nothing but the prompt: no answer, and nothing evaluated.
    nothing = rt.generate(PROMPT, max_tokens=0)
    assert (nothing.tokens, nothing.reuse.evaluated_tokens) == ([], 0)
    # A prompt that goes on evaluates what is new, a head of it what is behind its last pause, and one token at least.
    assert rt.generate([*PROMPT, 9, 8, 7], max_tokens=0).reuse.evaluated_tokens == 3
    head = rt.generate(PROMPT[:150], max_tokens=4)
    assert head.reuse.evaluated_tokens >= 1
    answers.check(PROMPT[:150], head.tokens, 4)
    assert rt.generate(PROMPT[:150], max_tokens=4).reuse.evaluated_tokens == 0
    assert rt.stats()["failures"] == {}
    answers.close()


@pytest.mark.parametrize(("name", "n_batch"), CASES)
def test_damaged_logits_are_dropped(open_tiny: Open, tiny: Callable[[str], Path], name: str, n_batch: int) -> None:
    rt = open_tiny(name, n_batch)
    answers = Answers(tiny(name), n_batch=128, flash_attn="on")
    rt.generate(PROMPT, max_tokens=ANSWER)
    kept = rt.cache.shelf.saved(logits_node(rt), "logits")
    kept.block.view[17] ^= 0x40
    again = rt.generate(PROMPT, max_tokens=ANSWER)
    # Point state stands at the end of the prompt, behind which nothing more can be evaluated: all of it anew.
    expected = N if FAMILIES[name].family in ("recurrent", "hybrid") else 1
    assert again.reuse.evaluated_tokens == expected
    answers.check(PROMPT, again.tokens, ANSWER)
    assert rt.stats()["failures"] == {"restore": 1}
    assert rt.stats()["evictions"]["logits:corrupt"] == 1
    assert rt.generate(PROMPT, max_tokens=ANSWER).reuse.evaluated_tokens == 0  # they are there again, and right
    answers.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draw_from_kept_logits_is_that_of_an_evaluated_run(open_tiny: Open, name: str) -> None:
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 1.5, "top_k": 100}
    kept, evaluated = open_tiny(name, 128), open_tiny(name, 128, logits_bytes=0)
    kept.generate(PROMPT, max_tokens=1)
    drawn = []
    for seed in range(8):
        once = kept.generate(PROMPT, seed=seed, **options)
        assert once.reuse.evaluated_tokens == 0
        evaluated.clear()  # so that the prompt is cut and placed as it was where its logits are from
        node = kept.cache.shelf.saved(logits_node(kept), "logits")
        assert evaluated.generate(PROMPT, seed=seed, cache_prompt=False, **options).tokens == once.tokens
        assert np.array_equal(np.frombuffer(node.block.view, np.float32), evaluated.context.logits())
        drawn += once.tokens
    assert len(set(drawn)) > 1


def test_a_grammar_is_applied_to_kept_logits(open_tiny: Open) -> None:
    grammar = 'root ::= "the" | "and"'
    rt = open_tiny("falconh1", 128)
    first = rt.generate(PROMPT, max_tokens=4, grammar=grammar)
    again = rt.generate(PROMPT, max_tokens=4, grammar=grammar)
    assert again.reuse.evaluated_tokens == 0
    assert again.text == first.text
    assert first.text in ("the", "and")


def test_logits_above_the_cap_are_not_kept(open_tiny: Open) -> None:
    rt = open_tiny("mamba", 128, logits_bytes=BYTES - 1)
    for evaluated in (N, 1):
        assert rt.generate(PROMPT, max_tokens=2).reuse.evaluated_tokens == evaluated
    assert rt.stats()["logits"] == 0


def test_the_same_prompt_in_another_namespace_is_a_miss(open_tiny: Open) -> None:
    rt = open_tiny("jamba", 128)
    rt.generate(PROMPT, max_tokens=2)
    assert rt.generate(PROMPT, max_tokens=2, namespace="other").reuse.evaluated_tokens == N
