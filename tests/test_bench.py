"""The benchmark's own machinery: what is asked, what is counted, and what the report says of it."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippy.bench.arms import ARMS, Arm, choose
from skippy.bench.calibrate import break_even
from skippy.bench.figures import figures_of, problems
from skippy.bench.page import page_of
from skippy.bench.play import Played, Row
from skippy.bench.processes import ArmFailed, started
from skippy.bench.replay import replay
from skippy.bench.script import Request, Script
from skippy.bench.table import text_of
from skippy.bench.traces import TraceError, read_trace
from skippy.bench.workloads import SIZES, WORKLOADS, Ask, Knobs, Lengths, Restart, Workload, Writer, make
from skippy.history import common_length
from tests.programs import has_ended, llama_server, mortal_worker, stat_of


def draw(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(10, 30_000) for _ in range(n)]


def writer(seed: int = 0) -> Writer:
    return Writer(draw, seed)


# -- what is asked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "x", "-3", "0", "uniform(5)", "uniform(9,5)", "normal(0,1)", "gamma(1,2)", "1.2.3"]
)
def test_a_length_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text)) + " is no length"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("7", 7, 7), ("uniform(5,9)", 5, 9), ("normal(50,1)", 40, 60), ("lognormal(50,0.1)", 30, 80)],
)
def test_lengths_are_drawn_as_they_say(text: str, low: int, high: int) -> None:
    lengths = Lengths.parse(text)
    assert str(lengths) == text
    drawn = [lengths.draw(random.Random(i)) for i in range(200)]
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert len(set(drawn)) == 1 or text != "7"


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_made_from_its_seed(name: str) -> None:
    knobs = Knobs(turns=3, chats=2)
    (one,), (again,), (other,) = (make([name], writer(seed), knobs) for seed in (0, 0, 1))
    assert one == again
    assert one != other
    assert one.name == name
    assert one.requests >= 3


def test_an_unknown_workload_and_an_unknown_arm_are_named() -> None:
    with pytest.raises(ValueError, match=r"'chat' is no workload, expected one of growing, chats, agent"):
        make(["chat"], writer(), Knobs())
    with pytest.raises(ValueError, match=r"'server' is no arm, expected some of cold, llama-cpp, "):
        choose(["server"], None)


def test_cold_always_takes_part_and_an_arm_that_is_not_there_says_so(tmp_path: Path) -> None:
    arms = choose(["skippy", "server-n"], str(tmp_path / "llama-server"))
    assert [arm.name for arm in arms] == ["cold", "skippy", "server-n"]
    assert arms[-1].unavailable == f"{tmp_path}/llama-server is no program"
    assert [arm.unavailable for arm in arms[:-1]] == [None, None]


# -- what is sent -----------------------------------------------------------------------------------------


def resolved(workload: Workload, start: tuple[int, ...] = ()) -> Script:
    """With answers that depend on the prompt alone, as a greedy model's do."""
    script = Script(workload, start)
    while (request := script.next()) is not None:
        script.note(draw(random.Random(str(request.prompt)), request.answer))
    return script


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("size", ["small", "medium"])
def test_the_least_is_what_no_earlier_path_holds(name: str, size: str) -> None:
    (workload,) = make([name], writer(), SIZES[size])
    script = resolved(workload, (1,))
    assert script.complete
    assert len(script.requests) == len(script.answers) == workload.requests
    seen: set[tuple[int, ...]] = set()
    for request, answer in zip(script.requests, script.answers, strict=True):
        assert request.prompt[0] == 1
        known = next((n for n in range(len(request.prompt), 0, -1) if request.prompt[:n] in seen), 0)
        assert request.least == len(request.prompt) - known
        path = (*request.prompt, *answer)[:-1]
        seen |= {path[:n] for n in range(1, len(path) + 1)}
    total = sum(request.least for request in script.requests)
    asked = sum(len(request.prompt) for request in script.requests)
    if name == "nothing":
        assert asked - total == len(script.requests) - 1  # the BOS token alone
    else:
        assert total < 0.75 * asked


def test_a_chat_goes_on_from_its_answers_and_an_edit_from_before() -> None:
    steps = (Ask("a", (1, 2), 3), Ask("a", (3,), 3), Ask("b", (9,), 3, base=("a", 1)), Ask("b", (8,), 3))
    script = Script(Workload("w", "", steps), (0,))
    for answer in ([10, 11], [12], [13], [14]):
        assert script.next() is not None
        script.note(answer)
    assert [request.prompt for request in script.requests] == [
        (0, 1, 2), (0, 1, 2, 10, 11, 3), (0, 1, 2, 10, 11, 9), (0, 1, 2, 10, 11, 9, 13, 8),
    ]  # fmt: skip
    # The last token of an answer is not evaluated before it is sent again.
    assert [request.least for request in script.requests] == [3, 2, 1, 2]


