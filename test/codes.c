#include "codes.h"

#include <math.h>
#include <string.h>

/* ---- elements -------------------------------------------------------------------------------------- */

static double sign_of(unsigned code, int bit)
{
  return code >> bit & 1 ? -1 : 1;
}

static double e4m3_value(unsigned code)
{
  const int exponent = (int)(code >> 3 & 15), mantissa = (int)(code & 7);
  if ((code & 0x7f) == 0x7f) return NAN;
  if (exponent == 0) return sign_of(code, 7) * mantissa / 512.;
  return sign_of(code, 7) * ldexp(1 + mantissa / 8., exponent - 7);
}

static double e2m1_value(unsigned code)
{
  const int exponent = (int)(code >> 1 & 3), mantissa = (int)(code & 1);
  if (exponent == 0) return sign_of(code, 3) * mantissa / 2.;
  return sign_of(code, 3) * ldexp(1 + mantissa / 2., exponent - 1);
}

static double compute_value(int32_t element, unsigned code)
{
  switch ((cumoe_element)element) {
  case CUMOE_ELEMENT_E4M3: return e4m3_value(code);
  case CUMOE_ELEMENT_E2M1: return e2m1_value(code);
  case CUMOE_ELEMENT_S8: return code < 128 ? (double)code : (double)code - 256;
  case CUMOE_ELEMENT_S4: return code < 8 ? (double)code : (double)code - 16;
  case CUMOE_ELEMENT_U8:
  case CUMOE_ELEMENT_U4: return code;
  case CUMOE_ELEMENT_DENSE: break;
  }
  return NAN;
}

double element_value(int32_t element, unsigned code)
{
  static double values[8][256];
  static bool known[8];
  if (!known[element]) {
    for (unsigned c = 0; c < 256; c++) values[element][c] = compute_value(element, c);
    known[element] = true;
  }
  return values[element][code];
}

unsigned element_codes(int32_t element)
{
  return element == CUMOE_ELEMENT_E2M1 || element == CUMOE_ELEMENT_U4 || element == CUMOE_ELEMENT_S4 ? 16 : 256;
}

double scale_value(int32_t dtype, unsigned bits)
{
  if (dtype == CUMOE_E4M3) return e4m3_value(bits);
  return bits == 255 ? NAN : ldexp(1, (int)bits - 127);
}

unsigned e4m3_nearest(double value)
{
  unsigned best = 0;
  for (unsigned code = 0; code < 0x7f; code++)
    if (fabs(e4m3_value(code) - value) < fabs(e4m3_value(best) - value)) best = code;
  return best;
}

/* ---- formats --------------------------------------------------------------------------------------- */

bool format_is_dense(const cumoe_format *f)
{
  return f->element == CUMOE_ELEMENT_DENSE;
}

bool format_has_codes(const cumoe_format *f)
{
  return f->rows != CUMOE_ROWS_AS_THEY_ARE;
}

int32_t format_code_bits(const cumoe_format *f)
{
  return element_codes(f->element) == 16 ? 4 : 8;
}

int32_t format_storage(const cumoe_format *f)
{
  if (f->word == 4) return CUMOE_I32;
  return f->element == CUMOE_ELEMENT_E4M3 ? CUMOE_E4M3 : f->element == CUMOE_ELEMENT_S8 ? CUMOE_I8 : CUMOE_U8;
}

int64_t format_unit(const cumoe_format *f)
{
  return (f->word == 4 ? 32 : 8) / format_code_bits(f);
}

int64_t format_blocks(int32_t block, int32_t origin, int64_t count)
{
  int64_t blocks = 1;
  while (block && blocks * block < origin + count) blocks++;
  return blocks;
}

int64_t format_block(int32_t block, int32_t origin, int64_t at)
{
  return block ? (origin + at) / block : 0;
}

int64_t format_scale_rows(const cumoe_format *f, int64_t outs, int halves, bool interleaved)
{
  if (halves == 2 && !interleaved && !f->joined) return 2 * format_blocks(f->block[0], f->origin[0], outs / 2);
  return format_blocks(f->block[0], f->origin[0], outs);
}

/* ---- places ---------------------------------------------------------------------------------------- */

/* The byte that holds code `in` of a channel, and how far up in it. */
static unsigned char *code_place(const channel_place *at, int64_t in, int *shift)
{
  const int bits = format_code_bits(at->format);
  const int64_t bytes = at->ins * bits / 8;
  *shift = bits == 4 ? (int)(in % 2) * 4 : 0;
  return at->projection->data.data + (at->expert * at->outs + at->channel) * bytes + in * bits / 8;
}

unsigned code_get(const channel_place *at, int64_t in)
{
  int shift;
  const unsigned char *byte = code_place(at, in, &shift);
  return format_code_bits(at->format) == 4 ? *byte >> shift & 15u : *byte;
}

void code_set(const channel_place *at, int64_t in, unsigned code)
{
  int shift;
  unsigned char *byte = code_place(at, in, &shift);
  const unsigned mask = format_code_bits(at->format) == 4 ? 15u << shift : 255u;
  *byte = (unsigned char)((*byte & ~mask) | (code << shift & mask));
}

