/* Where the memory of a context comes from: CUDA's pool, the caller's allocator, or the host. */
#ifndef CUMOE_HOST_POOL_H
#define CUMOE_HOST_POOL_H

#include "status.h"
#include "../include/cumoe/context.h"
#include "../include/cumoe/pool.h"

/* Where memory comes from. The counts are of all devices. */
typedef struct memory_pool {
  cudaMemPool_t cuda;        /* private, stream-ordered; NULL on the CPU device and with an allocator */
  cumoe_allocator allocator; /* the caller's; alloc is NULL without one */
  uint64_t initial, limit, keep;
  _Atomic uint64_t peers; /* bit by ordinal: may reach the pool, tested */
  _Atomic uint64_t used, used_high, allocs, frees, retries, pinned;
  _Atomic int64_t live;
} memory_pool;

enum { MEMORY_ALIGNMENT = 256 };

cumoe_status pool_configure(memory_pool *pool, const cumoe_context_config *config); /* checks, no CUDA call */
cumoe_status pool_open(struct context *context);                                    /* CUDA, with the device entered */
cumoe_status pool_close(struct context *context);                                   /* whatever pool_open answered */

/* Each of these enters the device by itself. `bytes` of a free are those of its allocation. */
cumoe_status pool_alloc(struct context *context, size_t bytes, cumoe_stream stream, void **data);
cumoe_status pool_free(struct context *context, void *data, size_t bytes, cumoe_stream stream);
void pool_forget(struct context *context, size_t bytes);                   /* the memory is the caller's now */
cumoe_status pool_drop(struct context *context, void *data, size_t bytes); /* the device is idle: in no stream */

#endif
