/* Activations and weights become codes (cumoe/quantize.h): check, fill the argument struct, dispatch. */
#include "arguments.h"
#include "buffer.h"
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "format.h"
#include "status.h"
#include "../include/cumoe/quantize.h"

/* ---- activations ---- */

static cumoe_status check_rows_format(const cumoe_format *f, int64_t cols)
{
  REQUIRE(cols >= 16 && cols <= 1 << 24 && cols % 16 == 0, CUMOE_ERR_INVALID_ARGUMENT,
          "x.cols is %lld, must be a multiple of 16, 16 .. 2^24", (long long)cols);
  TRY(check_format("format", f, cols, CUMOE_BF16, FORMAT_REPACK));
  REQUIRE(f->rows != CUMOE_ROWS_AS_THEY_ARE, CUMOE_ERR_INVALID_ARGUMENT,
          "format.rows is 0: activations stay as they are, there are no codes of them");
  REQUIRE(f->rows != CUMOE_ROWS_STATIC_EXPERT, CUMOE_ERR_NOT_SUPPORTED,
          "format.rows is %d: rows have no experts here, ROWS_STATIC takes one's scale", (int)f->rows);
  return CUMOE_OK;
}

enum { MOST_ROWS = INT32_MAX - (1 << 20) }; /* kernels look ahead of rows in 32 bits */

cumoe_status cumoe_quantize_rows(cumoe_context handle, const cumoe_format *format, cumoe_view x,
                                 cumoe_view static_scale, cumoe_view_mut codes, cumoe_view_mut scales,
                                 cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  TRY(find_context(handle, &context));
  REQUIRE(format, CUMOE_ERR_INVALID_ARGUMENT, "format is null");
  const cumoe_format f = *format;
  const operand x_want = {"x", x.rows, x.cols, FLOAT_BITS, 16};
  TRY(check_counted(context, &x_want, x));
  REQUIRE(x.rows <= MOST_ROWS, CUMOE_ERR_INVALID_ARGUMENT, "x.rows is %lld, must be at most %d", (long long)x.rows,
          (int)MOST_ROWS);
  TRY(check_rows_format(&f, x.cols));
  const row_format rows = rows_of(&f, static_scale.data);
  const operand static_want = {"static_scale", 1, 1, DTYPE_BIT(CUMOE_F32), 0},
                codes_want = {"codes", x.rows, x.cols, DTYPE_BIT(rows.element), 16},
                scales_want = {"scales", ROW_GROUPS(rows, x.cols), x.rows, DTYPE_BIT(CUMOE_F32), 0};
  TRY(f.rows == CUMOE_ROWS_STATIC ? check_operand(context, &static_want, static_scale)
                                  : check_absent("static_scale", static_scale, "format.rows is not ROWS_STATIC"));
  TRY(check_operand(context, &codes_want, cumoe_const(codes)));
  if (x.rows) TRY(check_operand(context, &scales_want, cumoe_const(scales)));
  const named_view views[] = {
      {"codes", cumoe_const(codes)}, {"scales", cumoe_const(scales)}, {"x", x}, {"static_scale", static_scale}};
  TRY(check_overlaps(views, 2, 4));
  if (x.rows == 0) return CUMOE_OK;
  const quantize_args a = {.x = x.data,
                           .codes = codes.data,
                           .scale = scales.data,
                           .x_ld = x.ld,
                           .codes_ld = codes.ld,
                           .scale_ld = scales.ld,
                           .rows = all_tokens(x.rows),
                           .cols = (int32_t)x.cols,
                           .dtype = x.dtype,
                           .format = rows};
  ON_DEVICE(context, dispatch(context, OP_quantize, &a, stream));
}

/* ---- weights ---- */

/* What lies in one matrix. */
typedef struct joint {
  int32_t halves, parts; /* 2: gate and up; whose blocks are counted apart */
  bool interleaved, up_first;
} joint;

static cumoe_status joint_of(const cumoe_quantize_args *q, joint *j)
{
  const int32_t order = q->gate_order;
  REQUIRE(order >= 0 && order <= CUMOE_UNGATED, CUMOE_ERR_LAYOUT, "args.gate_order is %d, not a cumoe_gate_order",
          (int)order);
  const bool both = order >= CUMOE_GATE_UP_CONCAT && order <= CUMOE_UP_GATE_INTERLEAVED;
  j->halves = both ? 2 : 1;
  j->interleaved = is_interleaved(order);
  j->up_first = order == CUMOE_UP_GATE_CONCAT || order == CUMOE_UP_GATE_INTERLEAVED;
  j->parts = scale_parts(&q->format, j->halves, j->interleaved);
  return CUMOE_OK;
}

