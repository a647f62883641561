/* Elementwise operations, softmax, norms: check, fill the argument struct, dispatch. The product is in matmul.c. */
#include "buffer.h"
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "status.h"
#include "../include/cumoe/ops.h"

/* ---- what all share ---- */

static bool in_packets(cumoe_view v)
{
  const int64_t ld = v.ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  return (uintptr_t)v.data % 16 == 0 && (v.rows <= 1 || ld % 16 == 0);
}

/* ---- elementwise ---- */

/* A matrix without gaps is one long row. */
static void flatten(elementwise_args *e)
{
  if (e->rows > 1 && (e->a_ld != e->cols || e->y_ld != e->cols || (e->b && e->b_ld != e->cols))) return;
  e->cols *= e->rows;
  e->rows = 1;
}

static cumoe_status run_elementwise(struct context *context, int32_t function, cumoe_view a, cumoe_view b, float factor,
                                    cumoe_view_mut y, cumoe_stream stream)
{
  if (a.rows == 0 || a.cols == 0) return CUMOE_OK;
  elementwise_args e = {.a = a.data,
                        .b = b.data,
                        .y = y.data,
                        .a_ld = a.ld,
                        .b_ld = b.ld,
                        .y_ld = y.ld,
                        .rows = a.rows,
                        .cols = a.cols,
                        .factor = factor,
                        .function = function,
                        .dtype = a.dtype};
  e.aligned = in_packets(a) && in_packets(cumoe_const(y)) && (!b.data || in_packets(b));
  flatten(&e);
  ON_DEVICE(context, dispatch(context, OP_elementwise, &e, stream));
}

static cumoe_status unary(cumoe_context handle, int32_t function, float factor, cumoe_view x, cumoe_view_mut y,
                          cumoe_stream stream)
{
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_input(context, "x", x));
  TRY(check_same_shape(context, "y", cumoe_const(y), x));
  TRY(check_in_place("y", y, "x", x));
  return run_elementwise(context, function, x, (cumoe_view){0}, factor, y, stream);
}

static cumoe_status binary(cumoe_context handle, int32_t function, cumoe_view a, cumoe_view b, cumoe_view_mut y,
                           cumoe_stream stream)
{
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_input(context, "a", a));
  TRY(check_same_shape(context, "b", b, a));
  TRY(check_same_shape(context, "y", cumoe_const(y), a));
  TRY(check_in_place("y", y, "a", a));
  TRY(check_in_place("y", y, "b", b));
  return run_elementwise(context, function, a, b, 0, y, stream);
}

cumoe_status cumoe_add(cumoe_context handle, cumoe_view a, cumoe_view b, cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return binary(handle, EW_ADD, a, b, y, stream);
}

cumoe_status cumoe_mul(cumoe_context handle, cumoe_view a, cumoe_view b, cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return binary(handle, EW_MUL, a, b, y, stream);
}

cumoe_status cumoe_scale(cumoe_context handle, float factor, cumoe_view x, cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return unary(handle, EW_SCALE, factor, x, y, stream);
}

cumoe_status cumoe_relu(cumoe_context handle, cumoe_view x, cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return unary(handle, EW_RELU, 0, x, y, stream);
}

cumoe_status cumoe_sigmoid(cumoe_context handle, cumoe_view x, cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return unary(handle, EW_SIGMOID, 0, x, y, stream);
}

cumoe_status cumoe_silu(cumoe_context handle, cumoe_view x, cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return unary(handle, EW_SILU, 0, x, y, stream);
}

cumoe_status cumoe_gelu(cumoe_context handle, cumoe_view x, cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return unary(handle, EW_GELU, 0, x, y, stream);
}

cumoe_status cumoe_gelu_tanh(cumoe_context handle, cumoe_view x, cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return unary(handle, EW_GELU_TANH, 0, x, y, stream);
}

/* ---- rows ---- */

static cumoe_status check_rows(struct context *context, cumoe_view x, cumoe_view_mut y)
{
  TRY(check_input(context, "x", x));
  REQUIRE(x.cols <= INT32_MAX, CUMOE_ERR_INVALID_ARGUMENT, "x.cols is %lld, must be at most 2^31 - 1",
          (long long)x.cols);
  TRY(check_same_shape(context, "y", cumoe_const(y), x));
  return check_in_place("y", y, "x", x);
}

cumoe_status cumoe_softmax(cumoe_context handle, cumoe_view x, cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_rows(context, x, y));
  if (x.rows == 0 || x.cols == 0) return CUMOE_OK;
  const softmax_args s = {.x = x.data,
                          .y = y.data,
                          .x_ld = x.ld,
                          .y_ld = y.ld,
                          .rows = x.rows,
                          .cols = (int32_t)x.cols,
                          .dtype = x.dtype,
                          .aligned = in_packets(x) && in_packets(cumoe_const(y))};
  ON_DEVICE(context, dispatch(context, OP_softmax, &s, stream));
}

static cumoe_status check_parameter(struct context *context, const char *name, cumoe_view v, cumoe_view x,
                                    cumoe_view_mut y)
{
  const operand want = {name, 1, x.cols, DTYPE_BIT(x.dtype & 31) | DTYPE_BIT(CUMOE_F32), 0};
  TRY(check_optional(context, &want, v));
  return check_disjoint("y", y, name, v);
}

static cumoe_status norm(cumoe_context handle, bool centered, cumoe_view x, cumoe_view weight, cumoe_view bias,
                         float eps, cumoe_view_mut y, cumoe_stream stream)
{
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_rows(context, x, y));
  TRY(check_parameter(context, "weight", weight, x, y));
  TRY(check_parameter(context, "bias", bias, x, y));
  TRY(check_not_negative("eps", eps));
  if (x.rows == 0 || x.cols == 0) return CUMOE_OK;
  const norm_args n = {.x = x.data,
                       .weight = weight.data,
                       .bias = bias.data,
                       .y = y.data,
                       .x_ld = x.ld,
                       .y_ld = y.ld,
                       .rows = x.rows,
                       .cols = (int32_t)x.cols,
                       .dtype = x.dtype,
                       .weight_dtype = weight.dtype,
                       .bias_dtype = bias.dtype,
                       .aligned = in_packets(x) && in_packets(cumoe_const(y)) && in_packets(weight) && in_packets(bias),
                       .centered = centered,
                       .eps = eps};
  ON_DEVICE(context, dispatch(context, OP_norm, &n, stream));
}

cumoe_status cumoe_layernorm(cumoe_context handle, cumoe_view x, cumoe_view weight, cumoe_view bias, float eps,
                             cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return norm(handle, true, x, weight, bias, eps, y, stream);
}

cumoe_status cumoe_rmsnorm(cumoe_context handle, cumoe_view x, cumoe_view weight, float eps, cumoe_view_mut y,
                           cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return norm(handle, false, x, weight, (cumoe_view){0}, eps, y, stream);
}
