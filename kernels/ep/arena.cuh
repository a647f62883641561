/* The arenas of a call's ranks: where things lie in them, and rows moved by warps. */
#ifndef CUMOE_EP_ARENA_CUH
#define CUMOE_EP_ARENA_CUH

#include "ep/words.cuh"
#include "ep/ep.h"

DEVICE char *arena_of(const ep_args &a, int rank)
{
  if (a.shape.ranks <= EP_NEAR_RANKS) return a.near[rank];
  return reinterpret_cast<char *const *>(a.arena + a.at.bases)[rank];
}

DEVICE char *lane_of(const ep_args &a, int rank)
{
  return arena_of(a, rank) + a.at.lane + (uint64_t)a.lane * a.at.lane_bytes;
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

/* The rank has not been left out. The host changes these bits between calls. */
DEVICE bool is_active(const ep_args &a, int rank)
{
  return reinterpret_cast<const uint64_t *>(a.arena + a.at.active)[rank / 64] >> rank % 64 & 1;
}

/* Brings the words that this grid is going to read into L2, while the grid ahead still runs: the layer's weights have
 * driven them out. */
DEVICE void look_ahead(const ep_args &a, uint64_t words)
{
  if (threadIdx.x == 0) prefetch(counters_of(a));
  if (threadIdx.x == 1) prefetch(a.arena + a.at.abort);
  if (threadIdx.x == 2) prefetch(a.arena + a.at.active);
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x)
    prefetch(lane_of(a, a.rank) + words + (uint64_t)r * EP_LINE);
}

DEVICE void look_ahead_at_places(const ep_args &a)
{
  const int64_t entries = (a.shape.experts - 1) * a.placement_ld + a.replicas;
  for (int64_t i = threadIdx.x * (int64_t)(EP_LINE / sizeof(int32_t)); i < entries;
       i += blockDim.x * (int64_t)(EP_LINE / sizeof(int32_t)))
    prefetch(a.placement + i);
}

/* ---- rows ---- */

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

/* Small work is dealt to all warps of the grid, the last one first: few rows keep only the first warps busy. */
DEVICE unsigned cta_of_grid()
{
  return blockIdx.y * gridDim.x + blockIdx.x;
}
DEVICE unsigned ctas_of_grid()
{
  return gridDim.x * gridDim.y;
}
DEVICE unsigned warp_from_last()
{
  return ctas_of_grid() * WARPS - 1 - (cta_of_grid() * WARPS + warp_id());
}

#endif
