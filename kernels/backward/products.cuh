/*
 * The grouped products of the backward for every type, layout and alignment, in f32 by FMA: what the forms of
 * backward_tile.cu do not serve. A CTA has a tile of 64 x 64, a thread 4 x 4 of it.
 */
#ifndef CUMOE_BACKWARD_PRODUCTS_CUH
#define CUMOE_BACKWARD_PRODUCTS_CUH

#include "backward/rows.cuh"

constexpr int FMA_TILE = 64, FMA_DEPTH = 16, FMA_SIDE = 16, FMA_EACH = FMA_TILE / FMA_SIDE;

struct fma_smem {
  alignas(16) float a[FMA_DEPTH][FMA_TILE + 4], b[FMA_DEPTH][FMA_TILE + 4]; /* read four at a time */
};

DEVICE void multiply_tiles(const fma_smem &smem, float (&sum)[FMA_EACH][FMA_EACH])
{
  const int row = threadIdx.x / FMA_SIDE * FMA_EACH, column = threadIdx.x % FMA_SIDE * FMA_EACH;
#pragma unroll
  for (int k = 0; k < FMA_DEPTH; k++) {
    const float4 a = *reinterpret_cast<const float4 *>(&smem.a[k][row]);
    const float4 b = *reinterpret_cast<const float4 *>(&smem.b[k][column]);
    const float of_a[FMA_EACH] = {a.x, a.y, a.z, a.w}, of_b[FMA_EACH] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < FMA_EACH; i++)
#pragma unroll
      for (int j = 0; j < FMA_EACH; j++) sum[i][j] = fmaf(of_a[i], of_b[j], sum[i][j]);
  }
}

/* ---- c = a b ---- */

/* before[e]: how many tiles of rows the experts before e have. */
template <int THREADS> struct rows_table {
  int32_t before[MAX_EXPERTS + 1];
  scan_smem<THREADS> scan;
};

/* Fills the table; returns the number of all tiles. A route with more than `most` tiles is not valid, and is cut. */
template <int BM, int THREADS> DEVICE int64_t count_tiles(const row_map &m, rows_table<THREADS> &table)
{
  const int64_t most = m.rows_cap / BM + m.experts;
  const int each = ceil_div(m.experts, THREADS), first = min((int)threadIdx.x * each, m.experts);
  const int last = min(first + each, m.experts);
  int64_t own = 0, all;
  for (int e = first; e < last; e++) {
    bool bad;
    table.before[e] = (int32_t)ceil_div(rows_of_expert(m, e, &bad).count, (int64_t)BM);
    own = min(own + table.before[e], most);
    if (bad && blockIdx.x == 0) report_fault(m.fault, FAULT_ROUTE, e, 0);
  }
  int64_t at = scan_before<THREADS>(table.scan, own, most, &all);
  for (int e = first; e < last; e++) {
    const int32_t tiles = table.before[e];
    table.before[e] = (int32_t)at;
    at = min(at + tiles, most);
  }
  if (threadIdx.x == 0) table.before[m.experts] = (int32_t)all;
  __syncthreads();
  return all;
}

struct product_unit {
  int expert;
  int64_t row;
  int rows, n0;
};

template <int BM, int THREADS>
DEVICE product_unit unit_of(const row_map &m, const rows_table<THREADS> &table, int64_t index, int n_tiles, int bn)
{
  const int64_t tile = index / n_tiles;
  const int e = expert_of_row(table.before, m.experts, tile);
  const row_range rows = rows_of_expert(m, e);
  const int64_t at = (tile - table.before[e]) * BM;
  return {e, rows.begin + at, (int)min(rows.count - at, (int64_t)BM), (int)(index % n_tiles) * bn};
}

template <int THREADS> struct any_product_smem {
  fma_smem tiles;
  rows_table<THREADS> table;
  int64_t start[FMA_TILE]; /* of rows of a, in elements; -1: zeros */
};

