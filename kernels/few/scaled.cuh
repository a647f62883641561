/* few, weights with scales: consumer warps. */
#ifndef CUMOE_FEW_SCALED_CUH
#define CUMOE_FEW_SCALED_CUH

#include "few/fixed.cuh"

/* What a lane has of an mma's weights, rows l/4 and l/4 + 8: four k of each. */
template <class M>
DEVICE void multiply_four(float (&sum)[4], uint32_t low0, uint32_t low1, uint32_t high0, uint32_t high1, uint32_t x0,
                          uint32_t x1)
{
  mma_m16n8k16<M>(sum, {low0, high0, low1, high1}, {x0, x1});
}

/* ---- codes of a byte: all columns are the token ---- */

/* 16 codes of rows l/4 and l/4 + 8. bias: what the codes' offset asks for (decode.cuh); s8: bits that are flipped. */
template <class L>
DEVICE void multiply_sixteen(float (&sum)[4], const uint4 &low, const uint4 &high, const uint4 *x, uint32_t bias)
{
  using W = typename L::W;
  using M = typename L::CODE::M;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint2 a = decode_four<W, M>(word_of(low, i), bias), b = decode_four<W, M>(word_of(high, i), bias);
    multiply_four<M>(sum, a.x, a.y, b.x, b.y, word_of(x[i / 2], i % 2 * 2), word_of(x[i / 2], i % 2 * 2 + 1));
  }
}
template <class L>
DEVICE void multiply_sixteen(int32_t (&sum)[4], const uint4 &low, const uint4 &high, const uint4 *x, uint32_t flip)
{
  mma_m16n8k32_s8(sum, {low.x ^ flip, high.x ^ flip, low.y ^ flip, high.y ^ flip}, {x->x, x->y});
  mma_m16n8k32_s8(sum, {low.z ^ flip, high.z ^ flip, low.w ^ flip, high.w ^ flip}, {x->z, x->w});
}

template <class L> DEVICE uint32_t bias_of_codes(int offset)
{
  if constexpr (same_type<typename L::CODE::SUM, int32_t>)
    return offset == 128 ? 0x80808080 : 0;
  else
    return decoder<typename L::W, typename L::CODE::M>::bias(offset);
}

/* A tile's sums of bytes into those of rows l/4 and l/4 + 8. */
template <class L>
DEVICE void add_bytes(const few_row<L> &x, float scale, int tile, int k, const typename L::CODE::SUM (&part)[4],
                      float (&sum)[2])
{
  const float factor = *x.factors(k);
  const int row = tile * 16 + lane_id() / 4;
  sum[0] = fmaf((float)part[0], __shfl_sync(ALL_LANES, scale, row) * factor, sum[0]);
  sum[1] = fmaf((float)part[2], __shfl_sync(ALL_LANES, scale, row + 8) * factor, sum[1]);
}

/* ---- nv4: a column is the token in one group alone, and so has the sum of that ---- */

/* A vector of a row, 32 k, is a lane's. Column c has half of vector c / 2: a group of 16 k. */
DEVICE bool is_mine(int word)
{
  return lane_id() / 4 == 2 * (lane_id() % 4) + word / 2;
}

/* Of columns 2 (l%4) and the next. */
DEVICE float2 take_scales(const few_scales<nv4> &s, int tile, int octet, int run)
{
  return unpack_pair<f16>(cvt_f16x2_e4m3x2(s.raw[tile * 4 + octet * 2 + run]));
}

/* The sums of `part` into those of rows l/4 and l/4 + 8. */
template <class L>
DEVICE void add_columns(const float2 &low, const float2 &high, const few_row<L> &x, int k, int run,
                        const float (&part)[4], float (&sum)[2])
{
  float factor = 1.f;
  if constexpr (L::CODE::SUBNORMAL) factor = *x.factors(k + 32 * (4 * run + lane_id() % 4));
  sum[0] = fmaf(part[0] * factor, low.x, fmaf(part[1] * factor, low.y, sum[0]));
  sum[1] = fmaf(part[2] * factor, high.x, fmaf(part[3] * factor, high.y, sum[1]));
}