def test_the_program_is_restarted_where_the_workload_says() -> None:
    script = resolved(
        Workload("w", "", (Ask("a", (1,), 2), Restart(), Ask("a", (2,), 2), Restart(), Ask("a", (3,), 2)))
    )
    assert script.restarts == [1, 2]
    (workload,) = make(["restart"], writer(), Knobs(turns=4))
    assert resolved(workload).restarts == [2]


# -- traces -----------------------------------------------------------------------------------------------


def test_a_trace_of_chats_asks_once_for_each_user_message(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [*chat, {"role": "user", "content": "c"}]}) + "\n\n")

    def render(messages: Any) -> list[int]:
        return [ord(message["content"]) for message in messages]

    workload = read_trace(path, writer(), render, answer=5)
    assert [step.new for step in workload.steps if isinstance(step, Ask)] == [(115, 97), (115, 97, 98, 99)]
    assert all(isinstance(step, Ask) and step.alone and step.answer == 5 for step in workload.steps)
    assert (workload.name, workload.conversations) == ("trace:chats", 1)


def test_blocks_with_one_hash_are_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"hash_ids": [1, 2], "input_length": 600}, {"hash_ids": [1, 3], "input_length": 1024}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = read_trace(path, writer(), list, answer=5, block=64)
    one, two = (np.array(step.new) for step in workload.steps if isinstance(step, Ask))
    assert (len(one), len(two)) == (75, 128)
    assert common_length(one, two) == 64
    assert read_trace(path, writer(), list, answer=5, most=1).requests == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 is list, expected an object"),
        ('{"prompt": 1}', "line 2 has prompt, expected messages or hash_ids"),
        ('{"messages": ["x"]}', "line 2: messages is no list of objects with a role"),
        ('{"hash_ids": [], "input_length": 1}', r"line 2: hash_ids is \[\], expected a list of numbers"),
        ('{"hash_ids": [1], "input_length": 513}', "line 2: input_length is 513, expected 1 to 512"),
        ('{"messages": [{"role": "user", "content": 1}]}', "line 2: the chat template refuses its messages: no text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    def render(messages: Any) -> list[int]:
        raise ValueError("no text")

    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"hash_ids": [1], "input_length": 9}}\n{line}\n')
    with pytest.raises(TraceError, match=why):
        read_trace(path, writer(), render, answer=1)
    path.write_text("\n")
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(path, writer(), render, answer=1)


# -- figures ----------------------------------------------------------------------------------------------


def played(
    evaluated: dict[str, list[int]], ttft: dict[str, list[float]], wrong: tuple[str, ...] = (), rounds: int = 2
) -> dict[str, Any]:
    """The figures of a workload of two requests, in two rounds, on arms that took what they are said to take."""
    workload = Workload("w", "two requests", (Ask("a", (1, 2, 3), 2), Ask("a", (4,), 2)))
    requests = [Request("a", (1, 2, 3), 2, 3), Request("a", (1, 2, 3, 7, 8, 4), 2, 2)]
    rows = []
    for name, tokens in evaluated.items():
        for i, n in enumerate(tokens):
            for round_ in range(rounds):
                answer = {
                    "tokens": [9, 8] if name in wrong else [7, 8], "ttft_ms": ttft[name][i] + round_,
                    "decode_ms": ttft[name][i] - 0.5, "total_ms": ttft[name][i] + 100, "evaluated": n,
                    "held_bytes": 2**20, "memory_kib": 3072, "peak_kib": 4096, "restore_ms": 1.5, "lookup_ms": 0.0,
                    "save_ms": 0.0,
                }  # fmt: skip
                same = name not in wrong
                rows.append(Row("w", name, round_, i, requests[i], answer, same, None if same else False))
    arms = [ARMS[name] for name in evaluated] + [Arm("server-1", "a server", "llama-server", unavailable="no program")]
    return figures_of([workload], arms, Played(rows, {("w", name): 2048 for name in evaluated}))


def test_figures_are_counted_and_not_averaged() -> None:
    figures = played({"cold": [3, 6], "skippy": [3, 2]}, {"cold": [10.0, 20.0], "skippy": [11.0, 5.0]})
    (workload,) = figures["workloads"]
    assert (workload["prompt_tokens"], workload["least"], workload["requests"]) == (9, 5, 2)
    cold, ours = workload["arms"]["cold"], workload["arms"]["skippy"]
    assert (cold["evaluated"], ours["evaluated"]) == (9, 5)
    assert cold["ttft_ms"] == {"p50": 11.0, "p90": 21.0, "p99": 21.0}
    assert cold["ttft_p50_of_rounds"] == [10.0, 11.0]
    assert (ours["same"], ours["near_ties"], ours["wrong"]) == (4, 0, 0)
    assert (ours["peak_mib"], ours["grown_mib"], ours["held_bytes"]) == (4.0, 1.0, 2**20)
    assert ours["restore_ms"] == 3.0
    assert cold["tokens_per_second"] == pytest.approx(8 / 0.46)
    assert workload["arms"]["server-1"] == {"unavailable": "no program"}
    assert problems(figures) == []


