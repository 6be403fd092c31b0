"""The file of one segment or checkpoint: a head that says all about it, then the bytes that llama.cpp takes.

    magic 8 bytes, version u32, length of the head u32, checksum of the head u64 (xxh3),
    the head: JSON, then the tokens of [start, end) as int32,
    zeros up to a multiple of 64, the state

Little endian.  The head is enough to build the index anew from the files alone.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import struct
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from skippy.errors import StateError

__all__ = [
    "MAGIC",
    "SUFFIX",
    "VERSION",
    "Entry",
    "ForeignFile",
    "MappedState",
    "Mismatch",
    "digest",
    "open_to_read",
    "pack_head",
    "read_head",
]

Tokens = npt.NDArray[np.int32]

MAGIC = b"SKIPPYKV"
VERSION = 1
SUFFIX = ".kv"
ROOT = ""
_FRONT = struct.Struct("<8sIIQ")
_ALIGN = 64
_LONGEST_HEAD = 64 * 2**20


class ForeignFile(Exception):
    """A file that is not of this format, or, if `newer`, of a newer version: it is left alone."""

    def __init__(self, message: str, *, newer: bool = False) -> None:
        super().__init__(message)
        self.newer = newer


class Mismatch(StateError):
    """A file that is whole, but not what the index says; `entry` is what the file says."""

    def __init__(self, message: str, entry: Entry) -> None:
        super().__init__(message)
        self.entry = entry


def digest(namespace: str, tokens: Tokens) -> str:
    """What stands for the path of these tokens in a namespace: 32 hex digits; "" for no tokens.  O(tokens)."""
    if not len(tokens):
        return ROOT
    state = xxhash.xxh3_128(namespace.encode())
    state.update(np.ascontiguousarray(tokens, np.int32).data)
    return state.hexdigest()


@dataclass(frozen=True, eq=False)
class Entry:
    """One file: saved state of kind "segment" (tokens [start, end)) or "checkpoint" (start and end alike) of a path.

    `before` and `path` are the digests of the first `start` and `end` tokens, `tokens` those of [start, end);
    `window_from` and `flags` as in skippy.segments; `nbytes` and `checksum` (xxh3) are those of the state.
    """

    namespace: str
    kind: str
    start: int
    end: int
    before: str
    path: str
    window_from: int
    flags: int
    nbytes: int
    checksum: int
    label: str
    tokens: Tokens

    @property
    def name(self) -> str:
        """The file's name: the same state has the same name in every process."""
        return f"{self.namespace[:16]}-{self.kind[0]}-{self.path}-{self.start}{SUFFIX}"


_FIELDS = [field.name for field in fields(Entry) if field.name != "tokens"]


def pack_head(entry: Entry) -> bytes:
    """What stands in a file before the state; its length is a multiple of 64.  O(tokens)."""
    text = json.dumps({name: getattr(entry, name) for name in _FIELDS}, separators=(",", ":")).encode()
    head = text + b"\n" + entry.tokens.astype("<i4").tobytes()
    front = _FRONT.pack(MAGIC, VERSION, len(head), xxhash.xxh3_64_intdigest(head))
    return front + head + bytes(-(len(front) + len(head)) % _ALIGN)


def open_to_read(path: Path) -> int:
    """A descriptor of a plain file.  OSError as it comes, and for symbolic links; StateError for no plain file."""
    descriptor = os.open(
        path,
        os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0),
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe, say: reading it would never end
        os.close(descriptor)
        raise StateError(f"{path.name} is no plain file")
    return descriptor


def read_head(path: Path) -> tuple[Entry, int]:
    """What a file says of itself, and where its state begins.  O(tokens).

    ForeignFile for what is not ours or is newer, StateError for what is damaged, OSError for what cannot be read;
    symbolic links are not followed.
    """
    descriptor = open_to_read(path)
    try:
        return _read_head(descriptor, path.name)
    finally:
        os.close(descriptor)


def _read_head(descriptor: int, name: str) -> tuple[Entry, int]:
    size = os.fstat(descriptor).st_size
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        front = file.read(_FRONT.size)
        if front[:8] != MAGIC:
            raise ForeignFile(f"{name} is no file of saved state")
        if len(front) < _FRONT.size:
            raise StateError(f"{name} ends inside its head")
        _, version, length, checksum = _FRONT.unpack(front)
        if version > VERSION:
            raise ForeignFile(f"{name} is of version {version}, this is version {VERSION}", newer=True)
        if version != VERSION or length > min(_LONGEST_HEAD, size):
            raise StateError(f"the head of {name} is damaged")
        head = file.read(length)
    if len(head) != length or xxhash.xxh3_64_intdigest(head) != checksum:
        raise StateError(f"the head of {name} is damaged")
    text, _, tokens = head.partition(b"\n")
    try:
        entry = Entry(**json.loads(text), tokens=np.frombuffer(tokens, "<i4").astype(np.int32, copy=False))
    except (ValueError, TypeError) as error:
        raise StateError(f"the head of {name} makes no sense: {error}") from error
    offset = -(-(_FRONT.size + length) // _ALIGN) * _ALIGN
    if size != offset + entry.nbytes or len(entry.tokens) != entry.end - entry.start:
        raise StateError(f"{name} has {size} bytes, expected {offset + entry.nbytes}")
    return entry, offset


class MappedState:
    """The state in a file, mapped: `view` is read-only memory until `close`.  Its checksum has been verified.

    Mismatch where the file is not what `expected` says, else as `read_head`.  O(bytes).
    """

    def __init__(self, path: Path, expected: Entry) -> None:
        descriptor = open_to_read(path)
        try:
            entry, offset = _read_head(descriptor, path.name)
            for field in _FIELDS:
                found, known = getattr(entry, field), getattr(expected, field)
                if field != "label" and found != known:
                    raise Mismatch(f"{path.name} says {field}={found!r}, the index {known!r}", entry)
            if not np.array_equal(entry.tokens, expected.tokens):
                raise Mismatch(f"{path.name} is of other tokens than the index says", entry)
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._whole = memoryview(self._map)
        self.view = self._whole[offset : offset + entry.nbytes]
        if xxhash.xxh3_64_intdigest(self.view) != entry.checksum:
            self.close()
            raise StateError(f"the state in {path.name} does not match its checksum")

    def close(self) -> None:
        """Unmap it; while an array over it lives (in a traceback, say), that is left to the garbage collector."""
        try:
            self.view.release()
            self._whole.release()
            self._map.close()
        except BufferError:
            pass
