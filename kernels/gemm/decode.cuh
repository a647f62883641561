/*
 * Codes of weights as X, in registers, exactly: four of consecutive k at a time, which is what a lane feeds to an mma
 * of 16 k. Those of 8 bits are a word, those of 4 bits half of one. X is bf16 or f16.
 */
#ifndef CUMOE_DECODE_CUH
#define CUMOE_DECODE_CUH

#include "device/quant.cuh"

template <class X> struct pair_of;
template <> struct pair_of<f16> {
  using type = __half2;
  static constexpr int BIAS = 15, MANTISSA = 10;
  static constexpr uint32_t UNITS = 0x64006400; /* 1024: its last bit is 1, so an or with a code adds it */
};
template <> struct pair_of<bf16> {
  using type = __nv_bfloat162;
  static constexpr int BIAS = 127, MANTISSA = 7;
  static constexpr uint32_t UNITS = 0x43004300; /* 128 */
};

/* Operations on two X in a register. */
template <class X> DEVICE typename pair_of<X>::type as_pair(uint32_t bits)
{
  return *reinterpret_cast<typename pair_of<X>::type *>(&bits);
}
template <class P> DEVICE uint32_t as_bits(P pair)
{
  return *reinterpret_cast<uint32_t *>(&pair);
}
template <class X> DEVICE uint32_t subtract(uint32_t a, uint32_t b)
{
  return as_bits(__hsub2(as_pair<X>(a), as_pair<X>(b)));
}
template <class X> DEVICE uint32_t times_power(uint32_t a, int exponent)
{
  const uint32_t power = pair_of<X>::BIAS + exponent << pair_of<X>::MANTISSA;
  return as_bits(__hmul2(as_pair<X>(a), as_pair<X>(power << 16 | power)));
}

/* Two e4m3, of bytes 0 and 1. */
template <class X> DEVICE uint32_t decode_e4m3(uint32_t codes)
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 890
  const uint32_t pair = cvt_f16x2_e4m3x2(codes);
  if (same_type<X, f16>) return pair;
  const float2 both = unpack_pair<f16>(pair);
  return pack_pair<X>(both.x, both.y);
#else
  DIFFERS_BY_ARCHITECTURE();
  constexpr bool HALF = same_type<X, f16>; /* exponents: 5 bits of bias 15, or 8 of 127 */
  const uint32_t high = __byte_perm(codes, 0, 0x1404), size = high >> (HALF ? 1 : 4) & (HALF ? 0x3f803f80 : 0x07f007f0);
  const uint32_t value = times_power<X>(size, HALF ? 8 : 120), wrong = HALF ? 0x5f805f80 : 0x43f043f0; /* 480 */
  const uint32_t nan = __heq2_mask(as_pair<X>(value), as_pair<X>(wrong)); /* what the code of NaN came to */
  return value | nan | high & 0x80008000;
#endif
}

/* Four nibbles: the first two into bits 0 .. 3 of both halves, the others into bits 8 .. 11; the rest is not 0. */
DEVICE uint32_t spread(uint32_t codes)
{
  return codes | codes << 12;
}

/* decode: W of k .. k + 3. bias: what it is told of offset and zero point, the same for all of a run of k. */
template <class W, class X> struct decoder;

template <class X> struct decoder<e4m3, X> {
  DEVICE static uint32_t bias(int) { return 0; }
  DEVICE static uint2 decode(uint32_t codes, uint32_t)
  {
    return make_uint2(decode_e4m3<X>(codes), decode_e4m3<X>(codes >> 16));
  }
};

template <class X> struct decoder<s8, X> {
  /* Codes from 0 on are those from -128 on with the first bit flipped. f16 takes the former, bf16, whose 8 bits are too
   * few for them with a bit to spare, the latter. */
  DEVICE static uint32_t bias(int offset) { return (offset == 128) == same_type<X, f16> ? 0 : 0x80808080; }
  DEVICE static uint32_t decode_two(uint32_t codes, uint32_t which)
  {
    const uint32_t units = pair_of<X>::UNITS, both = __byte_perm(codes, units >> 8 & 0xff, which);
    if (same_type<X, f16>) return subtract<X>(both, 0x64806480); /* 1024 + 128 */
    return subtract<X>(both & 0xff7fff7f,
                       both & 0xff80ff80); /* 128 + the low 7 bits; 128, or 256 if the first is set */
  }
  DEVICE static uint2 decode(uint32_t codes, uint32_t flipped)
  {
    return make_uint2(decode_two(codes ^ flipped, 0x4140), decode_two(codes ^ flipped, 0x4342));
  }
};

template <class X> struct decoder<u4, X> {
  DEVICE static uint32_t bias(int zero)
  {
    const float units = same_type<X, f16> ? 1024.f : 128.f;
    return pack_pair<X>(units + zero, units + zero);
  }
  DEVICE static uint32_t decode_two(uint32_t codes, uint32_t bias)
  {
    return subtract<X>(codes & 0x000f000f | pair_of<X>::UNITS, bias);
  }
  DEVICE static uint2 decode(uint32_t codes, uint32_t bias)
  {
    const uint32_t all = spread(codes);
    return make_uint2(decode_two(all, bias), decode_two(all >> 8, bias));
  }
};

template <class X> struct decoder<af4, X> : decoder<u4, X> {
};

/* The exponent's and the mantissa's bits where X has them, which is a power of two too little. */
template <class X> struct decoder<mx4, X> {
  DEVICE static uint32_t bias(int) { return 0; }
  DEVICE static uint32_t decode_two(uint32_t signs, uint32_t sizes)
  {
    constexpr bool HALF = same_type<X, f16>;
    return times_power<X>(sizes & (HALF ? 0x0e000e00 : 0x01c001c0) | signs & 0x80008000, HALF ? 14 : 126);
  }
  DEVICE static uint2 decode(uint32_t codes, uint32_t)
  {
    constexpr bool HALF = same_type<X, f16>;
    const uint32_t all = spread(codes);
    return make_uint2(decode_two(all << 12, HALF ? all << 9 : all << 6),
                      decode_two(all << 4, HALF ? all << 1 : all >> 2));
  }
};
template <class X> struct decoder<nv4, X> : decoder<mx4, X> {
};

#endif
