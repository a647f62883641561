/*
 * How weights become codes (args.h: encode_args): one definition for the CPU and every GPU, bit for bit. Extremes of a
 * block -> its scale, rounded to the type that is stored -> codes of weight / scale, to nearest, ties to even.
 */
#ifndef CUMOE_ENCODE_H
#define CUMOE_ENCODE_H

#include "scales.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
EXACT uint16_t exact_f16(float f)
{
  return __half_as_ushort(__float2half_rn(f));
}
EXACT float exact_from_f16(uint16_t h)
{
  return __half2float(__ushort_as_half(h));
}
#else
#include "cpu/element.h"
EXACT uint16_t exact_f16(float f)
{
  return float_to_f16(f);
}
EXACT float exact_from_f16(uint16_t h)
{
  return f16_to_float(h);
}
#endif

#define ENCODE_LARGEST 3.40282347e38f /* f32's */

/* Of the weights of a block, and 0. */
typedef struct extremes {
  float low, high;
  int nan; /* one of them is NaN */
} extremes;

EXACT extremes extremes_none(void)
{
  const extremes e = {0, 0, 0};
  return e;
}

EXACT void extremes_add(extremes *e, float w)
{
  e->low = w < e->low ? w : e->low;
  e->high = w > e->high ? w : e->high;
  e->nan |= w != w;
}

EXACT float exact_within(float f, float low, float high)
{
  return f < low ? low : f > high ? high : f;
}

/* Infinities count as the largest float. */
EXACT float extremes_size(extremes e)
{
  return exact_within(e.high > -e.low ? e.high : -e.low, 0, ENCODE_LARGEST);
}

/* ---- codes of one weight; `q` is weight / scale ---- */

/* To nearest even; past the largest code the largest, NaN stays one. */
EXACT uint8_t e4m3_of(float q)
{
  const uint8_t sign = exact_bits(q) >> 24 & 0x80;
  const uint32_t rest = exact_bits(q) & 0x7fffffffu;
  if (rest > 0x7f800000u) return 0x7f;
  if (rest >= 0x43e00000u) return sign | 0x7e; /* 448 */
  if (rest < 0x3c800000u) { /* below 2^-6 one step is 2^-9, the last place of a float in [2^14, 2^15) */
    const float shifted = exact_add(exact_float(rest), 16384.f);
    return (uint8_t)(sign | (exact_bits(shifted) - 0x46800000u));
  }
  return (uint8_t)(sign | (((rest + 0x7ffffu + (rest >> 20 & 1)) >> 20) - (120u << 3)));
}

/* Halfway the code that is even. NaN is 0. */
EXACT uint8_t e2m1_of(float q)
{
  const float size = exact_within(fabsf(q), 0, 6.f);
  const uint32_t bits = exact_bits(size);
  /* Below 1 steps of .5, which is the last place of 2^22; above a mantissa of one bit. */
  const uint32_t code = size < 1 ? exact_bits(exact_add(size, 4194304.f)) - 0x4a800000u
                                 : ((bits + 0x1fffffu + (bits >> 22 & 1)) >> 22) - (126u << 1);
  return (uint8_t)(q != q ? 0 : code | (exact_bits(q) >> 28 & 8));
}

/* A whole number; NaN is 0. */
EXACT int32_t whole_of(float q, float low, float high)
{
  return q != q ? 0 : (int32_t)rintf(exact_within(q, low, high));
}

/* ---- scales ---- */

EXACT float e4m3_value(uint8_t code)
{
  const uint32_t rest = code & 0x7f;
  const float size = rest == 0x7f ? exact_float(0x7fc00000u) : exact_mul(exact_float(rest << 20), 0x1p120f);
  return code & 0x80 ? -size : size;
}

/* A scale as it is stored. */
EXACT float read_scale(const char *p, int32_t dtype)
{
  const uint8_t code = *(const uint8_t *)p;
  if (dtype == DT_F32) return *(const float *)p;
  if (dtype == DT_F16) return exact_from_f16(*(const uint16_t *)p);
  if (dtype == DT_BF16) return exact_float((uint32_t) * (const uint16_t *)p << 16);
  if (dtype == DT_E4M3) return e4m3_value(code);
  return exact_float(code == 255 ? 0x7fc00000u : code ? (uint32_t)code << 23 : 0x00400000u);
}

/* A scale as it is stored, and what that means. */
typedef struct stored_scale {
  uint32_t bits;
  float value;
} stored_scale;