template <int THREADS>
DEVICE void load_product_tiles(const rows_product_args &p, any_product_smem<THREADS> &smem, const product_unit &u,
                               int half, int k0)
{
  int64_t first;
  const void *base = matrix_of(p.b, half, u.expert, &first);
  const bool along_k = p.b.k_stride == 1;
#pragma unroll 4
  for (int i = threadIdx.x; i < FMA_TILE * FMA_DEPTH; i += THREADS) {
    const int r = i / FMA_DEPTH, k = k0 + i % FMA_DEPTH;
    const int64_t start = smem.start[r];
    smem.tiles.a[i % FMA_DEPTH][r] =
        start >= 0 && k < p.k ? load_any(p.a.base, start + (int64_t)half * p.k + k, p.a.dtype) : 0.f;
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < FMA_TILE * FMA_DEPTH; i += THREADS) {
    const int c = along_k ? i / FMA_DEPTH : i % FMA_TILE, d = along_k ? i % FMA_DEPTH : i / FMA_TILE;
    const int n = u.n0 + c, k = k0 + d;
    const int64_t at = first + n * p.b.n_stride + k * p.b.k_stride;
    smem.tiles.b[d][c] = n < p.n && k < p.k ? load_any(base, at,
                                                       p.b.format == FORMAT_f32   ? DT_F32
                                                       : p.b.format == FORMAT_f16 ? DT_F16
                                                                                  : DT_BF16)
                                            : 0.f;
  }
}

template <int THREADS>
DEVICE void multiply_unit(const rows_product_args &p, any_product_smem<THREADS> &smem, const product_unit &u)
{
  float sum[FMA_EACH][FMA_EACH] = {};
  for (int r = threadIdx.x; r < FMA_TILE; r += THREADS) {
    const int64_t row = u.row + r, pair = r < u.rows ? pair_of_row(p.map, row) : -1;
    smem.start[r] = pair < 0 ? -1 : start_of(p.a, p.map, row, pair);
    if (r < u.rows && pair < 0) report_fault(p.map.fault, FAULT_ROUTE, 0, 0);
  }
  __syncthreads();
#pragma unroll 1
  for (int half = 0; half < p.halves; half++)
#pragma unroll 1
    for (int k0 = 0; k0 < p.k; k0 += FMA_DEPTH) {
      load_product_tiles<THREADS>(p, smem, u, half, k0);
      __syncthreads();
      multiply_tiles(smem.tiles, sum);
      __syncthreads();
    }
  const int row = threadIdx.x / FMA_SIDE * FMA_EACH, column = u.n0 + threadIdx.x % FMA_SIDE * FMA_EACH;
#pragma unroll
  for (int i = 0; i < FMA_EACH; i++)
#pragma unroll
    for (int j = 0; j < FMA_EACH; j++)
      if (row + i < u.rows && column + j < p.n)
        store_any(p.c, (u.row + row + i) * p.c_ld + column + j, p.c_dtype, p.scale * sum[i][j]);
}

template <int THREADS> DEVICE void any_rows_product(const rows_product_args &p)
{
  static_assert(THREADS == FMA_SIDE * FMA_SIDE, "a thread has 4 x 4");
  __shared__ any_product_smem<THREADS> smem;
  const int n_tiles = ceil_div(p.n, FMA_TILE);
  const int64_t units = count_tiles<FMA_TILE, THREADS>(p.map, smem.table) * n_tiles;
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < units; i += gridDim.x)
    multiply_unit<THREADS>(p, smem, unit_of<FMA_TILE, THREADS>(p.map, smem.table, i, n_tiles, FMA_TILE));
}

/* ---- d = a^T b ---- */

struct gradient_unit {
  int expert, half, n0, k0;
  row_range rows;
};