static cumoe_status check_encodable(const cumoe_format *f, const joint *j)
{
  REQUIRE(!is_dense(f), CUMOE_ERR_INVALID_ARGUMENT, "args.format.element is 0 (dense): there are no codes");
  REQUIRE(!has_values(f), CUMOE_ERR_NOT_SUPPORTED, "args.format.zero is %d: no weights are rounded to ZERO_VALUES",
          (int)f->zero);
  REQUIRE(f->block[0] == 1 || !(f->zero || f->global), CUMOE_ERR_NOT_SUPPORTED,
          "args.format.block[0] is %d, must be 1 with zero points or a global scale", (int)f->block[0]);
  REQUIRE(f->element != CUMOE_ELEMENT_U4 || f->zero || f->offset % 15, CUMOE_ERR_NOT_SUPPORTED,
          "args.format.offset is %d: without zero points one of the signs has no codes", (int)f->offset);
  REQUIRE(!f->zero || (f->offset + f->zero_add >= -15 && f->offset + f->zero_add <= 15), CUMOE_ERR_NOT_SUPPORTED,
          "args.format: offset %d + zero_add %d, must be -15 .. 15", (int)f->offset, (int)f->zero_add);
  TRY(check_halves("args.format", f, j->halves == 2 && !j->interleaved, j->interleaved));
  REQUIRE(!j->interleaved || !f->zero, CUMOE_ERR_NOT_SUPPORTED,
          "args.format.zero is %d: interleaved channels have no zero points", (int)f->zero);
  return CUMOE_OK;
}

static cumoe_view_mut shape(cumoe_view_mut v, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  return cumoe_matrix_mut(v.data, dtype, rows, cols, cols);
}

