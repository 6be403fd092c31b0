"""Every error that skippy raises on purpose."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "ContextFull",
    "LanesBusy",
    "Locked",
    "ModelError",
    "NativeError",
    "Overloaded",
    "PromptTooLong",
    "SkippyError",
    "StaleHandle",
    "StateError",
]


class SkippyError(Exception):
    """Base of all of skippy's errors."""


class ConfigError(SkippyError, ValueError):
    """A setting is not allowed: the message names the field, the value and what is allowed."""


class StaleHandle(SkippyError, LookupError):
    """A handle of the tree whose node or lock is gone; nothing was changed."""


class Locked(SkippyError, RuntimeError):
    """What was to be removed from the tree is in use by a request; nothing was changed."""


class ModelError(SkippyError, ValueError):
    """A model, adapter or context could not be loaded, or is of a kind that cannot generate."""


class NativeError(SkippyError, RuntimeError):
    """A call of llama.cpp failed.  `code` is what it returned, where it returns one."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class StateError(NativeError):
    """Saved state could not be written or read, or is damaged."""


class PromptTooLong(SkippyError, ValueError):
    """A prompt can never fit into the context: `needed` and `available` are counted in tokens."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            f"the prompt has {needed} tokens, but the context holds {available}: "
            f"shorten the prompt or load the model with n_ctx of at least {needed}"
        )
        self.needed = needed
        self.available = available


class ContextFull(SkippyError, RuntimeError):
    """No cell of the pool can be freed for a running request: everything in it is in use."""


class LanesBusy(SkippyError, RuntimeError):
    """All lanes are held by streams that the calling thread itself keeps open; waiting would never end."""


class Overloaded(SkippyError, RuntimeError):
    """Too many requests wait already.  `retry_after` is a guess, in seconds, of when there will be room; or None."""

    def __init__(self, waiting: int, retry_after: float | None) -> None:
        when = "" if retry_after is None else f"; try again in {retry_after:.1f} s"
        super().__init__(f"{waiting} requests wait for a lane already{when}")
        self.waiting = waiting
        self.retry_after = retry_after
