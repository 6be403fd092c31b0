"""A folder of saved state and its index: opened, made to agree, and kept up with what other processes do."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skippy.errors import StateError
from skippy.store.folder import INDEX, TEMPORARY, Folder
from skippy.store.format import SUFFIX, Entry, ForeignFile, read_head
from skippy.store.index import Index, NewerIndex, Row
from skippy.store.known import Known

__all__ = ["OpenFolder"]

log = logging.getLogger("skippy")


class OpenFolder:
    """What is in `path`: at most `capacity` bytes with its index; below `min_free` free bytes nothing is written.

    `known` is what is there, in memory, and `guard` is held around its use, never while the disk is waited for.  `off`
    says why the folder is not used (any more), or is None.  `later(act)` does something in the background.
    """

    def __init__(self, path: Path, *, capacity: int, min_free: int, write: bool) -> None:
        self.path = path
        self.capacity = capacity
        self.min_free = min_free
        self.write = write
        self.off: str | None = None
        self.counts: Counter[str] = Counter()
        self.known = Known()
        self.guard = threading.RLock()
        self.later: Callable[[Callable[[], None]], None] = lambda act: act()
        self._index: Index | None = None  # what is written goes through this one, and may wait for other processes
        self._reader: Index | None = None  # what is looked up through this one, which waits for nobody
        self._last = 0
        try:
            self.folder = Folder(path, write=write)
            if write:
                self._open()
            else:
                self._look()
        except (OSError, sqlite3.Error) as error:
            self.switch_off(f"the folder {os.fspath(path)!r} cannot be used: {error}")

    # -- opening ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.folder.make_index_file()
        try:
            rows = self._open_index()
        except sqlite3.Error as error:
            if not self._is_damage(error):
                raise
            with self.folder.alone():
                rows = self._open_anew()
        self._reader = Index(self.folder.index, timeout=0.05, check=False)
        self._reader.changed_by_others()
        self.folder.remember()
        self._take(rows)
        self.tidy()

    def _open_index(self) -> list[Row]:
        index = Index(self.folder.index)
        try:
            rows = index.rows()
        except BaseException:
            index.close()
            raise
        self._index = index
        return rows

    def _open_anew(self) -> list[Row]:
        """Set a damaged index aside, unless another process has just done that, and begin with an empty one."""
        self.folder.make_index_file()
        try:
            return self._open_index()
        except sqlite3.Error as error:
            if not self._is_damage(error):
                raise
            self._set_aside(INDEX, f"the index is damaged: {error}")
        for suffix in ("-wal", "-shm"):
            self.folder.unlink(f"{INDEX}{suffix}")
        self.folder.make_index_file()
        return self._open_index()

    def _is_damage(self, error: Exception) -> bool:
        """Whether the index itself is to blame, and not that it is newer, locked, or cannot be read or written."""
        if isinstance(error, NewerIndex):
            return False
        if not isinstance(error, sqlite3.OperationalError):
            return True
        text = str(error)
        if "readonly" in text:  # which damage to its first bytes looks like
            return os.access(self.folder.index, os.W_OK) and os.access(self.path, os.W_OK)
        return not any(word in text for word in ("locked", "busy", "unable to open", "I/O", "full"))

    def _look(self) -> None:
        """Open without touching anything; without an index, what the files say of themselves will do."""
        try:
            self._reader = Index(self.folder.index, write=False)
            rows = self._reader.rows()
        except NewerIndex:
            raise
        except sqlite3.Error as error:
            log.warning("the index in %s is not used: %s", self.path, error)
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            for i, (entry, size) in enumerate(self._heads(self.folder.names())):
                self.known.add(Row(-1 - i, entry, size, time.time(), time.time(), 0))
            return
        self._take(rows)
        self._drop_missing(set(self.folder.names()))

    def tidy(self) -> None:
        """Make index and files agree: adopt whole files without a row, drop rows without a file, clean up the rest."""
        index = self.index
        for name in index.pending():
            if not self.folder.has(name):  # in this order: the file is there before it is noted, and goes after
                index.settle(name)
        names = self.folder.names()
        for name in names:
            if name.endswith(TEMPORARY) and self.folder.left_behind(name, remove=True):
                self.counts["cleaned"] += 1
                index.settle(name)
        self._adopt([name for name in names if self.known.get(name) is None])
        self._drop_missing(set(names))

    def _heads(self, names: Iterable[str]) -> Iterator[tuple[Entry, int]]:
        """What files say of themselves, and their sizes; those that are damaged are set aside, others left alone."""
        for name in names:
            if not name.endswith(SUFFIX):
                continue
            try:
                entry, offset = read_head(self.path / name)
            except ForeignFile:
                self.counts["foreign"] += 1
            except StateError as error:
                self._set_aside(name, str(error))
            except OSError as error:  # a link, or it has gone meanwhile
                log.info("%s is left alone: %s", name, error)
            else:
                if entry.name == name:
                    yield entry, offset + entry.nbytes

    def _adopt(self, names: Iterable[str]) -> None:
        found = list(self._heads(names))
        if not found:
            return
        with self.index.transaction():
            for entry, size in found:
                if self.index.id_of(entry.name) is None:
                    self.index.add(entry, size)
                    self.counts["adopted"] += 1
        self._sync(self.index)

    def _drop_missing(self, names: set[str]) -> None:
        missing = [row for row in self.known if row.id and row.name not in names]
        for row in missing:
            self.counts["missing"] += 1
            self.known.remove(row)
        if missing and self.write:
            with self.index.transaction():
                self.index.remove([row.id for row in missing])

    def _set_aside(self, name: str, why: str) -> None:
        if self.folder.set_aside(name, why):
            self.counts["quarantined"] += 1

    def switch_off(self, why: str) -> None:
        """Do not use the folder any more."""
        if self.off is None:
            self.off = why
            log.warning("the disk tier is off: %s", why)

    @contextmanager
    def or_off(self) -> Iterator[None]:
        """What fails in here switches the tier off, and is over; but that others keep the index locked is counted."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                self.counts["locked"] += 1
                log.warning("the index of the disk tier is locked by another process")
            else:
                self.switch_off(f"{self.path}: {error}")

    @property
    def index(self) -> Index:
        """The index.  sqlite3.Error where it is closed, or only read."""
        if self._index is None:
            raise sqlite3.ProgrammingError("the index is closed, or only read")
        return self._index

    @property
    def reader(self) -> Index | None:
        """What the index is looked into through; None where there is none."""
        return self._reader

    # -- what others do -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take note of what other processes have added and removed.  O(1) where they have not."""
        reader = self._reader
        if self.off is not None or reader is None:
            return
        try:
            if self.write:
                if reader.changed_by_others():
                    self._sync(reader)
            elif reader.outdated:
                reader.close()
                self._reader = Index(self.folder.index, write=False, check=False)
                self._sync(self._reader)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                self.switch_off(str(error))
        except sqlite3.Error as error:
            self.switch_off(str(error))

    def _sync(self, index: Index) -> None:
        """Make what is known what is in the index.  O(what was added), and O(entries) where something was removed."""
        self._take(index.rows(self._last))
        if index.count() != self.known.written:
            ids = index.ids()
            with self.guard:
                for row in self.known:
                    if row.id > 0 and row.id not in ids:
                        self.known.remove(row)

    def _take(self, rows: list[Row]) -> None:
        with self.guard:
            for row in rows:
                old = self.known.get(row.name)
                if old is None or old.id < row.id:
                    self.known.add(row)
                self._last = max(self._last, row.id)

    def drop(self, row: Row, why: str, *, aside: str | None = None) -> None:
        """Forget an entry, at once in memory and soon in the index; with `aside`, a reason, set its file aside."""
        with self.guard:
            if not self.known.holds(row):
                return
            self.known.remove(row)
        self.counts[f"dropped:{why}"] += 1
        if aside is not None:
            self._set_aside(row.name, aside)
        if self.write and row.id > 0:
            self.later(lambda: self._remove(row.id))

    def _remove(self, id_: int) -> None:
        with self.or_off(), self.index.transaction():
            self.index.remove([id_])

    def adopt_later(self, name: str) -> None:
        """The index is wrong about a file: believe the file."""

        def act() -> None:
            with self.or_off():
                self._adopt([name])

        if self.write:
            self.later(act)

    def in_use(self) -> int:
        """Bytes of files and index, without what is in quarantine."""
        index = self._reader
        with self.guard:
            return sum(row.size for row in self.known if row.id) + (0 if index is None else index.bytes_on_disk())

    def close(self) -> None:
        """Close the index; nothing can be asked afterwards."""
        for index in (self._reader, self._index):
            if index is not None:
                with suppress(sqlite3.Error):
                    index.close()
        self._reader = self._index = None
        self.off = self.off or "it is closed"
