"""The child table: (node, first token) -> child, for all nodes of a tree.

Open addressing with linear probing; an entry that leaves is closed up by moving the ones behind it, so there are no
tombstones and a look-up costs the same after a million changes.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef struct Slot:
    int32_t node
    int32_t token
    int32_t child    # -1: empty

cdef struct Table:
    Slot* slots
    uint64_t mask    # slots - 1
    int shift        # 64 - log2(slots)
    int64_t used


cdef inline uint64_t home(const Table* table, int32_t node, int32_t token) noexcept nogil:
    cdef uint64_t key = (<uint64_t> <uint32_t> node) << 32 | <uint32_t> token
    key ^= key >> 29
    return (key * <uint64_t> 0x9E3779B97F4A7C15) >> table.shift


cdef inline int32_t find_child(const Table* table, int32_t node, int32_t token) noexcept nogil:
    """The child, or -1.  O(1)."""
    cdef uint64_t i
    cdef const Slot* slot
    i = home(table, node, token)
    while True:
        slot = &table.slots[i]
        if slot.child < 0 or (slot.node == node and slot.token == token):
            return slot.child
        i = (i + 1) & table.mask


cdef inline void set_child(Table* table, int32_t node, int32_t token, int32_t child) noexcept nogil:
    """Add or replace; room must have been made before."""
    cdef uint64_t i = home(table, node, token)
    while table.slots[i].child >= 0 and not (table.slots[i].node == node and table.slots[i].token == token):
        i = (i + 1) & table.mask
    if table.slots[i].child < 0:
        table.used += 1
    table.slots[i].node = node
    table.slots[i].token = token
    table.slots[i].child = child


cdef inline void remove_child(Table* table, int32_t node, int32_t token) noexcept nogil:
    cdef uint64_t i = home(table, node, token), gap, wanted
    while not (table.slots[i].node == node and table.slots[i].token == token):
        i = (i + 1) & table.mask
    gap = i
    while True:
        i = (i + 1) & table.mask
        if table.slots[i].child < 0:
            break
        wanted = home(table, table.slots[i].node, table.slots[i].token)
        if ((i - wanted) & table.mask) >= ((i - gap) & table.mask):
            table.slots[gap] = table.slots[i]
            gap = i
    table.slots[gap].child = -1
    table.used -= 1
