/* drawn: products of a slice. */
#ifndef CUMOE_DRAWN_PRODUCTS_CUH
#define CUMOE_DRAWN_PRODUCTS_CUH

#include "few/drawn_feed.cuh"
#include "gemm/weight_factors.cuh"

/*
 * A group is 32 k: word q = l % 4 of its vector, eight codes, is a lane's in rows l / 4 and l / 4 + 8, and the same
 * eight elements of column l / 4. Codes p and p + 4 of a word become a pair, and so do elements.
 */
template <class L> struct drawn_reader {
  uint32_t codes;       /* where ldmatrix reads groups 0 and 1 of run 0 */
  const uint4 *column;  /* null: there is none */
  int swap;

  DEVICE drawn_reader(const drawn_stage<L> &stage, int columns)
  {
    const int lane = lane_id(), c = lane / 4;
    codes = shared_address(&stage.codes[lane / 8 % 2][0][drawn_vector(lane % 8, lane / 16)]);
    column = c < columns ? stage.columns[c] : nullptr, swap = drawn_column_vector(c, lane % 4);
  }
  /* Words of groups 2 half and 2 half + 1 of a run: [octet + 2 group]. */
  DEVICE void load_words(int run, int half, uint32_t (&words)[4]) const
  {
    ldmatrix_x4(words, (codes ^ half * 32) + run * (int)(WARP_SIZE * sizeof(uint4)));
  }
  /* Elements of group g of the slice. */
  DEVICE uint4 load_pairs(int g) const { return column ? pair_up(column[swap ^ g * 4]) : make_uint4(0, 0, 0, 0); }
};

/* A group: pairs of rows l / 4 and l / 4 + 8. */
template <class X>
DEVICE void multiply_pairs(float (&sum)[2][4], const uint32_t (&low)[4], const uint32_t (&high)[4], const uint4 &x)
{
  mma_m16n8k16<X>(sum[0], {low[0], high[0], low[1], high[1]}, {x.x, x.y});
  mma_m16n8k16<X>(sum[1], {low[2], high[2], low[3], high[3]}, {x.z, x.w});
}

/* part * scales of rows l / 4 and l / 4 + 8. */
DEVICE void add_scaled(float (&sum)[4], const float (&part)[2][4], float low, float high)
{
  sum[0] = fmaf(part[0][0] + part[1][0], low, sum[0]), sum[1] = fmaf(part[0][1] + part[1][1], low, sum[1]);
  sum[2] = fmaf(part[0][2] + part[1][2], high, sum[2]), sum[3] = fmaf(part[0][3] + part[1][3], high, sum[3]);
}

/* ---- u4: sums of 128 k, which have one scale ---- */

template <class X> DEVICE void unpack_u4(uint32_t codes, uint32_t (&pair)[4])
{
#pragma unroll
  for (int i = 0; i < 4; i++) pair[i] = decoder<u4, X>::decode_two(codes >> i * 4, decoder<u4, X>::bias(8));
}

template <class L>
DEVICE void multiply_slice(const drawn_reader<L> &from, const uint32_t (&scales)[2], int dtype, int runs,
                           float (&sum)[2][4])
{
  using X = typename L::X;
#pragma unroll 1
  for (int run = 0; run < runs; run++) {
    float part[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t words[4];
      from.load_words(run, half, words);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        uint32_t low[4], high[4];
        unpack_u4<X>(words[2 * i], low), unpack_u4<X>(words[2 * i + 1], high);
        multiply_pairs<X>(part, low, high, from.load_pairs(run * 4 + half * 2 + i));
      }
    }
    const int row = run * 16 + lane_id() / 4;
    add_scaled(sum[0], part, scale_value(__shfl_sync(ALL_LANES, scales[0], row), dtype),
               scale_value(__shfl_sync(ALL_LANES, scales[0], row + 8), dtype));
  }
}

/* ---- mx4: weights times their scales, which is exact ---- */

template <class X> DEVICE bool any_absent(uint32_t scales)
{
  bool absent = false;
#pragma unroll
  for (int i = 0; i < 4; i++) absent |= weight_factors<X, mx4>::any_absent(scales >> i * 8 & 255);
  return absent;
}

template <class X> DEVICE void unpack_mx4(uint32_t codes, uint32_t by, uint32_t (&pair)[4])
{
  e2m1_words<X>(codes, pair);
#pragma unroll
  for (int i = 0; i < 4; i++) pair[i] = mul_pairs<X>(pair[i], by);
}

/* A run with scales that products of elements cannot have: sums of groups are scaled. */
template <class L>
DEVICE void multiply_odd_run(const drawn_reader<L> &from, uint32_t low_scales, uint32_t high_scales, int run,
                             float (&sum)[4])
{
  using X = typename L::X;
  const uint32_t one = weight_factors<X, mx4>::prepared(127);
#pragma unroll 1
  for (int g = 0; g < 4; g++) {
    uint32_t words[4], low[4], high[4];
    float part[2][4] = {};
    from.load_words(run, g / 2, words);
    unpack_mx4<X>(g % 2 ? words[2] : words[0], one, low), unpack_mx4<X>(g % 2 ? words[3] : words[1], one, high);
    multiply_pairs<X>(part, low, high, from.load_pairs(run * 4 + g));
    add_scaled(sum, part, e8m0_to_f32(low_scales >> g * 8 & 255), e8m0_to_f32(high_scales >> g * 8 & 255));
  }
}

template <class L>
DEVICE void multiply_slice_mx4(const drawn_reader<L> &from, const uint32_t (&scales)[2], int runs, float (&sum)[2][4])
{
  using X = typename L::X;
  using F = weight_factors<X, mx4>;
  const uint32_t word = scales[0] | scales[1] << 16;
  const bool odd = __any_sync(ALL_LANES, any_absent<X>(word));
#pragma unroll 1
  for (int run = 0; run < runs; run++) {
    const int row = run * 16 + lane_id() / 4;
    const uint32_t low_scales = __shfl_sync(ALL_LANES, word, row), high_scales = __shfl_sync(ALL_LANES, word, row + 8);
    if (odd) {
      multiply_odd_run<L>(from, low_scales, high_scales, run, sum[0]);
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t words[4];
      from.load_words(run, half, words);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int byte = 0x4440 + half * 2 + i;
        uint32_t low[4], high[4];
        unpack_mx4<X>(words[2 * i], F::prepared(__byte_perm(low_scales, 0, byte)), low);
        unpack_mx4<X>(words[2 * i + 1], F::prepared(__byte_perm(high_scales, 0, byte)), high);
        multiply_pairs<X>(sum, low, high, from.load_pairs(run * 4 + half * 2 + i));
      }
    }
  }
}

#endif
