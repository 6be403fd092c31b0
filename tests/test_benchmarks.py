"""The developers' benchmarks: what they write by themselves, and instruction counts that do not grow unseen."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import instructions, page

ROOT = Path(__file__).parent.parent


def test_the_pages_are_what_the_results_say() -> None:
    assert page.PAGE.read_text() == page.page()
    found = page.BETWEEN.search(page.README.read_text())
    assert found is not None
    assert found[2] == page.readme_table()


def test_a_figure_that_was_not_measured_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    text = page.page()
    assert text.count("Not measured") == len(page.SOURCES)
    assert page.readme_table() == ""


def test_a_figure_that_falls_short_says_no() -> None:
    found = {
        "llama_cpp.Llama": {"median": 1000.0},
        "difference within a pair": {"quartile_1": 1.0, "median": 9.0, "quartile_3": 20.0},
        "the same, disabled": {"quartile_1": -1.0, "median": 0.0, "quartile_3": 1.0},
    }
    ((what, reach, measured, reached, beside, _),) = page.overhead_rows(found)
    assert (what, reach, reached) == ("overhead with nothing to reuse", "0.5 % of TTFT and 1 ms", False)
    assert measured.startswith("+9.0 ms, +0.90 % (quartiles +1.0, +20.0)")
    assert beside == "llama_cpp.Llama, 1,000 ms"
    found["difference within a pair"]["median"] = 0.5
    assert [row[3] for row in page.overhead_rows(found)] == [True]


CALLGRIND = """
fn=(1) main
5 100
cfn=__pyx_pw_6skippy_6_radix_9RadixTree_5match
calls=2 7
5 900
fn=__pyx_pw_6skippy_6_radix_9RadixTree_5match
7 50
+1 250
cfn=memcmp
calls=4 1
* 600
fn=memcmp
9 600
cfn=__pyx_pw_6skippy_6_radix_9RadixTree_17insert
calls=1 1
9 10
"""


def test_instructions_are_counted_with_all_that_is_called() -> None:
    assert instructions.per_call(CALLGRIND) == {"match": 450.0}


def test_more_instructions_than_stored_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "key", lambda: "a")
    stored = {"a": {"match": 1000.0, "lock": 10.0}, "b": {"match": 1200.0}}
    assert instructions.too_many({"match": 1149.0, "lock": 11.0, "take": 5.0}, stored) == []
    assert instructions.too_many({"match": 1151.0}, stored) == [
        "match takes 1,151 instructions, 1.15 times 1,000 are allowed"
    ]
    monkeypatch.setattr(instructions, "key", lambda: "c")
    assert instructions.too_many({"match": 1799.0}, stored) == []
    assert instructions.too_many({"match": 1801.0}, stored) == [
        "match takes 1,801 instructions, 1.5 times 1,200 are allowed"
    ]


@pytest.mark.skipif(shutil.which("valgrind") is None or sys.platform != "linux", reason="valgrind is not there")
def test_the_tree_takes_no_more_instructions_than_are_stored() -> None:
    stored = json.loads(instructions.STORED.read_text())
    found = instructions.counted()
    assert set(found) == set(instructions.METHODS)
    assert instructions.too_many(found, stored) == []
