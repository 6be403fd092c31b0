"""At which token prompts have left the stored paths, so that a volatile one can be named."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["PartingHistory", "Tokens", "Tombstones", "common_length", "goes_on_alike"]

Tokens = npt.NDArray[np.int32]

_LEAST_RUN = 4  # tokens; fewer in common are chance
_REMEMBERED = 8  # different prompts per index


def common_length(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two paths share.  O(n).

    >>> common_length(np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 9], np.int32))
    2
    """
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def goes_on_alike(stored: Tokens, prompt: Tokens, run: int = 16) -> bool:
    """Whether two tails that differ at first hold a common run of `run` tokens (or of the shorter
    one's rest, if that has at least four).

    That is what tells a time of day in a prompt, after which the text goes on as before, from another
    conversation over the same system prompt.  O(n) for tails of n tokens.

    >>> a = np.arange(100, dtype=np.int32)
    >>> b = a.copy(); b[0] = 999
    >>> goes_on_alike(a, b), goes_on_alike(a, b + 1000)
    (True, False)
    """
    run = min(run, len(stored) - 1, len(prompt) - 1)
    if run < _LEAST_RUN:
        return False
    width = run * stored.itemsize
    raw = stored.tobytes()
    grams = {raw[i : i + width] for i in range(0, len(raw) - width + 1, stored.itemsize)}
    raw = prompt.tobytes()
    return any(raw[i : i + width] in grams for i in range(0, len(raw) - width + 1, prompt.itemsize))


class PartingHistory:
    """Counts, per namespace and index, the different prompts that parted there and then went on alike.  Bounded."""

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._partings: OrderedDict[tuple[str, int], set[int]] = OrderedDict()

    def note(self, namespace: str, index: int, stored: Tokens, prompt: Tokens) -> None:
        """A prompt has left a stored path at `index`; both tails begin there.  The same prompt again counts once."""
        if not goes_on_alike(stored, prompt):
            return
        key = (namespace, index)
        seen = self._partings.pop(key, set())
        if len(seen) < _REMEMBERED:
            seen.add(hash(prompt.tobytes()))
        self._partings[key] = seen
        if len(self._partings) > self._capacity:
            self._partings.popitem(last=False)

    def prompts_parted(self, namespace: str, index: int) -> int:
        """How many prompts differ from each other at `index`, the one that was stored first among them."""
        partings = len(self._partings.get((namespace, index), ()))
        return partings + 1 if partings else 0

    def volatile_index(self, namespace: str, matched: int, least: int = 3) -> int | None:
        """The first index up to `matched` at which at least `least` prompts have parted, or None."""
        found = [
            index
            for name, index in self._partings
            if name == namespace and index <= matched and self.prompts_parted(name, index) >= least
        ]
        return min(found, default=None)


class Tombstones:
    """Remembers paths whose state was evicted, by digest; at most `capacity` of them, the oldest go."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._graves: OrderedDict[tuple[str, int, bytes], None] = OrderedDict()

    def add(self, namespace: str, tokens: Tokens) -> None:
        """The state of this path is gone.  O(tokens)."""
        key = (namespace, len(tokens), xxhash.xxh3_128_digest(tokens.tobytes()))
        self._graves[key] = self._graves.pop(key, None)
        if len(self._graves) > self._capacity:
            self._graves.popitem(last=False)

    def longest(self, namespace: str, tokens: Tokens) -> int:
        """How many leading tokens of a prompt had state that was evicted; 0 if none.  O(tokens and graves)."""
        lengths = sorted({n for name, n, _ in self._graves if name == namespace and n <= len(tokens)})
        state, at, found = xxhash.xxh3_128(), 0, 0
        for n in lengths:
            state.update(tokens[at:n].tobytes())
            at = n
            if (namespace, n, state.digest()) in self._graves:
                found = n
        return found
