/* Binding weights: every documented layout becomes one normal form (expert_matrix in kernels/args.h). */
#include "weights.h"
#include "buffer.h"
#include "context.h"
#include "debug.h"
#include "format.h"
#include "memory.h"
#include "objects.h"
#include "pool.h"
#include "status.h"
#include "tmap.h"

#include <stdlib.h>

/* ---- checks of a description ---- */

/* A projection as its description calls it, and what it has to be. */
typedef struct projection_shape {
  const char *name, *data, *bias, *scale, *zero, *global, *input_scale, *order; /* in texts */
  int64_t out, in; /* of a matrix; gate_up: of both halves */
  int32_t major, halves;
  bool interleaved;
  const cumoe_format *format;
  const char *format_name;
  int32_t dtype; /* of activations */
} projection_shape;

/* Matrices of one kind, one an expert, [rows, cols] each. */
typedef struct array_shape {
  const char *name, *data;
  int64_t rows, cols;
  uint32_t dtypes, align;
} array_shape;

static cumoe_array data_of(const cumoe_projection *p)
{
  return (cumoe_array){p->data, p->per_expert, p->expert_stride};
}

static cumoe_status check_table(const cumoe_array *p, const array_shape *s, int32_t experts)
{
  for (int32_t e = 0; e < experts; ++e) {
    REQUIRE(p->per_expert[e], CUMOE_ERR_INVALID_ARGUMENT, "%s.per_expert[%d] is null", s->name, (int)e);
    REQUIRE((uintptr_t)p->per_expert[e] % s->align == 0, CUMOE_ERR_MISALIGNED,
            "%s.per_expert[%d] is %p, must be aligned to %u bytes", s->name, (int)e, p->per_expert[e], s->align);
  }
  return CUMOE_OK;
}

/* Shape and type of one expert's matrix. Where a stack was meant, its rows are what the text is about. */
static cumoe_status check_matrix(struct context *context, const cumoe_array *p, cumoe_view v, const array_shape *s,
                                 int32_t experts)
{
  const bool stack = !p->per_expert && p->expert_stride == 0 && experts > 1;
  const operand want = {s->data, stack && !absent(&v) ? v.rows : s->rows, s->cols, s->dtypes, s->align};
  TRY(check_operand(context, &want, v));
  REQUIRE(v.rows == s->rows, CUMOE_ERR_INVALID_ARGUMENT,
          "%s.rows is %lld, must be %lld (%lld for each of %d experts), or %lld (expert 0's)", s->data,
          (long long)v.rows, (long long)(experts * s->rows), (long long)s->rows, (int)experts, (long long)s->rows);
  return CUMOE_OK;
}

/* The whole stack must lie in its buffer, not only expert 0. */
static cumoe_status check_stack(struct context *context, const cumoe_view *v, const array_shape *s, int32_t experts,
                                int64_t stride, int64_t matrix)
{
  cumoe_view all = cumoe_vector(v->data, (cumoe_dtype)v->dtype, 0);
  REQUIRE(!__builtin_mul_overflow((int64_t)experts - 1, stride, &all.cols) &&
              !__builtin_add_overflow(all.cols, matrix, &all.cols),
          CUMOE_ERR_INVALID_ARGUMENT, "%s.expert_stride is %lld, too large", s->name, (long long)stride);
  all.ld = all.cols;
  all.rows = 1;
  all.owner = v->owner;
  TRY(check_extent(s->data, &all, s->align));
  return check_owner(context, s->data, &all);
}