/* Never 0, and of f32, f16 and bf16 never subnormal. NaN stays one; E8M0's are whole powers of two already. */
EXACT stored_scale store_scale(float scale, int32_t dtype)
{
  stored_scale s = {0, 0};
  if (dtype == DT_F32) {
    s.value = exact_within(scale, 0x1p-126f, ENCODE_LARGEST);
    s.bits = exact_bits(s.value);
  } else if (dtype == DT_F16) {
    s.bits = scale != scale ? 0x7e00 : exact_f16(exact_within(scale, 0x1p-14f, 65504.f));
    s.value = exact_from_f16((uint16_t)s.bits);
  } else if (dtype == DT_BF16) {
    const uint32_t bits = exact_bits(exact_within(scale, 0x1p-126f, 0x1.fep127f));
    s.bits = scale != scale ? 0x7fc0 : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    s.value = exact_float(s.bits << 16);
  } else if (dtype == DT_E4M3) {
    s.bits = e4m3_of(exact_within(scale, 0x1p-9f, 448.f));
    s.value = e4m3_value((uint8_t)s.bits);
  } else {
    s.bits = scale != scale ? 255 : exact_bits(scale) >> 23;
    s.value = exact_float(scale != scale ? 0x7fc00000u : s.bits ? s.bits << 23 : 0x00400000u);
  }
  return s;
}

/* Of one expert's half: block scales use all of e4m3 then. */
EXACT float encode_global(const encode_args *a, extremes e)
{
  const float size = extremes_size(e);
  if (size == 0) return 1;
  return exact_within(a->global_over ? exact_div(2688.f, size) : exact_div(size, 2688.f), 0x1p-126f, ENCODE_LARGEST);
}

/* The largest code, as a value; the smaller one of both signs. With zero points codes span the range. */
EXACT float largest_code(const encode_args *a)
{
  if (a->format == FORMAT_e4m3) return 448.f;
  if (a->format == FORMAT_s8) return 127.f;
  if (a->format == FORMAT_u4) return a->zero ? 15.f : (float)(a->offset < 8 ? a->offset : 15 - a->offset);
  return 6.f;
}

/*
 * The scale of a block. A power of two is rounded up for e4m3, so that nothing saturates (DeepSeek); of e2m1 it is OCP
 * MX's: the largest power of two up to amax, / 4, and what lies past 6 of it becomes 6. All zero: 1.
 */
EXACT stored_scale encode_scale(const encode_args *a, extremes e, float global)
{
  const float size = a->zero ? exact_within(exact_add(e.high, -e.low), 0, ENCODE_LARGEST) : extremes_size(e);
  if (e.nan && a->format != FORMAT_e4m3) return store_scale(exact_float(0x7fc00000u), a->scale_dtype);
  if (size == 0) return store_scale(1, a->scale_dtype);
  if (a->format == FORMAT_mx4) {
    const uint32_t exponent = exact_bits(size) >> 23;
    return store_scale(exact_float(exponent > 2 ? (exponent - 2) << 23 : 0), DT_E8M0);
  }
  const float scale = exact_div(size, largest_code(a));
  if (a->scale_dtype == DT_E8M0)
    return store_scale(exact_float((exact_bits(scale) + 0x7fffffu) & 0x7f800000u), DT_E8M0);
  if (!a->global) return store_scale(scale, a->scale_dtype);
  return store_scale(a->global_over ? exact_mul(scale, global) : exact_div(scale, global), a->scale_dtype);
}

/* What weights are divided by. */
EXACT float encode_factor(const encode_args *a, float scale, float global)
{
  if (!a->global) return scale;
  return a->global_over ? exact_div(scale, global) : exact_mul(scale, global);
}

/* The whole zero point, offset and zero_add included: what weight 0 becomes. The stored one fits 4 bits. */
EXACT int32_t encode_zero(const encode_args *a, extremes e, float factor)
{
  const int32_t stored = a->offset + a->zero_add, low = stored > 0 ? stored : 0, high = stored < 0 ? stored + 15 : 15;
  if (!a->zero) return a->offset;
  return factor != factor ? low : whole_of(exact_div(-e.low, factor), (float)low, (float)high);
}

/* zero: encode_zero's. */
EXACT uint8_t encode_weight(int32_t format, float w, float factor, int32_t zero)
{
  const float q = exact_div(w, factor);
  if (format == FORMAT_e4m3) return e4m3_of(q);
  if (format == FORMAT_s8) return (uint8_t)(whole_of(q, -127.f, 127.f) + zero);
  if (format == FORMAT_u4) return (uint8_t)(whole_of(q, (float)-zero, (float)(15 - zero)) + zero);
  return e2m1_of(q);
}

/* ---- where blocks lie ---- */

enum { ENCODE_CELL = 16 /* elements of a row that no block divides */ };

/* Channels n .. n_end - 1 of expert e, elements k .. k_end - 1; of part p, scales at [row, block]. */
typedef struct encode_block {
  int64_t row;
  int32_t e, n, n_end, k, k_end, block;
} encode_block;

