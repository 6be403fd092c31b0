"""The demonstration's workload with a progress bar, for the commands that play it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from skippy.demo.run import Outcome, Row

__all__ = ["play_with_progress"]


def play_with_progress(
    console: Console, model: Path, *, n_ctx: int, max_tokens: int, turns: int, n_threads: int | None
) -> Outcome:
    """`skippy.demo.run.play`, with what each request did shown on `console` while it goes on."""
    from skippy.demo.run import play

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

        return play(model, n_ctx=n_ctx, max_tokens=max_tokens, turns=turns, n_threads=n_threads, on_row=on_row)
