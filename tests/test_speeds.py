"""Prices that are learnt while running, and what is decided from them."""

from __future__ import annotations

import numpy as np
import pytest

from skippy.speeds import Speeds

CELL = 1000  # bytes


def known(save: float = 1e9, restore: float = 1e9) -> Speeds:
    speeds = Speeds()
    speeds.saved(int(save), 1.0)
    speeds.restored(int(restore), 1.0)
    return speeds


def steps(speeds: Speeds, n: int, *, others: float, own: float, noise: float = 0.0, seed: int = 0) -> None:
    """`n` tokens decoded while others come and go; 5 ms each, and `others` and `own` seconds per cell."""
    rng = np.random.default_rng(seed)
    for i in range(n):
        beside, mine = int(rng.integers(0, 4000)), 100 + i
        seconds = 5e-3 + others * beside + own * mine + noise * rng.standard_normal()
        speeds.decoded(beside, mine, seconds)


def test_nothing_is_decided_before_anything_was_measured() -> None:
    speeds = Speeds()
    assert speeds.resident_price(CELL) is None
    assert not speeds.staying_costs_more(1000, 0, 0, 1000, CELL)
    assert known().resident_price(0) is None


def test_the_price_begins_as_a_share_of_restoring() -> None:
    assert known(restore=1e9).resident_price(CELL) == pytest.approx(CELL / 1e9 / 16)


def test_the_price_is_learnt_apart_from_what_the_own_cells_cost() -> None:
    speeds = known()
    steps(speeds, 400, others=3e-7, own=2e-6)
    assert speeds.resident_price(CELL) == pytest.approx(3e-7, rel=0.02)


def test_noise_leaves_the_guess_alone_where_it_explains_it() -> None:
    speeds = known()
    guess = speeds.resident_price(CELL)
    assert guess is not None
    steps(speeds, 300, others=guess, own=1e-6, noise=5e-3)
    assert speeds.resident_price(CELL) == pytest.approx(guess)


def test_a_price_of_nothing_is_believed_and_never_negative() -> None:
    speeds = known()
    steps(speeds, 400, others=0.0, own=1e-6)
    price = speeds.resident_price(CELL)
    assert price is not None
    assert 0 <= price < 1e-9
    assert not speeds.staying_costs_more(100, CELL * 100, CELL * 100, 1000, CELL)


def test_what_was_declined_says_nothing_of_what_staying_costs() -> None:
    """Else, where many small restores are not worth it, nothing would leave the pool any more."""
    speeds = known()
    price = speeds.resident_price(CELL)
    for _ in range(50):
        speeds.declined()
    assert speeds.resident_price(CELL) == price
    assert speeds.restore == known().restore


def test_staying_is_weighed_against_leaving_and_coming_back() -> None:
    speeds = known(save=1e9, restore=1e9)  # price: 1000 / 1e9 / 16 = 62.5 ns; 100 cells: 0.1 ms each way
    # Four requests are counted.
    assert not speeds.staying_costs_more(100, 100 * CELL, 100 * CELL, 7, CELL)
    assert speeds.staying_costs_more(100, 100 * CELL, 100 * CELL, 9, CELL)
    assert speeds.staying_costs_more(100, 0, 100 * CELL, 5, CELL)  # saved already: only the way back counts
    assert not speeds.staying_costs_more(100, 0, 100 * CELL, 3, CELL)
    slow_bus = known(save=1e6, restore=1e6)
    steps(slow_bus, 400, others=1e-7, own=1e-6)
    assert not slow_bus.staying_costs_more(100, 100 * CELL, 100 * CELL, 400, CELL)
