"""An arm that plays a workload: its process stands still while it is another one's turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from skippy.bench.arms import Arm
from skippy.bench.processes import ArmFailed, Process
from skippy.bench.script import Request

__all__ = ["Part"]


class Part:
    """One arm with its process, which `start` begins and ends.  ArmFailed from each method; then it is `over`."""

    def __init__(self, arm: Arm, start: Callable[[], AbstractContextManager[Process]]) -> None:
        self.arm = arm
        self.over = False
        self._start = start
        self._stack = ExitStack()
        self._process = self._begin()

    def _begin(self) -> Process:
        process = self._stack.enter_context(self._start())
        process.pause()
        return process

    @property
    def loaded_kib(self) -> int:
        """Its memory before the first request."""
        return self._process.loaded_kib

    def ask(self, request: Request) -> dict[str, Any]:
        """What the request took.  The process runs until it has answered."""
        with self._ends_if_it_fails():
            self._process.resume()
            answer = self._process.ask(request.prompt, request.answer, request.chat)
            self._process.pause()
            return answer

    def restart(self) -> None:
        """End the process, and begin another one."""
        with self._ends_if_it_fails():
            self._stack.close()
            self._process = self._begin()

    @contextmanager
    def _ends_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except ArmFailed:
            self.close()
            raise

    def close(self) -> None:
        """End the process.  Twice does nothing."""
        self.over = True
        self._stack.close()
