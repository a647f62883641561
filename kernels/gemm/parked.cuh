/*
 * Tiles that others finish: consumers leave a tile's sums, rounded, in shared memory, and go on to the next one; a
 * warpgroup of its own, the finishers, makes outputs of them meanwhile, whose rows go to memory by whole lines. Where an
 * epilogue is long that is more than what narrower tiles cost (128 rows take shared memory 1152 clocks, the tensor cores
 * 1024).
 */
#ifndef CUMOE_PARKED_CUH
#define CUMOE_PARKED_CUH

#include "gemm/warpgroup_tile.cuh"

/* A row has the tile's columns, vectors of 8; vector v of row r is at v ^ r % 8. Of a gated tile vectors 2 i and 2 i + 1
 * are the halves of channels 8 i .., in the order in which they lie. */
template <class S, bool PARKS = S::PARKS> struct parked_tile {
};
template <class S> struct parked_tile<S, true> {
  alignas(16) typename S::Y parked[S::BM * S::COLUMNS];
  uint64_t parked_full, parked_empty;
};

template <class S> DEVICE uint4 parked_vector(const parked_tile<S> &tile, int row, int vector)
{
  return reinterpret_cast<const uint4 *>(tile.parked)[row * (S::COLUMNS / 8) + (vector ^ row % 8)];
}

/* A consumer warp is through with what it parks. */
template <class S> DEVICE void end_parking(parked_tile<S> &tile, uint32_t turn)
{
  wait_for(&tile.parked_empty, turn ^ 1);
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(&tile.parked_full);
}

/* A finisher's warp has read all of a tile. */
template <class S> DEVICE void release_parked(parked_tile<S> &tile)
{
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(&tile.parked_empty);
}

/* A consumer's sums of a tile, with biases. */
template <class S>
DEVICE void park(const gemm_args &args, bool up_first, parked_tile<S> &tile, const tile_unit &unit, int group,
                 uint32_t turn, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  static_assert(S::OCTETS == 4 && sizeof(typename S::Y) == 2, "an stmatrix has all octets of 8 tokens");
  constexpr int LINE = S::COLUMNS * 2; /* bytes */
  const int halves = S::gated(args) ? 2 : 1, channels = S::COLUMNS / halves;
  const channel_span span = span_of_warp<S>(args, {group * (channels / S::CONSUMERS), channels});
  const row_bias<S> bias(args, unit.expert, {unit.n * channels + span.first, args.n});
  const int matrix = lane_id() / 8, token = lane_id() % 8,
            vector = (span.first + octet_channel<S>(args, matrix / halves)) / 8 * halves + matrix % halves;
  const uint32_t to = shared_address(tile.parked) + token * LINE + (vector ^ token) * 16;
  wait_for(&tile.parked_empty, turn ^ 1);
#pragma unroll
  for (int j = 0; j < S::BM / 8; j++) {
    if (j * 8 >= unit.rows) break;
    if constexpr (S::N_MAJOR) part_pairs<S, 8>(args, j * 8, acc);
    uint32_t packed[4];
#pragma unroll
    for (int g = 0; g < 4; g++) {
      const float add = up_first && halves == 2 ? bias.of[g ^ 1] : bias.of[g];
      packed[g] = pack_pair<typename S::Y>(weighted(accumulator_of<S>(acc, g, j, 0), 1.f, 1.f, add),
                                           weighted(accumulator_of<S>(acc, g, j, 1), 1.f, 1.f, add));
    }
    stmatrix_x4_trans(to + j * 8 * LINE, packed);
  }
  end_parking<S>(tile, turn);
}

#endif
