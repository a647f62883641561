/* Activations in fixed point, as bytes: of gemm/fixed.cuh and few/fixed.cuh. */
#ifndef CUMOE_FIXED_POINT_CUH
#define CUMOE_FIXED_POINT_CUH

#include "device/dtype.cuh"

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

#endif
