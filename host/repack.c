/* Weights that kernels do not read where they lie (cumoe/quantize.h: repack): check, fill the argument struct,
 * dispatch. */
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "format.h"
#include "status.h"
#include "../include/cumoe/quantize.h"

/* What becomes of a projection. */
typedef struct repacking {
  cumoe_format format; /* of the result */
  int64_t groups, scale_rows;
  int64_t source_rows;                         /* of the source's scales: all; of a slice those ahead of its own */
  int64_t code_bytes, scale_bytes, zero_bytes; /* of an expert */
  int64_t scale_at, zero_at, order_at, bytes;  /* places in an expert's room; all of it */
} repacking;

enum { ROOM_ALIGN = 256 };

static int64_t rounded_up(int64_t bytes)
{
  return (bytes + ROOM_ALIGN - 1) / ROOM_ALIGN * ROOM_ALIGN;
}

/* ---- formats ---- */

typedef struct ggml_kind {
  int32_t type, weights, bytes; /* of a block */
} ggml_kind;

static const ggml_kind *ggml_kind_of(int32_t type)
{
  static const ggml_kind kinds[] = {{GGML_Q4_0, 32, 18},   {GGML_Q4_1, 32, 20},   {GGML_Q8_0, 32, 34},
                                    {GGML_Q4_K, 256, 144}, {GGML_Q6_K, 256, 210}, {GGML_MXFP4, 32, 17}};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; ++i)
    if (kinds[i].type == type) return &kinds[i];
  return NULL;
}

static cumoe_format ggml_result(int32_t type)
{
  if (type == GGML_MXFP4) return cumoe_format_mxfp4();
  if (type == GGML_Q4_1 || type == GGML_Q4_K) {
    cumoe_format f = cumoe_format_affine4(32, type == GGML_Q4_1 ? CUMOE_F16 : CUMOE_F32);
    f.word = 1;
    return f;
  }
  if (type == GGML_Q4_0) {
    cumoe_format f = cumoe_format_int4(32, CUMOE_F16);
    f.word = 1;
    return f;
  }
  cumoe_format f = cumoe_format_int8(type == GGML_Q6_K ? CUMOE_F32 : CUMOE_F16);
  f.block[1] = type == GGML_Q6_K ? 16 : 32;
  f.rows = CUMOE_ROWS_AS_THEY_ARE;
  return f;
}

static cumoe_format result_of(const cumoe_format *from, bool ordered)
{
  if (from->ggml) return ggml_result(from->ggml);
  cumoe_format f = *from;
  f.act_order = ordered;
  f.word = 1;
  f.packed = CUMOE_PACKED_IN;
  f.order = 0;
  f.split = 0;
  f.zero_add = 0;
  if (f.block[0]) f.origin[0] %= f.block[0]; /* scales of other slices stay where they are */
  if (f.element == CUMOE_ELEMENT_S4) {
    f.element = CUMOE_ELEMENT_U4;
    f.offset = 8;
  }
  return f;
}

/* The inverse of an order. */
static uint32_t places_of(uint32_t order, int32_t codes)
{
  uint32_t places = order ? 0 : 0x76543210;
  for (uint32_t i = 0; order && i < (uint32_t)codes; ++i) places |= i << 4 * (order >> 4 * i & 15);
  return places;
}

static bool orders_a_word(uint32_t order, int32_t codes)
{
  uint32_t seen = 0;
  for (int32_t i = 0; i < codes; ++i) seen |= 1u << (order >> 4 * i & 15);
  return order == 0 || (seen == (1u << codes) - 1 && (codes == 8 || order >> 4 * codes == 0));
}

static cumoe_status check_source(const cumoe_repack_args *a)
{
  const cumoe_format *f = &a->format;
  const int32_t codes = storage_codes(f);
  REQUIRE(f->split <= 1, CUMOE_ERR_NOT_SUPPORTED, "args.format.split is %d, must be 0 or 1: of GGUF name the type",
          (int)f->split);
  REQUIRE(orders_a_word(f->order, codes), CUMOE_ERR_INVALID_ARGUMENT,
          "args.format.order is 0x%x, must be 0 or have each of 0 .. %d once", f->order, (int)codes - 1);
  REQUIRE(f->order == 0 || f->zero == 0 || codes == 8, CUMOE_ERR_NOT_SUPPORTED,
          "args.format.order is 0x%x: zero points have it too, so that words need 8 codes", f->order);
  REQUIRE(a->major == CUMOE_IN_OUT || f->packed || f->order || f->element == CUMOE_ELEMENT_S4 || !absent(&a->order),
          CUMOE_ERR_NOT_SUPPORTED, "args.format is read in place: cumoe_weights_bind takes it as it lies");
  REQUIRE(!has_values(f), CUMOE_ERR_NOT_SUPPORTED, "args.format.zero is %d: ZERO_VALUES are read in place",
          (int)f->zero);
  REQUIRE(!f->act_order, CUMOE_ERR_INVALID_ARGUMENT, "args.format.act_order is %d, must be 0: args.order says it",
          (int)f->act_order);
  REQUIRE(absent(&a->order) || f->origin[1] == 0, CUMOE_ERR_NOT_SUPPORTED,
          "args.format.origin[1] is %d, must be 0 with args.order: groups begin with the order", (int)f->origin[1]);
  REQUIRE(f->element != CUMOE_ELEMENT_S4 || f->zero == CUMOE_ZERO_NONE, CUMOE_ERR_NOT_SUPPORTED,
          "args.format.zero is %d, must be 0 with S4", (int)f->zero);
  return CUMOE_OK;
}

