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
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from skippy.errors import StateError

__all__ = ["MAGIC", "SUFFIX", "VERSION", "Entry", "ForeignFile", "MappedState", "digest", "read_head", "write_file"]

Tokens = npt.NDArray[np.int32]

MAGIC = b"SKIPPYKV"
VERSION = 1
SUFFIX = ".kv"
ROOT = ""
_FRONT = struct.Struct("<8sIIQ")
_ALIGN = 64
_LONGEST_HEAD = 64 * 2**20


class ForeignFile(Exception):
    """A file that is not of this format, or of a newer version: it is left alone."""


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


def write_file(file: Any, entry: Entry, state: Any) -> int:
    """Write `entry` and its state into an open binary file; how many bytes it has.  OSError as it comes."""
    fields = asdict(entry)
    del fields["tokens"]
    head = json.dumps(fields, separators=(",", ":")).encode() + b"\n" + entry.tokens.astype("<i4").tobytes()
    front = _FRONT.pack(MAGIC, VERSION, len(head), xxhash.xxh3_64_intdigest(head))
    pad = -(len(front) + len(head)) % _ALIGN
    file.write(front)
    file.write(head)
    file.write(bytes(pad))
    file.write(state)
    return len(front) + len(head) + pad + entry.nbytes


def read_head(path: Path) -> tuple[Entry, int]:
    """What a file says of itself, and where its state begins.

    ForeignFile for what is not ours or is newer, StateError for what is damaged, OSError for what cannot be read;
    symbolic links are not followed.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(descriptor, "rb") as file:
        front = file.read(_FRONT.size)
        if front[:8] != MAGIC[: len(front)] or len(front) < 8:
            raise ForeignFile(f"{path.name} is no file of saved state")
        if len(front) < _FRONT.size:
            raise StateError(f"{path.name} ends inside its head")
        _, version, length, checksum = _FRONT.unpack(front)
        if version > VERSION:
            raise ForeignFile(f"{path.name} is of version {version}, this is version {VERSION}")
        if version != VERSION or length > _LONGEST_HEAD:
            raise StateError(f"the head of {path.name} is damaged")
        head = file.read(length)
        size = os.fstat(file.fileno()).st_size
    if len(head) != length or xxhash.xxh3_64_intdigest(head) != checksum:
        raise StateError(f"the head of {path.name} is damaged")
    text, _, tokens = head.partition(b"\n")
    entry = Entry(**json.loads(text), tokens=np.frombuffer(tokens, "<i4").astype(np.int32))
    offset = -(-(_FRONT.size + length) // _ALIGN) * _ALIGN
    if size != offset + entry.nbytes or len(entry.tokens) != entry.end - entry.start:
        raise StateError(f"{path.name} has {size} bytes, expected {offset + entry.nbytes}")
    return entry, offset


class MappedState:
    """The state in a file, mapped: `view` is read-only memory until `close`.  Its checksum has been verified."""

    def __init__(self, path: Path, expected: Entry) -> None:
        entry, offset = read_head(path)
        for field in ("namespace", "kind", "start", "end", "path", "nbytes", "checksum"):
            if getattr(entry, field) != getattr(expected, field):
                raise StateError(f"{path.name} says {field}={getattr(entry, field)!r}, the index another")
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0))
        try:
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._whole = memoryview(self._map)
        self.view = self._whole[offset : offset + entry.nbytes]
        if len(self.view) != entry.nbytes or xxhash.xxh3_64_intdigest(self.view) != entry.checksum:
            self.close()
            raise StateError(f"the state in {path.name} does not match its checksum")

    def close(self) -> None:
        """Unmap it."""
        self.view.release()
        self._whole.release()
        self._map.close()
