"""What stays in the pool and what leaves it: the ledger of cells, the residents, and the order of leaving.

Everything has a hard cap.  Room is made before it is used; what leaves the pool goes into RAM; an entry
leaves the tree only after its native part is gone, and what failed natively is not in the tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from skippy._radix import Node, RadixTree
from skippy.errors import ContextFull, Locked, NativeError
from skippy.leaving import Leaving
from skippy.pool import Pool
from skippy.segments import RamStore
from skippy.shelf import Emit, Shelf
from skippy.speeds import Speeds
from skippy.usage import Usage
from skippy.worth import clip

__all__ = ["Space"]

log = logging.getLogger("skippy")


class Space:
    """Owns what the tree points at: residents in `pool`, and on the `shelf` what is saved in `store`.

    `lane_cells()` tells how many cells running requests hold that the tree does not know of, `held_cells()` how
    many each of them shares with residents, `promised_cells()` how many more their prompts will take.  Of paths that
    have left, `remembered` tokens are.
    """

    def __init__(
        self,
        tree: RadixTree,
        pool: Pool,
        store: RamStore,
        *,
        lane_cells: Callable[[], int],
        held_cells: Callable[[], Iterable[int]] = tuple,
        promised_cells: Callable[[], int] = lambda: 0,
        keep_saved: bool,
        emit: Emit,
        speeds: Speeds | None = None,
        bytes_per_cell: int = 0,
        min_tokens: int = 0,
        by_worth: bool = True,
        remembered: int = 1 << 19,
    ) -> None:
        self.tree = tree
        self.pool = pool
        self.store = store
        self.speeds = Speeds() if speeds is None else speeds
        self.usage = Usage(tree, remembered)
        self.leaving = Leaving(
            tree,
            self.usage,
            self.speeds,
            store.shape,
            by_worth=by_worth,
            saves=keep_saved,
            bytes_per_token=bytes_per_cell,
            min_tokens=min_tokens,
        )
        self.shelf = Shelf(
            tree,
            pool,
            store,
            keep_saved=keep_saved,
            emit=emit,
            speeds=self.speeds,
            usage=self.usage,
            leaving=self.leaving,
        )
        self.evictions, self.failures = self.shelf.evictions, self.shelf.failures
        self._lane_cells = lane_cells
        self._held_cells = held_cells
        self._promised_cells = promised_cells
        self._emit = emit
        self.bytes_per_cell = bytes_per_cell

    @property
    def cells_in_use(self) -> int:
        """Cells of the pool that hold something: of residents (shared ones once), of lanes, and lost ones."""
        return self.tree.cells + self._lane_cells() + self.pool.lost_cells

    def sequence_of(self, node: Node) -> int:
        """The sequence id of the resident at `node`.  KeyError if it has none."""
        seq = self.tree.get(node, "resident")
        if seq is None:
            raise KeyError(f"{node!r} has no resident")
        return int(seq)

    def make_cells(self, needed: int) -> None:
        """Let unlocked residents leave until `needed` more cells are free.  ContextFull if that is not enough."""
        spoken_for = needed + self._promised_cells()
        if self.pool.set_aside and self.cells_in_use + spoken_for > self.pool.n_cells:
            self.pool.recover()
        at_most = self.tree.cells - max(self._held_cells(), default=0)  # could leave, if nothing else were locked
        hopeless = self.cells_in_use + spoken_for - at_most > self.pool.n_cells
        while (over := self.cells_in_use + spoken_for - self.pool.n_cells) > 0:
            if hopeless or not self.evict_resident("cells", over):
                raise ContextFull(
                    f"{needed} cells are needed, {self.pool.n_cells - self.cells_in_use} of {self.pool.n_cells} are "
                    f"free, and everything else is in use"
                )

    def evict_resident(self, reason: str, cells: int = 0, *, weigh: bool = True) -> bool:
        """Let an unlocked resident leave the pool, or for `cells` its end, for RAM where it fits; False if none can.

        Without `weigh` it goes into RAM whatever has to leave there.
        """
        choice = self.leaving.resident(cells)
        if choice is None:
            return False
        self._leave(choice.node, reason, choice.length, weigh=weigh)
        return True

    def _leave(self, node: Node, reason: str, length: int = 0, *, weigh: bool = True) -> None:
        """Let what is resident at `node` leave from `length` on."""
        if not weigh or self._worth_saving(node):
            self.shelf.save_path(node, self.sequence_of(node), weigh=weigh)
        path = self.tree.tokens(node)
        profile = self.usage.of_resident(self.sequence_of(node))
        if length:
            self._shorten(node, length)
        else:
            self.drop_resident(node)
        self.shelf.bury(node.namespace, path, profile)
        self.evictions[f"resident:{reason}"] += 1
        self._emit("evict", tier="resident", reason=reason, tokens=node.length - length)

    def _worth_saving(self, node: Node) -> bool:
        """Whether coming back from RAM would be faster than evaluating what of `node` is not there yet."""
        unsaved = self._unsaved_cells(node)
        if not unsaved:
            return False
        if not self.leaving.by_worth or self.speeds.worth_restoring(unsaved * self.bytes_per_cell, unsaved):
            return True
        self.speeds.declined()
        return False

    def _shorten(self, node: Node, length: int) -> None:
        """Keep the first `length` tokens of a resident; where they cannot be kept, none are."""
        path = self.tree.tokens(node)[:length]
        seq = self.tree.take(node, "resident")
        profile = self.usage.resident_left(seq)
        try:
            self.pool.trim(seq, length)
            head = self.tree.insert(node.namespace, path)
            self.tree.put(head, "resident", seq)
        except BaseException as error:
            self.failures["drop"] += 1
            with suppress(NativeError):  # set aside and counted by the pool
                self.pool.give_back(seq)
            if not isinstance(error, NativeError):
                raise
            return
        self.usage.set_resident(seq, clip(profile, length))

    def relieve(self, tokens: int) -> None:
        """Let residents leave for RAM that would cost more while `tokens` are evaluated than coming back will.

        Nothing that is saved leaves for it, and locked ones stay.  O(residents and their paths).
        """
        if not self.shelf.keep_saved:
            return
        unlocked = self.tree.count("resident") - self.tree.stats()["resident"]["locked"]
        for node in self.tree.entries("resident")[:unlocked]:  # locked ones are last
            if self._better_saved(self.tree.exclusive_cells(node), self._unsaved_cells(node), tokens):
                self._leave(node, "price")

    def save_ahead(self, node: Node, tokens: int) -> None:
        """Save what is resident at `node` now if it had better not stay while `tokens` come: then it can leave at once.

        That is for after an answer, when nobody waits.  O(bytes saved).
        """
        unsaved = self._unsaved_cells(node)
        if unsaved and self._better_saved(unsaved, unsaved, tokens):
            self.shelf.save_path(node, self.sequence_of(node), weigh=True)

    def _unsaved_cells(self, node: Node) -> int:
        return sum(end - start for start, end in self.shelf.unsaved(node))

    def _better_saved(self, cells: int, unsaved: int, tokens: int) -> bool:
        """Whether `cells`, of which `unsaved` are not in RAM, had better be there, and fit, while `tokens` come."""
        arena, each = self.store.arena, self.bytes_per_cell
        return self.shelf.keep_saved and (
            unsaved * each <= arena.capacity - arena.used
            and self.speeds.staying_costs_more(cells, unsaved * each, cells * each, tokens, each)
        )

    def drop_resident(self, node: Node) -> None:
        """Forget a resident and free its cells.  If they cannot be freed, its id is set aside.

        Locked where a request uses it.  The entry goes first: were this interrupted, an id would be lost, and never
        be handed out while the tree still points at it.
        """
        path = self.tree.tokens(node)
        seq = self.tree.take(node, "resident")
        self.usage.hand_over(node.namespace, path, self.usage.resident_left(seq))
        try:
            self.pool.give_back(seq)
        except NativeError:  # the pool has set it aside and counts its cells as lost
            self.failures["drop"] += 1

    def drop_vanished(self) -> int:
        """Drop residents whose cells somebody else has removed (a call that cleared the memory); how many."""
        dropped = 0
        for node in self.tree.entries("resident"):
            if self.pool.length(self.sequence_of(node)) != node.length:
                with suppress(Locked):
                    self.drop_resident(node)
                    dropped += 1
        if dropped:
            self.evictions["resident:vanished"] += dropped
        return dropped
