/*
 * Which rows and channels a CTA works on. The rows of every expert are cut into tiles of BM; a unit is a (row tile,
 * channel tile) pair. Every CTA builds the same table from the counts in device memory, so a grid of any size covers
 * all units and no host ever needs to know the counts.
 */
#ifndef CUMOE_SCHEDULE_CUH
#define CUMOE_SCHEDULE_CUH

#include "device/ptx.cuh"

struct row_range {
  int32_t begin, count;
};

/* Rows of an expert as the route says, kept inside [0, rows_cap). */
DEVICE row_range expert_rows(const gemm_args &args, int expert, bool *bad = nullptr)
{
  int64_t begin = 0, count, cap = args.rows_cap;
  if (args.counts) {
    begin = load_relaxed(args.offsets + expert);
    count = load_relaxed(args.counts + expert);
  } else {
    count = token_total(args.tokens);
  }
  int64_t first = min(max(begin, (int64_t)0), cap);
  int64_t kept = min(max(count, (int64_t)0), cap - first);
  if (bad) *bad = count != 0 && (first != begin || kept != count);
  return {(int32_t)first, (int32_t)kept};
}

/* Tiles of experts before each one. Lives in shared memory. */
struct tile_table {
  int32_t before[MAX_EXPERTS + 1];
  int32_t warp_total[WARP_SIZE];
};

/* No valid route has more tiles. One that does is cut here, so that a bad one takes bounded time too. */
template <int BM> DEVICE int tile_limit(const gemm_args &args)
{
  return (int)(args.rows_cap / BM + args.experts);
}

/* Fills the table, and `rows` with every expert's if it is there; all threads. Returns the number of row tiles. A scan
 * over E experts: two barriers. */
template <int BM, int THREADS>
DEVICE int build_tile_table(const gemm_args &args, tile_table &table, row_range *all_rows = nullptr)
{
  const int limit = tile_limit<BM>(args), each = ceil_div(args.experts, THREADS);
  const int first = min((int)threadIdx.x * each, args.experts), last = min(first + each, args.experts);
  int own = 0;
  for (int e = first; e < last; e++) {
    bool bad;
    row_range rows = expert_rows(args, e, &bad);
    table.before[e] = ceil_div(rows.count, BM); /* its own tiles, for now */
    if (all_rows) all_rows[e] = rows;
    own = min(own + table.before[e], limit);
    if (bad && blockIdx.x == 0) report_fault(args.fault, FAULT_ROUTE, e, 0);
  }
  /* Sums are cut at the limit: 1024 of them, each at most 2^31 / BM + 1024, fit 32 bits only when cut as they go. */
  int upto = own;
#pragma unroll
  for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
    int other = __shfl_up_sync(ALL_LANES, upto, distance);
    if (lane_id() >= distance) upto = min(upto + other, limit);
  }
  if (lane_id() == WARP_SIZE - 1) table.warp_total[warp_id()] = upto;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp_id(); w++) before = min(before + table.warp_total[w], limit);
  int inclusive = __shfl_up_sync(ALL_LANES, upto, 1);
  if (lane_id() > 0) before = min(before + inclusive, limit);
  for (int e = first; e < last; e++) {
    const int tiles = table.before[e];
    table.before[e] = before;
    before = min(before + tiles, limit);
  }
  if (threadIdx.x == THREADS - 1) table.before[args.experts] = before;
  __syncthreads();
  return table.before[args.experts];
}

/* The expert that row tile `tile` belongs to; experts without rows are never found. */
DEVICE int expert_of_tile(const gemm_args &args, const tile_table &table, int tile)
{
  int low = 0, high = args.experts;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (table.before[middle] <= tile)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* One unit of the tile forms. */
struct tile_unit {
  int32_t expert;
  int32_t row, rows; /* first row; rows there, 1 .. BM */
  int32_t n;         /* channel tile */
  int32_t end;       /* stream, wgmma: see there */
};

/* Row tiles advance first inside a band of BAND of them, then channels: the CTAs at work share both the weights of a
 * few channel tiles and the rows of one band, whose sum is what L2 has to hold. */
template <int BM, int BAND>
DEVICE tile_unit unit_of(const gemm_args &args, const tile_table &table, int64_t index, int n_tiles)
{
  const int32_t tile = (int32_t)(index / n_tiles), n = (int32_t)(index - (int64_t)tile * n_tiles);
  tile_unit unit;
  unit.expert = expert_of_tile(args, table, tile);
  const row_range rows = expert_rows(args, unit.expert);
  const int32_t first = table.before[unit.expert], m = tile - first;
  const int32_t height = min(table.before[unit.expert + 1] - first - m / BAND * BAND, BAND);
  const uint32_t in_band = (uint32_t)(m % BAND) * n_tiles + n; /* units are counted through the band, not row by row */
  unit.n = in_band / height;
  const int32_t begin = (m / BAND * BAND + in_band % height) * BM;
  unit.row = rows.begin + begin;
  unit.rows = min(rows.count - begin, BM);
  return unit;
}

/* ---- rows and experts ---- */

/* Where row `row` of the A operand lies; -1 if its pair is none (reads as zeros). */
DEVICE int32_t source_row(const gemm_args &args, int32_t row)
{
  if (!args.row_pair || args.packed) return row;
  int64_t pair = args.row_pair[row], pairs = token_total(args.tokens) * args.top_k;
  if (pair >= 0 && pair < pairs) return (int32_t)((uint32_t)pair / (uint32_t)args.top_k);
  report_fault(args.fault, FAULT_ROUTE, 0, pair);
  return -1;
}

/* Weight of a row's pair, applied to its accumulators. */
DEVICE float row_weight(const gemm_args &args, int32_t row)
{
  if (!args.pair_weights) return 1.f;
  if (!args.row_pair) return args.pair_weights[row * args.pair_weights_ld];
  int64_t pair = args.row_pair[row];
  if (pair < 0 || pair >= token_total(args.tokens) * args.top_k) return 0.f;
  return args.pair_weights[pair / args.top_k * args.pair_weights_ld + pair % args.top_k];
}

template <class T> DEVICE const T *expert_base(const expert_matrix &b, int half, int expert)
{
  if (b.table[half]) return static_cast<const T *>(b.table[half][expert]);
  return static_cast<const T *>(b.base[half]) + expert * b.expert_stride;
}

#endif
