"""The token radix tree: which prefixes are held, and as what.

The C parts stand in `_radix_tokens.pxd` (tokens and comparison), `_radix_table.pxd` (children), `_radix_core.pxd`
(memory and shape) and `_radix_use.pxd` (residents, recency, locks); here are their Python faces.  Signatures, units,
errors and complexity are in `_radix.pyi`, and `tests/radix_twin.py` says in plain Python what all of it means.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.dict cimport PyDict_GetItem
from cpython.long cimport PyLong_AsLong
from cpython.object cimport PyObject
from cpython.sequence cimport PySequence_Check, PySequence_Fast, PySequence_Fast_GET_SIZE, PySequence_Fast_ITEMS
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint32_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from skippy._radix_check cimport prove_buffers, prove_free_lists, prove_recency, prove_shape, prove_use
from skippy._radix_core cimport (
    CHECKPOINT,
    FRESH,
    KIND_COUNT,
    LOGITS,
    NONE,
    RESIDENT,
    SEGMENT,
    Buffer,
    Core,
    Entry,
    Hold,
    Place,
    Radix,
    add_above,
    add_leaf,
    edge_of,
    free_buffer,
    free_node,
    grown,
    new_buffer,
    new_node,
    remove_leaf,
    reserve_nodes,
    resize,
    walk,
)
from skippy._radix_table cimport Slot
from skippy._radix_tokens cimport Source, any_negative, fill
from skippy._radix_use cimport (
    add_holder,
    add_support,
    delist,
    drop_holder,
    drop_support,
    is_bare,
    lock_path,
    move_ends,
    tidy,
    touch_path,
    unlock_path,
)

import operator
from array import array

import numpy as np

from skippy.errors import Locked, StaleHandle

__all__ = ["KINDS", "Lock", "Match", "Node", "RadixTree", "Span"]

KINDS = ("resident", "segment", "checkpoint", "logits")

cdef dict KIND_INDEX = {name: index for index, name in enumerate(KINDS)}
cdef tuple NO_SPANS = ()


cdef int kind_of(object kind) except -1:
    cdef PyObject* index = PyDict_GetItem(KIND_INDEX, kind)
    if index == NULL:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    return PyLong_AsLong(<object> index)


cdef tuple plain(object sequence):
    """The tokens before the first item that is none, as int32, and the error that names that item, or None."""
    values = array("i")
    for index, item in enumerate(list(sequence)):
        try:
            value = operator.index(item)
        except TypeError:
            return values, TypeError(f"token {item!r} at index {index}: expected an int")
        if not 0 <= value <= INT32_MAX:
            return values, ValueError(f"token {value} at index {index}: expected 0..{INT32_MAX}")
        values.append(value)
    return values, None


cdef object as_sequence(object tokens):
    """The tokens as a list or tuple."""
    if not PySequence_Check(tokens):
        raise TypeError(f"tokens: expected a buffer of int32 or a sequence of ints, got {type(tokens).__name__}")
    return PySequence_Fast(tokens, "tokens: expected a buffer of int32 or a sequence of ints")


cdef inline bint has_nothing(const Radix* node) noexcept:
    return (node.entry[RESIDENT] == NONE and node.entry[SEGMENT] == NONE and node.entry[CHECKPOINT] == NONE
            and node.entry[LOGITS] == NONE)


cdef object negative_token(int32_t value, Py_ssize_t index):
    return ValueError(f"token {value} at index {index}: expected 0..{INT32_MAX}")


cdef int view_of(object tokens, Py_buffer* view) except -1:
    """Take a view of a buffer of int32, or say why it is none."""
    cdef bint fits
    try:
        PyObject_GetBuffer(tokens, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
    except (BufferError, ValueError) as error:
        raise ValueError(f"tokens: expected a C-contiguous buffer of int32 ({error})") from None
    fits = view.ndim == 1 and view.itemsize == sizeof(int32_t) and view.format != NULL
    if fits:
        fits = is_int32(view.format)
    if not fits:
        error = TypeError(
            f"tokens: expected a one-dimensional buffer of int32, got format "
            f"{(<bytes> view.format).decode() if view.format != NULL else 'B'!r} with {view.ndim} dimensions")
        PyBuffer_Release(view)
        raise error
    return 0


cdef inline bint is_int32(const char* form) noexcept:
    """The struct formats that mean a signed integer of this machine's byte order; the size has been checked."""
    cdef int one = 1
    cdef char order = b"<" if (<char*> &one)[0] else b">"
    if form[0] == order or form[0] == b"=" or form[0] == b"@":
        form += 1
    return (form[0] == b"i" or form[0] == b"l") and form[1] == 0


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
    """A segment on a path: saved state of the tokens [start, end), carried by `node`, which ends at `end`."""

    def __init__(self, Node node not None, int start, int end, payload):
        self.node = node
        self.start = start
        self.end = end
        self.payload = payload

    def __eq__(self, other):
        if type(other) is not Span:
            return NotImplemented
        return (self.node == other.node and self.start == other.start and self.end == other.end
                and self.payload == other.payload)

    def __hash__(self):
        return hash((self.node, self.start, self.end))

    def __repr__(self):
        return f"Span({self.node!r}, {self.start}, {self.end}, {self.payload!r})"


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


