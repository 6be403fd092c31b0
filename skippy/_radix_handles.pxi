"""What the tree hands out: nodes, locks, spans and matches.  Included by `_radix.pyx`."""


@cython.final
cdef class Node:
    """A place in the tree: a path of `length` tokens in a namespace.  Equal to every handle of the same place."""

    def __init__(self):
        raise TypeError("nodes come from RadixTree.insert and RadixTree.match")

    @property
    def alive(self):
        """Whether the tree still has this node.  O(1)."""
        cdef Core* core = &self.tree.core
        return self.index < core.node_top and core.nodes[self.index].generation == self.generation

    def __eq__(self, other):
        cdef Node node
        if type(other) is not Node:
            return NotImplemented
        node = <Node> other
        return self.tree is node.tree and self.index == node.index and self.generation == node.generation

    def __hash__(self):
        return hash((id(self.tree), self.index, self.generation))

    def __repr__(self):
        return f"<Node {self.length} tokens in {self.namespace!r}{'' if self.alive else ', gone'}>"


@cython.final
cdef class Lock:
    """The protection of the first `length` tokens of the path of `node`, until RadixTree.unlock takes it back."""

    def __init__(self):
        raise TypeError("locks come from RadixTree.lock")

    @property
    def alive(self):
        """Whether it still protects.  O(1)."""
        return self.tree.core.holds[self.index].generation == self.generation and (
            self.tree.core.holds[self.index].node != NONE)

    def __repr__(self):
        return f"<Lock {self.length} tokens of {self.node!r}{'' if self.alive else ', released'}>"


@cython.final
cdef class Span:
    """A segment on a path: saved state of the tokens [start, end), of which [start, reach) lie on the path asked for."""

    def __init__(self, Node node not None, int start, int end, int reach, payload):
        self.node = node
        self.start = start
        self.end = end
        self.reach = reach
        self.payload = payload

    def __eq__(self, other):
        if type(other) is not Span:
            return NotImplemented
        return (self.node == other.node and self.start == other.start and self.end == other.end
                and self.reach == other.reach and self.payload == other.payload)

    def __hash__(self):
        return hash((self.node, self.start, self.end))

    def __repr__(self):
        return f"Span({self.node!r}, {self.start}, {self.end}, {self.reach}, {self.payload!r})"


@cython.final
@cython.freelist(8)
cdef class Match:
    """What the tree holds of a prompt, at the moment of the match."""

    def __cinit__(self):
        self.places = NULL
        self.segments = NO_SPANS
        self.resident_index = self.logits_index = NONE

    def __init__(self):
        raise TypeError("matches come from RadixTree.match")

    def __dealloc__(self):
        free(self.places)

    cdef Node place(self, Py_ssize_t i):
        return new_handle(self.tree, self.places[3 * i], <uint32_t> self.places[3 * i + 1], self.places[3 * i + 2],
                          self.namespace)

    @property
    def resident(self):
        """The holder that covers `resident_length` tokens of the prompt, or None.  O(1)."""
        if self.resident_index == NONE:
            return None
        return new_handle(self.tree, self.resident_index, self.resident_generation, self.resident_end, self.namespace)

    @property
    def checkpoint(self):
        """The deepest node on the fully matched path that has a checkpoint, or None.  O(1)."""
        return self.place(0) if self.place_count else None

    @property
    def checkpoints(self):
        """All nodes on the fully matched path that have a checkpoint, shallow to deep.  O(checkpoints)."""
        return tuple([self.place(i) for i in range(self.place_count - 1, -1, -1)])

    @property
    def logits(self):
        """The node that ends exactly where the prompt does and has logits, or None.  O(1)."""
        if self.logits_index == NONE:
            return None
        return new_handle(self.tree, self.logits_index, self.logits_generation, self.matched, self.namespace)

    def __repr__(self):
        return (f"<Match {self.matched} tokens in {self.namespace!r}: resident {self.resident_length}, "
                f"segments {self.segment_length}, checkpoint {self.places[2] if self.place_count else None}>")


cdef inline Node new_handle(RadixTree tree, int32_t index, uint32_t generation, int length, str namespace):
    cdef Node node = Node.__new__(Node)
    node.tree = tree
    node.index = index
    node.generation = generation
    node.length = length
    node.namespace = namespace
    return node
