"""`skippy status`, `ls`, `prune`, `clear` and `check`: what is in a folder of saved state.  No model is loaded."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skippy.commands.options import EXIT_FAILED, AsJson, CommandError, Disk, configured
from skippy.commands.saved import (
    asked_for,
    entry_of,
    folder_of,
    foreign_in,
    opened,
    quarantined,
    size_of,
    spaces_of,
    status_of,
    wrong_in,
)
from skippy.sizes import parse_size
from skippy.store.format import SUFFIX

__all__ = ["check", "clear", "ls", "prune", "size_text", "somebody_is_there", "status"]


def size_text(size: float) -> str:
    """Bytes for people.

    >>> size_text(0), size_text(1023), size_text(1536), size_text(5 * 2**30)
    ('0 B', '1023 B', '1.5 KiB', '5.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _time(when: float | None) -> str:
    return "-" if when is None else datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M")


def _many(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _name(text: str | None) -> Text:
    """What somebody called something, without characters that steer a terminal."""
    return Text("-" if not text else "".join(c if c.isprintable() else "?" for c in text), overflow="fold")


def _console(columns: int) -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = columns
    return console


# -- looking ----------------------------------------------------------------------------------------------


def status(disk: Disk = None, as_json: AsJson = False) -> None:
    """Show what is in a folder of saved state: sizes, use and sessions, by namespace.

    Nothing is changed, no state is read and no model loaded.
    """
    config = configured(disk)
    with opened(config, write=False) as tier:
        data = status_of(tier, config)
    if as_json:
        typer.echo(json.dumps(data))
    else:
        _show(data)


def _show(data: dict[str, Any]) -> None:
    console = _console(132)
    about = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    about.add_row("folder", _name(data["folder"]))
    index = size_text(data["index_bytes"])
    about.add_row("in use", f"{size_text(data['in_use'])} of {size_text(data['capacity'])}, the index {index}")
    only_read = "; less is free, so it is only read" if data["only_read"] else ""
    about.add_row("free", f"{size_text(data['free'])}, of which {size_text(data['min_free'])} stay free{only_read}")
    counted = [_many(data[f"{kind}s"], kind) for kind in ("segment", "checkpoint", "hit")]
    about.add_row("entries", ", ".join(counted))
    aside = data["quarantine"]
    if aside["files"]:
        about.add_row("quarantine", f"{_many(aside['files'], 'damaged file')}, {size_text(aside['bytes'])}")
    if data["index_unusable"]:
        about.add_row("index", "cannot be used; see skippy check")
    for key, what in (("not_in_the_index", "not in the index"), ("missing_files", "missing")):
        if data[key]:
            about.add_row(what, f"{_many(data[key], 'file')}; see skippy check")
    console.print(about)
    if data["namespaces"]:
        table = Table("model", "tenant", "namespace")
        for heading in ("segments", "checkpoints", "tokens", "size", "hits", "sessions"):
            table.add_column(heading, justify="right")
        table.add_column("last used")
        for space in data["namespaces"]:
            counts = [str(space[key]) for key in ("segments", "checkpoints", "tokens")]
            table.add_row(
                _name(space["model"]), _name(space["tenant"]), space["namespace"][:12], *counts,
                size_text(space["bytes"]), str(space["hits"]), str(space["sessions"]), _time(space["used"]),
            )  # fmt: skip
        console.print(table)
    if data["sessions"]:
        table = Table("session", "model", "tenant")
        table.add_column("tokens", justify="right")
        table.add_column("saved")
        for kept in data["sessions"]:
            named = [_name(kept[key]) for key in ("name", "model", "tenant")]
            table.add_row(*named, str(kept["tokens"]), _time(kept["saved"]))
        console.print(table)


class SortBy(str, Enum):
    """What entries are listed by: the most of it first."""

    used = "used"
    created = "created"
    size = "size"
    tokens = "tokens"
    hits = "hits"


def ls(
    disk: Disk = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="TENANT|HASH", help="Only this tenant's, or of the namespace whose hash begins so."),
    ] = None,
    sort: Annotated[SortBy, typer.Option(help="What comes first: the latest, or the most of it.")] = SortBy.used,
    limit: Annotated[int, typer.Option(metavar="N", help="Entries to show; 0: all.", min=0)] = 20,
    as_json: AsJson = False,
) -> None:
    """List the entries of a folder of saved state.

    An entry is a file: a segment holds the state of the tokens FROM to TO of a path, a checkpoint that after TO
    tokens.  Nothing is changed.
    """
    with opened(configured(disk), write=False) as tier:
        rows = tier.rows()
        spaces = spaces_of(tier, rows, tier.sessions())
    if namespace is not None:
        wanted = asked_for(spaces, namespace)
        rows = [row for row in rows if row.entry.namespace in wanted]
    entries = [entry_of(row, spaces[row.entry.namespace]) for row in rows]
    entries.sort(key=lambda entry: -entry[sort.value])
    shown = entries[:limit] if limit else entries
    if as_json:
        typer.echo(json.dumps({"total": len(entries), "entries": shown}))
        return
    table = Table("kind", "model", "tenant", "namespace")
    for heading in ("from", "to", "size", "hits"):
        table.add_column(heading, justify="right")
    table.add_column("last used")
    table.add_column("file", overflow="fold")
    for entry in shown:
        table.add_row(
            entry["kind"], _name(entry["model"]), _name(entry["tenant"]), entry["namespace"][:12], str(entry["start"]),
            str(entry["end"]), size_text(entry["size"]), str(entry["hits"]), _time(entry["used"]), entry["name"],
        )  # fmt: skip
    console = _console(200)
    console.print(table)
    if len(shown) < len(entries):
        console.print(f"{len(shown)} of {len(entries)}; --limit 0 shows all")


