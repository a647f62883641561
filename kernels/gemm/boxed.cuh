/*
 * A tile's results to memory by the copy engine, as boxes of 64 channels x WGMMA_STEP tokens in whole lines of 128
 * bytes; stored by lanes, a token's channels of a warp are 32 or 64 bytes, of which an SM writes 12 a clock. Behind a
 * tile's products the pipeline has a stage for each consumer that nothing is copied into: its results lie there.
 */
#ifndef CUMOE_BOXED_CUH
#define CUMOE_BOXED_CUH

#include "device/ptx_store_sm90.cuh"
#include "gemm/warpgroup_tile.cuh"

template <class S> DEVICE const down_drawn_args &drawn_of(const gemm_sm90_args &args)
{
  static_assert(S::DRAWS && offsetof(down_drawn_args, gemm) == 0, "args is the first of them");
  return reinterpret_cast<const down_drawn_args &>(args);
}

/* A consumer's 128 channels are two boxes wide: one lies where weights would, one where rows would. */
template <class S> struct boxed_stage {
  static constexpr int WIDE = BOXED_WIDE, LINE = WIDE * 2, STEP = WGMMA_STEP * LINE; /* bytes */
  static_assert(sizeof(typename S::Y) == 2 && S::BLOCKS == 2 && S::BLOCK == WIDE, "a consumer has two boxes");
  static_assert(S::BM * LINE <= S::BM * S::BK * 2 && S::BM <= S::COLUMNS, "which a stage holds");

  DEVICE static char *box(pipeline_smem<S> &smem, int stage, int index)
  {
    return index ? reinterpret_cast<char *>(smem.rows[stage]) : reinterpret_cast<char *>(smem.weights[stage]);
  }
};

/* The consumers' stages, by a whole warp, or, gathering, by all that gather. */
template <class S>
DEVICE void produce_boxed(pipeline_smem<S> &smem, bool gathering, pipeline_state<S::STAGES> &at)
{
#pragma unroll 1
  for (int i = 0; i < S::CONSUMERS; i++, at.advance()) {
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (gathering) mbarrier_arrive(&smem.full[at.stage]);
    if (threadIdx.x < WARP_SIZE && elect_one()) mbarrier_arrive(&smem.full[at.stage]);
    __syncwarp();
  }
}

/* The other consumer's stage. */
template <class S> DEVICE void pass_boxed(pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at)
{
  wait_for(&smem.full[at.stage], at.phase);
  __syncwarp();
  release_stage<S>(smem, at.stage);
  at.advance();
}

/* From accumulators to a stage, by all of a consumer. */
template <class S>
DEVICE void stage_boxes(const gemm_args &args, pipeline_smem<S> &smem, int stage, const tile_unit &unit,
                        const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  using boxed = boxed_stage<S>;
  const int token = lane_id() % 8, channel = span_of_warp<S>(args, {0, 0}).first + octet_channel<S>(args, lane_id() / 8);
  const uint32_t to = shared_address(boxed::box(smem, stage, channel / boxed::WIDE)) + token * boxed::LINE +
                      ((channel % boxed::WIDE / 8) ^ token) * 16;
#pragma unroll
  for (int j = 0; j < S::BM / 8; j++) {
    if (j * 8 >= unit.rows) break;
    uint32_t packed[4];
#pragma unroll
    for (int g = 0; g < 4; g++)
      packed[g] = pack_pair<typename S::Y>(accumulator_of<S>(acc, g, j, 0), accumulator_of<S>(acc, g, j, 1));
    stmatrix_x4_trans(to + j * 8 * boxed::LINE, packed);
  }
}

/* From a stage to memory; each warp some of the boxes. Rows are whole steps: what fills up an expert's rows is stored
 * with its last ones. */
template <class S>
DEVICE void store_boxes(const void *map, int channels, pipeline_smem<S> &smem, int stage, const tile_unit &unit,
                        int channel0)
{
  using boxed = boxed_stage<S>;
  const int steps = ceil_div(unit.rows, (int)WGMMA_STEP);
  if (!elect_one()) return;
#pragma unroll 1
  for (int i = warp_id() % 4; i < 2 * steps; i += 4) {
    const int step = i / 2, channel = channel0 + i % 2 * boxed::WIDE;
    if (channel < channels)
      cp_async_bulk_tensor_4d_store(map, channel, unit.row + step * (int)WGMMA_STEP, 0, 0,
                                    boxed::box(smem, stage, i % 2) + step * boxed::STEP);
  }
  cp_async_bulk_commit_group();
  cp_async_bulk_wait_group_read<0>();
}

/* A consumer's part of a tile. */
template <class S>
DEVICE void store_boxed(const down_drawn_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                        const tile_unit &unit, int group, int channel0,
                        const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
#pragma unroll 1
  for (int i = 0; i < S::CONSUMERS; i++, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    if (i == group) {
      stage_boxes<S>(args.gemm.g, smem, at.stage, unit, acc);
      fence_proxy_async_shared();
      bar_sync(1 + group, S::GROUP);
      store_boxes<S>(args.out, args.gemm.g.n, smem, at.stage, unit, channel0);
    }
    __syncwarp();
    release_stage<S>(smem, at.stage);
  }
}

#endif
