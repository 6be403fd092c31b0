"""Tokens from Python: which objects are taken, and what is said of the others.  Included by `_radix.pyx`."""


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
