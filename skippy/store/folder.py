"""The folder itself: files that appear whole or not at all, that nobody else can read, and where damaged ones go."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skippy.store.format import SUFFIX

if sys.platform != "win32":  # where what a killed writer leaves behind stays
    import fcntl

__all__ = ["INDEX", "QUARANTINE", "TEMPORARY", "Cancelled", "Folder", "pieces"]

log = logging.getLogger("skippy")

INDEX = "index.sqlite"
QUARANTINE = "quarantine"
TEMPORARY = ".tmp"
_PIECE = 2**18  # bytes that one processor checks or copies in less time than a token takes


class Cancelled(Exception):
    """What was being written is not wanted any more."""


def pieces(data: Any, between: Callable[[], bool]) -> Iterator[memoryview]:
    """`data` in short pieces.  Cancelled where `between()`, called before each of them, says so."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), _PIECE):
        if between():
            raise Cancelled
        yield view[start : start + _PIECE]


class Folder:
    """A folder that belongs to this user alone: 0700, its files 0600, whatever the umask; links are not followed.

    OSError where it cannot be used.  Without `write` nothing in it is touched, and it must be there.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path = path
        self.write = write
        if path.is_symlink():
            raise OSError("it is a symbolic link")
        if write and not path.exists():
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(0o700)
        status = path.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise OSError("it is no folder")
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise OSError("it belongs to somebody else")
        if write and status.st_mode & 0o077:
            path.chmod(stat.S_IMODE(status.st_mode) & 0o700)
        for name in (INDEX, QUARANTINE):
            if (path / name).is_symlink():
                raise OSError(f"its {name} is a symbolic link")
        self._identity: tuple[int, int] | None = None

    # -- the index's file ---------------------------------------------------------------------------------

    @property
    def index(self) -> Path:
        """Where the index lies."""
        return self.path / INDEX

    def make_index_file(self) -> None:
        """Make an empty index that only this user can read, if there is none: SQLite keeps its mode."""
        flags = os.O_CREAT | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(self.index, flags, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)

    @contextmanager
    def alone(self, seconds: float = 10.0) -> Iterator[None]:
        """No other process is in here meanwhile.  OSError where one stays longer than that."""
        descriptor = os.open(self.path, os.O_RDONLY)
        until = time.monotonic() + seconds
        try:
            while not self._lock(descriptor):
                if time.monotonic() > until:
                    raise OSError("another process is mending it")
                time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    def remember(self) -> None:
        """Note which file the index is, for `check_there`."""
        status = self.index.stat()
        self._identity = (status.st_dev, status.st_ino)

    def check_there(self) -> None:
        """OSError where the folder has been removed or replaced since `remember`."""
        status = self.index.stat()
        if (status.st_dev, status.st_ino) != self._identity:
            raise OSError("the folder has been removed, and another one is there")

    # -- looking ------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all that is there.  O(files)."""
        return os.listdir(self.path)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return os.path.lexists(self.path / name)

    def free(self) -> int:
        """Bytes that are free on its file system."""
        return shutil.disk_usage(self.path).free

    # -- writing ------------------------------------------------------------------------------------------

    @contextmanager
    def new_file(self, name: str) -> Iterator[tuple[str, int]]:
        """A temporary file for `name`: its own name and a descriptor.  If it was not published it goes again.

        It is locked while it is written, so that other processes know what a dead one has left behind.
        """
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        while True:
            temporary = f"{name}.{uuid.uuid4().hex[:12]}.{os.getpid()}{TEMPORARY}"
            path = self.path / temporary
            descriptor = os.open(path, flags, 0o600)
            if self._lock(descriptor) and os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)  # somebody who tidies up was faster than the lock
        try:
            os.fchmod(descriptor, 0o600)
            yield temporary, descriptor
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(descriptor)

    @staticmethod
    def _lock(descriptor: int) -> bool:
        if sys.platform == "win32":
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @staticmethod
    def fill(descriptor: int, data: Any, between: Callable[[], bool] = lambda: False) -> None:
        """Write all of `data`, a piece at a time.  Cancelled where `between()`, called before each, says so."""
        for piece in pieces(data, between):
            while len(piece):
                piece = piece[os.write(descriptor, piece) :]

    def publish(self, temporary: str, descriptor: int, name: str) -> None:
        """Give a file that is filled its name, such that it survives a power failure."""
        os.fsync(descriptor)
        os.replace(self.path / temporary, self.path / name)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def unlink(self, name: str) -> None:
        """Remove a file, if it is there.  Who has it mapped can go on reading it."""
        (self.path / name).unlink(missing_ok=True)

    # -- what is left behind, and what is damaged ---------------------------------------------------------

    def left_behind(self, name: str, *, remove: bool = False) -> bool:
        """Whether nobody is writing the temporary file `name` any more; with `remove` it is gone then."""
        path = self.path / name
        try:
            descriptor = os.open(
                path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | os.O_CLOEXEC
            )
        except FileNotFoundError:
            return False
        except OSError:  # a link, say
            if remove:
                path.unlink(missing_ok=True)
            return True
        try:
            if sys.platform == "win32" or not self._lock(descriptor):
                return False
            if remove:
                path.unlink(missing_ok=True)
            return True
        finally:
            os.close(descriptor)

    def set_aside(self, name: str, why: str) -> bool:
        """Move a damaged file to the quarantine; False if it has been gone already."""
        if not self.has(name):
            return False
        log.warning("%s is set aside: %s", name, why)
        if self.write:
            try:
                folder = self.path / QUARANTINE
                if not folder.exists():
                    folder.mkdir(exist_ok=True)
                    folder.chmod(0o700)
                os.replace(self.path / name, folder / name)
            except FileNotFoundError:  # somebody else has
                return False
            except OSError as error:
                log.warning("%s could not be set aside: %s", name, error)
        return True

    def quarantined(self) -> list[tuple[float, int, str]]:
        """When each file in quarantine was last changed, its bytes and its name, the oldest first."""
        found = []
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path / QUARANTINE) as files:
            for file in files:
                with suppress(OSError):
                    status = file.stat(follow_symlinks=False)
                    found.append((status.st_mtime, status.st_size, file.name))
        return sorted(found)

    def erase_quarantined(self, name: str) -> None:
        """Remove a file from the quarantine."""
        self.unlink(f"{QUARANTINE}/{name}")

    def files_of(self, names: list[str], namespaces: set[str] | None) -> list[str]:
        """Those of these file names that are named after one of the namespaces, or after any."""
        found = [name for name in names if name.endswith(SUFFIX)]
        if namespaces is None:
            return found
        heads = tuple(f"{namespace[:16]}-" for namespace in namespaces)
        return [name for name in found if name.startswith(heads)]
