/*
 * Operations of f32 that IEEE 754 rounds in one way only, for definitions that the CPU and every GPU share. None may be
 * contracted: on a GPU they are intrinsics, and the host compiles with -ffp-contract=off.
 */
#ifndef CUMOE_EXACT_H
#define CUMOE_EXACT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define EXACT static __device__ __forceinline__
EXACT float exact_add(float a, float b)
{
  return __fadd_rn(a, b);
}
EXACT float exact_mul(float a, float b)
{
  return __fmul_rn(a, b);
}
EXACT float exact_div(float a, float b)
{
  return __fdiv_rn(a, b);
}
EXACT float exact_root(float a)
{
  return __fsqrt_rn(a);
}
EXACT float exact_fma(float a, float b, float c)
{
  return __fmaf_rn(a, b, c);
}
EXACT uint32_t exact_bits(float f)
{
  return __float_as_uint(f);
}
EXACT float exact_float(uint32_t bits)
{
  return __uint_as_float(bits);
}
#else
#define EXACT static inline
EXACT float exact_add(float a, float b)
{
  return a + b;
}
EXACT float exact_mul(float a, float b)
{
  return a * b;
}
EXACT float exact_div(float a, float b)
{
  return a / b;
}
EXACT float exact_root(float a)
{
  return sqrtf(a);
}
EXACT float exact_fma(float a, float b, float c)
{
  return fmaf(a, b, c);
}
EXACT uint32_t exact_bits(float f)
{
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}
EXACT float exact_float(uint32_t bits)
{
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
#endif

#endif
