"""Random conversations under pressure, on every memory family: whatever is restored is what was evaluated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from skippy.shelf import KINDS
from tests.ledger import Answers, Ledger
from tests.tiny_models import FAMILIES, N_CONTROL, N_VOCAB

STEPS = 40
# Bytes of RAM: a few conversations of 300 tokens, so that something leaves with nearly every request.
RAM = {"dense": 300_000, "window": 300_000, "recurrent": 350_000, "hybrid": 300_000}

CASES: list[Any] = [
    *(pytest.param(name, {"n_batch": 64}, id=name) for name, model in FAMILIES.items() if model.family != "window"),
    *(pytest.param("gemma3", {"n_batch": n}, id=f"gemma3-{n}") for n in (16, 32, 33, 128)),
]


@pytest.mark.parametrize("logits_bytes", [0, 4 * N_VOCAB])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_random_conversations(
    tiny: Callable[[str], Path], name: str, settings: dict[str, int], logits_bytes: int
) -> None:
    rng = np.random.default_rng([6, *name.encode(), settings["n_batch"], logits_bytes])
    ram = RAM[FAMILIES[name].family]
    config = skippy.CacheConfig(min_tokens=8, ram=ram, residency="keep", logits_bytes=logits_bytes, max_entries=4)
    answers = Answers(tiny(name), n_batch=128, flash_attn="on")
    paths: list[list[int]] = [rng.integers(N_CONTROL, N_VOCAB, 120).tolist()]
    with skippy.Runtime(
        tiny(name), n_ctx=768, n_threads=1, lanes=2, n_ubatch=settings["n_batch"], cache=config, **settings
    ) as rt:
        rt.cache.speeds.worth_restoring = lambda *_: True  # type: ignore[method-assign]
        ledger = Ledger.watch(rt)
        for step in range(STEPS):
            match rng.integers(10):
                case 0:  # something is lost
                    kind = KINDS[rng.integers(len(KINDS))]
                    for node in rt.cache.tree.entries(kind):
                        if rng.random() < 0.5:
                            rt.cache.shelf.drop(node, kind, "bytes")
                case 1:  # something is damaged
                    kind = KINDS[rng.integers(len(KINDS))]
                    for node in rt.cache.tree.entries(kind)[:1]:
                        rt.cache.shelf.saved(node, kind).block.view[-7] ^= 1
                case 2:
                    rt.cache.space.evict_resident("test")
                case _:
                    known = paths[rng.integers(len(paths))]
                    cut = int(rng.integers(1, len(known) + 1))
                    more = int(rng.integers(0, 120)) if cut < 250 else 0
                    prompt = [*known[:cut], *rng.integers(N_CONTROL, N_VOCAB, more).tolist()]
                    starts = sorted(rng.integers(1, len(prompt) + 1, rng.integers(4)).tolist())
                    n = int(rng.integers(1, 50))
                    done = rt.generate(prompt, max_tokens=n, message_starts=starts)
                    paths = [*paths[-5:], [*prompt, *done.tokens]]
                    reuse = done.reuse
                    assert reuse.cached_tokens + reuse.evaluated_tokens == len(prompt)
                    assert reuse.cached_tokens == 0 or reuse.cached_tokens >= 8 or rt.capability.residents
                    assert ledger.wrong == [], f"step {step}"
                    answers.check(prompt, done.tokens, n)
            rt.check()
            assert rt.cache.store.arena.peak <= ram
        assert set(rt.stats()["failures"]) <= {"restore"}  # what was damaged
        assert len(ledger.checked) >= STEPS // 8  # or there was nothing to compare
        rt.clear()
        assert (rt.cache.store.arena.used, len(rt.cache.tree)) == (0, 0)
    answers.close()
