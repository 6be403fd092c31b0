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

    /* An exact int of at most one digit that is not negative (0 .. 2**30 - 1): its digit, and bits that are set in
       `odd` where the object is anything else.  No branch, so that a block of them is converted at full width. */
    #if PY_VERSION_HEX >= 0x030F0000
    static inline int32_t skippy_digit(PyObject *item, uintptr_t *odd) {
        *odd |= 1; (void)item; return 0;
    }
    #elif PY_VERSION_HEX >= 0x030C0000
    static inline int32_t skippy_digit(PyObject *item, uintptr_t *odd) {
        /* lv_tag: digits << 3 | sign; 1 is zero, 8 one positive digit. */
        *odd |= ((uintptr_t)Py_TYPE(item) ^ (uintptr_t)&PyLong_Type)
              | (((PyLongObject *)item)->long_value.lv_tag & ~(uintptr_t)9);
        return (int32_t)((PyLongObject *)item)->long_value.ob_digit[0];
    }
    #else
    static inline int32_t skippy_digit(PyObject *item, uintptr_t *odd) {
        uintptr_t size = (uintptr_t)((PyVarObject *)item)->ob_size;
        *odd |= ((uintptr_t)Py_TYPE(item) ^ (uintptr_t)&PyLong_Type) | (size & ~(uintptr_t)1);
        return (int32_t)(((PyLongObject *)item)->ob_digit[0] & (digit)(0 - size));
    }
    #endif

    /* How many of the first `n` items were converted before one that needs a closer look. */
    static inline Py_ssize_t skippy_small_ints(PyObject **items, int32_t *out, Py_ssize_t n) {
        Py_ssize_t done = 0;
        uintptr_t odd = 0;
        while (n - done >= 16) {
            for (int k = 0; k < 16; k++) out[done + k] = skippy_digit(items[done + k], &odd);
            if (odd) break;
            done += 16;
        }
        for (odd = 0; done < n; done++) {
            out[done] = skippy_digit(items[done], &odd);
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
    BLOCK = 256   # tokens in one call of memcmp: long enough that the call is free, short enough to find the end
    FINE = 16     # tokens per call once a block differs

cdef struct Source:
    const int32_t* data    # the tokens, `ready` of them
    Py_ssize_t n           # tokens that the caller gave
    Py_ssize_t ready       # tokens that stand in data
    Py_ssize_t end         # n, or the index of the first item that is no plain token
    PyObject** items       # the ints of a list that are still to be converted, or NULL
    int32_t* scratch       # where they go; data points to it


cdef inline void fill(Source* source, Py_ssize_t want) noexcept:
    """Convert the list's items until `want` tokens are ready, or all that can be."""
    cdef int32_t value
    if want > source.end:
        want = source.end
    while source.ready < want:
        source.ready += skippy_small_ints(
            source.items + source.ready, source.scratch + source.ready, want - source.ready)
        if source.ready < want:
            value = skippy_exact_int(source.items[source.ready])
            if value < 0:
                source.end = want = source.ready
            else:
                source.scratch[source.ready] = value
                source.ready += 1


cdef inline Py_ssize_t common(const int32_t* a, const int32_t* b, Py_ssize_t n) noexcept nogil:
    """How many of the first `n` tokens of `a` and `b` are equal."""
    cdef Py_ssize_t done = 0
    while n - done >= BLOCK and memcmp(a + done, b + done, BLOCK * sizeof(int32_t)) == 0:
        done += BLOCK
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
        step = BLOCK if length - done > BLOCK else length - done
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
