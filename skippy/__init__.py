"""Prefix reuse for llama.cpp in Python: a prompt prefix that was evaluated once is never evaluated again."""

from skippy.config import CacheConfig, StageConfig
from skippy.errors import (
    ConfigError,
    ContextFull,
    LanesBusy,
    Locked,
    ModelError,
    NativeError,
    Overloaded,
    PromptTooLong,
    SkippyError,
    StaleHandle,
    StateError,
)
from skippy.holding import Pin
from skippy.llama import Llama, PrefixCache
from skippy.llama_cache import LlamaPrefixCache
from skippy.report import Explanation, ReuseReport
from skippy.request import Chunk, Completion
from skippy.runtime import Runtime
from skippy.session import Session

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "Chunk",
    "Completion",
    "ConfigError",
    "ContextFull",
    "Explanation",
    "LanesBusy",
    "Llama",
    "LlamaPrefixCache",
    "Locked",
    "ModelError",
    "NativeError",
    "Overloaded",
    "Pin",
    "PrefixCache",
    "PromptTooLong",
    "ReuseReport",
    "Runtime",
    "Session",
    "SkippyError",
    "StageConfig",
    "StaleHandle",
    "StateError",
    "__version__",
]
