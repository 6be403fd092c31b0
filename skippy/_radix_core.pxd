"""The tree's memory and shape: flat arrays by int32 index, edges over shared buffers, split and merge.

Nothing here knows what a payload is good for, nothing recurses, and everything that can fail for want of memory stands
in the `reserve_` functions: once they have succeeded, a change goes through.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memmove, memset

from skippy._radix_table cimport Slot, Table, find_child, remove_child, set_child
from skippy._radix_tokens cimport Source, agree, fill

cdef enum:
    NONE = -1
    RESIDENT = 0
    SEGMENT = 1
    CHECKPOINT = 2
    LOGITS = 3
    KIND_COUNT = 4
    FRESH = 1        # flag: handed out by insert, and nothing put or locked since
    UNMERGED = 2     # flag: merging it into its child failed for want of memory

cdef struct Radix:
    # -- looked at by every match
    int32_t begin         # tokens from the root to the start of its edge
    int32_t end           # tokens from the root to its own end
    int32_t buffer        # its edge: end - begin tokens from `offset` of this buffer; NONE for a root
    int32_t offset
    int32_t holder        # a node at or below it that carries a resident, or NONE
    int32_t segment       # the entry of the segment that covers its edge, or NONE
    int32_t[4] entry      # the entry of each kind that ends here, or NONE
    int32_t parent        # NONE for a root
    int32_t first         # its children: those with a holder at the front
    int32_t next          # its siblings; the last has NONE
    int32_t previous      # the first child's is the last child
    # -- looked at when things change
    int32_t children
    int32_t root
    int32_t supports      # own resident, own locks with cells, and children with supports: 0 when it holds no cells
    int32_t locks         # locks whose length reaches into its edge
    int32_t ends          # the first of the locks whose length ends in its edge, or NONE
    uint32_t generation   # raised when the node goes; 0 while free
    uint64_t used         # clock when it was made or last touched
    uint8_t flags

cdef struct Buffer:
    int32_t* data         # tokens low .. high; may be longer
    int32_t origin        # the offset that data[0] has
    int32_t size          # tokens allocated, 0 while free
    int32_t low           # the offsets that edges still use
    int32_t high
    int32_t edges         # edges over it; they follow one another down one path

cdef struct Entry:
    int64_t bytes
    uint64_t tick         # clock when it was put or last touched
    int32_t node          # where the payload ends; NONE while free
    int32_t start         # segments: first token that it covers
    int32_t previous      # less recent
    int32_t next          # more recent; the free list
    uint8_t kind
    uint8_t listed        # unlocked, and therefore in its kind's list

cdef struct Hold:         # a lock
    int32_t node          # the node in whose edge the length ends; NONE while free
    int32_t length        # leading tokens that it protects
    int32_t previous
    int32_t next
    uint32_t generation
    uint8_t cells

cdef struct Kind:
    int32_t head          # least recent
    int32_t tail
    int64_t count
    int64_t listed
    int64_t bytes

cdef struct Core:
    Radix* nodes
    Buffer* buffers
    Entry* entries
    Hold* holds
    int32_t node_top, node_size, node_free, node_spare       # used at least once, allocated, free list and its length
    int32_t buffer_top, buffer_size, buffer_free
    int32_t entry_top, entry_size, entry_free
    int32_t hold_top, hold_size, hold_free
    Table table
    Kind[4] kinds
    int64_t node_count    # without roots
    int64_t hold_count
    int64_t tokens        # tokens in edges
    int64_t buffer_tokens # tokens allocated in buffers
    int64_t cells
    uint64_t clock
    int64_t fail_after    # tests: allocations that still succeed, -1 for all

cdef struct Place:
    int32_t node          # the last node reached; the root if none
    int32_t steps         # edges looked at
    Py_ssize_t at         # tokens in common


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------

cdef inline void* resize(Core* core, void* old, int64_t count, size_t size) noexcept nogil:
    if core.fail_after >= 0:
        core.fail_after -= 1
        if core.fail_after < 0:
            return NULL
    if <uint64_t> count > (<size_t> -1) // size:
        return NULL
    return realloc(old, <size_t> count * size)


cdef inline int64_t grown(int32_t size, int64_t needed) noexcept nogil:
    """The next size of an array, at most what an int32 can index; 0 if that is not enough."""
    cdef int64_t wanted = <int64_t> size + size // 8 + 16
    if wanted < needed:
        wanted = needed
    if wanted > INT32_MAX:
        wanted = INT32_MAX
    return wanted if wanted >= needed else 0


cdef inline int reserve_nodes(Core* core, int32_t count) noexcept nogil:
    """Room for `count` more nodes and their places in the child table; -1 when there is no memory."""
    cdef int64_t wanted, slots, i
    cdef int shift
    cdef void* room
    cdef Table old
    if core.node_spare + (core.node_size - core.node_top) < count:
        wanted = grown(core.node_size, <int64_t> core.node_size + count)
        room = resize(core, core.nodes, wanted, sizeof(Radix)) if wanted else NULL
        if room == NULL:
            return -1
        core.nodes = <Radix*> room
        core.node_size = <int32_t> wanted
    slots = <int64_t> core.table.mask + 1 if core.table.slots != NULL else 0
    if (core.table.used + count) * 5 > slots * 4:
        shift = core.table.shift - 1 if slots else 60
        slots = slots * 2 if slots else 16
        room = resize(core, NULL, slots, sizeof(Slot))
        if room == NULL:
            return -1
        old = core.table
        core.table.slots = <Slot*> room
        core.table.mask = slots - 1
        core.table.shift = shift
        core.table.used = 0
        memset(room, 0xFF, <size_t> slots * sizeof(Slot))
        if old.slots != NULL:
            for i in range(<int64_t> old.mask + 1):
                if old.slots[i].child >= 0:
                    set_child(&core.table, old.slots[i].node, old.slots[i].token, old.slots[i].child)
            free(old.slots)
    return 0


cdef inline int32_t new_node(Core* core) noexcept nogil:
    """A node without a place.  Room must have been reserved."""
    cdef int32_t x = core.node_free
    cdef uint32_t generation = 1
    cdef Radix* node
    if x != NONE:
        node = &core.nodes[x]
        core.node_free = node.next
        core.node_spare -= 1
        generation = <uint32_t> node.previous + 1
    else:
        x = core.node_top
        node = &core.nodes[x]
        core.node_top += 1
    memset(node, 0xFF, sizeof(Radix))
    node.generation = generation
    node.begin = node.end = node.children = node.supports = node.locks = 0
    node.used = 0
    node.flags = 0
    return x


cdef inline void free_node(Core* core, int32_t x) noexcept nogil:
    cdef Radix* node = &core.nodes[x]
    cdef uint32_t generation = node.generation
    node.generation = 0
    node.parent = NONE
    if generation < <uint32_t> 0xFFFFFFFE:     # else no number is left that no old handle has: the node is given up
        node.previous = <int32_t> generation
        node.next = core.node_free
        core.node_free = x
        core.node_spare += 1


cdef inline int32_t new_buffer(Core* core, int64_t size) noexcept nogil:
    """A buffer of `size` tokens, for one edge; NONE when there is no memory."""
    cdef int64_t wanted
    cdef void* room
    cdef int32_t b
    if core.buffer_free == NONE and core.buffer_top == core.buffer_size:
        wanted = grown(core.buffer_size, <int64_t> core.buffer_size + 1)
        room = resize(core, core.buffers, wanted, sizeof(Buffer)) if wanted else NULL
        if room == NULL:
            return NONE
        core.buffers = <Buffer*> room
        core.buffer_size = <int32_t> wanted
    room = resize(core, NULL, size, sizeof(int32_t))
    if room == NULL:
        return NONE
    if core.buffer_free != NONE:
        b = core.buffer_free
        core.buffer_free = core.buffers[b].origin
    else:
        b = core.buffer_top
        core.buffer_top += 1
    core.buffers[b].data = <int32_t*> room
    core.buffers[b].origin = core.buffers[b].low = 0
    core.buffers[b].size = core.buffers[b].high = <int32_t> size
    core.buffers[b].edges = 1
    core.buffer_tokens += size
    return b


cdef inline void free_buffer(Core* core, int32_t b) noexcept nogil:
    core.buffer_tokens -= core.buffers[b].size
    free(core.buffers[b].data)
    core.buffers[b].data = NULL
    core.buffers[b].size = 0
    core.buffers[b].origin = core.buffer_free
    core.buffer_free = b


cdef inline void drop_edge(Core* core, const Radix* node) noexcept nogil:
    """The node's edge leaves its buffer.  Edges follow one another down a path, so what leaves is at an end."""
    cdef Buffer* buffer = &core.buffers[node.buffer]
    cdef int32_t kept
    cdef void* room
    buffer.edges -= 1
    if buffer.edges == 0:
        free_buffer(core, node.buffer)
        return
    if node.offset == buffer.low:
        buffer.low += node.end - node.begin
    else:
        buffer.high = node.offset
    kept = buffer.high - buffer.low
    if kept <= buffer.size // 2:               # never more than half of a buffer is unused
        if buffer.low != buffer.origin:
            memmove(buffer.data, buffer.data + (buffer.low - buffer.origin), kept * sizeof(int32_t))
            buffer.origin = buffer.low
        room = realloc(buffer.data, kept * sizeof(int32_t))
        if room != NULL:
            buffer.data = <int32_t*> room
            core.buffer_tokens -= buffer.size - kept
            buffer.size = kept


