/* dealt: consumer warps, which multiply and leave parts of sums in memory; and the warp that makes h of up's. */
#ifndef CUMOE_DEALT_PRODUCTS_CUH
#define CUMOE_DEALT_PRODUCTS_CUH

#include "few/dealt_feed.cuh"
#include "gemm/epilogue.cuh"

/* ---- products ---- */

/* Lane l has k 2 (l % 4), + 1, + 8 and + 9 of column l / 4, of each 16. */
template <class S>
DEVICE void load_dealt_columns(const typename S::X (&columns)[S::COLUMNS][S::COLUMN], uint2 (&x)[S::BK / 16])
{
  const int column = lane_id() / 4;
#pragma unroll
  for (int i = 0; i < S::BK / 16; i++) {
    x[i] = make_uint2(0, 0);
    if (column >= S::COLUMNS) continue;
    const uint32_t *from = reinterpret_cast<const uint32_t *>(&columns[column][i * 16]) + lane_id() % 4;
    x[i] = make_uint2(from[0], from[4]);
  }
}

/* A consumer has an octet of either box: [j + 2 b] is channel l/4 of box b's, column 2 (l%4) + j. */
template <class S>
DEVICE void multiply_dealt(const dealt_stage<S> &stage, const uint2 (&x)[S::BK / 16], float (&sum)[4])
{
  const int row = lane_id() % 8, matrix = lane_id() / 8;
  const uint32_t from = shared_address(stage.boxes[matrix % 2][matrix / 2 * 8 + row]) + (warp_id() ^ row) * 16;
#pragma unroll
  for (int i = 0; i < S::BK / 16; i++) {
    uint32_t w[4];
    ldmatrix_x4_trans(w, from + i * 16 * 128);
    mma_m16n8k16<typename S::X>(sum, w, {x[i].x, x[i].y});
  }
}

template <class S>
DEVICE void store_part(const few_sm90_args &all, const dealt_smem<S> &smem, const dealt_run &run, const float (&sum)[4])
{
  const int place = run.block * (int)FEW_PART_N + warp_id() * 8 + lane_id() / 4;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int c = lane_id() % 4 * 2 + j;
    if (c >= S::COLUMNS) continue;
    const few_column column = smem.table.column[run.active][c];
    if (column < 0) continue;
    float *to = part_of<S>(all, smem, run.kind == DEALT_DOWN, run.part, column_pair(column)) + place;
    store_relaxed(to, sum[j]);
    store_relaxed(to + 64, sum[j + 2]);
  }
}

/* ---- h ---- */

DEVICE float2 as_floats(uint64_t two)
{
  return make_float2(__uint_as_float((uint32_t)two), __uint_as_float((uint32_t)(two >> 32)));
}

DEVICE bool is_unwritten_sum(uint64_t two)
{
  return (uint32_t)two == ~0u || (uint32_t)(two >> 32) == ~0u;
}

/* Sums of a pair's parts, in the order of k, at two places of a unit, two of each. */
template <class S>
DEVICE void add_up_parts(const few_sm90_args &all, const dealt_smem<S> &smem, int pair, int first, int second,
                         float2 &a, float2 &b)
{
  constexpr int AT_ONCE = 8;
  const int parts = smem.line[0].parts;
  a = b = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int p = 0; p < parts; p += AT_ONCE) {
    uint64_t raw[AT_ONCE][2];
    bool again;
    do {
      again = false;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        raw[i][0] = raw[i][1] = 0;
        if (p + i >= parts) continue;
        const float *from = part_of<S>(all, smem, false, p + i, pair);
        raw[i][0] = load_relaxed(reinterpret_cast<const uint64_t *>(from + first));
        raw[i][1] = load_relaxed(reinterpret_cast<const uint64_t *>(from + second));
        again |= is_unwritten_sum(raw[i][0]) || is_unwritten_sum(raw[i][1]);
      }
    } while (again);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const float2 low = as_floats(raw[i][0]), high = as_floats(raw[i][1]);
      a.x += low.x, a.y += low.y, b.x += high.x, b.y += high.y;
    }
  }
}

/* One channel of h, of a gated layer or not. */
template <class S>
DEVICE void store_h(const few_sm90_args &all, const dealt_smem<S> &smem, int active, int pair, int channel, float gate,
                    float up)
{
  using Y = typename S::Y;
  const gemm_args &g = all.f.up;
  if (channel >= g.n) return;
  const int expert = smem.table.expert[active];
  float gate_bias[1], up_bias[1] = {0.f};
  load_bias(g.b, 0, expert, channel, gate_bias);
  if (g.gated) load_bias(g.b, 1, expert, channel, up_bias);
  float low[1] = {weighted(gate, 1.f, 1.f, gate_bias[0])}, high[1] = {weighted(up, 1.f, 1.f, up_bias[0])};
  activate<1>(g, low, high);
  store_relaxed(static_cast<Y *>(g.c) + pair * g.c_ld + channel, from_f32<Y>(low[0]));
}

