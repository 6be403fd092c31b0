"""The index of a folder of saved state: SQLite, one row per file, and the sessions that were saved by name.

It is a convenience: lost or damaged, it is built anew from the heads of the files.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from skippy.store.format import VERSION, Entry

__all__ = ["Index", "NewerIndex", "Row"]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, kind TEXT NOT NULL,
    start INTEGER NOT NULL, "end" INTEGER NOT NULL, before TEXT NOT NULL, path TEXT NOT NULL,
    window_from INTEGER NOT NULL, flags INTEGER NOT NULL, nbytes INTEGER NOT NULL, checksum TEXT NOT NULL,
    label TEXT NOT NULL, tokens BLOB NOT NULL, size INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    hits INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS entries_by_size ON entries (size);
CREATE TABLE IF NOT EXISTS pending (name TEXT PRIMARY KEY, size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    name TEXT NOT NULL, namespace TEXT NOT NULL, messages TEXT NOT NULL, tokens BLOB NOT NULL, saved REAL NOT NULL,
    PRIMARY KEY (name, namespace)
);
"""
_COLUMNS = 'namespace, kind, start, "end", before, path, window_from, flags, nbytes, checksum, label, tokens'
_PAGES = 64  # of the write-ahead log, of 4 KiB, after which it goes into the database: it counts towards the cap


class NewerIndex(sqlite3.DatabaseError):
    """The index was made by a newer version: it is left alone."""


class Row:
    """An entry with its id, the bytes of its file, when it was made and last used, and how often it was restored.

    The id is 0 while it waits to be written, and negative where there is no index.
    """

    __slots__ = ("created", "entry", "hits", "id", "name", "size", "used")

    def __init__(self, id_: int, entry: Entry, size: int, created: float, used: float, hits: int) -> None:
        self.id, self.entry, self.size, self.created, self.used, self.hits = id_, entry, size, created, used, hits
        self.name = entry.name


