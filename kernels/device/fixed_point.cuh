/*
 * Activations in fixed point: of each aligned 128 k of a row (a slab) multiples of less than 2^-14 of the largest, in
 * 16 bits: 256 times an upper byte, and a lower one, both signed. A multiple's worth is the slab's scale.
 *
 * Order. A slab is two planes, of upper bytes and of lower ones, each of as many bytes as the row has k there. Four
 * lanes have a slab of a row: lane `word` has k = 8 word .. 8 word + 7 of each 32, which are word `word` of two chunks
 * of 16 bytes: the first four in one and the others in the other, or even ones in one and odd ones in the other, as the
 * weights' codes become bytes (device/code_bytes.cuh).
 */
#ifndef CUMOE_FIXED_POINT_CUH
#define CUMOE_FIXED_POINT_CUH

#include "device/dtype.cuh"
#include "device/ptx.cuh"

enum { FIXED_RUN = 32 };

/* A float of 2^23 and more whose last bit is 1 and whose lower half is 0. */
constexpr float FIXED_ONE = 0x1.8p23f;

/* Two elements times `up` are the lower halves of what they become, with those of `one`. */
template <class X> DEVICE void fixed_pair(uint32_t pair, float up, float one, uint32_t &even, uint32_t &odd)
{
  const float2 v = unpack_pair<X>(pair);
  even = __float_as_uint(fmaf(v.x, up, one));
  odd = __float_as_uint(fmaf(v.y, up, one));
}

/* The first and second bytes of four. */
DEVICE void split_bytes(const uint32_t (&x)[4], uint32_t &low, uint32_t &high)
{
  const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
  low = __byte_perm(a, b, 0x5410);
  high = __byte_perm(a, b, 0x7632);
}

/* Of bf16. */
DEVICE uint32_t times_2_100(uint32_t pair)
{
  const float2 v = unpack_pair<bf16>(pair);
  return pack_pair<bf16>(v.x * 0x1p100f, v.y * 0x1p100f);
}
DEVICE uint4 times_2_100(const uint4 &v)
{
  return make_uint4(times_2_100(v.x), times_2_100(v.y), times_2_100(v.z), times_2_100(v.w));
}

/* Eight elements of run q: put(plane, chunk, four bytes). Those of lower bytes come out 128 too large. */
template <class X, bool IN_ORDER, class PUT> DEVICE void put_eight(const uint4 &v, float up, int q, PUT put)
{
  constexpr float ONE = FIXED_ONE + 128.f; /* upper bytes are as they should be */
  uint32_t even[4], odd[4], low, high;
  fixed_pair<X>(v.x, up, ONE, even[0], odd[0]);
  fixed_pair<X>(v.y, up, ONE, even[1], odd[1]);
  fixed_pair<X>(v.z, up, ONE, even[2], odd[2]);
  fixed_pair<X>(v.w, up, ONE, even[3], odd[3]);
  const uint32_t first[4] = {even[0], IN_ORDER ? odd[0] : even[1], IN_ORDER ? even[1] : even[2],
                             IN_ORDER ? odd[1] : even[3]},
                 second[4] = {IN_ORDER ? even[2] : odd[0], IN_ORDER ? odd[2] : odd[1], IN_ORDER ? even[3] : odd[2],
                              odd[3]};
  split_bytes(first, low, high);
  put(0, 2 * q, high);
  put(1, 2 * q, low ^ 0x80808080);
  split_bytes(second, low, high);
  put(0, 2 * q + 1, high);
  put(1, 2 * q + 1, low ^ 0x80808080);
}

/* A lane's elements of a row's slab, of each 32 k eight; the four lanes that have the slab are LANES_APART apart. Its
 * largest element is brought to 2^14 .. 127 * 257, two thirds of what it might be where that is too much. Returns the
 * slab's scale: NaN if an element is not finite. */
template <class X, int LANES_APART, bool IN_ORDER, class PUT> DEVICE float put_fixed(uint4 (&v)[4], PUT put)
{
  uint32_t most = 0;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const uint32_t pairs[4] = {v[q].x, v[q].y, v[q].z, v[q].w};
#pragma unroll
    for (int i = 0; i < 4; i++) most = max_halves(most, pairs[i] & 0x7fff7fff);
  }
  most = max_halves(most, __shfl_xor_sync(ALL_LANES, most, LANES_APART));
  most = max_halves(most, __shfl_xor_sync(ALL_LANES, most, 2 * LANES_APART));
  float largest = unpack_pair<X>(max(most >> 16, most & 0xffff)).x, small = 1.f;
  if (same_type<X, bf16> && largest < 0x1p-112f && largest > 0.f) { /* `up` would be too large */
#pragma unroll
    for (int q = 0; q < 4; q++) v[q] = times_2_100(v[q]);
    largest *= 0x1p100f, small = 0x1p-100f;
  }
  const int exponent = (int)(__float_as_uint(largest) >> 23),
            up = min(127 + 141 - exponent, 253); /* the exponent of a normal number, as 254 - up is */
  float times = __uint_as_float((uint32_t)up << 23),
        scale = __uint_as_float(exponent == 255 ? 0x7fc00000u : (uint32_t)(254 - up) << 23);
  if (largest * times > 127 * 257.f) times *= 1.f / 1.5f, scale *= 1.5f;
#pragma unroll
  for (int q = 0; q < 4; q++) put_eight<X, IN_ORDER>(v[q], times, q, put);
  return scale * small;
}

#endif
