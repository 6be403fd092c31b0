"""Who leaves next: of the residents in the pool, and of what is saved in RAM, what is worth least.

Looked at are the least recent `AMONG` entries of a kind, so that a choice is O(1) in their number.  That is exact for
as many as there mostly are; beyond, it is still right where it matters, because what is used again and again is not
among the least recent ones.  What others go on from stays: what is behind a gap is of no use.  Those others are among
the entries looked at, because the tree makes a path's deepest entry the least recent.

Only the end of an entry leaves where that is enough and it can be cut: up to where its use changes, or where others
go on from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from skippy._radix import Node, RadixTree
from skippy.capability import Capability
from skippy.history import Tokens
from skippy.speeds import Speeds
from skippy.usage import Usage
from skippy.worth import Prices, Use, last_part, worth

__all__ = ["AMONG", "Choice", "Leaving"]

Kind = Literal["resident", "segment", "checkpoint", "logits"]

AMONG = 64  # entries that are looked at


@dataclass(frozen=True)
class Choice:
    """Something that may leave: what `node` carries, cut to `length` tokens, or all of it if that is 0.

    It is worth `worth` seconds for each cell or byte, of which `size` come free.
    """

    node: Node
    length: int
    worth: float
    size: int


class Leaving:
    """Chooses in `tree` by `usage` and `speeds`, or, without `by_worth`, the least recent entry as a whole.

    `saves` tells whether residents leave for RAM; `bytes_per_token` is what they take there.  What is cut keeps at
    least `min_tokens`: less is never restored.
    """

    def __init__(
        self,
        tree: RadixTree,
        usage: Usage,
        speeds: Speeds,
        shape: Capability,
        *,
        by_worth: bool,
        saves: bool,
        bytes_per_token: int = 0,
        min_tokens: int = 0,
    ) -> None:
        self.tree = tree
        self.usage = usage
        self.speeds = speeds
        self.shape = shape
        self.by_worth = by_worth
        self.saves = saves
        self.bytes_per_token = bytes_per_token
        self.min_tokens = max(1, min_tokens)
        self.saving: tuple[str, Tokens] | None = None  # a path of which all that is saved stays, whatever it is worth

    @property
    def cuts(self) -> bool:
        """Whether the end of an entry may leave alone: by worth, and of plain attention."""
        return self.by_worth and self.shape.residents

    # -- the pool ---------------------------------------------------------------------------------------

    def resident(self, cells: int = 0) -> Choice | None:
        """The resident to leave, or to be cut, for `cells` cells; 0: for its sequence id.  None if all are locked."""
        if not self.by_worth:
            node = self.tree.victim("resident")
            return None if node is None else Choice(node, 0, 0.0, self.tree.exclusive_cells(node))
        prices = Prices.of(self.speeds)
        choices = [self._resident(node, cells, prices) for node in self._least_recent("resident")]
        # What frees nothing leaves at last, except for its id.
        return min(choices, key=lambda choice: (cells > 0 and choice.size == 0, choice.worth), default=None)

    def _resident(self, node: Node, cells: int, prices: Prices) -> Choice:
        free, now = self.tree.exclusive_cells(node), self.usage.now
        profile = self.usage.of_resident(self._payload(node, "resident"))
        end, first = node.length, node.length - free
        if not cells:  # the whole of it for one id
            total = 0.0
            while end > first:
                start, use = last_part(profile, first, end)
                total += worth(self._seconds_of_cells(node, start, end, prices), 1, use, now)
                end = start
            return Choice(node, 0, total, free)
        start, use = last_part(profile, first, end)
        value = worth(self._seconds_of_cells(node, start, end, prices), end - start, use, now)
        length = max(start, end - cells)
        if not self.cuts or length - first < self.min_tokens or length < self.min_tokens:
            return Choice(node, 0, value, free)
        return Choice(node, length, value, end - length)

    def _seconds_of_cells(self, node: Node, start: int, end: int, prices: Prices) -> float:
        """What it costs to bring back the tokens [start, end) of a resident, from RAM where they are or will be."""
        cells, each = end - start, self.bytes_per_token
        if self.saves:
            saved = self._saved_cells(node, start, end) if prices.saved else cells
            return prices.restoring(cells * each, cells) + (cells - saved) * each * prices.saved
        saved = self._saved_cells(node, start, end)
        return prices.restoring(saved * each, saved) + (cells - saved) * prices.token

    def _saved_cells(self, node: Node, start: int, end: int) -> int:
        if not self.tree.count("segment"):
            return 0
        return sum(max(0, min(span.reach, end) - max(span.start, start)) for span in self.tree.segments(node))

    # -- RAM --------------------------------------------------------------------------------------------

    def saved(self, kind: Kind, nbytes: int) -> Choice | None:
        """What of this kind is to leave for `nbytes` bytes; None if all are locked."""
        if kind == "checkpoint":
            return self._checkpoint()
        if kind == "logits" or not self.by_worth:  # logits are all alike
            node = self.tree.victim(kind)
            return None if node is None else Choice(node, 0, 0.0, self.tree.bytes(node, kind))
        prices = Prices.of(self.speeds)
        choices = [self._segment(node, needed, nbytes, prices) for node, needed in self._may_leave()]
        return min(choices, key=lambda choice: choice.worth, default=None)

    def _may_leave(self) -> list[tuple[Node, int]]:
        """Segments and how many leading tokens of each must stay, because others go on from there; 0 if none do."""
        nodes = self._least_recent("segment")
        needed = self._kept()
        for node in nodes:
            for span in self.tree.segments(node):
                if span.node != node:
                    needed[span.node] = max(needed.get(span.node, 0), span.reach)
        return [
            (node, needed.get(node, 0))
            for node in nodes
            if node not in needed or (self.shape.residents and needed[node] < node.length)
        ]

    def _kept(self) -> dict[Node, int]:
        """How many leading tokens of segments stay because of what is being saved."""
        return {} if self.saving is None else {span.node: span.reach for span in self.tree.match(*self.saving).segments}

    def _segment(self, node: Node, needed: int, nbytes: int, prices: Prices) -> Choice:
        segment = self._payload(node, "segment")
        first, end = max(self.tree.start(node), needed), segment.end
        start, use = last_part(segment.profile, first, end)
        each = segment.nbytes / (end - segment.start)
        value = self._worth_of_segment(node, segment, start, end, use, prices)
        length = max(start, end - math.ceil(nbytes / each))
        if not self.shape.residents or (not needed and length - first < self.min_tokens):
            return Choice(node, 0, value, segment.nbytes)
        return Choice(node, length, value, int((end - length) * each))

    def _worth_of_segment(self, node: Node, segment: Any, start: int, end: int, use: Use, prices: Prices) -> float:
        nbytes = segment.nbytes * (end - start) // (segment.end - segment.start)
        seconds = (end - start) * prices.token
        if prices.saved and self.tree.count("resident"):
            path = self.tree.tokens(node)
            if self.tree.match(node.namespace, path).resident_length >= end:
                # It is in the pool as well: all that is lost is the time of saving it once more.
                seconds = min(seconds, nbytes * prices.saved)
        return worth(seconds, nbytes, use, self.usage.now)

    def _checkpoint(self) -> Choice | None:
        """One inside an unbranched path that nobody goes on from, before those at ends and branches."""
        now = self.usage.now
        nodes = self._least_recent("checkpoint")
        if not self.by_worth:
            nodes = nodes[:8]
            node = next((node for node in nodes if self.tree.children(node) == 1), nodes[0] if nodes else None)
            return None if node is None else Choice(node, 0, 0.0, self.tree.bytes(node, "checkpoint"))
        choices: list[tuple[bool, float, Choice]] = []
        for node in nodes:
            saved = self._payload(node, "checkpoint")
            use = saved.profile[-1].use if saved.profile else Use(0, 0)
            value = self.worth_of_point(node, saved.nbytes, use)
            inner = self.tree.children(node) == 1 and not use.expected(now)
            choices.append((not inner, value, Choice(node, 0, 0.0 if inner else value, saved.nbytes)))
        return min(choices, key=lambda each: each[:2])[2] if choices else None

    def worth_of_point(self, node: Node, nbytes: int, use: Use) -> float:
        """Of the state of `node`: what lies behind the checkpoint before it would have to be evaluated.  O(depth)."""
        above = self.tree.parent(node)
        while above is not None and self.tree.get(above, "checkpoint") is None:
            above = self.tree.parent(above)
        tokens = node.length - (above.length if above is not None else 0)
        return worth(tokens * Prices.of(self.speeds).token, nbytes, use, self.usage.now)

    def worth_of_tokens(self, tokens: int, nbytes: int, use: Use) -> float:
        """Of `tokens` that are about to be saved in `nbytes`."""
        return worth(tokens * Prices.of(self.speeds).token, nbytes, use, self.usage.now)

    def bytes_below(self, limit: float) -> float:
        """How much of RAM is worth at most `limit` a byte and not locked; infinite where not all was looked at."""
        if not self.by_worth or any(self.tree.count(kind) > AMONG for kind in ("segment", "checkpoint")):
            return float("inf")
        found = float(self.tree.bytes_of("logits"))
        kept, prices = self._kept(), Prices.of(self.speeds)
        for node in self._least_recent("segment"):
            segment = self._payload(node, "segment")
            for start, end, use in self._parts(segment, max(self.tree.start(node), kept.get(node, 0))):
                if self._worth_of_segment(node, segment, start, end, use, prices) > limit:
                    break
                found += segment.nbytes * (end - start) / (segment.end - segment.start)
        for node in self._least_recent("checkpoint"):
            saved = self._payload(node, "checkpoint")
            use = saved.profile[-1].use if saved.profile else Use(0, 0)
            if self.tree.children(node) == 1 or self.worth_of_point(node, saved.nbytes, use) <= limit:
                found += saved.nbytes
        return found

    @staticmethod
    def _parts(segment: Any, first: int) -> Iterator[tuple[int, int, Use]]:
        """Of what is behind `first` in a segment, the last one first: from where to where, and how it is used."""
        end = segment.end
        while end > first:
            start, use = last_part(segment.profile, first, end)
            yield start, end, use
            end = start

    def _payload(self, node: Node, kind: Kind) -> Any:
        return self.tree.get(node, kind)

    def _least_recent(self, kind: Kind) -> list[Node]:
        """At most `AMONG` entries that no lock protects."""
        unlocked = self.tree.count(kind) - self.tree.stats()[kind]["locked"]
        return self.tree.entries(kind)[: min(unlocked, AMONG)]
