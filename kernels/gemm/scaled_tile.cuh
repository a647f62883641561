/*
 * The products of stream and wgmma with codes of a byte that have scales (args.h): of rows (tokens) beside each stage,
 * of weights from where they lie. Neither changes inside a stage.
 *
 *   e4m3  the tensor core adds in 14 bits. So the sums of each stage are scaled and added to others in f32.
 *   s8    exact sums over all of k, scaled at the end: scales do not change along k
 */
#ifndef CUMOE_SCALED_TILE_CUH
#define CUMOE_SCALED_TILE_CUH

#include "gemm/warpgroup_tile.cuh"
#include "device/quant.cuh"

/* Scales of a warp's weight rows: lane l has that of row l % 8 of octet l / 8. */
template <class S> struct weight_scales {
  const void *row; /* NULL: no scales */
  float global;

  DEVICE weight_scales(const gemm_args &args, bool up_first, int expert, channel_span span)
  {
    const scale_matrix &s = args.b.scale;
    const bool gated = S::gated(args);
    const int octet = lane_id() / 8 % S::OCTETS, half = gated ? octet % 2 ^ (int)up_first : 0;
    const int channel = min(span.first + (gated ? octet / 2 : octet) * 8 + lane_id() % 8, args.n - 1);
    global = global_scale(args.b, half, expert);
    row = NULL;
    if (s.dtype != DT_NONE)
      row = static_cast<const char *>(scale_base(s, half, expert)) + scale_row(s, half, channel) * scale_bytes(s.dtype);
  }

  DEVICE float of(const gemm_args &args, int k) const
  {
    const scale_matrix &s = args.b.scale;
    return row ? load_scale(row, scale_step(s, k), s.dtype) * global : global;
  }
};

/* Of the octet that holds a thread's values acc[block][.. + 2 * half ..]. */
template <class S> DEVICE float scale_of_octet(float lane_scale, int block, int half)
{
  return __shfl_sync(ALL_LANES, lane_scale, (block + half * S::BLOCKS) * 8 + lane_id() / 4);
}

/* of(v, factor) for every value v of a block. */
template <class S, int N, class F>
DEVICE void each_scaled(const float *row_scales /* of the unit's first row on */, float lane_scale, int block,
                        const F &of)
{
  const float w[2] = {scale_of_octet<S>(lane_scale, block, 0), scale_of_octet<S>(lane_scale, block, 1)};
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const float *pair = row_scales + 8 * j + lane_id() % 4 * 2;
    const float2 x = S::SCALES_BY_COPY ? make_float2(pair[0], pair[1]) : *reinterpret_cast<const float2 *>(pair);
#pragma unroll
    for (int v = 0; v < 4; v++) of(4 * j + v, w[v / 2] * (v % 2 ? x.y : x.x));
  }
}

/* e4m3: acc = weights x rows of one unit, N tokens wide. A stage is released as soon as it is multiplied; its scales of
 * rows stay until it is released again. */
template <class S, int N>
DEVICE void multiply_promoted_n(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                                int scales_from, const weight_scales<S> &scales,
                                float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int AT_ONCE = S::BM <= 64 ? S::BLOCKS : 1; /* blocks: what registers hold */
  const bool gathered = S::gathers(args);
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    if (gathered) fence_proxy_async_shared(); /* by cp.async */
    const uint64_t a = wgmma_operand(smem.weights[at.stage] + group * S::BLOCKS * S::BLOCK * S::BK, S::BLOCKS);
    const uint64_t b = wgmma_operand(smem.rows[at.stage]);
    float scale;
#pragma unroll
    for (int first = 0; first < S::BLOCKS; first += AT_ONCE) {
      float part[AT_ONCE][N / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < S::BK / 32; k++)
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          wgmma_step<S, N>::run(part[i], a + k * 2 + (first + i) * 64, b + k * 2, k > 0);
      wgmma_commit_group();
      if (first == 0) scale = scales.of(args, k0); /* while the tensor cores work */
      wgmma_wait_group<0>();
      if (first + AT_ONCE == S::BLOCKS) release_stage<S>(smem, at.stage);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        hold(part[i]);
        each_scaled<S, N>(row_scales_of<S>(smem, at) + scales_from, scale, first + i, [&](int v, float factor) {
          acc[first + i][v] = fmaf(part[i][v], factor, acc[first + i][v]);
        });
      }
    }
  }
}

template <class S, int N>
DEVICE void multiply_promoted(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                              int rows, int scales_from, const weight_scales<S> &scales,
                              float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int LESS = N > 64 ? 64 : N > WGMMA_STEP ? N - WGMMA_STEP : 0; /* of more rows few units: token_tile.cuh */
  if constexpr (LESS > 0) {
    if (rows <= LESS) {
      multiply_promoted<S, LESS>(args, smem, at, group, rows, scales_from, scales, acc);
      return;
    }
  }
  multiply_promoted_n<S, N>(args, smem, at, group, scales_from, scales, acc);
}

/* s8: with the scales of the last stage, which are those of all. */
template <class S>
DEVICE void multiply_exact(const gemm_args &args, bool up_first, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                           int group, const tile_unit &unit, channel_span span,
                           float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const float scale = weight_scales<S>(args, up_first, unit.expert, span).of(args, 0);
  typename S::SUM sum[S::BLOCKS][S::ACCUMULATORS] = {};
  multiply<S, S::BM>(args, smem, at, group, unit.rows, sum);
  pipeline_state<S::STAGES> last = at;
  last.stage = at.stage == 0 ? S::STAGES - 1 : at.stage - 1;
  last.phase = at.phase ^ (at.stage == 0);
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) {
    each_scaled<S, S::BM>(row_scales_of<S>(smem, last) + scales_before<S>(args, unit), scale, i,
                          [&](int v, float factor) { acc[i][v] = (float)sum[i][v] * factor; });
    __syncwarp(); /* the assembler would load for all blocks at once, and has no registers for that */
  }
}

/* acc of one unit, for a consumer whose channels begin there. */
template <class S>
DEVICE void multiply_unit(const gemm_args &args, bool up_first, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                          int group, const tile_unit &unit, int32_t channel0, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (!S::SCALED) {
    multiply<S, S::BM>(args, smem, at, group, unit.rows, acc);
  } else {
    const channel_span span = span_of_warp<S>(args, {channel0, args.n});
    if constexpr (same_type<typename S::SUM, float>)
      multiply_promoted<S, S::BM>(args, smem, at, group, unit.rows, scales_before<S>(args, unit),
                                  weight_scales<S>(args, up_first, unit.expert, span), acc);
    else
      multiply_exact<S>(args, up_first, smem, at, group, unit, span, acc);
  }
}

#endif
