/*
 * cumoe/buffer.h: owned device memory and views of it.
 *
 * A buffer is a typed, row-major [rows, cols] matrix on its context's device (on the CPU device: host
 * memory), named by a 64-bit handle by value: slot index and generation. Every use checks the generation:
 * double free, use after free and stale views are CUMOE_ERR_STALE_HANDLE, never a crash. Zero is the null
 * handle.
 *
 * A buffer has a home stream, given at allocation, which must outlive it: it is allocated and freed in that
 * stream's order. Using it on another stream is the caller's business to order. Memory is uninitialised.
 *
 * Any thread may use any buffer. Freeing one while another thread uses it is answered with a status on one
 * side or the other as far as handles go; work already launched on its memory is the caller's to wait for.
 *
 * Checks of every call, in this order: null, stale, device (a buffer serves its own context only), dtype,
 * shape, bounds.
 *
 * An engine with its own allocator needs none of this: see cumoe_matrix() in cumoe/types.h.
 */
#ifndef CUMOE_BUFFER_H
#define CUMOE_BUFFER_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cumoe_buffer {
  uint64_t id;
} cumoe_buffer;

/*
 * Allocates rows * cols elements, 256-byte aligned. rows or cols may be 0 (no memory, all operations legal).
 * Not during capture (CAPTURE_UNSAFE). When the GPU is full, waits for `stream`, gives the pool's idle memory
 * back and tries once more. Errors: INVALID_ARGUMENT (also for 2^46 bytes and more), WRONG_DTYPE,
 * OUT_OF_MEMORY (text has the sizes), CUDA. On failure *buffer is the null handle. `file` is kept as a
 * pointer: a literal such as __FILE__.
 */
#define cumoe_buffer_alloc(context, dtype, rows, cols, stream, buffer)                                                 \
  cumoe_buffer_alloc_at(context, dtype, rows, cols, stream, __FILE__, __LINE__, buffer)
CUMOE_CHECKED cumoe_status cumoe_buffer_alloc_at(cumoe_context context, cumoe_dtype dtype, int64_t rows, int64_t cols,
                                                 cumoe_stream stream, const char *file, int line, cumoe_buffer *buffer);

/*
 * Frees in the home stream's order and sets *buffer to null. A null handle is allowed; a stale one is a
 * status. While the home stream is being captured: CAPTURE_UNSAFE, and the buffer lives on.
 */
CUMOE_API cumoe_status cumoe_buffer_free(cumoe_buffer *buffer);

/*
 * Takes ownership of a whole foreign allocation: the pointer that cudaMallocAsync, cudaMallocFromPoolAsync or
 * cudaMalloc returned (CUDA), malloc or aligned_alloc (CPU, unchecked). cumoe_buffer_free will free it:
 * memory from a pool in `stream`'s order, memory from cudaMalloc after waiting for `stream`, for CUDA cannot
 * free that in a stream's order. Errors: INVALID_ARGUMENT (data null, or inside an allocation), OUT_OF_BOUNDS
 * (allocation too small), WRONG_DEVICE (memory of the host or of another GPU); then the memory stays the
 * caller's.
 */
CUMOE_CHECKED cumoe_status cumoe_buffer_adopt(cumoe_context context, void *data, cumoe_dtype dtype, int64_t rows,
                                              int64_t cols, cumoe_stream stream, cumoe_buffer *buffer);

/*
 * Gives the memory to the caller and sets *buffer to null; views of it become stale. An adopted buffer's
 * memory is freed as it was allocated, any other with cudaFreeAsync (CUDA) or free (CPU); it may outlive the
 * context.
 */
CUMOE_CHECKED cumoe_status cumoe_buffer_release(cumoe_buffer *buffer, void **data);

typedef struct cumoe_buffer_info {
  uint32_t size; /* sizeof(cumoe_buffer_info), set by the caller */
  int32_t device, dtype, line;
  int64_t rows, cols;
  size_t bytes;
  void *data;
  cumoe_stream stream; /* home stream */
  const char *file;    /* where it was allocated */
} cumoe_buffer_info;

CUMOE_CHECKED cumoe_status cumoe_buffer_get_info(cumoe_buffer buffer, cumoe_buffer_info *info);

/*
 * The whole buffer as a view. Cannot fail: for a stale handle the view has data NULL and remembers the owner,
 * and the call that gets the view answers STALE_HANDLE.
 */
CUMOE_API cumoe_view cumoe_buffer_view(cumoe_buffer buffer);
CUMOE_API cumoe_view_mut cumoe_buffer_view_mut(cumoe_buffer buffer);

/* Rows first .. first + count - 1, or columns likewise. OUT_OF_BOUNDS when they are not all there. No CUDA
 * call. */
CUMOE_CHECKED cumoe_status cumoe_view_rows(cumoe_view view, int64_t first, int64_t count, cumoe_view *slice);
CUMOE_CHECKED cumoe_status cumoe_view_cols(cumoe_view view, int64_t first, int64_t count, cumoe_view *slice);
CUMOE_CHECKED cumoe_status cumoe_view_rows_mut(cumoe_view_mut view, int64_t first, int64_t count,
                                               cumoe_view_mut *slice);
CUMOE_CHECKED cumoe_status cumoe_view_cols_mut(cumoe_view_mut view, int64_t first, int64_t count,
                                               cumoe_view_mut *slice);

/*
 * Copies the whole view from or to packed host memory (ld = cols); `bytes` must be rows * cols * element size
 * (OUT_OF_BOUNDS). Stream-ordered. With pageable host memory the call returns when the source may be reused /
 * the data has arrived; with pinned host memory the caller keeps it alive until the stream has passed. Not
 * during capture (CAPTURE_UNSAFE): a graph would go back to the host memory at every replay.
 */
CUMOE_CHECKED cumoe_status cumoe_copy_from_host(cumoe_context context, cumoe_view_mut dst, const void *src,
                                                size_t bytes, cumoe_stream stream);
CUMOE_CHECKED cumoe_status cumoe_copy_to_host(cumoe_context context, void *dst, size_t bytes, cumoe_view src,
                                              cumoe_stream stream);

/* dst = src, same shape and dtype; an overlap is INVALID_ARGUMENT. Stream-ordered, may be captured. */
CUMOE_CHECKED cumoe_status cumoe_copy(cumoe_context context, cumoe_view_mut dst, cumoe_view src, cumoe_stream stream);

/* Every byte of dst's elements = byte (gaps between rows untouched). Stream-ordered, may be captured. */
CUMOE_CHECKED cumoe_status cumoe_fill(cumoe_context context, cumoe_view_mut dst, uint8_t byte, cumoe_stream stream);

/* Live buffers of the context: their number, and their bytes if `bytes` is not NULL. */
CUMOE_API int64_t cumoe_buffer_live(cumoe_context context, size_t *bytes);

/* Scope ownership (gcc, clang): CUMOE_AUTO_BUFFER x = {0}; is freed when x leaves its scope. */
#if defined(__GNUC__)
static inline void cumoe_buffer_cleanup(cumoe_buffer *buffer)
{
  (void)cumoe_buffer_free(buffer);
}
#define CUMOE_AUTO_BUFFER __attribute__((cleanup(cumoe_buffer_cleanup), unused)) cumoe_buffer

/* Moves a buffer out of its scope: return cumoe_buffer_take(&x); */
static inline cumoe_buffer cumoe_buffer_take(cumoe_buffer *buffer)
{
  cumoe_buffer taken = *buffer;
  buffer->id = 0;
  return taken;
}
#endif

#ifdef __cplusplus
}
#endif
#endif
