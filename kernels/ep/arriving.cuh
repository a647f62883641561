/*
 * up by wgmma, of rows that arrive from other ranks meanwhile. Each expert's rows lie in the order in which ranks' rows
 * arrive, this rank's own first (map_args.first_chunk). So units go through bands of row tiles, and through all experts
 * in each: the first bands need the first ranks alone. Idle producer warps copy rows in the same order (copy_ahead.cuh)
 * and wait for each rank's flag before they read of its segment.
 *
 * Who waits here may take all SMs: nothing that these rows depend on may still have to start (ep/flags.cuh).
 */
#ifndef CUMOE_EP_ARRIVING_CUH
#define CUMOE_EP_ARRIVING_CUH

#include "ep/flags.cuh"
#include "gemm/major.cuh"
#include "gemm/wgmma.cuh"

/* ---- bands ---- */

/* Of an expert's tiles those before a band. An odd one is a band of its own, the first: two share weights. */
DEVICE int tiles_before_band(int tiles, int band, int pairs)
{
  const int odd = tiles & 1, before = odd ? 2 * pairs * (band - 1) + 1 : 2 * pairs * band;
  return band == 0 ? 0 : min(tiles, before);
}

DEVICE int tiles_of_band(const tile_table &table, int expert, int band, int pairs)
{
  const int tiles = table.before[expert + 1] - table.before[expert];
  return tiles_before_band(tiles, band + 1, pairs) - tiles_before_band(tiles, band, pairs);
}

/* An expert's tiles of a band; `position`: how many come before them. */
struct tile_group {
  int expert, first, tiles, position;
};

/* By a whole warp; position: below the number of all tiles. A lane has some of the experts. */
DEVICE tile_group group_at(const gemm_args &args, const tile_table &table, int position)
{
  const int pairs = exchange_of_cta()->band, each = ceil_div(args.experts, (int)WARP_SIZE);
  const int first = min(lane_id() * each, args.experts), last = min(first + each, args.experts);
  int before = 0;
#pragma unroll 1
  for (int band = 0;; band++) {
    int own = 0;
#pragma unroll 1
    for (int e = first; e < last; e++) own += tiles_of_band(table, e, band, pairs);
    const int upto = warp_scan(own), all = __shfl_sync(ALL_LANES, upto, WARP_SIZE - 1);
    if (position >= before + all) {
      before += all;
      continue;
    }
    const int lane = __ffs((int)__ballot_sync(ALL_LANES, position < before + upto)) - 1;
    int at = before + __shfl_sync(ALL_LANES, upto - own, lane), e = lane * each;
#pragma unroll 1
    for (;; e++) {
      const int tiles = tiles_of_band(table, e, band, pairs);
      if (position < at + tiles)
        return {e, tiles_before_band(table.before[e + 1] - table.before[e], band, pairs), tiles, at};
      at += tiles;
    }
  }
}

/* ---- rows of other ranks ---- */

/* Waits, by a whole warp, until all rows of a rank are here, or the group has given up: then they are whatever they
 * are. A flag has half of its words from the put of rows. */
DEVICE void wait_for_rows_of(const ep_args &a, uint32_t exchange, int rank)
{
  const char *words = lane_of(a, a.rank) + a.at.in + (uint64_t)rank * EP_LINE;
  uint32_t tokens;
  if (lane_id() < EP_FLAG_WORDS && ep_is_word_of(EP_PUTS_ROWS, lane_id()) && is_active(a, rank))
    (void)wait_for_word<true>(a, words + lane_id() * sizeof(uint64_t), exchange, EP_DISPATCH, rank, &tokens);
  __syncwarp();
}

