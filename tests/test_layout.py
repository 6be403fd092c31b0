"""Reading saved states: against states of a real context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippy.errors import StateError
from skippy.layout import (
    Layout,
    attention_bytes,
    check_positions,
    cut,
    read_rows,
    read_sections,
    v_transposed,
    without_ids,
)
from skippy.model import Model, ModelContext
from tests.conftest import evaluate, state_of, words

Fresh = Callable[..., ModelContext]
KINDS: list[dict[str, Any]] = [
    {"flash_attn": "on"},
    {"flash_attn": "off"},
    {"flash_attn": "on", "type_k": "q8_0", "type_v": "q4_0"},
]


@pytest.mark.parametrize("settings", KINDS)
def test_rows_of_a_range_are_those_of_the_whole(fresh: Fresh, settings: dict[str, Any]) -> None:
    context = fresh(**settings)
    evaluate(context, 0, 0, words(48))
    whole = state_of(context, 0)
    rows = read_rows(whole)
    assert rows.shape[0] == 48
    assert v_transposed(whole) is (settings["flash_attn"] == "off")
    context.sequences.seq_cp(0, 1, 10, 31)
    part = state_of(context, 1)
    check_positions(part, 10, 31)
    assert np.array_equal(read_rows(part), rows[10:31])
    assert len({row.tobytes() for row in rows}) == 48
    # 30 layers, one K and one V row of 3 x 64 values each.
    per_value = {"on": 2 + 2, "off": 2 + 2}[settings["flash_attn"]] if "type_k" not in settings else 34 / 32 + 18 / 32
    assert rows.shape[1] == 30 * 192 * per_value


def test_a_flipped_byte_shows_in_the_row_of_its_token(fresh: Fresh) -> None:
    context = fresh()
    evaluate(context, 0, 0, words(20))
    state = state_of(context, 0)
    rows = read_rows(state)
    body = read_sections(state)[0].blocks[0].data.start
    state[body + 7 * 384 + 5] ^= 1  # the seventh K row of the first layer: 192 values of two bytes
    assert [i for i in range(20) if not np.array_equal(read_rows(state)[i], rows[i])] == [7]


def test_cells_out_of_order_are_put_in_order(fresh: Fresh) -> None:
    """A sequence in the gaps of others is saved in the order of the pool."""
    context = fresh(n_ctx=256)
    c = context.sequences
    for seq in range(4):
        evaluate(context, seq, 0, words(64, seq))
    c.seq_rm(2)
    c.seq_rm(0)
    tokens = words(100, 9)
    evaluate(context, 5, 0, tokens[:64])
    evaluate(context, 5, 64, tokens[64:])
    state = state_of(context, 5)
    check_positions(state, 0, 100)
    other = fresh(n_ctx=256)
    evaluate(other, 0, 0, tokens, 64)
    assert read_rows(state).shape == read_rows(state_of(other, 0)).shape
    c.seq_rm(1)
    c.seq_rm(3)
    c.load(6, state)
    assert np.array_equal(read_rows(state_of(context, 6)), read_rows(state))


def test_two_saves_of_one_state_differ_in_the_ids_alone(fresh: Fresh) -> None:
    context = fresh()
    evaluate(context, 0, 0, words(30))
    context.sequences.seq_cp(0, 6)
    one, two = state_of(context, 0), state_of(context, 6)
    assert one != two
    assert np.array_equal(without_ids(one), without_ids(two))
    assert int((np.frombuffer(one, np.uint8) != np.frombuffer(two, np.uint8)).sum()) == 31  # the header and each cell


def test_positions_are_named_when_they_are_others(fresh: Fresh) -> None:
    context = fresh()
    evaluate(context, 0, 0, words(30))
    state = state_of(context, 0)
    check_positions(state, 0, 30)
    with pytest.raises(StateError, match="30 cells at positions 0 to 29, expected 0 to 30"):
        check_positions(state, 0, 31)
    with pytest.raises(StateError, match="30 cells at positions 0 to 29, expected 1 to 29"):
        check_positions(state, 1, 30)
    empty = bytearray(context.sequences.state_size(5))
    context.sequences.save(5, empty)
    with pytest.raises(StateError, match="0 cells at positions none, expected 0 to 29"):
        check_positions(empty, 0, 30)
    assert v_transposed(empty) is None
    assert read_rows(empty).shape == (0, 0)


def test_what_is_no_state_is_named(fresh: Fresh) -> None:
    context = fresh()
    evaluate(context, 0, 0, words(30))
    state = state_of(context, 0)
    for damaged, message in (
        (b"", "0 bytes is shorter than its header"),
        (state[:12], "12 bytes is shorter"),
        (b"GGUF" + state[4:], "begins with 0x46554747, expected 0xaf143cd8"),
        (state[:8] + b"\x02" + state[9:], "has 2 streams"),
        (state[:12] + b"\xff\xff\xff\x7f" + state[16:], "the 2147483647 cells of a saved state"),
        (state[:100], "the 30 cells of a saved state of 100 bytes"),
    ):
        with pytest.raises(StateError, match=message):
            read_sections(bytes(damaged))
    with pytest.raises(StateError, match=f"{len(state) - 1} bytes ends inside its rows"):
        read_rows(state[:-1])
    with pytest.raises(StateError, match=f"has {len(state) + 1} bytes, {len(state)} of them are attention rows"):
        read_rows(bytes(state) + b"x")


@pytest.mark.parametrize("settings", KINDS)
def test_a_cut_is_what_llama_cpp_saves_of_the_range(fresh: Fresh, settings: dict[str, Any]) -> None:
    context = fresh(**settings)
    c = context.sequences
    evaluate(context, 0, 0, words(48))
    whole = state_of(context, 0)
    room = np.full(len(whole), 0xAA, np.uint8)
    for start, end in ((0, 48), (0, 1), (0, 20), (20, 48), (47, 48), (7, 31)):
        c.seq_cp(0, 1, start, end)
        expected = without_ids(state_of(context, 1))
        c.seq_rm(1)
        assert np.array_equal(without_ids(cut(whole, start, end)), expected)
        assert np.array_equal(without_ids(cut(whole, start, end, lambda size: room)), expected)
        c.load(2, cut(whole, start, end))
        assert (c.seq_pos_min(2), c.seq_pos_max(2)) == (start, end - 1)
        c.seq_rm(2)
    for start, end in ((0, 49), (48, 49), (5, 5), (9, 3)):
        with pytest.raises(StateError, match=rf"of the cells \[{start}, {end}\), expected {end - start}"):
            cut(whole, start, end)


def test_a_cut_of_cells_out_of_order(fresh: Fresh) -> None:
    context = fresh(n_ctx=256)
    c = context.sequences
    for seq in range(4):
        evaluate(context, seq, 0, words(64, seq))
    c.seq_rm(2)
    evaluate(context, 5, 0, words(64, 9))
    c.seq_rm(0)
    evaluate(context, 5, 64, words(30, 10))
    state = state_of(context, 5)
    positions = read_sections(state)[0].positions
    assert positions.tolist() != sorted(positions.tolist())
    assert np.array_equal(read_rows(cut(state, 50, 80)), read_rows(state)[50:80])
    check_positions(cut(state, 50, 80), 50, 80)


# --- windows, hybrids, recurrent states -------------------------------------------------------------------------------

WINDOWED, HYBRID, HYBRID_WINDOWED, RECURRENT = Layout(2), Layout(1, True), Layout(2, True), Layout(0, True)
TINY = [("gemma3", WINDOWED), ("falconh1", HYBRID), ("lfm2swa", HYBRID_WINDOWED), ("mamba2", RECURRENT)]


@pytest.fixture
def small(tiny: Callable[[str], Path]) -> Iterator[Callable[..., ModelContext]]:
    """Contexts on tiny models."""
    opened: list[tuple[Model, ModelContext]] = []

    def open_(name: str, **settings: Any) -> ModelContext:
        model = Model(tiny(name))
        opened.append((model, model.new_context(n_ctx=512, n_seq_max=4, swa_full=False, **settings)))
        return opened[-1][1]

    yield open_
    for model, context in opened:
        context.close()
        model.close()


def tokens(n: int) -> list[int]:
    return words(n, low=5, high=384)


@pytest.mark.parametrize(("name", "layout"), TINY)
def test_sections_of_each_family(small: Callable[..., ModelContext], name: str, layout: Layout) -> None:
    context = small(name)
    evaluate(context, 1, 0, tokens(100))
    state = state_of(context, 1)
    sections = read_sections(state, layout)
    expected = [list(range(100)), list(range(100 - 32, 100))][: layout.sections]
    assert [sorted(section.positions.tolist()) for section in sections] == expected
    assert (bool(sections) and sections[-1].end == len(state)) is not layout.opaque
    for section in sections:
        assert section.rows(np.frombuffer(state, np.uint8)).shape == (
            section.positions.size,
            section.bytes_per_token - 12,
        )
    context.sequences.seq_cp(1, 2)
    assert np.array_equal(without_ids(state, layout), without_ids(state_of(context, 2), layout))


def test_a_section_without_layers_has_rows_of_no_bytes(small: Callable[..., ModelContext]) -> None:
    """All attention of this one slides, so that its first section is positions alone."""
    context = small("lfm2swa")
    evaluate(context, 0, 0, tokens(50))
    assert read_rows(state_of(context, 0), HYBRID_WINDOWED).shape == (50, 0)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_a_cut_of_a_window_is_what_llama_cpp_saves_of_the_range(
    small: Callable[..., ModelContext], flash_attn: str
) -> None:
    context = small("gemma3", flash_attn=flash_attn)
    c = context.sequences
    evaluate(context, 0, 0, tokens(100))
    whole = state_of(context, 0)
    assert check_positions(whole, 0, 100, WINDOWED) == 68
    for start, end in ((0, 100), (68, 100), (80, 100), (90, 100)):
        c.seq_cp(0, 1, start, end)
        expected = without_ids(state_of(context, 1), WINDOWED)
        c.seq_rm(1)
        found = cut(whole, start, end, layout=WINDOWED)
        assert np.array_equal(without_ids(found, WINDOWED), expected)
        assert check_positions(found, start, end, WINDOWED) == max(start, 68)
    # Of what ends before, the window has no more than the whole state holds, which llama.cpp may still have.
    assert check_positions(cut(whole, 0, 80, layout=WINDOWED), 0, 80, WINDOWED) == 68
    assert check_positions(cut(whole, 0, 60, layout=WINDOWED), 0, 60, WINDOWED) == 60
    for window in (100, 90, 68):
        found = cut(whole, 50, 100, layout=WINDOWED, window=window)
        assert check_positions(found, 50, 100, WINDOWED) == window
        assert np.array_equal(read_rows(found, WINDOWED), read_rows(whole, WINDOWED)[50:])


def test_a_window_with_a_gap_is_refused(small: Callable[..., ModelContext]) -> None:
    context = small("gemma3")
    evaluate(context, 0, 0, tokens(20))
    state = state_of(context, 0)
    assert check_positions(state, 0, 20, WINDOWED) == 0
    window = read_sections(state, WINDOWED)[1]
    table = np.frombuffer(state, np.uint8)[window.cells].view("<i4").reshape(-1, window.words)
    changed = bytearray(state)
    at = window.cells.start + 4 * window.words * int(np.flatnonzero(table[:, 0] == 7)[0])
    changed[at : at + 4] = (3).to_bytes(4, "little")  # 7 is missing, 3 is there twice
    with pytest.raises(StateError, match="20 cells at positions 0 to 19, expected 0 to 19"):
        check_positions(changed, 0, 20, WINDOWED)


def test_a_cut_leaves_point_state_as_it_is(small: Callable[..., ModelContext]) -> None:
    context = small("falconh1")
    evaluate(context, 0, 0, tokens(60))
    state = state_of(context, 0)
    (attention,) = read_sections(state, HYBRID)
    found = cut(state, 10, 40, layout=HYBRID)
    (part,) = read_sections(found, HYBRID)
    assert bytes(found[part.end :]) == bytes(state[attention.end :])
    assert np.array_equal(read_rows(found, HYBRID), read_rows(state, HYBRID)[10:40])
    assert attention_bytes(state) == attention.end
    with pytest.raises(StateError, match="of them are attention rows"):
        read_sections(state)
