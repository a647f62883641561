/* What --format names: what weights of each kind are, their bytes, how they are made, and what codes stand for. */
#include "bench.h"
#include "kinds.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const kind not_quantised = {"bf16", "as they are", "w16", {0}};

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

/* The rows of one expert. */
static cumoe_status rows_of(cumoe_view_mut all, int64_t expert, int64_t rows, cumoe_view_mut *part)
{
  return cumoe_view_rows_mut(all, expert * rows, rows, part);
}

typedef struct quantised {
  cumoe_view_mut dense; /* of one expert */
  cumoe_view_mut codes, scale, global;
  int64_t scale_rows;
} quantised;

/* What weights that are not quantised would be, rounded to nearest. */
static cumoe_status quantise_expert(bench *b, const model *m, const projection *p, const quantised *q, int64_t expert)
{
  cumoe_quantize_args a = {.size = sizeof a,
                           .experts = 1,
                           .gate_order = p->halves == 2 ? CUMOE_GATE_UP_CONCAT : 0,
                           .format = m->kind->format,
                           .weights = cumoe_const(q->dense)};
  TRY(rows_of(q->codes, expert, p->out, &a.codes));
  TRY(rows_of(q->scale, expert, q->scale_rows, &a.scale));
  if (m->kind->format.global) TRY(rows_of(q->global, expert, 1, &a.global));
  TRY(fill_noise(b, q->dense, &b->small));
  return cumoe_quantize_weights(b->context, &a, b->stream);
}

static cumoe_status create_quantised(bench *b, model *m, store *scratch, projection *p)
{
  const kind *k = m->kind;
  const int64_t experts = m->shape->experts;
  quantised q = {0};
  int64_t cols, codes;
  const cumoe_dtype dtype = storage_of(k, b->o.dtype, &codes);
  kind_blocks(k, p, &q.scale_rows, &cols);
  TRY(take(b, scratch, b->o.dtype, p->out, p->in, &q.dense));
  TRY(take(b, &m->store, dtype, experts * p->out, p->in / codes, &q.codes));
  TRY(take(b, &m->store, (cumoe_dtype)k->format.scale, experts * q.scale_rows, cols, &q.scale));
  if (k->format.global) TRY(take(b, &m->store, CUMOE_F32, experts, p->halves, &q.global));
  for (int64_t e = 0; e < experts; ++e) TRY(quantise_expert(b, m, p, &q, e));
  p->data = cumoe_const(q.codes);
  p->scale = cumoe_const(q.scale);
  p->global = cumoe_const(q.global);
  return cumoe_synchronize(b->context, b->stream);
}

cumoe_status projection_create(bench *b, model *m, projection *p)
{
  store scratch = {.count = 0};
  cumoe_view_mut view;
  if (!kind_is_dense(m->kind)) {
    const cumoe_status status = create_quantised(b, m, &scratch, p);
    store_free(&scratch);
    return status;
  }
  TRY(take(b, &m->store, b->o.dtype, m->shape->experts * p->out, p->in, &view));
  TRY(fill_noise(b, view, &b->small));
  p->data = cumoe_const(view);
  return CUMOE_OK;
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
