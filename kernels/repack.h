/* Weights moved to where kernels read them (args.h: repack_args): one definition for the CPU and every GPU. */
#ifndef CUMOE_REPACK_H
#define CUMOE_REPACK_H

#include "encode.h"

/* Sixteen bytes of codes: of channel n of expert e, from element k on. */
typedef struct repack_unit {
  int32_t e, n, k;
} repack_unit;

EXACT repack_unit repack_unit_of(const repack_args *a, int64_t unit)
{
  const int32_t cells = a->in / REPACK_CELL(a);
  const int64_t rest = quotient_of(unit, a->out), e = quotient_of(rest, cells);
  const repack_unit u = {(int32_t)e, (int32_t)(unit - rest * a->out), (int32_t)(rest - e * cells) * REPACK_CELL(a)};
  return u;
}

/* Code `at` along the packed axis of a row of words. Words begin with their low byte. */
EXACT uint32_t code_of_word(const uint8_t *row, int32_t at, int32_t word, int32_t bits, uint32_t places)
{
  const int32_t in_word = at % word, bit = (at - in_word + (int32_t)(places >> 4 * in_word & 15)) * bits;
  return (uint32_t)row[bit / 8] >> bit % 8 & ((1u << bits) - 1);
}

/* ---- blocks of GGUF: a half, two arrays of nibbles, ... (ggml-common.h) ---- */

EXACT int32_t ggml_block(int32_t type) /* weights */
{
  return type == GGML_Q6_K || type == GGML_Q4_K ? 256 : 32;
}
EXACT int32_t ggml_bytes(int32_t type)
{
  if (type == GGML_Q6_K) return 210;
  if (type == GGML_Q4_K) return 144;
  return type == GGML_Q8_0 ? 34 : type == GGML_Q4_1 ? 20 : type == GGML_Q4_0 ? 18 : 17;
}

/* Element i of a block. */
EXACT uint32_t ggml_code(const uint8_t *block, int32_t i, int32_t type)
{
  if (type == GGML_Q8_0) return block[2 + i];
  if (type == GGML_Q6_K) {
    const int32_t half = i / 128, quarter = i % 128 / 32, at = i % 32;
    const uint32_t low = block[half * 64 + quarter % 2 * 32 + at] >> quarter / 2 * 4 & 15;
    const uint32_t high = block[128 + half * 32 + at] >> 2 * quarter & 3;
    return ((low | high << 4) - 32u) & 255u;
  }
  if (type == GGML_Q4_K) return block[16 + i / 64 * 32 + i % 32] >> i % 64 / 32 * 4 & 15;
  const uint8_t *nibbles = block + (type == GGML_Q4_1 ? 4 : type == GGML_Q4_0 ? 2 : 1);
  return nibbles[i % 16] >> i / 16 * 4 & 15;
}

/* The 6-bit number `which` (0: of the scale, 1: of the minimum) of 32 weights of a block of Q4_K: of the first four
 * groups in the low bits of bytes of their own, of the others in nibbles of four more bytes and the bits left over. */
EXACT uint32_t q4_k_number(const uint8_t *block, int32_t group, int32_t which)
{
  const uint8_t *own = block + 4 + which * 4, *more = block + 12;
  if (group < 4) return own[group] & 63u;
  return (more[group - 4] >> which * 4 & 15u) | own[group - 4] >> 6 << 4;
}

EXACT float ggml_half(const uint8_t *p)
{
  return exact_from_f16((uint16_t)(p[0] | p[1] << 8));
}

EXACT const uint8_t *ggml_row(const repack_args *a, repack_unit u)
{
  return a->codes + u.e * a->codes_stride + u.n * a->codes_ld;
}

/* ---- elements ---- */

/* Where element k of a row is read; what is no place counts as the nearest one. */
EXACT int32_t repack_source(const repack_args *a, int32_t e, int32_t k)
{
  if (!a->order) return k;
  const int32_t at = a->order[e * a->order_stride + k];
  return at < 0 ? 0 : at < a->in ? at : a->in - 1;
}

EXACT uint32_t repack_code(const repack_args *a, repack_unit u, int32_t element)
{
  const int32_t k = repack_source(a, u.e, element);
  if (a->ggml) {
    const int32_t each = ggml_block(a->ggml);
    return ggml_code(ggml_row(a, u) + (int64_t)(k / each) * ggml_bytes(a->ggml), k % each, a->ggml);
  }
  const int32_t along = a->packed_out ? u.n : k, across = a->packed_out ? k : u.n; /* packed axis; the other */
  const uint8_t *codes = a->codes + u.e * a->codes_stride;
  const int32_t bytes = a->word * a->bits / 8;
  const int packed_rows = a->packed_out != a->in_out; /* words of one row lie along the other axis */
  if (!packed_rows)
    return code_of_word(codes + across * a->codes_ld, along, a->word, a->bits, a->places) ^ (uint32_t)a->flip;
  const uint8_t *word = codes + along / a->word * a->codes_ld + (int64_t)across * bytes;
  return code_of_word(word, along % a->word, a->word, a->bits, a->places) ^ (uint32_t)a->flip;
}

