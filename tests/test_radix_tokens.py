"""What counts as tokens, and what is refused.  Each test runs on the compiled tree and on its twin."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import numpy as np
import pytest

from skippy import _radix
from tests import radix_twin
from tests.test_radix import store


@pytest.fixture(params=[_radix, radix_twin], ids=["compiled", "twin"])
def tree(request: pytest.FixtureRequest) -> Any:
    made = request.param.RadixTree()
    yield made
    made.check()


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "range": lambda tokens: range(tokens[0], tokens[-1] + 1),
    "array": lambda tokens: array("i", tokens),
    "numpy": lambda tokens: np.array(tokens, np.int32),
    "read-only": lambda tokens: memoryview(np.array(tokens, np.int32)).toreadonly(),
    "ctypes": lambda tokens: (ctypes.c_int32 * len(tokens))(*tokens),
    "numpy ints": lambda tokens: [np.int64(token) for token in tokens],
    "mixed": lambda tokens: [*tokens[:20], np.int32(tokens[20]), *tokens[21:]],
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("start", [0, 1, 250, 2**30 - 20, 2**31 - 300], ids=["0", "1", "250", "2**30", "2**31"])
def test_every_container_means_the_same(tree: Any, container: str, start: int) -> None:
    tokens = list(range(start, start + 300))
    node = store(tree, CONTAINERS[container](tokens))
    assert tree.tokens(node).tolist() == tokens
    for other in CONTAINERS.values():
        found = tree.match("n", other(tokens))
        assert (found.matched, found.resident) == (300, node)
    for cut in (1, 15, 16, 17, 255, 256, 257, 299):
        assert tree.match("n", CONTAINERS["list"](tokens[:cut])).matched == cut
        differs = [*tokens[:cut], tokens[cut] ^ 1, *tokens[cut + 1 :]]
        for other in ("list", "numpy", "mixed"):
            assert tree.match("n", CONTAINERS[other](differs)).matched == cut


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, -2, 3], ValueError, "token -2 at index 1"),
        ([1, 2, 2**31], ValueError, "token 2147483648 at index 2"),
        ([1, 2, -(2**70)], ValueError, f"token -{2**70} at index 2"),
        ([1, "two"], TypeError, "token 'two' at index 1"),
        ([1, 2.0], TypeError, "token 2.0 at index 1"),
        ([1, None], TypeError, "token None at index 1"),
        ([-1, *range(100)], ValueError, "token -1 at index 0"),
        ([*range(1, 100), -1, *range(100)], ValueError, "token -1 at index 99"),
        ("text", TypeError, "token 't' at index 0"),
        (np.array([1, -2], np.int32), ValueError, "token -2 at index 1"),
        (np.array([1, 2], np.int64), TypeError, "int32"),
        (np.array([1, 2], np.uint32), TypeError, "int32"),
        (np.array([1, 2], np.float32), TypeError, "int32"),
        (np.array([[1, 2]], np.int32), TypeError, "int32"),
        (np.arange(8, dtype=np.int32)[::2], ValueError, "contiguous"),
        (array("h", [1, 2]), TypeError, "int32"),
        (b"\x01\x00\x00\x00", TypeError, "int32"),
        (7, TypeError, "int32"),
        (None, TypeError, "int32"),
        ({1, 2}, TypeError, "int32"),
    ],
)
def test_what_is_no_token_is_refused_by_name(tree: Any, tokens: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tree.insert("n", tokens)
    assert (len(tree), tree.namespaces()) == (0, [])


def test_a_look_up_reads_no_further_than_it_agrees(tree: Any) -> None:
    store(tree, [1, 2, 3, *range(100, 400)])
    assert tree.match("n", [1, 2, 9, -5]).matched == 2
    assert tree.match("n", np.array([1, 2, 9, -5], np.int32)).matched == 2
    for wrong in ([1, 2, -5], np.array([1, 2, -5], np.int32), [1, 2, np.int64(-5), 3], [1, 2, np.int64(3), -5]):
        with pytest.raises(ValueError, match="token -5"):
            tree.match("n", wrong)
    with pytest.raises(ValueError, match="token -5 at index 0"):
        tree.match("nowhere", [-5])
    assert tree.match("nowhere", [5, -5]).matched == 0
    with pytest.raises(TypeError, match="'x' at index 203"):
        tree.branch_point("n", [1, 2, 3, *range(100, 300), "x"])
    assert tree.branch_point("n", [1, 2, 3, *range(100, 300), 7, "x"]) == 203


def test_the_callers_buffer_is_copied(tree: Any) -> None:
    tokens = np.arange(1, 50, dtype=np.int32)
    node = store(tree, tokens)
    tokens[:] = 0
    assert tree.tokens(node).tolist() == list(range(1, 50))
