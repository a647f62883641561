/*
 * The products of stream and wgmma with operands of a byte that have scales (args.h): of rows (tokens) beside each stage,
 * of weights from where they lie. Neither changes inside a stage.
 *
 *   e4m3  the tensor core adds in 14 bits. So the sums of each stage are scaled and added to others in f32.
 *   s8    exact sums over all of k, scaled at the end: scales do not change along k
 */
#ifndef CUMOE_SCALED_TILE_CUH
#define CUMOE_SCALED_TILE_CUH

#include "gemm/warpgroup_tile.cuh"
#include "device/quant.cuh"

/* The group of k of a row of A; groups begin at multiples of S::BK. */
DEVICE int row_group(const gemm_args &args, int k)
{
  return (args.rows.origin % args.rows.group + k) / args.rows.group;
}

/* A lane's scale of a weight row: lane l has row l % 8 of the warp's octet l / 8. Loaded a stage ahead. */
template <class S> struct weight_scales {
  const char *place; /* of the stage ahead; NULL: no scales */
  int32_t left;      /* k until the next block, from there on */
  float global, ahead;

  DEVICE weight_scales(const gemm_args &args, bool up_first, int expert, channel_span span)
  {
    const scale_matrix &s = args.b.scale;
    const bool gated = S::gated(args);
    const int octet = lane_id() / 8 % S::OCTETS, half = gated ? octet % 2 ^ (int)up_first : 0;
    const int channel = min(span.first + (gated ? octet / 2 : octet) * 8 + lane_id() % 8, args.n - 1);
    global = global_scale(args.b, half, expert);
    place = NULL;
    if (s.dtype != DT_NONE)
      place = static_cast<const char *>(scale_base(s, half, expert)) +
              (scale_row(s, half, channel) + scale_step(s, 0)) * scale_bytes(s.dtype);
    left = s.block_k - (s.dtype == DT_NONE ? 0 : s.k_origin % s.block_k);
    load(args);
  }

  DEVICE void load(const gemm_args &args)
  {
    ahead = place ? load_scale(place, 0, args.b.scale.dtype) * global : global;
  }

  /* That of this stage. */
  DEVICE float next(const gemm_args &args, bool more)
  {
    const float now = ahead;
    left -= S::BK;
    if (left <= 0) {
      place += place ? args.b.scale.k_stride * scale_bytes(args.b.scale.dtype) : 0;
      left += args.b.scale.block_k;
    }
    if (more) load(args);
    return now;
  }
};

/* Of the octet that holds a thread's values acc[block][.. + 2 * half ..]. */
template <class S> DEVICE float scale_of_octet(float lane_scale, int block, int half)
{
  return __shfl_sync(ALL_LANES, lane_scale, (block + half * S::BLOCKS) * 8 + lane_id() / 4);
}

/* of(v, factor) for every value v of a block. */
template <class S, int N, class F>
DEVICE void each_scaled(const float *row_scales, float lane_scale, int block, const F &of)
{
  const float w[2] = {scale_of_octet<S>(lane_scale, block, 0), scale_of_octet<S>(lane_scale, block, 1)};
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const float2 x = *reinterpret_cast<const float2 *>(row_scales + 8 * j + lane_id() % 4 * 2);
#pragma unroll
    for (int v = 0; v < 4; v++) of(4 * j + v, w[v / 2] * (v % 2 ? x.y : x.x));
  }
}

