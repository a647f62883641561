/* Rows of x that follow what tells of them, while experts are multiplied: in which order, and how they are sent. */
#ifndef CUMOE_EP_FOLLOW_CUH
#define CUMOE_EP_FOLLOW_CUH

#include "ep/put.cuh"

/* ---- the order of a rank's rows ---- */

struct order_smem {
  int32_t count[EP_ORDER_BUCKETS + 1]; /* the last one: tokens without an expert there */
  int32_t of_warp[EP_ORDER_BUCKETS / WARP_SIZE];
};

/* The places of a few slots: all loads at once where experts are in one place each. */
constexpr int SLOTS_AT_ONCE = 8;
DEVICE void find_places(const ep_args &a, int64_t token, int first, int (&place)[SLOTS_AT_ONCE])
{
  int64_t id[SLOTS_AT_ONCE];
#pragma unroll
  for (int i = 0; i < SLOTS_AT_ONCE; i++) id[i] = first + i < a.shape.top_k ? id_of(a, token, first + i) : -1;
#pragma unroll
  for (int i = 0; i < SLOTS_AT_ONCE; i++)
    place[i] = id[i] >= 0 && id[i] < a.shape.experts ? a.placement[id[i] * a.placement_ld] : -1;
  if (a.replicas == 1) return;
#pragma unroll
  for (int i = 0; i < SLOTS_AT_ONCE; i++) place[i] = place_of(a, places_in_memory(a), token, first + i, id[i], false);
}

/* The bucket of the first expert that a token has at rank r. */
DEVICE int bucket_of(const ep_args &a, int64_t token, int r)
{
  int first = INT32_MAX, wide = 0, place[SLOTS_AT_ONCE];
  while ((a.shape.experts - 1) >> wide >= EP_ORDER_BUCKETS) wide++;
  for (int slot = 0; slot < a.shape.top_k; slot += SLOTS_AT_ONCE) {
    find_places(a, token, slot, place);
#pragma unroll
    for (int i = 0; i < SLOTS_AT_ONCE; i++)
      if (place[i] >= 0 && place[i] >> EP_PLACE_SHIFT == r) first = min(first, place[i] & ((1 << EP_PLACE_SHIFT) - 1));
  }
  return first == INT32_MAX ? (int)EP_ORDER_BUCKETS : min(first >> wide, (int)EP_ORDER_BUCKETS - 1);
}

/* Counts become first places; by the first threads, one a bucket. */
DEVICE void scan_buckets(order_smem &s)
{
  const int i = threadIdx.x;
  int own = 0, upto = 0;
  if (i < EP_ORDER_BUCKETS) {
    own = upto = s.count[i];
    for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
      const int other = __shfl_up_sync(ALL_LANES, upto, distance);
      if (lane_id() >= distance) upto += other;
    }
    if (lane_id() == WARP_SIZE - 1) s.of_warp[warp_id()] = upto;
  }
  __syncthreads();
  for (int w = 0; i < EP_ORDER_BUCKETS && w < warp_id(); w++) upto += s.of_warp[w];
  if (i < EP_ORDER_BUCKETS) s.count[i] = upto - own;
  if (i == EP_ORDER_BUCKETS - 1) s.count[EP_ORDER_BUCKETS] = upto;
  __syncthreads();
}

/* A CTA has a rank. Which of a bucket's tokens comes first is left open. */
DEVICE void order_rows(const ep_args &a, order_smem &s, int r)
{
  const int tokens = (int)tokens_of_round(a), ld = (int)a.shape.capacity;
  for (int i = threadIdx.x; i <= EP_ORDER_BUCKETS; i += blockDim.x) s.count[i] = 0;
  __syncthreads();
  for (int token = threadIdx.x; token < tokens; token += blockDim.x) {
    const int bucket = bucket_of(a, token, r);
    a.turns[r * ld + token] = bucket; /* for now */
    if (bucket < EP_ORDER_BUCKETS) atomicAdd(&s.count[bucket], 1);
  }
  __syncthreads();
  scan_buckets(s);
  if (threadIdx.x == 0) a.sends[r] = s.count[EP_ORDER_BUCKETS];
  __syncthreads();
  for (int token = threadIdx.x; token < tokens; token += blockDim.x) {
    const int bucket = a.turns[r * ld + token];
    const int turn = bucket < EP_ORDER_BUCKETS ? atomicAdd(&s.count[bucket], 1) : -1;
    a.turns[r * ld + token] = turn;
    if (turn >= 0) a.order[r * ld + turn] = token;
  }
}

