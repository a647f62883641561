/*
 * The products of form wgmma with weights of 4 bits and rows (tokens) of 16, for shapes that are SPREAD
 * (gemm/packed.cuh).
 *
 * Warps of their own unpack each stage's weights into shared memory, in slots of a swizzle line of k, as tensor copies
 * would have left 16-bit weights there. So consumers multiply as those of 16-bit weights do: both operands come from
 * shared memory. A thread unpacks one weight row; neither what it reads nor what it writes meets in a bank.
 */
#ifndef CUMOE_SPREAD_TILE_CUH
#define CUMOE_SPREAD_TILE_CUH

#include "gemm/packed_tile.cuh"

/* What a stage has besides. */
template <class S> struct spread_stages : factor_stages<S, true> {
  alignas(1024) typename S::X unpacked[S::SLOTS][S::COLUMNS * S::LINE];
  uint64_t ready[S::SLOTS], unused[S::SLOTS];
};

template <class S> using slot_state = pipeline_state<S::SLOTS>;

/* ---- unpackers ---- */

/* 64 k of a thread's row. */
template <class S>
DEVICE void unpack_line(uint32_t from, uint32_t to, int line, const uint32_t (&word)[2])
{
#pragma unroll
  for (int i = 0; i < 2; i++) {
    weight_factors<typename S::X, typename S::CODE> factors;
    factors.restore(0, word[i]);
    const uint4 raw = lds_128(from ^ (line * 2 + i) * 16);
    const uint32_t codes[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
      uint32_t pair[4];
      factors.decode(0, codes[w], pair);
#pragma unroll
      for (int j = 0; j < 4; j++) pair[j] = factors.scaled(0, w, pair[j]);
      sts_128(to ^ (i * 4 + w) * 16,
              make_uint4(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[2], pair[3], 0x5410),
                         __byte_perm(pair[0], pair[1], 0x7632), __byte_perm(pair[2], pair[3], 0x7632)));
    }
  }
}

/* A stage's rows are released by consumers, who have what was unpacked of it then. */
template <class S> DEVICE void unpack_units(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  constexpr int ROWS = S::COLUMNS / S::UNPACKERS;
  const int row = threadIdx.x - (S::CONSUMERS + 1) * S::GROUP;
  const uint32_t from = shared_address(smem.weights[0]) + row * S::WEIGHT_LINE + row / 2 % 4 * 16,
                 to = shared_address(smem.unpacked[0]) + row * 128 + row % 8 * 16;
  pipeline_state<S::STAGES> at;
  pipeline_state<UNITS_AHEAD> slot;
  slot_state<S> into;
#pragma unroll 1
  for (;; slot.advance()) {
    wait_for(&smem.posted[slot.stage], slot.phase);
    if (smem.units[slot.stage].expert < 0) return;
#pragma unroll 1
    for (int k0 = 0; k0 < args.g.k; k0 += S::BK, at.advance()) {
      wait_for(&smem.full[at.stage], at.phase);
      uint4 f[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; r++) f[r] = smem.factors[at.stage][row + r * S::UNPACKERS];
#pragma unroll
      for (int line = 0; line < S::LINES; line++, into.advance()) {
        wait_for(&smem.unused[into.stage], into.phase ^ 1);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const uint32_t word[2] = {line ? f[r].z : f[r].x, line ? f[r].w : f[r].y};
          unpack_line<S>(from + at.stage * (uint32_t)sizeof smem.weights[0] + r * S::UNPACKERS * S::WEIGHT_LINE,
                         to + into.stage * (uint32_t)sizeof smem.unpacked[0] + r * S::UNPACKERS * 128, line, word);
        }
        fence_proxy_async_shared();
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(&smem.ready[into.stage]);
      }
    }
  }
}

/* ---- consumers ---- */

template <class S> DEVICE void release_slot(wgmma_smem<S> &smem, int slot)
{
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(&smem.unused[slot]);
}

/* acc = weights x rows of one unit, N tokens wide. Slots and stages are released one step later. */
template <class S, int N>
DEVICE void multiply_spread_n(const gemm_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at,
                              slot_state<S> &from, int group, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  int before = -1, slot_before = -1;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
#pragma unroll
    for (int line = 0; line < S::LINES; line++, from.advance()) {
      wait_for(&smem.ready[from.stage], from.phase);
      const uint64_t a = wgmma_operand(smem.unpacked[from.stage] + group * S::BLOCKS * S::BLOCK * S::LINE, S::BLOCKS);
      const uint64_t b = wgmma_operand(smem.rows[at.stage] + line * S::BM * S::LINE);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < S::LINE / 16; k++)
#pragma unroll
        for (int i = 0; i < S::BLOCKS; i++)
          wgmma_step<S, N>::run(acc[i], a + k * 2 + i * 64, b + k * 2, line > 0 || k > 0 || k0 > 0);
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if (slot_before >= 0) release_slot<S>(smem, slot_before);
      if (line == 0 && before >= 0) release_stage<S>(smem, before);
      slot_before = from.stage;
    }
    before = at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  release_slot<S>(smem, slot_before);
  release_stage<S>(smem, before);
}

template <class S, int N>
DEVICE void multiply_spread(const gemm_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at,
                            slot_state<S> &from, int group, int rows, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (N > WGMMA_STEP)
    if (rows <= N - WGMMA_STEP)
      return multiply_spread<S, N - WGMMA_STEP>(args, smem, at, from, group, rows, acc);
  multiply_spread_n<S, N>(args, smem, at, from, group, acc);
}

template <class S>
DEVICE void skip_spread(const gemm_args &args, wgmma_smem<S> &smem, pipeline_state<S::STAGES> &at, slot_state<S> &from)
{
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
#pragma unroll 1
    for (int line = 0; line < S::LINES; line++, from.advance()) {
      wait_for(&smem.ready[from.stage], from.phase);
      release_slot<S>(smem, from.stage);
    }
    release_stage<S>(smem, at.stage);
  }
}

#endif
