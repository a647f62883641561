/* Where a (token, slot) pair goes, as the ids say. */
#ifndef CUMOE_PAIRS_CUH
#define CUMOE_PAIRS_CUH

#include "device/ptx.cuh"

/* How ids and maps are read: as plain memory, or past L1 where that may be behind (load_relaxed). */
struct plain_reader {
  template <class T> DEVICE T operator()(const T *source) const { return *source; }
};
struct l2_reader {
  template <class T> DEVICE T operator()(const T *source) const { return load_relaxed(source); }
};

/* A call: rare, and no room for it. */
static __device__ __noinline__ void report_pair(const map_args &a, int code, int64_t slot, int64_t token)
{
  report_token_fault(a.tokens, a.fault, code, slot, token);
}

/* Local expert of a pair with this id, or ROW_DROPPED, or ROW_IDENTITY. */
template <bool REPORT, class READER = plain_reader>
DEVICE int destination_of(const map_args &a, int64_t id, unsigned token, unsigned slot)
{
  const READER read;
  const int zero_end = a.num_experts + a.zero_experts;
  if (id == -1) return ROW_DROPPED;
  if (id < 0 || id >= zero_end + a.identity_experts) {
    if (REPORT) report_pair(a, FAULT_EXPERT_ID, slot, token);
    return ROW_DROPPED;
  }
  if (id >= a.num_experts) return id < zero_end ? ROW_DROPPED : ROW_IDENTITY;
  const int local = a.expert_map ? read(a.expert_map + id) : (int)id;
  if (local >= 0 && local < a.local_experts) return local;
  if (REPORT && local != -1) report_pair(a, FAULT_EXPERT_MAP, slot, token);
  return ROW_DROPPED;
}

template <bool REPORT, class READER = plain_reader> DEVICE int destination(const map_args &a, int64_t pair)
{
  const READER read;
  const unsigned token = (unsigned)pair / (unsigned)a.top_k, slot = (unsigned)pair - token * (unsigned)a.top_k;
  const int64_t at = token * a.ids_ld + slot;
  const int64_t id = a.ids_dtype == DT_I64 ? read(static_cast<const int64_t *>(a.ids) + at)
                                           : read(static_cast<const int32_t *>(a.ids) + at);
  return destination_of<REPORT, READER>(a, id, token, slot);
}

#endif