/* The range along k of block `block`. */
EXACT void encode_k_range(const encode_args *a, encode_block *b)
{
  const int64_t begin = (int64_t)b->block * a->block_k - a->k_origin, end = begin + a->block_k;
  b->k = begin > 0 ? (int32_t)begin : 0;
  b->k_end = end < a->in ? (int32_t)end : a->in;
}

/* The row of scales of channel n. */
EXACT int64_t encode_scale_row(const encode_args *a, int32_t e, int32_t n)
{
  const int32_t part = n / (a->out / a->parts), first = part * (a->out / a->parts);
  return ((int64_t)e * a->parts + part) * a->n_blocks + (n - first + a->n_origin) / a->block_n;
}

/* Division of 64 bits is slow on a GPU, and hardly ever needed. */
EXACT int64_t quotient_of(int64_t a, int32_t b)
{
  return a >> 31 == 0 ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

/* A block of a slice before this one, whose scale is not this one's, has no channels. */
EXACT encode_block encode_present(encode_block b)
{
  if (b.k >= b.k_end) b.n_end = b.n;
  return b;
}

EXACT encode_block encode_task(const encode_args *a, int64_t task)
{
  const int32_t rows = ENCODE_ROWS(a), channels = ENCODE_CHANNELS(a);
  const int64_t line = quotient_of(task, a->k_blocks), e = quotient_of(line, rows);
  const int32_t at = (int32_t)(line - e * rows);
  encode_block b;
  b.block = (int32_t)(task - line * a->k_blocks);
  b.e = (int32_t)e;
  encode_k_range(a, &b);
  if (a->zero || ENCODE_SCALES_FIRST(a)) {
    b.n = at * channels;
    b.n_end = b.n + channels < a->out ? b.n + channels : a->out;
  } else {
    const int32_t part = at / a->n_blocks, of_part = a->out / a->parts;
    const int64_t begin = (int64_t)(at % a->n_blocks) * a->block_n - a->n_origin, end = begin + a->block_n;
    b.n = part * of_part + (begin > 0 ? (int32_t)begin : 0);
    b.n_end = part * of_part + (end < of_part ? (int32_t)end : of_part);
  }
  b.row = encode_scale_row(a, b.e, b.n);
  return encode_present(b);
}

/* What task `task` of encode_scales is the scale of: channels n, n + step, ... */
EXACT encode_block encode_scales_task(const encode_args *a, int64_t task, int32_t *step)
{
  encode_block b;
  const int32_t each = a->global ? a->halves : a->parts * a->k_blocks, at = (int32_t)(task % each);
  b.e = (int32_t)(task / each);
  b.block = a->global ? 0 : at % a->k_blocks;
  *step = a->global && a->halves == 2 && a->interleaved ? 2 : 1;
  if (a->global) {
    const int32_t place = at ^ a->up_first;
    b.n = *step == 2 ? place : place * (a->out / a->halves);
    b.n_end = *step == 2 ? a->out : b.n + a->out / a->halves;
    b.row = at;
    b.k = 0;
    b.k_end = a->in;
    return b;
  }
  b.n = at / a->k_blocks * (a->out / a->parts);
  b.n_end = b.n + a->out / a->parts;
  b.row = encode_scale_row(a, b.e, b.n);
  encode_k_range(a, &b);
  return encode_present(b);
}

EXACT void encode_store_scale(const encode_args *a, const encode_block *b, int64_t row, stored_scale s)
{
  const int64_t at = row * a->scale_ld + b->block;
  if (a->scale_dtype == DT_F32)
    ((uint32_t *)a->scale)[at] = s.bits;
  else if (a->scale_dtype == DT_F16 || a->scale_dtype == DT_BF16)
    ((uint16_t *)a->scale)[at] = (uint16_t)s.bits;
  else
    ((uint8_t *)a->scale)[at] = (uint8_t)s.bits;
}

/* The end of a task of encode_scales. */
EXACT void encode_store_scales(const encode_args *a, const encode_block *b, extremes e)
{
  if (a->global)
    a->global[b->e * a->global_ld + b->row] = encode_global(a, e);
  else
    encode_store_scale(a, b, b->row, encode_scale(a, e, 1));
}

EXACT float encode_read_scale(const encode_args *a, const encode_block *b)
{
  const int64_t at = b->row * a->scale_ld + b->block;
  return read_scale((const char *)a->scale + at * scale_bytes(a->scale_dtype), a->scale_dtype);
}

/* Column of `global` that channel n is multiplied with. */
EXACT int32_t encode_half(const encode_args *a, int32_t n)
{
  if (a->halves == 1) return 0;
  return (a->interleaved ? n % 2 : n / (a->out / 2)) ^ a->up_first;
}

#endif