cdef inline int32_t* edge_of(const Core* core, const Radix* node) noexcept nogil:
    cdef const Buffer* buffer = &core.buffers[node.buffer]
    return buffer.data + (node.offset - buffer.origin)


cdef inline int reserve_entry(Core* core) noexcept nogil:
    """Room for one more payload; -1 when there is no memory."""
    cdef int64_t wanted
    cdef void* room
    if core.entry_free == NONE and core.entry_top == core.entry_size:
        wanted = grown(core.entry_size, <int64_t> core.entry_size + 1)
        room = resize(core, core.entries, wanted, sizeof(Entry)) if wanted else NULL
        if room == NULL:
            return -1
        core.entries = <Entry*> room
        core.entry_size = <int32_t> wanted
    return 0


cdef inline int32_t new_entry(Core* core) noexcept nogil:
    cdef int32_t e = core.entry_free
    if e != NONE:
        core.entry_free = core.entries[e].next
    else:
        e = core.entry_top
        core.entry_top += 1
    return e


cdef inline void free_entry(Core* core, int32_t e) noexcept nogil:
    core.entries[e].node = NONE
    core.entries[e].next = core.entry_free
    core.entry_free = e


cdef inline int reserve_hold(Core* core) noexcept nogil:
    """Room for one more lock; -1 when there is no memory."""
    cdef int64_t wanted
    cdef void* room
    if core.hold_free == NONE and core.hold_top == core.hold_size:
        wanted = grown(core.hold_size, <int64_t> core.hold_size + 1)
        room = resize(core, core.holds, wanted, sizeof(Hold)) if wanted else NULL
        if room == NULL:
            return -1
        core.holds = <Hold*> room
        core.hold_size = <int32_t> wanted
    return 0


