"""Work that nobody waits for: a bounded queue, and one thread that ends when it has nothing to do for a while."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

__all__ = ["Job", "Writer"]

log = logging.getLogger("skippy")

_PAUSE = 0.001  # seconds between two pieces of a job: threads that compute share the processors with this one
_IDLE = 2.0  # seconds after which the thread ends, so that it does not keep alive what nobody uses


@dataclass(eq=False)
class Job:
    """Something to be done, which holds `nbytes` of memory until then; `drop` is called instead if it is not done."""

    run: Callable[[Job], None]
    nbytes: int = 0
    namespace: str | None = None
    drop: Callable[[], None] = lambda: None
    cancelled: bool = False  # `Writer.between` tells `run`


class Writer:
    """Runs jobs in order, in the background; `work` guards it, and is never held while a job runs.

    `most` is how many bytes may wait, but for one job that is larger by itself.
    """

    def __init__(self, guard: threading.RLock, most: int) -> None:
        self.work = threading.Condition(guard)
        self.most = most
        self.queued = 0
        self.patient = False
        self._awaited = 0  # by how many
        self._jobs: deque[Job] = deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def takes(self, nbytes: int) -> bool:
        """Whether a job of so many bytes has room; while `patient`, it waits until it has."""

        def room() -> bool:
            return self._stopping or not self.queued or self.queued + nbytes <= self.most

        with self.work:
            if self.patient:
                with self._awaiting():
                    while not room():
                        self._start()
                        self.work.wait(0.5)
            return room() and not self._stopping

    def put(self, job: Job) -> None:
        """Queue a job.  Where no thread can be started (the interpreter is going down), it is done at once."""
        with self.work:
            if self._stopping:
                job.drop()
                return
            self._jobs.append(job)
            self.queued += job.nbytes
            started = self._start()
            self.work.notify_all()
        if not started:
            while self._next():
                pass

    def _start(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return True
        thread = threading.Thread(target=self._run, name="skippy-disk", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        if sys.platform == "linux":  # where each thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while self._next(_IDLE):
            pass

    def _next(self, patience: float | None = None) -> bool:
        """Do one job; False if there is none within `patience` seconds."""
        with self.work:
            if patience is not None:
                self.work.wait_for(lambda: self._jobs or self._stopping, patience)
            if not self._jobs:
                if patience is not None:
                    self._thread = None
                return False
            job = self._running = self._jobs.popleft()
        try:
            job.run(job)
        except Exception:  # the thread must live, or whoever waits for it waits forever
            log.exception("a job of the disk tier failed")
            job.drop()
        finally:
            with self.work:
                self.queued -= job.nbytes
                self._running = None
                self.work.notify_all()
        return True

    def between(self, job: Job) -> bool:
        """To be called between short pieces of a job; whether it is not wanted any more.

        Whoever decodes meanwhile loses a piece's time at once, not a job's: the thread pauses a little, unless somebody
        waits for it or half of what may wait does.
        """
        hurry = self._awaited or self._stopping or 2 * self.queued > self.most
        if not hurry and not job.cancelled and threading.current_thread() is self._thread:
            time.sleep(_PAUSE)
        return job.cancelled

    @contextmanager
    def _awaiting(self) -> Iterator[None]:
        """While somebody waits for what is being done.  With `work` held."""
        self._awaited += 1
        try:
            yield
        finally:
            self._awaited -= 1

    def discard(self, choose: Callable[[Job], bool]) -> None:
        """Drop the jobs that `choose` names; one that is running has ended when this returns."""
        with self.work:
            for job in [job for job in self._jobs if choose(job)]:
                self._jobs.remove(job)
                self.queued -= job.nbytes
                job.drop()
            running = self._running
            if running is not None and choose(running):
                running.cancelled = True
                while self._running is running:
                    self.work.wait(0.5)
            self.work.notify_all()

    def flush(self, progress: Callable[[int], None] | None = None) -> None:
        """Wait until everything is done; `progress` gets the bytes that are left, twice a second."""
        with self.work, self._awaiting():
            while self._jobs or self._running is not None:
                if not self._start() and self._running is None:
                    break
                if progress is not None:
                    progress(self.queued)
                self.work.wait(0.5)
        while self._next():  # only where no thread could be started
            pass

    def stop(self) -> None:
        """Drop what waits, and let what is running end soon.  Nothing is taken any more."""
        with self.work:
            self._stopping = True
        self.discard(lambda job: True)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
