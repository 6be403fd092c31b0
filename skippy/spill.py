"""From RAM to disk: what leaves, what is used a second time, and at the end everything."""

from __future__ import annotations

import logging
from typing import Any

import xxhash

from skippy.errors import StateError
from skippy.history import Tokens
from skippy.segments import Checkpoint, Saved, Segment
from skippy.shelf import KINDS
from skippy.space import Space
from skippy.store import DiskTier

__all__ = ["Spill"]

log = logging.getLogger("skippy")


class Spill:
    """Offers to `disk` what `space` holds.  Nothing is waited for, but by `everything`."""

    def __init__(self, space: Space, disk: DiskTier) -> None:
        self.space = space
        self.disk = disk
        space.shelf.on_leaving = self.leaving

    def leaving(self, namespace: str, path: Tokens, saved: Saved) -> None:
        """Something is about to leave RAM, or of a segment what is on `path`.  Never raises.

        O(bytes) where it is not on disk yet, else O(tokens).
        """
        if saved.damaged:
            return
        end = len(path)
        try:
            if isinstance(saved, Segment):
                self.disk.offer_segment(
                    namespace,
                    path,
                    saved.start,
                    min(saved.window_from, end),
                    saved.nbytes,
                    lambda begin: self._part(saved, begin, end),
                )
            elif isinstance(saved, Checkpoint):
                self.disk.offer_checkpoint(
                    namespace, path, saved.flags, saved.nbytes, lambda: (saved.block.view, saved.checksum)
                )
        except StateError as error:
            self.disk.counts["damaged_in_memory"] += 1
            log.warning("saved state is damaged, and not written to disk: %s", error)

    def _part(self, segment: Segment, begin: int, end: int) -> tuple[Any, int]:
        """The bytes of the tokens [begin, end) of a segment, and their checksum."""
        if (begin, end) == (segment.start, segment.end):
            return segment.block.view, segment.checksum
        self.space.store.verify(segment)
        state = self.space.store.cut_out(segment, begin, end)
        return state, xxhash.xxh3_64_intdigest(state)

    def path(self, namespace: str, tokens: Tokens) -> None:
        """A path was used again, or somebody is done with it: what of it is in RAM is worth keeping.

        Of a longer segment its head, where that can be used by itself.
        """
        if not self.disk.takes:
            return
        tree, shelf = self.space.tree, self.space.shelf
        match = tree.match(namespace, tokens)
        points = {node.length for node in match.checkpoints}  # which bring the window that a head is without
        for span in match.segments:
            if span.reach == span.end or not self.space.store.shape.window or span.reach in points:
                self.leaving(namespace, tokens[: span.reach], span.payload)
        for node in match.checkpoints:
            self.leaving(namespace, tokens[: node.length], shelf.saved(node, "checkpoint"))

    def everything(self) -> None:
        """The cache is closed: residents move into RAM, and all that is there is written.  Waits for the disk."""
        if not self.disk.takes:
            return
        tree, shelf = self.space.tree, self.space.shelf
        with self.disk.patiently():
            while self.space.evict_resident("closing", weigh=False):
                pass
            for node in tree.entries("resident"):  # pinned ones
                shelf.save_path(node, self.space.sequence_of(node))
            for kind in KINDS:
                for node in tree.entries(kind):  # least recent first: what there is no room for is the oldest
                    if kind != "logits":
                        self.leaving(node.namespace, tree.tokens(node), shelf.saved(node, kind))
