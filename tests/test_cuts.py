"""A wrong cut is impossible: every length that a stored path offers is restored, and compared with cold runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import skippy
from skippy.model import Model, ModelContext
from tests.ledger import Ledger
from tests.tiny_models import FAMILIES, N_CONTROL, N_VOCAB

Tokens = npt.NDArray[np.int32]

PROMPT, ANSWER, STARTS, LEAST = 150, 60, [50, 100], 16
END = PROMPT + ANSWER - 1  # the last token of an answer is not evaluated
NOISE = 0.02  # logits of two right runs differ by up to a third of this, those of wrong ones by more than 0.1

Offered = Callable[[int], int]


def anywhere(length: int) -> int:
    return length if length >= LEAST else 0


def at_checkpoints(length: int) -> int:
    """The starts of messages, the last token but one and the last of the prompt, and the end of the answer."""
    return max((n for n in (*STARTS, 149, 150, END) if n <= length), default=0)


def at_short_windows(length: int) -> int:
    """Behind each pause the window of 32 reaches back for its own length and the one before; from 149 on all hangs
    together, because an answer is saved before it has outgrown the window."""
    if length >= 149:
        return length
    return max((n for n in (49, 50, 99, 100) if n <= length), default=0)


CASES: list[Any] = [
    *(
        pytest.param(name, {"n_batch": 128}, anywhere if model.family == "dense" else at_checkpoints, id=name)
        for name, model in FAMILIES.items()
        if model.family != "window"
    ),
    *(
        pytest.param("gemma3", {"n_batch": n, "swa_full": full}, offered, id=f"gemma3-{n}-{'full' if full else 'own'}")
        for n, offered in ((16, anywhere), (128, at_short_windows))
        for full in (False, True)
    ),
    pytest.param("gemma3", {"n_batch": 16, "flash_attn": "off"}, anywhere, id="gemma3-16-noflash"),
    pytest.param("gemma3", {"n_batch": 128, "flash_attn": "off"}, at_short_windows, id="gemma3-128-noflash"),
]


@pytest.fixture
def open_tiny(tiny: Callable[[str], Path]) -> Iterator[Callable[..., skippy.Runtime]]:
    opened: list[skippy.Runtime] = []

    def open_(name: str, **settings: Any) -> skippy.Runtime:
        config = skippy.CacheConfig(min_tokens=LEAST, ram="64MiB", residency="keep", logits_bytes=0)
        settings = {"n_ctx": 1024, "n_ubatch": settings["n_batch"], "lanes": 2, "n_threads": 1, **settings}
        opened.append(skippy.Runtime(tiny(name), cache=config, **settings))
        opened[-1].cache.speeds.worth_restoring = lambda *_: True  # type: ignore[method-assign]
        return opened[-1]

    yield open_
    for rt in opened:
        rt.close()


def cold_logits(context: ModelContext, tokens: Tokens) -> npt.NDArray[np.float32]:
    assert context.sequences.seq_rm(0)
    assert context.sequences.decode(0, 0, tokens) == 0
    return context.logits()


@pytest.mark.parametrize(("name", "settings", "offered"), CASES)
def test_every_length_that_a_stored_path_offers_is_right(
    open_tiny: Callable[..., skippy.Runtime], name: str, settings: dict[str, Any], offered: Offered
) -> None:
    rt = open_tiny(name, **settings)
    ledger = Ledger.watch(rt)
    prompt = np.random.default_rng(5).integers(N_CONTROL, N_VOCAB, PROMPT).tolist()
    done = rt.generate(prompt, max_tokens=ANSWER, message_starts=STARTS)
    path = np.array([*prompt, *done.tokens], np.int32)[:END]
    assert len(path) == END
    namespace = rt.namespace_hash("")
    model = Model(rt.model.path)
    cold = model.new_context(n_ctx=1024, n_batch=256, flash_attn=settings.get("flash_attn", "on"), swa_full=False)
    worst = 0.0
    for length in range(1, END + 1):
        other = (path[length] + 1) % N_VOCAB if length < END else 7
        tokens = np.array([*path[:length], other], np.int32)
        found = rt.cache.lookup(namespace, tokens)
        assert found == offered(length), f"of {length} tokens"
        if not found and length > LEAST:
            continue
        with rt._step():
            lease = rt.cache.begin(namespace, tokens)
            assert lease is not None
            assert lease.length == found
            for start in range(found, len(tokens), settings["n_batch"]):
                part = tokens[start : start + settings["n_batch"]]
                assert rt.context.sequences.decode(lease.lane, start, part) == 0
            logits = rt.context.logits()
            rt.cache.end(lease)
        worst = max(worst, float(np.abs(logits - cold_logits(cold, tokens)).max()))
        assert worst < NOISE, f"of {length} tokens {found} were restored, and the logits are others"
    assert ledger.wrong == []
    assert ledger.checked == [n for n in map(offered, range(1, END + 1)) if n]
    rt.check()
    assert rt.stats()["failures"] == {}
    cold.close()
    model.close()
