/*
 * cumoe/buffer.h: owned device memory and views of it.
 *
 * A buffer is a typed, row-major [rows, cols] matrix on its context's device (on the CPU device: host
 * memory), named by a 64-bit handle by value: slot index and generation. Every use checks the generation:
 * double free, use after free and stale views are CUMOE_ERR_STALE_HANDLE, never a crash. Zero is the null
 * handle.
 *
 * A buffer has a home stream, given at allocation, which must outlive it: it is allocated and freed in that
 * stream's order. Using it on another stream is the caller's business to order; cumoe_buffer_record_use makes the
 * free wait for such a use. Memory is uninitialised unless asked otherwise.
 *
 * Any thread may use any buffer. Freeing one while another thread uses it is answered with a status on one
 * side or the other as far as handles go; work already launched on its memory is the caller's to wait for.
 *
 * Checks of every call, in this order: null pointers, stale (a handle of zeros, too), device (a buffer serves its own
 * context only), dtype, shape, bounds.
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
 * OUT_OF_MEMORY (text has the sizes; also above pool_max), CUDA. On failure *buffer is the null handle. `file` is
 * kept as a pointer: a literal such as __FILE__.
 */
#define cumoe_buffer_alloc(context, dtype, rows, cols, stream, buffer)                                                 \
  cumoe_buffer_alloc_at(context, dtype, rows, cols, stream, __FILE__, __LINE__, buffer)
CUMOE_CHECKED cumoe_status cumoe_buffer_alloc_at(cumoe_context context, cumoe_dtype dtype, int64_t rows, int64_t cols,
                                                 cumoe_stream stream, const char *file, int line, cumoe_buffer *buffer);

/* The same, with its bytes set in `stream`'s order. */
enum {
  CUMOE_ALLOC_ZERO = 1,  /* every byte 0 */
  CUMOE_ALLOC_POISON = 2 /* every byte 0xFF: NaN in every float type; not with ZERO (INVALID_ARGUMENT) */
};
#define cumoe_buffer_alloc_with(context, dtype, rows, cols, flags, stream, buffer)                                     \
  cumoe_buffer_alloc_with_at(context, dtype, rows, cols, flags, stream, __FILE__, __LINE__, buffer)
CUMOE_CHECKED cumoe_status cumoe_buffer_alloc_with_at(cumoe_context context, cumoe_dtype dtype, int64_t rows,
                                                      int64_t cols, uint32_t flags, cumoe_stream stream,
                                                      const char *file, int line, cumoe_buffer *buffer);

/*
 * Frees in the home stream's order, after the uses recorded on other streams, and sets *buffer to null. A null
 * handle is allowed; a stale one is a status. While the home stream is being captured: CAPTURE_UNSAFE, and the
 * buffer lives on. OUT_OF_BOUNDS at debug level 2: see cumoe/debug.h.
 */
CUMOE_API cumoe_status cumoe_buffer_free(cumoe_buffer *buffer);

/*
 * Shared ownership: *another becomes a second handle of the same memory, which lives until every handle of it is
 * freed. Views belong to the handle that they were made from and become stale with it. Errors: STALE_HANDLE,
 * INVALID_ARGUMENT, OUT_OF_MEMORY (host memory).
 */
CUMOE_CHECKED cumoe_status cumoe_buffer_retain(cumoe_buffer buffer, cumoe_buffer *another);

/*
 * Work that uses the buffer has been launched on `stream`: the free will wait, in stream order, for everything
 * that is on `stream` now. Call it after the launch; a later call for the same stream replaces the earlier one.
 * Nothing to do for the home stream. `stream` is one of the buffer's device, and may be destroyed afterwards. Not
 * during capture of `stream` (CAPTURE_UNSAFE): for a graph, call it after the graph's launch. Errors: STALE_HANDLE,
 * OUT_OF_MEMORY (host memory), CUDA.
 */
