/* Scales and zero points of weights, as every kernel reads them (args.h: scale_matrix); activations as codes of a byte
 * (args.h: row_format). */
#ifndef CUMOE_QUANT_CUH
#define CUMOE_QUANT_CUH

#include "device/dtype.cuh"
#include "device/ptx.cuh"
#include "scales.h"

/* 2^(code - 127); 0 is 2^-127, 255 is NaN. */
DEVICE float e8m0_to_f32(uint32_t code)
{
  return __uint_as_float(code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : code << 23);
}

/* Any code, NaN included. */
DEVICE float e4m3_to_f32(uint32_t code)
{
  const uint32_t rest = code & 0x7f;
  const float magnitude = rest == 0x7f ? __uint_as_float(0x7fc00000u) : __uint_as_float(rest << 20) * 0x1p120f;
  return __uint_as_float(__float_as_uint(magnitude) | (code & 0x80) << 24);
}

/* A scale as it is stored. */
DEVICE float load_scale(const void *base, int64_t index, int dtype)
{
  if (dtype == DT_E8M0) return e8m0_to_f32(static_cast<const uint8_t *>(base)[index]);
  if (dtype == DT_E4M3) return e4m3_to_f32(static_cast<const uint8_t *>(base)[index]);
  return load_any(base, index, dtype);
}

/* The same in two parts, for those who load ahead. */
DEVICE uint32_t load_scale_bits(const void *base, int64_t index, int dtype)
{
  const int64_t bytes = scale_bytes(dtype);
  if (bytes == 4) return static_cast<const uint32_t *>(base)[index];
  if (bytes == 2) return static_cast<const uint16_t *>(base)[index];
  return static_cast<const uint8_t *>(base)[index];
}
DEVICE float scale_value(uint32_t bits, int dtype)
{
  if (dtype == DT_E8M0) return e8m0_to_f32(bits);
  if (dtype == DT_E4M3) return e4m3_to_f32(bits);
  if (dtype == DT_F16) return __half2float(__ushort_as_half((unsigned short)bits));
  return __uint_as_float(dtype == DT_BF16 ? bits << 16 : bits);
}

/* The scale of expert e's whole tensor besides those of blocks. */
DEVICE float global_scale(const expert_matrix &b, int half, int expert)
{
  if (!b.global[half]) return 1.f;
  const float value = b.global[half][expert * b.global_stride];
  return b.global_over ? 1.f / value : value;
}

/* Addresses, of kernels/scales.h. */
DEVICE int64_t scale_row(const scale_matrix &s, int half, int n)
{
  return scale_row(&s, half, n);
}
DEVICE int64_t scale_step(const scale_matrix &s, int k)
{
  return scale_step(&s, k);
}
DEVICE const void *scale_base(const scale_matrix &s, int half, int expert)
{
  return scale_base(&s, half, (int64_t)expert);
}

/* Where an expert's codes begin; its strides are in codes. */
DEVICE const char *code_base(const expert_matrix &b, int half, int expert, int bits)
{
  if (b.table[half]) return static_cast<const char *>(b.table[half][expert]);
  return static_cast<const char *>(b.base[half]) + expert * (b.expert_stride * bits / 8);
}

/* ---- activations: Q is e4m3 or s8 ---- */

/* The group of element k of a row of A, where groups of 128 begin with the row. */
DEVICE int row_group(const gemm_args &args, int k)
{
  return args.rows.group == ROWS_ONE_GROUP ? 0 : k / 128;
}

template <class Q> constexpr float LARGEST_CODE = same_type<Q, e4m3> ? 448.f : 127.f;

/* For the largest |x| of a group. e4m3 has a code for NaN, s8 a scale. */
template <class Q> DEVICE float larger(float a, float b)
{
  return same_type<Q, e4m3> ? fmaxf(a, b) : max_nan(a, b);
}

/* The same of e4m3, of two elements in a register each: a is magnitudes. */
template <class T> DEVICE uint32_t larger_pair(uint32_t a, uint32_t b);
template <> DEVICE uint32_t larger_pair<f16>(uint32_t a, uint32_t b)
{
  const __half2 most = __hmax2(*reinterpret_cast<__half2 *>(&a), __habs2(*reinterpret_cast<__half2 *>(&b)));
  return *reinterpret_cast<const uint32_t *>(&most);
}
template <> DEVICE uint32_t larger_pair<bf16>(uint32_t a, uint32_t b)
{
  const __nv_bfloat162 most =
      __hmax2(*reinterpret_cast<__nv_bfloat162 *>(&a), __habs2(*reinterpret_cast<__nv_bfloat162 *>(&b)));
  return *reinterpret_cast<const uint32_t *>(&most);
}

/* x / LARGEST_CODE, for x of ROWS_FLOOR up: correctly rounded, as the quotient's error is known exactly and the
 * reciprocal is; infinite where x is. A NaN stays one. */
template <class Q> DEVICE float over_largest_code(float x)
{
  constexpr float ONE_OVER = 1.f / LARGEST_CODE<Q>;
  const float about = x * ONE_OVER, rest = fmaf(-about, LARGEST_CODE<Q>, x), quotient = fmaf(rest, ONE_OVER, about);
  return rest == rest ? quotient : x;
}

/* The scale of a group whose largest |x| is `amax`. */
template <class Q> DEVICE float row_scale(const row_format &format, float amax)
{
  if (format.mode == ROWS_STATIC) return same_type<Q, s8> && amax != amax ? amax : *format.static_scale;
  const float scale = over_largest_code<Q>(larger<Q>(amax, ROWS_FLOOR));
  if (!format.power_of_two || scale != scale) return scale;
  return __uint_as_float(__float_as_uint(scale) + 0x007fffff & 0xff800000);
}

/* Four codes, that of x[0] in the low byte. inverse: 1 / scale, by IEEE division. */
template <class Q> DEVICE uint32_t quantize_four(const float *x, float inverse)
{
  if (same_type<Q, e4m3>)
    return cvt_e4m3x2(x[0] * inverse, x[1] * inverse) | cvt_e4m3x2(x[2] * inverse, x[3] * inverse) << 16;
  return cvt_s8(x[0] * inverse) | cvt_s8(x[1] * inverse) << 8 | cvt_s8(x[2] * inverse) << 16 |
         cvt_s8(x[3] * inverse) << 24;
}

#endif
