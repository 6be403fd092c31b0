"""From what was measured to figures: percentiles that are measured values, never means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from skippy.bench.arms import Arm
from skippy.bench.play import Played, Row
from skippy.bench.script import Seen, path_of
from skippy.bench.workloads import Workload

__all__ = ["figures_of", "percentiles", "problems", "workload_figures"]


def percentiles(values: Sequence[float], at: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """The 50th, 90th and 99th percentile, or those `at` others, each a value that was measured.

    >>> percentiles([5.0, 1.0, 2.0, 3.0])
    {'p50': 2.0, 'p90': 5.0, 'p99': 5.0}
    """
    return {f"p{p}": float(np.percentile(values, p, method="inverted_cdf")) for p in at}


def figures_of(workloads: Sequence[Workload], arms: Sequence[Arm], played: Played) -> dict[str, Any]:
    """What the report shows, as plain data: for each workload each arm's figures, and the requests."""
    return {
        "workloads": [workload_figures(workload, arms, played) for workload in workloads],
        "arms": {arm.name: {"about": arm.about, "unavailable": arm.unavailable} for arm in arms},
        "requests": [_request(row) for row in played.rows],
        "in_turns": played.in_turns,
    }


def workload_figures(workload: Workload, arms: Sequence[Arm], played: Played) -> dict[str, Any]:
    """One workload's figures, an arm at a time."""
    rows = [row for row in played.rows if row.workload == workload.name]
    first = [row.request for row in rows if row.arm == "cold" and row.round == 0]
    found: dict[str, Any] = {
        "name": workload.name,
        "about": workload.about,
        "requests": workload.requests,
        "conversations": workload.conversations,
        "prompt_tokens": sum(len(request.prompt) for request in first),
        "least": sum(request.least for request in first),
        "arms": {},
    }
    for arm in arms:
        why = arm.unavailable or played.failed.get((workload.name, arm.name))
        mine = [row for row in rows if row.arm == arm.name]
        if why is None and mine:
            found["arms"][arm.name] = _arm(mine, played.loaded_kib[workload.name, arm.name])
        else:
            found["arms"][arm.name] = {"unavailable": why or "it was not played"}
    ours = _times(rows, "skippy")
    for name, arm in found["arms"].items():
        if name != "skippy" and "unavailable" not in arm:
            arm["skippy_in_pairs"] = _in_pairs(ours, _times(rows, name))
    return found


def _times(rows: list[Row], arm: str) -> dict[tuple[int, int], float]:
    return {(row.round, row.index): row.answer["ttft_ms"] for row in rows if row.arm == arm}


def _in_pairs(ours: dict[tuple[int, int], float], theirs: dict[tuple[int, int], float]) -> dict[str, float] | None:
    """How many times as long skippy's TTFT was, request by request: quartiles.  None without requests of both."""
    ratios = [ours[key] / theirs[key] for key in ours.keys() & theirs.keys() if theirs[key] > 0]
    return percentiles(ratios, (25, 50, 75)) if ratios else None


def _arm(rows: list[Row], loaded_kib: int) -> dict[str, Any]:
    answers = [row.answer for row in rows]
    rounds = sorted({row.round for row in rows})
    medians = [percentiles([row.answer["ttft_ms"] for row in rows if row.round == r])["p50"] for r in rounds]
    tokens = sum(len(answer["tokens"]) for answer in answers)
    seconds = sum(answer["total_ms"] for answer in answers) / 1e3
    last = [row.answer for row in rows if row.round == rounds[0]]
    differ = [row for row in rows if not row.same]
    by_round = [[row for row in rows if row.round == r] for r in rounds]
    most = max(by_round, key=lambda each: sum(row.answer["evaluated"] for row in each))
    outside = [max(0.0, answer["ttft_ms"] - answer["decode_ms"]) for answer in answers if "decode_ms" in answer]
    return {
        "ttft_ms": percentiles([answer["ttft_ms"] for answer in answers]),
        "outside_ms": percentiles(outside) if outside else None,
        "rounds": len(rounds),
        "ttft_p50_of_rounds": [min(medians), max(medians)],
        "evaluated": sum(row.answer["evaluated"] for row in most),
        "least": _least(most),
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "seconds": seconds / len(rounds),
        "peak_mib": max(answer["peak_kib"] for answer in answers) / 1024,
        "grown_mib": max(0, max(answer["memory_kib"] for answer in answers) - loaded_kib) / 1024,
        "held_bytes": max((answer["held_bytes"] or 0 for answer in last), default=0) or None,
        **{
            name: sum(answer[name] for answer in last) if all(name in answer for answer in last) else None
            for name in ("lookup_ms", "restore_ms", "save_ms")
        },
        "same": len(rows) - len(differ),
        "near_ties": sum(row.near_tie is True for row in differ),
        "wrong": sum(row.near_tie is not True for row in differ),
    }