/* The bytes of a stored scale. */
EXACT void repack_scale(const repack_args *a, repack_unit u, int32_t group)
{
  uint8_t *to = a->to + u.e * a->to_stride + a->to_scale + ((int64_t)u.n * a->groups + group) * a->scale_bytes;
  if (a->ggml == GGML_Q6_K) {
    const uint8_t *block = ggml_row(a, u) + (int64_t)(group / 16) * 210;
    *(float *)to = exact_mul(ggml_half(block + 208), (float)(int8_t)block[192 + group % 16]);
    return;
  }
  if (a->ggml == GGML_Q4_K) {
    const uint8_t *block = ggml_row(a, u) + (int64_t)(group / 8) * 144;
    *(float *)to = exact_mul(ggml_half(block), (float)q4_k_number(block, group % 8, 0));
    return;
  }
  const uint8_t *from = a->ggml ? ggml_row(a, u) + (int64_t)group * ggml_bytes(a->ggml)
                                : a->scale + u.e * a->scale_stride + (a->in_out ? group : u.n) * a->scale_ld +
                                      (int64_t)(a->in_out ? u.n : group) * a->scale_bytes;
  for (int32_t i = 0; i < a->scale_bytes; i++) to[i] = from[i];
}

/* What is added to the weights of a group. */
EXACT void repack_value(const repack_args *a, repack_unit u, int32_t group)
{
  uint8_t *to = a->to + u.e * a->to_stride + a->to_zero + ((int64_t)u.n * a->groups + group) * a->scale_bytes;
  if (a->ggml == GGML_Q4_K) {
    const uint8_t *block = ggml_row(a, u) + (int64_t)(group / 8) * 144;
    *(float *)to = -exact_mul(ggml_half(block + 2), (float)q4_k_number(block, group % 8, 1));
    return;
  }
  const uint8_t *block = ggml_row(a, u) + (int64_t)group * 20;
  to[0] = block[2];
  to[1] = block[3];
}

/* Channels n .. n + 7. */
EXACT void repack_zeros(const repack_args *a, repack_unit u, int32_t group)
{
  const uint8_t *from = a->zero + u.e * a->zero_stride;
  uint32_t word = 0;
  for (int32_t i = 0; i < 8; i++) {
    const uint32_t stored = a->in_out
                                ? code_of_word(from + group * a->zero_ld, u.n + i, 8, 4, a->places)
                                : code_of_word(from + u.n / 8 * a->zero_ld + (int64_t)group * 4, i, 8, 4, a->places);
    word |= ((stored + (uint32_t)a->zero_add) & 15) << 4 * i;
  }
  ((uint32_t *)(a->to + u.e * a->to_stride + a->to_zero))[(int64_t)(u.n / 8) * a->groups + group] = word;
}

/* What a unit does besides codes: the groups that begin in it, and its part of the order. */
EXACT void repack_groups(const repack_args *a, repack_unit u)
{
  int32_t *order = (int32_t *)(a->to + u.e * a->to_stride + a->to_order);
  for (int32_t k = u.k; a->order && u.n == 0 && k < u.k + REPACK_CELL(a); k++) order[k] = repack_source(a, u.e, k);
  for (int32_t k = u.k; k < u.k + REPACK_CELL(a); k += ENCODE_CELL) {
    if (k > 0 && (k + a->k_origin) % a->block_k != 0) continue;
    const int32_t group = (k + a->k_origin) / a->block_k;
    if (u.n < a->scale_rows) repack_scale(a, u, group);
    if (a->ggml == GGML_Q4_K || a->ggml == GGML_Q4_1) repack_value(a, u, group);
    if (a->zero && u.n % 8 == 0) repack_zeros(a, u, group);
  }
}

/* 32 bits of codes: those from element k on. */
EXACT uint32_t repack_word(const repack_args *a, repack_unit u, int32_t k)
{
  uint32_t word = 0;
  for (int32_t i = 0; i < 32 / a->bits; i++) word |= repack_code(a, u, k + i) << i * a->bits;
  return word;
}

#endif
