"""Requests for asyncio: each runs in a thread of a pool, and is told to stop when its task is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

from skippy.request import Chunk, Completion, Request

__all__ = ["Cancellable", "acomplete", "astream"]


class Cancellable:
    """A `should_stop` that also says yes once `cancel` was called."""

    def __init__(self, also: Callable[[], bool] | None = None) -> None:
        self._cancelled = threading.Event()
        self._also = also

    def __call__(self) -> bool:
        """Whether the request is to stop."""
        return self._cancelled.is_set() or (self._also is not None and self._also())

    def cancel(self) -> None:
        """Let the request stop at its next token, or in the middle of its prompt."""
        self._cancelled.set()


async def _in_thread(pool: Executor, request: Request, stop: Cancellable, call: Callable[[], Any]) -> Any:
    """The result of `call` in the pool.  If the task is cancelled, the request stops, and that is waited for.

    ValueError where the pool takes nothing any more, because the Runtime is closed.
    """
    request.task = asyncio.current_task()  # the threads of the pool belong to nobody
    try:
        future = asyncio.get_running_loop().run_in_executor(pool, call)
    except RuntimeError as error:
        raise ValueError("this Runtime is closed") from error
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.cancel()
        request.cancel()
        while not future.done():
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError:
                continue
            except Exception:  # noqa: BLE001 - nobody waits for its answer any more
                break
        raise


async def acomplete(request: Request, stop: Cancellable, pool: Executor) -> Completion:
    """The answer of `request`, whose `should_stop` is `stop`."""
    answer: Completion = await _in_thread(pool, request, stop, request.complete)
    return answer


async def astream(request: Request, stop: Cancellable, pool: Executor) -> AsyncIterator[Chunk]:
    """The chunks of `request`.  Closing the iterator early keeps what was evaluated, as it does without asyncio."""
    chunks = request.run()
    try:
        while (chunk := await _in_thread(pool, request, stop, lambda: next(chunks, None))) is not None:
            yield chunk
    finally:
        stop.cancel()
        with suppress(ValueError):  # it is closed, and there is nothing left to keep
            await _in_thread(pool, request, stop, chunks.close)
