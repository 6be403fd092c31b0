"""The benchmark on tiny models, with real processes: who evaluates what, and that every answer is a cold one's."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skippy import cli
from skippy.bench.arms import choose
from skippy.bench.calibrate import calibrate
from skippy.bench.play import Settings, TooLong
from skippy.bench.processes import ArmFailed
from skippy.bench.run import Run, run
from skippy.bench.workloads import Knobs, Lengths
from tests.programs import llama_server, stat_of

KNOBS = Knobs(2, 3, Lengths("fixed", 120), Lengths("fixed", 20), Lengths("fixed", 150), 4)
ARMS = ["cold", "llama-cpp", "ram-cache", "skippy", "skippy-pool", "skippy-ram", "skippy-disk"]


def plan(path: Path, arms: list[str], workloads: list[str], **options: Any) -> Run:
    settings = Settings(path, n_ctx=1024, n_batch=128, threads=1, ram_bytes=2**26)
    return Run(settings, choose(arms, None), workloads, KNOBS, **options)


def test_each_arm_evaluates_what_it_must(tiny: Callable[[str], Path]) -> None:
    told: list[tuple[str, str, int, int, bool]] = []
    started: list[int] = []
    figures = run(
        plan(tiny("llama"), ARMS, ["edited", "restart"]),
        on_request=lambda *what: told.append((*what[:4], what[4] is not None)),
        on_start=started.append,
    )
    edited, restart = figures["workloads"]
    assert started == [len(ARMS) * (edited["requests"] + restart["requests"])] == [len(told) // 2]
    assert told[:2] == [("edited", "cold", 0, 0, False), ("edited", "cold", 0, 0, True)]
    for workload in (edited, restart):
        arms = workload["arms"]
        evaluated = {name: arm["evaluated"] for name, arm in arms.items()}
        assert evaluated["cold"] == workload["prompt_tokens"]
        assert evaluated["skippy"] == min(evaluated.values()) == workload["least"]
        assert {name: arm["wrong"] for name, arm in arms.items()} == dict.fromkeys(ARMS, 0)
        assert arms["skippy"]["same"] + arms["skippy"]["near_ties"] == workload["requests"]
        assert arms["ram-cache"]["held_bytes"] > 0
        assert all(arm["peak_mib"] > 10 for arm in arms.values())
    # One sequence starts anew where an edit comes; what is in memory alone is gone after a restart.
    assert edited["arms"]["llama-cpp"]["evaluated"] > edited["least"]
    for name in ("llama-cpp", "ram-cache", "skippy-pool", "skippy-ram"):
        assert restart["arms"][name]["evaluated"] > 1.5 * restart["least"]
    assert restart["arms"]["skippy-disk"]["evaluated"] <= restart["least"] + restart["requests"]
    second = [row for row in figures["requests"] if (row["workload"], row["index"]) == ("edited", 1)]
    tiers = {row["arm"]: row["by_tier"] for row in second if "by_tier" in row}
    assert tiers["skippy-disk"]["disk"] > 0
    assert tiers["skippy-disk"]["ram"] == tiers["skippy-disk"]["resident"] == 0
    assert tiers["skippy-ram"]["ram"] > 0
    assert tiers["skippy-pool"]["resident"] > 0
    assert edited["hit_rates"]["no_limit"] == pytest.approx(1 - edited["least"] / edited["prompt_tokens"])
    assert max(edited["hit_rates"]["policies"]["worth"].values()) > 0.9 * edited["hit_rates"]["no_limit"]


def test_rounds_are_played_in_changed_order(tiny: Callable[[str], Path]) -> None:
    order: list[tuple[int, str]] = []

    def note(workload: str, arm: str, round_: int, index: int, answer: dict[str, Any] | None) -> None:
        if index == 0 and answer is not None:
            order.append((round_, arm))

    figures = run(plan(tiny("llama"), ["llama-cpp", "skippy"], ["nothing"], rounds=2), on_request=note)
    assert order == [(0, "cold"), (0, "llama-cpp"), (0, "skippy"), (1, "skippy"), (1, "llama-cpp"), (1, "cold")]
    arm = figures["workloads"][0]["arms"]["skippy"]
    assert arm["evaluated"] >= figures["workloads"][0]["least"]
    assert arm["ttft_p50_of_rounds"][0] <= arm["ttft_ms"]["p50"] <= arm["ttft_p50_of_rounds"][1]


def states_of_workers() -> list[str]:
    """The state of each arm's process that this one has started: T is one that was stopped."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = stat_of(process)[:2]
            worker = b"skippy.bench.worker" in (process / "cmdline").read_bytes()
            if worker and int(parent) == os.getpid():
                found.append(state)
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="says what processes do")
def test_all_others_stand_still_while_one_has_its_turn(tiny: Callable[[str], Path]) -> None:
    told: list[tuple[int, int, str]] = []
    before: list[list[str]] = []
    after: list[list[str]] = []

    def note(workload: str, arm: str, round_: int, index: int, answer: dict[str, Any] | None) -> None:
        (before if answer is None else after).append(states_of_workers())
        if answer is not None:
            told.append((round_, index, arm))

    others = ["llama-cpp", "skippy"]
    figures = run(plan(tiny("llama"), others, ["restart"], rounds=2), on_request=note)
    assert before == [["T"] * 3] * 3 * 3 * 2 == after
    first, second = ([arm for round_, index, arm in told if (round_, index) == (r, 0)] for r in (0, 1))
    assert (first, second) == (["cold", *others], [*others[::-1], "cold"])
    by_request = [[arm for _, index, arm in told[9:] if index == i] for i in range(3)]
    assert len({each[0] for each in by_request}) == 3  # another one begins each time
    assert figures["in_turns"]
    arms = figures["workloads"][0]["arms"]
    assert arms["skippy"]["wrong"] == arms["llama-cpp"]["wrong"] == 0
    for arm in arms.values():
        assert 0 < arm["outside_ms"]["p50"] < arm["ttft_ms"]["p50"]
    assert arms["cold"]["skippy_in_pairs"]["p25"] <= arms["cold"]["skippy_in_pairs"]["p75"]


