"""Who may use a `Llama` when several threads share it: one request at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Turns"]


class Turns:
    """One request at a time: a thread waits for the others' requests, and its own next one ends the one before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._number = 0
        self._inside = 0

    @property
    def number(self) -> int:
        """The number of the turn that was begun last."""
        return self._number

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds the turn: a stream of its own is still open."""
        return self._lock.locked() and self._holder == threading.get_ident()

    @property
    def inside(self) -> bool:
        """Whether the calling thread is in a `within`."""
        return self._inside == threading.get_ident()

    def begin(self) -> int:
        """Wait for other threads; the number of the new turn."""
        if not self.mine:
            self._lock.acquire()
        self._holder = threading.get_ident()
        self._number += 1
        return self._number

    def holds(self, number: int) -> bool:
        """Whether turn `number` is neither over nor replaced."""
        return number == self._number and self._lock.locked()

    def end(self, number: int) -> None:
        """End turn `number`; nothing, if it is over or another one has taken its place."""
        if self.holds(number):
            self._holder = 0
            self._lock.release()

    def check(self, number: int) -> None:
        """RuntimeError where the thread of turn `number` has begun another one."""
        if number != self._number:
            raise RuntimeError("this stream is at its end: the same Llama has begun another request meanwhile")

    @contextmanager
    def within(self, number: int) -> Iterator[None]:
        """What runs in here belongs to turn `number`: a generate() inside joins it instead of taking its own."""
        self.check(number)
        before, self._inside = self._inside, threading.get_ident()
        try:
            yield
        finally:
            self._inside = before
