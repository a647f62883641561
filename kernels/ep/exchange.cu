/*
 * The exchange of ep.h between GPUs that reach each other's memory. Ranks push: 16-byte stores, a fence at system
 * scope, one flag a rank; whoever waits polls its own memory. Only the waits spin, one CTA each, and none without a
 * limit of time.
 */
#include "ep/words.cuh"
#include "ep/ep.h"

/* ---- where things lie ---- */

DEVICE char *lane_of(const ep_args &a, int rank)
{
  char *const *bases = reinterpret_cast<char *const *>(a.arena + a.at.bases);
  return bases[rank] + a.at.lane + (uint64_t)a.lane * a.at.lane_bytes;
}

/* Of this rank and lane: exchanges so far, and CTAs that have come to the end of a put, of an answer. */
struct counters {
  unsigned long long exchanges;
  unsigned put, answered;
};
DEVICE counters *counters_of(const ep_args &a)
{
  return reinterpret_cast<counters *>(lane_of(a, a.rank) + a.at.exchange);
}

/* A warp moves a part of a row, 16 bytes a thread at a time: blockIdx.y says which part, and all its loads are under
 * way together. Rows are dealt to the warps of blockIdx.x. */
constexpr int WARPS = 16, PART = 8 * WARP_SIZE;
static_assert(PART * 16 == EP_PART_BYTES && WARPS * WARP_SIZE == EP_MOVE_THREADS, "the host makes the grids");

struct row_part {
  uint4 value[8];
};

DEVICE int row_vectors(const ep_args &a)
{
  return a.shape.hidden * a.shape.element / 16;
}

DEVICE int vector_of(int i)
{
  return (int)blockIdx.y * PART + i * WARP_SIZE + lane_id();
}

DEVICE void load_part(row_part &p, const void *row, int width)
{
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (vector_of(i) < width) p.value[i] = static_cast<const uint4 *>(row)[vector_of(i)];
}

DEVICE void store_part(const row_part &p, void *row, int width)
{
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (vector_of(i) < width) static_cast<uint4 *>(row)[vector_of(i)] = p.value[i];
}

DEVICE unsigned first_row()
{
  return blockIdx.x * WARPS + warp_id();
}
DEVICE unsigned row_step()
{
  return gridDim.x * WARPS;
}

/* For what is small, all threads. */
DEVICE unsigned thread_of_grid()
{
  return (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
}
DEVICE unsigned threads_of_grid()
{
  return gridDim.x * gridDim.y * blockDim.x;
}

/* ---- flags ---- */

/* The last CTA tells all ranks, once everything that any CTA has stored is on its way before the flags. */
DEVICE void tell_when_all_have_come(const ep_args &a, uint64_t words, uint32_t tokens, bool begins)
{
  __shared__ bool last;
  counters *c = counters_of(a);
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned *came = begins ? &c->put : &c->answered;
    __threadfence_system();
    last = atomicAdd(came, 1) == gridDim.x * gridDim.y - 1;
    __threadfence_system();
    if (last) *came = 0;
    if (last && begins) c->exchanges++;
  }
  __syncthreads();
  if (!last) return;
  const uint64_t flag = ep_flag((uint32_t) * (volatile unsigned long long *)&c->exchanges, tokens);
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x)
    store_release_system(lane_of(a, r) + words + (uint64_t)a.rank * EP_LINE, flag);
}

DEVICE void give_up(const ep_args &a, int phase, int about)
{
  char *const *bases = reinterpret_cast<char *const *>(a.arena + a.at.bases);
  const uint64_t word = ep_abort_word(EP_TIMEOUT, phase, about, a.rank);
  atomicCAS(reinterpret_cast<unsigned long long *>(a.arena + a.at.abort), 0ull, (unsigned long long)word);
  for (int r = 0; r < a.shape.ranks; r++)
    if (r != a.rank) store_release_system(bases[r] + a.at.abort, word);
}

