#ifndef CUMOE_CONTEXT_H
#define CUMOE_CONTEXT_H 
#include "types.h"
#ifdef __cplusplus
extern "C" {
#endif
typedef struct cumoe_context_s *cumoe_context;
typedef struct cumoe_context_config {
  uint32_t size;
  int32_t cpu_threads;
  int32_t debug;
  int32_t reserved;
  uint64_t pool_initial;
  uint64_t pool_max;
  uint64_t pool_keep;
  const struct cumoe_allocator *allocator;
} cumoe_context_config;
CUMOE_CHECKED cumoe_status cumoe_context_create(int32_t device, const cumoe_context_config *config,
                                                cumoe_context *context);
CUMOE_API cumoe_status cumoe_context_destroy(cumoe_context context);
typedef struct cumoe_device_info {
  uint32_t size;
  int32_t device;
  int32_t cc_major, cc_minor;
  int32_t multiprocessors;
  int32_t l2_bytes, smem_per_block_optin, smem_per_sm;
  int64_t total_memory;
  char name[128];
  char fallback[256];
} cumoe_device_info;
CUMOE_CHECKED cumoe_status cumoe_context_info(cumoe_context context, cumoe_device_info *info);
CUMOE_CHECKED cumoe_status cumoe_synchronize(cumoe_context context, cumoe_stream stream);
typedef enum cumoe_fault_code {
  CUMOE_FAULT_NONE = 0,
  CUMOE_FAULT_EXPERT_ID = 1,
  CUMOE_FAULT_NAN_LOGIT = 2,
  CUMOE_FAULT_TOKEN_COUNT = 3,
  CUMOE_FAULT_EXPERT_MAP = 4,
  CUMOE_FAULT_ROUTE = 5
} cumoe_fault_code;
typedef struct cumoe_fault {
  uint32_t size;
  int32_t code;
  int32_t slot;
  int32_t reserved;
  int64_t token;
} cumoe_fault;
CUMOE_API int cumoe_fault_pending(cumoe_context context);
CUMOE_CHECKED cumoe_status cumoe_fault_read(cumoe_context context, cumoe_stream stream, cumoe_fault *fault);
CUMOE_CHECKED cumoe_status cumoe_fault_clear(cumoe_context context, cumoe_stream stream);
#ifdef __cplusplus
}
#endif
#endif
