"""The index of a folder of saved state: SQLite, one row per file, and the sessions that were saved by name.

It is a convenience: lost or damaged, it is built anew from the heads of the files.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from skippy.store.format import VERSION, Entry

__all__ = ["Index", "Row"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, kind TEXT NOT NULL,
    start INTEGER NOT NULL, "end" INTEGER NOT NULL, before TEXT NOT NULL, path TEXT NOT NULL,
    window_from INTEGER NOT NULL, flags INTEGER NOT NULL, nbytes INTEGER NOT NULL, checksum TEXT NOT NULL,
    label TEXT NOT NULL, tokens BLOB NOT NULL, size INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS entries_by_place ON entries (namespace, before);
CREATE TABLE IF NOT EXISTS sessions (
    name TEXT NOT NULL, namespace TEXT NOT NULL, messages TEXT NOT NULL, tokens BLOB NOT NULL, saved REAL NOT NULL,
    PRIMARY KEY (name, namespace)
);
"""
_COLUMNS = 'namespace, kind, start, "end", before, path, window_from, flags, nbytes, checksum, label, tokens'


class Row:
    """An entry with its id, the bytes of its file, when it was made and last used, and how often it was restored."""

    __slots__ = ("created", "entry", "hits", "id", "size", "used")

    def __init__(self, id_: int, entry: Entry, size: int, created: float, used: float, hits: int) -> None:
        self.id, self.entry, self.size, self.created, self.used, self.hits = id_, entry, size, created, used, hits


class Index:
    """One connection; for one thread at a time.  sqlite3.Error as it comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise sqlite3.DatabaseError(f"the index is of version {version}, this is version {VERSION}")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={VERSION}")
        except BaseException:
            self._db.close()
            raise
        self._data_version = -1

    def changed_by_others(self) -> bool:
        """Whether another connection has changed the index since this was asked last.  O(1)."""
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        changed: bool = version != self._data_version
        self._data_version = version
        return changed

    def rows(self, after: int = 0) -> Iterator[Row]:
        """All entries with an id above `after`, in the order of their ids."""
        query = f"SELECT id, size, created, used, hits, {_COLUMNS} FROM entries WHERE id > ? ORDER BY id"
        for id_, size, created, used, hits, *values in self._db.execute(query, (after,)):
            yield Row(id_, _entry(values), size, created, used, hits)

    def ids(self) -> set[int]:
        """The ids of all entries."""
        return {row[0] for row in self._db.execute("SELECT id FROM entries")}

    def add(self, entry: Entry, size: int) -> int:
        """Add an entry, or put it in the place of one of the same name; its id."""
        now = time.time()
        values = (
            entry.name, entry.namespace, entry.kind, entry.start, entry.end, entry.before, entry.path,
            entry.window_from, entry.flags, entry.nbytes, f"{entry.checksum:016x}", entry.label,
            entry.tokens.astype("<i4").tobytes(), size, now, now,
        )  # fmt: skip
        cursor = self._db.execute(
            f"INSERT OR REPLACE INTO entries (name, {_COLUMNS}, size, created, used) VALUES "
            f"({', '.join('?' * len(values))})",
            values,
        )
        return int(cursor.lastrowid or 0)

    def touch(self, ids: Iterable[int]) -> None:
        """Note that these entries were restored."""
        now = time.time()
        self._db.executemany("UPDATE entries SET used = ?, hits = hits + 1 WHERE id = ?", [(now, id_) for id_ in ids])

    def remove(self, ids: Iterable[int]) -> None:
        """Forget entries; their files are the caller's business."""
        self._db.executemany("DELETE FROM entries WHERE id = ?", [(id_,) for id_ in ids])

    def save_session(self, name: str, namespace: str, messages: str, tokens: bytes) -> None:
        """Keep a conversation under its name."""
        self._db.execute(
            "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)", (name, namespace, messages, tokens, time.time())
        )

    def session(self, name: str, namespace: str) -> tuple[str, bytes] | None:
        """Messages (JSON) and tokens (int32) of a saved conversation, or None."""
        row = self._db.execute(
            "SELECT messages, tokens FROM sessions WHERE name = ? AND namespace = ?", (name, namespace)
        ).fetchone()
        return None if row is None else (str(row[0]), bytes(row[1]))

    def sessions(self) -> list[dict[str, Any]]:
        """Name, namespace, tokens and time of each saved conversation."""
        query = "SELECT name, namespace, length(tokens) / 4, saved FROM sessions ORDER BY saved DESC"
        return [
            {"name": name, "namespace": namespace, "tokens": tokens, "saved": saved}
            for name, namespace, tokens, saved in self._db.execute(query)
        ]

    def remove_sessions(self, namespace: str | None) -> int:
        """Forget the conversations of a namespace, or all; how many."""
        if namespace is None:
            return self._db.execute("DELETE FROM sessions").rowcount
        return self._db.execute("DELETE FROM sessions WHERE namespace = ?", (namespace,)).rowcount

    def bytes_on_disk(self) -> int:
        """Bytes of the index's own files."""
        names = (self.path, Path(f"{self.path}-wal"), Path(f"{self.path}-shm"))
        return sum(path.stat().st_size for path in names if path.exists())

    def shrink(self) -> None:
        """Give the room of forgotten rows back to the system."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.execute("VACUUM")

    def close(self) -> None:
        """Close the connection."""
        self._db.close()


def _entry(values: list[Any]) -> Entry:
    namespace, kind, start, end, before, path, window_from, flags, nbytes, checksum, label, tokens = values
    return Entry(
        namespace, kind, start, end, before, path, window_from, flags, nbytes, int(checksum, 16), label,
        np.frombuffer(tokens, "<i4").astype(np.int32),
    )  # fmt: skip