/* Gate and up, one below the other, have blocks of their own, unless they were quantised as one. */
static int64_t scale_row(const channel_place *at)
{
  const cumoe_format *f = at->format;
  const int64_t rows = at->projection->scale.rows / at->experts, half = at->outs / 2;
  const bool apart = at->halves == 2 && !at->interleaved && !f->joined, second = apart && at->channel >= half;
  const int64_t channel = second ? at->channel - half : at->channel;
  const int64_t row = format_block(f->block[0], f->origin[0], channel);
  return at->expert * rows + row + (second ? rows / 2 : 0);
}

static int64_t scale_column(const cumoe_format *f, int64_t in)
{
  return format_block(f->block[1], f->origin[1], in);
}

void scale_set(const channel_place *at, int64_t in, double value)
{
  tensor_set(&at->projection->scale, scale_row(at), scale_column(at->format, in), value);
}

static int64_t zero_row(const channel_place *at)
{
  return at->expert * (at->projection->zero.rows / at->experts) + at->channel / 8;
}

static uint32_t *zero_word(const channel_place *at, int64_t in)
{
  const tensor *z = &at->projection->zero;
  return (uint32_t *)(void *)z->data + zero_row(at) * z->cols + scale_column(at->format, in);
}

void zero_set(const channel_place *at, int64_t in, unsigned code)
{
  const int shift = (int)(at->channel % 8) * 4;
  uint32_t *word = zero_word(at, in);
  *word = (*word & ~(15u << shift)) | code << shift;
}

void value_set(const channel_place *at, int64_t in, double value)
{
  tensor_set(&at->projection->zero, scale_row(at), scale_column(at->format, in), value);
}

static double scale_at(const channel_place *at, int64_t in)
{
  const double stored = tensor_get(&at->projection->scale, scale_row(at), scale_column(at->format, in));
  const bool is_code = at->format->scale == CUMOE_E8M0 || at->format->scale == CUMOE_E4M3;
  return is_code ? scale_value(at->format->scale, (unsigned)stored) : stored;
}

static double global_of(const channel_place *at)
{
  const tensor *g = &at->projection->global;
  if (!at->format->global) return 1;
  const double stored = tensor_get(g, at->expert, g->cols == 2 ? at->half : 0);
  return at->format->global == CUMOE_GLOBAL_OVER ? 1 / stored : stored;
}

void decode_channel(const channel_place *at, double *weights)
{
  const cumoe_format *f = at->format;
  const tensor *order = &at->projection->order, *zero = &at->projection->zero;
  const double global = global_of(at);
  double scale = 0, taken = 0, value = 0;
  for (int64_t in = 0; in < at->ins; in++) {
    if (in == 0 || scale_column(f, in) != scale_column(f, in - 1)) {
      scale = scale_at(at, in) * global;
      taken = f->offset;
      if (f->zero == CUMOE_ZERO_CODES_OUT)
        taken += f->zero_add + (double)(*zero_word(at, in) >> (at->channel % 8 * 4) & 15);
      if (f->zero == CUMOE_ZERO_VALUES) value = tensor_get(zero, scale_row(at), scale_column(f, in));
    }
    const int64_t k = f->act_order ? (int64_t)tensor_get(order, at->expert, in) : in;
    weights[k] = (element_value(f->element, code_get(at, in)) - taken) * scale + value;
  }
}

/* ---- activations ----------------------------------------------------------------------------------- */

static double largest_code(const cumoe_format *f)
{
  return f->element == CUMOE_ELEMENT_E4M3 ? 448 : 127;
}

float group_scale(const cumoe_format *f, float most, float static_scale)
{
  if (isnan(most)) return NAN;
  if (f->rows == CUMOE_ROWS_STATIC || f->rows == CUMOE_ROWS_STATIC_EXPERT) return static_scale;
  const float scale = (most < 1e-10f ? 1e-10f : most) / (float)largest_code(f);
  if (f->row_scale != CUMOE_E8M0 || isinf(scale)) return scale;
  int exponent;
  const float fraction = frexpf(scale, &exponent);
  return ldexpf(1, fraction == 0.5f ? exponent - 1 : exponent);
}

quantised quantise(const cumoe_format *f, float x, float scale)
{
  const double most = largest_code(f);
  const float inverse = 1 / scale, v = x * inverse;
  const bool fp8 = f->element == CUMOE_ELEMENT_E4M3;
  int exponent = 0;
  if (isnan(v)) return (quantised){NAN, 0};
  if (fp8) (void)frexp(v, &exponent);
  exponent = exponent - 1 < -6 ? -6 : exponent - 1 > 8 ? 8 : exponent - 1;
  const double step = fp8 ? ldexp(1, exponent - 3) : 1, nearest = rint(v / step) * step;
  const double code = fmin(fmax(nearest, fp8 ? -most : -128), most);
  return (quantised){code * (double)scale, step * (double)scale};
}
