"""What a context can do, and that what it cannot do is switched off with its reason."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skippy
from skippy import _llama
from skippy.errors import StateError
from skippy.model import Model, ModelContext
from skippy.probe import Capability, probe
from tests.conftest import words
from tests.tiny_models import FAMILIES

Fresh = Callable[..., ModelContext]


def test_a_dense_model_on_a_unified_context(fresh: Fresh) -> None:
    for settings, flash in (
        ({"flash_attn": "on"}, True),
        ({"flash_attn": "off"}, False),
        ({"flash_attn": "auto"}, True),
    ):
        context = fresh(**settings)
        assert probe(context.sequences, bos=1, unified=True) == Capability(None, flash, 23052, 0)
        assert [context.sequences.seq_pos_max(seq) for seq in range(8)] == [-1] * 8


def test_the_pool_is_empty_afterwards(fresh: Fresh) -> None:
    context = fresh(n_ctx=256)
    probe(context.sequences, bos=1, unified=True, second=7)
    assert context.sequences.decode(0, 0, np.array(words(256), np.int32)) == 0


class Odd:
    """A context whose calls are changed one by one."""

    def __init__(self, real: _llama.Context, **calls: Any) -> None:
        self.real, self.calls = real, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        change = self.calls.get(name)
        return (lambda *args, **kwargs: change(found, *args, **kwargs)) if change else found


def scribble(real: Any, seq: int, out: Any, flags: int = 0) -> int:
    written = real(seq, out, flags)
    if seq == 1:
        out[-3] ^= 1
    return int(written)


def fail(*_: Any, **__: Any) -> Any:
    raise StateError("made to fail")


def scribble_on_the_first(real: Any, seq: int, data: Any, flags: int = 0) -> None:
    real(seq, data, flags)
    changed = bytearray(data)
    changed[-3] ^= 1
    real(0, changed, flags)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ({"decode": lambda real, *args: -3}, "decoding 8 tokens failed with -3"),
        ({"save": scribble}, "a copied sequence does not hold what the original does"),
        ({"save": lambda real, seq, out, flags=0: len(out) - 1}, "bytes, .* were announced"),
        ({"save": fail}, "a call of llama.cpp failed: made to fail"),
        ({"seq_rm": lambda real, seq, start=0, end=-1: start == 0 and real(seq)}, "cannot be cut in the middle"),
        ({"load": lambda real, seq, data, flags=0: None}, "a restored sequence does not end where it was saved"),
        ({"load": scribble_on_the_first}, "restoring changed another sequence"),
        ({"state_size": lambda real, seq, flags=0: real(seq, flags) + 64}, "bytes, .* were announced"),
        ({"state_size": lambda real, seq, flags=0: real(seq) + flags}, "its partial state takes .* bytes, all of it"),
    ],
)
def test_each_thing_that_is_amiss_has_its_reason(fresh: Fresh, calls: dict[str, Any], reason: str) -> None:
    context = fresh()
    found = probe(Odd(context.sequences, **calls), bos=1, unified=True)  # type: ignore[arg-type]
    assert found.unable is not None
    assert re.search(reason, found.unable), found.unable
    assert [context.sequences.seq_pos_max(seq) for seq in (0, 1)] == [-1, -1]


def test_a_dense_model_with_a_partial_state_of_its_own_is_none(fresh: Fresh) -> None:
    odd = Odd(fresh().sequences, state_size=lambda real, seq, flags=0: 1000 if flags else real(seq))
    found = probe(odd, bos=1, unified=True)  # type: ignore[arg-type]
    assert found.unable == "a part of its state cannot be cut at a token"


def test_a_context_that_is_not_unified_is_not_touched(fresh: Fresh) -> None:
    calls = dict.fromkeys(("decode", "save", "load", "seq_cp", "state_size"), fail)
    found = probe(Odd(fresh().sequences, **calls), bos=1, unified=False)  # type: ignore[arg-type]
    assert found == Capability("the context is not unified: copies of sequences cannot be saved")


def test_a_model_whose_state_cannot_be_cut_runs_without_reuse_and_says_so(
    open_runtime: Callable[..., skippy.Runtime], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("skippy.runtime.probe", lambda *args, **kwargs: Capability("a sequence cannot be cut"))
    with caplog.at_level(logging.WARNING, "skippy"):
        rt = open_runtime()
    assert "prefix reuse is off: a sequence cannot be cut" in caplog.text
    for _ in range(2):
        reuse = rt.generate(words(40), max_tokens=2).reuse
        assert (reuse.cached_tokens, reuse.evaluated_tokens, reuse.reason) == (0, 40, "no_checkpoint")
    assert rt.stats()["unable"] == "a sequence cannot be cut"
    assert rt.stats()["tree"]["nodes"] == 0
    assert rt.explain(words(40)).reason == "no_checkpoint"


# --- families ---------------------------------------------------------------------------------------------------------

NOT_KNOWN = "models of the family 'diffusion' are not known"
REASONS: dict[str, dict[str, str]] = {
    "dense": {
        "window": "its state is not attention state with a window",
        "recurrent": "its recurrent state grows with its length",
        "hybrid": "its partial state is not the end of its state",
    },
    "window": {
        "dense": "a copied sequence does not hold what the original does",  # it has more than the section that is read
        "recurrent": "it has state besides its recurrent one, which its family should not",
        "hybrid": "its state can be cut in the middle, which its family's cannot",
    },
    "recurrent": {
        "dense": "its state is not plain attention state",
        "window": "its state is not attention state with a window",
        "hybrid": "its state does not begin with attention state",
    },
    "hybrid": {
        "dense": "a sequence cannot be cut in the middle",
        "window": "its state is not attention state with a window",
        "recurrent": "it has state besides its recurrent one, which its family should not",
    },
}
WINDOWED_HYBRID = {**REASONS["hybrid"], "dense": REASONS["window"]["dense"]}


@pytest.fixture(params=FAMILIES)
def tiny_model(request: pytest.FixtureRequest, tiny: Callable[[str], Path]) -> Iterator[tuple[str, Model]]:
    model = Model(tiny(request.param))
    yield request.param, model
    model.close()


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("swa_full", [True, False])
def test_a_model_that_is_declared_one_kind_and_is_another(
    tiny_model: tuple[str, Model], flash_attn: str, swa_full: bool
) -> None:
    """Every pair has its reason, and none aborts; the sequences are empty afterwards, and can be used."""
    name, model = tiny_model
    family = FAMILIES[name].family
    reasons = WINDOWED_HYBRID if name == "lfm2swa" else REASONS[family]
    context = model.new_context(n_ctx=256, n_seq_max=4, flash_attn=flash_attn, swa_full=swa_full)
    for claimed, reason in {**reasons, "diffusion": NOT_KNOWN}.items():
        window = model.window or (32 if claimed == "window" else 0)
        found = probe(context.sequences, bos=1, unified=True, family=claimed, window=window)
        assert found == Capability(reason), claimed
        assert {context.sequences.seq_pos_max(seq) for seq in range(4)} == {-1}
        assert {context.sequences.seq_pos_min(seq) for seq in range(4)} == {-1}
    found = probe(context.sequences, bos=1, unified=True, family=family, window=model.window)
    assert (found.unable, found.flash_attn) == (None, flash_attn == "on" if found.has_attention else None)
    assert context.sequences.decode(0, 0, np.array([1] * 200, np.int32)) == 0
    context.close()


def test_a_window_of_another_size_than_it_is_declared(tiny: Callable[[str], Path]) -> None:
    model = Model(tiny("gemma3"))
    context = model.new_context(n_ctx=256, n_seq_max=4)
    found = probe(context.sequences, bos=1, unified=True, family="window", window=4)
    assert found.unable == "its window holds other tokens than its size says"
    context.close()
    model.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # K and V of 32 half-precision values in each of 4 layers, and 12 bytes of a cell.
        ("llama", (4 * 2 * 64 + 12, 0, 0)),
        # Two of six layers see everything, the others 32 tokens; each kind has cells of its own.
        ("gemma3", (6 * 2 * 64 + 2 * 12, 4 * 2 * 64 + 12, 32)),
        ("mamba", (0, 0, 0)),
        ("lfm2", (2 * 2 * 64 + 12, 0, 0)),
        ("lfm2swa", (12, 0, 0)),  # all of its attention slides, and belongs to the checkpoint
    ],
)
def test_what_a_token_takes(tiny: Callable[[str], Path], name: str, expected: tuple[int, int, int]) -> None:
    model = Model(tiny(name))
    context = model.new_context(n_ctx=256, n_seq_max=4)
    found = probe(context.sequences, bos=1, unified=True, family=model.family, window=model.window)
    assert (found.bytes_per_token, found.window_bytes_per_token, found.window) == expected
    context.close()
    model.close()


@pytest.mark.parametrize(
    ("name", "calls", "reason"),
    [
        ("falconh1", {"seq_rm": lambda real, seq, start=0, end=-1: True}, "its state can be cut in the middle"),
        (
            "falconh1",
            {"seq_rm": lambda real, seq, start=0, end=-1: False if start else real(seq)},
            "a checkpoint cannot be put on top of attention that ends with it",
        ),
        (
            "falconh1",
            {"load": lambda real, seq, data, flags=0: flags or real(seq, data)},
            "a restored checkpoint does not end where it was saved",
        ),
        ("mamba2", {"load": lambda real, seq, data, flags=0: None}, "does not end where it was saved"),
        ("mamba2", {"load": scribble_on_the_first}, "restoring changed another sequence"),
        ("mamba2", {"decode": lambda real, *args: 2}, "decoding 4 tokens failed with 2"),
        ("gemma3", {"load": scribble_on_the_first}, "restoring changed another sequence"),
        ("gemma3", {"save": scribble}, "a copied sequence does not hold what the original does"),
    ],
)
def test_what_is_amiss_in_other_families(
    tiny: Callable[[str], Path], name: str, calls: dict[str, Any], reason: str
) -> None:
    model = Model(tiny(name))
    context = model.new_context(n_ctx=256, n_seq_max=4)
    odd = Odd(context.sequences, **calls)
    found = probe(odd, bos=1, unified=True, family=model.family, window=model.window)  # type: ignore[arg-type]
    assert found.unable is not None
    assert re.search(reason, found.unable), found.unable
    context.close()
    model.close()
