"""The folder of saved state: what is in it, what goes into it in the background, and what leaves.

Nothing here delays a request or fails it: what cannot be queued is dropped and counted, and where the folder cannot be
used the tier switches itself off and says why.  State is as private as the text it came from: the folder is 0700, its
files 0600, and links are not followed.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from skippy.errors import StateError
from skippy.store.format import SUFFIX, Entry, ForeignFile, MappedState, Tokens, digest, read_head, write_file
from skippy.store.index import Index, Row

__all__ = ["DiskSpan", "DiskTier", "Found"]

log = logging.getLogger("skippy")

INDEX = "index.sqlite"
QUARANTINE = "quarantine"
_TEMPORARY = ".tmp"
_QUEUE_BYTES = 256 * 2**20
_DOWN_TO = 0.85  # of the capacity, when something has to leave
_STALE = 3600.0  # seconds after which a temporary file of another process was left behind


class DiskState:
    """What a plan takes of a file: as a Segment or a Checkpoint, but for its bytes, which `DiskTier.open` maps."""

    tier = "disk"

    def __init__(self, row: Row) -> None:
        entry = row.entry
        self.row = row
        self.damaged = False
        self.nbytes = entry.nbytes
        self.start, self.end, self.length = entry.start, entry.end, entry.end
        self.window_from, self.flags = entry.window_from, entry.flags


@dataclass(frozen=True)
class DiskSpan:
    """A segment on disk: it holds [start, end), of which [start, reach) is on the path that was asked for."""

    start: int
    end: int
    reach: int
    payload: DiskState
    node: None = None


@dataclass(frozen=True)
class Found:
    """What the folder holds of a prompt: segments in order, and checkpoints on the path, shallow to deep."""

    spans: tuple[DiskSpan, ...] = ()
    checkpoints: tuple[DiskState, ...] = ()

    @property
    def reach(self) -> int:
        """How many leading tokens of the prompt something is held of."""
        ends = [span.reach for span in self.spans] + [state.length for state in self.checkpoints]
        return max(ends, default=0)


@dataclass
class _Job:
    row: Row
    state: np.ndarray[Any, Any]


class DiskTier:
    """Saved state in `folder`, at most `capacity` bytes with its index; below `min_free` free bytes it is only read.

    One thread at a time, but for its own writer.  `off` says why it is not used (any more), or is None.
    """

    def __init__(self, folder: Path, *, capacity: int, min_free: int = 2**30, write: bool = True) -> None:
        self.folder = Path(folder)
        self.capacity = capacity
        self.min_free = min_free
        self.off: str | None = None
        self.counts: Counter[str] = Counter()
        self.bytes_offered = 0
        self.bytes_written = 0
        self.labels: dict[str, str] = {}
        self._guard = threading.RLock()
        self._rows: dict[int, Row] = {}
        self._segments: dict[tuple[str, str], list[Row]] = {}
        self._checkpoints: dict[tuple[str, str], Row] = {}
        self._lengths: dict[str, Counter[int]] = {}  # namespace -> lengths of its checkpoints
        self._used = 0
        self._last = 0
        self._queue: deque[_Job] = deque()
        self._queued = 0
        self._writing = False
        self._work = threading.Condition(self._guard)
        self._writer: threading.Thread | None = None
        self._stopping = False
        self._write = write
        self._patient = False
        self._index: Index | None = None
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            self._switch_off(f"the folder {os.fspath(self.folder)!r} cannot be used: {error}")

    # -- opening ------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self.folder.is_symlink():
            raise OSError("it is a symbolic link")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and self.folder.stat().st_uid != os.getuid():
            raise OSError("it belongs to somebody else")
        if self.folder.stat().st_mode & 0o077 and self._write:
            self.folder.chmod(0o700)
        index = self.folder / INDEX
        if index.is_symlink():
            raise OSError("its index is a symbolic link")
        try:
            self._index = self._open_index(index)
        except sqlite3.DatabaseError as error:
            if "of version" in str(error) or "readonly" in str(error) or "unable to open" in str(error):
                raise
            self._set_aside(index, f"the index is damaged: {error}")
            for suffix in ("-wal", "-shm"):
                Path(f"{index}{suffix}").unlink(missing_ok=True)
            self._index = self._open_index(index)
        for row in self._index.rows():
            self._remember(row)
        self._index.changed_by_others()
        self.tidy()

    @staticmethod
    def _open_index(path: Path) -> Index:
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0), 0o600))
        return Index(path)

    def tidy(self) -> None:
        """Make index and files agree: adopt whole files without a row, drop rows without a file, clean up the rest."""
        index = self._live
        known = {row.entry.name: row for row in self._rows.values() if row.id}
        present: set[str] = set()
        for found in os.scandir(self.folder):
            if found.name.endswith(_TEMPORARY):
                self._clean_up(Path(found.path))
            elif found.name.endswith(SUFFIX):
                if found.name in known:
                    present.add(found.name)
                else:
                    self._adopt(Path(found.path))
        missing = [row for name, row in known.items() if name not in present]
        if missing and self._write:
            index.remove(row.id for row in missing)
        for row in missing:
            self.counts["missing"] += 1
            self._forget(row)

    def _clean_up(self, path: Path) -> None:
        """Remove what a writer that is gone has left behind."""
        if not self._write:
            return
        try:
            process = int(path.name.split(".")[-2])
            os.kill(process, 0)
            alive = process != os.getpid() and time.time() - path.lstat().st_mtime < _STALE
        except (ValueError, IndexError, ProcessLookupError, FileNotFoundError):
            alive = False
        except PermissionError:
            alive = True
        if not alive:
            path.unlink(missing_ok=True)
            self.counts["cleaned"] += 1

    def _adopt(self, path: Path) -> None:
        try:
            entry, _ = read_head(path)
        except ForeignFile:
            self.counts["foreign"] += 1
            return
        except (StateError, ValueError, TypeError, KeyError) as error:
            self._set_aside(path, str(error))
            return
        except OSError as error:  # a link, or it has gone meanwhile
            log.info("%s is left alone: %s", path.name, error)
            return
        if entry.name != path.name or not self._write:
            return
        size = path.stat().st_size
        row = Row(self._live.add(entry, size), entry, size, time.time(), time.time(), 0)
        self._remember(row)
        self.counts["adopted"] += 1

    def _set_aside(self, path: Path, why: str) -> None:
        """Move a damaged file to the quarantine."""
        log.warning("%s is set aside: %s", path.name, why)
        self.counts["quarantined"] += 1
        if not self._write:
            return
        try:
            folder = self.folder / QUARANTINE
            folder.mkdir(mode=0o700, exist_ok=True)
            os.replace(path, folder / path.name)
        except OSError as error:
            log.warning("%s could not be set aside: %s", path.name, error)

    def _switch_off(self, why: str) -> None:
        if self.off is None:
            self.off = why
            log.warning("the disk tier is off: %s", why)

    @property
    def _live(self) -> Index:
        if self._index is None:
            raise sqlite3.ProgrammingError("the index is closed")
        return self._index

    # -- in memory ----------------------------------------------------------------------------------------

    def _remember(self, row: Row) -> None:
        entry = row.entry
        if row.id:
            old = self._rows.get(row.id)
            if old is not None:
                return
            self._rows[row.id] = row
            self._last = max(self._last, row.id)
        self._used += row.size
        if entry.kind == "segment":
            self._segments.setdefault((entry.namespace, entry.before), []).append(row)
        else:
            self._checkpoints[entry.namespace, entry.path] = row
            self._lengths.setdefault(entry.namespace, Counter())[entry.end] += 1

    def _forget(self, row: Row) -> None:
        entry = row.entry
        self._rows.pop(row.id, None)
        self._used -= row.size
        if entry.kind == "segment":
            siblings = self._segments.get((entry.namespace, entry.before), [])
            if row in siblings:
                siblings.remove(row)
            if not siblings:
                self._segments.pop((entry.namespace, entry.before), None)
        elif self._checkpoints.get((entry.namespace, entry.path)) is row:
            del self._checkpoints[entry.namespace, entry.path]
            lengths = self._lengths[entry.namespace]
            lengths[entry.end] -= 1
            if not lengths[entry.end]:
                del lengths[entry.end]

    def refresh(self) -> None:
        """Take note of what other processes have added and removed.  O(1) where they have not."""
        if self.off is not None:
            return
        with self._guard:
            try:
                if not self._live.changed_by_others():
                    return
                gone = self._rows.keys() - self._live.ids()
                for id_ in gone:
                    self._forget(self._rows[id_])
                for row in self._live.rows(self._last):
                    self._remember(row)
            except sqlite3.Error as error:
                self._switch_off(str(error))

    # -- looking up ---------------------------------------------------------------------------------------

    def find(self, namespace: str, tokens: Tokens) -> Found:
        """What is held of a prompt.  Changes nothing on disk.  O(tokens + entries on the path)."""
        if self.off is not None:
            return Found()
        self.refresh()
        with self._guard:
            lengths = sorted(n for n in self._lengths.get(namespace, ()) if n <= len(tokens))
            spans = [span for span in self._walk(namespace, tokens) if span.payload.row.id]
            checkpoints = []
            state, at = xxhash.xxh3_128(namespace.encode()), 0
            for length in lengths:
                state.update(np.ascontiguousarray(tokens[at:length], np.int32).data)
                at = length
                row = self._checkpoints.get((namespace, state.hexdigest()))
                if row is not None and row.id:
                    checkpoints.append(DiskState(row))
        return Found(tuple(spans), tuple(checkpoints))

    def _walk(self, namespace: str, tokens: Tokens) -> list[DiskSpan]:
        """The chain of segments from the first token on, the longest at each place; queued ones among them."""
        spans: list[DiskSpan] = []
        at = 0
        state = xxhash.xxh3_128(namespace.encode())
        while at < len(tokens):
            rows = self._segments.get((namespace, state.hexdigest() if at else ""), ())
            best: tuple[int, Row] | None = None
            for row in rows:
                common = _common(row.entry.tokens, tokens[at:])
                if common and (best is None or common > best[0]):
                    best = (common, row)
            if best is None:
                break
            common, row = best
            spans.append(DiskSpan(at, row.entry.end, at + common, DiskState(row)))
            if at + common < row.entry.end:
                break
            state.update(np.ascontiguousarray(tokens[at : at + common], np.int32).data)
            at += common
        return spans

    def open(self, state: DiskState) -> MappedState:
        """Map a file, verified.  StateError where it is damaged (it is set aside) or gone; it is not offered again."""
        row = state.row
        path = self.folder / row.entry.name
        try:
            mapped = MappedState(path, row.entry)
        except FileNotFoundError as error:
            self._drop(row, "missing")
            raise StateError(f"{path.name} is gone") from error
        except ForeignFile as error:
            self._drop(row, "foreign")
            raise StateError(str(error)) from error
        except (StateError, ValueError, TypeError, KeyError) as error:
            self._set_aside(path, str(error))
            self._drop(row, "corrupt")
            raise StateError(str(error)) from error
        except OSError as error:
            self._switch_off(str(error))
            raise StateError(str(error)) from error
        self.counts["restores"] += 1
        return mapped

    def give_up(self, state: DiskState) -> None:
        """llama.cpp did not take it although its checksum is right: set it aside, and do not offer it again."""
        if state.row.id in self._rows:
            self._set_aside(self.folder / state.row.entry.name, "llama.cpp does not take it")
            self._drop(state.row, "corrupt")

    def touch(self, states: list[DiskState]) -> None:
        """Note that these were restored, which makes them stay longer."""
        now = time.time()
        with self._guard:
            for state in states:
                state.row.used, state.row.hits = now, state.row.hits + 1
            if self._write and self.off is None:
                try:
                    self._live.touch(state.row.id for state in states)
                except sqlite3.Error as error:
                    self._switch_off(str(error))

    def _drop(self, row: Row, why: str, *, unlink: bool = False) -> None:
        """Forget an entry, and its file if asked to."""
        with self._guard:
            if row.id and row.id not in self._rows:
                return
            self.counts[f"dropped:{why}"] += 1
            self._forget(row)
            try:
                if self._write and row.id:
                    self._live.remove([row.id])
                    if unlink:
                        (self.folder / row.entry.name).unlink(missing_ok=True)
            except (OSError, sqlite3.Error) as error:
                self._switch_off(str(error))

    # -- writing ------------------------------------------------------------------------------------------

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """In here what is offered waits for room in the queue instead of being dropped."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    @property
    def takes(self) -> bool:
        """Whether something can be written at all."""
        return self.off is None and self._write and self.capacity > 0

    def offer_segment(
        self,
        namespace: str,
        path: Tokens,
        start: int,
        window_from: int,
        state: Callable[[int], Any],
    ) -> None:
        """Queue what is not on disk yet of the segment [start, len(path)) of `path`; `state(begin)` gives its bytes."""
        end = len(path)
        if not self.takes:
            return
        with self._guard:
            begin = start
            for span in self._walk(namespace, path):
                if span.start <= begin:
                    begin = max(begin, span.reach)
        if begin < end:
            entry_of = self._entry(namespace, "segment", path, begin, max(window_from, begin), 0)
            self._enqueue(entry_of, lambda: state(begin))

    def offer_checkpoint(self, namespace: str, path: Tokens, flags: int, state: Callable[[], Any]) -> None:
        """Queue a checkpoint, if it is not on disk yet."""
        if not self.takes or (namespace, digest(namespace, path)) in self._checkpoints:
            return
        self._enqueue(self._entry(namespace, "checkpoint", path, len(path), len(path), flags), state)

    def _entry(
        self, namespace: str, kind: str, path: Tokens, start: int, window_from: int, flags: int
    ) -> Callable[[Any], Entry]:
        def make(data: Any) -> Entry:
            return Entry(
                namespace, kind, start, len(path), digest(namespace, path[:start]), digest(namespace, path),
                window_from, flags, len(data), xxhash.xxh3_64_intdigest(data), self.labels.get(namespace, "{}"),
                np.array(path[start:], np.int32),
            )  # fmt: skip

        return make

    def _enqueue(self, entry_of: Callable[[Any], Entry], state: Callable[[], Any]) -> None:
        data = np.frombuffer(state(), np.uint8)
        with self._work:
            while self._patient and self._queued and self._queued + data.nbytes > _QUEUE_BYTES and self.off is None:
                self._work.wait(0.5)
            if data.nbytes > self.capacity or self._queued + data.nbytes > max(_QUEUE_BYTES, data.nbytes):
                self.counts["not_queued"] += 1
                return
            if self._writer is None:
                self._writer = threading.Thread(target=self._run, name="skippy-disk", daemon=True)
                self._writer.start()
            data = data.copy()  # its memory may be used for something else next
            row = Row(0, entry_of(data.data), data.nbytes, time.time(), time.time(), 0)
            self._remember(row)  # so that it is not offered again; it is not found before it is written
            self.bytes_offered += data.nbytes
            self._queue.append(_Job(row, data))
            self._queued += data.nbytes
            self._work.notify_all()

    def _run(self) -> None:
        while True:
            with self._work:
                while not self._queue and not self._stopping:
                    self._work.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._writing = True
            try:
                self._store(job)
            finally:
                with self._work:
                    self._queued -= job.state.nbytes
                    self._writing = False
                    self._work.notify_all()

    def _store(self, job: _Job) -> None:
        """Write one file, whole or not at all, and then its row."""
        entry = job.row.entry
        temporary = self.folder / f"{entry.name}.{threading.get_ident():x}.{os.getpid()}{_TEMPORARY}"
        try:
            if self.off is not None or not self._has_room(job.state.nbytes):
                raise _NoRoom
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                size = write_file(file, entry, job.state.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / entry.name)
            with self._guard:
                id_ = self._live.add(entry, size)
                self._forget(job.row)
                self._remember(Row(id_, entry, size, time.time(), time.time(), 0))
            self.bytes_written += size
            self.counts["saves"] += 1
            return
        except _NoRoom:
            self.counts["no_room"] += 1
        except (OSError, sqlite3.Error) as error:
            self._switch_off(f"writing failed: {error}")
        temporary.unlink(missing_ok=True)
        with self._guard:
            self._forget(job.row)

    def _has_room(self, size: int) -> bool:
        """Whether `size` bytes can be written, for which what is worth least leaves."""
        if shutil.disk_usage(self.folder).free - size < self.min_free:
            if not self.counts["too_full"]:
                log.warning("the disk tier is only read: less than %d bytes are free", self.min_free)
            self.counts["too_full"] += 1
            return False
        with self._guard:
            over = self._total() + size - self.capacity
            return over <= 0 or self._evict(over + int((1 - _DOWN_TO) * self.capacity)) >= over

    def _total(self) -> int:
        return self._used + self._live.bytes_on_disk()

    def _evict(self, wanted: int) -> int:
        """Let entries leave that nothing goes on from, least worth first, until `wanted` bytes are free; how many are.

        Worth is the number of uses over the time since the last one.
        """
        freed = 0
        now = time.time()
        while freed < wanted:
            leaves = [row for row in self._rows.values() if not self._goes_on(row)]
            if not leaves:
                break
            leaves.sort(key=lambda row: (row.hits + 1) / (1 + now - row.used))
            for row in leaves:
                if freed >= wanted:
                    break
                freed += row.size
                self._drop(row, "bytes", unlink=True)
        return freed

    def _goes_on(self, row: Row) -> bool:
        """Whether another segment begins where this one ends."""
        entry = row.entry
        return entry.kind == "segment" and bool(self._segments.get((entry.namespace, entry.path)))

    # -- from outside -------------------------------------------------------------------------------------

    def prune(self, to: int) -> int:
        """Let entries leave until the folder takes at most `to` bytes; how many bytes left."""
        with self._guard:
            freed = self._evict(max(0, self._total() - to))
            if self._index is not None and freed:
                self._live.shrink()
            return freed

    def erase(self, namespaces: set[str] | None = None) -> int:
        """Drop all entries and sessions of these namespaces, or of all; how many entries."""
        with self._guard:
            rows = [row for row in self._rows.values() if namespaces is None or row.entry.namespace in namespaces]
            for row in rows:
                self._drop(row, "erased", unlink=True)
            if self._index is not None and self._write:
                for namespace in [None] if namespaces is None else sorted(namespaces):
                    self._live.remove_sessions(namespace)
                self._live.shrink()
            return len(rows)

    def rows(self) -> list[Row]:
        """All entries, those used last first."""
        with self._guard:
            return sorted(self._rows.values(), key=lambda row: -row.used)

    def verify(self, *, fix: bool = False) -> list[str]:
        """Read every file and compare it with the index and its checksum; what is wrong, in words.  O(bytes).

        With `fix` what is damaged is set aside, and index and files agree afterwards.
        """
        wrong = []
        for row in self.rows():
            path = self.folder / row.entry.name
            try:
                MappedState(path, row.entry).close()
            except FileNotFoundError:
                wrong.append(f"{path.name}: the file is missing")
                if fix:
                    self._drop(row, "missing")
            except (StateError, ForeignFile, OSError, ValueError, TypeError, KeyError) as error:
                wrong.append(f"{path.name}: {error}")
                if fix:
                    self._set_aside(path, str(error))
                    self._drop(row, "corrupt")
        names = {row.entry.name for row in self._rows.values()}
        for found in os.scandir(self.folder):
            if found.name.endswith((SUFFIX, _TEMPORARY)) and found.name not in names:
                wrong.append(f"{found.name}: the index does not know of it")
        if fix:
            self.tidy()
        return wrong

    def save_session(self, name: str, namespace: str, messages: str, tokens: bytes) -> None:
        """Keep a conversation under a name; nothing where the tier is off."""
        if not self.takes:
            return
        with self._guard:
            try:
                self._live.save_session(name, namespace, messages, tokens)
            except sqlite3.Error as error:
                self._switch_off(str(error))

    def session(self, name: str, namespace: str) -> tuple[str, bytes] | None:
        """A conversation that was kept under a name, or None."""
        if self.off is not None:
            return None
        with self._guard:
            try:
                return self._live.session(name, namespace)
            except sqlite3.Error as error:
                self._switch_off(str(error))
                return None

    def sessions(self) -> list[dict[str, Any]]:
        """All of them."""
        return [] if self.off is not None else self._live.sessions()

    def flush(self, progress: Callable[[int], None] | None = None) -> None:
        """Wait until all that was queued is written; `progress` gets the bytes that are left, now and then."""
        with self._work:
            while self._queue or self._writing:
                if progress is not None:
                    progress(self._queued)
                self._work.wait(0.5)

    def close(self) -> None:
        """Write what is queued, and close.  Ctrl-C leaves the rest unwritten and nothing damaged."""
        began = time.monotonic()

        def say(left: int) -> None:
            if time.monotonic() - began > 1:
                log.warning("writing saved state to disk: %.1f MiB left", left / 2**20)

        try:
            self.flush(say)
        finally:
            with self._work:
                self._stopping = True
                self._queue.clear()
                self._work.notify_all()
            if self._writer is not None:
                self._writer.join()
            if self._index is not None:
                self._index.close()
                self._index = None
            self.off = self.off or "it is closed"

    def stats(self) -> dict[str, Any]:
        """Counters, entries and bytes as plain data."""
        with self._guard:
            rows = list(self._rows.values())
            return {
                "folder": os.fspath(self.folder),
                "off": self.off,
                "capacity": self.capacity,
                "in_use": 0 if self._index is None else self._total(),
                "segments": sum(row.entry.kind == "segment" for row in rows),
                "checkpoints": sum(row.entry.kind == "checkpoint" for row in rows),
                "queued_bytes": self._queued,
                "bytes_offered": self.bytes_offered,
                "bytes_written": self.bytes_written,
                "counts": dict(self.counts),
            }


class _NoRoom(Exception):
    pass


def _common(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n
