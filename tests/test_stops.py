"""Where the evaluation of a prompt pauses, without a model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy.stops import GAP, NEAR, prefill_stops

CASES: list[tuple[str, tuple[int, int], dict[str, Any], list[int]]] = [
    ("nothing to pause for", (0, 1000), {}, []),
    ("before the last token", (0, 1000), {"before_last": True}, [999]),
    ("a prompt of one token has none before", (0, 1), {"before_last": True}, []),
    ("all but the last is there", (199, 200), {"before_last": True}, []),
    ("all is there", (200, 200), {"before_last": True, "branch": 200, "message_starts": [100]}, []),
    ("too short to be kept", (0, 16), {"before_last": True, "least": 16}, []),
    ("just long enough", (0, 17), {"before_last": True, "least": 16}, [16]),
    ("the place of parting", (0, 1000), {"branch": 250}, [250]),
    ("which is where it begins", (250, 1000), {"branch": 250}, []),
    ("or its end", (0, 250), {"branch": 250}, []),
    ("or below what is kept", (0, 1000), {"branch": 15, "least": 16}, []),
    ("seven tokens are no batch", (240, 1000), {"branch": 247}, []),
    ("eight are", (240, 1000), {"branch": 248}, [248]),
    ("messages", (0, 1000), {"message_starts": [100, 300, 500]}, [100, 300, 500]),
    ("in any order, and twice", (0, 1000), {"message_starts": [500, 100, 300, 100]}, [100, 300, 500]),
    ("that are restored, or the answer", (300, 600), {"message_starts": [100, 300, 500, 600]}, [500]),
    ("of older ones that are near the first", (0, 1000), {"message_starts": [100, 131, 400]}, [100, 400]),
    ("not so near", (0, 1000), {"message_starts": [100, 132, 400]}, [100, 132, 400]),
    ("the newest in any case", (0, 1000), {"message_starts": [100, 390, 400]}, [100, 400]),
    ("but not beside the place of parting", (0, 1000), {"branch": 393, "message_starts": [100, 400]}, [100, 393]),
    ("eight tokens on it is another place", (0, 1000), {"branch": 392, "message_starts": [100, 400]}, [100, 392, 400]),
    ("an older one needs more", (0, 1000), {"branch": 131, "message_starts": [100, 400]}, [131, 400]),
    ("one near the beginning", (90, 1000), {"message_starts": [100, 121, 122]}, [122]),
    ("what others may share", (0, 1000), {"shared": 768}, [768]),
    ("unless messages are known", (0, 1000), {"shared": 768, "message_starts": [500]}, [500]),
    ("or it is near the place of parting", (0, 1000), {"shared": 768, "branch": 740}, [740]),
    ("all together", (240, 1000), {"branch": 250, "shared": 768, "before_last": True}, [250, 768, 999]),
]


@pytest.mark.parametrize(("span", "places", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_places(span: tuple[int, int], places: dict[str, Any], expected: list[int]) -> None:
    assert prefill_stops(*span, **{"branch": 0, "before_last": False, **places}) == expected


LENGTH = st.integers(0, 300)


@given(LENGTH, LENGTH, LENGTH, st.lists(LENGTH, max_size=5), st.none() | LENGTH, st.integers(1, 64), st.booleans())
def test_whatever_is_asked_for(
    begin: int, end: int, branch: int, starts: list[int], shared: int | None, least: int, before_last: bool
) -> None:
    found = prefill_stops(
        begin, end, branch=branch, message_starts=starts, shared=shared, least=least, before_last=before_last
    )
    assert all(max(begin, least - 1) < place < end for place in found)
    assert set(found) <= {branch, *starts, shared, end - 1}
    assert found == sorted(set(found))
    wanted = found[:-1] if before_last and found and found[-1] == end - 1 else found
    assert all(b - a >= NEAR for a, b in zip([begin, *wanted], wanted, strict=False))
    # Where none of the two most wanted ones is, places are far apart.
    others = [place for place in wanted if place not in (branch, max(starts, default=-1))]
    assert all(b - a >= GAP for a, b in zip([begin, *others], others, strict=False))