/* A vector of rows l/4 and l/4 + 8, from k on. */
template <class L>
DEVICE void multiply_packed(const uint4 &low, const uint4 &high, const few_row<L> &x, const uint4 *zeros, int k,
                            int run, float (&part)[4])
{
  using M = typename L::CODE::M;
  const uint4 *const mine = x.elements(k + (run * 4 + lane_id() % 4) * 32), *const first = is_mine(0) ? mine : zeros,
                     *const second = is_mine(2) ? mine : zeros;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 v = (i < 2 ? first : second)[i];
    uint32_t a[4], b[4];
    unpack_e2m1(word_of(low, i), a, M()), unpack_e2m1(word_of(high, i), b, M());
    multiply_four<M>(part, a[0], a[1], b[0], b[1], v.x, v.y);
    multiply_four<M>(part, a[2], a[3], b[2], b[3], v.z, v.w);
  }
}

/* ---- slices ---- */

/* A tile of a slice, from k on. */
template <class L>
DEVICE void multiply_tile(const gemm_args &g, const few_stage_of<L> &stage, const few_scales<typename L::W> &scales,
                          const few_row<L> &x, const uint4 *zeros, int tile, int k, float (&sum)[2])
{
  typename L::CODE::SUM part[4] = {};
#pragma unroll
  for (int run = 0; run < 2; run++) {
    const uint4 low = stage.codes[tile][0][run][lane_id()], high = stage.codes[tile][1][run][lane_id()];
    if constexpr (L::BITS == 8) {
      multiply_sixteen<L>(part, low, high, x.elements(k + (run * 4 + lane_id() % 4) * 16),
                          bias_of_codes<L>(g.b.offset));
    } else {
      multiply_packed<L>(low, high, x, zeros, k, run, part);
      add_columns<L>(take_scales(scales, tile, 0, run), take_scales(scales, tile, 1, run), x, k, run, part, sum);
#pragma unroll
      for (int i = 0; i < 4; i++) part[i] = 0.f;
    }
  }
  if constexpr (L::BITS == 8) add_bytes<L>(x, scale_value(scales.raw[0], g.b.scale.dtype), tile, k, part, sum);
}

template <class L>
DEVICE void multiply_tiles(const gemm_args &g, const few_stage_of<L> &stage, const few_scales_of<L> &scales,
                           const few_row<L> &x, const uint4 *zeros, int k0, bool wide, float (&sum)[2][2])
{
  if constexpr (same_type<typename L::W, mx4>) { /* the same code twice: sums change places */
#pragma unroll 1
    for (int t = 0; t < 2; t++) {
      const int k = wide ? 2 * k0 + t * L::BK : k0;
      float own[2] = {sum[0][0], sum[0][1]};
      if (k < g.k) multiply_grouped<L>(g, stage, scales, x, zeros, t, k, own);
      sum[0][0] = sum[1][0], sum[0][1] = sum[1][1], sum[1][0] = own[0], sum[1][1] = own[1];
    }
  } else {
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const int k = wide ? 2 * k0 + t * L::BK : k0;
      if (t > 0 && k >= g.k) continue;
      if constexpr (L::FIXED)
        multiply_grouped<L>(g, stage, scales, x, zeros, t, k, sum[t]);
      else
        multiply_tile<L>(g, stage, scales, x, zeros, t, k, sum[t]);
    }
  }
}

/* ---- units ---- */

/* A warp's part of a unit, if it has one; `first` as in products.cuh. */
template <class L>
DEVICE void store_part(few_memory<L> &smem, typename L::RING &buffer, int first, bool there, bool wide,
                       float (&sum)[2][2])
{
  if (wide && !L::WHOLE) sum[0][0] += sum[1][0], sum[0][1] += sum[1][1];
  if (L::WHOLE) add_runs(wide, sum);
  if (L::BITS == 4 && !L::WHOLE) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float &one = sum[i / 2][i % 2];
      one += __shfl_xor_sync(ALL_LANES, one, 1);
      one += __shfl_xor_sync(ALL_LANES, one, 2);
    }
  }
  wait_for(&smem.partial_empty[stage_of(buffer)], phase_of(buffer) ^ 1);
  if (there && lane_id() % (L::WHOLE ? 2 : 4) == 0) {
#pragma unroll
    for (int t = 0; t < (L::WHOLE ? 1 : 2); t++)
      smem.partial[stage_of(buffer)][first][t + lane_id() % 4 / 2][lane_id() / 4] = make_float2(sum[t][0], sum[t][1]);
  }
  mbarrier_arrive(&smem.partial_full[stage_of(buffer)]);
  buffer.advance();
}

