"""Writes BENCHMARKS.md, and the table of README.md, from benchmarks/results/*.json.

    python benchmarks/page.py [--check] [--take bench.json [--name bench-off]] [--picture bench.json]

Nothing in BENCHMARKS.md is written by hand.  A figure whose file is not there is "not measured".  With --check nothing
is written; leaves with 1 if the pages are not what the files say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skippy.bench.attention import SUFFIX
from skippy.bench.figures import problems

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "BENCHMARKS.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs/memory.svg"
BETWEEN = re.compile(r"(<!-- bench -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)

Row = tuple[str, str, str, "bool | None", str, str]
"""What, what is to be reached, what was measured, whether that is it, who is beside it, the command."""


def result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else None
    assert found is None or isinstance(found, dict)
    return found


def us(nanoseconds: float) -> str:
    return f"{nanoseconds / 1000:,.2f} us"


def index_rows(index: dict[str, Any]) -> Iterator[Row]:
    flat: dict[str, Any] = {}
    for section in index["sections"].values():
        flat |= section
    command = "python benchmarks/index.py"

    def beside(*names: str) -> str:
        return ", ".join(f"{name} {us(flat[name]['p50'])}" for name in names if name in flat)

    others = [name for name in flat if not name.startswith(("skippy", "compare", "index")) and "p50" in flat[name]]
    rivals = beside(*[name for name in others if "min()" not in name])
    buffer, leaves = flat["skippy, int32 buffer"], flat["skippy, 50,000 leaves, each look-up another leaf"]
    yield (
        "match, 4,096 of 4,160 tokens, 1,600 stored paths, int32 buffer (p50, warm)", "0.8 us", us(buffer["p50"]),
        buffer["p50"] <= 800, rivals, command,
    )  # fmt: skip
    yield (
        "the same over 50,000 leaves (p99, each another leaf)", "3 us", us(leaves["p99"]), leaves["p99"] <= 3000, "",
        command,
    )  # fmt: skip
    cold = flat["skippy, the same, 8 MB read before each"]
    yield (
        "the same with 8 MB read before each look-up (p99)",
        "3 us",
        us(cold["p99"]),
        cold["p99"] <= 3000,
        "",
        command,
    )
    listed = flat["skippy, list"]
    yield ("match from a list", "3.5 us", us(listed["p50"]), listed["p50"] <= 3500, "", command)
    for n in ("4,096", "16,384", "65,536"):
        ratio = flat[f"compare, {n} tokens: times one memcmp"]["value"]
        yield (
            f"compare, {n} tokens",
            "1.5 times one memcmp",
            f"{ratio:.2f} times",
            ratio <= 1.5,
            "one memcmp, 1",
            command,
        )
    miss = flat["skippy, a miss"]
    yield ("a miss", "0.3 us", us(miss["p50"]), miss["p50"] <= 300, "", command)
    insert = flat["skippy, insert 448 tokens on 4,096"]
    yield ("insert 448 tokens on 4,096", "8 us", us(insert["p50"]), insert["p50"] <= 8000, "", command)
    victims = [flat[f"skippy, one victim among {n}"]["p50"] for n in ("100", "1,000", "10,000", "100,000")]
    flatness = max(victims) / min(victims)
    yield (
        "one victim among 10,000", "1 us, flat in the number",
        f"{us(victims[2])}; {flatness:.1f} times from 100 to 100,000",
        victims[2] <= 1000 and flatness < 2, beside("min() over 10,000 entries"), command,
    )  # fmt: skip
    for name in ("index bytes per unique token, tails of 64", "index bytes per unique token, 50,000 leaves"):
        value = flat[name]["value"]
        yield (name, "8", f"{value:.2f}", value <= 8.005, "", command)


def state_rows(state: dict[str, Any]) -> Iterator[Row]:
    command = "python benchmarks/state.py"
    for row in state["rows"]:
        size = f"{row['tokens']:,.0f} tokens, {row['bytes'] / 1e6:.1f} MB"
        for what in ("save", "restore"):
            copy, checked = (row[f"{what}_{how}_percent_of_memcpy"] for how in ("copy", "checked"))
            yield (
                f"{what} {size}: the copy; with its checksum", "70; 40 % of memcpy", f"{copy:.1f}; {checked:.1f} %",
                copy >= 70 and checked >= 40, "memcpy, 100 %", command,
            )  # fmt: skip


def overhead_rows(overhead: dict[str, Any]) -> Iterator[Row]:
    base = overhead["llama_cpp.Llama"]["median"]
    ours, noise = overhead["difference within a pair"], overhead["the same, disabled"]
    share = 100 * ours["median"] / base
    measured = (
        f"{ours['median']:+.1f} ms, {share:+.2f} % (quartiles {ours['quartile_1']:+.1f}, {ours['quartile_3']:+.1f}); "
        f"disabled, which is noise: {noise['median']:+.1f} ms ({noise['quartile_1']:+.1f}, {noise['quartile_3']:+.1f})"
    )
    yield (
        "overhead with nothing to reuse", "0.5 % of TTFT and 1 ms", measured, share <= 0.5 and ours["median"] <= 1,
        f"llama_cpp.Llama, {base:,.0f} ms", "python benchmarks/overhead.py --pairs 16",
    )  # fmt: skip


def lanes_rows(lanes: dict[str, Any]) -> Iterator[Row]:
    command = "python benchmarks/lanes.py --rounds 4"
    whole, *smaller = lanes["agents"]
    beside = ", ".join(
        f"{each['reused_percent']:.1f} % with {each['n_ctx']:,} cells, RAM {each['ram']}" for each in smaller
    )
    yield (
        "four interleaved agent sessions: prompt tokens reused", "93 %", f"{whole['reused_percent']:.1f} %",
        whole["reused_percent"] >= 93, beside, command,
    )  # fmt: skip
    cost = lanes["cost"]
    yield (
        "four lanes with nothing to reuse, in pairs", "1 % of the time",
        f"{cost['median']:+.2f} % (quartiles {cost['quartile_1']:+.2f}, {cost['quartile_3']:+.2f})", cost["median"] < 1,
        "mode disabled", command,
    )  # fmt: skip


def ttft_row(name: str, arms: dict[str, Any], command: str) -> Row:
    ours = arms["skippy"]["ttft_ms"]["p50"]
    others = {each: arm for each, arm in arms.items() if not each.startswith("skippy")}
    beside = [
        f"{each} {arm['ttft_ms']['p50']:,.1f} ms ({arm['skippy_in_pairs']['p50']:.2f})" for each, arm in others.items()
    ]
    return (
        f"{name}: TTFT p50", "at most any other's", f"{ours:,.1f} ms",
        ours <= min(arm["ttft_ms"]["p50"] for arm in others.values()),
        f"{', '.join(beside)}; in brackets skippy's over it, request by request (median)", command,
    )  # fmt: skip


def calibration_rows(found: dict[str, Any]) -> Iterator[Row]:
    command = "skippy bench smollm2 --calibrate"
    for length, speed in found["prefill_tokens_per_second"].items():
        yield (f"evaluating {int(length):,} tokens", "", f"{1e3 / speed:.2f} ms each", None, "", command)
    for tier, each in found["tiers"].items():
        text = (
            f"{each['ms_fixed']:.2f} ms and {1e3 * each['ms_per_token']:.1f} us a token; "
            f"pays off from {each['pays_off_from']} tokens"
            if each["measured"] else "not measured"
        )  # fmt: skip
        yield (f"restoring from {tier}", "", text, None, "", command)
    for how, each in (found["flash_attention"] or {}).items():
        yield (
            f"flash attention {how}, behind {each['behind']:,.0f} tokens", "",
            f"{SUFFIX} more {each['suffix_ms']:.1f} ms, one {each['token_ms']:.1f} ms, one beside as many cells of "
            f"another conversation {each['token_beside_ms']:.1f} ms", None, "", command,
        )  # fmt: skip


def bench_rows(bench: dict[str, Any]) -> Iterator[Row]:
    command = bench["command"]
    for workload in bench["workloads"]:
        arms = {name: arm for name, arm in workload["arms"].items() if "unavailable" not in arm}
        ours = arms.get("skippy")
        if ours is None:
            continue
        others = {name: arm["evaluated"] for name, arm in arms.items() if not name.startswith("skippy")}
        yield (
            f"{workload['name']}: prompt tokens evaluated", f"{ours['least']:,}, the new ones",
            f"{ours['evaluated']:,}" + (
                "" if ours["least"] == workload["least"] else
                f"; with cold's answers in place of its own, which left them at ties, {workload['least']:,} were new"
            ),
            ours["evaluated"] <= ours["least"], ", ".join(f"{name} {n:,}" for name, n in others.items()), command,
        )  # fmt: skip
        yield ttft_row(workload["name"], arms, command)
    answers = [arm for workload in bench["workloads"] for arm in workload["arms"].values() if "wrong" in arm]
    ours = [
        arm for workload in bench["workloads"] for name, arm in workload["arms"].items()
        if name.startswith("skippy") and "wrong" in arm
    ]  # fmt: skip
    same, ties, wrong = (sum(arm[name] for arm in ours) for name in ("same", "near_ties", "wrong"))
    yield (
        "answers of skippy", "equal to cold, greedy", f"{same:,} equal, {ties} at proven near ties, {wrong} not",
        wrong == 0, f"all arms: {sum(arm['wrong'] for arm in answers)} not", command,
    )  # fmt: skip
    chats = next((each for each in bench["workloads"] if each["name"] == "chats"), None)
    if chats is not None:
        held = chats["arms"].get("skippy-ram", {}).get("held_bytes")
        cache = chats["arms"].get("ram-cache", {}).get("held_bytes")
        if held and cache:
            yield (
                f"memory for {chats['conversations']} conversations over one system prompt, saved state",
                "system prompt once, plus what is new", f"{held / 2**20:.1f} MiB", held < cache,
                f"LlamaRAMCache {cache / 2**20:.1f} MiB", command,
            )  # fmt: skip


SOURCES: dict[str, tuple[Callable[[dict[str, Any]], Iterator[Row]], str]] = {
    "index": (index_rows, "the tree"),
    "state": (state_rows, "saved state"),
    "overhead": (overhead_rows, "overhead"),
    "lanes": (lanes_rows, "lanes"),
    "bench": (bench_rows, "`skippy bench`"),
    "bench-off": (bench_rows, "`skippy bench` with flash attention off, as `llama_cpp.Llama` has it by itself"),
    "calibration": (calibration_rows, "what this machine needs"),
}


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def page() -> str:
    parts = [
        "# Benchmarks\n\nWritten by `python benchmarks/page.py` from `benchmarks/results/`; `make bench` measures.\n"
    ]
    bench = result("bench")
    if bench is not None:
        on = bench["machine"]
        parts.append(
            f"\nMeasured on {on['processor']}, {bench['settings']['threads']} threads, Python {on['python']}, "
            f"llama-cpp-python {on['llama_cpp_python']}, {on['model'] or on['file']}. "
            "Ratios and bounds hold for this machine.\n"
        )
    for name, (rows_of, title) in SOURCES.items():
        found = result(name)
        parts.append(f"\n## {title[:1].upper() + title[1:]}\n\n")
        if found is None:
            parts.append(f"Not measured: `benchmarks/results/{name}.json` is not there.\n")
            continue
        rows = [
            (what, reach, measured, {None: "", True: "yes", False: "**no**"}[reached], beside, f"`{command}`")
            for what, reach, measured, reached, beside, command in rows_of(found)
        ]
        parts.append(table(("what", "reach", "measured", "reached", "beside it", "command"), rows))
        if "workloads" in found and (least := problems(found)):
            parts.append("\nWhere skippy was not the best:\n\n" + "".join(f"- {each}\n" for each in least))
    counts = result("instructions")
    if counts is not None:
        parts.append(
            f"\n## Instructions of the tree's operations\n\n{counts['key']}, `python benchmarks/instructions.py`\n\n"
        )
        parts.append(
            table(("operation", "instructions a call"), [(k, f"{v:,.0f}") for k, v in counts["counts"].items()])
        )
    policy = result("policy")
    if policy is not None:
        parts.append("\n## What leaves first\n\nShare of prompt tokens found, `python benchmarks/policy.py`\n\n")
        for name, trace in policy["traces"].items():
            budgets = list(next(iter(trace["policies"].values())))
            rows = [
                (who, *(f"{found[budget]['hit_rate']:.3f}" for budget in budgets))
                for who, found in trace["policies"].items()
            ]
            parts.append(table((name, *(f"{int(budget):,} tokens" for budget in budgets)), rows))
    return "".join(parts)


def readme_table() -> str:
    bench = result("bench")
    if bench is None:
        return ""
    names = list(bench["arms"])
    rows = []
    for workload in bench["workloads"]:
        cells = [f"{workload['name']} ({workload['prompt_tokens']:,})", f"{workload['least']:,}"]
        for name in names:
            arm = workload["arms"][name]
            there = "unavailable" not in arm
            absent = "as server-1" if "server-1 once more" in arm.get("unavailable", "") else "not there"
            cells.append(f"{arm['evaluated']:,}; {arm['ttft_ms']['p50']:,.0f} ms" if there else absent)
        rows.append(tuple(cells))
    head = ("workload (prompt tokens)", "new", *names)
    return f"Evaluated prompt tokens; TTFT p50, by `{bench['command']}`:\n\n{table(head, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--take", type=Path, metavar="FILE", help="keep what `skippy bench` wrote, but its requests")
    parser.add_argument("--name", default="bench", help="as what to keep it (default: bench)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw docs/memory.svg from this bench.json")
    options = parser.parse_args()
    if options.picture:
        from skippy.bench.plots import memory_of

        figures = json.loads(options.picture.read_text())
        (RESULTS / "eight.json").write_text(
            json.dumps({name: value for name, value in figures.items() if name != "requests"}, indent=1) + "\n"
        )
        PICTURE.write_text(memory_of(figures, figures["workloads"][0]["name"]) + "\n", encoding="utf-8")
    if options.take:
        figures = json.loads(options.take.read_text())
        for name in ("requests", "problems"):
            figures.pop(name, None)
        (RESULTS / f"{options.name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    readme = README.read_text(encoding="utf-8")
    wanted = {PAGE: page(), README: BETWEEN.sub(lambda found: found[1] + readme_table() + found[3], readme)}
    if options.check:
        stale = [
            path.name for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        sys.exit(f"not what benchmarks/results says: {', '.join(stale)}" if stale else 0)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
