"""The token radix tree: which prefixes are held, and as what.

The C parts stand in `_radix_tokens.pxd` (tokens and comparison), `_radix_table.pxd` (children), `_radix_core.pxd`
(memory and shape), `_radix_use.pxd` (residents, recency, locks) and `_radix_check.pxd` (the proof); their Python faces
here, in `_radix_read.pxi` and in `_radix_handles.pxi`.  Signatures, units, errors and complexity are in `_radix.pyi`,
and `tests/radix_twin.py` says in plain Python what all of it means.
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
    edge_of,
    free_buffer,
    free_hold,
    free_node,
    new_buffer,
    new_hold,
    new_node,
    remove_leaf,
    reserve_entry,
    reserve_hold,
    reserve_nodes,
    resize,
    walk,
)
from skippy._radix_table cimport Slot
from skippy._radix_tokens cimport Source, any_negative, fill
from skippy._radix_use cimport attach, detach, has_nothing, lock_path, plant, tidy, touch_path, unlock_path

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


include "_radix_read.pxi"
include "_radix_handles.pxi"


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

    cdef Span span(self, int32_t e, int32_t reach):
        cdef Span span = Span.__new__(Span)
        span.node = self.handle(self.core.entries[e].node)
        span.start = self.core.entries[e].start
        span.end = span.node.length
        span.reach = reach
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
                elif e != last:  # the deepest edge of it on this path: below, the segment goes another way
                    spans.append(self.span(e, min(core.nodes[x].end, <int32_t> place.at)))
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
        cdef Node made = Node.__new__(Node)
        if PyObject_CheckBuffer(tokens):
            view_of(tokens, &view)
            try:
                source.data = <const int32_t*> view.buf
                source.n = source.ready = source.end = view.len // <Py_ssize_t> sizeof(int32_t)
                if any_negative(source.data, source.n):
                    for index in range(source.n):
                        if source.data[index] < 0:
                            raise negative_token(source.data[index], index)
                return self.add(namespace, &source, made)
            finally:
                PyBuffer_Release(&view)
        tokens = as_sequence(tokens)
        self.read(tokens, &source)
        fill(&source, source.n)
        if source.end == source.n:
            return self.add(namespace, &source, made)
        tokens, error = plain(tokens)
        if error is not None:
            raise error
        return self.insert(namespace, tokens)

    cdef Node add(self, str namespace, Source* source, Node made):
        """Insert; `made` becomes the handle.  It is given because making an object may run the garbage collector."""
        cdef Core* core = &self.core
        cdef Place place
        cdef int32_t root, buffer = NONE, n = <int32_t> source.n
        if source.n == 0:
            raise ValueError("tokens: a path of 0 tokens cannot be stored")
        if source.n > INT32_MAX:
            raise ValueError(f"tokens: a path of {source.n} tokens is longer than {INT32_MAX}")
        root = self.root_of(namespace)
        if reserve_nodes(core, 3):
            raise MemoryError("no memory for another node")
        place.node = root
        place.at = place.steps = 0
        if root != NONE:
            place = walk(core, source, root)
        if place.at < n:
            buffer = new_buffer(core, n - place.at)
            if buffer == NONE:
                raise MemoryError("no memory for the tokens")
            memcpy(core.buffers[buffer].data, source.data + place.at, (n - place.at) * sizeof(int32_t))
        if root == NONE:
            place.node = root = new_node(core)
            core.nodes[root].root = root
            try:
                self.names[root] = namespace
                self.roots[namespace] = root
            except MemoryError:
                self.names.pop(root, None)
                free_node(core, root)
                free_buffer(core, buffer)
                raise
        made.index = plant(core, place, n, buffer)
        made.generation = core.nodes[made.index].generation
        made.tree = self
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
        if reserve_entry(core):
            raise MemoryError("no memory for another payload")
        while len(self.payloads) < core.entry_size:
            self.payloads.append(None)
        self.payloads[attach(core, x, k, size, first)] = payload
        touch_path(core, x)

    cdef object drop_entry(self, int32_t e):
        """Detach a payload from its node and return it."""
        payload = self.payloads[e]
        self.payloads[e] = None
        detach(&self.core, e)
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
                spans.append(self.span(e, self.core.nodes[x].end))
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
        cdef Lock lock = Lock.__new__(Lock)
        if not 1 <= wanted <= node.length:
            raise ValueError(f"length {length}: expected 1..{node.length}")
        if cells and wanted != node.length:
            raise ValueError(f"length {length}: a lock with cells covers all {node.length} tokens of its node")
        if reserve_hold(core):
            raise MemoryError("no memory for another lock")
        h = new_hold(core)
        core.holds[h].length = <int32_t> wanted
        core.holds[h].cells = cells
        if wanted > core.nodes[x].begin:
            core.nodes[x].flags &= ~FRESH
        lock_path(core, x, h)
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
        free_hold(core, h)
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