class Index:
    """One connection, which threads may share.  sqlite3.Error as it comes.

    Without `write` nothing in the folder is touched, and what others write is seen by opening it again (`outdated`).
    With `check` its structure is proved, O(entries).
    """

    def __init__(self, path: Path, *, write: bool = True, timeout: float = 10.0, check: bool = True) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._data_version = -1
        self._seen = self._signature()
        if write:
            self._db = sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)
        else:
            # Without a log nobody has it open.  "immutable" then keeps SQLite from making files of its own.
            how = "mode=ro" if self._log.exists() else "mode=ro&immutable=1"
            self._db = sqlite3.connect(
                f"file:{quote(str(path))}?{how}",
                timeout=timeout,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
        try:
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise NewerIndex(f"the index is of version {version}, this is version {VERSION}")
            if write:
                self._prepare(version)
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0] if check else "ok"
            if found != "ok":
                raise sqlite3.DatabaseError(f"the index is damaged: {found}")
        except UnicodeDecodeError as error:  # in the schema, or in SQLite's own words about it
            self._db.close()
            raise sqlite3.DatabaseError(f"the index is damaged: {error}") from error
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, version: int) -> None:
        if version == 0:
            self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("PRAGMA secure_delete=ON")  # tokens are as private as their text
        self._db.execute(f"PRAGMA wal_autocheckpoint={_PAGES}")
        self._db.execute(f"PRAGMA journal_size_limit={_PAGES * 4096}")
        self._db.executescript(_SCHEMA)  # which writes nothing where it is there
        if version != VERSION:
            self._db.execute(f"PRAGMA user_version={VERSION}")

    @property
    def _log(self) -> Path:
        return Path(f"{self.path}-wal")

    def _signature(self) -> tuple[tuple[int, int, int] | None, ...]:
        found: list[tuple[int, int, int] | None] = []
        for path in (self.path, self._log):
            try:
                status = path.stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)

    @property
    def outdated(self) -> bool:
        """Whether the files have changed since it was opened: what was opened without `write` does not see that."""
        return self._signature() != self._seen

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is done in here is done whole or not at all, and by no other process meanwhile."""
        with self.lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:  # not where SQLite has rolled it back itself, on a full disk say
                    self._db.execute("ROLLBACK")

    # -- entries ------------------------------------------------------------------------------------------

    def changed_by_others(self) -> bool:
        """Whether another connection has changed the index since this was asked last.  O(1)."""
        with self.lock:
            version = self._db.execute("PRAGMA data_version").fetchone()[0]
            changed: bool = version != self._data_version
            self._data_version = version
            return changed

    def rows(self, after: int = 0) -> list[Row]:
        """All entries with an id above `after`, in the order of their ids."""
        query = f"SELECT id, size, created, used, hits, {_COLUMNS} FROM entries WHERE id > ? ORDER BY id"
        with self.lock:
            try:
                return [
                    Row(int(id_), _entry(values), int(size), float(created), float(used), int(hits))
                    for id_, size, created, used, hits, *values in self._db.execute(query, (after,))
                ]
            except (ValueError, TypeError, IndexError, AttributeError) as error:
                raise sqlite3.DatabaseError(f"a row makes no sense: {error}") from error

    def count(self) -> int:
        """How many entries there are."""
        with self.lock:
            return int(self._db.execute("SELECT count(*) FROM entries").fetchone()[0])

    def ids(self) -> set[int]:
        """The ids of all entries."""
        with self.lock:
            return {row[0] for row in self._db.execute("SELECT id FROM entries")}

    def use(self) -> dict[int, tuple[float, int]]:
        """When each entry was used last, and how often, by its id."""
        with self.lock:
            return {id_: (used, hits) for id_, used, hits in self._db.execute("SELECT id, used, hits FROM entries")}

    def id_of(self, name: str) -> int | None:
        """The id of the entry with this file name, or None."""
        with self.lock:
            row = self._db.execute("SELECT id FROM entries WHERE name = ?", (name,)).fetchone()
            return None if row is None else int(row[0])

    def add(self, entry: Entry, size: int) -> int:
        """Add an entry, or put it in the place of one of the same name; its id."""
        now = time.time()
        values = (
            entry.name, entry.namespace, entry.kind, entry.start, entry.end, entry.before, entry.path,
            entry.window_from, entry.flags, entry.nbytes, f"{entry.checksum:016x}", entry.label,
            entry.tokens.astype("<i4").tobytes(), size, now, now,
        )  # fmt: skip
        with self.lock:
            cursor = self._db.execute(
                f"INSERT OR REPLACE INTO entries (name, {_COLUMNS}, size, created, used) VALUES "
                f"({', '.join('?' * len(values))})",
                values,
            )
            return int(cursor.lastrowid or 0)

    def touch(self, ids: Iterable[int]) -> None:
        """Note that these entries were restored, each as often as it is in `ids`."""
        now = time.time()
        with self.transaction():
            self._db.executemany(
                "UPDATE entries SET used = ?, hits = hits + 1 WHERE id = ?", [(now, id_) for id_ in ids]
            )

    def remove(self, ids: Iterable[int]) -> None:
        """Forget entries; their files are the caller's business."""
        with self.lock:
            self._db.executemany("DELETE FROM entries WHERE id = ?", [(id_,) for id_ in ids])

    def names(self, namespaces: Collection[str] | None) -> list[tuple[int, str]]:
        """Ids and names of the entries of these namespaces, or of all."""
        with self.lock:
            found = self._db.execute("SELECT id, name, namespace FROM entries").fetchall()
        return [(id_, name) for id_, name, namespace in found if namespaces is None or namespace in namespaces]

    # -- sizes --------------------------------------------------------------------------------------------

    def total(self) -> int:
        """Bytes of all files, and of those that are being written.  O(entries)."""
        with self.lock:
            query = "SELECT (SELECT ifnull(sum(size), 0) FROM entries) + (SELECT ifnull(sum(size), 0) FROM pending)"
            return int(self._db.execute(query).fetchone()[0])

    def reserve(self, name: str, size: int) -> None:
        """Note that the file `name` of `size` bytes is being written."""
        with self.lock:
            self._db.execute("INSERT OR REPLACE INTO pending VALUES (?, ?)", (name, size))

    def settle(self, name: str) -> None:
        """Note that it is not any more."""
        with self.lock:
            self._db.execute("DELETE FROM pending WHERE name = ?", (name,))

    def pending(self) -> list[str]:
        """The files that are being written, or were when their writer died."""
        with self.lock:
            return [str(row[0]) for row in self._db.execute("SELECT name FROM pending")]

    def bytes_on_disk(self) -> int:
        """Bytes of the index's own files."""
        total = 0
        for path in (self.path, self._log, Path(f"{self.path}-shm")):
            try:
                total += path.stat().st_size
            except OSError:
                continue
        return total

    def shrink(self) -> None:
        """Give the room of forgotten rows back to the system, as far as no other process is reading."""
        with self.lock:
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # -- sessions -----------------------------------------------------------------------------------------

    def save_session(self, name: str, namespace: str, messages: str, tokens: bytes) -> None:
        """Keep a conversation under its name."""
        with self.lock:
            self._db.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)",
                (name, namespace, messages, tokens, time.time()),
            )

    def session(self, name: str, namespace: str) -> tuple[str, bytes] | None:
        """Messages (JSON) and tokens (int32) of a saved conversation, or None."""
        with self.lock:
            row = self._db.execute(
                "SELECT messages, tokens FROM sessions WHERE name = ? AND namespace = ?", (name, namespace)
            ).fetchone()
        return None if row is None else (str(row[0]), bytes(row[1]))

    def sessions(self) -> list[dict[str, Any]]:
        """Name, namespace, tokens and time of each saved conversation."""
        query = "SELECT name, namespace, length(tokens) / 4, saved FROM sessions ORDER BY saved DESC"
        with self.lock:
            return [
                {"name": name, "namespace": namespace, "tokens": tokens, "saved": saved}
                for name, namespace, tokens, saved in self._db.execute(query)
            ]

    def remove_sessions(self, namespaces: Collection[str] | None) -> None:
        """Forget the conversations of these namespaces, or all."""
        with self.lock:
            if namespaces is None:
                self._db.execute("DELETE FROM sessions")
            else:
                self._db.executemany("DELETE FROM sessions WHERE namespace = ?", [(each,) for each in namespaces])

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self._db.close()


def _entry(values: list[Any]) -> Entry:
    namespace, kind, start, end, before, path, window_from, flags, nbytes, checksum, label, tokens = values
    entry = Entry(
        namespace, kind, start, end, before, path, window_from, flags, nbytes, int(checksum, 16), label,
        np.frombuffer(tokens, "<i4").astype(np.int32, copy=False),
    )  # fmt: skip
    numbers = (start, end, window_from, flags, nbytes)
    if not all(type(number) is int for number in numbers) or len(entry.tokens) != end - start or "/" in entry.name:
        raise ValueError(f"{entry.name!r}")
    return entry
