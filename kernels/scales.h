/* Where the scale, the zero point and the value of a weight lie (args.h: scale_matrix): one definition for the CPU and
 * every GPU. */
#ifndef CUMOE_SCALES_H
#define CUMOE_SCALES_H

#include "args.h"
#include "exact.h"

EXACT int64_t scale_bytes(int32_t dtype)
{
  return dtype == DT_F32 ? 4 : dtype == DT_F16 || dtype == DT_BF16 ? 2 : 1;
}

/* Where the scales of channel n of an expert's half begin: those of k at index scale_step(s, k). */
EXACT int64_t scale_row(const scale_matrix *s, int32_t half, int32_t n)
{
  return (int64_t)((n + s->n_origin[half]) / s->block_n) * s->n_stride;
}
EXACT int64_t scale_step(const scale_matrix *s, int32_t k)
{
  return (int64_t)((k + s->k_origin) / s->block_k) * s->k_stride;
}

/* A stage of k of e4m3's products with tokens as rows (token_tile.cuh); channels of gate or of up beside one another;
 * channels of h that up has at once. */
enum { CODES_K = 128, CODES_CHANNELS = 64, CODES_GROUP = 128 };

/* Whether `block_k` elements of runs of `channels`, counted from multiples of them on, have one scale; or a channel. */
EXACT int32_t scale_of_blocks(const scale_matrix *s, int32_t half, int32_t block_k, int32_t channels)
{
  if (s->dtype == DT_NONE || s->k_stride == 0) return 1;
  return s->block_k == block_k && (s->n_stride == 0 || (s->block_n | s->n_origin[half]) % channels == 0);
}

/* Likewise in both halves, or in the only one. */
EXACT int32_t scales_of_blocks(const scale_matrix *s, int32_t two, int32_t block_k, int32_t channels)
{
  return scale_of_blocks(s, 0, block_k, channels) && (!two || scale_of_blocks(s, 1, block_k, channels));
}

/* Bytes differ by type, so this is a pointer to none. */
EXACT const void *scale_base(const scale_matrix *s, int32_t half, int64_t expert)
{
  if (s->table[half]) return s->table[half][expert];
  return (const char *)s->base[half] + expert * s->expert_stride * scale_bytes(s->dtype);
}

/* The stored scale of element k. */
EXACT const char *scale_at(const scale_matrix *s, int32_t half, int64_t expert, int32_t n, int32_t k)
{
  return (const char *)scale_base(s, half, expert) + (scale_row(s, half, n) + scale_step(s, k)) * scale_bytes(s->dtype);
}

/* An expert's zero points; NULL: there are none. */
EXACT const uint32_t *zero_words(const expert_matrix *b, int32_t half, int64_t expert)
{
  const zero_matrix *z = &b->zero;
  if (z->table[half]) return z->table[half][expert];
  return z->base[half] ? z->base[half] + expert * z->expert_stride : 0;
}

/* Offset and zero point of one weight of u4 or s8; those of af4 have the offset alone. */
EXACT int32_t zero_point(const expert_matrix *b, int32_t half, int64_t expert, int32_t n, int32_t k)
{
  const zero_matrix *z = &b->zero;
  const uint32_t *words = b->format == FORMAT_af4 ? 0 : zero_words(b, half, expert);
  if (!words) return b->offset;
  const uint32_t word =
      words[n / 8 * z->n_stride + (int64_t)((k + b->scale.k_origin) / b->scale.block_k) * z->k_stride];
  return b->offset + (int32_t)(word >> n % 8 * 4 & 15) + z->add;
}

/* The values of af4, of the scales' type, as an expert's begin; those of a channel and a k lie as far on as its scale
 * does, but for the strides. */
EXACT const char *value_base(const expert_matrix *b, int32_t half, int64_t expert)
{
  const zero_matrix *z = &b->zero;
  if (z->table[half]) return (const char *)z->table[half][expert];
  return (const char *)z->base[half] + expert * z->expert_stride * scale_bytes(b->scale.dtype);
}
EXACT int64_t value_row(const expert_matrix *b, int32_t half, int32_t n)
{
  return (int64_t)((n + b->scale.n_origin[half]) / b->scale.block_n) * b->zero.n_stride;
}
EXACT const char *value_at(const expert_matrix *b, int32_t half, int64_t expert, int32_t n, int32_t k)
{
  const int64_t step = (int64_t)((k + b->scale.k_origin) / b->scale.block_k) * b->zero.k_stride;
  return value_base(b, half, expert) + (value_row(b, half, n) + step) * scale_bytes(b->scale.dtype);
}

#endif
