/* even: consumer warps. Each multiplies its channels of every stage, and finishes them. */
#ifndef CUMOE_EVEN_PRODUCTS_CUH
#define CUMOE_EVEN_PRODUCTS_CUH

#include "few/even_feed.cuh"
#include "few/loads.cuh"
#include "gemm/epilogue.cuh"

/* ---- products ---- */

/* Some element is all ones. */
DEVICE bool even_unwritten(uint2 x)
{
  const uint4 one[1] = {make_uint4(x.x, x.y, x.x, x.y)};
  return has_unwritten(one);
}

/* Lane l has k 4 (l % 4) .. + 3 of column l / 4, of each granule. */
template <class S> DEVICE void load_even_columns(const even_stage<S> &stage, uint2 (&x)[S::GRANULES])
{
  const int column = lane_id() / 4;
#pragma unroll
  for (int i = 0; i < S::GRANULES; i++) {
    x[i] = make_uint2(0, 0);
    if (column < S::COLUMNS)
      x[i] = *reinterpret_cast<const uint2 *>(&stage.columns[column][i * EVEN_GRANULE + lane_id() % 4 * 4]);
  }
}

/* h once more, until it is written. */
template <class S>
DEVICE void poll_even_columns(const gemm_args &g, const even_run &run, few_column column, uint2 (&x)[S::GRANULES])
{
  const typename S::X *h = static_cast<const typename S::X *>(g.a) + column_pair(column) * g.a_ld +
                           run.row * EVEN_GRANULE + lane_id() % 4 * 4;
#pragma unroll
  for (int i = 0; i < S::GRANULES; i++) {
    if (i >= run.granules) continue;
    while (even_unwritten(x[i])) {
      const uint64_t both = load_relaxed(reinterpret_cast<const uint64_t *>(h + i * EVEN_GRANULE));
      x[i] = make_uint2((uint32_t)both, (uint32_t)(both >> 32));
    }
  }
}

template <class S>
DEVICE void multiply_even(const even_stage<S> &stage, int granules, const uint2 (&x)[S::GRANULES],
                          float (&sum)[S::TILES][4])
{
  const int row = lane_id() % 8, matrix = lane_id() / 8, k = row / 2 * 4 + matrix / 2 * 2 + row % 2;
  const uint32_t from = shared_address(stage.weights) + k * S::OCTETS * 16;
#pragma unroll
  for (int i = 0; i < S::GRANULES; i++) {
    if (i >= granules) continue;
#pragma unroll
    for (int t = 0; t < S::TILES; t++) {
      const int octet = warp_id() * S::TILES + t + matrix % 2 * (S::OCTETS / 2);
      uint32_t w[4];
      ldmatrix_x4_trans(w, from + (i * EVEN_GRANULE * S::OCTETS + (octet ^ even_swap(k))) * 16);
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

/* What the shares behind have of the unit, in the order of k. */
template <class S> DEVICE void add_parts(const few_args &args, const even_run &run, float (&sum)[S::TILES][4])
{
  const even_slot<S> slot(args, run.down);
  if (!slot.mine()) return;
#pragma unroll 1
  for (int i = 1; i <= run.follows; i++) {
    uint64_t part[S::TILES][even_slot<S>::each()];
    bool again;
    do {
      again = false;
#pragma unroll
      for (int t = 0; t < S::TILES; t++) {
        const uint64_t *from = slot.of(run.share + i, warp_id() * S::TILES + t);
#pragma unroll
        for (int j = 0; j < slot.each(); j++) part[t][j] = load_relaxed(from + j), again |= is_unwritten(part[t][j]);
      }
    } while (again);
#pragma unroll
    for (int t = 0; t < S::TILES; t++) {
#pragma unroll
      for (int j = 0; j < slot.each(); j++) {
        const int second = S::COLUMNS == 1 ? 2 : 1;
        sum[t][2 * j] += __uint_as_float((uint32_t)part[t][j]);
        sum[t][2 * j + second] += __uint_as_float((uint32_t)(part[t][j] >> 32));
      }
    }
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
#ifdef EVEN_TRACE
  bool first_down = true;
#endif
#pragma unroll 1
  while (true) {
    wait_for(&smem.full[at.stage], at.phase);
    const even_run run = smem.run[at.stage];
    STAMP(threadIdx.x == 0 && at.stage == 0 && at.phase == 0, 5);
    if (run.granules == 0) return;
    even_stage<S> &stage = smem.stages[at.stage];
    uint2 x[S::GRANULES];
    load_even_columns<S>(stage, x);
    if (run.down && lane_id() / 4 < S::COLUMNS)
      poll_even_columns<S>(args.down, run, smem.table.column[run.active][lane_id() / 4], x);
    __syncwarp();
#ifdef EVEN_TRACE
    STAMP(threadIdx.x == 0 && run.down && first_down, 8);
    if (run.down) first_down = false;
#endif
    multiply_even<S>(stage, run.granules, x, sum);
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
