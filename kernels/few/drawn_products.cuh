/* drawn: products of a slice. */
#ifndef CUMOE_DRAWN_PRODUCTS_CUH
#define CUMOE_DRAWN_PRODUCTS_CUH

#include "few/drawn_feed.cuh"
#include "few/fixed.cuh"

/* ---- columns ---- */

/* Elements k .. k + 7 of a pair's h that were not written yet when they were copied. */
template <class Y> DEVICE uint4 await_written(const gemm_args &g, few_column column, int k, uint4 v)
{
  if (!__any_sync(ALL_LANES, is_unwritten(v))) return v;
  while (is_unwritten(v)) {
    __nanosleep(FEW_POLL);
    v = load_relaxed_vector(static_cast<const Y *>(g.a) + column_pair(column) * g.a_ld + k);
  }
  return v;
}

/* A slice's columns into fixed point (device/fixed_point.cuh), each vector in its place: upper bytes, then lower ones,
 * of even and of odd k, of mx4 in their order. By a warp: lane l has vector l, 16 lanes have a run. */
template <class L>
DEVICE void arrange_columns(const gemm_args &g, const drawn_slice<L> &at, const few_column *columns,
                            drawn_stage<L> &stage)
{
  using Y = typename L::Y;
  const int lane = lane_id();
#pragma unroll 1
  for (int c = 0; c < at.unit.columns; c++) {
    uint4 &place = stage.columns[c][drawn_column_vector(c, lane)], v = place;
    if (at.unit.down) v = await_written<Y>(g, columns[c], at.slice * L::BK + lane * 8, v);
    const fixed_unit unit(unpack_pair<Y>(largest_of<16>(v)).x);
    uint32_t even[4], odd[4], low[2], high[2];
    fixed_pair<Y>(v.x, unit.times, even[0], odd[0]), fixed_pair<Y>(v.y, unit.times, even[1], odd[1]);
    fixed_pair<Y>(v.z, unit.times, even[2], odd[2]), fixed_pair<Y>(v.w, unit.times, even[3], odd[3]);
    if constexpr (same_type<typename L::W, mx4>) {
      const uint32_t first[4] = {even[0], odd[0], even[1], odd[1]}, second[4] = {even[2], odd[2], even[3], odd[3]};
      split_bytes(first, low[0], high[0]), split_bytes(second, low[1], high[1]);
    } else {
      split_bytes(even, low[0], high[0]), split_bytes(odd, low[1], high[1]);
    }
    place = make_uint4(high[0], high[1], low[0] ^ 0x80808080, low[1] ^ 0x80808080);
    if (lane % 16 == 0) stage.worth[c][lane / 16] = unit.worth;
  }
  __syncwarp();
}

/* ---- products ---- */

/*
 * A group is 32 k: word q = l % 4 of its vector, eight codes, is a lane's in rows l / 4 and l / 4 + 8, and the same
 * eight elements of column l / 4, which is the upper or the lower bytes of a token. So lane l has the sums of token
 * l % 4 in those rows.
 */
template <class L> struct drawn_reader {
  uint32_t codes;      /* where ldmatrix reads groups 0 and 1 of run 0 of tile 0 */
  const uint2 *column; /* null: there is none */
  const float *worth;

  DEVICE drawn_reader(const drawn_stage<L> &stage, int columns)
  {
    const int lane = lane_id(), token = lane / 8;
    codes = shared_address(&stage.codes[0][lane / 8 % 2][0][drawn_vector(lane % 8, lane / 16)]);
    column = token < columns ? reinterpret_cast<const uint2 *>(stage.columns[token]) + lane / 4 % 2 : nullptr;
    worth = stage.worth[lane % 4];
  }
  /* Words of groups 2 half and 2 half + 1 of a run: [octet + 2 group]. */
  DEVICE void load_words(int tile, int run, int half, uint32_t (&words)[4]) const
  {
    constexpr int RUN = WARP_SIZE * sizeof(uint4);
    ldmatrix_x4(words, (codes ^ half * 32) + run * RUN + tile * 2 * L::RUNS * RUN);
  }
  /* Elements of group g of the slice. */
  DEVICE uint2 load_elements(int g) const
  {
    const int lane = lane_id();
    return column ? column[2 * drawn_column_vector(lane / 8, g * 4 + lane % 4)] : make_uint2(0, 0);
  }
};

