/* even: consumer warps. Each multiplies its channels of every stage, and finishes them. */
#ifndef CUMOE_EVEN_PRODUCTS_CUH
#define CUMOE_EVEN_PRODUCTS_CUH

#include "few/even_feed.cuh"
#include "few/loads.cuh"
#include "gemm/epilogue.cuh"

/* ---- products ---- */

/* Lane l has k 2 (l % 4), + 1, + 8 and + 9 of column l / 4, of each granule. */
template <class S>
DEVICE void load_even_columns(const typename S::X (&columns)[S::COLUMNS][S::COLUMN], uint2 (&x)[S::GRANULES])
{
  const int column = lane_id() / 4;
#pragma unroll
  for (int i = 0; i < S::GRANULES; i++) {
    x[i] = make_uint2(0, 0);
    if (column >= S::COLUMNS) continue;
    const uint32_t *from = reinterpret_cast<const uint32_t *>(&columns[column][i * EVEN_GRANULE]) + lane_id() % 4;
    x[i] = make_uint2(from[0], from[4]);
  }
}

template <class S>
DEVICE void multiply_even(const even_stage<S> &stage, int granules, const uint2 (&x)[S::GRANULES],
                          float (&sum)[S::TILES][4])
{
  const int row = lane_id() % 8, matrix = lane_id() / 8;
  uint32_t from[S::TILES];
#pragma unroll
  for (int t = 0; t < S::TILES; t++) {
    const int octet = warp_id() * S::TILES + t + matrix % 2 * (S::OCTETS / 2);
    from[t] = shared_address(stage.boxes[0][octet / 8][matrix / 2 * 8 + row]) + (octet % 8 ^ row) * 16;
  }
#pragma unroll
  for (int i = 0; i < S::GRANULES; i++) {
    if (i >= granules) continue;
#pragma unroll
    for (int t = 0; t < S::TILES; t++) {
      uint32_t w[4];
      ldmatrix_x4_trans(w, from[t] + i * (uint32_t)sizeof stage.boxes[0]);
      mma_m16n8k16<typename S::X>(sum[t], w, {x[i].x, x[i].y});
    }
  }
}

/* ---- parts of a unit ---- */

template <class S> DEVICE void store_part(const few_args &args, const even_run &run, const float (&sum)[S::TILES][4])
{
  const even_slot<S> slot(args, run.down);
  if (!slot.mine()) return;
#pragma unroll
  for (int t = 0; t < S::TILES; t++) {
    uint64_t *to = slot.of(run.share, warp_id() * S::TILES + t);
    const float(&s)[4] = sum[t];
    if constexpr (S::COLUMNS == 1) {
      store_relaxed(to, (uint64_t)__float_as_uint(s[2]) << 32 | __float_as_uint(s[0]));
    } else {
      store_relaxed(to, (uint64_t)__float_as_uint(s[1]) << 32 | __float_as_uint(s[0]));
      store_relaxed(to + 1, (uint64_t)__float_as_uint(s[3]) << 32 | __float_as_uint(s[2]));
    }
  }
}

DEVICE bool is_unwritten(uint64_t two)
{
  return (uint32_t)two == ~0u || (uint32_t)(two >> 32) == ~0u;
}

/* Two of the shares behind at once, from the i-th on: what they have of the unit. */
template <class S> struct even_parts {
  uint64_t part[2][S::TILES][even_slot<S>::each()];

  DEVICE void load(const even_slot<S> &slot, const even_run &run, int i)
  {
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const int share = run.share + min(i + s, (int)run.follows);
#pragma unroll
      for (int t = 0; t < S::TILES; t++) {
        const uint64_t *from = slot.of(share, warp_id() * S::TILES + t);
#pragma unroll
        for (int j = 0; j < slot.each(); j++) part[s][t][j] = load_relaxed(from + j);
      }
    }
  }
  DEVICE bool unwritten() const
  {
    bool some = false;
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int t = 0; t < S::TILES; t++)
#pragma unroll
        for (int j = 0; j < even_slot<S>::each(); j++) some |= is_unwritten(part[s][t][j]);
    return some;
  }
  DEVICE void add_to(float (&sum)[S::TILES][4], bool both) const
  {
    constexpr int SECOND = S::COLUMNS == 1 ? 2 : 1;
#pragma unroll
    for (int s = 0; s < 2; s++) {
      if (s == 1 && !both) continue;
#pragma unroll
      for (int t = 0; t < S::TILES; t++) {
#pragma unroll
        for (int j = 0; j < even_slot<S>::each(); j++) {
          sum[t][2 * j] += __uint_as_float((uint32_t)part[s][t][j]);
          sum[t][2 * j + SECOND] += __uint_as_float((uint32_t)(part[s][t][j] >> 32));
        }
      }
    }
  }
};

/* What the shares behind have of the unit, in the order of k. */
template <class S> DEVICE void add_parts(const few_args &args, const even_run &run, float (&sum)[S::TILES][4])
{
  const even_slot<S> slot(args, run.down);
  if (!slot.mine()) return;
#pragma unroll 1
  for (int i = 1; i <= run.follows; i += 2) {
    even_parts<S> parts;
    do parts.load(slot, run, i);
    while (parts.unwritten());
    parts.add_to(sum, i < run.follows);
  }
}

