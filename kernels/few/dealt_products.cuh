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
template <class S> DEVICE void load_dealt_weights(const dealt_stage<S> &stage, uint32_t (&w)[S::BK / 16][4])
{
  const int row = lane_id() % 8, matrix = lane_id() / 8;
  const uint32_t from = shared_address(stage.boxes[matrix % 2][matrix / 2 * 8 + row]) + (warp_id() ^ row) * 16;
#pragma unroll
  for (int i = 0; i < S::BK / 16; i++) ldmatrix_x4_trans(w[i], from + i * 16 * 128);
}

template <class S>
DEVICE void store_part(const few_sm90_args &all, const dealt_smem<S> &smem, const dealt_run &run, const float (&sum)[4])
{
  const int place = warp_id() * 8 + lane_id() / 4;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int c = lane_id() % 4 * 2 + j;
    if (c >= S::COLUMNS) continue;
    if (smem.table.column[run.active][c] < 0) continue;
    const dealt_sums sums = sums_of<S>(all, smem, run.kind == DEALT_DOWN, run.active, run.block, c);
    float *to = sums.first + run.part * sums.step + place;
    store_relaxed(to, sum[j]);
    store_relaxed(to + 64, sum[j + 2]);
  }
}

/* ---- h ---- */

/* One channel of h, of a gated layer or not. */
template <class S>
DEVICE void store_h(const few_sm90_args &all, const dealt_smem<S> &smem, int active, int pair, int channel, float gate,
                    float up)
{
  using Y = typename S::Y;
  const gemm_args &g = all.f.up;
  if (channel >= g.n) return;
  float gate_bias[1], up_bias[1] = {0.f};
  load_bias(g.b, 0, smem.table.expert[active], channel, gate_bias);
  if (g.gated) load_bias(g.b, 1, smem.table.expert[active], channel, up_bias);
  store_relaxed(static_cast<Y *>(g.c) + pair * g.c_ld + channel,
                from_f32<Y>(h_of_sums(g, make_float2(gate, up), make_float2(gate_bias[0], up_bias[0]))));
}

/* A unit's h: 64 channels of a gated layer, or twice as many. */
template <class S>
DEVICE void finish_column(const few_sm90_args &all, const dealt_smem<S> &smem, const dealt_unit &unit, int column)
{
  const gemm_args &g = all.f.up;
  const int pair = column_pair(smem.table.column[unit.active][column]);
  const int channels = smem.line[0].gated ? (int)FEW_PART_N / 2 : (int)FEW_PART_N;
#pragma unroll 1
  for (int i = 2 * lane_id(); i < channels; i += 2 * WARP_SIZE) {
    const int channel = unit.block * channels + i;
    const uint32_t two = two_of_h<S>(all, smem, unit.active, column, channel);
    if (channel < g.n)
      store_relaxed(reinterpret_cast<float *>(static_cast<typename S::Y *>(g.c) + pair * g.c_ld + channel),
                    __uint_as_float(two));
  }
  __syncwarp();
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
  float sum[4] = {}, odd[4] = {}; /* two: a product waits for the sums of the one before */
#pragma unroll 1
  while (true) {
    wait_for(&smem.full[at.stage], at.phase); /* first: at the end weights are there long before h */
    const dealt_run run = smem.run[at.stage];
    if (run.kind == DEALT_END) return;
    uint32_t w[S::BK / 16][4];
    uint2 x[S::BK / 16];
    load_dealt_weights<S>(smem.stages[at.stage], w);
    wait_for(&smem.there[at.stage], at.phase);
    load_dealt_columns<S>(smem.columns[at.stage], x);
#pragma unroll
    for (int i = 0; i < S::BK / 16; i++) mma_m16n8k16<typename S::X>(i % 2 ? odd : sum, w[i], {x[i].x, x[i].y});
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(&smem.empty[at.stage]);
    at.advance();
    if (!run.last) continue;
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += odd[i], odd[i] = 0.f;
    if (!S::ONE && run.kind == DEALT_UP &&
        smem.line[0].parts_of(run.active * smem.line[0].blocks + run.block).count == 1)
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
      if (smem.table.column[unit.active][c] >= 0) finish_column<S>(all, smem, unit, c);
    }
  }
}

#endif