@cython.final
cdef class RadixTree:
    """A compressed radix tree over int32 tokens, one root per namespace.

    Token granularity: a match ends inside an edge where the prompt does.  Each node has one slot per kind of payload
    (`KINDS`).  Only `insert` splits; a match changes nothing.  One thread at a time.

    >>> tree = RadixTree()
    >>> node = tree.insert("model", [1, 2, 3, 4])
    >>> tree.put(node, "resident", 7, bytes=64)
    >>> found = tree.match("model", [1, 2, 3, 9])
    >>> found.matched, found.resident_length, tree.get(found.resident, "resident")
    (3, 3, 7)
    """

    def __cinit__(self):
        cdef int kind
        memset(&self.core, 0, sizeof(Core))
        self.core.fail_after = -1
        self.core.node_free = self.core.buffer_free = self.core.entry_free = self.core.hold_free = NONE
        for kind in range(KIND_COUNT):
            self.core.kinds[kind].head = self.core.kinds[kind].tail = NONE
        self.payloads = []
        self.roots = {}
        self.names = {}
        self.scratch = NULL

    def __dealloc__(self):
        cdef int32_t b
        for b in range(self.core.buffer_top):
            free(self.core.buffers[b].data)
        free(self.core.buffers)
        free(self.core.nodes)
        free(self.core.entries)
        free(self.core.holds)
        free(self.core.table.slots)
        free(self.scratch)

    # -----------------------------------------------------------------------------------------------------------------
    # From Python to C and back
    # -----------------------------------------------------------------------------------------------------------------

    cdef int32_t own(self, Node node) except -1:
        if node is None:
            raise TypeError("node: expected a Node, got None")
        if node.tree is not self:
            raise ValueError(f"{node!r} belongs to another tree")
        if node.index >= self.core.node_top or self.core.nodes[node.index].generation != node.generation:
            raise StaleHandle(f"{node!r} is no longer in the tree")
        return node.index

    cdef int32_t root_of(self, str namespace) except -2:
        cdef PyObject* root
        if namespace is None:
            raise TypeError("namespace: expected a str, got None")
        root = PyDict_GetItem(self.roots, namespace)
        return NONE if root == NULL else <int32_t> PyLong_AsLong(<object> root)

    cdef Node handle(self, int32_t x):
        cdef Radix* node = &self.core.nodes[x]
        return new_handle(self, x, node.generation, node.end, <str> self.names[node.root])

    cdef Span span(self, int32_t e):
        cdef Span span = Span.__new__(Span)
        span.node = self.handle(self.core.entries[e].node)
        span.start = self.core.entries[e].start
        span.end = span.node.length
        span.payload = self.payloads[e]
        return span

    cdef int read(self, object sequence, Source* source) except -1:
        """Point `source` at the items of a list or tuple, which must stay alive while it is read."""
        cdef Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence)
        cdef void* room
        if n > self.scratch_size:
            room = resize(&self.core, self.scratch, n, sizeof(int32_t))
            if room == NULL:
                raise MemoryError("no memory to convert the tokens")
            self.scratch = <int32_t*> room
            self.scratch_size = n
        source.scratch = self.scratch
        source.data = self.scratch
        source.items = PySequence_Fast_ITEMS(sequence)
        source.n = source.end = n
        source.ready = 0
        return 0

    cdef int find(self, str namespace, object tokens, Place* place, Py_ssize_t* n) except -1:
        """Walk down the namespace; `place.node` is NONE if there is no such namespace.

        A token that is none raises only where the walk gets to it: what comes after the parting is not looked at.
        """
        cdef Source source
        cdef Py_buffer view
        cdef bint lent, odd, negative
        cdef int32_t root, value = 0
        error = None
        while True:
            lent = PyObject_CheckBuffer(tokens)
            if lent:
                view_of(tokens, &view)
                source.data = <const int32_t*> view.buf
                source.n = source.ready = source.end = view.len // <Py_ssize_t> sizeof(int32_t)
            else:
                tokens = as_sequence(tokens)
                self.read(tokens, &source)
            try:
                root = self.root_of(namespace)
                if root == NONE:
                    place.node = NONE
                    place.at = place.steps = 0
                    fill(&source, 1)
                else:
                    place[0] = walk(&self.core, &source, root)
                odd = source.end < source.n and place.at == source.end
                negative = place.at < source.ready and source.data[place.at] < 0
                if negative:
                    value = source.data[place.at]
                n[0] = source.n
            finally:
                if lent:
                    PyBuffer_Release(&view)
            if odd:
                tokens, error = plain(tokens)
                continue
            if error is not None and place.at == n[0]:
                raise error
            if negative:
                raise negative_token(value, place.at)
            return 0

    # -----------------------------------------------------------------------------------------------------------------
    # Look up
    # -----------------------------------------------------------------------------------------------------------------

    def match(self, str namespace not None, tokens):
        """What is held of these tokens.  Changes nothing.  O(tokens in common + nodes on the path)."""
        cdef Core* core = &self.core
        cdef Place place
        cdef Py_ssize_t n
        cdef int32_t x, e, gap, last, room
        cdef Radix* node
        cdef Match found = Match.__new__(Match)
        cdef list spans
        self.find(namespace, tokens, &place, &n)
        found.tree = self
        found.namespace = namespace
        found.matched = <int> place.at
        found.steps = place.steps
        if place.at == 0:
            return found
        x = place.node
        node = &core.nodes[x]
        if node.entry[LOGITS] != NONE and place.at == n and node.end == n:
            found.logits_index = x
            found.logits_generation = node.generation
        if core.nodes[node.root].holder != NONE:
            found.resident_length = found.matched
            while node.holder == NONE:
                node = &core.nodes[node.parent]
                found.resident_length = node.end
            if node.parent != NONE:
                found.resident_index = node.holder
                found.resident_generation = core.nodes[node.holder].generation
                found.resident_end = core.nodes[node.holder].end
        if core.kinds[SEGMENT].count:
            spans = []
            gap = last = NONE
            while core.nodes[x].parent != NONE:
                e = core.nodes[x].segment
                if e == NONE:
                    gap = core.nodes[x].begin
                elif e != last:
                    spans.append(self.span(e))
                    last = e
                x = core.nodes[x].parent
            if spans:
                spans.reverse()
                found.segments = tuple(spans)
            found.segment_length = found.matched if gap == NONE else gap
        if core.kinds[CHECKPOINT].count:
            x = place.node
            if core.nodes[x].end > place.at:
                x = core.nodes[x].parent
            room = 0
            while core.nodes[x].parent != NONE:
                node = &core.nodes[x]
                if node.entry[CHECKPOINT] != NONE:
                    if found.place_count == room:
                        room = 2 * room + 4
                        self.grow_places(found, room)
                    found.places[3 * found.place_count] = x
                    found.places[3 * found.place_count + 1] = <int32_t> node.generation
                    found.places[3 * found.place_count + 2] = node.end
                    found.place_count += 1
                x = node.parent
        return found

    cdef int grow_places(self, Match found, int32_t room) except -1:
        cdef void* places = resize(&self.core, found.places, room, 3 * sizeof(int32_t))
        if places == NULL:
            raise MemoryError("no memory to list the checkpoints")
        found.places = <int32_t*> places
        return 0

    def branch_point(self, str namespace not None, tokens):
        """How many leading tokens lie before the place where this prompt would split an edge or add a branch, or 0."""
        cdef Place place
        cdef Py_ssize_t n
        cdef Radix* node
        self.find(namespace, tokens, &place, &n)
        if place.at == 0:
            return 0
        node = &self.core.nodes[place.node]
        if place.at < node.end or (place.at < n and node.children > 0):
            return place.at
        return 0

    def following(self, str namespace not None, tokens, count):
        """Up to `count` stored tokens after the place where `tokens` leaves the stored paths, as int32."""
        cdef Core* core = &self.core
        cdef Place place
        cdef Py_ssize_t n, wanted = count, got = 0, step
        cdef int32_t x, child
        cdef list parts = []
        if wanted < 0:
            raise ValueError(f"count {count}: expected 0 or more")
        self.find(namespace, tokens, &place, &n)
        if place.node == NONE:
            return np.empty(0, np.int32)
        x = place.node
        n = place.at
        while got < wanted:
            if n == core.nodes[x].end:
                child = core.nodes[x].first
                if child == NONE:
                    break
                x = child
                while child != NONE:
                    if core.nodes[child].used > core.nodes[x].used:
                        x = child
                    child = core.nodes[child].next
            step = core.nodes[x].end - n
            if step > wanted - got:
                step = wanted - got
            parts.append((<char*> (edge_of(core, &core.nodes[x]) + (n - core.nodes[x].begin)))[:step * sizeof(int32_t)])
            got += step
            n += step
        return np.frombuffer(bytearray().join(parts), np.int32) if parts else np.empty(0, np.int32)

    def tokens(self, Node node not None):
        """The whole path of a node, as a new int32 array.  O(length)."""
        cdef Core* core = &self.core
        cdef int32_t x = self.own(node)
        cdef int32_t[::1] out
        path = np.empty(node.length, np.int32)
        out = path
        while core.nodes[x].parent != NONE:
            memcpy(&out[core.nodes[x].begin], edge_of(core, &core.nodes[x]),
                   (core.nodes[x].end - core.nodes[x].begin) * sizeof(int32_t))
            x = core.nodes[x].parent
        return path

    def parent(self, Node node not None):
        """The node above, or None at the top of its namespace.  O(1)."""
        cdef int32_t x = self.core.nodes[self.own(node)].parent
        return None if self.core.nodes[x].parent == NONE else self.handle(x)

    def children(self, Node node not None):
        """How many edges go on from here.  O(1)."""
        return self.core.nodes[self.own(node)].children

    # -----------------------------------------------------------------------------------------------------------------
    # Change the shape
    # -----------------------------------------------------------------------------------------------------------------

    def insert(self, str namespace not None, tokens):
        """The node that ends exactly at these tokens, made if need be.  O(tokens)."""
        cdef Source source
        cdef Py_buffer view
        if PyObject_CheckBuffer(tokens):
            view_of(tokens, &view)
            try:
                source.data = <const int32_t*> view.buf
                source.n = source.ready = source.end = view.len // <Py_ssize_t> sizeof(int32_t)
                if any_negative(source.data, source.n):
                    for index in range(source.n):
                        if source.data[index] < 0:
                            raise negative_token(source.data[index], index)
                return self.add(namespace, &source)
            finally:
                PyBuffer_Release(&view)
        tokens = as_sequence(tokens)
        self.read(tokens, &source)
        fill(&source, source.n)
        if source.end == source.n:
            return self.add(namespace, &source)
        tokens, error = plain(tokens)
        if error is not None:
            raise error
        return self.insert(namespace, tokens)

    cdef Node add(self, str namespace, Source* source):
        cdef Core* core = &self.core
        cdef Node made = Node.__new__(Node)
        cdef Place place
        cdef int32_t root, x, u = NONE, leaf = NONE, buffer = NONE, n = <int32_t> source.n
        cdef bint freed = False, split
        if source.n == 0:
            raise ValueError("tokens: a path of 0 tokens cannot be stored")
        if source.n > INT32_MAX:
            raise ValueError(f"tokens: a path of {source.n} tokens is longer than {INT32_MAX}")
        root = self.root_of(namespace)
        if reserve_nodes(core, 3):
            raise MemoryError("no memory for another node")
        place.node = root
        place.at = 0
        if root != NONE:
            place = walk(core, source, root)
        x = place.node
        if place.at < n:
            buffer = new_buffer(core, n - place.at)
            if buffer == NONE:
                raise MemoryError("no memory for the tokens")
            memcpy(core.buffers[buffer].data, source.data + place.at, (n - place.at) * sizeof(int32_t))
        if root == NONE:
            x = root = new_node(core)
            core.nodes[root].root = root
            try:
                self.names[root] = namespace
                self.roots[namespace] = root
            except MemoryError:
                self.names.pop(root, None)
                free_node(core, root)
                free_buffer(core, buffer)
                raise
        split = place.at < core.nodes[x].end
        if split:
            u = new_node(core)
            add_above(core, u, x, <int32_t> place.at)
            freed = move_ends(core, u, x)
        core.clock += 1
        if place.at < n:
            leaf = new_node(core)
            add_leaf(core, u if split else x, leaf, buffer, n)
            core.nodes[leaf].used = core.clock
        else:
            leaf = u if split else x
        if has_nothing(&core.nodes[leaf]):
            core.nodes[leaf].flags |= FRESH
        if freed:
            touch_path(core, x)
            tidy(core, x, INT32_MAX)
        made.tree = self
        made.index = leaf
        made.generation = core.nodes[leaf].generation
        made.length = n
        made.namespace = namespace
        return made

    def discard(self, Node node not None):
        """Remove a node that nothing was put on or locks.  True if it went."""
        cdef Core* core = &self.core
        cdef int32_t x = self.own(node), root = core.nodes[x].root
        if core.nodes[x].locks or not has_nothing(&core.nodes[x]):
            return False
        core.nodes[x].flags &= ~FRESH
        tidy(core, x, INT32_MAX)
        self.forget_empty(root)
        return not node.alive

    cdef int forget_empty(self, int32_t root) except -1:
        """A namespace goes with its last node."""
        if self.core.nodes[root].children == 0:
            del self.roots[self.names.pop(root)]
            free_node(&self.core, root)
        return 0

    # -----------------------------------------------------------------------------------------------------------------
    # Payloads
    # -----------------------------------------------------------------------------------------------------------------

    cdef int reserve_entry(self) except -1:
        """Room for one more payload."""
        cdef Core* core = &self.core
        cdef int64_t wanted
        cdef void* room
        if core.entry_free == NONE and core.entry_top == core.entry_size:
            wanted = grown(core.entry_size, <int64_t> core.entry_size + 1)
            room = resize(core, core.entries, wanted, sizeof(Entry)) if wanted else NULL
            if room == NULL:
                raise MemoryError("no memory for another payload")
            core.entries = <Entry*> room
            core.entry_size = <int32_t> wanted
        if core.entry_free == NONE and len(self.payloads) == core.entry_top:
            self.payloads.append(None)
        return 0

    def put(self, Node node not None, kind, payload, *, bytes=0, start=None):
        """Give a node a payload, one per kind, and touch its path.  O(nodes on the path)."""
        cdef Core* core = &self.core
        cdef int32_t x = self.own(node), e, first, above
        cdef int k = kind_of(kind)
        cdef int64_t size = bytes
        if payload is None:
            raise ValueError("payload: None stands for no payload")
        if size < 0:
            raise ValueError(f"bytes {bytes}: expected 0 or more")
        if core.nodes[x].entry[k] != NONE:
            raise ValueError(f"{node!r} already has a {kind}")
        first = core.nodes[x].begin
        if k != SEGMENT:
            if start is not None:
                raise ValueError(f"start {start}: only a segment has a start")
        else:
            if start is not None:
                first = start
            above = x
            while True:
                if core.nodes[above].segment != NONE:
                    raise ValueError(f"{node!r}: tokens {core.nodes[above].begin}..{core.nodes[above].end} already "
                                     f"belong to a segment")
                if core.nodes[above].begin <= first or core.nodes[above].parent == NONE:
                    break
                above = core.nodes[above].parent
            if first < 0 or core.nodes[above].begin != first or first >= core.nodes[x].end:
                raise ValueError(f"start {start}: no node above {node!r} ends there")
        self.reserve_entry()
        if core.entry_free != NONE:
            e = core.entry_free
            core.entry_free = core.entries[e].next
        else:
            e = core.entry_top
            core.entry_top += 1
        self.payloads[e] = payload
        core.entries[e].bytes = size
        core.entries[e].node = x
        core.entries[e].start = first
        core.entries[e].kind = k
        core.entries[e].listed = False
        core.kinds[k].count += 1
        core.kinds[k].bytes += size
        core.nodes[x].entry[k] = e
        core.nodes[x].flags &= ~FRESH
        if k == SEGMENT:
            above = x
            while core.nodes[above].begin >= first and core.nodes[above].parent != NONE:
                core.nodes[above].segment = e
                above = core.nodes[above].parent
        elif k == RESIDENT:
            add_support(core, x)
            add_holder(core, x)
        touch_path(core, x)

    cdef object drop_entry(self, int32_t e):
        """Detach a payload from its node and return it."""
        cdef Core* core = &self.core
        cdef Entry* entry = &core.entries[e]
        cdef int32_t x = entry.node, above
        cdef object payload = self.payloads[e]
        self.payloads[e] = None
        if entry.listed:
            delist(core, e)
        core.kinds[entry.kind].count -= 1
        core.kinds[entry.kind].bytes -= entry.bytes
        core.nodes[x].entry[entry.kind] = NONE
        if entry.kind == SEGMENT:
            above = x
            while core.nodes[above].segment == e:
                core.nodes[above].segment = NONE
                above = core.nodes[above].parent
        elif entry.kind == RESIDENT:
            drop_support(core, x)
            drop_holder(core, x)
        entry.node = NONE
        entry.next = core.entry_free
        core.entry_free = e
        return payload

    def take(self, Node node not None, kind):
        """Remove a payload and return it; what nothing else needs of the path goes too.  O(nodes on the path)."""
        cdef Core* core = &self.core
        cdef int32_t x = self.own(node), e, root = core.nodes[x].root, down_to = INT32_MAX
        cdef int k = kind_of(kind)
        e = core.nodes[x].entry[k]
        if e == NONE:
            raise KeyError(f"{node!r} has no {kind}")
        if not core.entries[e].listed:
            raise Locked(f"the {kind} of {node!r} is in use")
        if k == SEGMENT:
            down_to = core.entries[e].start
        payload = self.drop_entry(e)
        tidy(core, x, down_to)
        self.forget_empty(root)
        return payload

    def get(self, Node node not None, kind):
        """The payload, or None.  O(1)."""
        cdef int32_t e = self.core.nodes[self.own(node)].entry[kind_of(kind)]
        return None if e == NONE else self.payloads[e]

    def bytes(self, Node node not None, kind):
        """The bytes that the payload was put with; 0 if there is none.  O(1)."""
        cdef int32_t e = self.core.nodes[self.own(node)].entry[kind_of(kind)]
        return 0 if e == NONE else self.core.entries[e].bytes

    def start(self, Node node not None):
        """The first token that the node's segment covers.  O(1)."""
        cdef int32_t e = self.core.nodes[self.own(node)].entry[SEGMENT]
        if e == NONE:
            raise KeyError(f"{node!r} has no segment")
        return self.core.entries[e].start

    def segments(self, Node node not None):
        """All segments that cover a part of the node's path, in order.  O(nodes on the path)."""
        cdef int32_t x = self.own(node), e, last = NONE
        cdef list spans = []
        while self.core.nodes[x].parent != NONE:
            e = self.core.nodes[x].segment
            if e != NONE and e != last:
                spans.append(self.span(e))
                last = e
            x = self.core.nodes[x].parent
        spans.reverse()
        return tuple(spans)

    # -----------------------------------------------------------------------------------------------------------------
    # Recency and locks
    # -----------------------------------------------------------------------------------------------------------------

    def touch(self, Node node not None):
        """Make everything on the node's path recent, the deepest least.  O(nodes on the path)."""
        touch_path(&self.core, self.own(node))

    def victim(self, kind):
        """The node with the least recent unlocked payload of this kind, or None.  O(1)."""
        cdef int32_t e = self.core.kinds[kind_of(kind)].head
        return None if e == NONE else self.handle(self.core.entries[e].node)

    def lock(self, Node node not None, length=None, *, bint cells=False):
        """Protect the first `length` tokens of the node's path, all of them by default.  O(nodes on the path)."""
        cdef Core* core = &self.core
        cdef int32_t x = self.own(node), h
        cdef int64_t wanted = node.length if length is None else length
        cdef void* room
        cdef Lock lock = Lock.__new__(Lock)
        if not 1 <= wanted <= node.length:
            raise ValueError(f"length {length}: expected 1..{node.length}")
        if cells and wanted != node.length:
            raise ValueError(f"length {length}: a lock with cells covers all {node.length} tokens of its node")
        if core.hold_free == NONE and core.hold_top == core.hold_size:
            room = NULL
            if grown(core.hold_size, <int64_t> core.hold_size + 1):
                room = resize(core, core.holds, grown(core.hold_size, <int64_t> core.hold_size + 1), sizeof(Hold))
            if room == NULL:
                raise MemoryError("no memory for another lock")
            core.holds = <Hold*> room
            core.hold_size = <int32_t> grown(core.hold_size, <int64_t> core.hold_size + 1)
        if core.hold_free != NONE:
            h = core.hold_free
            core.hold_free = core.holds[h].next
        else:
            h = core.hold_top
            core.hold_top += 1
            core.holds[h].generation = 0
        core.holds[h].length = <int32_t> wanted
        core.holds[h].cells = cells
        if wanted > core.nodes[x].begin:
            core.nodes[x].flags &= ~FRESH
        lock_path(core, x, h)
        core.hold_count += 1
        lock.tree = self
        lock.index = h
        lock.generation = core.holds[h].generation
        lock.node = node
        lock.length = <int> wanted
        lock.cells = cells
        return lock

    def unlock(self, Lock lock not None):
        """Give back a lock, and touch what it protected.  O(nodes on the path)."""
        cdef Core* core = &self.core
        cdef int32_t h = lock.index, root
        if lock.tree is not self:
            raise ValueError(f"{lock!r} belongs to another tree")
        if not lock.alive:
            raise ValueError(f"{lock!r} has been given back before")
        root = core.nodes[core.holds[h].node].root
        unlock_path(core, h)
        core.holds[h].node = NONE
        core.holds[h].generation += 1
        core.holds[h].next = core.hold_free
        core.hold_free = h
        core.hold_count -= 1
        self.forget_empty(root)

    # -----------------------------------------------------------------------------------------------------------------
    # Accounting
    # -----------------------------------------------------------------------------------------------------------------

    @property
    def cells(self):
        """Tokens that are physically in the pool: each edge with a resident or a lock with cells, once.  O(1)."""
        return self.core.cells

    def exclusive_cells(self, Node node not None):
        """Cells that taking this node's resident would free.  O(nodes of that part)."""
        cdef Core* core = &self.core
        cdef int32_t x = self.own(node)
        cdef int64_t cells = 0
        if core.nodes[x].entry[RESIDENT] == NONE:
            return 0
        while core.nodes[x].parent != NONE and core.nodes[x].supports == 1:
            cells += core.nodes[x].end - core.nodes[x].begin
            x = core.nodes[x].parent
        return cells

    def covered(self, Node node not None):
        """Nodes above a resident that carry an unlocked resident, shallow to deep.  O(nodes on the path)."""
        cdef Core* core = &self.core
        cdef int32_t x = self.own(node), e
        cdef list nodes = []
        if core.nodes[x].entry[RESIDENT] == NONE:
            return nodes
        x = core.nodes[x].parent
        while x != NONE:
            e = core.nodes[x].entry[RESIDENT]
            if e != NONE and core.entries[e].listed:
                nodes.append(self.handle(x))
            x = core.nodes[x].parent
        nodes.reverse()
        return nodes

    def count(self, kind):
        """How many payloads of this kind there are.  O(1)."""
        return self.core.kinds[kind_of(kind)].count

    def bytes_of(self, kind):
        """The bytes of all payloads of this kind.  O(1)."""
        return self.core.kinds[kind_of(kind)].bytes

    def entries(self, kind, namespace=None):
        """All nodes with this kind of payload, least recent first, locked ones last.  O(entries of all kinds)."""
        cdef Core* core = &self.core
        cdef int k = kind_of(kind)
        cdef int32_t e = core.kinds[k].head, root = NONE
        cdef list found = [], locked = []
        if namespace is not None:
            root = self.root_of(namespace)
            if root == NONE:
                return found
        while e != NONE:
            found.append(e)
            e = core.entries[e].next
        for e in range(core.entry_top):
            if core.entries[e].node != NONE and core.entries[e].kind == k and not core.entries[e].listed:
                locked.append((core.entries[e].tick, e))
        found.extend([entry for _, entry in sorted(locked)])
        return [self.handle(core.entries[<int32_t> entry].node) for entry in found
                if root == NONE or core.nodes[core.entries[<int32_t> entry].node].root == root]

    def namespaces(self):
        """The namespaces that hold something, oldest first.  O(namespaces)."""
        return list(self.roots)

    def __len__(self):
        return self.core.node_count

    def stats(self):
        """All counters; nothing is walked for them.  O(1)."""
        cdef Core* core = &self.core
        cdef int k
        cdef int64_t index = (
            core.node_size * <int64_t> sizeof(Radix) + core.buffer_size * <int64_t> sizeof(Buffer)
            + core.entry_size * <int64_t> (sizeof(Entry) + sizeof(void*)) + core.hold_size * <int64_t> sizeof(Hold)
            + (<int64_t> core.table.mask + 1) * <int64_t> sizeof(Slot)
        )
        counters = {
            "nodes": core.node_count,
            "namespaces": len(self.roots),
            "tokens": core.tokens,
            "buffer_bytes": core.buffer_tokens * <int64_t> sizeof(int32_t),
            "index_bytes": index + core.buffer_tokens * <int64_t> sizeof(int32_t),
            "cells": core.cells,
            "locks": core.hold_count,
            "clock": core.clock,
        }
        for k in range(KIND_COUNT):
            counters[KINDS[k]] = {
                "count": core.kinds[k].count,
                "bytes": core.kinds[k].bytes,
                "locked": core.kinds[k].count - core.kinds[k].listed,
            }
        return counters

    def clear(self, namespace=None):
        """Remove everything, or one namespace, and return the payloads with their kinds.  O(what is removed)."""
        cdef Core* core = &self.core
        cdef int32_t h, root = NONE, x, parent
        cdef int k
        cdef list payloads = []
        if namespace is not None:
            root = self.root_of(namespace)
            if root == NONE:
                return payloads
        for h in range(core.hold_top):
            x = core.holds[h].node
            if x != NONE and (root == NONE or core.nodes[x].root == root):
                raise Locked(f"{core.holds[h].length} tokens in {self.names[core.nodes[x].root]!r} are in use")
        for root in list(self.roots.values()) if root == NONE else [root]:
            x = root
            while True:
                while core.nodes[x].first != NONE:
                    x = core.nodes[x].first
                if x == root:
                    break
                for k in range(KIND_COUNT):
                    if core.nodes[x].entry[k] != NONE:
                        payloads.append((KINDS[k], self.drop_entry(core.nodes[x].entry[k])))
                parent = core.nodes[x].parent
                remove_leaf(core, x)
                x = parent
            self.forget_empty(root)
        return payloads

    def _fail_allocation_after(self, int64_t count):
        """Tests: let `count` more allocations succeed and the one after them fail; -1: all succeed."""
        self.core.fail_after = count

    def check(self):
        """Prove every invariant, or raise AssertionError with the one that does not hold.  O(nodes)."""
        cdef list order = prove_shape(&self.core, self.roots, self.names)
        prove_free_lists(&self.core, len(order))
        prove_buffers(&self.core, order)
        prove_use(&self.core, order)
        prove_recency(&self.core, self.payloads, order)
