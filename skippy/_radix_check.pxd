"""The proof that a tree is sound: everything that is kept as things change is worked out afresh and compared."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from skippy._radix_core cimport (
    FRESH,
    KIND_COUNT,
    NONE,
    RESIDENT,
    SEGMENT,
    UNMERGED,
    Buffer,
    Core,
    Entry,
    Hold,
    Radix,
    edge_of,
)
from skippy._radix_table cimport find_child
from skippy._radix_use cimport entry_at, is_bare, is_mergeable


cdef inline int hold_true(bint condition, str reason, object place) except -1:
    if not condition:
        raise AssertionError(f"{reason} ({place})")
    return 0


cdef inline list prove_shape(const Core* core, dict roots, dict names):
    """Structure, lengths, child table, siblings, counters of shape.  Returns all nodes, parents first."""
    cdef list order = [], stack = []
    cdef int32_t x, child, previous, root
    cdef int64_t tokens = 0
    cdef int32_t children
    cdef bint held
    cdef const Radix* node
    cdef const Radix* below
    hold_true(len(roots) == len(names), "as many names as roots", len(names))
    for namespace, root in roots.items():
        hold_true(names.get(root) == namespace, "a root has its namespace's name", namespace)
        hold_true(core.nodes[root].parent == NONE and core.nodes[root].root == root, "a root is its own root", root)
        hold_true(core.nodes[root].children > 0, "a namespace goes with its last node", namespace)
        stack.append(root)
    while stack:
        x = stack.pop()
        order.append(x)
        node = &core.nodes[x]
        hold_true(node.generation > 0, "a node that is reached is not free", x)
        children = 0
        held = True
        previous = NONE
        child = node.first
        while child != NONE:
            below = &core.nodes[child]
            hold_true(below.parent == x and below.root == node.root, "a child knows its parent and its root", child)
            hold_true(below.begin == node.end < below.end, "an edge begins where its parent ends", child)
            hold_true(find_child(&core.table, x, edge_of(core, below)[0]) == child, "the table has each child", child)
            hold_true(previous == NONE or below.previous == previous, "siblings are linked both ways", child)
            hold_true(held or below.holder == NONE, "children with a holder stand in front", child)
            held = below.holder != NONE
            tokens += below.end - below.begin
            children += 1
            stack.append(child)
            previous = child
            child = below.next
        hold_true(children == node.children, "children are counted", x)
        hold_true(node.first == NONE or core.nodes[node.first].previous == previous, "the first knows the last", x)
        hold_true(node.parent == NONE or children > 0 or not is_bare(node), "no bare leaf stays", x)
        hold_true(not is_mergeable(core, node) or node.flags & UNMERGED, "no bare node with one child stays", x)
    hold_true(core.table.used == core.node_count, "the table has nothing but children", core.table.used)
    hold_true(len(order) - len(roots) == core.node_count, "nodes are counted", core.node_count)
    hold_true(tokens == core.tokens, "tokens in edges are counted", core.tokens)
    return order


cdef inline int prove_free_lists(const Core* core, Py_ssize_t reached) except -1:
    cdef int32_t i = core.node_free, count = 0, free_slots = 0
    while i != NONE:
        hold_true(core.nodes[i].generation == 0, "a free node has no generation", i)
        count += 1
        i = core.nodes[i].next
    hold_true(count == core.node_spare, "free nodes are counted", count)
    hold_true(reached + count <= core.node_top, "nodes are reached or free", count)
    for i in range(core.node_top):
        free_slots += core.nodes[i].generation == 0
    hold_true(reached + free_slots == core.node_top, "no node is lost", free_slots)
    count = free_slots = 0
    i = core.entry_free
    while i != NONE:
        hold_true(core.entries[i].node == NONE, "a free payload has no node", i)
        count += 1
        i = core.entries[i].next
    for i in range(core.entry_top):
        free_slots += core.entries[i].node == NONE
    hold_true(count == free_slots, "no payload slot is lost", count)
    count = free_slots = 0
    i = core.hold_free
    while i != NONE:
        hold_true(core.holds[i].node == NONE, "a free lock has no node", i)
        count += 1
        i = core.holds[i].next
    for i in range(core.hold_top):
        free_slots += core.holds[i].node == NONE
    hold_true(count == free_slots, "no lock slot is lost", count)
    hold_true(core.hold_top - count == core.hold_count, "locks are counted", core.hold_count)
    count = free_slots = 0
    i = core.buffer_free
    while i != NONE:
        hold_true(core.buffers[i].data == NULL, "a free buffer has no memory", i)
        count += 1
        i = core.buffers[i].origin
    for i in range(core.buffer_top):
        free_slots += core.buffers[i].data == NULL
    hold_true(count == free_slots, "no buffer is lost", count)
    return 0


cdef inline int prove_buffers(const Core* core, list order) except -1:
    """Each buffer is used by one run of edges down a path, without a gap."""
    cdef dict edges = {}, low = {}, high = {}
    cdef int32_t x, b
    cdef int64_t allocated = 0
    cdef const Radix* node
    cdef const Buffer* buffer
    for x in order:
        node = &core.nodes[x]
        b = node.buffer
        if node.parent == NONE:
            continue
        hold_true(0 <= b < core.buffer_top and core.buffers[b].data != NULL, "an edge has a buffer", x)
        if b in edges:
            hold_true(core.nodes[node.parent].buffer == b and high[b] == node.offset, "edges of a buffer follow on", x)
            edges[b] += 1
        else:
            edges[b] = 1
            low[b] = node.offset
        high[b] = node.offset + node.end - node.begin
    for b in range(core.buffer_top):
        buffer = &core.buffers[b]
        if buffer.data == NULL:
            hold_true(b not in edges and buffer.size == 0, "a free buffer has no edges", b)
            continue
        allocated += buffer.size
        hold_true(edges.get(b) == buffer.edges, "edges over a buffer are counted", b)
        hold_true(low[b] == buffer.low and high[b] == buffer.high, "a buffer knows what is used of it", b)
        hold_true(buffer.origin <= buffer.low and buffer.high <= buffer.origin + buffer.size, "edges lie inside", b)
        hold_true(2 * (buffer.high - buffer.low) >= buffer.size, "at most half of a buffer is unused", b)
    hold_true(allocated == core.buffer_tokens, "tokens in buffers are counted", core.buffer_tokens)
    return 0


cdef inline int prove_use(const Core* core, list order) except -1:
    """Holders, cells, locks, and the segments over each edge; worked out from the leaves up."""
    cdef dict supports = {}, locks = {}, residents = {}
    cdef int32_t x, h, e, parent, child
    cdef int64_t cells = 0, covered = 0, spans = 0
    cdef const Radix* node
    cdef const Hold* hold
    for h in range(core.hold_top):
        hold = &core.holds[h]
        if hold.node == NONE:
            continue
        node = &core.nodes[hold.node]
        hold_true(node.begin < hold.length <= node.end, "a lock ends in the edge it is kept at", h)
        hold_true(not hold.cells or hold.length == node.end, "a lock with cells ends at a node", h)
        locks[hold.node] = locks.get(hold.node, 0) + 1
        supports[hold.node] = supports.get(hold.node, 0) + hold.cells
    for x in order:
        h = core.nodes[x].ends
        child = NONE
        e = 0
        while h != NONE:
            hold_true(core.holds[h].node == x and core.holds[h].previous == child, "a node's locks are linked", x)
            e += 1
            child = h
            h = core.holds[h].next
        hold_true(e == locks.get(x, 0), "a node has its locks", x)
    for x in reversed(order):
        node = &core.nodes[x]
        parent = node.parent
        if node.entry[RESIDENT] != NONE:
            supports[x] = supports.get(x, 0) + 1
            residents[x] = residents.get(x, 0) + 1
        hold_true((node.holder != NONE) == (residents.get(x, 0) > 0), "who has residents below has a holder", x)
        if node.holder == x:
            hold_true(node.entry[RESIDENT] != NONE, "a holder carries a resident", x)
        elif node.holder != NONE:
            child = node.first
            while child != NONE and core.nodes[child].holder != node.holder:
                child = core.nodes[child].next
            hold_true(child != NONE, "a holder is a child's", x)
        if parent == NONE:
            hold_true(node.locks == 0 and node.supports == 0, "nothing is counted at a root", x)
            continue
        hold_true(node.supports == supports.get(x, 0), "what needs the cells of an edge is counted", x)
        hold_true(node.locks == locks.get(x, 0), "locks over an edge are counted", x)
        if node.supports:
            cells += node.end - node.begin
            supports[parent] = supports.get(parent, 0) + 1
        locks[parent] = locks.get(parent, 0) + node.locks
        residents[parent] = residents.get(parent, 0) + residents.get(x, 0)
        covered += node.segment != NONE
        e = node.entry[SEGMENT]
        if e == NONE:
            continue
        child = x
        while True:
            hold_true(core.nodes[child].segment == e, "a segment covers all of its edges", x)
            spans += 1
            if core.nodes[child].begin <= core.entries[e].start:
                break
            child = core.nodes[child].parent
        hold_true(core.nodes[child].begin == core.entries[e].start, "a segment begins where an edge does", x)
    hold_true(spans == covered, "an edge is covered by a segment that is there", covered)
    hold_true(cells == core.cells, "cells are counted once", core.cells)
    return 0


cdef inline int prove_recency(const Core* core, list payloads, list order) except -1:
    """Payloads, their counters and lists; and nothing is more recent than what lies above it."""
    cdef dict above = {}
    cdef list newest, counts = [0] * KIND_COUNT, sizes = [0] * KIND_COUNT, listed = [0] * KIND_COUNT
    cdef set ticks = set()
    cdef int32_t x, e, previous
    cdef int k
    cdef uint64_t tick
    cdef const Radix* node
    for x in order:
        node = &core.nodes[x]
        if node.parent == NONE:
            above[x] = [core.clock + 1] * KIND_COUNT
            continue
        newest = list(above[node.parent])
        hold_true(node.used <= core.clock, "the clock is ahead", x)
        for k in range(KIND_COUNT):
            e = node.entry[k]
            if e != NONE:
                hold_true(core.entries[e].node == x and core.entries[e].kind == k, "a payload knows its node", x)
                hold_true(payloads[e] is not None, "a payload is there", x)
                hold_true(not node.flags & FRESH, "a node with a payload is not fresh", x)
                counts[k] += 1
                sizes[k] += core.entries[e].bytes
            e = entry_at(core, node, k)
            if e != NONE:
                hold_true(core.entries[e].tick < newest[k], "what lies above is more recent", x)
                hold_true(core.entries[e].listed == (node.locks == 0), "what is unlocked is listed", x)
                newest[k] = core.entries[e].tick
                listed[k] += core.entries[e].listed
                ticks.add(core.entries[e].tick)
        above[x] = newest
    hold_true(len(ticks) == sum(counts), "no two payloads are equally recent", len(ticks))
    for k in range(KIND_COUNT):
        hold_true(core.kinds[k].count == counts[k], "payloads are counted", k)
        hold_true(core.kinds[k].bytes == sizes[k], "bytes are counted", k)
        hold_true(core.kinds[k].listed == listed[k], "unlocked payloads are counted", k)
        previous = NONE
        tick = 0
        e = core.kinds[k].head
        while e != NONE:
            hold_true(core.entries[e].kind == k and core.entries[e].listed, "a list holds its kind, unlocked", e)
            hold_true(core.entries[e].previous == previous, "a list is linked both ways", e)
            hold_true(core.entries[e].tick > tick, "a list runs from least to most recent", e)
            tick = core.entries[e].tick
            listed[k] -= 1
            previous = e
            e = core.entries[e].next
        hold_true(core.kinds[k].tail == previous and listed[k] == 0, "a list is whole", k)
    for e in range(core.entry_top):
        if core.entries[e].node == NONE:
            hold_true(payloads[e] is None, "a free slot keeps no payload", e)
    return 0