cdef inline int32_t new_hold(Core* core) noexcept nogil:
    cdef int32_t h = core.hold_free
    if h != NONE:
        core.hold_free = core.holds[h].next
    else:
        h = core.hold_top
        core.hold_top += 1
        core.holds[h].generation = 0
    core.hold_count += 1
    return h


cdef inline void free_hold(Core* core, int32_t h) noexcept nogil:
    core.holds[h].node = NONE
    core.holds[h].generation += 1
    core.holds[h].next = core.hold_free
    core.hold_free = h
    core.hold_count -= 1


# ---------------------------------------------------------------------------------------------------------------------
# Siblings
# ---------------------------------------------------------------------------------------------------------------------

cdef inline void link(Core* core, int32_t parent, int32_t x, bint front) noexcept nogil:
    cdef Radix* nodes = core.nodes
    cdef int32_t first = nodes[parent].first
    if first == NONE:
        nodes[x].previous = x
        nodes[x].next = NONE
        nodes[parent].first = x
        return
    nodes[x].previous = nodes[first].previous
    if front:
        nodes[x].next = first
        nodes[parent].first = x
    else:
        nodes[x].next = NONE
        nodes[nodes[first].previous].next = x
    nodes[first].previous = x


cdef inline void unlink(Core* core, int32_t parent, int32_t x) noexcept nogil:
    cdef Radix* nodes = core.nodes
    cdef int32_t previous = nodes[x].previous, next = nodes[x].next
    if nodes[parent].first == x:
        nodes[parent].first = next
    else:
        nodes[previous].next = next
    if next != NONE:
        nodes[next].previous = previous
    elif nodes[parent].first != NONE:
        nodes[nodes[parent].first].previous = previous


cdef inline void replace(Core* core, int32_t parent, int32_t x, int32_t y) noexcept nogil:
    """`y` takes the place of `x` among the children of `parent`."""
    cdef Radix* nodes = core.nodes
    cdef int32_t previous = nodes[x].previous, next = nodes[x].next
    nodes[y].next = next
    nodes[y].previous = previous
    if nodes[parent].first == x:
        nodes[parent].first = y
    else:
        nodes[previous].next = y
    if next != NONE:
        nodes[next].previous = y
    else:
        nodes[nodes[parent].first].previous = y