/* One CTA; a thread polls the flags of its ranks. False: the group has given up. */
DEVICE bool wait_for_all(const ep_args &a, uint64_t words, int phase)
{
  const uint32_t want = (uint32_t) * (volatile unsigned long long *)&counters_of(a)->exchanges;
  const char *own = lane_of(a, a.rank) + words;
  const uint64_t begin = now_ns();
  /* A thread of its own looks whether the group has given up before. */
  bool arrived = threadIdx.x != blockDim.x - 1 || load_acquire_system(a.arena + a.at.abort) == 0;
  for (int r = threadIdx.x; r < a.shape.ranks && arrived; r += blockDim.x)
    while ((int32_t)((uint32_t)(load_acquire_system(own + (uint64_t)r * EP_LINE) >> 32) - want) < 0) {
      arrived = load_acquire_system(a.arena + a.at.abort) == 0;
      if (!arrived) break;
      if (now_ns() - begin > (uint64_t)a.timeout_ns) give_up(a, phase, r);
    }
  return __syncthreads_and(arrived);
}

/* Tokens that a rank has sent, at most what there is room for. */
DEVICE int64_t tokens_from(const ep_args &a, int source)
{
  const uint64_t flag = load_acquire_system(lane_of(a, a.rank) + a.at.in + (uint64_t)source * EP_LINE);
  return min((int64_t)(uint32_t)flag, a.shape.capacity);
}

/* ---- put ---- */

DEVICE int64_t id_of(const ep_args &a, int64_t token, int slot)
{
  const int64_t at = token * a.ids_ld + slot;
  return a.ids_dtype == DT_I64 ? static_cast<const int64_t *>(a.ids)[at] : static_cast<const int32_t *>(a.ids)[at];
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
  const int32_t *places = a.placement + id * a.placement_ld;
  int count = 0;
  while (count < a.replicas && places[count] >= 0) count++;
  const int place = count ? places[(unsigned)(a.first_token + token) % (unsigned)count] : -1;
  if (place >= 0 && place >> EP_PLACE_SHIFT < a.shape.ranks) return place;
  if (report) report_fault(a.fault, FAULT_EXPERT_MAP, slot, token);
  return ROW_DROPPED;
}

/* x to all ranks: read once, stored to each. */
DEVICE void put_rows(const ep_args &a)
{
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16, first = a.rank * a.shape.capacity;
  for (unsigned token = first_row(); token < a.tokens.count; token += row_step()) {
    row_part p;
    load_part(p, static_cast<const char *>(a.x) + token * a.x_ld * a.shape.element, width);
    for (int r = 0; r < a.shape.ranks; r++) store_part(p, lane_of(a, r) + a.at.x + (first + token) * bytes, width);
  }
}

/* Each slot's id and weight to all ranks, and the row of y that will answer it. */
DEVICE void put_slots(const ep_args &a)
{
  const unsigned k = a.shape.top_k;
  const int64_t first = a.rank * a.shape.capacity * k;
  for (unsigned i = thread_of_grid(); i < a.tokens.count * k; i += threads_of_grid()) {
    const int64_t token = i / k;
    const int slot = (int)(i % k), place = place_of(a, token, slot, true);
    const int to = place >= 0 ? place >> EP_PLACE_SHIFT : -1, local = place & ((1 << EP_PLACE_SHIFT) - 1);
    const float weight = a.weights[token * a.weights_ld + slot];
    for (int r = 0; r < a.shape.ranks; r++) {
      reinterpret_cast<int32_t *>(lane_of(a, r) + a.at.ids)[first + i] = r == to ? local : -1;
      reinterpret_cast<float *>(lane_of(a, r) + a.at.weights)[first + i] = weight;
    }
    if (a.shape.exact) a.rows[i] = to < 0 ? place : (int32_t)(((int64_t)to * a.shape.capacity + token) * k) + slot;
  }
}

