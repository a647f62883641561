/*
 * Products whose epilogue lags: a tile's results wait in registers, two to a register, and are stored a few tokens a
 * step while the tensor cores are at the next tile. That takes tiles of 128 rows, whose sums leave registers for it.
 */
#ifndef CUMOE_LAGGED_CUH
#define CUMOE_LAGGED_CUH

#include "gemm/warpgroup_tile.cuh"

/* Of a warp: what it has of a tile. The first token group is stored first, and others move down to it, so that the
 * program has one place that stores. */
template <class S> struct lagged_results {
  using Y = typename S::Y;
  static constexpr int TOKENS = WARP_SIZE / S::OCTETS, GROUPS = S::BM / TOKENS;
  uint4 packed[GROUPS];
  int32_t slot = 0, done = GROUPS; /* its unit; token groups stored */

  DEVICE lagged_results()
  {
    static_assert(sizeof(Y) == 2 && S::OCTETS == 4 && TOKENS == 8, "a vector has a token group's sums");
#pragma unroll
    for (int j = 0; j < GROUPS; j++) packed[j] = {0, 0, 0, 0};
  }

  DEVICE void take(int unit_slot, const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
  {
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
#pragma unroll
      for (int g = 0; g < S::OCTETS; g++)
        (&packed[j].x)[g] = pack_pair<Y>(accumulator_of<S>(acc, g, j, 0), accumulator_of<S>(acc, g, j, 1));
    }
    slot = unit_slot;
    done = 0;
  }

  /* One token group, by whole warps. Where it goes is worked out anew: registers are full. */
  DEVICE void store(const gemm_args &args, pipeline_smem<S> &smem)
  {
    const tile_unit &unit = smem.units[slot];
    const int group = (int)tid_x() / S::GROUP - 1, warp = (int)tid_x() / WARP_SIZE % 4, lane = (int)tid_x() % WARP_SIZE;
    const channel_span span =
        span_of_warp<S>(args, {(unit.n * S::CONSUMERS + group) * (S::COLUMNS / S::CONSUMERS), args.n});
    const int token = done * TOKENS + lane / S::OCTETS, channel = span.first + octet_channel<S>(args, lane % S::OCTETS);
    const warp_store<S, S::OCTETS> place(smem.staging.staged[group][warp]);
    const uint32_t words[4] = {packed[0].x, packed[0].y, packed[0].z, packed[0].w};
    place.stage(words);
    if (token < unit.rows && channel < span.end)
      st_global_16(static_cast<Y *>(args.c) + (unit.row + token) * args.c_ld + channel,
                   *place.staged_vector(lane / S::OCTETS, lane % S::OCTETS), args.protocol.evict_last);
    done++;
#pragma unroll
    for (int j = 0; j + 1 < GROUPS; j++) packed[j] = packed[j + 1];
  }

  DEVICE bool more() const { return done < GROUPS; }

  DEVICE void store_all(const gemm_args &args, pipeline_smem<S> &smem)
  {
#pragma unroll 1
    while (more()) store(args, smem);
  }
};

/* multiply_n, and between the start of a step's products and the wait for those before it a token group is stored. */
template <class S, int N>
DEVICE void multiply_lagged_n(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                              lagged_results<S> &last, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int K16 = S::N_MAJOR ? 16 * 128 >> 4 : 2, NEXT = S::N_MAJOR ? S::BK * 128 >> 4 : 64; /* see wgmma_operand */
  int before = -1;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    const uint64_t a =
        wgmma_operand(smem.weights[at.stage] + group * S::BLOCKS * S::BLOCK * S::BK, S::N_MAJOR ? 1 : S::BLOCKS);
    const uint64_t b = wgmma_operand(smem.rows[at.stage]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < S::BK / 16; k++)
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++)
        wgmma_step<S, N>::run(acc[i], a + k * K16 + i * NEXT, b + k * 2, k > 0 || k0 > 0);
    wgmma_commit_group();
    if (last.more()) last.store(args, smem);
    wgmma_wait_group<1>();
    if (before >= 0) release_stage<S>(smem, before);
    before = at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  release_stage<S>(smem, before);
}

template <class S, int N>
DEVICE void multiply_lagged(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                            int rows, lagged_results<S> &last, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (N > WGMMA_STEP) {
    if (rows <= N - WGMMA_STEP) {
      multiply_lagged<S, N - WGMMA_STEP>(args, smem, at, group, rows, last, acc);
      return;
    }
  }
  multiply_lagged_n<S, N>(args, smem, at, group, last, acc);
}

#endif
