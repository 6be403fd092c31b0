"""What a call on a `Llama` says about the cache, and what its response says about reuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from skippy.report import ReuseReport

__all__ = ["Options", "OptionsOfThreads", "describe"]


@dataclass(frozen=True)
class Options:
    """What a call said about the cache: whether to look up, whether to keep, and for whom; and its messages, if any."""

    look_up: bool = True
    keep: bool = True
    key: str = ""
    messages: tuple[Any, ...] = ()


class OptionsOfThreads:
    """The options of the call that each thread is serving; the parent's methods in between know nothing of them."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def current(self) -> Options:
        """What the request that the calling thread is serving asked for."""
        found: Options = getattr(self._of_thread, "options", Options())
        return found

    def asked_for(self, cache_prompt: bool | None, prompt_cache_key: str | None) -> Options:
        """The options of a call; what it does not say is inherited from the call around it."""
        options = self.current
        if cache_prompt is not None:
            options = replace(options, look_up=cache_prompt, keep=cache_prompt)
        return options if prompt_cache_key is None else replace(options, key=prompt_cache_key)

    @contextmanager
    def hold(self, options: Options) -> Iterator[None]:
        """In here `options` are those of the calling thread."""
        before = self.current
        self._of_thread.options = options
        try:
            yield
        finally:
            self._of_thread.options = before


def describe(response: Any, reuse: ReuseReport | None, produced: int, *, stream: bool) -> None:
    """Add what was reused to the usage of a response, and to the last chunk of a stream, of `produced` tokens."""
    if reuse is None:
        return
    details = {"cached_tokens": reuse.cached_tokens}
    if "usage" in response:
        response["usage"]["prompt_tokens_details"] = details
    elif stream and response["choices"] and response["choices"][0]["finish_reason"] is not None:
        response["usage"] = {
            "prompt_tokens": reuse.prompt_tokens,
            "completion_tokens": produced,
            "total_tokens": reuse.prompt_tokens + produced,
            "prompt_tokens_details": details,
        }
