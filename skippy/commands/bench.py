"""`skippy bench`: workloads on a model of yours, on what you have today and on skippy, as figures and as a page."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from skippy.bench.arms import DEFAULT, choose
from skippy.bench.attention import SUFFIX
from skippy.bench.calibrate import calibrate
from skippy.bench.play import Settings
from skippy.bench.run import Run, run
from skippy.bench.table import WIDE, table_of
from skippy.bench.workloads import SIZES, WORKLOADS, Knobs, Lengths
from skippy.commands.options import EXIT_FAILED, AsJson, MaybeModel, Threads, chosen_model, folder_for_plots
from skippy.commands.store import size_text
from skippy.sizes import parse_size

__all__ = ["bench", "knobs_of"]

_N_CTX = {"small": 4096, "medium": 8192, "large": 32768}


def _lengths(text: str | None) -> Lengths | None:
    if text is None:
        return None
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def knobs_of(size: str, **turned: Any) -> Knobs:
    """The knobs of a size with those turned that are not None.  BadParameter for an unknown size."""
    if size not in SIZES:
        raise typer.BadParameter(f"{size!r} is no size, expected one of {', '.join(SIZES)}", param_hint="--size")
    return replace(SIZES[size], **{name: value for name, value in turned.items() if value is not None})


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint="--ram") from None


def _on_or_off(text: str) -> Literal["on", "off"]:
    if text != "on" and text != "off":
        raise typer.BadParameter(f"{text!r} is neither on nor off", param_hint="--flash-attn")
    return text  # type: ignore[return-value]


def bench(
    model: MaybeModel = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="small, medium or large.")] = "small",
    workload: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Play this one alone; may be repeated. Of: {', '.join(WORKLOADS)}."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Measure this one, beside cold; may be repeated. Of: {', '.join(DEFAULT)}."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Play the requests of a JSONL file: chats (messages) or hash_ids."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="At most so many requests of the trace.", min=1)
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens that a block of 512 of a trace becomes.", min=1, max=512)
    ] = 32,
    rounds: Annotated[int, typer.Option(metavar="N", help="How often each arm plays.", min=1)] = 1,
    chats: Annotated[int | None, typer.Option(metavar="N", help="Conversations in turns.", min=1)] = None,
    turns: Annotated[int | None, typer.Option(metavar="N", help="Turns of each conversation.", min=2)] = None,
    system: Annotated[
        str | None, typer.Option(metavar="LENGTH", help="Tokens of the system prompt: 300, uniform(20,60), ...")
    ] = None,
    message: Annotated[str | None, typer.Option(metavar="LENGTH", help="Tokens of a message.")] = None,
    document: Annotated[str | None, typer.Option(metavar="LENGTH", help="Tokens of a document.")] = None,
    answer: Annotated[int | None, typer.Option(metavar="N", help="Tokens of an answer at most.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="What all texts are made from.")] = None,
    llama_server: Annotated[
        str | None, typer.Option(metavar="PATH", help="llama-server, if it is not on PATH.")
    ] = None,
    n_ctx: Annotated[int | None, typer.Option(metavar="N", help="Cells of the context.", min=512)] = None,
    n_gpu_layers: Annotated[int, typer.Option(metavar="N", help="Layers on the GPU.", min=-1)] = 0,
    flash_attn: Annotated[str, typer.Option(metavar="on|off", help="Flash attention, of all arms.")] = "on",
    ram: Annotated[str, typer.Option(metavar="SIZE", help="What each cache may take of the memory.")] = "1GiB",
    threads: Threads = None,
    calibration: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine instead: from which length each tier pays off.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the data (bench.json) and the page (bench.html).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what reuse saves on your work, beside llama-cpp-python, its RAM cache and llama-server.

    Each arm has a process of its own, and each request goes to one after the other.  Prints for each the prompt tokens
    evaluated, percentiles of the time to the first token (TTFT), memory, and whether the answers are those of a cold
    run.  Leaves with 1 if one of skippy's is not, or an arm of skippy failed.
    """
    knobs = knobs_of(
        size,
        chats=chats,
        turns=turns,
        system=_lengths(system),
        message=_lengths(message),
        document=_lengths(document),
        answer=answer,
        seed=seed,
    )
    settings = Settings(
        model=chosen_model(model),
        n_ctx=n_ctx or _N_CTX[size],
        threads=threads or os.cpu_count() or 1,
        n_gpu_layers=n_gpu_layers,
        flash_attn=_on_or_off(flash_attn),
        ram_bytes=_size(ram),
    )
    console = Console(stderr=as_json)
    folder_for_plots(out)
    if calibration:
        _calibrate(settings, rounds=max(3, rounds), out=out, as_json=as_json, console=console)
        return
    names = list(dict.fromkeys(workload or ([] if trace is not None else list(WORKLOADS))))
    try:
        arms = choose(list(dict.fromkeys(arm or DEFAULT)), llama_server)
        unknown = next((name for name in names if name not in WORKLOADS), None)
        if unknown is not None:
            raise ValueError(f"{unknown!r} is no workload, expected some of {', '.join(WORKLOADS)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    plan = Run(
        settings, arms, names, knobs, rounds, trace, block_tokens, requests,
        command=shlex.join(["skippy", *sys.argv[1:]]),
    )  # fmt: skip
    figures = _play(plan, console)
    if out is not None:
        from skippy.bench.page import page_of

        (out / "bench.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        (out / "bench.html").write_text(page_of(figures), encoding="utf-8")
        console.print(f"data and page: {out / 'bench.json'}, {out / 'bench.html'}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(figures))
    for problem in figures["problems"]:
        console.print(problem, markup=False, soft_wrap=True)
    ours = [found for each in figures["workloads"] for name, found in each["arms"].items() if name.startswith("skippy")]
    if any(found.get("wrong", 1) for found in ours):  # or it has no figures, because it failed
        raise typer.Exit(EXIT_FAILED)


def _play(plan: Run, console: Console) -> dict[str, Any]:
    """Play it, with a bar that says what is going on, and a table of each workload when it has been played."""
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console,
    )  # fmt: skip
    with progress:
        task = progress.add_task("loading the model", total=None)

        def on_request(workload: str, arm: str, round_: int, index: int, answer: dict[str, Any] | None) -> None:
            if answer is None:
                progress.update(task, description=f"{workload} on {arm}, request {index + 1}")
            else:
                progress.update(task, advance=1)

        def on_start(requests: int) -> None:
            progress.update(task, total=requests)

        def on_workload(workload: dict[str, Any]) -> None:
            console.print(table_of(workload, wide=console.width >= WIDE))
            for name, found in workload["arms"].items():
                if "unavailable" in found:
                    why = f"{name} is not there: {found['unavailable']}"
                    console.print(why, style="dim", markup=False, soft_wrap=True)

        return run(plan, on_request=on_request, on_start=on_start, on_workload=on_workload)


def _calibrate(settings: Settings, *, rounds: int, out: Path | None, as_json: bool, console: Console) -> None:
    figures = calibrate(settings, rounds=rounds)
    if out is not None:
        (out / "calibration.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(figures))
        return
    table = Table("", title=f"{figures['machine']['model']}, {settings.threads} threads", title_justify="left")
    for column in ("ms fixed", "ms per token", "pays off from, tokens"):
        table.add_column(column, justify="right")
    for length, speed in figures["prefill_tokens_per_second"].items():
        table.add_row(f"evaluating {length} tokens", "", f"{1e3 / speed:.3f}", "")
    for tier, found in figures["tiers"].items():
        if found["measured"]:
            pays = found["pays_off_from"]
            table.add_row(
                f"restoring from {tier}", f"{found['ms_fixed']:.2f}", f"{found['ms_per_token']:.4f}",
                "never" if pays is None else str(pays),
            )  # fmt: skip
        else:
            table.add_row(f"restoring from {tier}", "not measured", "", "")
    console.print(table)
    for how, found in (figures["flash_attention"] or {}).items():
        console.print(
            f"flash attention {how}, behind {found['behind']:,.0f} tokens: {SUFFIX} more {found['suffix_ms']:.1f} ms, "
            f"one {found['token_ms']:.1f} ms, beside as many cells of another {found['token_beside_ms']:.1f} ms"
        )
    nbytes, advice = figures["bytes"], figures["advice"]
    console.print(
        f"a token takes {size_text(nbytes['per_token'])}, a checkpoint {size_text(nbytes['per_checkpoint'])}, "
        f"a full context of {settings.n_ctx:,} tokens {size_text(nbytes['of_a_full_context'])}"
    )
    console.print(
        f"for eight full conversations: ram={size_text(advice['ram_bytes_for_eight_full_contexts'])}, for eighty: "
        f"disk_bytes={size_text(advice['disk_bytes_for_eighty'])}; min_tokens={advice['min_tokens']}"
    )
