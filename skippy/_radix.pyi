"""The token radix tree: which prefixes are held, and as what.

Tokens are given as a C-contiguous buffer of int32 (NumPy, `array.array("i")`, ctypes), which is read where it lies, or
as a list or another sequence of ints; a token is an int of 0 .. 2**31 - 1.  Anything else raises TypeError (a wrong
type or dtype) or ValueError (a negative or too large token, a buffer that is not contiguous) and names the value.
Calls that only look (`match`, `branch_point`, `following`) read no further than the first token that differs from what
is stored, and so raise for no value behind it.

A `Node` is a handle.  A call with one whose node has gone raises StaleHandle, with one of another tree ValueError, and
changes nothing.  An unknown kind raises ValueError.  Lengths, starts and ends are counted in tokens from the root.

A node stays as long as it has a payload, is protected by a lock, has two children, or was returned by `insert` and
neither locked, given a payload, nor discarded since.  One that nothing keeps is removed if it is a leaf, and merged
into its only child otherwise, unless a segment begins or ends there; the child's handles stay valid.

One thread at a time: the caller holds a lock per context, and no payload's finaliser calls the tree.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

__all__ = ["KINDS", "Lock", "Match", "Node", "RadixTree", "Span"]

Kind: TypeAlias = Literal["resident", "segment", "checkpoint", "logits"]
Tokens: TypeAlias = npt.NDArray[np.int32] | Buffer | Sequence[int]

KINDS: Final[tuple[Kind, ...]]

class KindStats(TypedDict):
    count: int
    bytes: int
    locked: int

class TreeStats(TypedDict):
    nodes: int
    namespaces: int
    tokens: int
    buffer_bytes: int
    index_bytes: int
    cells: int
    locks: int
    clock: int
    resident: KindStats
    segment: KindStats
    checkpoint: KindStats
    logits: KindStats

@final
class Node:
    """A place in the tree: a path of `length` tokens in `namespace`.

    Equal to every handle of the same place, and hashable.  `length` and `namespace` outlive the node.
    """

    @property
    def length(self) -> int: ...
    @property
    def namespace(self) -> str: ...
    @property
    def alive(self) -> bool:
        """Whether the tree still has this node.  O(1)."""
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Lock:
    """The protection of the first `length` tokens of the path of `node`, until `RadixTree.unlock` takes it back."""

    @property
    def node(self) -> Node: ...
    @property
    def length(self) -> int: ...
    @property
    def cells(self) -> bool: ...
    @property
    def alive(self) -> bool:
        """Whether it still protects.  O(1)."""

@final
class Span:
    """A segment on a path: saved state of the tokens [start, end), carried by `node`, which ends at `end`.

    `reach`: the segment holds the tokens [start, reach) of the path that was asked for.  Beyond it the path
    ends, or goes another way than the segment does.
    """

    def __init__(self, node: Node, start: int, end: int, reach: int, payload: Any) -> None: ...
    @property
    def node(self) -> Node: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def reach(self) -> int: ...
    @property
    def payload(self) -> Any: ...
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Match:
    """What the tree holds of a prompt, at the moment of the match: it does not follow later changes.

    matched          tokens in common with what is stored; may end inside an edge
    resident_length  the largest number of leading tokens, at most `matched`, that a resident covers; 0 if none does
    segment_length   how far segments cover the prompt from token 0 on without a gap, at most `matched`
    segments         every segment that covers an edge of the matched path, in order; the last may end beyond `matched`,
                     and its node may lie off the path, where the path was split
    steps            edges that the look-up compared
    """

    @property
    def matched(self) -> int: ...
    @property
    def resident_length(self) -> int: ...
    @property
    def segment_length(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def segments(self) -> tuple[Span, ...]: ...
    @property
    def resident(self) -> Node | None:
        """A node whose resident covers `resident_length` tokens of the prompt; it may be longer, or None.  O(1)."""
    @property
    def checkpoint(self) -> Node | None:
        """The deepest node on the fully matched path that has a checkpoint, or None.  O(1)."""
    @property
    def checkpoints(self) -> tuple[Node, ...]:
        """All nodes on the fully matched path that have a checkpoint, shallow to deep.  O(checkpoints)."""
    @property
    def logits(self) -> Node | None:
        """The node that ends exactly where the prompt does and has logits, or None.  O(1)."""

@final
class RadixTree:
    """A compressed radix tree over int32 tokens, one root per namespace.

    Token granularity: a match ends inside an edge where the prompt does.  Each node has one slot per kind of payload
    (`KINDS`).  Only `insert` splits; a match changes nothing.

    >>> tree = RadixTree()
    >>> node = tree.insert("model", [1, 2, 3, 4])
    >>> tree.put(node, "resident", 7, bytes=64)
    >>> found = tree.match("model", [1, 2, 3, 9])
    >>> found.matched, found.resident_length, tree.get(found.resident, "resident")
    (3, 3, 7)
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int:
        """Nodes, roots not counted.  O(1)."""
    @property
    def cells(self) -> int:
        """Tokens that are physically in the pool.  O(1).

        The sum of the lengths of all edges at or below which a resident or a lock with `cells` is; each edge once.
        """
    def match(self, namespace: str, tokens: Tokens) -> Match:
        """What is held of these tokens.  Changes nothing.  O(tokens in common + nodes on the path)."""
    def branch_point(self, namespace: str, tokens: Tokens) -> int:
        """How many leading tokens lie before the place where inserting this prompt would split an edge or branch.

        That is the length of the match, if it ends inside an edge, or at a node with children while the prompt goes on;
        else, and where no token agrees, 0.  O(as match).
        """
    def following(self, namespace: str, tokens: Tokens, count: int) -> npt.NDArray[np.int32]:
        """Up to `count` stored tokens after the place where `tokens` leaves the stored paths.

        The rest of the edge, then from node to node the child that was made or touched last.  Empty if nothing follows.
        ValueError for a negative count.  O(as match + count + children of the nodes passed).
        """
    def tokens(self, node: Node) -> npt.NDArray[np.int32]:
        """The whole path of a node, as a new array of `node.length`.  O(length)."""
    def parent(self, node: Node) -> Node | None:
        """The node above, or None at the top of its namespace.  O(1)."""
    def children(self, node: Node) -> int:
        """How many edges go on from here.  O(1)."""
    def insert(self, namespace: str, tokens: Tokens) -> Node:
        """The node that ends exactly at these tokens; made, with a split where the paths part, if there is none.

        A node without payload that is returned stays until it is discarded, or something is put on it or it is locked
        and that is taken or unlocked again.  ValueError for no tokens.  MemoryError leaves the tree as it was.
        O(tokens).
        """
    def discard(self, node: Node) -> bool:
        """Remove a node that has no payload and is not locked, and what of its path nothing else needs.

        False if it stays, because something uses it.  O(nodes removed).
        """
    def put(self, node: Node, kind: Kind, payload: Any, *, bytes: int = 0, start: int | None = None) -> None:
        """Give a node a payload and touch its path.  `bytes` are only counted.  O(nodes on the path).

        A segment covers [start, node.length), by default the node's own edge.  ValueError if the node has that kind
        already, for the payload None, for a start that is no end of a node above (or 0), for a segment over an edge
        that belongs to one already, for a start of another kind.  MemoryError leaves the tree as it was.
        """
    def take(self, node: Node, kind: Kind) -> Any:
        """Remove a payload and return it; what nothing else needs of the path goes too.  O(nodes on the path).

        KeyError if there is none; Locked if a lock protects it.
        """
    def get(self, node: Node, kind: Kind) -> Any | None:
        """The payload, or None.  O(1)."""
    def bytes(self, node: Node, kind: Kind) -> int:
        """The bytes that the payload was put with; 0 if there is none.  O(1)."""
    def start(self, node: Node) -> int:
        """The first token that the node's segment covers; KeyError if it has none.  O(1)."""
    def segments(self, node: Node) -> tuple[Span, ...]:
        """All segments that cover a part of the node's path, in order.  O(nodes on the path)."""
    def touch(self, node: Node) -> None:
        """Make every payload on the path recent, deepest first: a victim never lies above another of its kind.

        A segment is on the path if it covers any of it.  O(nodes on the path).
        """
    def victim(self, kind: Kind) -> Node | None:
        """The node with the least recent payload of this kind that no lock protects, or None.  O(1)."""
    def lock(self, node: Node, length: int | None = None, *, cells: bool = False) -> Lock:
        """Protect the first `length` tokens of the node's path, all of them by default.  O(nodes on the path).

        Payloads of nodes whose edge begins before `length`, and segments that cover any of it, are no victims and
        cannot be taken, and those nodes stay.  When an edge is split later, only the part that the lock covers stays
        protected.  `cells=True` counts these tokens in `RadixTree.cells` while the lock lives, whatever residents come
        and go; `length` must then be all of the node's.  ValueError for a length outside 1 .. node.length.
        """
    def unlock(self, lock: Lock) -> None:
        """Give back a lock, touch what it protected, and drop nodes that only it kept.  O(nodes on the path).

        ValueError, and nothing changes, for a lock that was given back before or is another tree's.
        """
    def exclusive_cells(self, node: Node) -> int:
        """Cells that taking this node's resident would free; 0 if it has none.  O(nodes of that part)."""
    def covered(self, node: Node) -> list[Node]:
        """Nodes above a resident that carry an unlocked resident, shallow to deep: the longer one makes them redundant.

        Empty if `node` has no resident.  O(nodes on the path).
        """
    def count(self, kind: Kind) -> int:
        """How many payloads of this kind there are.  O(1)."""
    def bytes_of(self, kind: Kind) -> int:
        """The bytes of all payloads of this kind.  O(1)."""
    def entries(self, kind: Kind, namespace: str | None = None) -> list[Node]:
        """All nodes with this kind of payload, least recent first, locked ones last.  O(payloads of all kinds)."""
    def namespaces(self) -> list[str]:
        """The namespaces that hold something, oldest first.  O(namespaces)."""
    def stats(self) -> TreeStats:
        """All counters; nothing is walked for them.  O(1).

        nodes, namespaces, tokens (stored in edges), buffer_bytes (allocated for them), index_bytes (all memory of the
        tree, buffers included), cells, locks, clock, and per kind: count, bytes, locked.
        """
    def clear(self, namespace: str | None = None) -> list[tuple[Kind, Any]]:
        """Remove everything, or one namespace, and return the payloads with their kinds.  O(what is removed).

        Locked, and nothing changes, if a lock protects any of it.
        """
    def check(self) -> None:
        """Prove every invariant, or raise AssertionError with the one that does not hold.  O(nodes)."""
    def _fail_allocation_after(self, count: int) -> None:
        """Tests: let `count` more allocations succeed and the one after them fail; -1: all succeed."""
