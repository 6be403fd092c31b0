"""Who may use a `Llama` when several threads share it: one request at a time, and within it one step at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Steps", "Turns"]


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


class Steps:
    """One use of the cache and of llama.cpp's context at a time: `with steps:`, which nests in one thread.

    A request takes a step for each token, so that who only looks (stats, explain, check) waits for one of them and
    not for the answer; threads are let in in the order in which they came.  ValueError once it is closed,
    RuntimeError from within an event: the cache is in the middle of something then.
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()  # held while waiting for the lock: who has just left it comes after
        self._lock = threading.Lock()
        self._here = threading.local()
        self._late: list[Callable[[], None]] = []
        self._closed = False

    @property
    def inside(self) -> bool:
        """Whether the calling thread is in a step, or waits for one."""
        return getattr(self._here, "depth", 0) > 0

    def check(self) -> None:
        """RuntimeError from within an event."""
        if getattr(self._here, "in_event", False):
            raise RuntimeError("this Llama is being used from within one of its own calls (an on_event callback)")

    def __enter__(self) -> None:
        self.check()
        here = self._here
        depth = getattr(here, "depth", 0)
        # Noted before it is true: the garbage collector may run in between, close a stream, and come by here.
        here.depth = depth + 1
        if depth == 0:
            try:
                with self._gate:
                    self._lock.acquire()
            except BaseException:
                here.depth = 0
                raise
        if self._closed:
            self.__exit__()
            raise ValueError("this Llama is closed")

    def __exit__(self, *exc: object) -> None:
        here = self._here
        if here.depth > 1:
            here.depth -= 1
            return
        self._lock.release()
        here.depth = 0
        while self._late:
            self._late.pop()()

    def later(self, act: Callable[[], None]) -> None:
        """Do `act` at the end of the step that the calling thread is in."""
        self._late.append(act)

    def event(self, callback: Callable[[str, dict[str, Any]], None]) -> Callable[[str, dict[str, Any]], None]:
        """`callback`, during which no step can be taken in the same thread."""

        def call(name: str, details: dict[str, Any]) -> None:
            self._here.in_event = True
            try:
                callback(name, details)
            finally:
                self._here.in_event = False

        return call

    def close(self) -> None:
        """No step is taken from now on.  Called within one."""
        self._closed = True
