/*
 * few, weights of u4 and mx4, one token: activations in fixed point, as in gemm/fixed.cuh. Sums of each 32 k are
 * exact, and so are those of 128 k where scales allow for them.
 *
 * Without zero points, a scale for 128 k or more (WHOLE): a run, 128 k of a tile, has an upper and a lower byte of
 * each element, so it takes two of the mma's eight columns, and a slice's four runs, which are (tile, run of it), take
 * them all: in the others a run has zeros. So the sums of a whole slice are a lane's: of run q = l % 4, rows l / 4 and
 * l / 4 + 8. Codes are multiplied as they lie, without a sign and without a shift: those of even k as they are, those
 * of odd k times 16, in sums of their own. What the codes' offset of 8 adds to a run is the same for every row, and is
 * in the sums from the start.
 */
#ifndef CUMOE_FEW_FIXED_CUH
#define CUMOE_FEW_FIXED_CUH

#include "device/ptx_narrow_sm90.cuh"
#include "few/feed.cuh"

/* ---- runs of 128 k ---- */

DEVICE uint32_t word_of(const uint4 &v, int i)
{
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* A run of rows l/4 and l/4 + 8: x is from where the lane reads its column. */
DEVICE void multiply_run(const uint4 &low, const uint4 &high, const uint4 *x, int32_t (&even)[4], int32_t (&odd)[4])
{
  constexpr uint32_t EVEN = 0x0f0f0f0f, ODD = 0xf0f0f0f0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t a[4] = {word_of(low, i), word_of(high, i), word_of(low, i + 1), word_of(high, i + 1)};
    const uint4 v = x[i / 2 * 8];
    mma_m16n8k32_u8s8(even, {a[0] & EVEN, a[1] & EVEN, a[2] & EVEN, a[3] & EVEN}, {v.x, v.y});
    mma_m16n8k32_u8s8(odd, {a[0] & ODD, a[1] & ODD, a[2] & ODD, a[3] & ODD}, {v.z, v.w});
  }
}

/* 16 times the sum of codes less 8 times elements. */
DEVICE float whole_sum(const int32_t (&even)[4], const int32_t (&odd)[4], int octet)
{
  const int upper = 2 * octet, lower = upper + 1;
  return (float)((even[upper] * 16 + odd[upper]) * 256 + even[lower] * 16 + odd[lower]);
}

/* A slice, from k0 on, or where `wide` from twice that. */
template <class L>
DEVICE void multiply_fixed(const gemm_args &g, const few_stage_of<L> &stage, const few_scales_of<L> &scales,
                           const few_row<L> &x, const uint4 *zeros, int k0, bool wide, float (&sum)[2])
{
  const int lane = (int)(tid_x() % WARP_SIZE), column = lane / 8, own = lane % 4,
            k_column = wide ? 2 * k0 + column * 128 : k0 + column % 2 * 128,
            k_own = wide ? 2 * k0 + own * 128 : k0 + own % 2 * 128;
  const uint4 *const mine = reinterpret_cast<const uint4 *>(x.fixed_word(k_column)) + lane / 4 % 2 * 4 + own;
  const fixed_run run = k_own < g.k ? *x.run(k_own) : fixed_run{0.f, 0};
  int32_t even[4] = {}, odd[4] = {0, run.more, 0, run.more};
#pragma unroll 1
  for (int i = 0; i < 4; i++)
    multiply_run(stage.codes[i / 2][0][i % 2][lane], stage.codes[i / 2][1][i % 2][lane],
                 column == i && k_column < g.k ? mine : zeros, even, odd);
#pragma unroll
  for (int o = 0; o < 2; o++)
    sum[o] = fmaf(whole_sum(even, odd, o) * run.unit, scale_value(scales.raw[o], g.b.scale.dtype), sum[o]);
}

/* ---- groups of 32 k ---- */

/*
 * Eight codes as two words of bytes. Of e2m1, twice the values, as two products' sum: those by their sizes alone, less
 * than 0, and, where the sign is not set, twice as much. What a table's bytes are is not told to ptxas, which would
 * move them to where they are used each time.
 */
