/* What a rank sends of its tokens: rows of x, and ids and weights; by dedup only to the ranks that have an expert. */
#ifndef CUMOE_EP_PUT_CUH
#define CUMOE_EP_PUT_CUH

#include "ep/arena.cuh"

DEVICE int64_t id_of(const ep_args &a, int64_t token, int slot)
{
  const int64_t at = token * a.ids_ld + slot;
  return a.ids_dtype == DT_I64 ? static_cast<const int64_t *>(a.ids)[at] : static_cast<const int32_t *>(a.ids)[at];
}

/* How many of an expert's entries are in use, without those of ranks that were left out; *place: number `nth` of them.
 * An entry that names no rank counts, so that place_of reports it. */
DEVICE unsigned places_of(const ep_args &a, const int32_t *entries, unsigned nth, int *place)
{
  unsigned count = 0;
  for (int i = 0; i < a.replicas && entries[i] >= 0; i++) {
    const int rank = entries[i] >> EP_PLACE_SHIFT;
    if (rank < a.shape.ranks && !is_active(a, rank)) continue;
    if (count++ == nth) *place = entries[i];
  }
  return count;
}

/* The place that serves a slot, or ROW_DROPPED, or ROW_IDENTITY. */
DEVICE int place_of(const ep_args &a, int64_t token, int slot, bool report)
{
  const int64_t id = id_of(a, token, slot), zero_end = (int64_t)a.shape.experts + a.zero_experts;
  if (id == -1) return ROW_DROPPED;
  if (id < 0 || id >= zero_end + a.identity_experts) {
    if (report) report_fault(a.fault, FAULT_EXPERT_ID, slot, token);
    return ROW_DROPPED;
  }
  if (id >= a.shape.experts) return id < zero_end ? ROW_DROPPED : ROW_IDENTITY;
  int place = -1;
  const int32_t *entries = a.placement + id * a.placement_ld;
  const unsigned count = places_of(a, entries, 0, &place);
  if (count > 1) places_of(a, entries, (unsigned)(a.first_token + token) % count, &place);
  if (place >= 0 && place >> EP_PLACE_SHIFT < a.shape.ranks) return place;
  if (report) report_fault(a.fault, FAULT_EXPERT_MAP, slot, token);
  return ROW_DROPPED;
}

/* The row of this rank's segment there that a token takes, or -1: it does not go there. */
DEVICE int row_there(const ep_args &a, unsigned token, int rank)
{
  if (a.slots) return a.slots[(int64_t)token * a.shape.ranks + rank];
  return is_active(a, rank) ? (int)token : -1;
}

/* x read once, stored to each rank that the token goes to. */
DEVICE void put_rows(const ep_args &a, unsigned tokens)
{
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16, first = a.rank * a.shape.capacity;
  for (unsigned token = first_row(); token < tokens; token += row_step()) {
    row_part p;
    load_part(p, static_cast<const char *>(a.x) + token * a.x_ld * a.shape.element, width);
    for (int r = 0; r < a.shape.ranks; r++) {
      const int row = row_there(a, token, r);
      if (row >= 0) store_part(p, lane_of(a, r) + a.at.x + (first + row) * bytes, width);
    }
  }
}

/* A token's ids and weights to rank r, a lane a slot, and the rows of y that will answer it. */
DEVICE void put_slots_to(const ep_args &a, unsigned token, int r, int place, float weight)
{
  const int k = a.shape.top_k, slot = lane_id(), row = row_there(a, token, r);
  const bool there = place >= 0 && place >> EP_PLACE_SHIFT == r;
  const bool any = __any_sync(ALL_LANES, there);
  if (row >= 0 && slot < k) {
    const int64_t at = (a.rank * a.shape.capacity + row) * k + slot;
    reinterpret_cast<int32_t *>(lane_of(a, r) + a.at.ids)[at] = there ? place & ((1 << EP_PLACE_SHIFT) - 1) : -1;
    reinterpret_cast<float *>(lane_of(a, r) + a.at.weights)[at] = weight;
  }
  const int64_t answer = r * a.shape.capacity + row;
  if (a.shape.exact && there) a.rows[(int64_t)token * k + slot] = (int32_t)(answer * k) + slot;
  if (!a.shape.exact && slot == 0) a.rows[(int64_t)token * a.shape.ranks + r] = any ? (int32_t)answer : ROW_DROPPED;
}

DEVICE void put_slots(const ep_args &a, unsigned tokens)
{
  const int k = a.shape.top_k, slot = lane_id();
  for (unsigned token = warp_from_last(); token < tokens; token += ctas_of_grid() * WARPS) {
    const int place = slot < k ? place_of(a, token, slot, true) : ROW_DROPPED;
    const float weight = slot < k ? a.weights[token * a.weights_ld + slot] : 0.f;
    if (a.shape.exact && slot < k && place < 0) a.rows[(int64_t)token * k + slot] = place;
    for (int r = 0; r < a.shape.ranks; r++) put_slots_to(a, token, r, place, weight);
  }
}

/* ---- which row of its segment a token takes at each rank, by dedup ---- */

/* Bits: ranks first .. first + 31 that have an expert of the token. */
DEVICE uint32_t ranks_of(const ep_args &a, int64_t token, int first)
{
  uint32_t ranks = 0;
  for (int slot = 0; slot < a.shape.top_k; slot++) {
    const int place = place_of(a, token, slot, false), to = (place >> EP_PLACE_SHIFT) - first;
    if (place >= 0 && to >= 0 && to < 32) ranks |= 1u << to;
  }
  return ranks;
}

/* Tokens to each of 32 ranks: those before the 1,024 at hand, and of these, each warp's. */
struct slots_smem {
  uint32_t before[WARP_SIZE], of_warp[EP_WAIT_THREADS / WARP_SIZE][WARP_SIZE];
};

/* A thread has a token. Where tokens are counted, a lane has a rank. */
DEVICE void take_slots(const ep_args &a, slots_smem &s, int64_t token, bool is_token, int first)
{
  const int ranks = min(a.shape.ranks - first, WARP_SIZE), warps = blockDim.x / WARP_SIZE;
  const uint32_t to = is_token ? ranks_of(a, token, first) : 0, below = (1u << lane_id()) - 1;
  uint32_t base = s.before[lane_id()], all = 0;
  for (int r = 0; r < WARP_SIZE; r++) {
    const uint32_t who = __ballot_sync(ALL_LANES, to >> r & 1);
    if (lane_id() == r) s.of_warp[warp_id()][r] = __popc(who);
  }
  __syncthreads();
  for (int w = 0; w < warps; w++) {
    if (w == warp_id()) base += all;
    all += s.of_warp[w][lane_id()];
  }
  for (int r = 0; r < ranks; r++) {
    const uint32_t who = __ballot_sync(ALL_LANES, to >> r & 1), start = __shfl_sync(ALL_LANES, base, r);
    if (is_token) a.slots[token * a.shape.ranks + first + r] = to >> r & 1 ? (int)(start + __popc(who & below)) : -1;
  }
  __syncthreads();
  if (warp_id() == 0) s.before[lane_id()] += all;
  __syncthreads();
}

#endif