/* Without EXACT: a row of y from each rank that has an expert of the token. */
DEVICE void put_sums(const ep_args &a)
{
  const unsigned ranks = a.shape.ranks;
  if (a.shape.exact) return;
  for (unsigned i = thread_of_grid(); i < a.tokens.count * ranks; i += threads_of_grid()) {
    const int64_t token = i / ranks;
    const int rank = (int)(i % ranks);
    bool serves = false;
    for (int slot = 0; slot < a.shape.top_k; slot++) {
      const int place = place_of(a, token, slot, false);
      serves |= place >= 0 && place >> EP_PLACE_SHIFT == rank;
    }
    a.rows[i] = serves ? (int32_t)(rank * a.shape.capacity + token) : ROW_DROPPED;
  }
}

extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS) cumoe_ep_put(const __grid_constant__ ep_args a)
{
  wait_for_earlier_grids_alone();
  let_next_grid_start();
  put_rows(a);
  put_slots(a);
  put_sums(a);
  tell_when_all_have_come(a, a.at.in, (uint32_t)a.tokens.count, true);
}

/* ---- waits ---- */

/* What a peer sends is not trusted; rows past its tokens hold what earlier exchanges left. */
DEVICE void take_ids(const ep_args &a, int source, bool arrived)
{
  const int k = a.shape.top_k;
  const int64_t tokens = arrived ? tokens_from(a, source) : 0, first = (int64_t)source * a.shape.capacity * k;
  const int32_t *from = reinterpret_cast<const int32_t *>(lane_of(a, a.rank) + a.at.ids) + first;
  for (int64_t i = threadIdx.x; i < a.shape.capacity * k; i += blockDim.x) {
    const int32_t id = i < tokens * k ? from[i] : -1;
    const bool here = id >= 0 && id < a.local_experts;
    if (!here && id != -1) report_fault(a.fault, FAULT_EXPERT_ID, (unsigned)i % (unsigned)k, (unsigned)i / (unsigned)k);
    a.ids_here[first + i] = here ? id : -1;
  }
}

extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS) cumoe_ep_wait_tokens(const __grid_constant__ ep_args a)
{
  wait_for_earlier_grids_alone();
  const bool arrived = wait_for_all(a, a.at.in, EP_DISPATCH);
  let_next_grid_start();
  for (int r = 0; r < a.shape.ranks; r++) take_ids(a, r, arrived);
}

extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS) cumoe_ep_wait_answers(const __grid_constant__ ep_args a)
{
  wait_for_earlier_grids_alone();
  wait_for_all(a, a.at.back, EP_RETURN);
  let_next_grid_start();
}

/* ---- answer ---- */

/* This rank has a row of y for it: of the slot, or of any. */
DEVICE bool has_row(const ep_args &a, const int32_t *ids, int answer)
{
  if (a.shape.exact) return ids[answer] >= 0;
  bool any = false;
  for (int slot = 0; slot < a.shape.top_k; slot++) any |= ids[slot] >= 0;
  return any;
}

DEVICE void answer_rank(const ep_args &a, int source)
{
  const unsigned answers = ep_answers(&a.shape), rows = (unsigned)tokens_from(a, source) * answers;
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16, there = source * a.shape.capacity, here = a.rank * a.shape.capacity;
  const char *from = static_cast<const char *>(a.y_here) + there * answers * bytes;
  char *to = lane_of(a, source) + a.at.y + here * answers * bytes;
  for (unsigned row = first_row(); row < rows; row += row_step()) {
    row_part p;
    if (!has_row(a, a.ids_here + (there + row / answers) * a.shape.top_k, (int)(row % answers))) continue;
    load_part(p, from + row * bytes, width);
    store_part(p, to + row * bytes, width);
  }
}

extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS) cumoe_ep_answer(const __grid_constant__ ep_args a)
{
  wait_for_earlier_grids_alone();
  let_next_grid_start();
  for (int i = 0; i < a.shape.ranks; i++) answer_rank(a, (a.rank + i) % a.shape.ranks);
  tell_when_all_have_come(a, a.at.back, 0, false);
}