template <class S> struct arriving<S, true> {
  using X = typename S::X;
  static constexpr int TICKETS = (S::BM + COPY_TICKET - 1) / COPY_TICKET; /* of a tile */

  DEVICE static int32_t *tickets() { return &counters_of(*exchange_of_cta())->up_units; }

  /* As wgmma_unit, by bands; tile.end: the tile's number among all experts'. */
  DEVICE static cluster_unit unit(const gemm_args &args, const tile_table &table, int64_t index)
  {
    const int n_tiles = ceil_div(args.n, wgmma_channels<S>(args)), n_pairs = ceil_div(n_tiles, S::CLUSTER);
    const int rank = cluster_ctarank();
    cluster_unit unit = {{-1, 0, 0, 0, 0}, false, false};
    if (index >= (int64_t)table.before[args.experts] * n_pairs) return unit;
    const tile_group group = group_at(args, table, (int)(index / n_pairs));
    const int local = (int)(index - (int64_t)group.position * n_pairs), heights = (group.tiles + 1) / 2;
    unit.paired = group.tiles > 1;
    const int wide = unit.paired ? 1 : S::CLUSTER, m = group.first + (unit.paired ? local % heights * 2 + rank : 0);
    const int before = table.before[group.expert], tiles = table.before[group.expert + 1] - before;
    const row_range rows = rows_of_tile<S>(expert_rows(args, group.expert), m, tiles);
    unit.tile = {group.expert, rows.begin, rows.count, local / heights * wide + (unit.paired ? 0 : rank), before + m};
    unit.absent = unit.paired && unit.tile.n >= n_tiles;
    return unit;
  }

  /* Returns when a tile's rows have been copied, for bulk copies that this thread starts. */
  DEVICE static void wait(const gemm_args &args, const tile_unit &tile)
  {
    while (load_relaxed(args.protocol.progress + PROGRESS_COPIED + tile.end) < tile.rows) {
    }
    __threadfence();
    fence_proxy_async_global();
  }

  /* Whole warps, any number of them, as copy_rows: the next ticket is drawn while one is copied. */
  DEVICE static int draw_copy(const gemm_args &args)
  {
    int32_t ticket = 0;
    if (lane_id() == 0) ticket = atomicAdd(args.protocol.progress + PROGRESS_COPY_TICKETS, 1);
    return __shfl_sync(ALL_LANES, ticket, 0);
  }

  DEVICE static void copy_rows(const gemm_args &args, const tile_table &table)
  {
    const ep_args &a = *exchange_of_cta();
    const int end = table.before[args.experts] * TICKETS;
    const uint32_t exchange = load_relaxed(reinterpret_cast<const int32_t *>(&counters_of(a)->serving));
    uint32_t here = 1u << a.rank; /* a bit a rank whose rows are; at most EP_NEAR_RANKS */
    int ticket = draw_copy(args);
#pragma unroll 1
    while (ticket < end) {
      const int next = draw_copy(args);
      copy_ticket(args, table, ticket, exchange, here);
      ticket = next;
    }
  }

  DEVICE static void copy_ticket(const gemm_args &args, const tile_table &table, int ticket, uint32_t exchange,
                                 uint32_t &here)
  {
    const ep_args &a = *exchange_of_cta();
    const int position = ticket / TICKETS, begin = ticket % TICKETS * COPY_TICKET;
    const tile_group group = group_at(args, table, position);
    const int before = table.before[group.expert], m = group.first + position - group.position;
    const row_range rows =
        rows_of_tile<S>(expert_rows(args, group.expert), m, table.before[group.expert + 1] - before);
    const int first = rows.begin + begin, count = min(rows.count - begin, (int)COPY_TICKET);
    if (count <= 0) return;
    const int32_t pairs = (int32_t)token_total(args.tokens) * args.top_k, capacity = (int32_t)a.shape.capacity;
    const int32_t pair = lane_id() < count ? __ldg(args.row_pair + first + lane_id()) : 0;
    const bool there = (uint32_t)pair < (uint32_t)pairs;
    if (!there) report_fault_inline(args.fault, FAULT_ROUTE, 0, pair);
    const int32_t token = there ? (int32_t)((uint32_t)pair / (uint32_t)args.top_k) : -1, source = token / capacity;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      const int32_t row = __shfl_sync(ALL_LANES, token, i), from = __shfl_sync(ALL_LANES, source, i);
      if (!(here >> from & 1)) wait_for_rows_of(a, exchange, from);
      here |= 1u << from;
      if (from == a.rank)
        copy_row<X>(args, first + i, row < 0 ? row : row - from * capacity, a.x, a.x_ld);
      else
        copy_row<X>(args, first + i, row, args.a, args.a_ld);
    }
    __syncwarp();
    __threadfence();
    if (lane_id() == 0) atomicAdd(args.protocol.progress + PROGRESS_COPIED + before + m, count);
  }
};

#endif
