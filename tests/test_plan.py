"""Plans, and what decides them, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from skippy._radix import RadixTree
from skippy.history import PartingHistory, goes_on_alike
from skippy.plan import Plan, make_plan
from skippy.speeds import Speeds


@dataclass
class Saved:
    nbytes: int = 1000
    damaged: bool = False
    tier: str = "ram"


def path(*runs: tuple[int, int]) -> list[int]:
    """Tokens: for each run (name, length), name * 1000 and up."""
    return [name * 1000 + i for name, length in runs for i in range(length)]


def plan(tree: RadixTree, tokens: list[int], *, min_tokens: int = 8, speeds: Speeds | None = None) -> Plan:
    return make_plan(tree.match("n", tokens), len(tokens), min_tokens=min_tokens, speeds=speeds or Speeds())


def parts(found: Plan) -> list[tuple[str, int, int]]:
    return [(part.tier, part.start, part.end) for part in found.parts]


def test_nothing_stored_and_too_short() -> None:
    tree = RadixTree()
    assert plan(tree, path((1, 20))) == Plan((), 0, "never_seen")
    tree.put(tree.insert("n", path((1, 20))), "resident", 3)
    found = plan(tree, [*path((1, 7)), 5])
    assert (found.length, found.matched, found.reason) == (0, 7, "below_min_tokens")
    assert plan(tree, [*path((1, 8)), 5]).length == 8


def test_one_token_is_always_left() -> None:
    tree = RadixTree()
    tree.put(tree.insert("n", path((1, 20))), "resident", 3)
    for n in range(8, 21):
        assert plan(tree, path((1, n))).length == n - 1
    assert plan(tree, path((1, 25))).length == 20


def test_a_resident_then_segments_then_a_gap() -> None:
    tree = RadixTree()
    tree.put(tree.insert("n", path((1, 20), (2, 5))), "resident", 3)
    trunk = path((1, 20), (3, 10))
    tree.put(tree.insert("n", trunk), "segment", Saved(), start=0)
    tree.put(tree.insert("n", trunk + path((4, 10))), "segment", Saved())
    far = trunk + path((4, 10), (5, 10), (6, 10))
    tree.insert("n", far[:50])
    tree.put(tree.insert("n", far), "segment", Saved(), start=50)
    found = plan(tree, [*far, 9])
    assert parts(found) == [("resident", 0, 20), ("ram", 20, 30), ("ram", 30, 40)]
    assert found.matched == 60
    assert found.reason == "partial"


def test_a_segment_of_a_sibling_serves_no_further_than_the_paths_agree() -> None:
    """The segment of S+A holds 30 tokens; a prompt S+B that is itself stored may take 20 of them, not 30."""
    tree = RadixTree()
    tree.put(tree.insert("n", path((1, 20), (2, 10))), "segment", Saved())
    tree.put(tree.insert("n", path((1, 20), (3, 10))), "logits", b"x")
    found = plan(tree, [*path((1, 20), (3, 10)), 7])
    assert parts(found) == [("ram", 0, 20)]
    tree.put(tree.insert("n", path((1, 20), (3, 10))), "segment", Saved())
    assert parts(plan(tree, [*path((1, 20), (3, 10)), 7])) == [("ram", 0, 20), ("ram", 20, 30)]


def test_a_path_whose_state_was_evicted() -> None:
    tree = RadixTree()
    tree.put(tree.insert("n", path((1, 20))), "logits", b"x")
    assert plan(tree, path((1, 30))).reason == "evicted_recently"


def test_what_is_dearer_than_evaluating_is_left_out() -> None:
    tree = RadixTree()
    tree.put(tree.insert("n", path((1, 100))), "segment", Saved(1000))
    tree.put(tree.insert("n", path((1, 100), (2, 10))), "segment", Saved(50_000))
    speeds = Speeds()
    tokens = [*path((1, 100), (2, 10)), 5]
    assert plan(tree, tokens, speeds=speeds).length == 110  # nothing measured: worth it
    speeds.prefilled(1000, 1.0)
    speeds.restored(1_000_000, 1.0)
    # 1,000 bytes take 1 ms, 100 tokens 100 ms; 50,000 bytes take 50 ms, 10 tokens 10 ms.
    found = plan(tree, tokens, speeds=speeds)
    assert (found.length, found.reason) == (100, "partial")
    speeds.prefilled(10**9, 1.0)
    assert plan(tree, tokens, speeds=speeds).reason == "not_worth_it"
    for _ in range(100):
        speeds.declined()  # what was measured once is not believed for ever
    assert plan(tree, tokens, speeds=speeds).length == 110


def test_speeds_forget_slowly() -> None:
    speeds = Speeds()
    assert (speeds.prefill, speeds.restore) == (None, None)
    speeds.prefilled(100, 1.0)
    assert speeds.prefill == pytest.approx(100)
    for _ in range(100):
        speeds.prefilled(500, 1.0)
    assert speeds.prefill == pytest.approx(500, rel=1e-3)
    speeds.restored(0, 0.0)
    assert speeds.restore is None


def array(*runs: tuple[int, int]) -> np.ndarray:
    return np.array(path(*runs), np.int32)


def test_going_on_alike() -> None:
    clock, answer = array((1, 1), (9, 40)), array((2, 1), (9, 40))
    assert goes_on_alike(clock, answer)
    assert goes_on_alike(array((1, 30), (9, 40)), array((9, 40)))  # a part that was dropped
    assert not goes_on_alike(array((1, 41)), array((2, 41)))
    assert not goes_on_alike(
        array((1, 20), (9, 15)), array((2, 20), (9, 15))
    )  # a run of 15 is a template's, not a text's
    assert goes_on_alike(array((1, 1), (9, 4)), array((2, 1), (9, 4)))  # short tails: all of the rest
    assert not goes_on_alike(array((1, 1), (9, 3)), array((2, 1), (9, 3)))  # three in common are chance
    assert not goes_on_alike(array((1, 1)), array((2, 1)))


def test_partings_are_counted_and_bounded() -> None:
    history = PartingHistory(capacity=3)
    stored, prompt, third = array((1, 1), (9, 40)), array((2, 1), (9, 40)), array((3, 1), (9, 40))
    assert history.volatile_index("n", 100) is None
    for _ in range(3):
        history.note("n", 37, stored, prompt)  # one prompt, three times
    assert history.prompts_parted("n", 37) == 2
    assert history.volatile_index("n", 37) is None
    history.note("n", 37, stored, third)
    assert history.prompts_parted("n", 37) == 3
    assert history.volatile_index("n", 37) == 37
    assert history.volatile_index("n", 36) is None
    assert history.volatile_index("other", 37) is None
    history.note("n", 38, stored, array((2, 41)))
    assert history.prompts_parted("n", 38) == 0
    for index in range(50, 54):
        history.note("n", index, stored, prompt)
    assert history.volatile_index("n", 37) is None  # the oldest went
