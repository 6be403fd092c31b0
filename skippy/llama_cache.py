"""`LlamaPrefixCache`: prefix reuse for code that only knows `llm.set_cache(...)`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llama_cpp.llama_cache import BaseLlamaCache

if TYPE_CHECKING:
    from skippy.llama import Llama

__all__ = ["LlamaPrefixCache"]

log = logging.getLogger("skippy")


class LlamaPrefixCache(BaseLlamaCache):
    """What `set_cache` takes, over the prefix cache that a `skippy.Llama` has anyway: no state is copied per request.

    `capacity_bytes` is there for the parent's signature; the budget is the CacheConfig's.  Set on a Llama that is not
    skippy's it holds nothing, says so once in the log, and every look-up is a KeyError.
    """

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        super().__init__(capacity_bytes)
        self._llama: Callable[[], Llama | None] = lambda: None
        self._warned = False

    def bind(self, llama: Llama) -> None:
        """Called by `skippy.Llama.set_cache`."""
        self._llama = weakref.ref(llama)

    @property
    def cache_size(self) -> int:
        """Bytes of cached state: cells of residents, and saved state in RAM."""
        llama = self._llama()
        return 0 if llama is None else llama.cached_bytes

    def __bool__(self) -> bool:
        """Always true: llama-cpp-python asks `if self.cache`."""
        return True

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether a prefix of these tokens could be restored."""
        llama = self._llama()
        return llama is not None and llama.restorable(key) > 0

    def __getitem__(self, key: Sequence[int]) -> Any:
        """The state of the longest stored prefix of these tokens, a LlamaState.  KeyError if none is stored."""
        llama = self._llama()
        if llama is None or not llama.restorable(key):
            raise KeyError("no prefix of these tokens is stored")
        return llama.restored_state(key)

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Does nothing: what was evaluated is kept already."""
        if self._llama() is None and not self._warned:
            self._warned = True
            log.warning("LlamaPrefixCache keeps nothing for a Llama that is not skippy.Llama")
