"""What the nodes are used for: residents and their cells, recency, locks, and what goes when nothing uses it."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t

from skippy._radix_core cimport (
    CHECKPOINT,
    FRESH,
    KIND_COUNT,
    LOGITS,
    NONE,
    RESIDENT,
    SEGMENT,
    UNMERGED,
    Core,
    Entry,
    Hold,
    Kind,
    Place,
    Radix,
    add_above,
    add_leaf,
    free_entry,
    link,
    merge_down,
    new_entry,
    new_node,
    remove_leaf,
    unlink,
)


# ---------------------------------------------------------------------------------------------------------------------
# Residents and cells
# ---------------------------------------------------------------------------------------------------------------------

cdef inline void add_support(Core* core, int32_t x) noexcept nogil:
    """One more thing at `x` needs the cells of its path.  O(edges that had none)."""
    while core.nodes[x].parent != NONE:
        core.nodes[x].supports += 1
        if core.nodes[x].supports > 1:
            return
        core.cells += core.nodes[x].end - core.nodes[x].begin
        x = core.nodes[x].parent


cdef inline void drop_support(Core* core, int32_t x) noexcept nogil:
    while core.nodes[x].parent != NONE:
        core.nodes[x].supports -= 1
        if core.nodes[x].supports > 0:
            return
        core.cells -= core.nodes[x].end - core.nodes[x].begin
        x = core.nodes[x].parent


cdef inline void add_holder(Core* core, int32_t x) noexcept nogil:
    """`x` carries a resident now: it is the holder of every node above it that had none.

    A node's holder is itself or the holder of one of its children, so the nodes with one holder form a chain that
    starts at it: walking up may stop where the pointer is another's.
    """
    cdef Radix* nodes = core.nodes
    cdef int32_t holder = x
    while x != NONE and nodes[x].holder == NONE:
        nodes[x].holder = holder
        if nodes[x].parent != NONE:
            unlink(core, nodes[x].parent, x)
            link(core, nodes[x].parent, x, True)
        x = nodes[x].parent


cdef inline void drop_holder(Core* core, int32_t x) noexcept nogil:
    """`x` carries no resident any more; its entry has been cleared."""
    cdef Radix* nodes = core.nodes
    cdef int32_t holder = x
    while x != NONE and nodes[x].holder == holder:
        if nodes[x].entry[RESIDENT] != NONE:
            nodes[x].holder = x
        elif nodes[x].first != NONE:
            nodes[x].holder = nodes[nodes[x].first].holder
        else:
            nodes[x].holder = NONE
        if nodes[x].holder == NONE and nodes[x].parent != NONE:
            unlink(core, nodes[x].parent, x)
            link(core, nodes[x].parent, x, False)
        x = nodes[x].parent


# ---------------------------------------------------------------------------------------------------------------------
# Recency
# ---------------------------------------------------------------------------------------------------------------------

cdef inline void enlist(Core* core, int32_t e) noexcept nogil:
    """Put an entry at the recent end of its kind's list."""
    cdef Entry* entry = &core.entries[e]
    cdef Kind* kind = &core.kinds[entry.kind]
    entry.next = NONE
    entry.previous = kind.tail
    if kind.tail == NONE:
        kind.head = e
    else:
        core.entries[kind.tail].next = e
    kind.tail = e
    kind.listed += 1
    entry.listed = True


cdef inline void delist(Core* core, int32_t e) noexcept nogil:
    cdef Entry* entry = &core.entries[e]
    cdef Kind* kind = &core.kinds[entry.kind]
    if entry.previous == NONE:
        kind.head = entry.next
    else:
        core.entries[entry.previous].next = entry.next
    if entry.next == NONE:
        kind.tail = entry.previous
    else:
        core.entries[entry.next].previous = entry.previous
    kind.listed -= 1
    entry.listed = False


cdef inline int32_t entry_at(const Core* core, const Radix* node, int kind) noexcept nogil:
    """The entry that a walk up a path meets at this node, or NONE.

    A segment is met where it begins, since its end may lie off the path; anything else where it ends.
    """
    if kind != SEGMENT:
        return node.entry[kind]
    if node.segment != NONE and core.entries[node.segment].start == node.begin:
        return node.segment
    return NONE