static cumoe_status check_array(struct context *context, cumoe_array p, array_shape s, int32_t experts)
{
  cumoe_view v = p.data;
  const uint32_t element = (uint32_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  if (s.align < element) s.align = element;
  REQUIRE(!(p.per_expert && v.data), CUMOE_ERR_INVALID_ARGUMENT, "%s has both data and per_expert", s.name);
  if (p.per_expert) { /* the shape describes each expert's matrix; borrow the first one's pointer for the checks */
    TRY(check_table(&p, &s, experts));
    v.data = p.per_expert[0];
  }
  TRY(check_matrix(context, &p, v, &s, experts));
  const int64_t matrix = (v.rows - 1) * v.ld + v.cols, stride = p.expert_stride ? p.expert_stride : v.rows * v.ld;
  REQUIRE(p.expert_stride == 0 || p.expert_stride >= matrix, CUMOE_ERR_LAYOUT,
          "%s.expert_stride is %lld, must be at least one matrix, %lld", s.name, (long long)p.expert_stride,
          (long long)matrix);
  REQUIRE((uint64_t)stride * element % s.align == 0, CUMOE_ERR_MISALIGNED,
          "%s.expert_stride is %lld elements, must be a multiple of %u bytes", s.name, (long long)stride, s.align);
  return p.per_expert ? CUMOE_OK : check_stack(context, &v, &s, experts, stride, matrix);
}

static bool array_absent(const cumoe_array *a)
{
  return absent(&a->data) && !a->per_expert && a->expert_stride == 0;
}

/* An interleaved channel's gate and up are neighbours, in one block. */
static cumoe_status check_interleaved(const projection_shape *s)
{
  const cumoe_format *f = s->format;
  TRY(check_halves(s->format_name, f, s->halves == 2 && !s->interleaved, s->interleaved));
  REQUIRE(f->zero != CUMOE_ZERO_CODES_OUT || !s->interleaved, CUMOE_ERR_NOT_SUPPORTED,
          "%s.zero is %d: zero points of interleaved channels are read after cumoe_weights_repack only", s->format_name,
          (int)f->zero);
  return CUMOE_OK;
}

/* What a format has besides codes. */
static cumoe_status check_scaling(struct context *context, const cumoe_projection *p, const projection_shape *s,
                                  int32_t experts)
{
  const cumoe_format *f = s->format;
  const int64_t groups = blocks_of(f->block[1], f->origin[1], s->in);
  const uint32_t f32 = DTYPE_BIT(CUMOE_F32);
  const array_shape scale = {s->scale, s->scale,      scale_rows(f, s->out, s->halves, s->interleaved),
                             groups,   scale_bits(f), 1};
  const array_shape words = {s->zero, s->zero, (s->out + 7) / 8, groups, DTYPE_BIT(CUMOE_I32), 4},
                    values = {s->zero, s->zero, scale.rows, groups, DTYPE_BIT(f->scale & 31), 1},
                    order = {s->order, s->order, 1, s->in, DTYPE_BIT(CUMOE_I32), 4};
  const bool own = f->rows == CUMOE_ROWS_STATIC_EXPERT;
  const operand global = {s->global, experts, p->global.cols == 1 ? 1 : s->halves, f32, 0},
                input = {s->input_scale, own ? experts : 1, 1, f32, 0};
  TRY(check_interleaved(s));
  REQUIRE(!is_dense(f) || array_absent(&p->scale), CUMOE_ERR_INVALID_ARGUMENT, "%s must be absent: %s is dense",
          s->scale, s->format_name);
  if (!is_dense(f)) TRY(check_array(context, p->scale, scale, experts));
  REQUIRE(f->zero || array_absent(&p->zero), CUMOE_ERR_INVALID_ARGUMENT, "%s must be absent: %s.zero is 0", s->zero,
          s->format_name);
  if (f->zero) TRY(check_array(context, p->zero, has_values(f) ? values : words, experts));
  REQUIRE(f->act_order || array_absent(&p->order), CUMOE_ERR_INVALID_ARGUMENT, "%s must be absent: %s.act_order is 0",
          s->order, s->format_name);
  if (f->act_order) TRY(check_array(context, p->order, order, experts));
  TRY(f->global ? check_operand(context, &global, p->global)
                : check_absent(s->global, p->global, "the format has none"));
  return f->rows == CUMOE_ROWS_STATIC || own
             ? check_operand(context, &input, p->input_scale)
             : check_absent(s->input_scale, p->input_scale, "the format's rows are not STATIC");
}

static cumoe_status check_projection(struct context *context, const cumoe_projection *p, const projection_shape *s,
                                     int32_t experts)
{
  const bool out_in = s->major == CUMOE_OUT_IN;
  TRY(check_format(s->format_name, s->format, s->in, s->dtype, FORMAT_IN_PLACE));
  REQUIRE(out_in || is_dense(s->format), CUMOE_ERR_LAYOUT,
          "%s: codes are read OUT_IN, the major says IN_OUT (cumoe_weights_repack makes one of the other)", s->name);
  const array_shape data = {s->name,
                            s->data,
                            out_in ? s->out : s->in,
                            out_in ? s->in / storage_codes(s->format) : s->out,
                            DTYPE_BIT(storage_dtype(s->format, s->dtype)),
                            16};
  TRY(check_array(context, data_of(p), data, experts));
  TRY(check_scaling(context, p, s, experts));
  const operand bias = {s->bias, experts, s->out, DTYPE_BIT(CUMOE_F32) | DTYPE_BIT(s->dtype), 0};
  return check_optional(context, &bias, p->bias);
}

static cumoe_status check_reserves(const cumoe_weights_desc *d)
{
  TRY(check_reserve("desc.gate_up", d->gate_up.reserved));
  TRY(check_reserve("desc.gate", d->gate.reserved));
  TRY(check_reserve("desc.up", d->up.reserved));
  return check_reserve("desc.down", d->down.reserved);
}

/* Its reserve is checked by itself. */
static bool projection_absent(const cumoe_projection *p)
{
  const cumoe_array data = data_of(p);
  return array_absent(&data) && absent(&p->bias) && array_absent(&p->scale) && array_absent(&p->zero) &&
         absent(&p->global) && absent(&p->input_scale) && array_absent(&p->order);
}

static cumoe_status check_major(const char *name, int32_t major)
{
  REQUIRE(major == CUMOE_OUT_IN || major == CUMOE_IN_OUT, CUMOE_ERR_LAYOUT,
          "%s is %d, must be CUMOE_OUT_IN or CUMOE_IN_OUT", name, (int)major);
  return CUMOE_OK;
}

#define NAMES(field)                                                                                                   \
  "desc." #field, "desc." #field ".data", "desc." #field ".bias", "desc." #field ".scale", "desc." #field ".zero",     \
      "desc." #field ".global", "desc." #field ".input_scale", "desc." #field ".order"

/* Gate and up are read by one kernel, with one set of strides. */
static bool same_array(const cumoe_array *a, const cumoe_array *b)
{
  return a->data.ld == b->data.ld && a->data.dtype == b->data.dtype && a->expert_stride == b->expert_stride &&
         !a->per_expert == !b->per_expert && absent(&a->data) == absent(&b->data);
}

static cumoe_status check_alike(const cumoe_projection *gate, const cumoe_projection *up)
{
  const cumoe_array a = data_of(gate), b = data_of(up);
  const bool same = same_array(&a, &b) && same_array(&gate->scale, &up->scale) && same_array(&gate->zero, &up->zero) &&
                    gate->global.ld == up->global.ld && absent(&gate->bias) == absent(&up->bias) &&
                    gate->bias.ld == up->bias.ld && gate->bias.dtype == up->bias.dtype;
  REQUIRE(same, CUMOE_ERR_LAYOUT,
          "desc.gate and desc.up must have the same ld, expert_stride, form and bias form, and so must their scales");
  REQUIRE(gate->input_scale.data == up->input_scale.data, CUMOE_ERR_LAYOUT,
          "desc.gate.input_scale and desc.up.input_scale must be one: both multiply the same x");
  REQUIRE(gate->order.data.data == up->order.data.data && gate->order.per_expert == up->order.per_expert &&
              same_array(&gate->order, &up->order),
          CUMOE_ERR_LAYOUT, "desc.gate.order and desc.up.order must be one: both multiply the same x");
  return CUMOE_OK;
}

/* Of the activations: what weights without a format are. */
static cumoe_status find_dtype(const cumoe_weights_desc *d, int32_t *dtype)
{
  const int32_t dense = is_dense(&d->down_format) ? d->down.data.dtype : d->dtype;
  *dtype = d->dtype ? d->dtype : dense;
  REQUIRE(is_dense(&d->down_format) && is_dense(&d->up_format) ? *dtype == dense : d->dtype != 0, CUMOE_ERR_WRONG_DTYPE,
          "desc.dtype is %s: with a format the activations' type, without the weights' or 0", say_dtype(d->dtype).text);
  return check_dense(d->dtype ? "desc.dtype" : "desc.down.data.dtype", *dtype, CUMOE_ERR_WRONG_DTYPE);
}

/* `of`: the activations' dtype. */
static cumoe_status check_weights_desc(struct context *context, const cumoe_weights_desc *d, int32_t *of)
{
  const bool separate = d->gate_order == CUMOE_GATE_UP_SEPARATE, ungated = d->gate_order == CUMOE_UNGATED;
  const bool fused = !separate && !ungated;
  int32_t dtype;
  REQUIRE(d->gate_order >= CUMOE_GATE_UP_CONCAT && d->gate_order <= CUMOE_UNGATED, CUMOE_ERR_LAYOUT,
          "desc.gate_order is %d: it must be set, no order is guessed", (int)d->gate_order);
  TRY(check_major("desc.up_major", d->up_major));
  TRY(check_major("desc.down_major", d->down_major));
  REQUIRE(d->reserved == 0 && d->reserved_end == 0, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.reserved is %d, desc.reserved_end is %d, must be 0", (int)d->reserved, (int)d->reserved_end);
  TRY(check_reserves(d));
  REQUIRE(d->experts >= 1 && d->experts <= CUMOE_MAX_EXPERTS, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.experts is %d, must be 1 .. %d", (int)d->experts, CUMOE_MAX_EXPERTS);
  REQUIRE(d->hidden >= 8 && d->hidden % 8 == 0 && d->inter >= 8 && d->inter % 8 == 0, CUMOE_ERR_INVALID_ARGUMENT,
          "desc.hidden is %d, desc.inter is %d: must be positive multiples of 8", (int)d->hidden, (int)d->inter);
  TRY(find_dtype(d, &dtype));
  *of = dtype;
  REQUIRE(fused || projection_absent(&d->gate_up), CUMOE_ERR_LAYOUT,
          "desc.gate_up must be absent with this gate_order");
  REQUIRE(separate || projection_absent(&d->gate), CUMOE_ERR_LAYOUT, "desc.gate must be absent with this gate_order");
  REQUIRE(!fused || projection_absent(&d->up), CUMOE_ERR_LAYOUT, "desc.up must be absent with this gate_order");
#define UP(field, rows, count)                                                                                         \
  {                                                                                                                    \
    NAMES(field), rows, d->hidden, d->up_major, count, is_interleaved(d->gate_order), &d->up_format, "desc.up_format", \
        dtype                                                                                                          \
  }
  const projection_shape gate_up = UP(gate_up, 2 * (int64_t)d->inter, 2), gate = UP(gate, d->inter, 1),
                         up = UP(up, d->inter, 1);
#undef UP
  const projection_shape down = {NAMES(down), d->hidden,       d->inter,           d->down_major, 1,
                                 false,       &d->down_format, "desc.down_format", dtype};
  if (fused) TRY(check_projection(context, &d->gate_up, &gate_up, d->experts));
  if (separate) TRY(check_projection(context, &d->gate, &gate, d->experts));
  if (!fused) TRY(check_projection(context, &d->up, &up, d->experts));
  if (separate) TRY(check_alike(&d->gate, &d->up));
  return check_projection(context, &d->down, &down, d->experts);
}

/* ---- the normal form ---- */

/* Where one half (gate or up) of a projection lies: its channel 0 is channel `first` of the projection's. */
typedef struct half {
  const cumoe_projection *projection;
  int64_t first;
} half;

/* A projection of one half or two. */
typedef struct halves {
  half of[2];
  int count;
  int64_t channels; /* of a half */
  int32_t step;     /* channels of memory from one of a half to its next: 2 interleaved */
  bool concatenated;
  int32_t major;
  const cumoe_format *format;
  weight_format class;
} halves;

/* In the order gate, up. */
static halves halves_of_up(const cumoe_weights_desc *d, int32_t dtype)
{
  halves h = {.channels = d->inter,
              .count = d->gate_order == CUMOE_UNGATED ? 1 : 2,
              .step = is_interleaved(d->gate_order) ? 2 : 1,
              .major = d->up_major,
              .format = &d->up_format,
              .class = class_of(&d->up_format, dtype)};
  if (d->gate_order == CUMOE_UNGATED || d->gate_order == CUMOE_GATE_UP_SEPARATE) {
    h.of[0] = (half){d->gate_order == CUMOE_UNGATED ? &d->up : &d->gate, 0};
    h.of[1] = (half){&d->up, 0};
    return h;
  }
  const int gate = d->gate_order == CUMOE_GATE_UP_CONCAT || d->gate_order == CUMOE_GATE_UP_INTERLEAVED ? 0 : 1;
  h.concatenated = h.step == 1;
  h.of[gate] = (half){&d->gate_up, 0};
  h.of[1 - gate] = (half){&d->gate_up, h.concatenated ? d->inter : 1};
  return h;
}

static halves halves_of_down(const cumoe_weights_desc *d, int32_t dtype)
{
  return (halves){.of = {{&d->down, 0}},
                  .count = 1,
                  .channels = d->hidden,
                  .step = 1,
                  .major = d->down_major,
                  .format = &d->down_format,
                  .class = class_of(&d->down_format, dtype)};
}

static const void *bytes_at(const void *base, int64_t bytes)
{
  return base ? (const char *)base + bytes : NULL;
}

static int64_t expert_stride_of(const cumoe_array *a)
{
  return a->expert_stride ? a->expert_stride : a->data.rows * a->data.ld;
}

/* Bytes from the start of an expert's codes to a half's. */
static int64_t code_offset(const halves *h, int i)
{
  const cumoe_view *v = &h->of[i].projection->data;
  const int64_t stride = h->major == CUMOE_OUT_IN ? v->ld : 1;
  return h->of[i].first * stride * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v->dtype);
}

/* The row of an expert's scales in which a half begins, and the place of its first channel in that block. Blocks that
 * run through both halves are counted from the first one's origin. */
static int64_t scale_row_of(const halves *h, int i, int32_t *origin)
{
  const cumoe_format *f = h->format;
  const int64_t first = h->of[i].first;
  *origin = f->origin[0] / (f->block[0] > 1 ? h->step : 1);
  if (f->block[0] == 0) return first && h->concatenated && !f->joined ? 1 : 0;
  if (h->step == 2) return f->block[0] == 1 ? first : 0;
  if (!h->concatenated || first == 0) return 0;
  if (!f->joined) return blocks_of(f->block[0], f->origin[0], h->channels);
  *origin = (int32_t)((f->origin[0] + first) % f->block[0]);
  return (f->origin[0] + first) / f->block[0];
}

static int64_t scale_offset(const halves *h, int i)
{
  int32_t origin;
  const cumoe_view *v = &h->of[i].projection->scale.data;
  if (is_dense(h->format)) return 0;
  return scale_row_of(h, i, &origin) * v->ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v->dtype);
}

static int64_t zero_offset(const halves *h, int i)
{
  int32_t origin;
  const int64_t ld = h->of[i].projection->zero.data.ld;
  if (has_values(h->format))
    return scale_row_of(h, i, &origin) * ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)h->format->scale);
  return !h->format->zero ? 0 : h->of[i].first / 8 * ld * 4;
}