def test_without_memory_for_all_each_arm_plays_by_itself(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skippy.bench.play.available_kib", lambda: 100_000)  # each has a cache of 64 MiB
    told: list[tuple[str, int]] = []
    figures = run(
        plan(tiny("llama"), ["llama-cpp", "skippy"], ["nothing"]),
        on_request=lambda workload, arm, round_, index, answer: told.append((arm, index)) if answer else None,
    )
    assert told == [(arm, index) for arm in ("cold", "llama-cpp", "skippy") for index in range(3)]
    assert not figures["in_turns"]
    assert all("unavailable" not in arm for arm in figures["workloads"][0]["arms"].values())


def test_an_arm_that_dies_in_its_turn_is_left_out_and_the_others_go_on(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    server = llama_server(tmp_path, answers=2)
    settings = Settings(tiny("llama"), n_ctx=1024, n_batch=128, threads=1, ram_bytes=2**26)
    told: list[tuple[int, str]] = []
    figures = run(
        Run(settings, choose(["server-1", "skippy"], str(server)), ["growing"], KNOBS, rounds=2),
        on_request=lambda workload, arm, round_, index, answer: told.append((round_, arm)) if answer else None,
    )
    arms = figures["workloads"][0]["arms"]
    assert arms["server-1"]["unavailable"].startswith("llama-server did not answer: ")
    assert told.count((0, "server-1")) == 1  # after its warm up; the next one was its last
    assert (1, "server-1") not in told
    assert [told.count((r, arm)) for r in (0, 1) for arm in ("cold", "skippy")] == [3] * 4
    assert arms["skippy"]["wrong"] == 0


def test_a_request_that_does_not_fit_is_named(tiny: Callable[[str], Path]) -> None:
    settings = Settings(tiny("llama"), n_ctx=512, n_batch=128, threads=1)
    knobs = Knobs(1, 3, Lengths("fixed", 460), Lengths("fixed", 60), Lengths("fixed", 20), 4)
    with pytest.raises(TooLong, match=r"request 1 of growing has 521 tokens and an answer of 4, the context 512: give"):
        run(Run(settings, choose(["cold"], None), ["growing"], knobs))


def test_a_cold_run_that_fails_ends_it(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        ArmFailed, match="the cold run of growing, to which all are compared, failed: its process ended"
    ):
        run(plan(tiny("llama"), ["cold"], ["growing"]))


@pytest.mark.parametrize("name", ["llama", "gemma3", "falconh1"])
def test_calibration_says_from_where_each_tier_pays_off(tiny: Callable[[str], Path], name: str) -> None:
    figures = calibrate(Settings(tiny(name), n_ctx=1024, n_batch=128, threads=1, ram_bytes=2**26), rounds=2)
    assert set(figures["prefill_tokens_per_second"]) == {128, 512}
    assert all(speed > 0 for speed in figures["prefill_tokens_per_second"].values())
    for tier in ("ram", "disk"):
        found = figures["tiers"][tier]
        assert found["measured"]
        assert found["ms_fixed"] >= 0
        assert found["pays_off_from"] is None or found["pays_off_from"] >= 1
    found = figures["flash_attention"]
    assert [each["behind"] for each in found.values()] == [448] * 2  # of 1,024 cells
    for each in found.values():
        assert 0 < each["token_ms"] < each["suffix_ms"]
        assert each["token_beside_ms"] > 0
    assert list(found) == ["on", "off"]
    nbytes = figures["bytes"]
    assert nbytes["of_a_full_context"] == 1024 * nbytes["per_token"] + nbytes["per_checkpoint"]
    assert (nbytes["per_checkpoint"] > 0) == (name == "falconh1")


# -- the command ------------------------------------------------------------------------------------------


def command(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def test_the_command_writes_data_and_a_page(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"hash_ids": [1, 2], "input_length": 1024}, {"hash_ids": [1, 3, 4], "input_length": 1500}]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = command(
        tiny("llama"), "--trace", trace, "--block-tokens", 80, "--arm", "skippy", "--arm", "server-1", "--n-ctx", 1024,
        "--llama-server", tmp_path / "none", "--threads", 1, "--answer", 2, "--json", "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures == json.loads((tmp_path / "out/bench.json").read_text())
    (workload,) = figures["workloads"]
    assert (workload["name"], workload["prompt_tokens"]) == ("trace:trace", 160 + 234 + 2)  # with a BOS token each
    assert workload["arms"]["skippy"]["evaluated"] == workload["least"]
    assert workload["arms"]["server-1"] == {"unavailable": f"{tmp_path}/none is no program"}
    page = (tmp_path / "out/bench.html").read_text()
    assert page.count("<svg") == 4
    assert f"server-1 is not there: {tmp_path}/none is no program" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--size", "huge"], "'huge' is no size, expected one of small, medium, large"),
        (["--system", "uniform(9)"], "'uniform(9)' is no length"),
        (["--workload", "chat"], "'chat' is no workload, expected some of growing"),
        (["--arm", "vllm"], "'vllm' is no arm, expected some of cold"),
        (["--flash-attn", "auto"], "'auto' is neither on nor off"),
        (["--ram", "much"], "'much': expected bytes as a whole number"),
    ],
)
def test_what_is_not_known_is_named(tiny: Callable[[str], Path], arguments: list[str], why: str) -> None:
    result = command(tiny("llama"), *arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())


def test_the_command_calibrates(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    result = command(tiny("llama"), "--calibrate", "--n-ctx", 1024, "--threads", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "restoring from ram" in result.output
    assert "a token takes" in result.output
    assert "flash attention off, behind 448 tokens: 32 more " in result.output
    assert set(json.loads((tmp_path / "calibration.json").read_text())) >= {"tiers", "advice", "bytes"}
