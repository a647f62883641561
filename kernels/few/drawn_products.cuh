/* drawn: products of a slice. */
#ifndef CUMOE_DRAWN_PRODUCTS_CUH
#define CUMOE_DRAWN_PRODUCTS_CUH

#include "device/wgmma_registers.cuh"
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

/* Elements below 2^-111 have no multiple that is a normal number's inverse: 2^64 times them. Returns what undoes it. */
template <class Y> DEVICE float lift(uint4 &v, uint32_t &most)
{
  constexpr uint32_t TINY = 127 - 111 << 7, UP = (127 + 64 << 7) * 0x10001;
  if (!same_type<Y, bf16> || !__any_sync(ALL_LANES, most - 1 < TINY - 1) || most >= TINY) return 1.f;
  v = make_uint4(mul_pairs<bf16>(v.x, UP), mul_pairs<bf16>(v.y, UP), mul_pairs<bf16>(v.z, UP),
                 mul_pairs<bf16>(v.w, UP));
  most = mul_pairs<bf16>(most, UP) & 0xffff;
  return 0x1p-64f;
}

/* A slice's columns into fixed point (device/fixed_point.cuh), each vector in its place: upper bytes, then lower ones,
 * of even and of odd k, of mx4 in their order. By a warp: lane l has vector l, 16 lanes have a run. */
template <class L>
DEVICE void arrange_columns(const gemm_args &g, const drawn_slice<L> &at, const few_column *columns,
                            drawn_stage<L> &stage, float (&worth)[L::COLUMNS][L::RUNS])
{
  using Y = typename L::Y;
  const int lane = lane_id();
  uint4 *row = stage.columns[0];
#pragma unroll 1
  for (int c = 0; c < at.unit.columns; c++, row += L::VECTORS) {
    uint4 &place = row[drawn_column_vector(c, lane)], v = place;
    if (at.unit.down) v = await_written<Y>(g, columns[c], at.slice * L::BK + lane * 8, v);
    uint32_t most = largest_of<16>(v);
    const float down = lift<Y>(v, most);
    const fixed_unit unit(unpack_pair<Y>(most).x);
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
    if (lane % 16 == 0) worth[c][lane / 16] = unit.worth * down;
  }
  __syncwarp();
}

/* ---- products ---- */

template <class L> struct drawn_words {
  uint32_t codes; /* where ldmatrix reads vectors 0 and 1 of line 0 of tile 0 */

  /* Words of vectors 2 half and 2 half + 1 of a line: [octet + 2 vector]. */
  DEVICE void load_words(int tile, int line, int half, uint32_t (&words)[4]) const
  {
    constexpr int LINE = WARP_SIZE * sizeof(uint4);
    ldmatrix_x4(words, (codes ^ half * 32) + line * LINE + tile * 2 * L::LINES * LINE);
  }
};

/*
 * A group is 32 k: word q = l % 4 of its vector, eight codes, is a lane's in rows l / 4 and l / 4 + 8, and the same
 * eight elements of column l / 4, which is the upper or the lower bytes of a token. So lane l has the sums of token
 * l % 4 in those rows.
 */
template <class L> struct drawn_reader : drawn_words<L> {
  const unsigned char *even, *odd; /* elements of groups 0 and 1 of the slice */
  bool there;
  const float *worth;

  DEVICE drawn_reader(const drawn_stage<L> &stage, const drawn_lane<L> &own, const float (&worths)[L::COLUMNS][L::RUNS],
                      int columns)
  {
    this->codes = shared_address(&stage) + own.codes;
    even = reinterpret_cast<const unsigned char *>(stage.columns) + own.elements;
    odd = reinterpret_cast<const unsigned char *>(stage.columns) + (own.elements ^ 4 * sizeof(uint4));
    there = lane_id() / 8 < columns;
    worth = worths[lane_id() % 4];
  }
  /* Elements of group g of the slice. */
  DEVICE uint2 load_elements(int g) const
  {
    static_assert(L::COLUMNS == 4 && L::BK == 256, "eight columns");
    const unsigned char *from = (g % 2 ? odd : even) + g / 2 * 128;
    return there ? *reinterpret_cast<const uint2 *>(from) : make_uint2(0, 0);
  }
};

DEVICE float sum_of_bytes(int32_t upper, int32_t lower)
{
  return (float)(upper * 256 + lower);
}

/* ---- u4: codes less 8, 16 times, of 128 k, which have one scale ---- */

