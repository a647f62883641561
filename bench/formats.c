/* What --format names: what weights of each kind are, their bytes, random ones, and what codes stand for. */
#include "bench.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const kind not_quantised = {"bf16", "as they are", "w16", {0}};

static cumoe_format as_they_are(cumoe_format f)
{
  f.rows = CUMOE_ROWS_AS_THEY_ARE;
  f.row_group = 0;
  return f;
}

/* X(name, text, goal, format). Formats are function calls, so they cannot stand in the table. */
#define KIND_LIST(X)                                                                                                   \
  X("fp8", "e4m3, f32 scales of 128 x 128, activations e4m3 by 128", "f8", cumoe_format_fp8_block(CUMOE_F32))          \
  X("fp8-a16", "e4m3, f32 scales of 128 x 128", "", as_they_are(cumoe_format_fp8_block(CUMOE_F32)))                    \
  X("fp8-channel", "e4m3, an f32 scale a channel, activations e4m3 by token", "f8",                                    \
    cumoe_format_fp8_channel(CUMOE_F32))                                                                               \
  X("int8", "s8, an f32 scale a channel, activations s8 by token", "f8", cumoe_format_int8(CUMOE_F32))                 \
  X("int4", "u4 - 8, bf16 scales of 128", "w4", cumoe_format_int4(128, CUMOE_BF16))                                    \
  X("int4-32", "u4 - 8, bf16 scales of 32", "w4", cumoe_format_int4(32, CUMOE_BF16))                                   \
  X("mxfp4", "e2m1, e8m0 scales of 32", "w4", cumoe_format_mxfp4())                                                    \
  X("nvfp4", "e2m1, e4m3 scales of 16, an f32 a matrix", "w4", cumoe_format_nvfp4(CUMOE_GLOBAL_TIMES))

#define KIND(name, text, goal, format) {name, text, goal, {0}},
static kind kinds[] = {KIND_LIST(KIND)};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* ---- names ---- */

static bool named(const char *name, const char *text, size_t length)
{
  return strlen(name) == length && memcmp(name, text, length) == 0;
}

static bool add_kind(options *o, const kind *k)
{
  if (o->kinds_count == MAX_KINDS) return false;
  o->kinds[o->kinds_count++] = k;
  return true;
}

static bool add_named(options *o, const char *text, size_t length)
{
  const bool all = named("all", text, length);
  bool found = false;
  for (int32_t i = 0; i < KINDS; ++i)
    if (all || named(kinds[i].name, text, length)) found = add_kind(o, &kinds[i]);
  return found;
}

/* The type is the run's: an option behind this one may say it. */
static bool names_dense(const char *text, size_t length)
{
  return named("bf16", text, length) || named("f16", text, length);
}

bool kinds_parse(const char *list, options *o, char *bad, size_t bad_bytes)
{
#define FORMAT_OF(name, text, goal, format) format,
  const cumoe_format formats[] = {KIND_LIST(FORMAT_OF)};
  for (int32_t i = 0; i < KINDS; ++i) kinds[i].format = formats[i];
  o->kinds_count = 0;
  for (int dense = 1; dense >= 0; --dense)
    for (const char *p = list; p && *p;) {
      const size_t part = strcspn(p, ",");
      if (names_dense(p, part) == (dense == 1) && !(dense ? add_kind(o, &not_quantised) : add_named(o, p, part))) {
        snprintf(bad, bad_bytes, "%.*s", (int)part, p);
        return false;
      }
      p += part;
      p += *p == ',';
    }
  return o->kinds_count > 0;
}

const char *kind_name(const kind *k, cumoe_dtype dtype)
{
  return kind_is_dense(k) ? cumoe_dtype_name(dtype) : k->name;
}

/* ---- sizes ---- */

bool kind_is_dense(const kind *k)
{
  return k->format.element == CUMOE_ELEMENT_DENSE;
}

bool kind_has_codes_of_rows(const kind *k)
{
  return k->format.rows != CUMOE_ROWS_AS_THEY_ARE;
}

