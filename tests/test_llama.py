"""The link to libllama: what it refuses, and that saved state comes back byte for byte."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from skippy import _binding, _llama
from skippy.errors import StateError
from skippy.layout import without_ids
from skippy.model import ModelContext
from tests.conftest import evaluate, state_of, words

Fresh = Callable[..., ModelContext]


def test_an_unsupported_version_is_refused_with_both_versions() -> None:
    for version in ("0.3.35", "0.3.37", "0.4.0", "0.2.90+cu121"):
        with pytest.raises(
            ImportError, match=rf"0\.3\.36 to below 0\.3\.37.*{version.replace('.', '[.]').replace('+', '[+]')}"
        ):
            _binding.require_supported(version)
    for version in ("0.3.36", "0.3.36+cu124", "0.3.36.post1"):
        _binding.require_supported(version)


def test_a_missing_function_is_an_import_error_with_both_versions() -> None:
    with pytest.raises(ImportError, match=rf"{_binding.VERSION} has no function 'llama_no_such_thing'.*0\.3\.36"):
        _binding.address("llama_no_such_thing")


def test_what_the_context_says_of_itself(fresh: Fresh) -> None:
    c = fresh(n_ctx=1000, n_batch=128, n_ubatch=64).sequences
    assert (c.n_ctx, c.n_batch, c.n_ubatch, c.n_seq_max, c.n_vocab, c.unified) == (1024, 128, 64, 8, 49152, True)


@pytest.mark.parametrize("bad", [-1, 8, 256, 2**31 - 1])
def test_sequence_ids_that_do_not_exist_are_refused(fresh: Fresh, bad: int) -> None:
    c = fresh().sequences
    calls = {
        "seq": [
            lambda: c.seq_rm(bad),
            lambda: c.seq_pos_min(bad),
            lambda: c.seq_pos_max(bad),
            lambda: c.state_size(bad),
            lambda: c.save(bad, bytearray(100)),
            lambda: c.load(bad, bytes(100)),
            lambda: c.decode(bad, 0, np.zeros(1, np.int32)),
        ],
        "src": [lambda: c.seq_cp(bad, 0)],
        "dst": [lambda: c.seq_cp(0, bad)],
    }
    for name, functions in calls.items():
        for call in functions:
            with pytest.raises(ValueError, match=rf"^{name} is {bad}, expected a sequence id from 0 to 7$"):
                call()


def test_ranges_that_make_no_sense_are_refused(fresh: Fresh) -> None:
    c = fresh().sequences
    for start, end in ((-1, 5), (5, 5), (5, 4), (0, -2)):
        with pytest.raises(ValueError, match=r"empty or negative"):
            c.seq_cp(0, 1, start, end)
        with pytest.raises(ValueError, match=r"empty or negative"):
            c.seq_rm(0, start, end)
    with pytest.raises(ValueError, match="src and dst are both 3"):
        c.seq_cp(3, 3)


def test_part_of_a_sequence_is_not_copied_on_a_context_that_is_not_unified(fresh: Fresh) -> None:
    context = fresh()
    import ctypes

    address = ctypes.cast(context.pointer, ctypes.c_void_p).value
    divided = _llama.Context(address, unified=False)  # declared so: llama.cpp would abort on the call
    with pytest.raises(ValueError, match=r"\[0, 5\) is part of a sequence, and this context is not unified"):
        divided.seq_cp(0, 1, 0, 5)


def test_batches_that_llama_cpp_would_abort_on_are_refused(fresh: Fresh) -> None:
    c = fresh(n_batch=32).sequences
    with pytest.raises(ValueError, match=r"33 tokens in one batch, expected 1 to 32 \(n_batch\)"):
        c.decode(0, 0, np.zeros(33, np.int32))
    with pytest.raises(ValueError, match="0 tokens in one batch"):
        c.decode(0, 0, np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="token 49152 at index 1 is not in the vocabulary"):
        c.decode(0, 0, np.array([1, 49152], np.int32))
    with pytest.raises(ValueError, match="token -1 at index 0"):
        c.decode(0, 0, np.array([-1], np.int32))
    with pytest.raises(ValueError, match="start is -1"):
        c.decode(0, -1, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="outputs is 'some', expected one of none, last, all"):
        c.decode(0, 0, np.zeros(1, np.int32), "some")  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError)):
        c.decode(0, 0, np.zeros(1, np.int64))
    assert c.seq_pos_max(0) == -1
    assert c.decode(0, 0, np.ones(32, np.int32)) == 0
    assert (c.seq_pos_min(0), c.seq_pos_max(0)) == (0, 31)


def test_outputs_say_which_tokens_get_logits(fresh: Fresh) -> None:
    context = fresh()
    tokens = np.array(words(6), np.int32)
    context.sequences.decode(0, 0, tokens, "all")
    every = [context.logits(i) for i in range(6)]
    context.sequences.decode(1, 0, tokens, "last")
    assert np.array_equal(context.logits(-1), every[5])
    context.sequences.decode(2, 0, tokens, "none")
    with pytest.raises(ValueError, match="no logits"):
        context.logits(0)
    assert len({logits.tobytes() for logits in every}) == 6


def test_a_gap_in_the_positions_is_refused_by_llama_cpp_and_changes_nothing(fresh: Fresh) -> None:
    c = fresh().sequences
    assert c.decode(0, 0, np.ones(4, np.int32)) == 0
    assert c.decode(0, 9, np.ones(1, np.int32)) == -1
    assert (c.seq_pos_min(0), c.seq_pos_max(0)) == (0, 3)


def test_saved_state_comes_back_byte_for_byte_beside_another_sequence(fresh: Fresh) -> None:
    context = fresh()
    evaluate(context, 0, 0, words(40))
    evaluate(context, 1, 0, words(30, 1))
    saved, other = state_of(context, 0), state_of(context, 1)
    context.sequences.load(5, saved)
    assert context.sequences.seq_pos_max(5) == 39
    assert np.array_equal(without_ids(state_of(context, 5)), without_ids(saved))
    assert state_of(context, 5) != saved  # the id is written into it
    assert state_of(context, 1) == other
    assert state_of(context, 0) == saved


def test_a_buffer_that_is_too_small_or_read_only(fresh: Fresh) -> None:
    context = fresh()
    evaluate(context, 0, 0, words(8))
    size = context.sequences.state_size(0)
    with pytest.raises(StateError, match=f"could not save sequence 0 into {size - 1} bytes"):
        context.sequences.save(0, bytearray(size - 1))
    with pytest.raises((BufferError, ValueError)):
        context.sequences.save(0, bytes(size))
    with pytest.raises(ValueError, match="0 bytes"):
        context.sequences.save(0, bytearray())
    larger = bytearray(b"\xaa" * (size + 10))
    assert context.sequences.save(0, larger) == size
    assert larger[size:] == b"\xaa" * 10


@pytest.mark.parametrize("damage", ["short", "long", "magic", "empty", "header"])
def test_a_load_that_fails_leaves_the_sequence_empty_and_others_alone(fresh: Fresh, damage: str) -> None:
    context = fresh()
    c = context.sequences
    evaluate(context, 0, 0, words(40))
    evaluate(context, 1, 0, words(30, 1))
    saved, other = state_of(context, 0), state_of(context, 1)
    empty = bytearray(c.state_size(7))
    c.save(7, empty)
    broken = {
        "short": saved[:-1],
        "long": saved + b"\0",
        "magic": b"\0" + saved[1:],
        "empty": empty + b"\0" * 30,
        "header": saved[:20],
    }[damage]
    with pytest.raises(StateError, match=f"of the {len(broken)} bytes of a saved state; sequence 0 is empty now"):
        c.load(0, broken)
    assert c.seq_pos_max(0) == -1
    assert state_of(context, 1) == other
    with pytest.raises(ValueError, match="data has 8 bytes"):
        c.load(0, saved[:8])
    c.load(0, saved)
    assert state_of(context, 0) == saved


def test_flags_that_skippy_never_uses_are_refused(fresh: Fresh) -> None:
    c = fresh().sequences
    for flags in (2, 3, 4):  # 2 is the on-device flag, whose misuse ends the process
        for call in (
            lambda f=flags: c.state_size(0, f),
            lambda f=flags: c.save(0, bytearray(99), f),
            lambda f=flags: c.load(0, bytes(99), f),
        ):
            with pytest.raises(ValueError, match=f"flags is {flags}, expected 0 or 1"):
                call()


def test_a_closed_context_raises(fresh: Fresh) -> None:
    context = fresh()
    c = context.sequences
    context.close()
    context.close()
    for call in (lambda: c.seq_pos_max(0), lambda: c.decode(0, 0, np.zeros(1, np.int32)), lambda: c.state_size(0)):
        with pytest.raises(ValueError, match="this context is closed"):
            call()


def test_a_second_thread_gets_an_error_instead_of_a_crash(fresh: Fresh) -> None:
    context = fresh()
    c = context.sequences
    tokens = np.array(words(256), np.int32)
    done = threading.Event()

    def decode() -> None:
        assert c.decode(0, 0, tokens) == 0
        done.set()

    thread = threading.Thread(target=decode)
    thread.start()
    refused: list[str] = []
    while not done.is_set():
        try:
            c.seq_pos_max(1)
        except RuntimeError as error:
            refused.append(str(error))
    thread.join()
    assert refused  # the GIL was released while it decoded, and we came in
    assert all("two threads" in text for text in refused)
    assert c.seq_pos_max(0) == 255


def test_delta_capture_and_chain_restore(fresh: Fresh) -> None:
    """A chain of three captured ranges gives the bytes of the whole."""
    context = fresh()
    c = context.sequences
    evaluate(context, 0, 0, words(200))
    whole = state_of(context, 0)
    pieces = []
    for start, end in ((0, 90), (90, 140), (140, 200)):
        c.seq_cp(0, 7, start, end)
        pieces.append(state_of(context, 7))
        assert c.seq_rm(7)
    assert sum(map(len, pieces)) < len(whole) + 3 * 1000
    c.seq_rm(0)
    for start, piece in zip((0, 90, 140), pieces, strict=True):
        c.load(7, piece)
        c.seq_cp(7, 3, start)
        c.seq_rm(7)
    assert np.array_equal(without_ids(state_of(context, 3)), without_ids(whole))


def test_e3_eight_sequences_the_odd_ones_dropped_and_96_restored_into_the_gaps(fresh: Fresh) -> None:
    context = fresh(n_ctx=256, n_seq_max=10)
    c = context.sequences
    assert c.n_ctx == 256
    evaluate(context, 0, 0, words(96, 99))
    saved = state_of(context, 0)
    c.seq_rm(0)
    for seq in range(8):
        evaluate(context, seq, 0, words(32, seq))
    kept = {seq: state_of(context, seq) for seq in (0, 2, 4, 6)}
    with pytest.raises(StateError):
        c.load(9, saved)  # the pool is full
    for seq in (1, 3, 5, 7):
        assert c.seq_rm(seq)
    c.load(9, saved)
    assert np.array_equal(without_ids(state_of(context, 9)), without_ids(saved))
    assert {seq: state_of(context, seq) for seq in kept} == kept
