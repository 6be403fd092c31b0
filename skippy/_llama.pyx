"""The link to libllama: sequences, their saved state, and decoding.  Nothing else of skippy calls these.

llama.cpp asserts on bad arguments and an assertion ends the process, so every argument that it would
assert on is checked here and raises ValueError instead.  The GIL is released inside every call that does
work.  A context is for one thread at a time: a second one that comes in meanwhile gets a RuntimeError
instead of a crash (callers hold the context's lock, this is the seat belt).
"""

from cpython.exc cimport PyErr_NoMemory
from libc.stdint cimport int8_t, int32_t, uint8_t, uint32_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from skippy import _binding
from skippy.errors import StateError

PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: what sliceable attention does not cover
SEQ_LIMIT = 256  # LLAMA_MAX_SEQ

cdef int32_t OUTPUT_NONE = 0
cdef int32_t OUTPUT_LAST = 1
cdef int32_t OUTPUT_ALL = 2
OUTPUTS = {"none": 0, "last": 1, "all": 2}


cdef void *_symbol(str name) except NULL:
    return <void *><uintptr_t>_binding.address(name)


cdef decode_fn llama_decode = <decode_fn>_symbol("llama_decode")
cdef ctx_fn llama_synchronize = <ctx_fn>_symbol("llama_synchronize")
cdef u32_fn llama_n_ctx = <u32_fn>_symbol("llama_n_ctx")
cdef u32_fn llama_n_batch = <u32_fn>_symbol("llama_n_batch")
cdef u32_fn llama_n_ubatch = <u32_fn>_symbol("llama_n_ubatch")
cdef u32_fn llama_n_seq_max = <u32_fn>_symbol("llama_n_seq_max")
cdef ptr_fn llama_get_memory = <ptr_fn>_symbol("llama_get_memory")
cdef ptr_fn llama_get_model = <ptr_fn>_symbol("llama_get_model")
cdef ptr_fn llama_model_get_vocab = <ptr_fn>_symbol("llama_model_get_vocab")
cdef u32_fn llama_vocab_n_tokens = <u32_fn>_symbol("llama_vocab_n_tokens")
cdef seq_rm_fn llama_memory_seq_rm = <seq_rm_fn>_symbol("llama_memory_seq_rm")
cdef seq_cp_fn llama_memory_seq_cp = <seq_cp_fn>_symbol("llama_memory_seq_cp")
cdef seq_pos_fn llama_memory_seq_pos_min = <seq_pos_fn>_symbol("llama_memory_seq_pos_min")
cdef seq_pos_fn llama_memory_seq_pos_max = <seq_pos_fn>_symbol("llama_memory_seq_pos_max")
cdef state_size_fn llama_state_seq_get_size_ext = <state_size_fn>_symbol("llama_state_seq_get_size_ext")
cdef state_get_fn llama_state_seq_get_data_ext = <state_get_fn>_symbol("llama_state_seq_get_data_ext")
cdef state_set_fn llama_state_seq_set_data_ext = <state_set_fn>_symbol("llama_state_seq_set_data_ext")


cdef object _batch_layout():
    cdef llama_batch b
    cdef uintptr_t base = <uintptr_t>&b
    return sizeof(llama_batch), (
        ("n_tokens", <uintptr_t>&b.n_tokens - base),
        ("token", <uintptr_t>&b.token - base),
        ("embd", <uintptr_t>&b.embd - base),
        ("pos", <uintptr_t>&b.pos - base),
        ("n_seq_id", <uintptr_t>&b.n_seq_id - base),
        ("seq_id", <uintptr_t>&b.seq_id - base),
        ("logits", <uintptr_t>&b.logits - base),
    )


if _batch_layout() != _binding.BATCH_LAYOUT:
    raise ImportError(
        f"llama_batch of llama-cpp-python {_binding.VERSION} is laid out as {_binding.BATCH_LAYOUT}, "
        f"skippy was built for {_batch_layout()} (llama-cpp-python from {_binding.SUPPORTED[0]})"
    )


