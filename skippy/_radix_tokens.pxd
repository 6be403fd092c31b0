"""Tokens as a caller hands them in, and how far they agree with an edge.

A buffer of int32 is read where it lies.  The ints of a list are converted in blocks, just ahead of the comparison, so
that a prompt that differs early is never converted to its end.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int32_t
from libc.string cimport memcmp

cdef extern from *:
    """
    #include <stdint.h>
    #if PY_VERSION_HEX < 0x030B0000
    #include "longintrepr.h"
    #endif

    /* Where the ints of CPython 3.10 to 3.14 keep what matters here: the word behind the type is 1 (until 3.11,
       ob_size) or 8 (from 3.12, lv_tag) for a positive int of one digit, that is, 1 .. 2**30 - 1.  Elsewhere no int
       counts as such, and each is asked for its value. */
    #if PY_VERSION_HEX >= 0x030F0000
    #define SKIPPY_NOT_ONE_DIGIT(item) 1
    #define SKIPPY_DIGIT(item) 0
    #elif PY_VERSION_HEX >= 0x030C0000
    #define SKIPPY_NOT_ONE_DIGIT(item) (((PyLongObject *)(item))->long_value.lv_tag ^ 8)
    #define SKIPPY_DIGIT(item) ((int32_t)((PyLongObject *)(item))->long_value.ob_digit[0])
    #else
    #define SKIPPY_NOT_ONE_DIGIT(item) ((uintptr_t)((PyVarObject *)(item))->ob_size ^ 1)
    #define SKIPPY_DIGIT(item) ((int32_t)((PyLongObject *)(item))->ob_digit[0])
    #endif

    /* Convert whole blocks of 16 of the first `n` items, up to one with an item that needs a closer look; how many
       items that were.  There is no branch per item: what is no int is replaced by False, which is laid out like one
       and has no digits, since of another object nothing behind the type may be read. */
    static inline Py_ssize_t skippy_small_ints(PyObject **items, int32_t *out, Py_ssize_t n) {
        Py_ssize_t done = 0;
        for (; n - done >= 16; done += 16) {
            uintptr_t odd = 0;
            for (int k = 0; k < 16; k++) {
                PyObject *item = items[done + k];
                item = Py_TYPE(item) == &PyLong_Type ? item : Py_False;
                odd |= (uintptr_t)SKIPPY_NOT_ONE_DIGIT(item);
                out[done + k] = SKIPPY_DIGIT(item);
            }
            if (odd) break;
        }
        return done;
    }

    /* The value of an exact int of 0 .. 2**31 - 1, else -1.  Runs no Python code and sets no error. */
    static inline int32_t skippy_exact_int(PyObject *item) {
        int overflow = 0;
        long long value;
        if (!PyLong_CheckExact(item)) return -1;
        value = PyLong_AsLongLongAndOverflow(item, &overflow);
        return overflow || value < 0 || value > INT32_MAX ? -1 : (int32_t)value;
    }
    """
    Py_ssize_t skippy_small_ints(PyObject** items, int32_t* out, Py_ssize_t n) noexcept
    int32_t skippy_exact_int(PyObject* item) noexcept

cdef enum:
    BLOCK = 1024    # tokens in one call of memcmp while all is equal: long enough that the calls are free
    PART = 128      # then, in the block that differs
    FINE = 16       # and in the part that differs; as many ints are converted in one go
    AHEAD = 256     # ints that are converted ahead of the comparison

cdef struct Source:
    const int32_t* data    # the tokens, `ready` of them
    Py_ssize_t n           # tokens that the caller gave
    Py_ssize_t ready       # tokens that stand in data
    Py_ssize_t end         # n, or the index of the first item that is no plain token
    PyObject** items       # the ints of a list that are still to be converted, or NULL
    int32_t* scratch       # where they go; data points to it


cdef inline void fill(Source* source, Py_ssize_t want) noexcept:
    """Convert the list's items until `want` tokens are ready, or all that can be."""
    cdef Py_ssize_t stop
    cdef int32_t value
    if want > source.end:
        want = source.end
    while source.ready < want:
        source.ready += skippy_small_ints(
            source.items + source.ready, source.scratch + source.ready, want - source.ready)
        stop = source.ready + FINE if want - source.ready > FINE else want
        while source.ready < stop:
            value = skippy_exact_int(source.items[source.ready])
            if value < 0:
                source.end = source.ready
                return
            source.scratch[source.ready] = value
            source.ready += 1


cdef inline Py_ssize_t common(const int32_t* a, const int32_t* b, Py_ssize_t n) noexcept nogil:
    """How many of the first `n` tokens of `a` and `b` are equal."""
    cdef Py_ssize_t done = 0
    while n - done >= BLOCK and memcmp(a + done, b + done, BLOCK * sizeof(int32_t)) == 0:
        done += BLOCK
    while n - done >= PART and memcmp(a + done, b + done, PART * sizeof(int32_t)) == 0:
        done += PART
    while n - done >= FINE and memcmp(a + done, b + done, FINE * sizeof(int32_t)) == 0:
        done += FINE
    while done < n and a[done] == b[done]:
        done += 1
    return done


cdef inline Py_ssize_t agree(Source* source, Py_ssize_t at, const int32_t* edge, Py_ssize_t length) noexcept:
    """How many tokens of the edge equal the source's from `at` on."""
    cdef Py_ssize_t done = 0, same, step
    if source.n - at < length:
        length = source.n - at
    if source.ready == source.n:
        return common(source.data + at, edge, length)
    while done < length:
        step = AHEAD if length - done > AHEAD else length - done
        fill(source, at + done + step)
        if source.ready - at - done < step:
            step = source.ready - at - done
            length = done + step
        same = common(source.data + at + done, edge + done, step)
        done += same
        if same < step:
            break
    return done


cdef inline bint any_negative(const int32_t* data, Py_ssize_t n) noexcept nogil:
    cdef int32_t bits = 0
    cdef Py_ssize_t i
    for i in range(n):
        bits |= data[i]
    return bits < 0
