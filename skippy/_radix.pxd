"""The Python faces of the tree: what a handle is made of."""

from libc.stdint cimport int32_t, uint32_t

from skippy._radix_core cimport Core, Place
from skippy._radix_tokens cimport Source


cdef class RadixTree:
    cdef Core core
    cdef list payloads          # by entry; None while free
    cdef dict roots             # namespace -> its root
    cdef dict names             # root -> its namespace
    cdef int32_t* scratch       # tokens of a list while it is looked up
    cdef Py_ssize_t scratch_size
    cdef object __weakref__

    cdef int32_t own(self, Node node) except -1
    cdef int32_t root_of(self, str namespace) except -2
    cdef int read(self, object sequence, Source* source) except -1
    cdef int find(self, str namespace, object tokens, Place* place, Py_ssize_t* n) except -1
    cdef int grow_places(self, Match found, int32_t room) except -1
    cdef Node add(self, str namespace, Source* source, Node made)
    cdef Node handle(self, int32_t x)
    cdef Span span(self, int32_t e, int32_t reach)
    cdef object drop_entry(self, int32_t e)
    cdef int forget_empty(self, int32_t root) except -1


cdef class Node:
    cdef RadixTree tree
    cdef int32_t index
    cdef uint32_t generation
    cdef readonly int length
    cdef readonly str namespace


cdef class Lock:
    cdef RadixTree tree
    cdef int32_t index
    cdef uint32_t generation
    cdef readonly Node node
    cdef readonly int length
    cdef readonly bint cells


cdef class Span:
    cdef readonly Node node
    cdef readonly int start
    cdef readonly int end
    cdef readonly int reach
    cdef readonly object payload


cdef class Match:
    cdef RadixTree tree
    cdef str namespace
    cdef readonly int matched
    cdef readonly int resident_length
    cdef readonly int segment_length
    cdef readonly int steps
    cdef readonly tuple segments
    cdef int32_t resident_index, logits_index
    cdef uint32_t resident_generation, logits_generation
    cdef int resident_end
    cdef int32_t* places        # checkpoints, deep to shallow: index, generation, length of each
    cdef Py_ssize_t place_count
    cdef Node place(self, Py_ssize_t i)
