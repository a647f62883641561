/*
 * cumoe/pool.h: where a context's buffers come from.
 *
 * Every context has a pool of its own. On a GPU it is a private stream-ordered pool of CUDA's: other libraries'
 * settings do not reach it, its figures are the context's alone, and it keeps freed memory, so that an allocation
 * in a step costs microseconds. On the CPU device it is malloc, counted. Instead of it, an engine can plug in its
 * own allocator. Sizes are set in cumoe_context_config.
 *
 * When the GPU is full, an allocation waits for its stream, gives the pool's idle memory back and tries once
 * more; then it is OUT_OF_MEMORY, with the sizes in the text.
 *
 * All functions: any thread; no GPU work is launched but in cumoe_pool_allow_peer.
 */
#ifndef CUMOE_POOL_H
#define CUMOE_POOL_H

#include "context.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * An engine's own allocator. Both functions may be called from any thread, with the context's device current,
 * and must not call cumoe. On the CPU device the memory is host memory.
 */
typedef struct cumoe_allocator {
  uint32_t size; /* sizeof(cumoe_allocator) */
  uint32_t reserved;
  /* 0 and *data, aligned to `alignment` (a power of two), usable in `stream`'s order from now on; or anything else
   * when there is no memory: cumoe waits for `stream` and asks once more. bytes > 0. */
  int (*alloc)(void *user, void **data, size_t bytes, size_t alignment, cumoe_stream stream);
  /* May give the memory to others once `stream` has passed this point. `stream` is NULL, and the device idle, when
   * a context with live buffers is destroyed. */
  void (*free)(void *user, void *data, size_t bytes, cumoe_stream stream);
  void *user;
  const char *name; /* for texts; may be NULL */
} cumoe_allocator;

typedef struct cumoe_pool_stats {
  uint32_t size;          /* sizeof(cumoe_pool_stats), set by the caller */
  uint32_t padding;       /* 0 */
  int64_t live;           /* allocations in use: buffers, tables of weights; not adopted, not pinned */
  uint64_t used;          /* bytes of these, in steps of 256 */
  uint64_t used_high;     /* the most since creation or cumoe_pool_reset_highs */
  uint64_t reserved;      /* bytes the pool holds of the GPU's memory; = used on the CPU device and with an allocator */
  uint64_t reserved_high; /* likewise */
  uint64_t allocs, frees; /* successful ones, since creation */
  uint64_t oom_retries;   /* times that a full GPU was waited for */
  uint64_t pinned;        /* bytes of pinned host memory (cumoe/buffer.h) */
} cumoe_pool_stats;

/* The figures of this moment, each one by itself: other threads may go on. */
CUMOE_CHECKED cumoe_status cumoe_pool_get_stats(cumoe_context context, cumoe_pool_stats *stats);

/* used_high and reserved_high start again from the present figures. */
CUMOE_CHECKED cumoe_status cumoe_pool_reset_highs(cumoe_context context);

/*
 * Gives idle memory back to the system until the pool holds `keep` bytes. Memory of freed buffers is idle once
 * their home streams have passed: wait for these first. Nothing on the CPU device and with an allocator.
 */
CUMOE_CHECKED cumoe_status cumoe_pool_trim(cumoe_context context, uint64_t keep);

/*
 * Lets kernels on GPU `peer` read and write this context's buffers, present and later ones. The first time for a
 * peer it asks CUDA whether that is possible at all, and then sends a pattern there and back: drivers were seen
 * where granting access broke copies between the GPUs. Waits for its own work only; not during capture of a stream
 * by another thread in CUDA's global mode. peer = the context's own device: nothing to do. Errors:
 * INVALID_ARGUMENT (no such device), NOT_SUPPORTED (CPU device, an allocator, no path between the GPUs, or the
 * pattern came back changed: access is then taken back), OUT_OF_MEMORY, CUDA.
 *
 * cumoe_copy_between needs no such grant.
 */
CUMOE_CHECKED cumoe_status cumoe_pool_allow_peer(cumoe_context context, int32_t peer);

#ifdef __cplusplus
}
#endif
#endif
