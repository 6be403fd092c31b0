"""Sequence ids: who has them, which are set aside, and that none is ever lost or handed out twice."""

from __future__ import annotations

from typing import Any

import pytest

from skippy.capability import Capability
from skippy.errors import NativeError
from skippy.layout import Layout
from skippy.pool import Pool
from tests.cell_context import CellContext
from tests.conftest import failing


def pool_of(*, lanes: int = 2, residents: int = 1, shape: Capability | None = None) -> Pool:
    return Pool(CellContext(64, lanes + 1 + residents), lanes=lanes, residents=residents, shape=shape)


def fill(pool: Pool, seq: int, n: int) -> None:
    assert pool.context.decode(seq, 0, list(range(n)), "none") == 0


def stuck(*seqs: int) -> Any:
    """A seq_rm that does nothing for `seqs`."""
    return lambda real, seq, start=0, end=-1: False if seq in seqs else real(seq, start, end)


def test_a_lane_that_a_request_has_is_not_emptied_by_who_looks_for_ids() -> None:
    pool = pool_of()
    lane = pool.take_lane()
    assert lane == 0
    fill(pool, lane, 5)
    with failing(pool, seq_rm=stuck(0)), pytest.raises(NativeError, match=r"set aside with 5 cells"):
        pool.empty(lane)
    pool.recover()
    assert (pool.length(0), pool.set_aside) == (5, {0: 5})
    pool.empty(lane)  # what failed once works now, and the request goes on with its lane
    assert pool.set_aside == {}
    fill(pool, lane, 3)
    pool.recover()
    assert pool.length(0) == 3
    pool.give_back(lane)
    assert [pool.take_lane() for _ in range(3)] == [0, 1, None]


def test_a_lane_that_was_given_back_in_vain_is_recovered_once() -> None:
    pool = pool_of()
    lane = pool.take_lane()
    assert lane == 0
    fill(pool, lane, 5)
    with failing(pool, seq_rm=stuck(0)):
        with pytest.raises(NativeError, match="could not be emptied"):
            pool.give_back(lane)
        pool.recover()  # in vain as well, and nobody hears of it
    assert pool.set_aside == {0: 5}
    pool.recover()
    pool.recover()
    assert pool.set_aside == {}
    assert [pool.take_lane() for _ in range(3)] == [0, 1, None]


def test_captures_get_their_sequence_back_where_residents_have_taken_all_ids() -> None:
    pool = pool_of(residents=1)
    assert pool.take_resident() == 3
    emptied = pytest.raises(NativeError, match="sequence 2 could not be emptied")
    with failing(pool, seq_rm=stuck(2)), emptied, pool.scratch() as temp:
        fill(pool, temp, 4)
    with pool.scratch() as temp:  # no id is free but the one that is recovered for it
        assert temp == 2
    assert pool.take_resident() is None
    assert pool.set_aside == {}


def test_cells_that_positions_do_not_show_are_counted_when_they_are_lost() -> None:
    """A half restored hybrid has attention, and no position yet."""
    pool = pool_of(shape=Capability(None, layout=Layout(1, opaque=True)))
    pool.expect(0, 9)
    pool.expect(0, 4)
    with failing(pool, seq_rm=stuck(0)), pytest.raises(NativeError, match="set aside with 9 cells"):
        pool.empty(0)
    assert pool.lost_cells == 9
    pool.empty(0)
    assert pool.lost_cells == 0
    with failing(pool, seq_rm=stuck(0)), pytest.raises(NativeError, match="set aside with 0 cells"):
        pool.empty(0)  # nothing was expected since