weight_format kind_class(const kind *k, cumoe_dtype dtype)
{
  switch ((cumoe_element)k->format.element) {
  case CUMOE_ELEMENT_E4M3: return FORMAT_e4m3;
  case CUMOE_ELEMENT_E2M1: return k->format.scale == CUMOE_E8M0 ? FORMAT_mx4 : FORMAT_nv4;
  case CUMOE_ELEMENT_S8:
  case CUMOE_ELEMENT_U8: return FORMAT_s8;
  case CUMOE_ELEMENT_U4:
  case CUMOE_ELEMENT_S4: return FORMAT_u4;
  case CUMOE_ELEMENT_DENSE: break;
  }
  return dense_format((int32_t)dtype);
}

static int64_t blocks(int32_t block, int64_t count)
{
  return block ? (count + block - 1) / block : 1;
}

void kind_blocks(const kind *k, const projection *p, int64_t *rows, int64_t *cols)
{
  *rows = p->halves * blocks(k->format.block[0], p->out / p->halves);
  *cols = blocks(k->format.block[1], p->in);
}

static double projection_bytes(const kind *k, int64_t out, int64_t in, int32_t halves, cumoe_dtype dtype)
{
  const projection p = {.out = out, .in = in, .halves = halves};
  int64_t rows, cols;
  kind_blocks(k, &p, &rows, &cols);
  const double scales = (double)(rows * cols) * (double)cumoe_dtype_bytes((cumoe_dtype)k->format.scale);
  return (double)format_bytes(kind_class(k, dtype), out * in) + scales + (k->format.global ? 4 * halves : 0);
}

double kind_bytes(const kind *k, const shape *s, cumoe_dtype dtype)
{
  return projection_bytes(k, 2 * (int64_t)s->inter, s->hidden, 2, dtype) +
         projection_bytes(k, s->hidden, s->inter, 1, dtype);
}

/* ---- what codes and scales stand for ---- */

static double e4m3_value(uint8_t code)
{
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return (double)NAN;
  const double size = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
  return code & 128 ? -size : size;
}

