"""The report in a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table

__all__ = ["WIDE", "table_of", "text_of"]

WIDE = 120  # columns of a terminal in which everything has room

_COLUMNS = ("evaluated", "TTFT p50", "p90", "p99, ms", "tokens/s", "peak, MiB", "held, MiB", "restore, ms", "as cold")

_MORE = ("look-up, ms", "save, ms", "outside llama.cpp p50, ms", "skippy's TTFT to it, in pairs")
_NARROW = (0, 1, 3, 5, 8)


def cells_of(arm: dict[str, Any]) -> list[str]:
    """One arm's figures, as text, in the order of the columns."""
    ttft, held, restore = arm["ttft_ms"], arm["held_bytes"], arm["restore_ms"]
    low, high = arm["ttft_p50_of_rounds"]
    median = f"{ttft['p50']:,.1f}" + (f" ({low:,.0f}-{high:,.0f})" if low != high else "")
    answers = f"{arm['same']}"
    if arm["near_ties"]:
        answers += f" + {arm['near_ties']} ties"
    if arm["wrong"]:
        answers += f", {arm['wrong']} not"
    return [
        f"{arm['evaluated']:,}", median, f"{ttft['p90']:,.1f}", f"{ttft['p99']:,.1f}",
        f"{arm['tokens_per_second']:.1f}", f"{arm['peak_mib']:,.0f}", "" if held is None else f"{held / 2**20:,.1f}",
        "" if restore is None else f"{restore:,.1f}", answers,
    ]  # fmt: skip


def table_of(workload: dict[str, Any], *, wide: bool = True) -> Table:
    """A table of one workload, a line for each arm that was played; what matters most alone, unless it may be wide."""
    title = (
        f"{workload['name']}: {workload['about']}; {workload['requests']} requests, "
        f"{workload['prompt_tokens']:,} prompt tokens, {workload['least']:,} of them new"
    )
    shown = range(len(_COLUMNS)) if wide else _NARROW
    table = Table("arm", title=title, title_justify="left")
    for column in shown:
        table.add_column(_COLUMNS[column], justify="right")
    for name, arm in workload["arms"].items():
        if "unavailable" not in arm:
            cells = cells_of(arm)
            table.add_row(name, *(cells[column] for column in shown), style="bold" if name == "skippy" else "")
    return table


def text_of(workload: dict[str, Any]) -> list[list[str]]:
    """The same as rows of text, with more columns, the first one the heads."""
    rows = [["arm", *_COLUMNS, *_MORE]]
    for name, arm in workload["arms"].items():
        if "unavailable" in arm:
            rows.append([name, f"not there: {arm['unavailable']}", *[""] * (len(rows[0]) - 2)])
        else:
            rows.append([name, *cells_of(arm), *_more_of(arm)])
    return rows


def _more_of(arm: dict[str, Any]) -> list[str]:
    outside, pairs = arm["outside_ms"], arm.get("skippy_in_pairs")
    times = [arm["lookup_ms"], arm["save_ms"], None if outside is None else outside["p50"]]
    return [
        *("" if each is None else f"{each:,.1f}" for each in times),
        "" if pairs is None else f"{pairs['p50']:.2f} ({pairs['p25']:.2f}-{pairs['p75']:.2f})",
    ]
