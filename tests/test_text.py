from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy.text import TextStream, as_stops


def test_a_character_in_pieces_comes_out_whole() -> None:
    stream = TextStream()
    assert [stream.feed(bytes([byte])) for byte in "né☃🙂".encode()] == ["n", "", "é", "", "", "☃", "", "", "", "🙂"]
    assert stream.finish() == ""
    assert stream.text == "né☃🙂"


def test_half_a_character_at_the_end_becomes_the_replacement_character() -> None:
    stream = TextStream()
    assert stream.feed("é".encode()[:1]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.text == "\ufffd"


def test_a_stop_text_across_tokens() -> None:
    stream = TextStream(["\n\nUser:"])
    assert stream.feed(b"Hello\n") == "Hello"
    assert stream.feed(b"\nUs") == ""
    assert stream.feed(b"er: more") == ""
    assert stream.stopped
    assert stream.text == "Hello"
    assert stream.feed(b"more") == stream.finish() == ""


def test_what_looked_like_a_stop_text_comes_out_when_it_is_none() -> None:
    stream = TextStream(["END"])
    assert [stream.feed(piece) for piece in (b"E", b"N", b"T", b"EN")] == ["", "", "ENT", ""]
    assert stream.finish() == "EN"
    assert not stream.stopped


def test_the_earliest_stop_text_wins() -> None:
    stream = TextStream(["world", "lo"])
    stream.feed(b"hello world")
    assert stream.text == "hel"


def test_stop_texts_are_checked() -> None:
    assert as_stops("a") == ("a",)
    assert as_stops(None) == ()
    assert as_stops(["a", "b"]) == ("a", "b")
    with pytest.raises(ValueError, match="stop holds ''"):
        as_stops(["a", ""])


@given(
    st.text(alphabet="abé☃", max_size=30),
    st.lists(st.text(alphabet="abé☃", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_however_the_bytes_are_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    stream = TextStream(stops)
    given_out = "".join(stream.feed(raw[a:b]) for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True))
    given_out += stream.finish()
    assert given_out == stream.text
    found = [text.find(stop) for stop in stops if stop in text]
    if not found:
        assert stream.text == text
        assert not stream.stopped
    else:
        assert stream.stopped
        # The first stop text to be complete ends the answer; none is left in it.
        assert text.startswith(stream.text)
        assert not any(stop in stream.text for stop in stops)