/* The warp's slices of the unit at hand. */
template <class L, bool DOWN>
DEVICE void consume_unit(const few_args &args, few_memory<L> &smem, few_walk<L> &here, few_feed<L> &feed,
                         pipeline_state<L::STAGES> &stage, typename L::RING &buffer)
{
  const gemm_args &g = DOWN ? args.down : args.up;
  const bool wide = here.template weight_octets<DOWN>(args, smem) <= 2, both = args.protocol.tickets != nullptr;
  const int slices = few_slices<L>(g, wide), first = here.slice;
  const few_row<L> x = DOWN ? row_of_h<L>(args, smem, both, here.active) : row_of_x<L>(args, smem);
  float sum[2][2] = {};
  if (DOWN && first < slices) await_h<L>(args, smem, here.active, feed.experts);
#pragma unroll 1
  while (here.slice < slices) { /* the first rounds only ask: code that has run once is at hand */
    const bool begins = feed.begins(stage);
    if (!begins) cp_async_wait_group<L::STAGES - 2>();
    const few_stage_of<L> &from = smem.stages[warp_id()][stage.stage];
    const few_scales_of<L> scales = feed.scales;
    feed.template next<DOWN>();
    if (begins) continue;
    if constexpr (L::WHOLE)
      multiply_fixed<L>(g, from, scales, x, smem.zeros, here.slice * L::BK, wide, sum[0]);
    else
      multiply_tiles<L>(g, from, scales, x, smem.zeros, here.slice * L::BK, wide, sum);
    here.slice += L::CONSUMERS, stage.advance();
  }
  store_part<L>(smem, buffer, first, first < slices, wide, sum);
  here.slice -= slices, here.template next_unit<DOWN>(args, feed.experts);
}

/* One share of up after the other. Whether the grid does down, too; its first slices are on their way. */
template <class L>
DEVICE bool consume_shares(const few_args &args, few_memory<L> &smem, few_feed<L> &feed,
                           pipeline_state<L::STAGES> &stage, typename L::RING &buffer)
{
  uint32_t phase = 0;
  feed.start_up(smem.share[0]);
  while (true) {
    few_walk<L> here = feed.at;
#pragma unroll 1
    while (here.left > 0) consume_unit<L, false>(args, smem, here, feed, stage, buffer);
    if (!args.protocol.tickets) return false;
    wait_for(&smem.share_ready, phase);
    const int share = smem.share[1];
    if (share == gridDim.x) return true;
    phase ^= 1;
    cp_async_wait_group<0>(); /* what was loaded ahead is loaded again */
    feed.start_up(share), feed.to = stage;
  }
}

template <class S> DEVICE void consume_scaled(const few_args &args, few_smem<S> &smem, int experts)
{
  using L = typename S::layout;
  few_feed<L> feed(args, smem, experts);
  pipeline_state<L::STAGES> stage;
  typename L::RING buffer;
  if constexpr (S::UP)
    if (!consume_shares<L>(args, smem, feed, stage, buffer)) return;
  if (!S::UP || !feed.at.down) feed.start_down(); /* a warp without slices of up has not gone on to it */
#pragma unroll 1
  while (feed.begins(stage)) feed.template next<true>();
  if (!S::UP) wait_for_earlier_grids();
  few_walk<L> here;
  here.start_down(smem, experts);
#pragma unroll 1
  while (here.left > 0) consume_unit<L, true>(args, smem, here, feed, stage, buffer);
}

#endif
