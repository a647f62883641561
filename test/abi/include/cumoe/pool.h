#ifndef CUMOE_POOL_H
#define CUMOE_POOL_H 
#include "context.h"
#ifdef __cplusplus
extern "C" {
#endif
typedef struct cumoe_allocator {
  uint32_t size;
  uint32_t reserved;
  int (*alloc)(void *user, void **data, size_t bytes, size_t alignment, cumoe_stream stream);
  void (*free)(void *user, void *data, size_t bytes, cumoe_stream stream);
  void *user;
  const char *name;
} cumoe_allocator;
typedef struct cumoe_pool_stats {
  uint32_t size;
  uint32_t padding;
  int64_t live;
  uint64_t used;
  uint64_t used_high;
  uint64_t reserved;
  uint64_t reserved_high;
  uint64_t allocs, frees;
  uint64_t oom_retries;
  uint64_t pinned;
} cumoe_pool_stats;
CUMOE_CHECKED cumoe_status cumoe_pool_get_stats(cumoe_context context, cumoe_pool_stats *stats);
CUMOE_CHECKED cumoe_status cumoe_pool_reset_highs(cumoe_context context);
CUMOE_CHECKED cumoe_status cumoe_pool_trim(cumoe_context context, uint64_t keep);
CUMOE_CHECKED cumoe_status cumoe_pool_allow_peer(cumoe_context context, int32_t peer);
#ifdef __cplusplus
}
#endif
#endif
