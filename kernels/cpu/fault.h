/* Bad device data on the CPU device: recorded as a CUDA kernel would, the first one wins. */
#ifndef CUMOE_CPU_FAULT_H
#define CUMOE_CPU_FAULT_H

#include <stddef.h>
#include "../args.h"

static inline void record_fault(fault_sink sink, int code, int64_t slot, int64_t token)
{
  uint64_t none = 0, record = FAULT_RECORD(code, slot, token);
  if (sink.record == NULL) return;
  __atomic_compare_exchange_n(sink.record, &none, record, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  if (sink.mirror != NULL) __atomic_store_n(sink.mirror, 1u, __ATOMIC_RELEASE);
}

/* Tokens really there. */
static inline int64_t tokens_present(token_count tokens)
{
  if (tokens.device == NULL) return tokens.count;
  int64_t present = *tokens.device < 0 ? 0 : *tokens.device;
  return present < tokens.count ? present : tokens.count;
}

/* Every range of tokens begins with it: it comes before what is wrong with any token, whichever thread is quickest. */
static inline void check_token_count(token_count tokens, fault_sink sink)
{
  if (tokens.device != NULL && (*tokens.device < 0 || *tokens.device > tokens.count))
    record_fault(sink, FAULT_TOKEN_COUNT, 0, 0);
}

#endif
