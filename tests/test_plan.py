"""Plans, and what decides them, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from skippy._radix import RadixTree
from skippy.capability import Capability
from skippy.history import PartingHistory, goes_on_alike
from skippy.layout import Layout
from skippy.plan import Part, Plan, make_plan, window_end
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


# --- windows and checkpoints ------------------------------------------------------------------------------------------

W = 32
WINDOWED = Capability(None, window=W, layout=Layout(2))
HYBRID = Capability(None, layout=Layout(1, opaque=True))
RECURRENT = Capability(None, layout=Layout(0, opaque=True))


@dataclass
class Windowed(Saved):
    window_from: int = 0


def chain(*pieces: tuple[int, int]) -> list[Part]:
    """Parts that follow each other: for each (end, first position whose window it holds)."""
    found, start = [], 0
    for end, window_from in pieces:
        found.append(Part("ram", "segment", None, Windowed(window_from=window_from), start, end))
        start = end
    return found


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], 0),
        ([(20, 0)], 20),  # shorter than a window: all is there
        ([(31, 0)], 31),
        ([(50, 18)], 50),  # saved at 50: the last 32
        ([(49, 18)], 49),  # cut by one: the 31 that the next token sees
        ([(48, 18)], 0),
        ([(128, 96), (150, 128)], 150),
        ([(128, 96), (129, 128)], 129),
        ([(100, 96)], 0),  # cut far before its end
        ([(128, 96), (200, 168)], 200),
        ([(128, 96), (199, 168)], 199),
        ([(128, 96), (198, 168)], 128),  # nothing between 128 and 168
        ([(128, 96), (160, 168)], 128),  # a sibling's, which goes on elsewhere
        ([(40, 40), (60, 40)], 0),  # the first was saved when its window had gone
        ([(40, 40), (70, 40)], 0),
        ([(40, 40), (71, 40)], 71),
        ([(64, 32), (70, 64), (80, 70), (90, 80)], 90),  # short ones hang together
        ([(64, 32), (70, 70), (80, 70)], 64),  # and here one of them has none
        ([(64, 64), (70, 64), (80, 70), (90, 80)], 0),
        ([(64, 64), (70, 64), (80, 70), (95, 80)], 95),
        ([(10, 0), (20, 10), (25, 20)], 25),
        ([(10, 10), (20, 10), (25, 20)], 0),
    ],
)
def test_where_a_chain_has_its_window(pieces: list[tuple[int, int]], expected: int) -> None:
    assert window_end(chain(*pieces), W) == expected


def held(shape: Capability, tree: RadixTree, tokens: list[int], **options: object) -> tuple[int, str, int | None]:
    """The length of a plan, its last kind, and from where windows come out of segments."""
    found = make_plan(
        tree.match("n", tokens), len(tokens), min_tokens=8, speeds=Speeds(), shape=shape, payload=tree.get, **options
    )
    return found.length, found.parts[-1].kind if found.parts else found.reason, found.window


def test_a_window_is_cut_where_it_reaches_back() -> None:
    tree = RadixTree()
    for n, window_from in ((128, 96), (150, 128), (200, 168)):
        tree.put(tree.insert("n", path((1, n))), "segment", Windowed(window_from=window_from))
    for n, length in ((201, 200), (200, 199), (199, 150), (160, 150), (150, 149), (130, 129), (128, 127), (127, 0)):
        expected = (length, "segment", length - W) if length else (0, "no_checkpoint", None)
        assert held(WINDOWED, tree, [*path((1, n - 1)), 9]) == expected, n
    checkpoint = tree.insert("n", path((1, 190)))
    tree.put(checkpoint, "checkpoint", Saved())
    # Of a checkpoint the window is taken, of the segments none.
    assert held(WINDOWED, tree, [*path((1, 195)), 9]) == (190, "checkpoint", 190)
    assert held(WINDOWED, tree, path((1, 190))) == (189, "checkpoint", 189)  # the same prompt again
    assert held(WINDOWED, tree, path((1, 189))) == (150, "segment", 150 - W)
    assert held(WINDOWED, tree, [*path((1, 200)), 9]) == (200, "segment", 200 - W)


def test_a_window_shorter_than_what_is_worth_keeping() -> None:
    tree = RadixTree()
    tree.put(tree.insert("n", path((1, 6))), "segment", Windowed(window_from=0))
    tree.put(tree.insert("n", path((1, 100))), "segment", Windowed(window_from=68))
    assert held(WINDOWED, tree, [*path((1, 50)), 9]) == (0, "no_checkpoint", None)


def test_a_hybrid_needs_a_checkpoint_and_the_attention_before_it() -> None:
    tree = RadixTree()
    for n in (100, 150):
        tree.put(tree.insert("n", path((1, n))), "checkpoint", Saved())
    longer = [*path((1, 200)), 9]
    assert held(HYBRID, tree, longer) == (0, "no_checkpoint", None)
    tree.put(tree.insert("n", path((1, 120))), "segment", Saved(), start=0)
    assert held(HYBRID, tree, longer) == (100, "checkpoint", None)
    tree.put(tree.insert("n", path((1, 160))), "segment", Saved(), start=120)
    assert held(HYBRID, tree, longer) == (150, "checkpoint", None)
    assert held(HYBRID, tree, path((1, 150))) == (100, "checkpoint", None)  # state cannot be cut by one token
    assert held(HYBRID, tree, [*path((1, 99)), 9]) == (0, "no_checkpoint", None)
    tree.get(tree.insert("n", path((1, 150))), "checkpoint").damaged = True
    assert held(HYBRID, tree, longer) == (100, "checkpoint", None)
    tree.match("n", longer).segments[0].payload.damaged = True
    assert held(HYBRID, tree, longer) == (0, "no_checkpoint", None)


def test_a_recurrent_model_needs_a_checkpoint_alone() -> None:
    tree = RadixTree()
    for n in (6, 100, 150):
        tree.put(tree.insert("n", path((1, n))), "checkpoint", Saved())
    assert held(RECURRENT, tree, [*path((1, 150)), 9]) == (150, "checkpoint", None)
    assert held(RECURRENT, tree, path((1, 150))) == (100, "checkpoint", None)
    assert held(RECURRENT, tree, [*path((1, 80)), 9]) == (0, "no_checkpoint", None)  # the one at 6 is too short
    # With its logits the whole prompt is restored, for as long as they are not damaged.
    logits = Saved()
    tree.put(tree.insert("n", path((1, 150))), "logits", logits)
    assert held(RECURRENT, tree, path((1, 150)), logits=True) == (150, "checkpoint", None)
    assert held(RECURRENT, tree, path((1, 150))) == (100, "checkpoint", None)
    logits.damaged = True
    assert held(RECURRENT, tree, path((1, 150)), logits=True) == (100, "checkpoint", None)