CUMOE_CHECKED cumoe_status cumoe_buffer_record_use(cumoe_buffer buffer, cumoe_stream stream);

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
 * Gives the memory to the caller and sets *buffer to null; views of it become stale; recorded uses are the
 * caller's to wait for. An adopted buffer's memory is freed as it was allocated; any other goes back to the
 * caller's allocator if the context has one, else to cudaFreeAsync (CUDA) or free (CPU); it may outlive the
 * context. INVALID_ARGUMENT while there are other handles of it. Whenever *data is not NULL it is the caller's,
 * even if giving back what belonged to the buffer failed.
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
  uint64_t serial;     /* 1, 2, ...: the order of allocation in its context */
  int32_t handles;     /* that share it */
  int32_t pinned;      /* 1: pinned host memory (cumoe_debug_live tells of it, too): no handle, [1, bytes] u8 */
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

/* Rows 0 .. at - 1 and the rest. OUT_OF_BOUNDS unless 0 <= at <= rows. */
CUMOE_CHECKED cumoe_status cumoe_view_split(cumoe_view view, int64_t at, cumoe_view *head, cumoe_view *tail);
CUMOE_CHECKED cumoe_status cumoe_view_split_mut(cumoe_view_mut view, int64_t at, cumoe_view_mut *head,
                                                cumoe_view_mut *tail);

/*
 * The same bytes as elements of another type: cols and ld change with the element's size. Errors: LAYOUT (a row, or
 * ld where there is more than one row, is no whole number of the new elements), MISALIGNED (data, for the new
 * element).
 */
CUMOE_CHECKED cumoe_status cumoe_view_cast(cumoe_view view, cumoe_dtype dtype, cumoe_view *as);
CUMOE_CHECKED cumoe_status cumoe_view_cast_mut(cumoe_view_mut view, cumoe_dtype dtype, cumoe_view_mut *as);

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

/*
 * Every element of dst = *value, one element of dst's type in host memory, read during the call. Stream-ordered,
 * may be captured. A handful of copies, each twice as long as the one before: no kernel, about half as fast as
 * cumoe_fill, which it is when all bytes of the value are the same.
 */
CUMOE_CHECKED cumoe_status cumoe_fill_value(cumoe_context context, cumoe_view_mut dst, const void *value,
                                            cumoe_stream stream);

/*
 * dst = src between two contexts: GPUs, with or without peer access; the same device twice; the CPU device and a
 * GPU. Same shape and dtype. Begins after what is on dst_stream and src_stream now, and what comes later on either
 * of them waits for it. With a CPU device: its stream is ignored, and the call returns when the data has arrived.
 * Not during capture (CAPTURE_UNSAFE). May be refused half-way by CUDA only.
 */
CUMOE_CHECKED cumoe_status cumoe_copy_between(cumoe_context dst_context, cumoe_view_mut dst, cumoe_stream dst_stream,
                                              cumoe_context src_context, cumoe_view src, cumoe_stream src_stream);

/*
 * Pinned host memory: copies from and to it run beside the host, and kernels can read it. Cacheable unless
 * WRITE_COMBINED, which the CPU can only write fast: reading it is tens of times slower. 256-byte aligned, usable
 * with every GPU. On the CPU device it is plain memory. bytes = 0 gives NULL. Not in a launch path: allocating and
 * freeing are slow, and freeing may wait for the device. What is left at cumoe_context_destroy is freed there.
 * Errors: INVALID_ARGUMENT (unknown flag, 2^46 bytes and more), OUT_OF_MEMORY, CUDA; then *data is NULL.
 */
enum { CUMOE_PINNED_WRITE_COMBINED = 1 };
#define cumoe_pinned_alloc(context, bytes, flags, data)                                                                \
  cumoe_pinned_alloc_at(context, bytes, flags, __FILE__, __LINE__, data)
CUMOE_CHECKED cumoe_status cumoe_pinned_alloc_at(cumoe_context context, size_t bytes, uint32_t flags, const char *file,
                                                 int line, void **data);

/* The caller has waited for the work that uses it. NULL is allowed; anything that is not live pinned memory of this
 * context is STALE_HANDLE. OUT_OF_BOUNDS at debug level 2: see cumoe/debug.h. */
CUMOE_API cumoe_status cumoe_pinned_free(cumoe_context context, void *data);

/* Live buffers of the context, shared ones once: their number, and their bytes if `bytes` is not NULL. */
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