cdef inline void touch_node(Core* core, int32_t x, uint64_t now) noexcept nogil:
    cdef int kind
    cdef int32_t e
    core.nodes[x].used = now
    for kind in range(KIND_COUNT):
        e = entry_at(core, &core.nodes[x], kind)
        if e == NONE:
            continue
        core.clock += 1
        core.entries[e].tick = core.clock
        if core.entries[e].listed:
            delist(core, e)
            enlist(core, e)
        elif core.nodes[x].locks == 0:
            enlist(core, e)


cdef inline void touch_path(Core* core, int32_t x) noexcept nogil:
    """Deepest first, so that nothing is less recent than what lies below it.  O(nodes on the path)."""
    cdef uint64_t now
    core.clock += 1
    now = core.clock
    while core.nodes[x].parent != NONE:
        touch_node(core, x, now)
        x = core.nodes[x].parent


# ---------------------------------------------------------------------------------------------------------------------
# Payloads
# ---------------------------------------------------------------------------------------------------------------------

cdef inline bint has_nothing(const Radix* node) noexcept nogil:
    return (node.entry[RESIDENT] == NONE and node.entry[SEGMENT] == NONE and node.entry[CHECKPOINT] == NONE
            and node.entry[LOGITS] == NONE)


cdef inline int32_t attach(Core* core, int32_t x, int kind, int64_t size, int32_t start) noexcept nogil:
    """A new entry at `x`, to be touched by the caller.  Room must have been reserved.  O(nodes on the path)."""
    cdef int32_t e = new_entry(core), above = x
    core.entries[e].bytes = size
    core.entries[e].node = x
    core.entries[e].start = start
    core.entries[e].kind = kind
    core.entries[e].listed = False
    core.kinds[kind].count += 1
    core.kinds[kind].bytes += size
    core.nodes[x].entry[kind] = e
    core.nodes[x].flags &= ~FRESH
    if kind == SEGMENT:
        while core.nodes[above].begin >= start and core.nodes[above].parent != NONE:
            core.nodes[above].segment = e
            above = core.nodes[above].parent
    elif kind == RESIDENT:
        add_support(core, x)
        add_holder(core, x)
    return e


cdef inline void detach(Core* core, int32_t e) noexcept nogil:
    cdef int32_t x = core.entries[e].node, above = x
    cdef int kind = core.entries[e].kind
    if core.entries[e].listed:
        delist(core, e)
    core.kinds[kind].count -= 1
    core.kinds[kind].bytes -= core.entries[e].bytes
    core.nodes[x].entry[kind] = NONE
    if kind == SEGMENT:
        while core.nodes[above].segment == e:
            core.nodes[above].segment = NONE
            above = core.nodes[above].parent
    elif kind == RESIDENT:
        drop_support(core, x)
        drop_holder(core, x)
    free_entry(core, e)


# ---------------------------------------------------------------------------------------------------------------------
# What goes when nothing uses it
# ---------------------------------------------------------------------------------------------------------------------

cdef inline bint is_bare(const Radix* node) noexcept nogil:
    return has_nothing(node) and node.parent != NONE and node.locks == 0 and not node.flags & FRESH


cdef inline bint is_mergeable(const Core* core, const Radix* node) noexcept nogil:
    """Bare, with one child, and no segment begins or ends between the two."""
    return node.children == 1 and core.nodes[node.first].segment == node.segment and is_bare(node)


cdef inline bint tidy_node(Core* core, int32_t x) noexcept nogil:
    """Remove a bare leaf, merge a bare node into its only child.  True if a leaf went, so that its parent is next."""
    cdef Radix* node = &core.nodes[x]
    node.flags &= ~UNMERGED
    if node.children == 0 and is_bare(node):
        remove_leaf(core, x)
        return True
    if is_mergeable(core, node):
        merge_down(core, x)
    return False