# -- letting go -------------------------------------------------------------------------------------------


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def prune(
    to: Annotated[
        int, typer.Option(metavar="SIZE", parser=_size, help="What it may take, index included: 2GiB, 500MB.")
    ],
    disk: Disk = None,
    as_json: AsJson = False,
) -> None:
    """Let entries leave until the folder takes no more than a size, those of the least worth first.

    Worth is the number of uses over the time since the last one.  An entry stays while another goes on from it.
    What is in quarantine leaves before all.  Sessions stay: they are small, and without their state they are
    evaluated anew.
    """
    with opened(configured(disk), write=True) as tier:
        before = len(tier.rows())
        freed = tier.prune(to)
        left = len(tier.rows())
        data = {"to": to, "removed": before - left, "freed": freed, "entries": left, "in_use": tier.stats()["in_use"]}
    if as_json:
        typer.echo(json.dumps(data))
        return
    typer.echo(
        f"{_many(data['removed'], 'entry', 'entries')} removed, {size_text(freed)} freed; "
        f"{left} left, {size_text(data['in_use'])} with the index"
    )


def clear(
    disk: Disk = None,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="TENANT|HASH", help="Only this tenant's, or of the namespace whose hash begins so."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Erase what is kept, of one tenant or all of it: entries, sessions, and what is in quarantine.

    A tenant is what a program gave as namespace; it is erased for all models and settings.  A program that has the
    folder open may write anew what it still holds in memory: close it first, or let it call forget().
    """
    config = configured(disk)
    with opened(config, write=True) as tier:
        rows, sessions = tier.rows(), tier.sessions()
        wanted = None if namespace is None else asked_for(spaces_of(tier, rows, sessions), namespace)
        rows = [row for row in rows if wanted is None or row.entry.namespace in wanted]
        aside = quarantined(folder_of(config), wanted)
        data = {
            "entries": len(rows),
            "sessions": sum(wanted is None or session["namespace"] in wanted for session in sessions),
            "quarantined": len(aside),
            "bytes": sum(row.size for row in rows) + size_of(aside),
        }
        entries, kept = _many(data["entries"], "entry", "entries"), _many(data["sessions"], "session")
        what = f"{entries} and {kept}, {size_text(data['bytes'])}"
        if not yes and any(data.values()):
            _ask(f"Erase {what} in {config.disk}?", as_json=as_json)
        tier.erase(wanted)
    typer.echo(json.dumps(data) if as_json else f"erased: {what}")


def somebody_is_there() -> bool:
    """Whether a question can be asked."""
    return sys.stdin.isatty()


def _ask(question: str, *, as_json: bool) -> None:
    if as_json or not somebody_is_there():
        raise CommandError("nothing was erased: there is nobody to ask, so say --yes")
    if not typer.confirm(question):
        typer.echo("nothing was erased")
        raise typer.Exit(EXIT_FAILED)


# -- checking ---------------------------------------------------------------------------------------------


def check(
    disk: Disk = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Set aside what is damaged, and make index and files agree.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify every file against the index and its checksum, and the index against the files.

    Leaves with 1 where something is wrong; with --fix where something still is afterwards.  Files of a newer skippy
    are left alone.  Reads everything.
    """
    config = configured(disk)
    folder = folder_of(config)
    files = [folder / name for name in os.listdir(folder) if name.endswith(SUFFIX)]
    size = size_of(files)
    with Console(stderr=True).status(f"reading {_many(len(files), 'file')}, {size_text(size)}"):
        left = wrong = wrong_in(config)
        if fix and wrong:
            with opened(config, write=True) as tier:
                tier.verify(fix=True)
            left = wrong_in(config)
    foreign = foreign_in(folder)
    data = {"ok": not left, "files": len(files), "bytes": size, "foreign": foreign, "wrong": wrong, "left": left}
    if as_json:
        typer.echo(json.dumps(data))
    else:
        for line in wrong:
            typer.echo(f"{'fixed' if line not in left else 'wrong'}: {line}")
        for name in foreign:
            typer.echo(f"left alone: {name}: of another program or a newer version")
        typer.echo(f"{_many(len(files), 'file')}: {_verdict(len(wrong), len(left), fix=fix)}")
    if left:
        raise typer.Exit(EXIT_FAILED)


def _verdict(wrong: int, left: int, *, fix: bool) -> str:
    if not wrong:
        return "all is well"
    if not left:
        return f"{_many(wrong, 'thing was', 'things were')} wrong, and all is well now"
    if fix:
        return f"{_many(left, 'thing is', 'things are')} wrong still"
    return f"{_many(wrong, 'thing is', 'things are')} wrong; skippy check --fix puts that right"