/* Experts, then tiles, k fastest: neighbours share the rows of a. */
DEVICE gradient_unit gradient_of(const weight_gradient_args &g, int64_t index, int bm, int bn)
{
  const int k_tiles = ceil_div(g.k, bn), n_tiles = ceil_div(g.n, bm);
  gradient_unit u;
  u.k0 = (int)(index % k_tiles) * bn;
  index /= k_tiles;
  u.n0 = (int)(index % n_tiles) * bm;
  index /= n_tiles;
  u.half = (int)(index % g.halves);
  u.expert = (int)(index / g.halves);
  u.rows = rows_of_expert(g.map, u.expert);
  return u;
}

DEVICE int64_t gradient_units(const weight_gradient_args &g, int bm, int bn)
{
  return (int64_t)g.map.experts * g.halves * ceil_div(g.n, bm) * ceil_div(g.k, bn);
}

/* Where a row begins in a and in b, in elements, and the factor of each. */
struct gradient_row {
  int64_t a, b; /* -1: zeros */
  float of_a, of_b;
};

/* Of padded rows. */
DEVICE int64_t start_of_padded(const weight_gradient_args &g, const row_matrix &m, int64_t row)
{
  if (m.form == OF_ROW) return row * m.ld;
  const int32_t token = g.row_token[row];
  return token < 0 ? -1 : token * m.ld;
}

DEVICE gradient_row gradient_row_of(const weight_gradient_args &g, int64_t row, bool there)
{
  if (there && g.padded) return {start_of_padded(g, g.a, row), start_of_padded(g, g.b, row), 1.f, 1.f};
  const int64_t pair = there ? pair_kept(g.map, row) : -1;
  if (pair < 0) return {-1, -1, 0, 0};
  const float weight = weight_of_pair(g.map, pair);
  return {start_of(g.a, g.map, row, pair), start_of(g.b, g.map, row, pair), g.weighs == WEIGHS_A ? weight : 1.f,
          g.weighs == WEIGHS_B ? weight : 1.f};
}

DEVICE void store_gradient(const weight_gradient_args &g, const void *base, int64_t at, int dtype, float sum)
{
  const float scaled = g.scale * sum;
  store_any(const_cast<void *>(base), at, dtype, g.accumulates ? load_any(base, at, dtype) + scaled : scaled);
}

struct any_gradient_smem {
  fma_smem tiles;
  gradient_row row[FMA_DEPTH];
};

template <int THREADS>
DEVICE void load_gradient_tiles(const weight_gradient_args &g, any_gradient_smem &smem, const gradient_unit &u,
                                int64_t at)
{
  if (threadIdx.x < FMA_DEPTH)
    smem.row[threadIdx.x] = gradient_row_of(g, u.rows.begin + at + threadIdx.x, at + threadIdx.x < u.rows.count);
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < FMA_TILE * FMA_DEPTH; i += THREADS) {
    const int r = i / FMA_TILE, c = i % FMA_TILE, n = u.n0 + c, k = u.k0 + c;
    const gradient_row row = smem.row[r];
    const bool a = row.a >= 0 && n < g.n, b = row.b >= 0 && k < g.k;
    smem.tiles.a[r][c] = a ? row.of_a * load_any(g.a.base, row.a + g.a_half[u.half] + n * g.a_n, g.a.dtype) : 0.f;
    smem.tiles.b[r][c] = b ? row.of_b * load_any(g.b.base, row.b + k, g.b.dtype) : 0.f;
  }
  __syncthreads();
}