# ---------------------------------------------------------------------------------------------------------------------
# Shape
# ---------------------------------------------------------------------------------------------------------------------

cdef inline Place walk(const Core* core, Source* source, int32_t root) noexcept:
    """Follow the tokens as far as they agree with what is stored."""
    cdef Place place
    cdef const Radix* node
    cdef int32_t child
    cdef Py_ssize_t same
    place.node = root
    place.at = 0
    place.steps = 0
    while place.at < source.n:
        if place.at >= source.ready:
            fill(source, place.at + 1)
            if place.at >= source.ready:
                break
        child = find_child(&core.table, place.node, source.data[place.at])
        if child < 0:
            break
        node = &core.nodes[child]
        place.node = child
        place.steps += 1
        same = agree(source, place.at, edge_of(core, node), node.end - node.begin)
        place.at += same
        if place.at < node.end:
            break
    return place


cdef inline void add_leaf(Core* core, int32_t parent, int32_t x, int32_t buffer, int32_t end) noexcept nogil:
    cdef Radix* node = &core.nodes[x]
    node.parent = parent
    node.root = core.nodes[parent].root
    node.begin = core.nodes[parent].end
    node.end = end
    node.buffer = buffer
    node.offset = 0
    link(core, parent, x, False)
    core.nodes[parent].children += 1
    set_child(&core.table, parent, core.buffers[buffer].data[0], x)
    core.node_count += 1
    core.tokens += end - node.begin


cdef inline void add_above(Core* core, int32_t u, int32_t x, int32_t at) noexcept nogil:
    """Split the edge of `x` after `at` tokens of the path: `u` takes the first part, over the same buffer."""
    cdef Radix* upper = &core.nodes[u]
    cdef Radix* lower = &core.nodes[x]
    cdef int32_t parent = lower.parent, cut = at - lower.begin
    cdef int32_t* edge = edge_of(core, lower)
    upper.parent = parent
    upper.root = lower.root
    upper.begin = lower.begin
    upper.end = at
    upper.buffer = lower.buffer
    upper.offset = lower.offset
    upper.holder = lower.holder
    upper.segment = lower.segment
    upper.supports = lower.supports > 0
    upper.locks = lower.locks
    upper.used = lower.used
    core.buffers[lower.buffer].edges += 1
    replace(core, parent, x, u)
    set_child(&core.table, parent, edge[0], u)
    set_child(&core.table, u, edge[cut], x)
    lower.parent = u
    lower.begin = at
    lower.offset += cut
    link(core, u, x, True)
    upper.children = 1
    core.node_count += 1


cdef inline void remove_leaf(Core* core, int32_t x) noexcept nogil:
    cdef Radix* node = &core.nodes[x]
    remove_child(&core.table, node.parent, edge_of(core, node)[0])
    unlink(core, node.parent, x)
    core.nodes[node.parent].children -= 1
    core.node_count -= 1
    core.tokens -= node.end - node.begin
    drop_edge(core, node)
    free_node(core, x)


cdef inline bint merge_down(Core* core, int32_t u) noexcept nogil:
    """The only child of `u` takes over its edge, and `u` goes.  False when there is no memory to join the edges."""
    cdef Radix* upper = &core.nodes[u]
    cdef int32_t x = upper.first, buffer
    cdef Radix* lower = &core.nodes[x]
    cdef int32_t head = upper.end - upper.begin, tail = lower.end - lower.begin
    cdef int32_t first_upper = edge_of(core, upper)[0], first_lower = edge_of(core, lower)[0]
    if upper.buffer == lower.buffer:
        core.buffers[upper.buffer].edges -= 1
        lower.offset = upper.offset
    else:
        buffer = new_buffer(core, <int64_t> head + tail)
        if buffer == NONE:
            upper.flags |= UNMERGED
            return False
        memcpy(core.buffers[buffer].data, edge_of(core, upper), head * sizeof(int32_t))
        memcpy(core.buffers[buffer].data + head, edge_of(core, lower), tail * sizeof(int32_t))
        drop_edge(core, upper)
        drop_edge(core, lower)
        lower.buffer = buffer
        lower.offset = 0
    remove_child(&core.table, u, first_lower)
    set_child(&core.table, upper.parent, first_upper, x)
    replace(core, upper.parent, u, x)
    lower.parent = upper.parent
    lower.begin = upper.begin
    lower.used = upper.used                    # siblings are compared by when their first token was made or touched
    core.node_count -= 1
    free_node(core, u)
    return True