/* From one row of scales, or of values, to that of the next block of a half. */
static int64_t block_stride(const halves *h, const cumoe_array *a)
{
  const int32_t block = h->format->block[0];
  return block == 0 ? 0 : a->data.ld * (block == 1 ? h->step : 1);
}

static scale_matrix scale_form(const halves *h)
{
  const cumoe_format *f = h->format;
  const cumoe_array *first = &h->of[0].projection->scale;
  if (is_dense(f)) return (scale_matrix){.block_n = 1, .block_k = 1};
  scale_matrix s = {.expert_stride = expert_stride_of(first), .dtype = f->scale, .k_origin = f->origin[1]};
  s.block_n = f->block[0] == 0 ? (int32_t)ROWS_ONE_GROUP : f->block[0] > 1 ? f->block[0] / h->step : 1;
  s.n_stride = block_stride(h, first);
  s.block_k = f->block[1] ? f->block[1] : (int32_t)ROWS_ONE_GROUP;
  s.k_stride = f->block[1] ? 1 : 0;
  if (f->block[1] == 0) s.k_origin = 0;
  for (int i = 0; i < h->count; ++i) {
    (void)scale_row_of(h, i, &s.n_origin[i]);
    s.base[i] = bytes_at(h->of[i].projection->scale.data.data, scale_offset(h, i));
  }
  return s;
}

