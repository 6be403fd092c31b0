"""What a caller wants to keep, or to be rid of: pins, and forgetting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from skippy._radix import Lock, Node
from skippy.cache import Cache
from skippy.errors import Locked
from skippy.history import Tokens
from skippy.shelf import ALL_KINDS, Kind
from skippy.steps import Steps

__all__ = ["Holding", "Pin"]


class Pin:
    """A prompt whose state does not leave while this lives: close it, or use it as a context manager.

    With `ttl` it ends by itself after so many seconds.  `tokens` is how long the prompt is.
    """

    def __init__(self, tokens: int, ttl: float | None, release: Callable[[Pin], None]) -> None:
        self.tokens = tokens
        self.expires = None if ttl is None else time.monotonic() + ttl
        self._release = release

    def close(self) -> None:
        """Let the prompt leave again when its room is needed.  Closing twice does nothing."""
        self._release(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Holding:
    """The pins of one cache.  `steps` is held around every use of it; `freed` is called when something may leave."""

    def __init__(self, cache: Cache, steps: Steps, freed: Callable[[], object]) -> None:
        self._cache = cache
        self._steps = steps
        self._freed = freed
        self._locks: dict[Pin, Lock] = {}
        self._paths: dict[Pin, tuple[str, Tokens]] = {}

    def __len__(self) -> int:
        """How many pins there are, those that have run out not counted."""
        self.expire()
        return len(self._locks)

    def pin(self, namespace: str, tokens: Tokens, ttl: float | None) -> Pin:
        """Protect the stored path of `tokens`; ValueError where it is not stored.  O(tokens, and bytes not yet saved).

        Where there is RAM for saved state it is saved there, and may leave the pool; else its cells stay.
        """
        cache = self._cache
        with self._steps:
            match = cache.tree.match(namespace, tokens)
            held = max(match.resident_length, match.segment_length)
            if not cache.capability.has_attention and match.checkpoint is not None:
                held = match.checkpoint.length
            if held < len(tokens):
                raise ValueError(f"of a prompt of {len(tokens)} tokens {held} are stored: there is no room for more")
            lock = self._protect(namespace, tokens, match.resident, match.segment_length)
            pin = Pin(len(tokens), ttl, self._release)
            self._locks[pin] = lock
            self._paths[pin] = (namespace, tokens)
            return pin

    def _protect(self, namespace: str, tokens: Tokens, resident: Node | None, saved: int) -> Lock:
        tree, space = self._cache.tree, self._cache.space
        if resident is not None and saved < len(tokens):
            if not space.shelf.keep_saved:
                return tree.lock(resident)
            space.shelf.save_path(tree.insert(namespace, tokens), space.sequence_of(resident))
            if tree.match(namespace, tokens).segment_length < len(tokens):  # no room in RAM
                return tree.lock(resident)
        return tree.lock(tree.insert(namespace, tokens))

    def _release(self, pin: Pin) -> None:
        if self._steps.inside:
            self._steps.later(lambda: self._release(pin))
        elif not self._steps.closed:
            try:
                with self._steps:
                    self._unlock(pin)
            except ValueError:
                if not self._steps.closed:  # it was closed meanwhile
                    raise
            self._freed()

    def _unlock(self, pin: Pin) -> None:
        lock = self._locks.pop(pin, None)
        if lock is not None:
            self._cache.write_out(*self._paths.pop(pin))  # before it may leave RAM
            self._cache.tree.unlock(lock)

    def expire(self) -> None:
        """Let go of the pins whose time is over.  Called within a step.  O(pins)."""
        now = time.monotonic()
        for pin in [pin for pin in self._locks if pin.expires is not None and pin.expires <= now]:
            self._unlock(pin)
            self._freed()

    def forget(self, namespace: str, tokens: Tokens) -> int:
        """Drop all that is stored of paths that begin with `tokens`, and of their head what nobody else shares.

        How many entries went.  Pinned or running ones stay.  O(entries of the namespace and their tokens).
        """
        cache, dropped = self._cache, 0
        with self._steps:
            tree = cache.tree
            for kind in ALL_KINDS:
                for node in reversed(tree.entries(kind, namespace)):
                    path = tree.tokens(node) if node.length >= len(tokens) else None
                    if path is not None and np.array_equal(path[: len(tokens)], tokens):
                        dropped += self._drop(node, kind)
            match = tree.match(namespace, tokens)
            below: list[tuple[Node, Kind]] = [(span.node, "segment") for span in match.segments]
            below += [(node, "checkpoint") for node in match.checkpoints]
            for node, saved in sorted(below, key=lambda each: -each[0].length):
                if node.alive and tree.children(node) == 0:
                    dropped += self._drop(node, saved)
        self._freed()
        return dropped

    def _drop(self, node: Node, kind: Literal["resident"] | Kind) -> int:
        cache = self._cache
        try:
            if kind == "resident":
                cache.space.drop_resident(node)
            else:
                cache.shelf.drop(node, kind, "forgotten")
        except Locked:
            return 0
        return 1