double code_value(const kind *k, uint8_t code)
{
  static const double e2m1[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  switch ((cumoe_element)k->format.element) {
  case CUMOE_ELEMENT_E4M3: return e4m3_value(code);
  case CUMOE_ELEMENT_E2M1: return code & 8 ? -e2m1[code & 7] : e2m1[code & 7];
  case CUMOE_ELEMENT_S8:
  case CUMOE_ELEMENT_S4: return (int8_t)code;
  case CUMOE_ELEMENT_U8:
  case CUMOE_ELEMENT_U4: return code - k->format.offset;
  case CUMOE_ELEMENT_DENSE: break;
  }
  return 0;
}

double scale_value(const kind *k, const void *scales, int64_t at)
{
  const uint8_t *bytes = scales;
  float f = 0;
  uint32_t word;
  switch ((cumoe_dtype)k->format.scale) {
  case CUMOE_E4M3: return e4m3_value(bytes[at]);
  case CUMOE_E8M0: return ldexp(1, bytes[at] - 127);
  case CUMOE_BF16:
    word = (uint32_t)((const uint16_t *)scales)[at] << 16;
    memcpy(&f, &word, sizeof f);
    return (double)f;
  default: return (double)((const float *)scales)[at];
  }
}

/* ---- random ones ---- */

/* Weights have a deviation of .02. Of codes it is what rounding to the nearest gives: the largest code for the largest
 * weight of a block. */
static double deviation_of(const kind *k)
{
  switch ((cumoe_element)k->format.element) {
  case CUMOE_ELEMENT_E4M3: return 107;
  case CUMOE_ELEMENT_S8:
  case CUMOE_ELEMENT_U8: return 30;
  default: return 2.7;
  }
}

/* What codes of an element stand for. */
typedef struct codebook {
  double values[256];
  int count;
} codebook;

static codebook codebook_of(const kind *k, int bits)
{
  codebook book = {.count = 1 << bits};
  for (int c = 0; c < book.count; ++c) book.values[c] = code_value(k, (uint8_t)c);
  return book;
}

/* Never NaN. */
static uint8_t nearest_code(const codebook *book, double value)
{
  int best = 0;
  for (int c = 1; c < book->count; ++c)
    if (fabs(book->values[c] - value) < fabs(book->values[best] - value)) best = c;
  return (uint8_t)best;
}

/* A byte of codes. */
static uint8_t random_codes(bench *b, const codebook *book, double deviation)
{
  const uint8_t code = nearest_code(book, deviation * random_normal(&b->seed));
  if (book->count == 256) return code;
  return (uint8_t)(code | nearest_code(book, deviation * random_normal(&b->seed)) << 4);
}

enum { TABLE = 1 << 16, GLOBAL_SCALE = 144 };

static double level_of(const kind *k)
{
  return k->format.global ? GLOBAL_SCALE : .02 / deviation_of(k);
}

static void random_scale(bench *b, const kind *k, const codebook *e4m3, void *to)
{
  const float f = (float)(level_of(k) * (.75 + .5 * random_unit(&b->seed)));
  uint32_t word;
  uint8_t code = 0;
  memcpy(&word, &f, sizeof word);
  const uint16_t half = (uint16_t)(word >> 16);
  switch ((cumoe_dtype)k->format.scale) {
  case CUMOE_E4M3: code = nearest_code(e4m3, (double)f); break;
  case CUMOE_E8M0: code = (uint8_t)(word >> 23); break;
  case CUMOE_BF16: memcpy(to, &half, sizeof half); return;
  default: memcpy(to, &f, sizeof f); return;
  }
  memcpy(to, &code, sizeof code);
}

/* A block of elements drawn from a table. Its length is 16 times a prime: no stride of weights divides it, so that no
 * two experts get the same. */
static cumoe_status upload_drawn(bench *b, const uint8_t *table, size_t element, int64_t bytes, noise *n)
{
  uint8_t *host = malloc((size_t)bytes);
  cumoe_view_mut block;
  if (!host) return CUMOE_ERR_OUT_OF_MEMORY;
  for (size_t i = 0; i < (size_t)bytes;) {
    const uint64_t bits = random_bits(&b->seed);
    for (int j = 0; j < 4 && i < (size_t)bytes; ++j, i += element)
      memcpy(host + i, table + (bits >> 16 * j & (TABLE - 1)) * element, element);
  }
  cumoe_status status = take(b, &b->store, CUMOE_U8, 1, bytes, &block);
  if (status == CUMOE_OK) status = cumoe_copy_from_host(b->context, block, host, (size_t)bytes, b->stream);
  if (status == CUMOE_OK) status = cumoe_synchronize(b->context, b->stream);
  if (status == CUMOE_OK) *n = (noise){cumoe_const(block), 0};
  free(host);
  return status;
}

/* Once a run for a kind. */
static cumoe_status make_codes(bench *b, int32_t index)
{
  static uint8_t table[TABLE * 4];
  const kind *k = b->o.kinds[index];
  const bool cpu = b->device.device == CUMOE_DEVICE_CPU;
  const kind e4m3 = {.format = {.element = CUMOE_ELEMENT_E4M3}};
  const codebook of_weights = codebook_of(k, format_bits(kind_class(k, b->o.dtype))), of_scales = codebook_of(&e4m3, 8);
  const size_t element = cumoe_dtype_bytes((cumoe_dtype)k->format.scale);
  if (b->codes[index].block.data) return CUMOE_OK;
  for (int32_t i = 0; i < TABLE; ++i) table[i] = random_codes(b, &of_weights, deviation_of(k));
  TRY(upload_drawn(b, table, 1, cpu ? 16 * 65521LL : 16 * 4194301LL, &b->codes[index]));
  for (int32_t i = 0; i < TABLE; ++i) random_scale(b, k, &of_scales, table + (size_t)i * element);
  return upload_drawn(b, table, element, cpu ? 16 * 8191LL : 16 * 524287LL, &b->scales[index]);
}

static cumoe_status upload_global(bench *b, const kind *k, cumoe_view_mut to)
{
  float host[2 * CUMOE_MAX_EXPERTS];
  const int64_t count = to.rows * to.cols;
  for (int64_t i = 0; i < count; ++i)
    host[i] = (float)(.02 / deviation_of(k) / GLOBAL_SCALE * (.75 + .5 * random_unit(&b->seed)));
  TRY(cumoe_copy_from_host(b->context, to, host, (size_t)count * sizeof *host, b->stream));
  return cumoe_synchronize(b->context, b->stream);
}

/* ---- memory ---- */

/* What an element of a view of codes is, and how many it holds. */
static cumoe_dtype storage_of(const kind *k, cumoe_dtype dtype, int64_t *codes)
{
  const int bits = format_bits(kind_class(k, dtype));
  *codes = k->format.word == 4 ? 32 / bits : bits < 8 ? 8 / bits : 1;
  if (kind_is_dense(k)) return dtype;
  if (k->format.word == 4) return CUMOE_I32;
  if (k->format.element == CUMOE_ELEMENT_E4M3) return CUMOE_E4M3;
  return k->format.element == CUMOE_ELEMENT_S8 ? CUMOE_I8 : CUMOE_U8;
}

static cumoe_status create_scales(bench *b, model *m, int32_t index, projection *p)
{
  const kind *k = m->kind;
  const int64_t experts = m->shape->experts;
  int64_t rows, cols;
  cumoe_view_mut view;
  kind_blocks(k, p, &rows, &cols);
  TRY(take(b, &m->store, (cumoe_dtype)k->format.scale, experts * rows, cols, &view));
  TRY(fill_noise(b, view, &b->scales[index]));
  p->scale = cumoe_const(view);
  if (!k->format.global) return CUMOE_OK;
  TRY(take(b, &m->store, CUMOE_F32, experts, p->halves, &view));
  TRY(upload_global(b, k, view));
  p->global = cumoe_const(view);
  return CUMOE_OK;
}

cumoe_status projection_create(bench *b, model *m, int32_t index, projection *p)
{
  const bool dense = kind_is_dense(m->kind);
  int64_t codes;
  const cumoe_dtype dtype = storage_of(m->kind, b->o.dtype, &codes);
  cumoe_view_mut view;
  if (!dense) TRY(make_codes(b, index));
  TRY(take(b, &m->store, dtype, m->shape->experts * p->out, p->in / codes, &view));
  TRY(fill_noise(b, view, dense ? &b->small : &b->codes[index]));
  p->data = cumoe_const(view);
  return dense ? CUMOE_OK : create_scales(b, m, index, p);
}

cumoe_status projection_describe(const model *m, const projection *p, cumoe_projection *d)
{
  int64_t rows, cols;
  *d = (cumoe_projection){0};
  TRY(cumoe_view_rows(p->data, 0, p->out, &d->data));
  if (kind_is_dense(m->kind)) return CUMOE_OK;
  kind_blocks(m->kind, p, &rows, &cols);
  d->global = p->global;
  return cumoe_view_rows(p->scale, 0, rows, &d->scale.data);
}

/* ---- goals ---- */

bool goal_of(const kind *k, const char *layer, int64_t tokens, goal *g)
{
  static const struct {
    const char *weights, *model;
    int64_t tokens;
    double target, bare, whole;
    const char *bare_name, *whole_name;
  } goals[] = {
#define TARGET(weights, model, tokens, target, bare, bare_name, whole, whole_name)                                     \
  {#weights, model, tokens, target, bare, whole, bare_name, whole_name},
#include "targets.def"
  };
  for (size_t i = 0; i < sizeof goals / sizeof *goals; ++i) {
    if (strcmp(goals[i].weights, k->goal) != 0 || strcmp(goals[i].model, layer) != 0 || goals[i].tokens != tokens)
      continue;
    const bool bare = goals[i].bare <= goals[i].whole;
    const double peer = bare ? goals[i].bare : goals[i].whole;
    *g = (goal){fmin(goals[i].target, peer), goals[i].target, peer, bare ? goals[i].bare_name : goals[i].whole_name};
    return true;
  }
  return false;
}
