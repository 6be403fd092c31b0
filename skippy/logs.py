"""llama.cpp's own log, sent to the logger `skippy.llama`; quiet unless that logger is switched on."""

from __future__ import annotations

import ctypes
import logging

from llama_cpp import llama_cpp as lib

__all__ = ["route_llama_log"]

log = logging.getLogger("skippy.llama")

# ggml's levels.  5 continues the line before it, so it takes that line's level.
_LEVELS = {1: logging.DEBUG, 2: logging.WARNING, 3: logging.ERROR, 4: logging.DEBUG}
_CONTINUE = 5


class _LineJoiner:
    """Collects the pieces of a line, which llama.cpp may print in several calls."""

    def __init__(self) -> None:
        self.level = logging.DEBUG
        self.pending = ""

    def add(self, level: int, text: bytes, _: object) -> None:
        if level != _CONTINUE:
            self.level = _LEVELS.get(level, logging.DEBUG)
        if not log.isEnabledFor(self.level):
            self.pending = ""
            return
        *lines, self.pending = (self.pending + text.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if line.strip():
                log.log(self.level, "%s", line)


# The callback must live as long as the library does; llama.cpp has one log per process.
_joiner = _LineJoiner()
_callback = lib.llama_log_callback(_joiner.add)

if log.level == logging.NOTSET:
    log.setLevel(logging.CRITICAL)


def route_llama_log() -> None:
    """Send llama.cpp's log to the logger "skippy.llama"; setting that logger's level to DEBUG shows it."""
    lib.llama_log_set(_callback, ctypes.c_void_p(0))
