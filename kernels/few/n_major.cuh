/*
 * few: N-major weights. Of each k the octets of a unit lie together: a slice has UNIT octets and SLICE_K of k, and
 * memory is read in pieces of 64 bytes. Up takes 32 gate and the same 32 up channels, or 64 channels; down 32, of all
 * experts, so that only as many CTAs have part in it as there are such pieces (own_octets). ldmatrix transposes.
 *
 * Neighbours in memory are neighbours in a stage: of a sector whose halves go apart cp.async fetches each half by
 * itself. So gate has one half of a stage's row and up the other. In pairs they lie element by element, and the two
 * meet in the epilogue.
 */
#ifndef CUMOE_FEW_N_MAJOR_CUH
#define CUMOE_FEW_N_MAJOR_CUH

#include "device/ptx_narrow_sm90.cuh"
#include "few/schedule.cuh"

/* ---- where things lie ---- */

template <class S> DEVICE bool few_in_pairs(const gemm_args &g)
{
  return S::N_MAJOR && S::gated(g) && g.b.n_stride == 2;
}

/* What octets of k's row of a stage are swapped by, so that neither copies nor ldmatrix meet in a bank: the latter
 * reads k 0 1 8 9 16 17 24 25 of an octet, or the same plus 2, 4 or 6. */
template <class S> DEVICE constexpr int few_swap(int k)
{
  static_assert(S::UNIT == 8 || S::UNIT == 4, "rows of 128 bytes, or of 64");
  return S::UNIT == 8 ? k & 1 | (k >> 3 & 3) << 1 : k >> 3 & 3;
}

/* Gate and up lie apart: half of a stage's row each. */
template <class S> DEVICE bool few_apart(const gemm_args &g)
{
  return S::gated(g) && !few_in_pairs<S>(g);
}

/* A lane's octet of the slices of a unit, at k 0; NULL: it is not there. */
template <class S>
DEVICE const typename S::W *lane_column(const gemm_args &g, const few_units<S> &unit, few_halves of, int place)
{
  using W = typename S::W;
  const W *low = static_cast<const W *>(of.low), *high = static_cast<const W *>(of.high);
  if (!S::gated(g)) return place < unit.octets ? low + (unit.octet + place) * 8 : NULL;
  if (few_in_pairs<S>(g))
    return place / 2 < unit.octets ? (low < high ? low : high) + (2 * unit.octet + place) * 8 : NULL;
  const int octet = place % (S::UNIT / 2);
  return octet < unit.octets ? (place == octet ? low : high) + (unit.octet + octet) * 8 : NULL;
}

/* ---- copies and products ---- */

template <class S>
DEVICE void copy_n_major(const gemm_args &g, const few_units<S> &unit, few_halves of, int slice, few_stage<S> &stage)
{
  constexpr int AT_ONCE = WARP_SIZE / S::UNIT; /* rows of memory, at most 8 */
  const int place = lane_id() % S::UNIT, row = lane_id() / S::UNIT, k = slice * S::SLICE_K + row, left = g.k - k;
  const typename S::W *from = lane_column<S>(g, unit, of, place);
  if (!from) return;
  from += k * g.b.k_stride;
  const int64_t step = AT_ONCE * g.b.k_stride;
  const uint32_t to = shared_address(stage.weights);
  const int first = row * S::UNIT + (place ^ few_swap<S>(row));
#pragma unroll
  for (int i = 0; i < S::SLICE_K; i += AT_ONCE, from += step)
    cp_async_cg_16_apart(to + ((first ^ few_swap<S>(i)) + i * S::UNIT) * 16, from, i < left ? 16 : 0,
                         evict_first_policy());
}

/* x as in products.cuh: a lane has k 8 (l%4) .. + 7 of each 32, four for each of two products. */
template <class S>
DEVICE void multiply_n_major(bool apart, const few_stage<S> &stage, const uint4 (&x)[S::SLICE_K / 32],
                             float (&sum)[S::SUMS][4])
{
  const int row = lane_id() % 8, matrix = lane_id() / 8, k = row / 2 * 8 + matrix / 2 * 2 + row % 2,
            second = matrix % 2 * (apart ? S::UNIT / 2 : 1), first = k * S::UNIT + (second ^ few_swap<S>(k));
#pragma unroll
  for (int i = 0; i < S::SLICE_K / 32; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int t = 0; t < S::TILES; t++) {
        uint32_t w[4];
        ldmatrix_x4_trans(w, shared_address(stage.weights) +
                                 ((first ^ (apart ? t : 2 * t)) + (32 * i + 4 * half) * S::UNIT) * 16);
        if (half == 0)
          mma_m16n8k16<typename S::X>(sum[t], w, {x[i].x, x[i].y});
        else
          mma_m16n8k16<typename S::X>(sum[t], w, {x[i].z, x[i].w});
      }
    }
  }
}

/* ---- epilogue ---- */

/* As in warpgroup_tile.cuh: lanes exchange what they have of each other's channels, whose order in an octet becomes 0 4
 * 1 5 2 6 3 7. */
template <class S> DEVICE void part_pairs(const few_halves &weights, float (&sum)[S::TILES][4])
{
  const bool odd = lane_id() / 4 % 2, up_first = weights.high < weights.low;
#pragma unroll
  for (int t = 0; t < S::TILES; t++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float own = odd ? sum[t][j + 2] : sum[t][j], given = odd ? sum[t][j] : sum[t][j + 2],
                  other = __shfl_xor_sync(ALL_LANES, given, 4);
      sum[t][j] = odd != up_first ? other : own;
      sum[t][j + 2] = odd != up_first ? own : other;
    }
  }
}

/* The channel of a lane's sums in an octet. */
template <class S> DEVICE int row_channel(const gemm_args &g)
{
  return few_in_pairs<S>(g) ? lane_id() / 4 % 2 * 4 + lane_id() / 8 : lane_id() / 4;
}

#endif