static zero_matrix zero_form(const halves *h)
{
  const cumoe_array *first = &h->of[0].projection->zero;
  if (!h->format->zero) return (zero_matrix){0};
  zero_matrix z = {.expert_stride = expert_stride_of(first),
                   .n_stride = has_values(h->format) ? block_stride(h, first) : first->data.ld,
                   .k_stride = h->format->block[1] ? 1 : 0,
                   .add = h->format->zero_add};
  for (int i = 0; i < h->count; ++i) z.base[i] = bytes_at(h->of[i].projection->zero.data.data, zero_offset(h, i));
  return z;
}

static void set_globals(const halves *h, expert_matrix *m)
{
  const cumoe_view *first = &h->of[0].projection->global;
  if (!h->format->global) return;
  m->global_over = h->format->global == CUMOE_GLOBAL_OVER;
  m->global_stride = first->ld;
  for (int i = 0; i < h->count; ++i) {
    const cumoe_view *v = &h->of[i].projection->global;
    m->global[i] = (const float *)v->data + (v->cols > 1 ? i : 0);
  }
}

/* Strides of one row or one expert may be any: nobody steps by them. */
static int64_t in_codes(int64_t stride, int64_t codes)
{
  return (int64_t)((uint64_t)stride * (uint64_t)codes);
}