cdef int batch_allocate(BatchArrays *arrays, int32_t capacity) except -1:
    cdef int32_t i
    arrays.capacity = capacity
    arrays.batch.embd = NULL
    arrays.batch.token = <int32_t *>calloc(capacity, sizeof(int32_t))
    arrays.batch.pos = <int32_t *>calloc(capacity, sizeof(int32_t))
    arrays.batch.n_seq_id = <int32_t *>calloc(capacity, sizeof(int32_t))
    arrays.batch.seq_id = <int32_t **>calloc(capacity, sizeof(int32_t *))
    arrays.batch.logits = <int8_t *>calloc(capacity, sizeof(int8_t))
    arrays.seq_storage = <int32_t *>calloc(capacity, sizeof(int32_t))
    if (arrays.batch.token == NULL or arrays.batch.pos == NULL or arrays.batch.n_seq_id == NULL
            or arrays.batch.seq_id == NULL or arrays.batch.logits == NULL or arrays.seq_storage == NULL):
        batch_free(arrays)
        PyErr_NoMemory()
    for i in range(capacity):
        arrays.batch.n_seq_id[i] = 1
        arrays.batch.seq_id[i] = &arrays.seq_storage[i]
    return 0


cdef void batch_free(BatchArrays *arrays) noexcept nogil:
    free(arrays.batch.token)
    free(arrays.batch.pos)
    free(arrays.batch.n_seq_id)
    free(arrays.batch.seq_id)
    free(arrays.batch.logits)
    free(arrays.seq_storage)
    arrays.batch.token = NULL
    arrays.batch.pos = NULL
    arrays.batch.n_seq_id = NULL
    arrays.batch.seq_id = NULL
    arrays.batch.logits = NULL
    arrays.seq_storage = NULL
    arrays.capacity = 0


cdef int32_t first_outside(const int32_t *values, int32_t n, int32_t low, int32_t high) noexcept nogil:
    """Index of the first value outside [low, high), or -1."""
    cdef int32_t i
    for i in range(n):
        if values[i] < low or values[i] >= high:
            return i
    return -1