/* eights: 0x88888888, which ptxas does not know, as an instruction has one constant. */
DEVICE void multiply_codes(uint32_t low, uint32_t high, const uint2 &x, uint32_t eights, int32_t (&sum)[4])
{
  constexpr uint32_t CODES = 0xf0f0f0f0;
  mma_m16n8k32_s8(
      sum, {(low << 4 ^ eights) & CODES, (high << 4 ^ eights) & CODES, (low ^ eights) & CODES, (high ^ eights) & CODES},
      {x.x, x.y});
}

template <class L>
DEVICE void multiply_slice(const drawn_reader<L> &from, uint32_t none, const uint32_t (&scales)[L::TILES][2], int dtype,
                           float (&sum)[L::TILES][2])
{
  const uint32_t eights = none + 0x88888888;
  float own[L::TILES];
#pragma unroll
  for (int t = 0; t < L::TILES; t++) own[t] = scale_value(scales[t][0], dtype);
#pragma unroll
  for (int run = 0; run < L::RUNS; run++) {
    int32_t part[L::TILES][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint2 first = from.load_elements(run * 4 + half * 2), second = from.load_elements(run * 4 + half * 2 + 1);
#pragma unroll
      for (int t = 0; t < L::TILES; t++) {
        uint32_t words[4];
        from.load_words(t, run, half, words);
        multiply_codes(words[0], words[1], first, eights, part[t]);
        multiply_codes(words[2], words[3], second, eights, part[t]);
      }
    }
    const float worth = from.worth[run];
#pragma unroll
    for (int t = 0; t < L::TILES; t++)
#pragma unroll
      for (int o = 0; o < 2; o++)
        sum[t][o] = fmaf(sum_of_bytes(part[t][2 * o], part[t][2 * o + 1]) * worth,
                         __shfl_sync(ALL_LANES, own[t], run * 16 + o * 8 + lane_id() / 4), sum[t][o]);
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

/* Scales that are NaN. */
template <class L> DEVICE void add_nans(const uint32_t (&all)[L::TILES], float (&sum)[L::TILES][2])
{
#pragma unroll
  for (int i = 0; i < L::TILES * L::RUNS * 2; i++) {
    const int t = i / L::RUNS / 2, o = i % 2;
    const uint32_t scales = __shfl_sync(ALL_LANES, all[t], i / 2 % L::RUNS * 16 + o * 8 + lane_id() / 4);
    if (has_nan(scales)) sum[t][o] = __uint_as_float(0x7fc00000u);
  }
}

template <class L>
DEVICE void multiply_slice_mx4(const drawn_reader<L> &from, const uint4 *zeros, const uint32_t (&scales)[L::TILES][2],
                               float (&sum)[L::TILES][2])
{
  const few_bytes<mx4> bytes(zeros);
  uint32_t all[L::TILES];
  bool nan = false;
#pragma unroll
  for (int t = 0; t < L::TILES; t++) all[t] = scales[t][0] | scales[t][1] << 16, nan |= has_nan(all[t]);
#pragma unroll
  for (int run = 0; run < L::RUNS; run++) {
    const float worth = from.worth[run];
    float run_sum[L::TILES][2] = {};
    uint32_t own[L::TILES][2];
#pragma unroll
    for (int i = 0; i < L::TILES * 2; i++)
      own[i / 2][i % 2] = __shfl_sync(ALL_LANES, all[i / 2], run * 16 + i % 2 * 8 + lane_id() / 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint2 x[2] = {from.load_elements(run * 4 + half * 2), from.load_elements(run * 4 + half * 2 + 1)};
#pragma unroll
      for (int t = 0; t < L::TILES; t++) {
        uint32_t words[4];
        from.load_words(t, run, half, words);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          int32_t part[4] = {};
          bytes.multiply(words[2 * i], words[2 * i + 1], x[i].x, x[i].y, part, part);
#pragma unroll
          for (int o = 0; o < 2; o++)
            run_sum[t][o] =
                fmaf(sum_of_bytes(part[2 * o], part[2 * o + 1]), scale_of_byte(own[t][o], half * 2 + i), run_sum[t][o]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < L::TILES * 2; i++) sum[i / 2][i % 2] = fmaf(run_sum[i / 2][i % 2], worth, sum[i / 2][i % 2]);
  }
  if (__any_sync(ALL_LANES, nan)) add_nans<L>(all, sum);
}

#endif
