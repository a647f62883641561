/*
 * The epilogue of an up whose gate and up the backward wants: z, as the activation gets them, is stored beside h. On its
 * own z would be read again, and x be multiplied by what has no epilogue in place. h is stored by lanes, as down may
 * wait for it; z by boxes (boxed.cuh), a consumer's of gate and of up one each.
 */
#ifndef CUMOE_KEEP_CUH
#define CUMOE_KEEP_CUH

#include "gemm/boxed.cuh"

template <class S> DEVICE const up_keep_args &keep_of(const gemm_sm90_args &args)
{
  static_assert(S::KEEPS && offsetof(up_keep_args, gemm) == 0, "args is the first of them");
  return reinterpret_cast<const up_keep_args &>(args);
}

/* Where a lane puts vectors of a box: of octet `octet` of its warp, and of token `token` of the tile. */
template <class S> DEVICE uint32_t kept_place(pipeline_smem<S> &smem, int stage, int half, int token, int octet)
{
  using boxed = boxed_stage<S>;
  const int vector = warp_id() % 4 * (S::OCTETS / 2) + octet;
  return shared_address(boxed::box(smem, stage, half)) + token * boxed::LINE + (vector ^ token % 8) * 16;
}

/* No accumulator moves: see store_swiglu. */
template <class S, finish_kind KIND>
DEVICE void store_kept_as(const gemm_sm90_args &args, pipeline_smem<S> &smem, int stage, uint4 *staged,
                          const tile_unit &unit, channel_span span, const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int OCTETS = S::OCTETS / 2;
  const row_bias<S> bias(args.g, unit.expert, span);
  const swiglu act(args.g, args.up_first);
  const warp_store<S, OCTETS> store(args.g, unit, staged, span);
  const int matrix = lane_id() / 8, token = matrix / OCTETS * 8 + lane_id() % 8;
  const uint32_t gates = kept_place<S>(smem, stage, 0, token, matrix % OCTETS),
                 ups = kept_place<S>(smem, stage, 1, token, matrix % OCTETS);
#pragma unroll
  for (int token0 = 0; token0 < S::BM; token0 += store.TOKENS) {
    if (token0 >= unit.rows) break;
    uint32_t packed[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int j = token0 / 8 + i / OCTETS, g = i % OCTETS * 2;
        float z[2];
#pragma unroll
        for (int t = 0; t < 2; t++) {
          const float low = accumulator_of<S>(acc, g, j, t), high = accumulator_of<S>(acc, g + 1, j, t);
          z[t] = (act.up_first != (half == 1) ? high : low) + (KIND == FINISH_silu ? 0.f : bias.of[g + half]);
        }
        packed[i] = pack_pair<typename S::Y>(z[0], z[1]);
      }
      stmatrix_x4_trans((half ? ups : gates) + token0 * boxed_stage<S>::LINE, packed);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = token0 / 8 + i / OCTETS, g = i % OCTETS * 2;
      float result[2];
#pragma unroll
      for (int t = 0; t < 2; t++)
        result[t] = act.of<KIND>(accumulator_of<S>(acc, g, j, t), accumulator_of<S>(acc, g + 1, j, t), bias.of + g);
      packed[i] = pack_pair<typename S::Y>(result[0], result[1]);
    }
    store.transpose(args.g, token0, packed);
  }
}

/* z of a stage to memory: whole steps as boxes, each warp some of them, and rows that are left over by lanes, as those of
 * the next expert follow. */
template <class S>
DEVICE void store_z(const up_keep_args &args, pipeline_smem<S> &smem, int stage, const tile_unit &unit, int channel0)
{
  using boxed = boxed_stage<S>;
  const gemm_sm90_args &gemm = args.gemm;
  const int steps = unit.rows / (int)WGMMA_STEP, rest = unit.rows % (int)WGMMA_STEP;
#pragma unroll 1
  for (int i = threadIdx.x % S::GROUP; i < rest * 16; i += S::GROUP) {
    const int token = steps * (int)WGMMA_STEP + i / 16, half = i / 8 % 2, vector = i % 8, channel = channel0 + vector * 8;
    const uint4 *from = reinterpret_cast<const uint4 *>(boxed::box(smem, stage, half) + token * boxed::LINE) +
                        (vector ^ token % 8);
    if (channel < gemm.g.n)
      st_global_16(static_cast<typename S::Y *>(gemm.z[half]) + (unit.row + token) * gemm.z_ld + channel, *from, false);
  }
  __syncwarp();
  if (!elect_one()) return;
#pragma unroll 1
  for (int i = warp_id() % 4; i < 2 * steps; i += 4) {
    const int step = i / 2, half = i % 2;
    cp_async_bulk_tensor_4d_store(args.out, channel0, unit.row + step * (int)WGMMA_STEP, gemm.z[half] > gemm.z[1 - half],
                                  0, boxed::box(smem, stage, half) + step * boxed::STEP);
  }
  cp_async_bulk_commit_group();
  cp_async_bulk_wait_group_read<0>();
}

/* A consumer's part of a tile. */
template <class S>
DEVICE void store_kept(const gemm_sm90_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                       const tile_unit &unit, int group, channel_span consumer,
                       const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const channel_span span = span_of_warp<S>(args.g, consumer);
  uint4 *staged = smem.staging.staged[group][warp_id() % 4];
  if (group != 0) pass_boxed<S>(smem, at);
  wait_for(&smem.full[at.stage], at.phase);
  if (finish_kind_of(args.g) == FINISH_silu)
    store_kept_as<S, FINISH_silu>(args, smem, at.stage, staged, unit, span, acc);
  else
    store_kept_as<S, FINISH_swiglu>(args, smem, at.stage, staged, unit, span, acc);
  fence_proxy_async_shared();
  bar_sync(1 + group, S::GROUP);
  store_z<S>(keep_of<S>(args), smem, at.stage, unit, consumer.first);
  __syncwarp();
  release_stage<S>(smem, at.stage);
  at.advance();
  if (group == 0) pass_boxed<S>(smem, at);
}

#endif