cdef class Context:
    """A llama_context, seen as sequences.

    `pointer` is the address of the llama_context; `owner` is kept alive as long as this object, and frees
    the context after `close()`.  `unified` says how the context was made (kv_unified): on one that is not
    unified, copies of part of a sequence abort the process and are refused here.
    """

    def __cinit__(self, uintptr_t pointer, *, bint unified, object owner=None):
        if pointer == 0:
            raise ValueError("pointer is 0, expected the address of a llama_context")
        self.ctx = <void *>pointer
        self.mem = llama_get_memory(self.ctx)
        if self.mem == NULL:
            raise ValueError("this context has no memory: models without a decoder keep no sequences")
        self.owner = owner
        self.unified = unified
        self.n_ctx = llama_n_ctx(self.ctx)
        self.n_batch = llama_n_batch(self.ctx)
        self.n_ubatch = llama_n_ubatch(self.ctx)
        self.n_seq_max = min(<int>llama_n_seq_max(self.ctx), <int>SEQ_LIMIT)
        self.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(self.ctx)))
        batch_allocate(&self.arrays, self.n_batch)

    def __dealloc__(self):
        batch_free(&self.arrays)

    def close(self):
        """Forget the context: every later call raises ValueError.  The owner frees it.  O(1)."""
        self.ctx = NULL
        self.mem = NULL
        self.owner = None

    cdef int _enter(self) except -1:
        # Checked and set under the GIL, so no two threads pass; whoever gets -1 must not reset `busy`.
        if self.ctx == NULL:
            raise ValueError("this context is closed")
        if self.busy:
            raise RuntimeError("two threads are using one llama_context; hold its lock around every call")
        self.busy = True
        return 0

    cdef int _check_seq(self, int seq, str name) except -1:
        if seq < 0 or seq >= self.n_seq_max:
            raise ValueError(f"{name} is {seq}, expected a sequence id from 0 to {self.n_seq_max - 1}")
        return 0

    cdef int _clear(self, int seq) except -1:
        with nogil:
            llama_memory_seq_rm(self.mem, seq, -1, -1)
        return 0

    def seq_cp(self, int src, int dst, int start=0, int end=-1):
        """Let `dst` share the cells of `src` at positions [start, end); end -1 means all that follow.

        Metadata only; O(cells of the pool).  Recurrent state is replaced as a whole, whatever the range.
        ValueError for ids that do not exist, an empty or negative range, or part of a sequence of a
        context that is not unified.
        """
        self._check_seq(src, "src")
        self._check_seq(dst, "dst")
        if src == dst:
            raise ValueError(f"src and dst are both {src}, expected two sequences")
        if start < 0 or end < -1 or (end != -1 and end <= start):
            raise ValueError(f"the range [{start}, {end}) is empty or negative")
        if not self.unified and (start != 0 or end != -1):
            raise ValueError(f"the range [{start}, {end}) is part of a sequence, and this context is not unified")
        self._enter()
        try:
            with nogil:
                llama_memory_seq_cp(self.mem, src, dst, start, end)
        finally:
            self.busy = False

    def seq_rm(self, int seq, int start=0, int end=-1):
        """Drop the cells of `seq` at positions [start, end); end -1 means all that follow.  O(cells of the pool).

        Returns False, with nothing changed, where the memory cannot be cut there (recurrent state).
        On sliding windows True does not mean that what is left can be gone on from.
        """
        cdef bint done
        self._check_seq(seq, "seq")
        if start < 0 or end < -1 or (end != -1 and end <= start):
            raise ValueError(f"the range [{start}, {end}) is empty or negative")
        self._enter()
        try:
            with nogil:
                done = llama_memory_seq_rm(self.mem, seq, start, end)
        finally:
            self.busy = False
        return done

    def seq_pos_min(self, int seq):
        """Lowest position of `seq` in the pool, -1 if it is empty.  O(1)."""
        self._check_seq(seq, "seq")
        self._enter()
        try:
            return llama_memory_seq_pos_min(self.mem, seq)
        finally:
            self.busy = False

    def seq_pos_max(self, int seq):
        """Highest position of `seq` in the pool, -1 if it is empty.  O(1)."""
        self._check_seq(seq, "seq")
        self._enter()
        try:
            return llama_memory_seq_pos_max(self.mem, seq)
        finally:
            self.busy = False

    def state_size(self, int seq, uint32_t flags=0):
        """Bytes that `save(seq, ..., flags)` would write.  O(cells of the pool)."""
        cdef size_t size
        self._check_seq(seq, "seq")
        if flags & ~<uint32_t>PARTIAL:
            raise ValueError(f"flags is {flags}, expected 0 or {PARTIAL} (partial)")
        self._enter()
        try:
            with nogil:
                size = llama_state_seq_get_size_ext(self.ctx, seq, flags)
        finally:
            self.busy = False
        if size == 0:
            raise StateError(f"llama.cpp could not tell the size of the state of sequence {seq}")
        return size

    def save(self, int seq, uint8_t[::1] out not None, uint32_t flags=0):
        """Write the state of `seq` into the buffer `out` and return its length in bytes.

        `out` is any writable contiguous buffer of at least `state_size(seq, flags)` bytes; what lies beyond
        the returned length is untouched.  O(bytes).  StateError if llama.cpp fails or `out` is too small.
        """
        cdef size_t written, size = out.shape[0]
        self._check_seq(seq, "seq")
        if flags & ~<uint32_t>PARTIAL:
            raise ValueError(f"flags is {flags}, expected 0 or {PARTIAL} (partial)")
        if size == 0:
            raise ValueError("out has 0 bytes")
        self._enter()
        try:
            with nogil:
                written = llama_state_seq_get_data_ext(self.ctx, &out[0], size, seq, flags)
        finally:
            self.busy = False
        if written == 0:
            raise StateError(f"llama.cpp could not save sequence {seq} into {size} bytes")
        return written

    def load(self, int seq, const uint8_t[::1] data not None, uint32_t flags=0):
        """Replace `seq` by the saved state `data`, which must be used up to its last byte.  O(bytes).

        `seq` is emptied first (but for partial state, which goes on top of what is there); after a failure
        it is empty, and StateError is raised.  llama.cpp checks the layout and nothing else: whoever calls
        has checked identity, checksum and header.
        """
        cdef size_t used, size = data.shape[0]
        self._check_seq(seq, "seq")
        if flags & ~<uint32_t>PARTIAL:
            raise ValueError(f"flags is {flags}, expected 0 or {PARTIAL} (partial)")
        if size <= 8:
            raise ValueError(f"data has {size} bytes, expected a saved state (more than 8)")
        self._enter()
        try:
            if not flags & <uint32_t>PARTIAL and (
                llama_memory_seq_pos_max(self.mem, seq) != -1 or llama_memory_seq_pos_min(self.mem, seq) != -1
            ):
                self._clear(seq)
            with nogil:
                used = llama_state_seq_set_data_ext(self.ctx, &data[0], size, seq, flags)
            if used != size:
                self._clear(seq)
        finally:
            self.busy = False
        if used != size:
            raise StateError(f"llama.cpp took {used} of the {size} bytes of a saved state; sequence {seq} is empty now")

    def synchronize(self):
        """Wait until the backend has done all that was asked of it."""
        self._enter()
        try:
            with nogil:
                llama_synchronize(self.ctx)
        finally:
            self.busy = False

    def decode(self, int seq, int start, const int32_t[::1] tokens not None, str outputs="last"):
        """Evaluate `tokens` (int32, 1 to n_batch of them) at positions start, start+1, ... of `seq`.

        `outputs` says which tokens get logits: "none", "last" or "all".  Returns llama_decode's code: 0 done,
        1 no room in the pool (nothing applied), 2 aborted midway, below 0 failed.
        ValueError for what llama.cpp would abort on: too many tokens, ids or positions that do not exist.
        """
        return self.decode_many([(seq, start, tokens, outputs)])

    def decode_many(self, list parts not None):
        """Evaluate several sequences in one batch: (seq, start, tokens, outputs) each, as `decode` takes them.

        The logits of a token are found at its index in the batch, the parts one after the other.  All of them are
        checked before anything is evaluated.  A sequence that is in two parts is refused (ValueError).
        """
        cdef int32_t n = 0, mode, code, i, bad
        cdef int seq, start
        cdef const int32_t[::1] tokens
        cdef llama_batch batch
        cdef set seen = set()
        cdef str outputs
        if not parts:
            raise ValueError("no parts to decode, expected at least one")
        self._enter()
        try:
            for seq, start, tokens, outputs in parts:
                self._check_seq(seq, "seq")
                if seq in seen:
                    raise ValueError(f"sequence {seq} is in two parts of one batch")
                seen.add(seq)
                if outputs not in OUTPUTS:
                    raise ValueError(f"outputs is {outputs!r}, expected one of {', '.join(OUTPUTS)}")
                mode = OUTPUTS[outputs]
                if tokens.shape[0] < 1 or tokens.shape[0] > self.n_batch - n:
                    raise ValueError(
                        f"{n + tokens.shape[0]} tokens in one batch, expected 1 to {self.n_batch} (n_batch)"
                    )
                if start < 0:
                    raise ValueError(f"start is {start}, expected a position from 0")
                bad = first_outside(&tokens[0], <int32_t>tokens.shape[0], 0, self.n_vocab)
                if bad >= 0:
                    raise ValueError(
                        f"token {tokens[bad]} at index {bad} is not in the vocabulary (0 to {self.n_vocab - 1})"
                    )
                memcpy(&self.arrays.batch.token[n], &tokens[0], tokens.shape[0] * sizeof(int32_t))
                for i in range(<int32_t>tokens.shape[0]):
                    self.arrays.batch.pos[n + i] = start + i
                    self.arrays.seq_storage[n + i] = seq
                    self.arrays.batch.logits[n + i] = mode == OUTPUT_ALL
                n += <int32_t>tokens.shape[0]
                if mode == OUTPUT_LAST:
                    self.arrays.batch.logits[n - 1] = 1
            batch = self.arrays.batch
            batch.n_tokens = n
            with nogil:
                code = llama_decode(self.ctx, batch)
        finally:
            self.busy = False
        return code