static expert_matrix normal_form(const halves *h)
{
  const cumoe_projection *first = h->of[0].projection;
  const cumoe_array data = data_of(first);
  const cumoe_view *v = &first->data, *bias = &first->bias;
  const int64_t codes = storage_codes(h->format);
  expert_matrix m = {.format = h->class, .offset = h->format->offset};
  m.expert_stride = in_codes(expert_stride_of(&data), codes);
  m.n_stride = in_codes(h->major == CUMOE_OUT_IN ? in_codes(v->ld, codes) : 1, h->step);
  m.k_stride = h->major == CUMOE_OUT_IN ? 1 : v->ld;
  m.bias_expert_stride = bias->ld;
  m.bias_n_stride = h->step;
  m.bias_dtype = bias->data ? bias->dtype : DT_NONE;
  for (int i = 0; i < h->count; ++i) {
    const cumoe_projection *p = h->of[i].projection;
    m.base[i] = bytes_at(p->data.data, code_offset(h, i));
    m.bias[i] = bytes_at(p->bias.data, h->of[i].first * (int64_t)cumoe_dtype_bytes((cumoe_dtype)p->bias.dtype));
  }
  m.scale = scale_form(h);
  m.zero = zero_form(h);
  set_globals(h, &m);
  return m;
}

/* ---- pointer tables: they travel to the device once, here ---- */

enum { MAX_TABLES = 11 /* gate, up, down; codes, scales, zero points of each; orders of up and down */ };

typedef struct tables {
  const void **host, **device; /* MAX_TABLES rows of `experts` */
  size_t experts, rows;        /* rows used */
} tables;

/* Fills a row from an array of pointers, each `offset` bytes further; returns where it will lie on the device. */
static const void *const *add_table(tables *t, const cumoe_array *a, int64_t offset)
{
  if (!a->per_expert) return NULL;
  const size_t at = t->rows++ * t->experts;
  for (size_t e = 0; e < t->experts; ++e) t->host[at + e] = bytes_at(a->per_expert[e], offset);
  return (const void *const *)(t->device + at);
}

static void fill_tables(const halves *h, tables *t, expert_matrix *m)
{
  for (int i = 0; i < h->count; ++i) {
    const cumoe_projection *p = h->of[i].projection;
    const cumoe_array data = data_of(p);
    m->table[i] = add_table(t, &data, code_offset(h, i));
    m->scale.table[i] = add_table(t, &p->scale, scale_offset(h, i));
    m->zero.table[i] = (const uint32_t *const *)add_table(t, &p->zero, zero_offset(h, i));
  }
}

static bool points(const cumoe_projection *p)
{
  return p->per_expert || p->scale.per_expert || p->zero.per_expert || p->order.per_expert;
}