static cumoe_status check_ggml(const cumoe_repack_args *a)
{
  const cumoe_format only = cumoe_format_ggml(a->format.ggml);
  REQUIRE(same_format(&a->format, &only), CUMOE_ERR_INVALID_ARGUMENT,
          "args.format.ggml is %d, all else of it must be 0", (int)a->format.ggml);
  const ggml_kind *kind = ggml_kind_of(a->format.ggml);
  REQUIRE(kind, CUMOE_ERR_NOT_SUPPORTED,
          "args.format.ggml is %d, must be Q4_0 (2), Q4_1 (3), Q8_0 (8), Q4_K (12), Q6_K (14) or MXFP4 (39); codes of "
          "other sizes (Q2_K, Q3_K, Q5_K, ...) have no format here",
          (int)a->format.ggml);
  TRY(check_absent("args.order", a->order, "GGUF has none"));
  REQUIRE(a->major == CUMOE_OUT_IN, CUMOE_ERR_LAYOUT, "args.major is %d, must be CUMOE_OUT_IN for GGUF", (int)a->major);
  REQUIRE(a->in % kind->weights == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.in is %d, must be a multiple of %d", (int)a->in,
          (int)kind->weights);
  return CUMOE_OK;
}

static cumoe_status check_result(const cumoe_repack_args *a, repacking *r)
{
  const int32_t limit = 1 << 24;
  REQUIRE(a->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.reserved is %d, must be 0", (int)a->reserved);
  REQUIRE(a->experts >= 1 && a->experts <= CUMOE_MAX_EXPERTS, CUMOE_ERR_INVALID_ARGUMENT,
          "args.experts is %d, must be 1 .. %d", (int)a->experts, CUMOE_MAX_EXPERTS);
  REQUIRE(a->major == CUMOE_OUT_IN || a->major == CUMOE_IN_OUT, CUMOE_ERR_LAYOUT,
          "args.major is %d, must be CUMOE_OUT_IN or CUMOE_IN_OUT", (int)a->major);
  REQUIRE(a->out >= 8 && a->out % 8 == 0 && a->out <= limit && a->in >= 16 && a->in <= limit,
          CUMOE_ERR_INVALID_ARGUMENT, "args.out is %d, args.in is %d: must be 8 .. 2^24, out a multiple of 8",
          (int)a->out, (int)a->in);
  if (a->format.ggml) {
    TRY(check_ggml(a));
  } else {
    REQUIRE(!is_dense(&a->format), CUMOE_ERR_INVALID_ARGUMENT, "args.format.element is 0 (dense): there are no codes");
    TRY(check_format("args.format", &a->format, a->in, CUMOE_BF16, FORMAT_REPACK));
    TRY(check_source(a));
  }
  r->format = result_of(&a->format, !absent(&a->order));
  return check_format("args.format (repacked)", &r->format, a->in, CUMOE_BF16, FORMAT_IN_PLACE);
}

static cumoe_status measure(const cumoe_repack_args *a, repacking *r)
{
  TRY(check_result(a, r));
  const cumoe_format *f = &r->format;
  r->groups = blocks_of(f->block[1], f->origin[1], a->in);
  r->scale_rows = blocks_of(f->block[0], f->origin[0], a->out);
  r->source_rows = blocks_of(f->block[0], a->format.origin[0], a->out);
  r->code_bytes = format_bytes(class_of(f, 0), (int64_t)a->out * a->in);
  r->scale_bytes = r->scale_rows * r->groups * (int64_t)cumoe_dtype_bytes((cumoe_dtype)f->scale);
  r->zero_bytes = has_values(f) ? r->scale_bytes : f->zero ? a->out / 8 * r->groups * 4 : 0;
  r->scale_at = rounded_up(r->code_bytes);
  r->zero_at = r->scale_at + rounded_up(r->scale_bytes);
  r->order_at = r->zero_at + rounded_up(r->zero_bytes);
  r->bytes = r->order_at + (f->act_order ? rounded_up(4 * (int64_t)a->in) : 0);
  return CUMOE_OK;
}

cumoe_status cumoe_weights_repack_size(const cumoe_repack_args *args, size_t *bytes)
{
  begin_call(__func__);
  cumoe_repack_args a;
  repacking r;
  TRY(take_struct("args", args, &a));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(measure(&a, &r));
  *bytes = (size_t)a.experts * (size_t)r.bytes;
  return CUMOE_OK;
}

/* ---- orders ---- */

/* Where each group begins, by counting. */
static cumoe_status count_groups(const int32_t *g_idx, int32_t in, int32_t group, int32_t *order)
{
  const int32_t groups = in / group;
  for (int32_t k = 0; k < in; ++k) order[k] = 0; /* of which the first `groups` count */
  for (int32_t k = 0; k < in; ++k) {
    REQUIRE(g_idx[k] >= 0 && g_idx[k] < groups, CUMOE_ERR_INVALID_ARGUMENT, "g_idx[%d] is %d, must be 0 .. %d", (int)k,
            (int)g_idx[k], (int)groups - 1);
    ++order[g_idx[k]];
  }
  for (int32_t g = 0; g < groups; ++g)
    REQUIRE(order[g] == group, CUMOE_ERR_NOT_SUPPORTED,
            "g_idx has group %d %d times, must have it %d times: is it of a slice?", (int)g, (int)order[g], (int)group);
  return CUMOE_OK;
}

cumoe_status cumoe_order_of_groups(const int32_t *g_idx, int32_t in, int32_t group, int32_t *order)
{
  begin_call(__func__);
  REQUIRE(g_idx && order, CUMOE_ERR_INVALID_ARGUMENT, "%s is null", g_idx ? "order" : "g_idx");
  REQUIRE(in >= 1 && group >= 1 && in % group == 0, CUMOE_ERR_INVALID_ARGUMENT,
          "in is %d, group is %d: must be positive, and in a multiple of group", (int)in, (int)group);
  REQUIRE(order + in <= g_idx || g_idx + in <= order, CUMOE_ERR_INVALID_ARGUMENT, "order overlaps g_idx");
  TRY(count_groups(g_idx, in, group, order));
  for (int32_t g = 0; g < in / group; ++g) order[(g + 1) * group - 1] = 0;
  for (int32_t k = 0; k < in; ++k) { /* a group's last place says how many are placed, until it is the last's */
    int32_t *first = order + g_idx[k] * group, *last = first + group - 1;
    const int32_t placed = *last;
    if (placed == group - 1)
      *last = k;
    else
      first[placed] = k, *last = placed + 1;
  }
  return CUMOE_OK;
}

/* ---- what is read ---- */

/* Matrices one below the other, of all experts. */
static operand stack_of(const char *name, int32_t experts, int64_t rows, int64_t cols, uint32_t dtypes)
{
  return (operand){name, experts * rows, cols, dtypes, 0};
}

static operand codes_of(const cumoe_repack_args *a)
{
  const cumoe_format *f = &a->format;
  const bool in_out = a->major == CUMOE_IN_OUT;
  const uint32_t type = DTYPE_BIT(f->ggml ? CUMOE_U8 : storage_dtype(f, 0));
  if (f->ggml) {
    const ggml_kind *kind = ggml_kind_of(f->ggml);
    return stack_of("args.codes", a->experts, a->out, (int64_t)a->in / kind->weights * kind->bytes, type);
  }
  const int64_t word = storage_codes(f), out = f->packed ? a->out / word : a->out,
                in = f->packed ? a->in : a->in / word;
  return stack_of("args.codes", a->experts, in_out ? in : out, in_out ? out : in, type);
}

static cumoe_status check_repack(struct context *context, const cumoe_repack_args *a, const repacking *r,
                                 cumoe_view_mut to)
{
  const cumoe_format *f = &a->format;
  const bool in_out = a->major == CUMOE_IN_OUT;
  const operand codes = codes_of(a);
  const operand scale = stack_of("args.scale", a->experts, in_out ? r->groups : r->source_rows,
                                 in_out ? r->source_rows : r->groups, scale_bits(f)),
                zero = stack_of("args.zero", a->experts, in_out ? r->groups : a->out / 8,
                                in_out ? a->out / 8 : r->groups, DTYPE_BIT(CUMOE_I32));
  const operand order = {"args.order", a->order.rows == 1 ? 1 : a->experts, a->in, DTYPE_BIT(CUMOE_I32), 0};
  TRY(check_operand(context, &codes, a->codes));
  TRY(f->ggml ? check_absent("args.scale", a->scale, "blocks of GGUF have theirs inside")
              : check_operand(context, &scale, a->scale));
  TRY(f->zero ? check_operand(context, &zero, a->zero) : check_absent("args.zero", a->zero, "the format has none"));
  TRY(check_optional(context, &order, a->order));
  TRY(check_workspace_view(context, "to", cumoe_const(to), (size_t)(a->experts * r->bytes)));
  to.cols = a->experts * r->bytes;
  const named_view views[] = {{"to", cumoe_const(to)},
                              {"args.codes", a->codes},
                              {"args.scale", a->scale},
                              {"args.zero", a->zero},
                              {"args.order", a->order}};
  return check_overlaps(views, 1, 5);
}

static int64_t pitch_of(const cumoe_view *v)
{
  return v->ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v->dtype);
}