/* ---- h and y ---- */

/* Gate and up element by element: lanes exchange what they have of each other's channels. A lane of even l / 4 then has
 * the channel of its pair of the tile's first octet, the lane beside it that of the second. */
DEVICE void part_even_pairs(bool up_first, float (&sum)[4])
{
  const bool odd = lane_id() / 4 % 2;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const float own = odd ? sum[j + 2] : sum[j], given = odd ? sum[j] : sum[j + 2],
                other = __shfl_xor_sync(ALL_LANES, given, 4);
    sum[j] = odd != up_first ? other : own;
    sum[j + 2] = odd != up_first ? own : other;
  }
}

/* A lane's channels of a tile, of the unit's: of its first octet, of its second. */
struct even_channels {
  int low, high;
};
template <class S> DEVICE even_channels channels_of(const even_line &line, int tile)
{
  constexpr int HALF = S::OCTETS / 2;
  const int row = lane_id() / 4, own = tile * 8 + row;
  if (!line.pairs) return {own, line.halves == 2 ? own : own + HALF * 8};
  const int pair = tile * 4 + row / 2 + row % 2 * (HALF * 4);
  return {pair, pair};
}

/* A tile of a unit: rounded, to h or to y. */
template <class S, bool UP>
DEVICE void finish_tile(const few_args &args, even_smem<S> &smem, const even_run &run, int tile, float (&sum)[4])
{
  using Y = typename S::Y;
  constexpr epilogue LAST = UP ? EPILOGUE_activation : EPILOGUE_plain;
  const gemm_args &g = UP ? args.up : args.down;
  const even_line &line = smem.line[!UP];
  const bool gated = UP && line.halves == 2;
  const int expert = smem.table.expert[run.active], channels = run.width * 8, first = run.octet * 8;
  const even_channels local = channels_of<S>(line, tile);
  const bool there[2] = {local.low < channels, local.high < channels};
  const float none[1] = {1.f};
  float low_bias[1] = {0.f}, high_bias[1] = {0.f};
  if (there[0]) load_bias(g.b, 0, expert, first + local.low, low_bias);
  if (there[1]) load_bias(g.b, gated ? 1 : 0, expert, first + local.high, high_bias);
  if (UP && line.pairs) {
    const few_halves of = smem.table.weights[run.active];
    part_even_pairs(of.high < of.low, sum);
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (S::COLUMNS == 1 && j > 0) continue;
    const few_column column = smem.table.column[run.active][lane_id() % 4 * 2 + j];
    if (column < 0) continue;
    Y *to = static_cast<Y *>(g.c) + column_pair(column) * g.c_ld + first;
    float low[1] = {sum[j]}, high[1] = {sum[j + 2]};
    finish<LAST, false>(g, none, low_bias, high_bias, low, high);
    if (there[0]) store_relaxed(to + local.low, from_f32<Y>(low[0]));
    if (gated || !there[1]) continue;
    if (UP) activate<1>(g, high, low);
    store_relaxed(to + local.high, from_f32<Y>(high[0]));
  }
}

template <class S, bool UP>
DEVICE void finish_run(const few_args &args, even_smem<S> &smem, const even_run &run, float (&sum)[S::TILES][4])
{
  if (run.follows < 0) return store_part<S>(args, run, sum);
  add_parts<S>(args, run, sum);
  __syncwarp();
#pragma unroll
  for (int t = 0; t < S::TILES; t++) finish_tile<S, UP>(args, smem, run, warp_id() * S::TILES + t, sum[t]);
}

/* ---- a consumer ---- */

template <class S> DEVICE void even_consume(const few_args &args, even_smem<S> &smem)
{
  pipeline_state<S::STAGES> at;
  float sum[S::TILES][4] = {};
  STAMP_FLAG(first)
  STAMP_FLAG(first_down)
#pragma unroll 1
  while (true) {
    wait_for(&smem.full[at.stage], at.phase);
    const even_run run = smem.run[at.stage];
    STAMP_ONCE(first, threadIdx.x == 0, 5);
    if (run.granules == 0) return;
    uint2 x[S::GRANULES];
    load_even_columns<S>(smem.columns[at.stage], x);
    STAMP_ONCE(first_down, threadIdx.x == 0 && run.down, 8);
    multiply_even<S>(smem.stages[at.stage], run.granules, x, sum);
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(&smem.empty[at.stage]);
    at.advance();
    STAMP(threadIdx.x == 0, run.down ? 9 : 6);
    if (!run.last) continue;
    if (run.down)
      finish_run<S, false>(args, smem, run, sum);
    else
      finish_run<S, true>(args, smem, run, sum);
    STAMP(threadIdx.x == 0, run.down ? 10 : 7);
#pragma unroll
    for (int t = 0; t < S::TILES; t++) sum[t][0] = sum[t][1] = sum[t][2] = sum[t][3] = 0.f;
  }
}

#endif