static cumoe_status upload_tables(struct context *context, struct weights *w, const halves *up, const halves *down)
{
  const cumoe_projection *last = up->of[up->count - 1].projection;
  if (!points(up->of[0].projection) && !points(last) && !points(down->of[0].projection)) return CUMOE_OK;
  const size_t bytes = MAX_TABLES * (size_t)w->experts * sizeof(void *);
  tables t = {.host = malloc(bytes), .experts = (size_t)w->experts};
  if (!t.host) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", bytes);
  w->table_bytes = bytes;
  cumoe_status status = pool_alloc(context, bytes, NULL, &w->tables);
  if (status == CUMOE_OK) {
    t.device = w->tables;
    fill_tables(up, &t, &w->up);
    fill_tables(down, &t, &w->down);
    w->up_order.table = (const int32_t *const *)add_table(&t, &last->order, 0);
    w->down_order.table = (const int32_t *const *)add_table(&t, &down->of[0].projection->order, 0);
    const size_t used = t.rows * t.experts * sizeof(void *);
    status = memory_copy(context, w->tables, used, t.host, used, used, 1, cudaMemcpyHostToDevice, NULL);
    if (status == CUMOE_OK) status = memory_wait(context, NULL);
  }
  free(t.host);
  return status;
}

/* ---- what is bound ---- */

static int by_address(const void *a, const void *b)
{
  const uintptr_t x = *(const uintptr_t *)a, y = *(const uintptr_t *)b;
  return (x > y) - (x < y);
}

static void add_part(struct weights *w, bound_part part)
{
  w->parts[w->part_count++] = part;
}

/* The addresses of pointers go to `begins`; the part reads them there. */
static void note_array(struct weights *w, const char *name, const cumoe_array *a, uintptr_t *begins)
{
  const size_t experts = (size_t)w->experts, element = cumoe_dtype_bytes((cumoe_dtype)a->data.dtype);
  cumoe_view one = a->data;
  bound_part part = {.name = name, .owner = one.owner, .count = w->experts};
  if (array_absent(a)) return;
  if (a->per_expert) {
    for (size_t e = 0; e < experts; ++e) begins[e] = (uintptr_t)a->per_expert[e];
    qsort(begins, experts, sizeof *begins, by_address);
    one.data = (const void *)begins[0];
    part.begins = begins;
  }
  part.first = span_of(&one);
  part.stride = (uintptr_t)expert_stride_of(a) * element;
  add_part(w, part);
}

static void note_view(struct weights *w, const char *name, const cumoe_view *v)
{
  if (v->data) add_part(w, (bound_part){name, v->owner, span_of(v), 0, NULL, 1});
}

/* `begins`: room for four tables. */
static void note_projection(struct weights *w, const char *const *names, const cumoe_projection *p, uintptr_t *begins)
{
  const size_t experts = (size_t)w->experts;
  const cumoe_array data = data_of(p);
  note_array(w, names[0], &data, begins);
  note_array(w, names[1], &p->scale, begins + experts);
  note_array(w, names[2], &p->zero, begins + 2 * experts);
  note_array(w, names[3], &p->order, begins + 3 * experts);
  note_view(w, names[4], &p->bias);
  note_view(w, names[5], &p->global);
  note_view(w, names[6], &p->input_scale);
}

static void note_parts(const cumoe_weights_desc *d, struct weights *w)
{
#define PARTS(name)                                                                                                    \
  {                                                                                                                    \
#name, #name ".scale", #name ".zero", #name ".order", #name ".bias", #name ".global", #name ".input_scale"         \
  }
  static const char *const names[][7] = {PARTS(gate), PARTS(up), PARTS(gate_up), PARTS(down)};
#undef PARTS
  uintptr_t *const begins = w->begins;
  const size_t room = 4 * (size_t)w->experts;
  const bool separate = d->gate_order == CUMOE_GATE_UP_SEPARATE, ungated = d->gate_order == CUMOE_UNGATED;
  if (separate) note_projection(w, names[0], &d->gate, begins);
  if (separate || ungated)
    note_projection(w, names[1], &d->up, begins + room);
  else
    note_projection(w, names[2], &d->gate_up, begins + room);
  note_projection(w, names[3], &d->down, begins + 2 * room);
}

static uintptr_t begin_of(const bound_part *p, int32_t index)
{
  return p->begins ? p->begins[index] : p->first.begin + (uintptr_t)index * p->stride;
}