def test_the_report_says_where_skippy_is_not_the_best() -> None:
    figures = played(
        {"cold": [3, 6], "llama-cpp": [3, 1], "skippy": [3, 2]},
        {"cold": [9.0, 20.0], "llama-cpp": [5.0, 5.0], "skippy": [11.0, 5.5]},
        wrong=("skippy",),
    )
    assert problems(figures) == [
        "w: 4 answers of skippy leave the cold ones without a tie",
        "w: llama-cpp evaluated 4 tokens, skippy 5",
        "w: TTFT p50 of llama-cpp is 5.0 ms, of skippy 6.5 ms: it evaluated fewer tokens",
    ]


def test_a_median_that_is_lower_is_explained() -> None:
    slower = played({"cold": [3, 6], "skippy": [3, 2]}, {"cold": [9.0, 20.0], "skippy": [15.0, 30.0]})
    assert problems(slower) == [
        "w: TTFT p50 of cold is 10.0 ms, of skippy 16.0 ms: it evaluated more tokens; request by request skippy "
        "took 1.500 times as long (quartiles 1.476 to 1.600); outside llama.cpp's evaluation skippy spent 0.5 ms, cold "
        "0.5 ms (medians)"
    ]
    alone = {"cold": [9.0, 20.0], "skippy": [15.0, 30.0], "skippy-pool": [8.0, 30.0]}
    (why,) = problems(played({name: [3, 2] for name in alone}, alone))
    assert why.endswith("(medians); skippy-pool, which saves nothing in the background, took 9.0 ms")
    noise = played({"cold": [3, 2], "skippy": [3, 2]}, {"cold": [9.0, 20.0], "skippy": [9.5, 16.0]})
    assert problems(noise) == [
        "w: TTFT p50 of cold is 10.0 ms, of skippy 10.5 ms: it evaluated as many tokens; request by request skippy "
        "took 0.810 times as long (quartiles 0.800 to 1.050; no difference is shown); outside llama.cpp's evaluation "
        "skippy spent 0.5 ms, cold 0.5 ms (medians)"
    ]
    arms = noise["workloads"][0]["arms"]
    assert arms["cold"]["skippy_in_pairs"] == pytest.approx({"p25": 16 / 20, "p50": 17 / 21, "p75": 10.5 / 10})
    assert "skippy_in_pairs" not in arms["skippy"]
    assert arms["skippy"]["outside_ms"] == {"p50": 0.5, "p90": 1.5, "p99": 1.5}  # the second round took 1 ms more


def test_skippy_without_figures_is_a_problem_and_not_the_best() -> None:
    figures = played({"cold": [3, 6]}, {"cold": [9.0, 20.0]})
    figures["workloads"][0]["arms"]["skippy"] = {"unavailable": "it crashed"}
    assert problems(figures) == ["w: skippy has no figures: it crashed"]


def test_an_arm_is_measured_by_its_own_answers() -> None:
    """Its answer left the cold one, so what is sent next is new to it from there on."""
    evaluated, ttft = {"cold": [3, 6], "skippy": [3, 3]}, {"cold": [9.0, 20.0], "skippy": [1.0, 1.0]}
    arms = played(evaluated, ttft, wrong=("skippy",))["workloads"][0]["arms"]
    assert arms["cold"]["least"] == 3 + 2  # of its answer [7, 8] the 7 was evaluated
    assert arms["skippy"]["least"] == 3 + 3  # it answered [9, 8]


