/* few: codes of weights as what mma.sync multiplies, in registers. */
#ifndef CUMOE_FEW_CODES_CUH
#define CUMOE_FEW_CODES_CUH

#include "gemm/decode.cuh"
#include "gemm/product.cuh"

/*
 * How codes W are multiplied by activations that are Y in memory, and X when multiplied. M: what both become for that.
 *   bytes    a row of a slice has one scale, which its sums are multiplied by
 *   OWNED    32 k of a row are a lane's, which multiplies them by their scale as it unpacks them
 *   GROUPED  32 k are multiplied by themselves, their sums then by their scale; IN_RUNS: 128, where they have one
 * REST: the power of two that unpacked weights lack.
 */
template <class X, class W, class Y> struct few_code {
  using M = Y;
  using SUM = float;
  static constexpr bool QUANTISES = false, OWNED = false, GROUPED = false, IN_RUNS = false;
  static constexpr float REST = 1.f;
};
template <class Y> struct few_code<e4m3, e4m3, Y> : few_code<Y, e4m3, Y> {
  using M = f16;
  static constexpr bool QUANTISES = true;
};
template <class Y> struct few_code<s8, s8, Y> : few_code<Y, s8, Y> {
  using M = s8;
  using SUM = int32_t;
  static constexpr bool QUANTISES = true;
};
template <> struct few_code<bf16, mx4, bf16> : few_code<bf16, e4m3, bf16> {
  static constexpr bool OWNED = true;
};
template <> struct few_code<f16, mx4, f16> : few_code<f16, e4m3, f16> {
  static constexpr bool GROUPED = true;
  static constexpr float REST = 0x1p14f;
};
template <class Y> struct few_code<Y, u4, Y> : few_code<Y, e4m3, Y> {
  static constexpr bool GROUPED = true, IN_RUNS = true;
};
template <> struct few_code<bf16, nv4, bf16> : few_code<bf16, e4m3, bf16> {
  static constexpr bool OWNED = true;
  static constexpr float REST = 0x1p16f;
};

/*
 * A word of eight codes of 4 bits as four pairs: code p and code p + 4. Columns have the same order (pair_up).
 */

/* e2m1, exponent and mantissa where bf16 has its last bits of them: 2^-126 of the value. A product moves the sign and
 * the rest of a code at once. */
DEVICE void unpack_e2m1_bf16(uint32_t codes, uint32_t (&pair)[4])
{
  const uint32_t high = codes >> 8;
  pair[0] = (codes & 0x000f000f) * 0x1040 & 0x81c081c0;
  pair[1] = (codes & 0x00f000f0) * 0x0104 & 0x81c081c0;
  pair[2] = (high & 0x000f000f) * 0x1040 & 0x81c081c0;
  pair[3] = (high & 0x00f000f0) * 0x0104 & 0x81c081c0;
}

/* 2^-14 of the value. */
DEVICE void unpack_e2m1_f16(uint32_t codes, uint32_t (&pair)[4])
{
  pair[0] = codes << 9 & 0x0e000e00 | codes << 12 & 0x80008000;
  pair[1] = codes << 5 & 0x0e000e00 | codes << 8 & 0x80008000;
  pair[2] = codes << 1 & 0x0e000e00 | codes << 4 & 0x80008000;
  pair[3] = codes >> 3 & 0x0e000e00 | codes & 0x80008000;
}

template <class M> DEVICE void multiply_pairs(uint32_t (&pair)[4], uint32_t factor)
{
#pragma unroll
  for (int p = 0; p < 4; p++) pair[p] = as_bits(__hmul2(as_pair<M>(pair[p]), as_pair<M>(factor)));
}

/* zero: zero_subtrahend. */
template <class M> DEVICE void unpack_u4(uint32_t codes, uint32_t zero, uint32_t (&pair)[4])
{
#pragma unroll
  for (int p = 0; p < 4; p++) pair[p] = subtract<M>(codes >> 4 * p & 0x000f000f | pair_of<M>::UNITS, zero);
}

/* As it is multiplied in GROUPED; zero: of u4, zero_subtrahend. */
template <class W, class M> DEVICE void unpack_group(uint32_t codes, uint32_t zero, uint32_t (&pair)[4])
{
  if constexpr (same_type<W, u4>) {
    unpack_u4<M>(codes, zero, pair);
  } else if constexpr (same_type<M, f16>) {
    unpack_e2m1_f16(codes, pair);
  } else {
    unpack_e2m1_bf16(codes, pair);
    multiply_pairs<M>(pair, 0x7e807e80); /* 2^126 */
  }
}

/* What unpacked u4 have too much, as a pair of M. */
template <class M> DEVICE uint32_t zero_subtrahend(int zero)
{
  return pair_of<M>::UNITS + zero * 0x10001;
}

/* Eight elements in the order of unpacked codes. */
DEVICE void pair_up(uint4 &v)
{
  v = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                 __byte_perm(v.y, v.w, 0x7632));
}

#endif
