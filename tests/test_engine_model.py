"""The engine under hypothesis: what is opened, read, closed, pinned, forgotten and made to fail, in any order.

After each step tree, ledger and llama.cpp's cells agree and every answer is a cold run's (`Rig` in
test_engine_stress.py proves it); what hypothesis adds is that it looks for the shortest sequence that breaks one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.test_engine_stress import NAMES, Rig, rig_of

RANDOM = st.randoms(use_true_random=False)
RATE = st.sampled_from([0.0, 0.0, 0.05])


def machine_of(path: Path, name: str) -> type[RuleBasedStateMachine]:
    """A machine whose every run is one runtime on the model at `path`."""

    class Requests(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.open_rig = ExitStack()
            self.rig: Rig | None = None

        @initialize(
            seed=st.integers(0, 2**16),
            eviction=st.sampled_from(["worth", "lru"]),
            stay=st.sampled_from(["auto", "keep"]),
        )
        def start(self, seed: int, eviction: str, stay: str) -> None:
            self.rig = self.open_rig.enter_context(rig_of(path, name, seed, eviction=eviction, residency=stay))

        def act(self, action: str, random: Random, rate: float) -> None:
            assert self.rig is not None
            self.rig.rng = self.rig.faults.rng = random
            self.rig.faults.rate = rate
            try:
                getattr(self.rig, action)()
            finally:
                self.rig.faults.rate = 0.0

        @rule(random=RANDOM, rate=RATE)
        def complete(self, random: Random, rate: float) -> None:
            self.act("complete", random, rate)

        @rule(random=RANDOM, rate=RATE)
        def several(self, random: Random, rate: float) -> None:
            self.act("several", random, rate)

        @rule(random=RANDOM, rate=RATE)
        def open(self, random: Random, rate: float) -> None:
            self.act("open", random, rate)

        @precondition(lambda self: self.rig.streams)
        @rule(random=RANDOM, rate=RATE)
        def read(self, random: Random, rate: float) -> None:
            self.act("read", random, rate)

        @precondition(lambda self: self.rig.streams)
        @rule(random=RANDOM, rate=RATE)
        def leave(self, random: Random, rate: float) -> None:
            self.act("leave", random, rate)

        @rule(random=RANDOM, rate=RATE)
        def pin(self, random: Random, rate: float) -> None:
            self.act("pin", random, rate)

        @precondition(lambda self: self.rig.pins)
        @rule(random=RANDOM, rate=RATE)
        def unpin(self, random: Random, rate: float) -> None:
            self.act("unpin", random, rate)

        @rule(random=RANDOM, rate=RATE)
        def forget(self, random: Random, rate: float) -> None:
            self.act("forget", random, rate)

        @rule(random=RANDOM, rate=RATE)
        def evict(self, random: Random, rate: float) -> None:
            self.act("evict", random, rate)

        @invariant()
        def agree(self) -> None:
            if self.rig is not None:
                self.rig.check(exact=not self.rig.streams and not self.rig.faults.seen)

        def teardown(self) -> None:
            self.open_rig.close()  # which ends everything and proves that everything is free

    return Requests


@pytest.mark.parametrize("name", NAMES)
def test_any_order_of_requests(tiny: Callable[[str], Path], name: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine_of(tiny(name), name),
        settings=settings(
            max_examples=6,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
