/* Activations become codes, as row_format (args.h) says: this is the definition. One unit is one row. */
#include <stdbool.h>
#include "cpu.h"
#include "fault.h"
#include "../encode.h"
#include "../arrange.h"
#include "../masked.h"

static uint8_t s8_of(float value)
{
  if (value != value) return 0;
  const float kept = value > 127 ? 127 : value < -128 ? -128 : value;
  const float shifted = kept + 0x1.8p23f; /* one step is 1 */
  return (uint8_t)(float_bits(shifted) & 0xff);
}

/* A NaN has no part in the scale of e4m3, whose codes can say NaN; of s8 it is the scale that says so. */
static float largest_of(const quantize_args *a, int64_t first, int32_t count)
{
  float most = 0;
  for (int32_t k = 0; k < count; k++) {
    const float x = fabsf(load_element(a->x, first + k, a->dtype));
    if (x > most || (x != x && a->format.element == DT_I8)) most = x;
    if (most != most) break;
  }
  return most;
}

/* Rounded up. */
static float power_of_two_from(float scale)
{
  return scale != scale ? scale : bits_float((float_bits(scale) + 0x7fffffu) & 0x7f800000u);
}

/* A row of activations, and whose it is where that matters. */
typedef struct row_place {
  int64_t row;
  int32_t expert;
} row_place;

static float given_scale(const quantize_args *a, int32_t expert)
{
  return a->format.static_scale[a->by_expert ? expert * a->static_stride : 0];
}

static float scale_of(const row_format *f, float most)
{
  const float floor = most < ROWS_FLOOR ? ROWS_FLOOR : most;
  const float scale = floor / (f->element == DT_E4M3 ? 448.f : 127.f);
  return f->power_of_two ? power_of_two_from(scale) : scale;
}

static void quantize_group(const quantize_args *a, row_place at, int32_t group, int32_t k, int32_t count)
{
  const int64_t row = at.row;
  uint8_t *codes = (uint8_t *)a->codes + row * a->codes_ld;
  const int64_t first = source_of_row(a, row) * a->x_ld + k;
  const float most = largest_of(a, first, count);
  const bool given = a->format.mode == ROWS_STATIC && most == most;
  const float scale = given ? given_scale(a, at.expert) : scale_of(&a->format, most), inverse = 1 / scale;
  for (int32_t i = 0; i < count; i++) {
    const float value = load_element(a->x, first + i, a->dtype) * inverse;
    codes[k + i] = a->format.element == DT_E4M3 ? e4m3_of(value) : s8_of(value);
  }
  a->scale[group * a->scale_ld + row] = scale;
}

static void quantize_row(const quantize_args *a, row_place at)
{
  for (int32_t k = 0, group = 0; k < a->cols; group++) {
    const int32_t left = a->format.group - (a->format.origin + k) % a->format.group;
    const int32_t count = a->cols - k < left ? a->cols - k : left;
    quantize_group(a, at, group, k, count);
    k += count;
  }
}

static void order_row(const quantize_args *a, row_place at)
{
  const int32_t *order = order_of_expert(a, at.expert);
  const uint16_t *from = (const uint16_t *)a->x + source_of_row(a, at.row) * a->x_ld;
  uint16_t *to = (uint16_t *)a->codes + at.row * a->codes_ld;
  for (int32_t k = 0; k < a->cols; k++) to[k] = from[ordered(order, k, a->cols)];
}

static void change_row(const quantize_args *a, row_place at)
{
  if (a->format.mode == ROWS_AS_THEY_ARE)
    order_row(a, at);
  else
    quantize_row(a, at);
}

void cpu_quantize(const void *args, int64_t begin, int64_t end)
{
  const quantize_args *a = args;
  const int64_t rows = tokens_present(a->rows);
  for (int64_t row = begin; row < end && row < rows; row++)
    change_row(a, (row_place){row, a->by_expert ? expert_of_row(a, row) : 0});
}

void cpu_quantize_masked(const void *args, int64_t begin, int64_t end)
{
  const quantize_masked_args *a = args;
  for (int64_t row = begin; row < end; row++) {
    const int32_t expert = (int32_t)(row / a->capacity);
    if (row % a->capacity < a->counts[expert]) change_row(&a->rows, (row_place){row, expert});
  }
}
