/* Checks of a description of weights: every layout that is documented, and no other. */
#include "weights_desc.h"
#include "buffer.h"
#include "status.h"

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
  REQUIRE(!p.per_expert || p.expert_stride == 0, CUMOE_ERR_LAYOUT,
          "%s.expert_stride is %lld, must be 0 with per_expert", s.name, (long long)p.expert_stride);
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

bool array_absent(const cumoe_array *a)
{
  return absent(&a->data) && !a->per_expert && a->expert_stride == 0;
}

/* Of what a format has: kernels of few tokens step over some sixteen of its rows in 32 bits. */
static cumoe_status check_scaled_array(struct context *context, cumoe_array p, array_shape s, int32_t experts)
{
  TRY(check_array(context, p, s, experts));
  const int64_t limit = (1 << 26) / (int64_t)cumoe_dtype_bytes((cumoe_dtype)p.data.dtype);
  REQUIRE(p.data.ld <= limit, CUMOE_ERR_NOT_SUPPORTED, "%s.ld is %lld, must be at most %lld (2^26 bytes)", s.data,
          (long long)p.data.ld, (long long)limit);
  return CUMOE_OK;
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
  if (!is_dense(f)) TRY(check_scaled_array(context, p->scale, scale, experts));
  REQUIRE(f->zero || array_absent(&p->zero), CUMOE_ERR_INVALID_ARGUMENT, "%s must be absent: %s.zero is 0", s->zero,
          s->format_name);
  if (f->zero) TRY(check_scaled_array(context, p->zero, has_values(f) ? values : words, experts));
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
  TRY((is_dense(s->format) ? check_array : check_scaled_array)(context, data_of(p), data, experts));
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
  REQUIRE(gate->input_scale.data == up->input_scale.data &&
              (gate->input_scale.rows <= 1 || gate->input_scale.ld == up->input_scale.ld),
          CUMOE_ERR_LAYOUT, "desc.gate.input_scale and desc.up.input_scale must be one: both multiply the same x");
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

cumoe_status check_weights_desc(struct context *context, const cumoe_weights_desc *d, int32_t *of)
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

/* ---- stacks ---- */

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

void unstack_all(cumoe_weights_desc *d)
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
