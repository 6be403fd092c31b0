"""`skippy demo`: conversations, each request cold and with reuse, and every claim checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from skippy.commands.options import EXIT_FAILED, AsJson, Threads, chosen_model, folder_for_plots
from skippy.commands.playing import play_with_progress

__all__ = ["demo"]


def demo(
    model: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A GGUF model, or a packaged one: smollm2 (default), gemma3.")
    ] = None,
    n_ctx: Annotated[
        int, typer.Option(metavar="N", help="Cells of the pool; few, so that RAM is used too.", min=1)
    ] = 1536,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each answer at most.", min=1)] = 40,
    turns: Annotated[int, typer.Option(metavar="N", help="Turns of each conversation, 1 to 4.", min=1, max=4)] = 4,
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the plot (ttft.png) and the data (demo.json).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Play conversations over one system prompt, each request cold and with reuse, and check every claim.

    Leaves with 1 if restored state differs from what was evaluated, if an answer differs from a cold run by more
    than rounding, or if a token was evaluated that could have been reused.
    """
    from skippy.demo.show import as_data, tables, verdict

    folder_for_plots(out)
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 132
    outcome = play_with_progress(
        console, chosen_model(model), n_ctx=n_ctx, max_tokens=max_tokens, turns=turns, n_threads=threads
    )
    data = as_data(outcome)
    if not as_json:
        console.print(tables(outcome))
    if out is not None:
        from skippy.demo.plot import plot_ttft

        (out / "demo.json").write_text(json.dumps(data, indent=1) + "\n")
        plot_ttft(outcome.rows, out / "ttft.png", f"{outcome.machine['model']}, {outcome.machine['threads']} threads")
        console.print(f"plot and data: {out / 'ttft.png'}, {out / 'demo.json'}", soft_wrap=True)
    console.print(verdict(outcome), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(data))
    if outcome.failures:
        raise typer.Exit(EXIT_FAILED)