cdef inline void tidy(Core* core, int32_t x, int32_t down_to) noexcept nogil:
    """Tidy `x` and the nodes above it: all that end at `down_to` or deeper, then as long as leaves go."""
    cdef int32_t parent
    while core.nodes[x].parent != NONE:
        parent = core.nodes[x].parent
        if not tidy_node(core, x) and core.nodes[parent].end < down_to:
            return
        x = parent


# ---------------------------------------------------------------------------------------------------------------------
# Locks
# ---------------------------------------------------------------------------------------------------------------------

cdef inline void add_end(Core* core, int32_t x, int32_t h) noexcept nogil:
    cdef Hold* hold = &core.holds[h]
    hold.node = x
    hold.previous = NONE
    hold.next = core.nodes[x].ends
    if hold.next != NONE:
        core.holds[hold.next].previous = h
    core.nodes[x].ends = h


cdef inline void drop_end(Core* core, int32_t h) noexcept nogil:
    cdef Hold* hold = &core.holds[h]
    if hold.previous == NONE:
        core.nodes[hold.node].ends = hold.next
    else:
        core.holds[hold.previous].next = hold.next
    if hold.next != NONE:
        core.holds[hold.next].previous = hold.previous


cdef inline void lock_path(Core* core, int32_t x, int32_t h) noexcept nogil:
    """Protect the first `length` tokens of the path of `x`.  O(nodes on the path)."""
    cdef int kind
    cdef int32_t e
    while core.nodes[x].begin >= core.holds[h].length:
        x = core.nodes[x].parent
    add_end(core, x, h)
    if core.holds[h].cells:
        add_support(core, x)
    while core.nodes[x].parent != NONE:
        core.nodes[x].locks += 1
        if core.nodes[x].locks == 1:
            for kind in range(KIND_COUNT):
                e = entry_at(core, &core.nodes[x], kind)
                if e != NONE:
                    delist(core, e)
        x = core.nodes[x].parent


cdef inline void unlock_path(Core* core, int32_t h) noexcept nogil:
    """Undo lock_path, touch what was protected, and tidy up behind it."""
    cdef int32_t x = core.holds[h].node, parent
    cdef uint64_t now
    drop_end(core, h)
    if core.holds[h].cells:
        drop_support(core, x)
    core.clock += 1
    now = core.clock
    while core.nodes[x].parent != NONE:
        parent = core.nodes[x].parent
        core.nodes[x].locks -= 1
        touch_node(core, x, now)
        tidy_node(core, x)
        x = parent


cdef inline bint move_ends(Core* core, int32_t u, int32_t x) noexcept nogil:
    """`u` was split off above `x`: locks that end in its part let go of `x`.  True if that freed what `x` carries."""
    cdef Radix* lower = &core.nodes[x]
    cdef int32_t h = lower.ends, next
    cdef bint was_locked = lower.locks > 0
    while h != NONE:
        next = core.holds[h].next
        if core.holds[h].length <= core.nodes[u].end:
            drop_end(core, h)
            add_end(core, u, h)
            lower.locks -= 1
        h = next
    return was_locked and lower.locks == 0


# ---------------------------------------------------------------------------------------------------------------------
# Insert
# ---------------------------------------------------------------------------------------------------------------------

cdef inline int32_t plant(Core* core, Place place, int32_t n, int32_t buffer) noexcept nogil:
    """The node that ends after `n` tokens, where a walk came to `place`: `buffer` holds the rest, NONE if none is left.

    Room for two nodes must have been reserved.
    """
    cdef int32_t x = place.node, u = place.node, leaf
    cdef bint freed = False
    core.clock += 1
    if place.at < core.nodes[x].end:
        u = new_node(core)
        add_above(core, u, x, <int32_t> place.at)
        freed = move_ends(core, u, x)
    leaf = u
    if buffer != NONE:
        leaf = new_node(core)
        add_leaf(core, u, leaf, buffer, n)
        core.nodes[leaf].used = core.clock
    if has_nothing(&core.nodes[leaf]):
        core.nodes[leaf].flags |= FRESH
    if freed:
        touch_path(core, x)
        tidy(core, x, INT32_MAX)
    return leaf