static repack_args repack_arguments(const cumoe_repack_args *a, const repacking *r, cumoe_view_mut to)
{
  const cumoe_format *f = &a->format;
  const int64_t scale = (int64_t)cumoe_dtype_bytes((cumoe_dtype)r->format.scale),
                skipped = (r->source_rows - r->scale_rows) * (a->major == CUMOE_IN_OUT ? scale : pitch_of(&a->scale));
  return (repack_args){.codes = a->codes.data,
                       .scale = skipped ? (const char *)a->scale.data + skipped : a->scale.data,
                       .zero = a->zero.data,
                       .order = a->order.data,
                       .to = to.data,
                       .codes_ld = pitch_of(&a->codes),
                       .scale_ld = pitch_of(&a->scale),
                       .zero_ld = pitch_of(&a->zero),
                       .codes_stride = pitch_of(&a->codes) * (a->codes.rows / a->experts),
                       .scale_stride = pitch_of(&a->scale) * (a->scale.rows / a->experts),
                       .zero_stride = pitch_of(&a->zero) * (a->zero.rows / a->experts),
                       .order_stride = a->order.rows > 1 ? a->order.ld : 0,
                       .to_stride = r->bytes,
                       .to_scale = r->scale_at,
                       .to_zero = r->zero_at,
                       .to_order = r->order_at,
                       .experts = a->experts,
                       .out = a->out,
                       .in = a->in,
                       .groups = (int32_t)r->groups,
                       .scale_rows = (int32_t)r->scale_rows,
                       .block_k = r->format.block[1] ? r->format.block[1] : (int32_t)ROWS_ONE_GROUP,
                       .k_origin = r->format.block[1] ? r->format.origin[1] : 0,
                       .bits = format_bits(class_of(&r->format, 0)),
                       .word = f->ggml ? 1 : storage_codes(f),
                       .in_out = a->major == CUMOE_IN_OUT,
                       .packed_out = f->packed == CUMOE_PACKED_OUT,
                       .places = places_of(f->order, storage_codes(f)),
                       .flip = f->element == CUMOE_ELEMENT_S4 ? 8 : 0,
                       .zero_add = f->zero_add,
                       .scale_bytes = (int32_t)scale,
                       .ggml = f->ggml};
}