/* Of all that is written. */
static cumoe_status shapes_of(cumoe_quantize_args *q, joint *j)
{
  const cumoe_format *f = &q->format;
  const int64_t limit = 1 << 24, rows = q->weights.rows, cols = q->weights.cols;
  REQUIRE(q->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.reserved is %d, must be 0", (int)q->reserved);
  REQUIRE(q->experts >= 1 && q->experts <= CUMOE_MAX_EXPERTS, CUMOE_ERR_INVALID_ARGUMENT,
          "args.experts is %d, must be 1 .. %d", (int)q->experts, CUMOE_MAX_EXPERTS);
  TRY(joint_of(q, j));
  const int64_t unit = (int64_t)q->experts * j->halves, out = rows / q->experts;
  REQUIRE(rows >= 1 && rows % unit == 0 && out <= limit && cols >= 16 && cols % 16 == 0 && cols <= limit,
          CUMOE_ERR_INVALID_ARGUMENT,
          "args.weights is [%lld, %lld], must be [%d * out, in] with out a multiple of %d, in of 16, both up to 2^24",
          (long long)rows, (long long)cols, (int)q->experts, (int)j->halves);
  TRY(check_format("args.format", f, cols, CUMOE_BF16, FORMAT_IN_PLACE));
  TRY(check_encodable(f, j));
  const int64_t blocks = blocks_of(f->block[1], f->origin[1], cols);
  q->codes = shape(q->codes, storage_dtype(f, 0), rows, cols / storage_codes(f));
  q->scale = shape(q->scale, (cumoe_dtype)f->scale, q->experts * scale_rows(f, out, j->halves, j->interleaved), blocks);
  q->zero = f->zero ? shape(q->zero, CUMOE_I32, q->experts * ((out + 7) / 8), blocks) : (cumoe_view_mut){0};
  q->global = f->global ? shape(q->global, CUMOE_F32, q->experts, j->halves) : (cumoe_view_mut){0};
  return CUMOE_OK;
}

cumoe_status cumoe_quantize_shapes(cumoe_quantize_args *args)
{
  begin_call(__func__);
  cumoe_quantize_args q;
  joint j;
  TRY(take_struct("args", args, &q));
  TRY(shapes_of(&q, &j));
  give_struct(&q, args);
  return CUMOE_OK;
}

static cumoe_status check_output(struct context *context, const char *name, cumoe_view_mut given, cumoe_view_mut want,
                                 uint32_t also, uint32_t align)
{
  const operand o = {name, want.rows, want.cols, DTYPE_BIT(want.dtype) | also, align};
  return want.rows ? check_operand(context, &o, cumoe_const(given))
                   : check_absent(name, cumoe_const(given), "the format has none");
}

static cumoe_status check_quantize(struct context *context, const cumoe_quantize_args *q, joint *j)
{
  cumoe_quantize_args want = *q;
  TRY(check_owner(context, "args.weights", &q->weights)); /* its shape means nothing once it is freed */
  TRY(shapes_of(&want, j));
  const operand weights = {"args.weights", q->weights.rows, q->weights.cols, FLOAT_BITS, 16};
  TRY(check_operand(context, &weights, q->weights));
  TRY(check_output(context, "args.codes", q->codes, want.codes, 0, 16));
  TRY(check_output(context, "args.scale", q->scale, want.scale, scale_bits(&q->format), 0));
  TRY(check_output(context, "args.zero", q->zero, want.zero, 0, 0));
  if (want.global.cols == 2 && q->global.cols == 1) want.global.cols = 1;
  TRY(check_output(context, "args.global", q->global, want.global, 0, 0));
  const named_view views[] = {{"args.codes", cumoe_const(q->codes)},
                              {"args.scale", cumoe_const(q->scale)},
                              {"args.zero", cumoe_const(q->zero)},
                              {"args.global", cumoe_const(q->global)},
                              {"args.weights", q->weights}};
  return check_overlaps(views, 4, 5);
}

/* Threads a block: one for every four cells of 16 elements, up to a warp. */
static int32_t lanes_of(const encode_args *a)
{
  const int64_t rows = a->block_n < a->out ? a->block_n : 1, k = a->block_k < a->in ? a->block_k : a->in;
  int32_t lanes = 1;
  while (lanes < 32 && 2 * lanes * 64 <= rows * k) lanes *= 2;
  return lanes;
}

static encode_args encode_arguments(const cumoe_quantize_args *q, const joint *j)
{
  const cumoe_format *f = &q->format;
  const int64_t out = q->weights.rows / q->experts, in = q->weights.cols;
  encode_args a = {.w = q->weights.data,
                   .codes = q->codes.data,
                   .scale = q->scale.data,
                   .zero = q->zero.data,
                   .global = q->global.data,
                   .w_ld = q->weights.ld,
                   .codes_ld = q->codes.ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)q->codes.dtype),
                   .scale_ld = q->scale.ld,
                   .zero_ld = q->zero.ld,
                   .global_ld = q->global.ld,
                   .experts = q->experts,
                   .out = (int32_t)out,
                   .in = (int32_t)in,
                   .parts = j->parts,
                   .block_n = f->block[0] ? f->block[0] : (int32_t)ROWS_ONE_GROUP,
                   .block_k = f->block[1] ? f->block[1] : (int32_t)ROWS_ONE_GROUP,
                   .n_origin = f->block[0] ? f->origin[0] : 0,
                   .k_origin = f->block[1] ? f->origin[1] : 0,
                   .n_blocks = (int32_t)blocks_of(f->block[0], f->origin[0], out / j->parts),
                   .k_blocks = (int32_t)blocks_of(f->block[1], f->origin[1], in),
                   .halves = q->global.cols == 2 ? 2 : 1,
                   .interleaved = j->interleaved,
                   .up_first = q->global.cols == 2 && j->up_first,
                   .dtype = q->weights.dtype,
                   .format = class_of(f, 0),
                   .scale_dtype = f->scale,
                   .offset = f->offset,
                   .zero_add = f->zero_add,
                   .global_over = f->global == CUMOE_GLOBAL_OVER};
  a.lanes = lanes_of(&a);
  return a;
}

/* Scales that whole matrices share come first: both launches or neither. */
static cumoe_status run_encode(struct context *context, encode_args *a, cumoe_stream stream)
{
  const bool two = a->global || ENCODE_SCALES_FIRST(a);
  encode_args scales = *a;
  launch_step first, codes;
  scales.units = (int64_t)a->experts * (a->global ? a->halves : a->parts * a->k_blocks);
  a->units = (int64_t)a->experts * ENCODE_ROWS(a) * a->k_blocks * (on_cpu(context) ? 1 : a->lanes);
  if (two) TRY(choose_step(context, OP_encode_scales, &scales, NULL, &first));
  TRY(choose_step(context, OP_encode, a, NULL, &codes));
  if (two) TRY(launch(context, &first, &scales, stream));
  return launch(context, &codes, a, stream);
}

cumoe_status cumoe_quantize_weights(cumoe_context handle, const cumoe_quantize_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_quantize_args q;
  joint j;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &q));
  TRY(check_quantize(context, &q, &j));
  encode_args a = encode_arguments(&q, &j);
  ON_DEVICE(context, run_encode(context, &a, stream));
}
