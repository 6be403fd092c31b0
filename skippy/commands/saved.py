"""What is in a folder of saved state, as data: by namespace, with the names that people know, and what is wrong."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippy.commands.options import HOW_TO_SET, CommandError
from skippy.config import CacheConfig
from skippy.session import read_label
from skippy.store import DiskTier
from skippy.store.folder import INDEX, QUARANTINE
from skippy.store.format import SUFFIX, ForeignFile, read_head
from skippy.store.index import Index, NewerIndex, Row

__all__ = [
    "Space",
    "asked_for",
    "entry_of",
    "folder_of",
    "foreign_in",
    "opened",
    "quarantined",
    "size_of",
    "spaces_of",
    "status_of",
    "wrong_in",
]

_SHORTEST_PREFIX = 4
_MISSING = "the file is missing"
_UNKNOWN = "the index does not know of it"  # both in the words of DiskTier.verify


def folder_of(config: CacheConfig) -> Path:
    """The folder of saved state.  CommandError where none is configured, or it is not one: nothing is made anew."""
    folder = config.disk
    if folder is None:
        raise CommandError(f"there is no folder of saved state: {HOW_TO_SET}")
    if not folder.is_dir():
        raise CommandError(f"there is no folder {str(folder)!r} (yet): it is made when a model is loaded with it")
    if not (folder / INDEX).exists() and not any(name.endswith(SUFFIX) for name in os.listdir(folder)):
        raise CommandError(f"{str(folder)!r} is no folder of saved state: there is no {INDEX} in it")
    return folder


@contextmanager
def opened(config: CacheConfig, *, write: bool) -> Iterator[DiskTier]:
    """The tier over the folder; without `write` nothing in it is changed.  CommandError where it cannot be used."""
    folder = folder_of(config)
    log = logging.getLogger("skippy")
    level = log.level
    log.setLevel(logging.ERROR)  # what is wrong is said by the command, once
    try:
        tier = DiskTier(folder, capacity=config.disk_bytes, min_free=config.disk_min_free, write=write)
        try:
            if tier.off is None:
                yield tier
            why = tier.off  # it may have been switched off meanwhile
        finally:
            tier.close()
    finally:
        log.setLevel(level)
    if why is not None:
        raise CommandError(why)


# -- namespaces -------------------------------------------------------------------------------------------


@dataclass
class Space:
    """One namespace: what people call it, and what is kept of it; tokens are those of its segments."""

    namespace: str
    model: str | None = None
    tenant: str | None = None
    segments: int = 0
    checkpoints: int = 0
    tokens: int = 0
    bytes: int = 0
    hits: int = 0
    used: float | None = None
    sessions: int = 0

    def name_it(self, label: dict[str, str]) -> None:
        """Take what is known of its name."""
        self.model = self.model or label.get("model")
        if self.tenant is None:
            self.tenant = label.get("tenant")


def spaces_of(tier: DiskTier, rows: list[Row], sessions: list[dict[str, Any]]) -> dict[str, Space]:
    """The namespaces of these entries and sessions by their hashes, the largest first.  O(rows + text of sessions)."""
    found: dict[str, Space] = {}
    labels: dict[str, dict[str, str]] = {}
    for row in rows:
        entry = row.entry
        space = found.setdefault(entry.namespace, Space(entry.namespace))
        if space.tenant is None:
            if entry.label not in labels:
                labels[entry.label] = read_label(entry.label, of_session=False)
            space.name_it(labels[entry.label])
        if entry.kind == "segment":
            space.segments += 1
            space.tokens += entry.end - entry.start
        else:
            space.checkpoints += 1
        space.bytes += row.size
        space.hits += row.hits
        space.used = row.used if space.used is None else max(space.used, row.used)
    for session in sessions:
        space = found.setdefault(session["namespace"], Space(session["namespace"]))
        space.sessions += 1
        if space.tenant is None:
            kept = tier.session(session["name"], session["namespace"])
            space.name_it({} if kept is None else read_label(kept[0]))
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes))


def asked_for(spaces: dict[str, Space], wanted: str) -> set[str]:
    """The namespaces of a tenant, or the one whose hash begins so.  CommandError, which names those there are."""
    of_tenant = {space.namespace for space in spaces.values() if space.tenant == wanted}
    if of_tenant:
        return of_tenant
    by_hash = {key for key in spaces if len(wanted) >= _SHORTEST_PREFIX and key.startswith(wanted.lower())}
    if len(by_hash) == 1:
        return by_hash
    if by_hash:
        raise CommandError(f"{wanted!r} begins several namespaces: {', '.join(sorted(by_hash))}")
    tenants = sorted({repr(space.tenant) for space in spaces.values() if space.tenant is not None})
    known = f"only of the tenants {', '.join(tenants)}" if tenants else "and of no other tenant"
    hashes = ", ".join(key[:16] for key in spaces)
    raise CommandError(f"nothing is kept of {wanted!r}, {known}" + (f"; namespaces {hashes}" if hashes else ""))


# -- as data ----------------------------------------------------------------------------------------------


def status_of(tier: DiskTier, config: CacheConfig) -> dict[str, Any]:
    """What `skippy status --json` prints.  O(entries)."""
    folder = folder_of(config)
    rows, sessions, stats = tier.rows(), tier.sessions(), tier.stats()
    spaces = spaces_of(tier, rows, sessions)
    free, aside = shutil.disk_usage(folder).free, quarantined(folder)
    names = {row.entry.name for row in rows}
    return {
        "folder": os.fspath(folder),
        "capacity": config.disk_bytes,
        "in_use": stats["in_use"],
        "index_bytes": stats["in_use"] - sum(row.size for row in rows),
        "free": free,
        "min_free": config.disk_min_free,
        "only_read": free < config.disk_min_free,
        "segments": stats["segments"],
        "checkpoints": stats["checkpoints"],
        "hits": sum(row.hits for row in rows),
        "namespaces": [vars(space) for space in spaces.values()],
        "sessions": [
            {**session, "model": spaces[session["namespace"]].model, "tenant": spaces[session["namespace"]].tenant}
            for session in sessions
        ],
        "quarantine": {"files": len(aside), "bytes": size_of(aside)},
        "index_unusable": any(row.id < 0 for row in rows),  # then they are what the files say of themselves
        "not_in_the_index": sum(name.endswith(SUFFIX) and name not in names for name in os.listdir(folder)),
        "missing_files": stats["counts"].get("missing", 0),
    }


def entry_of(row: Row, space: Space) -> dict[str, Any]:
    """An entry as `skippy ls --json` prints it."""
    entry = row.entry
    return {
        "name": entry.name,
        "namespace": entry.namespace,
        "model": space.model,
        "tenant": space.tenant,
        "kind": entry.kind,
        "start": entry.start,
        "end": entry.end,
        "tokens": entry.end - entry.start,
        "size": row.size,
        "created": row.created,
        "used": row.used,
        "hits": row.hits,
    }


def quarantined(folder: Path, namespaces: set[str] | None = None) -> list[Path]:
    """The files in quarantine that may hold something of these namespaces, or all; an index holds something of all."""
    try:
        found = [Path(file.path) for file in os.scandir(folder / QUARANTINE)]
    except OSError:
        return []
    heads = (INDEX, *(f"{key[:16]}-" for key in namespaces or ()))
    return found if namespaces is None else [path for path in found if path.name.startswith(heads)]


def size_of(paths: list[Path]) -> int:
    """Bytes of these files, as far as they are there."""
    total = 0
    for path in paths:
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total


# -- what is wrong ----------------------------------------------------------------------------------------


def foreign_in(folder: Path) -> list[str]:
    """Names of files that look like ours but are not, or are newer: they are left alone."""
    found = []
    for name in sorted(os.listdir(folder)):
        if name.endswith(SUFFIX):
            try:
                read_head(folder / name)
            except ForeignFile:
                found.append(name)
            except (OSError, RuntimeError):  # damaged: the verification says how
                continue
    return found


def wrong_in(config: CacheConfig) -> list[str]:
    """What is wrong in the folder, a line for each file.  Changes nothing.  O(bytes).

    What other processes write and erase meanwhile is not wrong.  CommandError where the index is newer.
    """
    folder = folder_of(config)
    known, trouble = _names_in_index(folder)
    lines = [f"{name}: {_MISSING}" for name in known - set(os.listdir(folder))]
    with opened(config, write=False) as tier:
        lines += tier.verify()
    if trouble is None:
        known, trouble = _names_in_index(folder)
    settled = set(foreign_in(folder))
    for name, _, what in (line.partition(": ") for line in lines):
        if what == _MISSING:
            settled_now = name not in known
        else:
            settled_now = not os.path.lexists(folder / name) or (what == _UNKNOWN and name in known)
        if settled_now:
            settled.add(name)
    of_file: dict[str, str] = {} if trouble is None else {INDEX: trouble}
    for line in lines:
        of_file.setdefault(line.partition(": ")[0], line)
    return [line for name, line in sorted(of_file.items()) if name not in settled]


def _names_in_index(folder: Path) -> tuple[set[str], str | None]:
    """The names of the files that the index knows, and what is wrong with it: a tier passes over both."""
    path = folder / INDEX
    if not path.exists():
        return set(), f"{INDEX}: the index is lost"
    try:
        index = Index(path, write=False)
        try:
            return {row.entry.name for row in index.rows()}, None
        finally:
            index.close()
    except NewerIndex as error:
        raise CommandError(f"{path}: {error}") from None
    except (sqlite3.Error, ValueError, TypeError) as error:
        if not os.access(path, os.R_OK):
            raise CommandError(f"{path}: {error}") from None
        return set(), f"{INDEX}: {error}"
