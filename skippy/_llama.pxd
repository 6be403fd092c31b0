# The C side of the link to libllama: the structures and function types of llama.h that skippy calls,
# and the free functions that fill a batch.  No header of llama.cpp is needed to build this: the addresses
# come from the library that is already loaded, and the layout of the batch is compared at import.

from libc.stddef cimport size_t
from libc.stdint cimport int8_t, int32_t, uint8_t, uint32_t


cdef extern from *:
    """
    #include <stdbool.h>
    #include <stdint.h>
    typedef struct skippy_llama_batch {
        int32_t   n_tokens;
        int32_t * token;
        float   * embd;
        int32_t * pos;
        int32_t * n_seq_id;
        int32_t ** seq_id;
        int8_t  * logits;
    } skippy_llama_batch;
    typedef int32_t (*skippy_decode_fn)(void * ctx, skippy_llama_batch batch);
    typedef void    (*skippy_ctx_fn)(void * ctx);
    typedef uint32_t (*skippy_u32_fn)(const void * ctx);
    typedef void *  (*skippy_ptr_fn)(const void * ctx);
    typedef bool    (*skippy_seq_rm_fn)(void * mem, int32_t seq, int32_t p0, int32_t p1);
    typedef void    (*skippy_seq_cp_fn)(void * mem, int32_t src, int32_t dst, int32_t p0, int32_t p1);
    typedef int32_t (*skippy_seq_pos_fn)(void * mem, int32_t seq);
    typedef size_t  (*skippy_state_size_fn)(void * ctx, int32_t seq, uint32_t flags);
    typedef size_t  (*skippy_state_get_fn)(void * ctx, uint8_t * dst, size_t size, int32_t seq, uint32_t flags);
    typedef size_t  (*skippy_state_set_fn)(void * ctx, const uint8_t * src, size_t size, int32_t seq, uint32_t flags);
    """
    ctypedef struct llama_batch "skippy_llama_batch":
        int32_t n_tokens
        int32_t *token
        float *embd
        int32_t *pos
        int32_t *n_seq_id
        int32_t **seq_id
        int8_t *logits

    ctypedef int32_t (*decode_fn "skippy_decode_fn")(void *, llama_batch) noexcept nogil
    ctypedef void (*ctx_fn "skippy_ctx_fn")(void *) noexcept nogil
    ctypedef uint32_t (*u32_fn "skippy_u32_fn")(const void *) noexcept nogil
    ctypedef void *(*ptr_fn "skippy_ptr_fn")(const void *) noexcept nogil
    ctypedef bint (*seq_rm_fn "skippy_seq_rm_fn")(void *, int32_t, int32_t, int32_t) noexcept nogil
    ctypedef void (*seq_cp_fn "skippy_seq_cp_fn")(void *, int32_t, int32_t, int32_t, int32_t) noexcept nogil
    ctypedef int32_t (*seq_pos_fn "skippy_seq_pos_fn")(void *, int32_t) noexcept nogil
    ctypedef size_t (*state_size_fn "skippy_state_size_fn")(void *, int32_t, uint32_t) noexcept nogil
    ctypedef size_t (*state_get_fn "skippy_state_get_fn")(void *, uint8_t *, size_t, int32_t, uint32_t) noexcept nogil
    ctypedef size_t (*state_set_fn "skippy_state_set_fn")(void *, const uint8_t *, size_t, int32_t, uint32_t) noexcept nogil


# The batch that a context fills again for every decode: n_batch entries of each array, one sequence per token.
cdef struct BatchArrays:
    llama_batch batch
    int32_t *seq_storage  # seq_id[i] points at seq_storage[i]
    int32_t capacity


cdef int batch_allocate(BatchArrays *arrays, int32_t capacity) except -1
cdef void batch_free(BatchArrays *arrays) noexcept nogil
cdef int32_t first_outside(const int32_t *values, int32_t n, int32_t low, int32_t high) noexcept nogil


cdef class Context:
    cdef void *ctx
    cdef void *mem
    cdef BatchArrays arrays
    cdef bint busy
    cdef object owner
    cdef readonly int n_ctx
    cdef readonly int n_batch
    cdef readonly int n_ubatch
    cdef readonly int n_seq_max
    cdef readonly int n_vocab
    cdef readonly bint unified
    cdef int _enter(self) except -1
    cdef int _check_seq(self, int seq, str name) except -1
    cdef int _clear(self, int seq) except -1
