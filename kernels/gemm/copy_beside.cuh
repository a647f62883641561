/*
 * Rows that a later kernel wants in padded order, copied by warps that are idle while others multiply. Tickets are all
 * the order there is, and what is made is counted, for who does not wait for this grid's end. A token is read once, and
 * written to all its rows.
 */
#ifndef CUMOE_COPY_BESIDE_CUH
#define CUMOE_COPY_BESIDE_CUH

#include "backward.h"
#include "device/ptx_sm90.cuh"

struct beside_row {
  int32_t row; /* negative: none */
  bool dropped;
};

/* A lane's slot of a token. Of a bad route, a row outside is left out. */
DEVICE beside_row row_beside(const copy_beside_args &c, int64_t token, int32_t end)
{
  if (lane_id() >= c.top_k) return {-1, false};
  const int32_t row = __ldg(c.slot_row + token * c.top_k + lane_id());
  const bool weighed = c.pair_weights != nullptr;
  return {row < end ? row : -1, weighed && __ldg(c.pair_weights + token * c.pair_weights_ld + lane_id()) == 0};
}

DEVICE void copy_token_beside(const copy_beside_args &c, int64_t token, int32_t end)
{
  constexpr int EACH = 4; /* vectors in flight: producers have few registers */
  const beside_row own = row_beside(c, token, end);
  const uint4 *from = static_cast<const uint4 *>(c.from) + token * c.from_ld;
#pragma unroll 1
  for (int first = lane_id(); first < round_up(c.vectors, (int)WARP_SIZE); first += EACH * WARP_SIZE) {
    uint4 value[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
      value[i] = ld_global_no_allocate(from + first + i * WARP_SIZE, first + i * WARP_SIZE < c.vectors);
#pragma unroll 1
    for (int slot = 0; slot < c.top_k; slot++) {
      const int32_t row = __shfl_sync(ALL_LANES, own.row, slot);
      const bool dropped = __shfl_sync(ALL_LANES, (int)own.dropped, slot);
      uint4 *to = static_cast<uint4 *>(c.to) + (int64_t)row * c.vectors + first;
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (row >= 0 && first + i * WARP_SIZE < c.vectors)
          to[i * WARP_SIZE] = dropped ? make_uint4(0, 0, 0, 0) : value[i];
    }
  }
}

DEVICE void clear_row_beside(void *matrix, int32_t vectors, int64_t row)
{
  if (!matrix) return;
  uint4 *to = static_cast<uint4 *>(matrix) + row * vectors;
  for (int i = lane_id(); i < vectors; i += WARP_SIZE) to[i] = make_uint4(0, 0, 0, 0);
}

/* Of a block of padded rows, those that are no pair's. */
DEVICE void clear_block_beside(const copy_beside_args &c, int64_t block, int32_t end)
{
  const int64_t pairs = token_total(c.tokens) * c.top_k;
#pragma unroll 1
  for (int64_t row = block * c.row_step; row < min((int64_t)end, (block + 1) * c.row_step); row++) {
    const int32_t pair = __ldg(c.row_pair + row);
    if (pair >= 0 && pair < pairs) continue;
    clear_row_beside(c.to, c.vectors, row);
    clear_row_beside(c.cleared[0], c.cleared_vectors[0], row);
    clear_row_beside(c.cleared[1], c.cleared_vectors[1], row);
  }
}

/* By whole warps, any number of them. A warp counts what it has made when there is no more: nobody wants a part. */
DEVICE void copy_beside(const copy_beside_args &c)
{
  constexpr int TICKET = 4;
  if (!c.tickets) return;
  const int32_t end = (int32_t)min(max((int64_t)load_relaxed(c.end), (int64_t)0), c.rows_cap);
  const int64_t tokens = c.from ? token_total(c.tokens) : 0, units = tokens + ceil_div((int64_t)end, (int64_t)c.row_step);
  int32_t made = 0;
#pragma unroll 1
  for (;;) {
    int32_t ticket = 0;
    if (lane_id() == 0) ticket = atomicAdd(c.tickets, 1);
    const int64_t first = (int64_t)__shfl_sync(ALL_LANES, ticket, 0) * TICKET;
    if (first >= units) break;
    const int64_t last = min(first + TICKET, units);
#pragma unroll 1
    for (int64_t unit = first; unit < last; unit++)
      if (unit < tokens)
        copy_token_beside(c, unit, end);
      else
        clear_block_beside(c, unit - tokens, end);
    made += (int32_t)(last - first);
  }
  __threadfence();
  __syncwarp();
  if (lane_id() == 0) add_release(c.tickets + (D_H_COPIED - PROGRESS_COPY_TICKETS), made);
}

#endif