DEVICE float sum_of_bytes(int32_t upper, int32_t lower)
{
  return (float)(upper * 256 + lower);
}

/* ---- u4: codes less 8, 16 times, of 128 k, which have one scale ---- */

DEVICE void multiply_codes(uint32_t low, uint32_t high, const uint2 &x, int32_t (&sum)[4])
{
  constexpr uint32_t EIGHTS = 0x88888888, CODES = 0xf0f0f0f0;
  mma_m16n8k32_s8(sum, {(low << 4 ^ EIGHTS) & CODES, (high << 4 ^ EIGHTS) & CODES, (low ^ EIGHTS) & CODES,
                        (high ^ EIGHTS) & CODES},
                  {x.x, x.y});
}

template <class L>
DEVICE void multiply_slice(const drawn_reader<L> &from, const uint32_t (&scales)[L::TILES][2], int dtype, int runs,
                           float (&sum)[L::TILES][2])
{
#pragma unroll 1
  for (int run = 0; run < runs; run++) {
    int32_t part[L::TILES][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint2 first = from.load_elements(run * 4 + half * 2), second = from.load_elements(run * 4 + half * 2 + 1);
#pragma unroll
      for (int t = 0; t < L::TILES; t++) {
        uint32_t words[4];
        from.load_words(t, run, half, words);
        multiply_codes(words[0], words[1], first, part[t]);
        multiply_codes(words[2], words[3], second, part[t]);
      }
    }
    const int row = run * 16 + lane_id() / 4;
    const float worth = from.worth[run];
#pragma unroll
    for (int t = 0; t < L::TILES; t++)
#pragma unroll
      for (int o = 0; o < 2; o++)
        sum[t][o] = fmaf(sum_of_bytes(part[t][2 * o], part[t][2 * o + 1]) * worth,
                         scale_value(__shfl_sync(ALL_LANES, scales[t][0], row + 8 * o), dtype), sum[t][o]);
  }
}

/* ---- mx4: twice their values, of 32 k ---- */

/* Some byte is 255. */
DEVICE bool has_nan(uint32_t scales)
{
  return (~scales - 0x01010101 & scales & 0x80808080) != 0;
}

/* Of a byte that is not 255. */
DEVICE float scale_of_byte(uint32_t scales, int byte)
{
  return __uint_as_float(max(__byte_perm(scales, 0, 0x0444 | byte << 12) >> 1, 0x00400000u));
}

template <class L>
DEVICE void multiply_slice_mx4(const drawn_reader<L> &from, const uint4 *zeros, const uint32_t (&scales)[L::TILES][2],
                               int runs, float (&sum)[L::TILES][2])
{
  const few_bytes<mx4> bytes(zeros);
  uint32_t all[L::TILES];
#pragma unroll
  for (int t = 0; t < L::TILES; t++) all[t] = scales[t][0] | scales[t][1] << 16;
#pragma unroll 1
  for (int run = 0; run < runs; run++) {
    const int row = run * 16 + lane_id() / 4;
    const float worth = from.worth[run];
#pragma unroll
    for (int t = 0; t < L::TILES; t++) {
      const uint32_t own[2] = {__shfl_sync(ALL_LANES, all[t], row), __shfl_sync(ALL_LANES, all[t], row + 8)};
      float run_sum[2] = {};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint32_t words[4];
        from.load_words(t, run, half, words);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int g = half * 2 + i;
          const uint2 x = from.load_elements(run * 4 + g);
          int32_t part[4] = {};
          bytes.multiply(words[2 * i], words[2 * i + 1], x.x, x.y, part, part);
#pragma unroll
          for (int o = 0; o < 2; o++)
            run_sum[o] = fmaf(sum_of_bytes(part[2 * o], part[2 * o + 1]), scale_of_byte(own[o], g), run_sum[o]);
        }
      }
#pragma unroll
      for (int o = 0; o < 2; o++) {
        if (has_nan(own[o])) run_sum[o] = __uint_as_float(0x7fc00000u);
        sum[t][o] = fmaf(run_sum[o], worth, sum[t][o]);
      }
    }
  }
}

#endif