/* The first matrix that ends behind `address`; `count` without. */
static int32_t first_behind(const bound_part *p, uintptr_t address)
{
  const uintptr_t extent = p->first.end - p->first.begin;
  int32_t low = 0, high = p->count;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (begin_of(p, middle) + extent > address)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/* Looks at those matrices alone that the output may touch: most often none, for it lies elsewhere. */
static bool lies_over(const span *output, const bound_part *p)
{
  const uintptr_t extent = p->first.end - p->first.begin;
  if (output->begin == output->end || output->end <= p->first.begin) return false;
  if (output->begin >= begin_of(p, p->count - 1) + extent) return false;
  for (int32_t i = first_behind(p, output->begin); i < p->count && begin_of(p, i) < output->end; ++i) {
    const uintptr_t begin = begin_of(p, i);
    const span matrix = {begin, begin + extent, p->first.width, p->first.pitch};
    if (spans_overlap(output, &matrix)) return true;
  }
  return false;
}

cumoe_status check_off_weights(const named_view *outputs, int count, const char *name, const struct weights *w)
{
  for (int i = 0; i < count; ++i) {
    const span output = span_of(&outputs[i].view);
    for (int32_t p = 0; p < w->part_count; ++p)
      REQUIRE(!lies_over(&output, &w->parts[p]), CUMOE_ERR_INVALID_ARGUMENT, "%s overlaps %s: %s", outputs[i].name,
              name, w->parts[p].name);
  }
  return CUMOE_OK;
}

/* ---- binding ---- */

/* What of an expert's own activations become. */
static row_order order_of(const halves *h)
{
  const cumoe_format *f = h->format;
  const cumoe_projection *p = h->of[h->count - 1].projection;
  row_order o = {.by_expert = by_expert(f)};
  if (f->rows == CUMOE_ROWS_STATIC_EXPERT) o.static_stride = p->input_scale.ld;
  if (!f->act_order) return o;
  o.base = p->order.data.data;
  o.stride = expert_stride_of(&p->order);
  return o;
}

static weight_major major_of(const expert_matrix *b)
{
  return b->k_stride == 1 ? MAJOR_K : MAJOR_N;
}

static bound_matrix facts_of(const halves *h, const expert_matrix *m, int32_t experts)
{
  return (bound_matrix){major_of(m), tmap_serves(m, (int32_t)h->channels, experts, h->count == 2)};
}

static cumoe_status bind(struct context *context, const cumoe_weights_desc *d, int32_t dtype, struct weights *w)
{
  const halves up = halves_of_up(d, dtype), down = halves_of_down(d, dtype);
  *w = (struct weights){.context = context,
                        .experts = d->experts,
                        .hidden = d->hidden,
                        .inter = d->inter,
                        .dtype = dtype,
                        .gated = up.count == 2,
                        .up_format = d->up_format,
                        .down_format = d->down_format};
  note_parts(d, w);
  w->up = normal_form(&up);
  w->down = normal_form(&down);
  w->up_rows = rows_of(up.format, up.of[0].projection->input_scale.data);
  w->down_rows = rows_of(down.format, d->down.input_scale.data);
  w->up_order = order_of(&up);
  w->down_order = order_of(&down);
  TRY(load_for_weights(context, up.class));
  TRY(load_for_weights(context, down.class));
  TRY(upload_tables(context, w, &up, &down));
  w->up_facts = facts_of(&up, &w->up, w->experts);
  w->down_facts = facts_of(&down, &w->down, w->experts);
  return CUMOE_OK;
}

/* A stack [experts * rows, cols] becomes expert 0's matrix; the packed stride is the default. */
static void unstack(cumoe_view *data, bool pointers, int64_t stride, int32_t experts, int64_t rows)
{
  if (!pointers && stride == 0 && experts > 0 && data->rows == experts * rows) data->rows = rows;
}

static void unstack_projection(cumoe_projection *p, const cumoe_format *f, int32_t experts, int64_t rows,
                               int64_t scales, int64_t out)
{
  unstack(&p->data, p->per_expert, p->expert_stride, experts, rows);
  unstack(&p->scale.data, p->scale.per_expert, p->scale.expert_stride, experts, scales);
  unstack(&p->zero.data, p->zero.per_expert, p->zero.expert_stride, experts, has_values(f) ? scales : (out + 7) / 8);
  unstack(&p->order.data, p->order.per_expert, p->order.expert_stride, experts, 1);
}

static void unstack_all(cumoe_weights_desc *d)
{
  const bool up_out_in = d->up_major == CUMOE_OUT_IN, down_out_in = d->down_major == CUMOE_OUT_IN;
  const int64_t inter = d->inter, hidden = d->hidden;
  const cumoe_format *up = &d->up_format, *down = &d->down_format;
  unstack_projection(&d->gate_up, up, d->experts, up_out_in ? 2 * inter : hidden,
                     scale_rows(up, 2 * inter, 2, is_interleaved(d->gate_order)), 2 * inter);
  unstack_projection(&d->gate, up, d->experts, up_out_in ? inter : hidden, scale_rows(up, inter, 1, false), inter);
  unstack_projection(&d->up, up, d->experts, up_out_in ? inter : hidden, scale_rows(up, inter, 1, false), inter);
  unstack_projection(&d->down, down, d->experts, down_out_in ? hidden : inter, scale_rows(down, hidden, 1, false),
                     hidden);
}

/* ---- as objects ---- */

static cumoe_status check_owners(const char *name, const struct weights *w)
{
  for (int32_t i = 0; i < w->part_count; ++i)
    REQUIRE(w->parts[i].owner == 0 || buffer_lives(w->parts[i].owner), CUMOE_ERR_STALE_HANDLE,
            "%s: %s is bound to a buffer that was freed", name, w->parts[i].name);
  return CUMOE_OK;
}

cumoe_status find_weights(const char *name, cumoe_weights handle, const struct plan *plan, bool shared,
                          const struct weights **weights)
{
  void *found;
  const cumoe_moe_desc *d = &plan->desc;
  const int32_t experts = shared ? 1 : d->local_experts, inter = shared ? d->shared_inter : d->inter;
  TRY(find_object(OBJECT_WEIGHTS, name, handle, &found));
  const struct weights *w = *weights = found;
  REQUIRE(w->context == plan->context, CUMOE_ERR_WRONG_DEVICE, "%s belongs to another context than the plan", name);
  REQUIRE(w->dtype == d->dtype, CUMOE_ERR_WRONG_DTYPE, "%s are %s, desc.dtype is %s", name,
          cumoe_dtype_name((cumoe_dtype)w->dtype), cumoe_dtype_name((cumoe_dtype)d->dtype));
  REQUIRE(w->experts == experts && w->hidden == d->hidden && w->inter == inter, CUMOE_ERR_INVALID_ARGUMENT,
          "%s have experts %d, hidden %d, inter %d; the plan needs %d, %d, %d", name, (int)w->experts, (int)w->hidden,
          (int)w->inter, (int)experts, (int)d->hidden, (int)inter);
  REQUIRE(w->gated == !(d->flags & CUMOE_MOE_UNGATED), CUMOE_ERR_LAYOUT, "%s are %s, the plan is %s", name,
          w->gated ? "gated" : "ungated", w->gated ? "ungated" : "gated");
  REQUIRE(same_format(&w->up_format, format_of(d, true, shared)) &&
              same_format(&w->down_format, format_of(d, false, shared)),
          CUMOE_ERR_LAYOUT, "%s have other formats than the plan's %s", name,
          shared ? "shared_up_format and shared_down_format" : "up_format and down_format");
  return check_owners(name, w);
}

cumoe_status find_any_weights(const char *name, cumoe_weights handle, const struct weights **weights)
{
  void *found;
  TRY(find_object(OBJECT_WEIGHTS, name, handle, &found));
  *weights = found;
  return check_owners(name, *weights);
}

static cumoe_status drop(void *object)
{
  struct weights *w = object;
  const cumoe_status status = pool_drop(w->context, w->tables, w->table_bytes);
  free(w);
  return status;
}

static cumoe_status drop_all(struct context *context)
{
  return retire_objects(OBJECT_WEIGHTS, context, drop);
}

/* `w` is on the host's heap; what it becomes when it fails is the caller's. */
static cumoe_status bind_and_publish(struct context *context, const cumoe_weights_desc *d, int32_t dtype,
                                     struct weights *w, cumoe_weights *weights)
{
  device_scope scope;
  TRY(enter_device(context, &scope));
  cumoe_status status = bind(context, d, dtype, w);
  on_close(context, CLOSE_WEIGHTS, drop_all);
  watch_leaks(context);
  if (status == CUMOE_OK) *weights = publish_object(OBJECT_WEIGHTS, context, w);
  if (status == CUMOE_OK && !*weights) status = fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for more weights");
  if (status != CUMOE_OK && w->tables) (void)pool_free(context, w->tables, w->table_bytes, NULL);
  leave_device(&scope);
  return status;
}

static bool any_points(const cumoe_weights_desc *d)
{
  return points(&d->gate_up) || points(&d->gate) || points(&d->up) || points(&d->down);
}

cumoe_status cumoe_weights_bind(cumoe_context handle, const cumoe_weights_desc *desc, cumoe_weights *weights)
{
  begin_call(__func__);
  struct context *context;
  cumoe_weights_desc d;
  if (!weights) return fail(CUMOE_ERR_INVALID_ARGUMENT, "weights is null");
  *weights = NULL;
  TRY(find_context(handle, &context));
  TRY(take_struct("desc", desc, &d));
  int32_t dtype = DT_NONE;
  unstack_all(&d);
  TRY(check_weights_desc(context, &d, &dtype));
  const size_t host_bytes = sizeof(struct weights) + (any_points(&d) ? 12 * (size_t)d.experts * sizeof(uintptr_t) : 0);
  struct weights *w = malloc(host_bytes);
  if (!w) return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", host_bytes);
  const cumoe_status status = bind_and_publish(context, &d, dtype, w, weights);
  if (status != CUMOE_OK) free(w);
  return status;
}

cumoe_status cumoe_weights_destroy(cumoe_weights handle)
{
  begin_call(__func__);
  void *found;
  if (!handle) return CUMOE_OK;
  TRY(find_object(OBJECT_WEIGHTS, "weights", handle, &found));
  if (!retire_object(handle)) return find_object(OBJECT_WEIGHTS, "weights", handle, &found);
  struct weights *w = found;
  const cumoe_status status = pool_free(w->context, w->tables, w->table_bytes, NULL);
  free(w);
  return status;
}