/* A lane has four sums of a unit: two channels of gate and up each, or four. */
template <class S>
DEVICE void finish_column(const few_sm90_args &all, const dealt_smem<S> &smem, const dealt_unit &unit, int pair)
{
  const dealt_line &line = smem.line[0];
  const int lane = lane_id(), base = unit.block * (int)FEW_PART_N, first = line.pairs ? 4 * lane : 2 * lane,
            second = line.pairs ? first + 2 : first + 64;
  float2 a, b;
  add_up_parts<S>(all, smem, pair, base + first, base + second, a, b);
  if (!line.gated) {
    store_h<S>(all, smem, unit.active, pair, base + first, a.x, 0.f);
    store_h<S>(all, smem, unit.active, pair, base + first + 1, a.y, 0.f);
    store_h<S>(all, smem, unit.active, pair, base + second, b.x, 0.f);
    store_h<S>(all, smem, unit.active, pair, base + second + 1, b.y, 0.f);
    return;
  }
  float gate[2] = {a.x, a.y}, up[2] = {b.x, b.y};
  if (line.pairs) {
    const few_halves of = smem.table.weights[unit.active];
    const bool up_first = of.high < of.low;
    gate[0] = up_first ? a.y : a.x, up[0] = up_first ? a.x : a.y;
    gate[1] = up_first ? b.y : b.x, up[1] = up_first ? b.x : b.y;
  }
  const int channel = unit.block * 64 + 2 * lane;
  store_h<S>(all, smem, unit.active, pair, channel, gate[0], up[0]);
  store_h<S>(all, smem, unit.active, pair, channel + 1, gate[1], up[1]);
}

/* A consumer's sums of a unit that is one part: without the way through memory. */
template <class S>
DEVICE void finish_whole(const few_sm90_args &all, const dealt_smem<S> &smem, const dealt_run &run, float (&sum)[4])
{
  const dealt_line &line = smem.line[0];
  const int row = lane_id() / 4, place = warp_id() * 8 + row;
  const bool odd = row % 2;
  int channel = run.block * (line.gated ? 64 : (int)FEW_PART_N) + place;
  if (line.pairs) { /* lanes exchange what they have of each other's channels */
    const few_halves of = smem.table.weights[run.active];
    const bool up_first = of.high < of.low;
    channel = run.block * 64 + (odd ? 32 : 0) + place / 2;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float own = odd ? sum[j + 2] : sum[j], given = odd ? sum[j] : sum[j + 2],
                  other = __shfl_xor_sync(ALL_LANES, given, 4);
      sum[j] = odd != up_first ? other : own, sum[j + 2] = odd != up_first ? own : other;
    }
  }
#pragma unroll 1
  for (int j = 0; j < 2; j++) {
    const int c = lane_id() % 4 * 2 + j;
    const float low = j ? sum[1] : sum[0], high = j ? sum[3] : sum[2];
    if (c >= S::COLUMNS || smem.table.column[run.active][c] < 0) continue;
    const int pair = column_pair(smem.table.column[run.active][c]);
    store_h<S>(all, smem, run.active, pair, channel, low, line.gated ? high : 0.f);
    if (!line.gated) store_h<S>(all, smem, run.active, pair, channel + 64, high, 0.f);
  }
  __syncwarp();
}

template <class S> DEVICE void dealt_consume(const few_sm90_args &all, dealt_smem<S> &smem)
{
  pipeline_state<S::STAGES> at;
  float sum[4] = {};
#pragma unroll 1
  while (true) {
    wait_for(&smem.full[at.stage], at.phase);
    const dealt_run run = smem.run[at.stage];
    if (run.kind == DEALT_END) return;
    uint2 x[S::BK / 16];
    load_dealt_columns<S>(smem.columns[at.stage], x);
    multiply_dealt<S>(smem.stages[at.stage], x, sum);
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(&smem.empty[at.stage]);
    at.advance();
    if (!run.last) continue;
    if (run.kind == DEALT_UP && smem.line[0].parts == 1)
      finish_whole<S>(all, smem, run, sum);
    else
      store_part<S>(all, smem, run, sum);
    sum[0] = sum[1] = sum[2] = sum[3] = 0.f;
  }
}

template <class S> DEVICE void finish_units(const few_sm90_args &all, dealt_smem<S> &smem)
{
  pipeline_state<S::QUEUE> at;
#pragma unroll 1
  while (true) {
    wait_for(&smem.unit_full[at.stage], at.phase);
    const dealt_unit unit = smem.unit[at.stage];
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(&smem.unit_empty[at.stage]);
    at.advance();
    if (unit.active < 0) return;
#pragma unroll 1
    for (int c = 0; c < S::COLUMNS; c++) {
      const few_column column = smem.table.column[unit.active][c];
      if (column >= 0) finish_column<S>(all, smem, unit, column_pair(column));
    }
  }
}

#endif