def _least(rows: Sequence[Row]) -> int:
    """The least that an arm had to evaluate: what its own earlier prompts and answers do not begin with.

    Where one of its answers left the cold one at a near tie, a prompt that holds the cold one has more that is new.
    """
    seen, least = Seen(), 0
    for row in rows:
        least += seen.new_in(row.request.prompt)
        seen.add(path_of(row.request.prompt, row.answer["tokens"]))
    return least


def _request(row: Row) -> dict[str, Any]:
    return {
        "workload": row.workload,
        "arm": row.arm,
        "round": row.round,
        "index": row.index,
        "conversation": row.request.conversation,
        "prompt_tokens": len(row.request.prompt),
        "least": row.request.least,
        "same": row.same,
        **{name: value for name, value in row.answer.items() if name != "tokens"},
    }


def problems(figures: dict[str, Any]) -> list[str]:
    """What a reader must know: answers of skippy that are wrong, and where it is not the best, in words."""
    found = []
    for workload in figures["workloads"]:
        arms = {name: arm for name, arm in workload["arms"].items() if "unavailable" not in arm}
        ours = {name: arm for name, arm in arms.items() if name.startswith("skippy")}
        for name, arm in workload["arms"].items():
            if name.startswith("skippy") and name not in ours:
                found.append(f"{workload['name']}: {name} has no figures: {arm['unavailable']}")
        others = {name: arm for name, arm in arms.items() if name not in ours}
        for name, arm in ours.items():
            if arm["wrong"]:
                found.append(f"{workload['name']}: {arm['wrong']} answers of {name} leave the cold ones without a tie")
        mine = ours.get("skippy")
        if mine is None:
            continue
        for name, arm in others.items():
            if arm["evaluated"] < mine["evaluated"]:
                found.append(
                    f"{workload['name']}: {name} evaluated {arm['evaluated']} tokens, skippy {mine['evaluated']}"
                )
            if arm["ttft_ms"]["p50"] < mine["ttft_ms"]["p50"]:
                found.append(
                    f"{workload['name']}: TTFT p50 of {name} is {arm['ttft_ms']['p50']:.1f} ms, "
                    f"of skippy {mine['ttft_ms']['p50']:.1f} ms: {_why(name, arm, mine, ours.get('skippy-pool'))}"
                )
    return found


def _why(name: str, other: dict[str, Any], mine: dict[str, Any], pool: dict[str, Any] | None) -> str:
    """Why another arm's median is lower, as far as the figures tell.

    `pool` is skippy with the pool alone: it saves nothing, so that no other thread of its runs while llama.cpp does.
    """
    if other["evaluated"] < mine["evaluated"]:
        return "it evaluated fewer tokens"
    many = "as many" if other["evaluated"] == mine["evaluated"] else "more"
    found = [f"it evaluated {many} tokens"]
    pairs, own = other["skippy_in_pairs"], mine["outside_ms"]
    if pairs is not None:
        shown = "; no difference is shown" if pairs["p25"] <= 1 <= pairs["p75"] else ""
        found.append(
            f"request by request skippy took {pairs['p50']:.3f} times as long "
            f"(quartiles {pairs['p25']:.3f} to {pairs['p75']:.3f}{shown})"
        )
    if own is not None:
        beside = "" if other["outside_ms"] is None else f", {name} {other['outside_ms']['p50']:.1f} ms"
        found.append(f"outside llama.cpp's evaluation skippy spent {own['p50']:.1f} ms{beside} (medians)")
    if pool is not None and pool["ttft_ms"]["p50"] <= other["ttft_ms"]["p50"]:
        found.append(f"skippy-pool, which saves nothing in the background, took {pool['ttft_ms']['p50']:.1f} ms")
    return "; ".join(found)