/* ---- what is written, as bind takes it ---- */

static cumoe_view part(cumoe_view_mut to, int64_t at, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  return (cumoe_view){(char *)to.data + at, rows, cols, cols, to.owner, to.device, (int32_t)dtype};
}

static cumoe_projection projection_of(const cumoe_repack_args *a, const repacking *r, cumoe_view_mut to)
{
  const cumoe_format *f = &r->format;
  const cumoe_dtype codes = storage_dtype(f, 0), scale = (cumoe_dtype)f->scale;
  cumoe_projection p = {.data = part(to, 0, codes, a->out, a->in / storage_codes(f)), .expert_stride = r->bytes};
  p.scale.data = part(to, r->scale_at, scale, r->scale_rows, r->groups);
  p.scale.expert_stride = r->bytes / (int64_t)cumoe_dtype_bytes(scale);
  if (f->act_order) p.order = (cumoe_array){part(to, r->order_at, CUMOE_I32, 1, a->in), NULL, r->bytes / 4};
  if (!f->zero) return p;
  p.zero.data = part(to, r->zero_at, CUMOE_I32, a->out / 8, r->groups);
  p.zero.expert_stride = r->bytes / 4;
  if (!has_values(f)) return p;
  p.zero = p.scale;
  p.zero.data.data = (char *)to.data + r->zero_at;
  return p;
}

cumoe_status cumoe_weights_repack(cumoe_context handle, const cumoe_repack_args *args, cumoe_view_mut to,
                                  cumoe_projection *projection, cumoe_format *format, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_repack_args a;
  repacking r;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &a));
  REQUIRE(projection && format, CUMOE_ERR_INVALID_ARGUMENT, "%s is null", projection ? "format" : "projection");
  TRY(measure(&a, &r));
  TRY(check_repack(context, &a, &r, to));
  const repack_args kernel = repack_arguments(&a, &r, to);
  *projection = projection_of(&a, &r, to);
  *format = r.format;
  ON_DEVICE(context, dispatch(context, OP_repack, &kernel, stream));
}
