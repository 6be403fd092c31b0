"""The disk tier: what a prompt finds in the folder of saved state, and what goes into it in the background.

Nothing here delays a request or fails it: what cannot be queued is dropped and counted, and where the folder cannot be
used the tier switches itself off and says why.  State is as private as the text it came from: the folder is 0700, its
files 0600, and links are not followed.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from skippy.errors import StateError
from skippy.store.files import Files
from skippy.store.folder import INDEX, QUARANTINE
from skippy.store.format import Entry, ForeignFile, MappedState, Mismatch, Tokens, digest
from skippy.store.index import Row
from skippy.store.known import DiskSpan, DiskState, Found
from skippy.store.writer import Job, Writer

__all__ = ["INDEX", "QUARANTINE", "DiskSpan", "DiskState", "DiskTier", "Found"]

log = logging.getLogger("skippy")

_QUEUE_BYTES = 256 * 2**20
_OF_THIS_FILE = (errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO)  # it is a link, a folder, a socket
_NOTHING = Found()


class DiskTier:
    """Saved state in `folder`, at most `capacity` bytes with its index; below `min_free` free bytes it is only read.

    One thread at a time, but for its own writer.  `off` says why it is not used (any more), or is None.
    Without `write` nothing in the folder is touched.
    """

    def __init__(self, folder: Path, *, capacity: int, min_free: int = 2**30, write: bool = True) -> None:
        self.folder = Path(folder)
        self.capacity = capacity
        self.labels: dict[str, str] = {}
        self.bytes_offered = 0
        self._files = Files(self.folder, capacity=capacity, min_free=min_free, write=write)
        self._known, self._guard = self._files.known, self._files.guard
        self._writer = Writer(self._guard, _QUEUE_BYTES)
        self._files.later = lambda act: self._writer.put(Job(lambda job: act()))
        self._touched: list[int] = []
        if self.takes and self._files.in_use() > capacity:
            self._files.later(lambda: self._trim())

    @property
    def off(self) -> str | None:
        """Why the folder is not used (any more); None while it is."""
        return self._files.off

    @property
    def counts(self) -> Counter[str]:
        """What happened, and how often."""
        return self._files.counts

    @property
    def bytes_written(self) -> int:
        """Bytes of all files that were written, their heads included."""
        return self._files.bytes_written

    @property
    def takes(self) -> bool:
        """Whether something can be written at all."""
        return self.off is None and self._files.write and self.capacity > 0

    def _trim(self) -> None:
        self._files.prune(self.capacity)

    # -- looking up ---------------------------------------------------------------------------------------

    def find(self, namespace: str, tokens: Tokens, held: int = 0) -> Found:
        """What is held of a prompt whose first `held` tokens are held in memory.  Changes nothing on disk.

        O(tokens + places of the namespace), and what others have added meanwhile.
        """
        if self.off is not None:
            return _NOTHING
        self._files.refresh()
        with self._guard:
            return self._known.find(namespace, tokens, held)

    def open(self, state: DiskState) -> MappedState:
        """Map a file, verified.  StateError where it is damaged (it is set aside) or gone; it is not offered again."""
        row = state.row
        error = self._read(row)
        if isinstance(error, MappedState):
            state.opened = True
            self.counts["restores"] += 1
            return error
        if isinstance(error, FileNotFoundError):
            self._files.drop(row, "missing")
        elif isinstance(error, ForeignFile) and error.newer:
            self._files.drop(row, "foreign")
        elif isinstance(error, Mismatch) and error.entry.name == row.name:
            log.warning("the index is wrong: %s", error)
            self._files.drop(row, "index")
            self._files.adopt_later(row.name)
        elif isinstance(error, (ForeignFile, StateError)) or getattr(error, "errno", None) in _OF_THIS_FILE:
            self._files.drop(row, "corrupt", aside=str(error))
        elif isinstance(error, PermissionError):
            log.warning("%s cannot be read: %s", row.name, error)
            self._files.drop(row, "unreadable")
        else:
            self._files.switch_off(str(error))
        raise StateError(f"{row.name}: {error}") from error

    def _read(self, row: Row) -> MappedState | Exception:
        try:
            return MappedState(self.folder / row.name, row.entry)
        except (StateError, ForeignFile, OSError) as error:
            return error

    def give_up(self, state: DiskState) -> None:
        """llama.cpp did not take it although its checksum is right: set it aside, and do not offer it again."""
        if state.opened and self.off is None:
            self._files.drop(state.row, "corrupt", aside="llama.cpp does not take it")

    def touch(self, states: list[DiskState]) -> None:
        """Note that these were restored, which makes them stay longer."""
        now = time.time()
        with self._guard:
            for state in states:
                state.row.used, state.row.hits = now, state.row.hits + 1
            waiting = bool(self._touched)
            if self.takes:
                self._touched += [state.row.id for state in states]
        if self._touched and not waiting:
            self._files.later(self._write_touched)

    def _write_touched(self) -> None:
        with self._guard:
            ids, self._touched = self._touched, []
        with self._files.or_off():
            self._files.index.touch(ids)

    # -- writing ------------------------------------------------------------------------------------------

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """In here what is offered waits for room in the queue instead of being dropped."""
        self._writer.patient = True
        try:
            yield
        finally:
            self._writer.patient = False

    def offer_segment(
        self,
        namespace: str,
        path: Tokens,
        start: int,
        window_from: int,
        nbytes: int,
        state: Callable[[int], tuple[Any, int]],
    ) -> None:
        """Queue what is not on disk yet of the segment [start, len(path)) of `path`, at most `nbytes`.

        `state(begin)` gives its bytes from `begin` on, and their checksum; an array that owns its memory is kept, of
        all else a copy.  O(bytes) where there is something to write, else O(tokens).
        """
        if not self.takes:
            return
        self._files.refresh()
        begin = start
        with self._guard:
            for span in self._known.find(namespace, path, start, queued=True).spans:
                if span.start <= begin:
                    begin = max(begin, span.reach)
        if begin < len(path):
            window_from = max(window_from, begin)
            self._offer(namespace, "segment", path, begin, window_from, 0, nbytes, lambda: state(begin))

    def offer_checkpoint(
        self, namespace: str, path: Tokens, flags: int, nbytes: int, state: Callable[[], tuple[Any, int]]
    ) -> None:
        """Queue a checkpoint of `path`, if it is not on disk yet; `state` as for segments."""
        if not self.takes:
            return
        self._files.refresh()
        with self._guard:
            there = self._known.has_checkpoint(namespace, digest(namespace, path))
        if not there:
            self._offer(namespace, "checkpoint", path, len(path), len(path), flags, nbytes, state)

    def _offer(
        self,
        namespace: str,
        kind: str,
        path: Tokens,
        start: int,
        window_from: int,
        flags: int,
        nbytes: int,
        state: Callable[[], tuple[Any, int]],
    ) -> None:
        if nbytes > self.capacity or not self._writer.takes(nbytes):
            self.counts["not_queued"] += 1
            return
        given, checksum = state()
        data = given if isinstance(given, np.ndarray) and given.base is None else np.array(np.frombuffer(given, "u1"))
        entry = Entry(
            namespace, kind, start, len(path), digest(namespace, path[:start]), digest(namespace, path),
            window_from, flags, data.nbytes, checksum, self.labels.get(namespace, "{}"), np.array(path[start:], "i4"),
        )  # fmt: skip
        row = Row(0, entry, data.nbytes, time.time(), time.time(), 0)
        with self._guard:
            self._known.add(row)  # so that it is not offered again; it is not found before it is written
        self.bytes_offered += data.nbytes
        self._writer.put(
            Job(
                lambda job: self._files.store(row, data.data, lambda: self._writer.between(job)),
                data.nbytes,
                namespace,
                lambda: self._unqueue(row),
            )
        )

    def _unqueue(self, row: Row) -> None:
        with self._guard:
            self._known.remove(row)

    # -- from outside -------------------------------------------------------------------------------------

    def prune(self, to: int) -> int:
        """Let entries leave until the folder takes at most `to` bytes; how many bytes left."""
        return self._files.prune(to) if self._files.write else 0

    def erase(self, namespaces: set[str] | None = None) -> int:
        """Drop all entries and sessions of these namespaces, or of all; how many entries.  Queued ones go too."""
        if not self._files.write:
            return 0
        self._writer.discard(lambda job: job.nbytes > 0 and (namespaces is None or job.namespace in namespaces))
        return self._files.erase(namespaces)

    def erase_prompt(self, namespace: str, tokens: Tokens) -> int:
        """Drop what is stored of paths that begin with `tokens`, and of their head what nobody else shares."""
        if not self._files.write:
            return 0
        self._writer.discard(lambda job: job.nbytes > 0 and job.namespace == namespace)
        return self._files.erase_prompt(namespace, tokens)

    def rows(self) -> list[Row]:
        """All entries, those used last first."""
        self._files.refresh()
        with self._guard:
            return sorted((row for row in self._known if row.id), key=lambda row: -row.used)

    def verify(self, *, fix: bool = False) -> list[str]:
        """Read every file and compare it with the index and its checksum; what is wrong, in words.  O(bytes).

        With `fix` what is damaged is set aside, and index and files agree afterwards.
        """

        def check(row: Row) -> Exception | None:
            found = self._read(row)
            if isinstance(found, MappedState):
                found.close()
                return None
            return found

        wrong = self._files.verify(check, fix=fix and self._files.write)
        self._writer.flush()
        return wrong

    def save_session(self, name: str, namespace: str, messages: str, tokens: bytes) -> None:
        """Keep a conversation under a name; nothing where the tier is off."""
        if self.takes:
            with self._files.or_off():
                self._files.index.save_session(name, namespace, messages, tokens)

    def session(self, name: str, namespace: str) -> tuple[str, bytes] | None:
        """A conversation that was kept under a name, or None."""
        self._files.refresh()
        index = self._files.reader
        if self.off is not None or index is None:
            return None
        found: list[tuple[str, bytes] | None] = [None]
        with self._files.or_off():
            found.append(index.session(name, namespace))
        return found[-1]

    def sessions(self) -> list[dict[str, Any]]:
        """All of them."""
        self._files.refresh()
        index = self._files.reader
        if self.off is not None or index is None:
            return []
        found: list[dict[str, Any]] = []
        with self._files.or_off():
            found += index.sessions()
        return found

    def flush(self, progress: Callable[[int], None] | None = None) -> None:
        """Wait until all that was queued is written; `progress` gets the bytes that are left, now and then."""
        self._writer.flush(progress)

    def close(self, *, flush: bool = True) -> None:
        """Write what is queued, and close.  Ctrl-C leaves the rest unwritten and nothing damaged."""
        began = time.monotonic()
        said = 0.0

        def say(left: int) -> None:
            nonlocal said
            seconds = time.monotonic() - began
            if left and seconds > 1 and seconds - said > 1:
                said = seconds
                log.warning("writing saved state to disk: %.1f MiB left", left / 2**20)

        try:
            if flush:
                self.flush(say)
        finally:
            self._writer.stop()
            self._files.close()

    def stats(self) -> dict[str, Any]:
        """Counters, entries and bytes as plain data.  O(entries)."""
        with self._guard:
            kinds = Counter(row.entry.kind for row in self._known if row.id)
        return {
            "folder": os.fspath(self.folder),
            "off": self.off,
            "capacity": self.capacity,
            "in_use": self._files.in_use(),
            "segments": kinds["segment"],
            "checkpoints": kinds["checkpoint"],
            "queued_bytes": self._writer.queued,
            "bytes_offered": self.bytes_offered,
            "bytes_written": self.bytes_written,
            "counts": dict(self.counts),
        }
