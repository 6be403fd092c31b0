"""`skippy bench`: the demonstration's workload on a model of yours, cold against skippy, as figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from skippy.commands.options import EXIT_FAILED, AsJson, MaybeModel, Threads, chosen_model
from skippy.commands.playing import play_with_progress
from skippy.demo.run import Outcome

__all__ = ["bench", "figures_of", "percentiles"]


def percentiles(values: list[float]) -> dict[str, float]:
    """The median and the ninetieth percentile, each a value that was measured.

    >>> percentiles([5.0, 1.0, 2.0, 3.0])
    {'p50': 2.0, 'p90': 5.0}
    """
    return {f"p{p}": float(np.percentile(values, p, method="inverted_cdf")) for p in (50, 90)}


def figures_of(outcome: Outcome) -> dict[str, Any]:
    """The figures of both arms, and the requests that they were taken from, as plain data."""
    rows = outcome.rows
    asked = sum(row.prompt_tokens for row in rows)
    return {
        "ok": not outcome.failures,
        "failures": outcome.failures,
        "machine": outcome.machine,
        "arms": {
            "cold": {
                "prompt_tokens": asked,
                "evaluated_tokens": asked,
                "ttft_ms": percentiles([row.ttft_cold_ms for row in rows]),
            },
            "skippy": {
                "prompt_tokens": asked,
                "evaluated_tokens": sum(row.evaluated_tokens for row in rows),
                "ttft_ms": percentiles([row.ttft_ms for row in rows]),
            },
        },
        "requests": [
            {
                "name": row.name,
                "prompt_tokens": row.prompt_tokens,
                "evaluated_tokens": row.evaluated_tokens,
                "ttft_cold_ms": row.ttft_cold_ms,
                "ttft_ms": row.ttft_ms,
            }
            for row in rows
        ],
    }


def _table(figures: dict[str, Any]) -> Table:
    table = Table("arm", title=f"{len(figures['requests'])} requests")
    for name in ("asked, tokens", "evaluated, tokens", "TTFT p50, ms", "TTFT p90, ms"):
        table.add_column(name, justify="right")
    for name, arm in figures["arms"].items():
        times = arm["ttft_ms"]
        table.add_row(
            name, str(arm["prompt_tokens"]), str(arm["evaluated_tokens"]), f"{times['p50']:.0f}", f"{times['p90']:.0f}"
        )
    return table


def bench(
    model: MaybeModel = None,
    n_ctx: Annotated[int, typer.Option(metavar="N", help="Cells of the pool.", min=1)] = 4096,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each answer at most.", min=1)] = 16,
    turns: Annotated[int, typer.Option(metavar="N", help="Turns of each conversation, 1 to 4.", min=1, max=4)] = 4,
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the data (bench.json) and the plot (ttft.png).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure three conversations over one system prompt, each request cold and with reuse, one after the other.

    Prints tokens evaluated of tokens asked, and percentiles of the time to the first token (TTFT).  Leaves with 1
    if a check of what was restored or answered fails.
    """
    console = Console(stderr=as_json)
    outcome = play_with_progress(
        console, chosen_model(model), n_ctx=n_ctx, max_tokens=max_tokens, turns=turns, n_threads=threads
    )
    figures = figures_of(outcome)
    if out is not None:
        from skippy.demo.plot import plot_ttft

        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(figures, indent=1) + "\n")
        plot_ttft(outcome.rows, out / "ttft.png", f"{outcome.machine['model']}, {outcome.machine['threads']} threads")
        console.print(f"data and plot: {out / 'bench.json'}, {out / 'ttft.png'}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        console.print(_table(figures))
    if outcome.failures:
        Console(stderr=True).print("FAILED: " + "; ".join(outcome.failures), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED)