template <class W> struct few_bytes {
  DEVICE few_bytes(const uint4 *) {}
  DEVICE void multiply(uint32_t low, uint32_t high, uint32_t x0, uint32_t x1, int32_t (&sum)[4], int32_t (&)[4]) const
  {
    constexpr uint32_t CODES = 0x0f0f0f0f;
    mma_m16n8k32_s8(sum, {low & CODES, high & CODES, low >> 4 & CODES, high >> 4 & CODES}, {x0, x1});
  }
};
template <> struct few_bytes<mx4> {
  uint32_t less, twice;

  DEVICE few_bytes(const uint4 *zeros)
  {
    const uint32_t none = *reinterpret_cast<const volatile uint32_t *>(zeros);
    less = none + 0xfdfeff00, twice = none + 0x06040200;
  }
  DEVICE void multiply(uint32_t low, uint32_t high, uint32_t x0, uint32_t x1, int32_t (&sum)[4],
                       int32_t (&positive)[4]) const
  {
    constexpr uint32_t LESS = 0xf4f8fafc, TWICE = 0x18100c08, SIZES = 0x77777777;
    const uint32_t a = low & SIZES, b = high & SIZES;
    mma_m16n8k32_s8(sum,
                    {table_bytes(less, LESS, a), table_bytes(less, LESS, b), table_bytes(less, LESS, a >> 16),
                     table_bytes(less, LESS, b >> 16)},
                    {x0, x1});
    mma_m16n8k32_s8(positive,
                    {table_bytes(twice, TWICE, low), table_bytes(twice, TWICE, high),
                     table_bytes(twice, TWICE, low >> 16), table_bytes(twice, TWICE, high >> 16)},
                    {x0, x1});
  }
};

/* 32 k of rows l/4 and l/4 + 8, of which lane l has group l % 4 of the run: columns 2 g and 2 g + 1 have the upper and
 * the lower bytes of group g alone, so that its sums are of the lane that has its scales. */
template <class W>
DEVICE void multiply_groups(const few_bytes<W> &bytes, const uint4 &low, const uint4 &high, const uint4 *x,
                            int32_t (&sum)[2])
{
  int32_t part[4] = {}, more[4] = {};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 v = x[i / 2];
    bytes.multiply(word_of(low, i), word_of(high, i), i % 2 ? v.z : v.x, i % 2 ? v.w : v.y, part, more);
  }
#pragma unroll
  for (int o = 0; o < 2; o++) sum[o] = (part[2 * o] + more[2 * o]) * 256 + part[2 * o + 1] + more[2 * o + 1];
}

/* A tile of a slice, from k on, into the sums of its rows. */
template <class L>
DEVICE void multiply_grouped(const gemm_args &g, const few_stage_of<L> &stage, const few_scales_of<L> &scales,
                             const few_row<L> &x, const uint4 *zeros, int tile, int k, float (&sum)[2])
{
  using W = typename L::W;
  const int lane = (int)(tid_x() % WARP_SIZE), own = k + lane % 4 * 32;
  const bool mine = lane / 8 == lane % 4;
  const uint4 *const from = reinterpret_cast<const uint4 *>(x.group(own)) + lane / 4 % 2 * 2;
  const uint32_t *const words = x.group_word(own);
  const few_bytes<W> bytes(zeros);
#pragma unroll
  for (int run = 0; run < 2; run++) {
    const uint32_t word = words[run * 4];
    int32_t whole[2];
    multiply_groups<W>(bytes, stage.codes[tile][0][run][lane], stage.codes[tile][1][run][lane],
                       mine ? from + run * 16 : zeros, whole);
#pragma unroll
    for (int o = 0; o < 2; o++) {
      if constexpr (same_type<W, u4>) whole[o] -= sum_of_group(word) * offset_of(scales, g.b, tile, o, run);
      sum[o] = fmaf((float)whole[o] * unit_of_group(word), scale_of(scales, g.b.scale.dtype, tile, o, run), sum[o]);
    }
  }
}

/* The sums of runs into those of tiles, which even lanes have, in sum[0]. */
DEVICE void add_runs(bool wide, float (&sum)[2][2])
{
#pragma unroll
  for (int o = 0; o < 2; o++) {
    sum[0][o] += __shfl_xor_sync(ALL_LANES, sum[0][o], 1);
    if (wide) sum[0][o] += __shfl_xor_sync(ALL_LANES, sum[0][o], 2);
  }
}

#endif