template <int THREADS>
DEVICE void add_up_unit(const weight_gradient_args &g, any_gradient_smem &smem, const gradient_unit &u)
{
  float sum[FMA_EACH][FMA_EACH] = {};
  int64_t first;
  const void *base = matrix_of(g.d, u.half, u.expert, &first);
  if (g.accumulates && u.rows.count == 0) return;
#pragma unroll 1
  for (int64_t at = 0; at < u.rows.count; at += FMA_DEPTH) {
    load_gradient_tiles<THREADS>(g, smem, u, at);
    multiply_tiles(smem.tiles, sum);
    __syncthreads();
  }
  const int n0 = u.n0 + threadIdx.x / FMA_SIDE * FMA_EACH, k0 = u.k0 + threadIdx.x % FMA_SIDE * FMA_EACH;
#pragma unroll
  for (int i = 0; i < FMA_EACH; i++)
#pragma unroll
    for (int j = 0; j < FMA_EACH; j++)
      if (n0 + i < g.n && k0 + j < g.k)
        store_gradient(g, base, first + (n0 + i) * g.d.n_stride + (k0 + j) * g.d.k_stride, g.d_dtype, sum[i][j]);
}

template <int THREADS> DEVICE void any_weight_gradient(const weight_gradient_args &g)
{
  static_assert(THREADS == FMA_SIDE * FMA_SIDE, "a thread has 4 x 4");
  __shared__ any_gradient_smem smem;
  const int64_t units = gradient_units(g, FMA_TILE, FMA_TILE);
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < units; i += gridDim.x)
    add_up_unit<THREADS>(g, smem, gradient_of(g, i, FMA_TILE, FMA_TILE));
}

/* ---- sums over all tokens ---- */

template <int THREADS> DEVICE void any_cut(const cut_args &c)
{
  const int64_t tokens = token_total(c.tokens), run = threadIdx.x;
  const int64_t each = round_up(ceil_div(c.tokens.count, (int64_t)c.runs), (int64_t)ROW_STEP);
  if (run > c.runs) return;
  c.offsets[run] = (int32_t)min(run * each, tokens);
  if (run < c.runs) c.counts[run] = (int32_t)clamped(tokens - run * each, 0, each);
}

template <int THREADS> DEVICE void any_add_runs(const add_runs_args &a)
{
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, all = a.rows * a.cols;
  if (i >= all || (a.accumulates && token_total(a.tokens) == 0)) return;
  const int64_t at = i / a.cols * a.d_ld + i % a.cols;
  float sum = 0;
  for (int run = 0; run < a.runs; run++) sum += a.sums[run * all + i];
  store_any(a.d, at, a.d_dtype, a.accumulates ? load_any(a.d, at, a.d_dtype) + a.scale * sum : a.scale * sum);
}

/* ---- biases ---- */

/* A CTA has GRADIENT_BLOCK columns, a lane each, and a warp every so many rows; the warps' sums are added in their
 * order. */
template <int THREADS> DEVICE void any_bias_gradient(const weight_gradient_args &g)
{
  static_assert(GRADIENT_BLOCK == WARP_SIZE, "a lane a column");
  constexpr int WARPS = THREADS / WARP_SIZE;
  __shared__ float part[WARPS][WARP_SIZE];
  const int blocks = GRADIENT_BLOCKS(g.n), n = (int)(blockIdx.x % blocks) * GRADIENT_BLOCK + lane_id();
  const int half = blockIdx.x / blocks % g.halves, expert = blockIdx.x / blocks / g.halves;
  const row_range rows = rows_of_expert(g.map, expert);
  if (!g.d.bias[half] || (g.accumulates && rows.count == 0)) return;
  float sum = 0;
#pragma unroll 4
  for (int64_t at = warp_id(); at < rows.count; at += WARPS) {
    const gradient_row row = gradient_row_of(g, rows.begin + at, n < g.n);
    if (row.a >= 0) sum = fmaf(row.of_a, load_any(g.a.base, row.a + g.a_half[half] + n * g.a_n, g.a.dtype), sum);
  }
  part[warp_id()][lane_id()] = sum;
  __syncthreads();
  if (warp_id() != 0 || n >= g.n) return;
  for (int w = 1; w < WARPS; w++) sum += part[w][lane_id()];
  store_gradient(g, g.d.bias[half], expert * g.d.bias_expert_stride + n * g.d.bias_n_stride, g.d.bias_dtype, sum);
}

#endif
