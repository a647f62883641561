/*
 * The epilogue of an up whose gate and up the backward wants: z, as the activation gets them, is stored beside h, by
 * the same lanes. On its own z would be read again, and x be multiplied by what has no epilogue in place.
 */
#ifndef CUMOE_KEEP_CUH
#define CUMOE_KEEP_CUH

#include "gemm/warpgroup_tile.cuh"

template <class S, int OCTETS> struct kept_store : warp_store<S, OCTETS> {
  int64_t at; /* in gate's z and in up's: this lane's first */

  DEVICE kept_store(const gemm_sm90_args &args, const tile_unit &unit, uint4 *staging, channel_span span)
      : warp_store<S, OCTETS>(args.g, unit, staging, span)
  {
    const int token = lane_id() / OCTETS;
    at = (unit.row + token) * args.z_ld + span.first + octet_channel<S>(args.g, lane_id() % OCTETS);
  }

  DEVICE void keep(const gemm_sm90_args &args, int half, int token0, const uint32_t (&packed)[4]) const
  {
    this->stage(packed);
    if (token0 < this->tokens)
      st_global_16(static_cast<typename S::Y *>(args.z[half]) + at + token0 * args.z_ld,
                   *this->staged_vector(lane_id() / OCTETS, lane_id() % OCTETS), false);
  }
};

/* No accumulator moves: see store_swiglu. */
template <class S, finish_kind KIND>
DEVICE void store_kept_as(const gemm_sm90_args &args, uint4 *staged, const tile_unit &unit, channel_span span,
                          const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int OCTETS = S::OCTETS / 2;
  const row_bias<S> bias(args.g, unit.expert, span);
  const swiglu act(args.g, args.up_first);
  const kept_store<S, OCTETS> store(args, unit, staged, span);
#pragma unroll
  for (int token0 = 0; token0 < S::BM; token0 += store.TOKENS) {
    if (token0 >= unit.rows) break;
    uint32_t h[4], z[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = token0 / 8 + i / OCTETS, g = i % OCTETS * 2;
      float gate[2], up[2], result[2];
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const float low = accumulator_of<S>(acc, g, j, t), high = accumulator_of<S>(acc, g + 1, j, t);
        gate[t] = weighted(act.up_first ? high : low, 1.f, 1.f, bias.of[g]);
        up[t] = weighted(act.up_first ? low : high, 1.f, 1.f, bias.of[g + 1]);
        result[t] = act.of<KIND>(low, high, bias.of + g);
      }
      z[0][i] = pack_pair<typename S::Y>(gate[0], gate[1]);
      z[1][i] = pack_pair<typename S::Y>(up[0], up[1]);
      h[i] = pack_pair<typename S::Y>(result[0], result[1]);
    }
    store.transpose(args.g, token0, h);
    store.keep(args, 0, token0, z[0]);
    store.keep(args, 1, token0, z[1]);
  }
}

/* A consumer's part of a tile. */
template <class S>
DEVICE void store_kept(const gemm_sm90_args &args, wgmma_staging<S> &smem, const tile_unit &unit, int group,
                       channel_span consumer, const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const channel_span span = span_of_warp<S>(args.g, consumer);
  uint4 *staged = smem.staged[group][warp_id() % 4];
  if (finish_kind_of(args.g) == FINISH_silu)
    store_kept_as<S, FINISH_silu>(args, staged, unit, span, acc);
  else
    store_kept_as<S, FINISH_swiglu>(args, staged, unit, span, acc);
}

#endif
