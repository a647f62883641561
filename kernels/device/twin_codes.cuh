/*
 * Activations in bf16 as two codes of e4m3 each, whose sum they are: of each aligned 128 k of a row (a slab), brought
 * by a power of two to where its largest is 2^7 .. 2^8; what is below 2^-16 of that is rounded. A slab is two planes,
 * of the larger parts and of the rests, in the order of fixed point (device/fixed_point.cuh).
 */
#ifndef CUMOE_TWIN_CODES_CUH
#define CUMOE_TWIN_CODES_CUH

#include "device/fixed_point.cuh"

/* Pairs' even elements (odd: ODD) as codes. */
template <bool ODD> DEVICE uint32_t four_codes(const float2 (&v)[4])
{
  return ODD ? cvt_e4m3x2(v[0].y, v[1].y) | cvt_e4m3x2(v[2].y, v[3].y) << 16
             : cvt_e4m3x2(v[0].x, v[1].x) | cvt_e4m3x2(v[2].x, v[3].x) << 16;
}

/* Eight elements of run q: put(plane, chunk, four bytes). The rest of what is not finite is NaN. */
template <class PUT> DEVICE void put_eight_twins(const uint4 &v, float up, int q, PUT put)
{
  const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
  float2 large[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 x = unpack_pair<bf16>(pairs[i]), most = unpack_pair<bf16>(pairs[i] & 0xfff0fff0); /* four bits */
    large[i] = {most.x * up, most.y * up};
    rest[i] = {(x.x - most.x) * up, (x.y - most.y) * up};
  }
  put(0, 2 * q, four_codes<false>(large));
  put(0, 2 * q + 1, four_codes<true>(large));
  put(1, 2 * q, four_codes<false>(rest));
  put(1, 2 * q + 1, four_codes<true>(rest));
}

/* As put_fixed. */
template <int LANES_APART, class PUT> DEVICE float put_twins(const uint4 (&v)[4], PUT put)
{
  const int exponent = (int)(largest_of_slab<LANES_APART>(v) >> 7),
            up = min(127 + 134 - exponent, 253); /* the exponent of a normal number, as 254 - up is */
#pragma unroll
  for (int q = 0; q < 4; q++) put_eight_twins(v[q], __uint_as_float((uint32_t)up << 23), q, put);
  return __uint_as_float((uint32_t)(254 - up) << 23);
}

#endif
