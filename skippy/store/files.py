"""What is written into a folder of saved state, under a cap, and what leaves it."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import xxhash

from skippy.errors import StateError
from skippy.store.folder import INDEX, TEMPORARY, Cancelled, pieces
from skippy.store.format import SUFFIX, ForeignFile, Tokens, pack_head, read_head
from skippy.store.index import Row
from skippy.store.known import least_worth, of_prompt
from skippy.store.opening import OpenFolder

__all__ = ["Files"]

log = logging.getLogger("skippy")

DOWN_TO = 0.85  # of the capacity, when something has to leave


class Files(OpenFolder):
    """Writes whole files or none, and removes them with their rows."""

    bytes_written = 0  # of all files, their heads included

    # -- writing ------------------------------------------------------------------------------------------

    def store(self, row: Row, data: Any, between: Callable[[], bool]) -> None:
        """Write the file of `row`, whole or not at all, and put it into the index; else forget it.

        `between()` is called between short pieces of work, and says whether to give up.
        """
        with self.or_off():
            if self.off is None:
                try:
                    self._store(row, data, between)
                except Cancelled:
                    self.counts["cancelled"] += 1
        with self.guard:
            self.known.remove(row)  # unless it has been replaced by what was written

    def _store(self, row: Row, data: Any, between: Callable[[], bool]) -> None:
        entry = row.entry
        state = xxhash.xxh3_64()
        for piece in pieces(data, between):
            state.update(piece)
        if state.intdigest() != entry.checksum:
            self.counts["damaged_in_memory"] += 1
            log.warning("saved state was damaged in memory, and is not written")
            return
        self.folder.check_there()
        head = pack_head(entry)
        size = len(head) + entry.nbytes
        with self.folder.new_file(row.name) as (temporary, descriptor):
            with self.index.transaction():
                if not self._reserve(row.name, temporary, size, len(entry.tokens)):
                    return
            try:
                self.folder.fill(descriptor, head)
                self.folder.fill(descriptor, data, between)
                self.folder.publish(temporary, descriptor, row.name)
            except BaseException:
                with suppress(sqlite3.Error):
                    self.index.settle(temporary)
                raise
            with self.index.transaction():
                self.index.settle(temporary)
                id_ = self.index.add(entry, size)
        with self.guard:
            self.known.add(Row(id_, entry, size, time.time(), time.time(), 0))
        self.bytes_written += size
        self.counts["saves"] += 1

    def _reserve(self, name: str, temporary: str, size: int, tokens: int) -> bool:
        """Whether `size` bytes are to be written and can be; what is worth least leaves for them.  In a transaction."""
        id_ = self.index.id_of(name)
        if id_ is not None:
            if self.folder.has(name):
                self.counts["there_already"] += 1
                self._sync(self.index)
                return False
            self.index.remove([id_])
        if self.folder.free() - size < self.min_free:
            if not self.counts["too_full"]:
                log.warning("the disk tier is only read: less than %d bytes are free", self.min_free)
            self.counts["too_full"] += 1
            return False
        size_of_index = self.index.bytes_on_disk() + 2**17 + 16 * tokens  # what the rows of this one may add
        if size + size_of_index > self.capacity:
            self.counts["no_room"] += 1
            return False
        over = self.index.total() + self._quarantine_bytes() + size + size_of_index - self.capacity
        if over > 0 and not self._make_room(over):
            self.counts["no_room"] += 1
            return False
        self.index.reserve(temporary, size)
        return True

    def _quarantine_bytes(self) -> int:
        return sum(size for _, size, _ in self.folder.quarantined())

    def _make_room(self, over: int) -> bool:
        """Free `over` bytes and what else is above `DOWN_TO` of the capacity; nothing, and False, if that cannot be."""
        wanted = over + int((1 - DOWN_TO) * self.capacity)
        aside = self.folder.quarantined()
        leaving = self._choose(wanted - sum(size for _, size, _ in aside))
        if sum(row.size for row in leaving) + sum(size for _, size, _ in aside) < over:
            return False
        for _, _, name in aside:
            self.folder.erase_quarantined(name)
        self._erase_rows(leaving, "bytes")
        return True

    def _choose(self, wanted: int) -> list[Row]:
        if wanted <= 0:
            return []
        self._sync(self.index)
        use = self.index.use()
        with self.guard:
            rows = list(self.known)
        return least_worth(rows, wanted, time.time(), lambda row: use.get(row.id, (row.used, row.hits)))

    def _erase_rows(self, rows: list[Row], why: str) -> None:
        """Remove entries and their files.  In a transaction: if this process dies, the rows are without files."""
        self.index.remove([row.id for row in rows])
        for row in rows:
            self.folder.unlink(row.name)
        with self.guard:
            for row in rows:
                self.known.remove(row)
        if rows:
            self.counts[f"dropped:{why}"] += len(rows)

    # -- from outside -------------------------------------------------------------------------------------

    def prune(self, to: int) -> int:
        """Let entries leave until the folder takes at most `to` bytes; how many bytes left."""
        freed = 0
        with self.or_off():
            with self.index.transaction():
                over = self.index.total() + self.index.bytes_on_disk() + self._quarantine_bytes() - to
                if over > 0:
                    for _, size, name in self.folder.quarantined():
                        self.folder.erase_quarantined(name)
                        over, freed = over - size, freed + size
                    leaving = self._choose(over)
                    self._erase_rows(leaving, "bytes")
                    freed += sum(row.size for row in leaving)
            if freed:
                self.index.shrink()
        return freed

    def erase(self, namespaces: set[str] | None) -> int:
        """Remove entries, sessions and damaged files of these namespaces, or of all; how many entries."""
        erased = 0
        with self.or_off():
            with self.index.transaction():
                self._sync(self.index)
                with self.guard:
                    rows = [row for row in self.known if namespaces is None or row.entry.namespace in namespaces]
                erased = sum(row.id > 0 for row in rows)
                self._erase_rows(rows, "erased")
                self.index.remove_sessions(namespaces)
            for name in self.folder.files_of(self.folder.names(), namespaces):  # what the index does not know
                try:
                    read_head(self.path / name)
                except ForeignFile:
                    continue
                except (StateError, OSError):
                    pass
                self.folder.unlink(name)
            aside = [name for _, _, name in self.folder.quarantined()]
            damaged = aside if namespaces is None else self.folder.files_of(aside, namespaces)
            for name in {*damaged, *(name for name in aside if name.startswith(INDEX))}:  # an index holds all tokens
                self.folder.erase_quarantined(name)
            self.index.shrink()
        return erased

    def erase_prompt(self, namespace: str, tokens: Tokens) -> int:
        """Remove what is stored of paths that begin with `tokens`, and of their head what nobody else goes on from.

        How many entries.  O(entries of the namespace and their tokens).
        """
        erased: list[Row] = []
        with self.or_off():
            with self.index.transaction():
                self._sync(self.index)
                with self.guard:
                    rows = [row for row in self.known if row.entry.namespace == namespace]
                    found = self.known.find(namespace, tokens, held=len(tokens))
                erased = [row for row in of_prompt(rows, found, len(tokens)) if row.id]
                self._erase_rows(erased, "erased")
            self.index.shrink()
        return len(erased)

    def verify(self, check: Callable[[Row], Exception | None], *, fix: bool) -> list[str]:
        """What is wrong, in words: `check` reads one file.  With `fix` index and files agree afterwards.  O(bytes)."""
        wrong = []
        self.refresh()
        for row in [row for row in self.known if row.id]:
            error = check(row)
            if isinstance(error, FileNotFoundError):
                wrong.append(f"{row.name}: the file is missing")
                if fix:
                    self.drop(row, "missing")
            elif error is not None:
                wrong.append(f"{row.name}: {error}")
                newer = isinstance(error, ForeignFile) and error.newer
                if fix:
                    self.drop(row, "corrupt", aside=None if newer else str(error))
        with self.or_off():
            names = self.folder.names()
            for name in names:
                unknown = name.endswith(SUFFIX) and self.known.get(name) is None
                if unknown or (name.endswith(TEMPORARY) and self.folder.left_behind(name)):
                    wrong.append(f"{name}: the index does not know of it")
            if fix:
                self.tidy()
        return wrong
