/*
 * Activations in fixed point: of each aligned 128 k of a row (a slab) multiples of 2^-14 of the power of two at or
 * below the largest, in 16 bits: 256 times an upper byte, and a lower one, both signed; a multiple's worth is the
 * slab's scale. So the largest may be 127 * 256 + 127; if a power of two brings it above that, they are multiples of
 * 1.5 times it, still less than 2^-14 of the largest.
 *
 * Order. A slab is two planes, of upper bytes and of lower ones, each of as many bytes as the row has k there. Of each
 * 32 k the even ones come first, then the odd ones: two chunks of 16 bytes. Four lanes have a slab of a row: lane
 * `word` has k = 8 word .. 8 word + 7 of each 32, which are word `word` of both chunks.
 */
#ifndef CUMOE_FIXED_POINT_CUH
#define CUMOE_FIXED_POINT_CUH

#include "device/dtype.cuh"
#include "device/ptx.cuh"

enum { FIXED_RUN = 32 };

/* A float of 2^23 and more whose last bit is 1 and whose lower half is 128: with it lower bytes come out 128 more,
 * upper ones as they should be. */
constexpr float FIXED_ONE = 0x1.8p23f + 128.f;

/* Two elements times `up`, and FIXED_ONE, are the lower halves of what they become. */
template <class X> DEVICE void fixed_pair(uint32_t pair, float up, uint32_t &even, uint32_t &odd)
{
  const float2 v = unpack_pair<X>(pair);
  even = __float_as_uint(fmaf(v.x, up, FIXED_ONE));
  odd = __float_as_uint(fmaf(v.y, up, FIXED_ONE));
}

/* The first and second bytes of four. */
DEVICE void split_bytes(const uint32_t (&x)[4], uint32_t &low, uint32_t &high)
{
  const uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[2], x[3], 0x5140);
  low = __byte_perm(a, b, 0x5410);
  high = __byte_perm(a, b, 0x7632);
}

/* Eight elements of run q: put(plane, chunk, four bytes). */
template <class X, class PUT> DEVICE void put_eight(const uint4 &v, float up, int q, PUT put)
{
  uint32_t even[4], odd[4], low, high;
  fixed_pair<X>(v.x, up, even[0], odd[0]);
  fixed_pair<X>(v.y, up, even[1], odd[1]);
  fixed_pair<X>(v.z, up, even[2], odd[2]);
  fixed_pair<X>(v.w, up, even[3], odd[3]);
  split_bytes(even, low, high);
  put(0, 2 * q, high);
  put(1, 2 * q, low ^ 0x80808080);
  split_bytes(odd, low, high);
  put(0, 2 * q + 1, high);
  put(1, 2 * q + 1, low ^ 0x80808080);
}

/* What brings the largest element of a slab to 2^14 .. 2^15, and a multiple's worth: NaN if an element is not
 * finite. */
struct fixed_unit {
  float times, worth;

  explicit DEVICE fixed_unit(float most)
  {
    const int exponent = (int)(__float_as_uint(most) >> 23),
              up = min(127 + 141 - exponent, 253); /* the exponent of a normal number, as 254 - up is */
    times = __uint_as_float((uint32_t)up << 23);
    worth = __uint_as_float(exponent == 255 ? 0x7fc00000u : (uint32_t)(254 - up) << 23);
    if (most * times > 127 * 257.f) times *= 1.f / 1.5f, worth *= 1.5f;
  }
};

/* The largest element of a row's slab, without its sign. A lane has eight of each 32 k; the four lanes that have the
 * slab are LANES_APART apart. */
template <int LANES_APART> DEVICE uint32_t largest_of_slab(const uint4 (&v)[4])
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
  return max(most >> 16, most & 0xffff);
}

/* A slab, of which lanes have as much as in largest_of_slab. Returns its scale. */
template <class X, int LANES_APART, class PUT> DEVICE float put_fixed(const uint4 (&v)[4], PUT put)
{
  const fixed_unit unit(unpack_pair<X>(largest_of_slab<LANES_APART>(v)).x);
#pragma unroll
  for (int q = 0; q < 4; q++) put_eight<X>(v[q], unit.times, q, put);
  return unit.worth;
}

#endif