def test_the_page_stands_alone_and_says_who_was_not_there() -> None:
    figures = played({"cold": [3, 6], "skippy": [3, 2]}, {"cold": [10.0, 20.0], "skippy": [11.0, 5.0]})
    figures |= {
        "machine": {"model": "<m>"}, "settings": {"n_ctx": 64}, "rounds": 2, "command": "skippy bench", "problems": [],
    }  # fmt: skip
    figures["workloads"][0]["hit_rates"] = {"policies": {"worth": {"64": 0.5}, "lru": {"64": 0.25}}, "no_limit": 0.6}
    page = page_of(figures)
    assert page.count("<svg") == 4
    assert "&lt;m&gt;" in page
    assert "<td>server-1</td><td class=absent colspan=13>not there: no program</td>" in page
    assert "skippy evaluated no more tokens than any other arm" in page
    links = set(re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]+)""", page))
    assert {link for link in links if not link.startswith("#")} == set()  # glyph outlines, and nothing from outside
    assert "time to first token, ms (log)" in page
    assert "memory of the process, MiB" in page
    figures["problems"] = ["w: something"]
    assert "<li>w: something</li>" in page_of(figures)
    head, cold, *_ = text_of(figures["workloads"][0])
    assert dict(zip(head, cold, strict=True))["look-up, ms"] == "0.0"
    assert text_of(figures["workloads"][0])[1][:3] == ["cold", "9", "11.0 (10-11)"]


def test_a_replay_with_room_for_all_finds_all_that_is_known() -> None:
    (workload,) = make(["chats"], writer(), SIZES["small"])
    script = resolved(workload)
    paths = [
        (np.array([*request.prompt, *answer[:-1]], np.int32), len(request.prompt))
        for request, answer in zip(script.requests, script.answers, strict=True)
    ]
    known = sum(len(request.prompt) - request.least for request in script.requests)
    tokens = sum(len(path) for path, _ in paths)
    assert replay(paths, "worth", "ram", 2 * tokens, prefill=100.0, min_tokens=1)["hits"] == known
    assert replay(paths, "worth", "pool", 2 * tokens, prefill=100.0, min_tokens=1)["hits"] == known
    little = replay(paths, "lru", "ram", 400, prefill=100.0, min_tokens=1)["hits"]
    assert 0 < little < known


def test_restoring_pays_off_where_it_is_faster() -> None:
    assert break_even(100.0, 50.0, 0.5) == 6  # 10 ms a token against 50 + 0.5 a token: 5.26
    assert 6 / 100.0 * 1e3 > 50.0 + 6 * 0.5
    assert break_even(100.0, 0.0, 0.5) == 1
    assert break_even(100.0, 1.0, 10.0) is None


# -- llama-server, played by a program of ours ------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Path:
    return llama_server(tmp_path)


def settings(model: str) -> dict[str, Any]:
    return {
        "model": model, "n_ctx": 100, "n_batch": 64, "threads": 1, "n_gpu_layers": 0, "flash_attn": "on",
        "ram_bytes": 2**20, "disk_bytes": 2**20, "warm_up": [1, 2],
    }  # fmt: skip


def test_the_server_is_asked_for_tokens_and_says_how_many_it_evaluated(server: Path, tmp_path: Path) -> None:
    (arm,) = (arm for arm in choose(["server-n"], str(server)) if arm.name == "server-n")
    with started(arm, settings("m.gguf"), conversations=3, folder=tmp_path) as process:
        answer = process.ask((5, 6, 9), 4, chat=5)
        with pytest.raises(ArmFailed, match="did not say how many tokens it evaluated"):
            process.ask((666,), 4)
    assert (answer["tokens"], answer["evaluated"]) == ([9, 4, 2], 300)  # three slots, each with a context of 100
    assert 0 < answer["ttft_ms"] <= answer["total_ms"]
    assert (answer["peak_kib"] > 0) == os.path.exists("/proc")


def test_an_arm_that_cannot_start_says_why(server: Path, tmp_path: Path) -> None:
    (arm,) = (arm for arm in choose(["server-1"], str(server)) if arm.name == "server-1")
    stack = ExitStack()
    with pytest.raises(ArmFailed, match="llama-server ended with 1: no such model"):
        stack.enter_context(started(arm, settings("broken.gguf"), conversations=1, folder=tmp_path))
    with pytest.raises(ArmFailed, match=r"its process ended with 1: .*ModelError: "):
        stack.enter_context(started(ARMS["skippy"], settings("missing.gguf"), conversations=1, folder=tmp_path))


def test_a_process_that_dies_costs_its_arm_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(mortal_worker(tmp_path)))

    def answers(asks: int) -> list[dict[str, Any]]:
        with started(ARMS["skippy"], settings("m.gguf"), conversations=1, folder=tmp_path) as process:
            return [process.ask((5,), 2) for _ in range(asks)]

    with pytest.raises(ArmFailed, match="its process ended with 1: killed"):
        answers(3)
    with pytest.raises(ArmFailed, match="its process ended with 1: killed"):
        answers(1)  # all was answered, but it did not end as it should


PARENT = """
import sys
from skippy.bench.processes import Worker

sys.executable = sys.argv[1]
worker = Worker({})
worker.pause()
print(worker._process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process when its parent dies")
def test_no_process_stays_behind_when_the_benchmark_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, mortal_worker(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    process = Path(f"/proc/{int(parent.stdout.readline())}")
    assert stat_of(process)[0] == "T"  # it stands still
    parent.kill()
    parent.wait(10)
    end = time.monotonic() + 10
    while not (ended := has_ended(process)) and time.monotonic() < end:
        time.sleep(0.01)
    assert ended
    parent.stdin.close()
    parent.stdout.close()
