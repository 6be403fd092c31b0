"""Requests for asyncio: each runs in a thread of a pool, and is told to stop when its task is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
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


async def _in_thread(pool: Executor, stop: Cancellable, call: Callable[[], Any]) -> Any:
    """The result of `call` in the pool.  If the task is cancelled, the request stops, and that is waited for."""
    future = asyncio.get_running_loop().run_in_executor(pool, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.cancel()
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
    answer: Completion = await _in_thread(pool, stop, request.complete)
    return answer


async def astream(request: Request, stop: Cancellable, pool: Executor) -> AsyncIterator[Chunk]:
    """The chunks of `request`.  Closing the iterator early keeps what was evaluated, as it does without asyncio."""
    chunks = request.run()
    try:
        while (chunk := await _in_thread(pool, stop, lambda: next(chunks, None))) is not None:
            yield chunk
    finally:
        stop.cancel()
        await _in_thread(pool, stop, chunks.close)
