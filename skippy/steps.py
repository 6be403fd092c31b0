"""One use of a cache and its context at a time, by whoever comes, in the order in which they come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Steps"]


class Steps:
    """One use of the cache and of llama.cpp's context at a time: `with steps:`, which nests in one thread.

    A request takes a step for each token, so that who only looks (stats, explain, check) waits for one of them and
    not for the answer; threads are let in in the order in which they came.  ValueError once it is closed,
    RuntimeError from within an event: the cache is in the middle of something then.  `owner` names in messages what it
    belongs to.
    """

    def __init__(self, owner: str = "Llama") -> None:
        self._owner = owner
        self._gate = threading.Lock()  # held while waiting for the lock: who has just left it comes after
        self._lock = threading.Lock()
        self._here = threading.local()
        self._late: list[Callable[[], None]] = []
        self._closed = False

    @property
    def inside(self) -> bool:
        """Whether the calling thread is in a step, or waits for one."""
        return getattr(self._here, "depth", 0) > 0

    @property
    def closed(self) -> bool:
        """Whether no step can be taken any more."""
        return self._closed

    def check(self) -> None:
        """RuntimeError from within an event."""
        if getattr(self._here, "in_event", False):
            raise RuntimeError(
                f"this {self._owner} is being used from within one of its own calls (an on_event callback)"
            )

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
            raise ValueError(f"this {self._owner} is closed")

    def __exit__(self, *exc: object) -> None:
        here = self._here
        if here.depth > 1:
            here.depth -= 1
            return
        try:
            self._lock.release()
        finally:  # Ctrl-C comes as soon as it is free
            here.depth = 0
        while self._late:
            try:
                act = self._late.pop()
            except IndexError:  # another thread that leaves a step has just taken the last one
                break
            act()

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