/* ---- sending ---- */

DEVICE int32_t *turns_at(const ep_args &a, int at, int from)
{
  return reinterpret_cast<int32_t *>(lane_of(a, at) + a.at.turns) + from * a.shape.capacity;
}

DEVICE char *chunk_word(const ep_args &a, int at, int from, int chunk)
{
  return lane_of(a, at) + a.at.chunks + (from * ep_chunks(a.shape.capacity) + chunk) * sizeof(uint64_t);
}

/* Ids, weights and turns of all tokens: what a rank needs to know to begin. A warp has few CTAs beside it, so it asks
 * for what it needs of several tokens at once. */
DEVICE void put_all_slots(const ep_args &a, unsigned tokens)
{
  constexpr int EACH = 4;
  const int slot = lane_id();
  const unsigned step = a.movers * WARPS;
#pragma unroll 1
  for (unsigned first = blockIdx.x * WARPS + warp_id(); first < tokens; first += EACH * step) {
    int64_t id[EACH];
    float weight[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const unsigned token = first + i * step;
      const bool there = token < tokens && slot < a.shape.top_k;
      id[i] = there ? id_of(a, token, slot) : -1;
      weight[i] = there ? a.weights[token * a.weights_ld + slot] : 0.f;
    }
#pragma unroll 1
    for (int r = lane_id(); r < a.shape.ranks; r += WARP_SIZE)
      if (is_active(a, r))
#pragma unroll
        for (int i = 0; i < EACH; i++)
          if (first + i * step < tokens)
            turns_at(a, r, a.rank)[first + i * step] = a.turns[r * a.shape.capacity + first + i * step];
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (first + i * step < tokens) put_slots<false>(a, places_in_memory(a), first + i * step, id[i], weight[i], 0);
  }
}

/* Parts of two rows at a time: all loads, then all stores. */
DEVICE void send_rows(const ep_args &a, int r, int first, int sends)
{
  constexpr int EACH = EP_CHUNK / WARPS;
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16;
  char *to = lane_of(a, r) + a.at.x + a.rank * a.shape.capacity * bytes;
  int token[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int turn = first + warp_id() * EACH + i;
    token[i] = turn < sends ? a.order[r * a.shape.capacity + turn] : -1;
  }
#pragma unroll 1
  for (int at = lane_id(); at - lane_id() < width; at += PART) {
    uint4 value[EACH][8];
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (token[i] >= 0 && at + j * WARP_SIZE < width)
          value[i][j] = load_relaxed_vector(
              reinterpret_cast<const uint4 *>(static_cast<const char *>(a.x) + token[i] * a.x_ld * a.shape.element) +
              at + j * WARP_SIZE);
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (token[i] >= 0 && at + j * WARP_SIZE < width)
          reinterpret_cast<uint4 *>(to + token[i] * bytes)[at + j * WARP_SIZE] = value[i][j];
  }
}

/* Chunks in their order, all ranks' in turn, this one's last; a CTA has every sixteenth or so. Chunks that no row is in
 * are told as well. */
DEVICE void send_chunks(const ep_args &a, unsigned tokens, uint32_t exchange)
{
  const int ranks = a.shape.ranks, chunks = (int)ep_chunks(tokens);
#pragma unroll 1
  for (int i = blockIdx.x; i < chunks * ranks; i += a.movers) {
    const int chunk = i / ranks, r = (a.rank + 1 + i % ranks) % ranks;
    if (!is_active(a, r)) continue;
    if (chunk * EP_CHUNK < a.sends[r]) send_rows(a, r, chunk * EP_CHUNK, a.sends[r]);
    __syncthreads();
    if (threadIdx.x == 0) store_release_system(chunk_word(a, r, a.rank, chunk), ep_flag(exchange, 0));
  }
}

#endif
