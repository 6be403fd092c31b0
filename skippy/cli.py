"""The command `skippy`; what each of its commands does is in `skippy.commands`."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

import skippy
from skippy.commands.bench import bench
from skippy.commands.demo import demo
from skippy.commands.explain import explain
from skippy.commands.options import EXIT_FAILED, EXIT_USAGE, example, packaged_model
from skippy.commands.store import check, clear, ls, prune, status
from skippy.commands.terminal import chat
from skippy.errors import SkippyError

__all__ = ["EXIT_FAILED", "EXIT_USAGE", "app", "main", "packaged_model"]

# Help as plain text: it reads the same in a terminal, in a pipe and in docs/commands.md.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    epilog=example("skippy demo --out demo-out", "skippy chat model.gguf", "skippy explain --help"),
)


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
    """Prefix reuse for llama.cpp in Python: a prompt prefix that was evaluated once is never evaluated again.

    Exit codes: 0, all is well; 1, a check failed; 2, the arguments are not allowed, or a model or file cannot be
    read; 130, stopped with Ctrl-C.  What went wrong goes to stderr, in one line.
    """
    del version  # its callback has dealt with it


app.command(epilog=example("skippy demo --out demo-out", "skippy demo --model model.gguf --json"))(demo)
app.command(
    epilog=example(
        'skippy chat model.gguf --system "You answer in one sentence."',
        "skippy chat model.gguf --session tax --disk ~/.cache/skippy",
        "skippy chat --json --seed 1 < questions.txt",
    )
)(chat)
app.command(
    epilog=example("skippy explain model.gguf monday.txt tuesday.txt", "skippy explain model.gguf chat.json --json")
)(explain)
app.command(
    epilog=example(
        "skippy bench model.gguf --out bench-out",
        "skippy bench --workload chats --chats 8 --arm skippy --arm ram-cache --json",
        "skippy bench model.gguf --calibrate",
    )
)(bench)
app.command(epilog=example("skippy status --disk ~/.cache/skippy", "skippy status --json"))(status)
app.command(epilog=example("skippy ls --sort size --limit 10", "skippy ls --namespace tenant --json"))(ls)
app.command(epilog=example("skippy prune --to 2GiB", "skippy prune --to 500MB --disk ~/.cache/skippy"))(prune)
app.command(epilog=example("skippy clear --namespace tenant", "skippy clear --disk ~/.cache/skippy --yes"))(clear)
app.command(epilog=example("skippy check --disk ~/.cache/skippy", "skippy check --fix --json"))(check)


def main() -> None:
    """Run the command; an error of skippy's own, or of the system's, is one line and exit code 2."""
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    try:
        app(prog_name="skippy")
    except (SkippyError, OSError) as error:
        Console(stderr=True).print(f"skippy: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(EXIT_USAGE)
