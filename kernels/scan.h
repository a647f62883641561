/* What is odd about weights (args.h: scan_args): one definition for the CPU and every GPU. */
#ifndef CUMOE_SCAN_H
#define CUMOE_SCAN_H

#include "encode.h"

typedef struct scan_counts {
  uint32_t field[SCAN_FIELDS];
} scan_counts;

/* Of the channel's half of its expert. */
typedef struct scan_place {
  int32_t e, h, n;
} scan_place;

EXACT scan_place scan_unit(const scan_args *a, int64_t unit)
{
  const int64_t rest = unit / a->n;
  const scan_place p = {(int32_t)(rest / a->halves), (int32_t)(rest % a->halves), (int32_t)(unit % a->n)};
  return p;
}

EXACT float e2m1_value(uint32_t code)
{
  const uint32_t size = code & 7;
  const float value = size < 4 ? (float)size * .5f : size < 6 ? (float)size - 2.f : (float)size * 2.f - 8.f;
  return code & 8 ? -value : value;
}

/* Element i as its code says; `zero` is taken off. */
EXACT float code_at(const void *p, int64_t i, int32_t format, int32_t zero)
{
  const uint8_t *bytes = (const uint8_t *)p;
  if (format == FORMAT_bf16) return exact_float((uint32_t)((const uint16_t *)p)[i] << 16);
  if (format == FORMAT_f16) return exact_from_f16(((const uint16_t *)p)[i]);
  if (format == FORMAT_f32) return ((const float *)p)[i];
  if (format == FORMAT_e4m3) return e4m3_value(bytes[i]);
  if (format == FORMAT_s8) return (float)((zero == 128 ? (int32_t)bytes[i] : (int32_t)(int8_t)bytes[i]) - zero);
  const uint32_t nibble = bytes[i / 2] >> i % 2 * 4 & 15;
  return format == FORMAT_u4 || format == FORMAT_af4 ? (float)((int32_t)nibble - zero) : e2m1_value(nibble);
}

EXACT void scan_scale(scan_counts *c, float scale, int32_t dtype)
{
  const float least = dtype == DT_F16 ? 0x1p-14f : dtype == DT_E4M3 ? 0.f : 0x1p-126f;
  const int finite = fabsf(scale) <= ENCODE_LARGEST;
  c->field[SCAN_SCALE_NOT_FINITE] += !finite;
  c->field[SCAN_SCALE_ZERO] += scale == 0;
  c->field[SCAN_SCALE_NEGATIVE] += finite && scale < 0;
  c->field[SCAN_SCALE_SUBNORMAL] += scale != 0 && fabsf(scale) < least;
  c->field[SCAN_SCALE_LARGE] += dtype == DT_E8M0 && finite && scale > 2.f;
}

/* Whether k is the first of the channel with its scale. */
EXACT int first_of_block(const scale_matrix *s, int32_t k)
{
  return k == 0 || (s->k_stride && (k + s->k_origin) % s->block_k == 0);
}

EXACT const char *scan_scale_at(const scan_args *a, scan_place p, int32_t k)
{
  return scale_at(&a->b.scale, p.h, p.e, p.n, k);
}

/* Whether nobody before this channel has counted its scale: not the channel ahead, and, where blocks run from one half
 * into the other or channels alternate, not the gate's. */
EXACT int first_with_scale(const scan_args *a, scan_place p, const char *scale, int32_t k)
{
  const scan_place before = {p.e, p.h, p.n - 1}, same = {p.e, 0, p.n}, first = {p.e, 0, 0}, last = {p.e, 0, a->n - 1};
  if (p.n > 0 && scan_scale_at(a, before, k) == scale) return 0;
  if (p.h == 0) return 1;
  return scan_scale_at(a, same, k) != scale && scan_scale_at(a, first, k) != scale &&
         scan_scale_at(a, last, k) != scale;
}

EXACT float global_at(const expert_matrix *b, scan_place p)
{
  return b->global[p.h] ? b->global[p.h][p.e * b->global_stride] : 1.f;
}

EXACT void scan_weight(scan_counts *c, float w)
{
  const float size = fabsf(w);
  const uint32_t bits = exact_bits(size);
  c->field[SCAN_PAST_F16] += size >= 65520.f;
  c->field[SCAN_PAST_BF16] += size >= 0x1.ffp127f;
  if (size <= ENCODE_LARGEST && bits > c->field[SCAN_LARGEST]) c->field[SCAN_LARGEST] = bits;
}

/* Elements lane, lane + lanes, ... of a channel. */
EXACT void scan_channel(const scan_args *a, scan_place p, int32_t lane, int32_t lanes, scan_counts *c)
{
  const expert_matrix *b = &a->b;
  const int scaled = b->scale.dtype != DT_NONE;
  const float global = global_at(b, p);
  const void *codes = b->table[p.h] ? b->table[p.h][p.e] : b->base[p.h];
  const int64_t first = (b->table[p.h] ? 0 : p.e * b->expert_stride) + p.n * b->n_stride;
  if (b->global[p.h] && p.n == 0 && lane == 0 && (p.h == 0 || b->global[1] != b->global[0]))
    scan_scale(c, global, DT_F32);
  for (int32_t k = lane; k < a->k; k += lanes) {
    float scale = 1.f, value = 0.f;
    const int32_t zero = scaled ? zero_point(b, p.h, p.e, p.n, k) : 0;
    if (scaled) {
      const char *stored = scan_scale_at(a, p, k);
      const int affine = b->format == FORMAT_af4;
      scale = read_scale(stored, b->scale.dtype);
      if (affine) value = read_scale(value_at(b, p.h, p.e, p.n, k), b->scale.dtype);
      if (first_of_block(&b->scale, k)) {
        c->field[SCAN_ZERO_POINT] += b->format == FORMAT_u4 && (zero < 0 || zero > 15);
        if (first_with_scale(a, p, stored, k)) {
          scan_scale(c, scale, b->scale.dtype);
          c->field[SCAN_SCALE_NOT_FINITE] += !(fabsf(value) <= ENCODE_LARGEST);
        }
      }
    }
    const float code = code_at(codes, first + k * b->k_stride, b->format, zero);
    c->field[SCAN_CODES] += !(fabsf(code) <= ENCODE_LARGEST);
    const float w = exact_fma(code, scale, value);
    scan_weight(c, b->global_over ? exact_div(w, global) : exact_mul(w, global));
  }
}

#endif
