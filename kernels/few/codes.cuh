/* few: codes of weights as what mma.sync multiplies, in registers, and their scales. */
#ifndef CUMOE_FEW_CODES_CUH
#define CUMOE_FEW_CODES_CUH

#include "gemm/decode.cuh"
#include "gemm/product.cuh"

/*
 * How codes W are multiplied by activations that are Y in memory, and X when multiplied. M: what both become for that.
 * QUANTISES: activations become codes. REST: the power of two that unpacked weights lack. SUBNORMAL: they lack 2^126,
 * and the activations of 32 k are multiplied by as much of that as they can take.
 */
template <class X, class W, class Y> struct few_code {
  using M = Y;
  using SUM = float;
  static constexpr bool QUANTISES = false, SUBNORMAL = false;
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
  static constexpr bool SUBNORMAL = true;
};
template <> struct few_code<f16, mx4, f16> : few_code<f16, e4m3, f16> {
  static constexpr float REST = 0x1p14f;
};
template <class Y> struct few_code<Y, nv4, Y> : few_code<Y, mx4, Y> {
};

/* Activations in fixed point. Codes of e2m1 are multiplied as twice their values, those of u4 in whole runs
 * times 16. */
template <class W, bool WHOLE> struct few_fixed_code {
  using M = s8;
  using SUM = int32_t;
  static constexpr bool QUANTISES = false, SUBNORMAL = false;
  static constexpr float REST = same_type<W, mx4> ? .5f : WHOLE ? 0x1p-4f : 1.f;
};
template <class X, class W, class Y, bool FIXED, bool WHOLE> struct few_code_of {
  using type = few_code<X, W, Y>;
};
template <class X, class W, class Y, bool WHOLE> struct few_code_of<X, W, Y, true, WHOLE> {
  using type = few_fixed_code<W, WHOLE>;
};

/* Four codes of a byte, of consecutive k. bias: decode.cuh. */
template <class W, class M> DEVICE uint2 decode_four(uint32_t codes, uint32_t bias)
{
  if constexpr (same_type<W, e4m3> && same_type<M, f16>) /* that half is an operand of the conversion, a shift is not */
    return make_uint2(cvt_f16x2_e4m3x2(codes), cvt_f16x2_e4m3x2(__half_as_ushort(__high2half(as_pair<f16>(codes)))));
  else
    return decoder<W, M>::decode(codes, bias);
}

/*
 * A word of eight codes of 4 bits as four pairs: code p and code p + 4. Activations have the same order (pair_up).
 */

/* e2m1, exponent and mantissa where bf16 has its last bits of them: 2^-126 of the value. A product moves the sign and
 * the rest of a code at once. */
DEVICE void unpack_e2m1(uint32_t codes, uint32_t (&pair)[4], bf16)
{
  const uint32_t high = codes >> 8;
  pair[0] = (codes & 0x000f000f) * 0x1040 & 0x81c081c0;
  pair[1] = (codes & 0x00f000f0) * 0x0104 & 0x81c081c0;
  pair[2] = (high & 0x000f000f) * 0x1040 & 0x81c081c0;
  pair[3] = (high & 0x00f000f0) * 0x0104 & 0x81c081c0;
}

/* 2^-14 of the value. */
DEVICE void unpack_e2m1(uint32_t codes, uint32_t (&pair)[4], f16)
{
  pair[0] = codes << 9 & 0x0e000e00 | codes << 12 & 0x80008000;
  pair[1] = codes << 5 & 0x0e000e00 | codes << 8 & 0x80008000;
  pair[2] = codes << 1 & 0x0e000e00 | codes << 4 & 0x80008000;
  pair[3] = codes >> 3 & 0x0e000e00 | codes & 0x80008000;
}

/* Eight elements in the order of unpacked codes. */
DEVICE uint4 pair_up(const uint4 &v)
{
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}

#endif
