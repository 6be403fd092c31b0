"""llama.cpp fails, on every memory family: the answer is right or the error a typed one, and nothing leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from skippy.errors import NativeError, StateError
from tests.conftest import failing
from tests.ledger import Answers, Ledger
from tests.tiny_models import N_CONTROL, N_VOCAB

NAMES = ["gemma3", "mamba2", "falconh1", "lfm2swa"]


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng([seed, 10]).integers(N_CONTROL, N_VOCAB, n).tolist()


PROMPT, MORE = tokens(200, 1), tokens(40, 2)


class Rig:
    def __init__(self, path: Path) -> None:
        config = skippy.CacheConfig(min_tokens=16, ram="64MiB", residency="keep", logits_bytes=0)
        self.rt = skippy.Runtime(path, n_ctx=1024, n_batch=128, n_ubatch=128, lanes=2, n_threads=1, cache=config)
        self.rt.cache.speeds.worth_restoring = lambda *_: True  # type: ignore[method-assign]
        self.answers = Answers(path, n_batch=128, flash_attn="on")
        self.ledger = Ledger.watch(self.rt)

    def ask(self, prompt: list[int], **options: Any) -> int:
        """A right answer; how many tokens were evaluated."""
        done = self.rt.generate(prompt, max_tokens=4, **options)
        self.answers.check(prompt, done.tokens, 4)
        assert self.ledger.wrong == []
        self.rt.check()
        return done.reuse.evaluated_tokens

    @property
    def failures(self) -> dict[str, int]:
        return dict(self.rt.stats()["failures"])


@pytest.fixture(params=NAMES)
def rig(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[Rig]:
    """A runtime; afterwards its lanes are free, and its sequences and its memory empty once it is cleared."""
    found = Rig(tiny(request.param))
    yield found
    rt = found.rt
    rt.check()
    assert rt.stats()["sequences_set_aside"] == 0
    for stream in [rt.generate(PROMPT[:20], max_tokens=2, stream=True) for _ in range(2)]:
        next(stream)  # both lanes can be had
        stream.close()
    rt.clear()
    assert (rt.cache.store.arena.used, len(rt.cache.tree)) == (0, 0)
    sequences = rt.context.sequences
    assert {sequences.seq_pos_max(seq) for seq in range(sequences.n_seq_max)} == {-1}
    found.answers.close()
    rt.close()


def refuse(*_: Any, **__: Any) -> Any:
    raise StateError("made to fail")


def after(calls: int, change: Callable[..., Any], *, times: int = 1) -> Callable[..., Any]:
    """A call that works `calls` times, is changed `times` times, and works again."""
    made = 0

    def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        return (change if calls < made <= calls + times else lambda r, *a, **k: r(*a, **k))(real, *args, **kwargs)

    return call


def test_saving_fails(rig: Rig) -> None:
    with failing(rig.rt.cache.pool, save=refuse):
        assert rig.ask(PROMPT) == 200
    assert set(rig.failures) == {"save"}
    assert rig.rt.cache.store.arena.used == 0
    assert rig.ask(PROMPT + MORE) == 240  # nothing was kept, and nothing is offered
    assert rig.ask(PROMPT + MORE) == 1


def test_a_save_is_shorter_than_it_was_announced(rig: Rig) -> None:
    with failing(rig.rt.cache.pool, save=lambda real, seq, out, flags=0: real(seq, out, flags) - 1):
        assert rig.ask(PROMPT) == 200
    assert set(rig.failures) == {"save"}
    assert rig.rt.cache.store.arena.used == 0


@pytest.mark.parametrize("saves", [1, 2, 3])
def test_one_save_of_several_fails(rig: Rig, saves: int) -> None:
    """What is left may be an attention without a checkpoint, or the other way round: never half a state."""
    with failing(rig.rt.cache.pool, save=after(saves, refuse)):
        assert rig.ask(PROMPT) == 200
    assert rig.ask(PROMPT + MORE) <= 240
    assert rig.ask(PROMPT[:150] + MORE) <= 190
    assert rig.ask(PROMPT + MORE) == 1


@pytest.mark.parametrize("loads", [0, 1])
def test_loading_fails(rig: Rig, loads: int) -> None:
    """The first load is the attention's, where there is some, the second the checkpoint's."""
    assert rig.ask(PROMPT) == 200
    with failing(rig.rt.cache.pool, load=after(loads, refuse, times=100)):
        evaluated = rig.ask(PROMPT + MORE)
    if loads == 0 or rig.rt.capability.has_attention:
        assert evaluated == 240
        assert rig.failures["restore"] >= 1
    assert rig.ask(PROMPT + MORE + MORE) == 40


def test_one_load_fails_and_what_failed_is_dropped(rig: Rig) -> None:
    assert rig.ask(PROMPT) == 200
    with failing(rig.rt.cache.pool, load=after(0, refuse)):
        assert rig.ask(PROMPT + MORE) in (40, 41, 240)  # another checkpoint may serve, one token before
    assert rig.failures == {"restore": 1}
    assert rig.ask(PROMPT + MORE) == 1


@pytest.mark.parametrize("rig", ["gemma3", "falconh1", "lfm2swa"], indirect=True)
def test_a_copy_that_copies_nothing_is_noticed(rig: Rig) -> None:
    """The positions of a window or of a checkpoint do not show that attention is missing in the middle."""
    assert rig.ask(PROMPT) == 200
    assert rig.ask(PROMPT + MORE) <= 41
    with failing(rig.rt.cache.pool, seq_cp=after(0, lambda *_, **__: None, times=100)):
        assert rig.ask(PROMPT + MORE + MORE) > 41
    assert rig.failures["restore"] >= 1


@pytest.mark.parametrize("rig", ["mamba2", "falconh1", "lfm2swa"], indirect=True)
def test_a_checkpoint_that_does_not_end_where_it_should(rig: Rig) -> None:
    """seq_rm(dst, length) must answer True after a partial load; False is obeyed."""
    assert rig.ask(PROMPT) == 200

    def answer_no(real: Callable[..., bool], seq: int, start: int = 0, end: int = -1) -> bool:
        return real(seq, start, end) if start <= 0 else False

    with failing(rig.rt.cache.pool, seq_rm=answer_no):
        assert rig.ask(PROMPT + MORE) == 240
    assert rig.failures["restore"] >= 1
    assert rig.ask(PROMPT + MORE) == 1


@pytest.mark.parametrize("code", [2, -3])
@pytest.mark.parametrize("batches", [0, 1, 2, 4])
def test_a_decode_fails_midway(rig: Rig, monkeypatch: pytest.MonkeyPatch, code: int, batches: int) -> None:
    """The batch is half done: llama.cpp says so after it has changed the lane."""
    assert rig.ask(PROMPT) == 200
    real = rig.rt.context.sequences

    class Failing:
        def __init__(self) -> None:
            self.made = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def decode(self, *args: Any, **kwargs: Any) -> int:
            self.made += 1
            done = real.decode(*args, **kwargs)
            return code if self.made == batches + 1 else done

    prompt = PROMPT[:180] + tokens(150, 3)
    with monkeypatch.context() as patch:
        patch.setattr(rig.rt.context, "sequences", Failing())
        with pytest.raises(NativeError, match=f"failed with {code}") as raised:
            rig.rt.generate(prompt, max_tokens=8)
        assert raised.value.code == code
    rig.rt.check()
    assert rig.ledger.wrong == []
    assert rig.ask(prompt) <= 330
    assert rig.ask(PROMPT + MORE) == 40  # the old one is as it was


def test_a_stream_is_stopped_in_the_middle_of_its_prompt(rig: Rig) -> None:
    assert rig.ask(PROMPT) == 200
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 40

    done = rig.rt.generate(tokens(300, 4), max_tokens=4, should_stop=should_stop)
    assert (done.finish_reason, done.text) == ("stopped", "")
    rig.rt.check()
    assert rig.ask(tokens(300, 4)) <= 300
    assert rig.ask(PROMPT + MORE) == 40


def test_what_is_damaged_is_dropped_and_never_offered_again(rig: Rig) -> None:
    assert rig.ask(PROMPT) == 200
    cache = rig.rt.cache
    kind: Any = "checkpoint" if rig.rt.capability.needs_checkpoints else "segment"
    for node in cache.tree.entries(kind):
        cache.shelf.saved(node, kind).block.view[-9] ^= 1
    damaged = cache.tree.count(kind)
    assert rig.ask(PROMPT + MORE) == 240
    assert 1 <= rig.failures["restore"] <= damaged
    # A damaged segment behind the first one is found when the first one is there again.
    assert rig.ask(PROMPT + MORE) == (112 if kind == "segment" else 1)
    assert rig.ask(PROMPT + MORE) == 1