/* e4m3: acc = weights x rows of one unit, N tokens wide. */
template <class S, int N>
DEVICE void multiply_promoted_n(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                                weight_scales<S> scales, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int AT_ONCE = S::BM <= 64 ? S::BLOCKS : 1; /* blocks: what registers hold */
  const bool gathered = S::gathers(args);
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    if (gathered) fence_proxy_async_shared(); /* by cp.async */
    const uint64_t a = wgmma_operand(smem.weights[at.stage] + group * S::BLOCKS * S::BLOCK * S::BK, S::BLOCKS);
    const uint64_t b = wgmma_operand(smem.rows[at.stage]);
    const float scale = scales.next(args, k0 + S::BK < args.k);
#pragma unroll
    for (int first = 0; first < S::BLOCKS; first += AT_ONCE) {
      float part[AT_ONCE][N / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < S::BK / 32; k++)
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          wgmma_m64k32<e4m3, N>::run(part[i], a + k * 2 + (first + i) * 64, b + k * 2, k > 0);
      wgmma_commit_group();
      wgmma_wait_group<0>();
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        hold(part[i]);
        each_scaled<S, N>(smem.staging.row_scales[at.stage], scale, first + i, [&](int v, float factor) {
          acc[first + i][v] = fmaf(part[i][v], factor, acc[first + i][v]);
        });
      }
    }
    __syncwarp();
    release_stage<S>(smem, at.stage);
  }
}

template <class S, int N>
DEVICE void multiply_promoted(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                              int rows, const weight_scales<S> &scales, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (N > WGMMA_STEP) {
    if (rows <= N - WGMMA_STEP) {
      multiply_promoted<S, N - WGMMA_STEP>(args, smem, at, group, rows, scales, acc);
      return;
    }
  }
  multiply_promoted_n<S, N>(args, smem, at, group, scales, acc);
}

/* s8: `sum` as acc there, but not scaled. Returns the last stage, which is not released yet. */
template <class S, int N>
DEVICE int multiply_exact_n(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                            int32_t (&sum)[S::BLOCKS][S::ACCUMULATORS])
{
  const bool gathered = S::gathers(args);
  int before = -1;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    if (gathered) fence_proxy_async_shared();
    const uint64_t a = wgmma_operand(smem.weights[at.stage] + group * S::BLOCKS * S::BLOCK * S::BK, S::BLOCKS);
    const uint64_t b = wgmma_operand(smem.rows[at.stage]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < S::BK / 32; k++)
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++)
        wgmma_m64k32<s8, N>::run(sum[i], a + k * 2 + i * 64, b + k * 2, k > 0 || k0 > 0);
    wgmma_commit_group();
    wgmma_wait_group<S::RELEASE_AT_ONCE ? 0 : 1>();
    const bool at_once = S::RELEASE_AT_ONCE && k0 + S::BK < args.k;
    const int done = at_once ? (int)at.stage : before;
    if (done >= 0) release_stage<S>(smem, done);
    before = at_once ? -1 : (int)at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(sum[i]);
  return before;
}

template <class S, int N>
DEVICE int multiply_exact(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                          int rows, int32_t (&sum)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (N > WGMMA_STEP)
    if (rows <= N - WGMMA_STEP) return multiply_exact<S, N - WGMMA_STEP>(args, smem, at, group, rows, sum);
  return multiply_exact_n<S, N>(args, smem, at, group, sum);
}

/* acc of one unit, for a consumer whose channels begin there. */
template <class S>
DEVICE void multiply_unit(const gemm_args &args, bool up_first, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                          int group, const tile_unit &unit, int32_t channel0, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (!S::SCALED) {
    multiply<S, S::BM>(args, smem, at, group, unit.rows, acc);
  } else if constexpr (same_type<typename S::X, e4m3>) {
    const weight_scales<S> scales(args, up_first, unit.expert, span_of_warp<S>(args, {channel0, args.n}));
    multiply_promoted<S, S::BM>(args, smem, at, group, unit.rows, scales, acc);
  } else {
    int32_t sum[S::BLOCKS][S::ACCUMULATORS] = {};
    const int last = multiply_exact<S, S::BM>(args, smem, at, group, unit.rows, sum);
    const weight_scales<S> scales(args, up_first, unit.expert, span_of_warp<S>(args, {channel0, args.n}));
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++)
      each_scaled<S, S::BM>(smem.staging.row_scales[last], scales.ahead, i,
                            [&](int v, float factor) { acc[i][v] = (float)sum[i][v] * factor; });
    __syncwarp();
    release_stage<S>(smem, last);
  }
}

#endif
