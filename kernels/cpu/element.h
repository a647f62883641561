/*
 * Elements of f32, f16 and bf16 for the CPU kernels: the type is a run-time value. Conversions round to nearest
 * even; a NaN stays a NaN. Sums arrive here in double and are rounded once, never first to float.
 */
#ifndef CUMOE_CPU_ELEMENT_H
#define CUMOE_CPU_ELEMENT_H

#include <math.h>
#include <string.h>
#include "../args.h"

static inline uint32_t float_bits(float f)
{
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

static inline float bits_float(uint32_t bits)
{
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline float f16_to_float(uint16_t h)
{
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00) return bits_float(sign | 0x7f800000u | rest << 13);
  if (rest >= 0x0400) return bits_float(sign | ((rest << 13) + (112u << 23)));
  float magnitude = (float)rest * 0x1p-24f; /* subnormal: exact */
  return sign ? -magnitude : magnitude;
}

static inline uint16_t float_to_f16(float f)
{
  uint32_t bits = float_bits(f), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
  if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* from 65520 on the nearest is infinity */
  if (rest < 0x38800000u) { /* below 2^-14 one f16 step is 2^-24, the last place of a float in [0.5, 1) */
    float shifted = bits_float(rest) + 0.5f;
    return (uint16_t)(sign | (float_bits(shifted) - 0x3f000000u));
  }
  uint32_t odd = rest >> 13 & 1u;
  return (uint16_t)(sign | ((rest - (112u << 23) + 0xfffu + odd) >> 13));
}

static inline float bf16_to_float(uint16_t b)
{
  return bits_float((uint32_t)b << 16);
}

static inline uint16_t float_to_bf16(float f)
{
  uint32_t bits = float_bits(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Rounds to odd: the float still tells on which side of a 16-bit midpoint the double lay. */
static inline float double_to_odd(double d)
{
  float f = (float)d;
  if ((double)f == d || d != d) return f;
  uint32_t bits = float_bits(f);
  double distance = (double)f - d;
  if ((distance > 0) == (d > 0)) bits--; /* rounded away from zero: step back */
  return bits_float(bits | 1u);
}

/* What the contract sums in float may be more exact here, but not larger. */
static inline double f32_range(double d)
{
  return d >= 0x1.ffffffp127 ? INFINITY : d <= -0x1.ffffffp127 ? -INFINITY : d;
}

/* ---- by format: decode_NAME and encode_NAME for every row of formats.def that has them ---- */

static inline float decode_f32(const void *base, int64_t i)
{
  return ((const float *)base)[i];
}
static inline float decode_f16(const void *base, int64_t i)
{
  return f16_to_float(((const uint16_t *)base)[i]);
}
static inline float decode_bf16(const void *base, int64_t i)
{
  return bf16_to_float(((const uint16_t *)base)[i]);
}

/* 2^exponent, -126 .. 127: ldexpf takes longer than all else of a weight. */
static inline float power_of_two(int exponent)
{
  return bits_float((uint32_t)(exponent + 127) << 23);
}

/* Codes, as the definition of their element says, not as kernels do it. */
static inline float decode_e4m3(const void *base, int64_t i)
{
  const uint8_t code = ((const uint8_t *)base)[i];
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const float magnitude = (float)(exponent ? 8 + mantissa : mantissa) * power_of_two((exponent ? exponent : 1) - 10);
  return bits_float(float_bits(magnitude) | (uint32_t)(code & 128) << 24); /* no branch: signs are random */
}
static inline float decode_s8(const void *base, int64_t i)
{
  return ((const int8_t *)base)[i];
}
static inline uint8_t nibble(const void *base, int64_t i)
{
  return ((const uint8_t *)base)[i / 2] >> i % 2 * 4 & 15;
}
static inline float decode_u4(const void *base, int64_t i)
{
  return nibble(base, i);
}
static inline float decode_af4(const void *base, int64_t i)
{
  return nibble(base, i);
}
static inline float decode_mx4(const void *base, int64_t i)
{
  static const float values[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  return values[nibble(base, i)];
}
static inline float decode_nv4(const void *base, int64_t i)
{
  return decode_mx4(base, i);
}

static inline void encode_f32(void *base, int64_t i, double value)
{
  ((float *)base)[i] = (float)value;
}
static inline void encode_f16(void *base, int64_t i, double value)
{
  ((uint16_t *)base)[i] = float_to_f16(double_to_odd(value));
}
static inline void encode_bf16(void *base, int64_t i, double value)
{
  ((uint16_t *)base)[i] = float_to_bf16(double_to_odd(value));
}

/* Of a dense type; NaN of any other, which the checks let nobody pass. */
static inline float load_element(const void *base, int64_t i, int dtype)
{
  float value = NAN;
  switch (dense_format(dtype)) {
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)                                                     \
  case FORMAT_##name:                                                                                                  \
    value = decode_##name(base, i);                                                                                    \
    break;
#include "../formats.def"
  case FORMAT_none: break;
  }
  return value;
}

static inline void store_element(void *base, int64_t i, int dtype, double value)
{
  const weight_format format = dense_format(dtype);
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)
#define DENSE(name, DTYPE, BITS)                                                                                       \
  if (format == FORMAT_##name) encode_##name(base, i, value);
#include "../formats.def"
}

/* dst[i * dst_stride] = base[first + i * stride], the format decided once a run. */
static inline void load_run(double *dst, int64_t dst_stride, const void *base, int64_t first, int64_t stride,
                            int64_t count, weight_format format)
{
  switch (format) {
#define FORMAT(name, DTYPE, BITS, K_PER_SCALE, SCALE, ACCUMULATOR)                                                     \
  case FORMAT_##name:                                                                                                  \
    for (int64_t i = 0; i < count; i++) dst[i * dst_stride] = decode_##name(base, first + i * stride);                 \
    break;
#include "../formats.def"
  case FORMAT_none: break;
  }
}

#endif
