/* The map (route/map_chunk.cuh) of so few slots that the CTA which has waited for them ranks them itself: a grid less
 * between the tokens and their experts. */
#ifndef CUMOE_EP_MAP_HERE_CUH
#define CUMOE_EP_MAP_HERE_CUH

#include "ep/arena.cuh"

/* Slots are cut into as many runs as there are warps; a warp has 32 of its own at a time. */
constexpr int MAP_TURNS = EP_MAP_SLOTS / EP_MOVE_THREADS;
static_assert(EP_MAP_EXPERTS == EP_MOVE_THREADS, "a thread an expert");

struct map_smem {
  int16_t id[EP_MAP_SLOTS];                /* of each slot; negative: no expert here */
  uint16_t in_warp[WARPS][EP_MAP_EXPERTS]; /* rows of a warp's slots, then those of the warps before it */
  int32_t first[EP_MAP_EXPERTS], of_warp[WARPS];
};

/* While nothing has come yet. */
DEVICE void clear_map(const ep_args &a, map_smem &s)
{
  for (int i = threadIdx.x; i < WARPS * EP_MAP_EXPERTS / 2; i += EP_MOVE_THREADS)
    reinterpret_cast<uint32_t *>(s.in_warp)[i] = 0;
  const int64_t words = PROGRESS_WORDS(a.map.tokens.count * a.map.top_k, a.map.local_experts);
  for (int64_t i = threadIdx.x; a.map.protocol.progress && i < words; i += EP_MOVE_THREADS)
    a.map.protocol.progress[i] = 0;
}

/* Sum of `count` over the threads before this one. */
DEVICE int rows_before(int count, map_smem &s)
{
  const int inclusive = warp_scan(count);
  if (lane_id() == WARP_SIZE - 1) s.of_warp[warp_id()] = inclusive;
  __syncthreads();
  const int of_warp = lane_id() < WARPS ? s.of_warp[lane_id()] : 0;
  return __shfl_sync(ALL_LANES, warp_scan(of_warp) - of_warp, warp_id()) + inclusive - count;
}

/* Counts to offsets, a thread an expert. */
DEVICE void lay_out_experts(const map_args &m, map_smem &s)
{
  const int e = threadIdx.x;
  int count = 0;
  for (int w = 0; w < WARPS && e < m.local_experts; w++) {
    const int rows = s.in_warp[w][e];
    s.in_warp[w][e] = (uint16_t)count;
    count += rows;
  }
  const int offset = rows_before(count, s);
  if (e >= m.local_experts) return;
  s.first[e] = offset;
  m.counts[e] = count;
  m.offsets[e] = offset;
  if (e == m.local_experts - 1) m.offsets[e + 1] = offset + count;
  if (m.counts_out) m.counts_out[e] = count;
  if (m.load) m.load[e] += count;
}

/* By all threads, once they have met behind the ids. */
DEVICE void map_here(const ep_args &a, map_smem &s)
{
  const int slots = a.shape.ranks * (int)a.shape.capacity * a.shape.top_k;
  uint16_t *own = s.in_warp[warp_id()];
  int to[MAP_TURNS], before[MAP_TURNS];
#pragma unroll
  for (int i = 0; i < MAP_TURNS; i++) {
    const int slot = (warp_id() * MAP_TURNS + i) * WARP_SIZE + lane_id();
    to[i] = slot < slots ? s.id[slot] : -1;
    const unsigned peers = __match_any_sync(ALL_LANES, to[i]), lower = peers & ((1u << lane_id()) - 1);
    const int earlier = to[i] >= 0 ? own[to[i]] : 0;
    before[i] = earlier + __popc(lower);
    __syncwarp();
    if (to[i] >= 0 && !lower) own[to[i]] = (uint16_t)(earlier + __popc(peers));
    __syncwarp();
  }
  __syncthreads();
  lay_out_experts(a.map, s);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MAP_TURNS; i++) {
    const int slot = (warp_id() * MAP_TURNS + i) * WARP_SIZE + lane_id();
    const int row = to[i] < 0 ? ROW_DROPPED : s.first[to[i]] + own[to[i]] + before[i];
    if (slot >= slots) break;
    a.map.slot_row[slot] = row;
    if (row >= 0) a.map.row_pair[row] = slot;
  }
}

#endif
