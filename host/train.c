/* What surrounds the layer in training: check, fill the kernels' argument structs, dispatch. */
#include "train.h"
#include "buffer.h"
#include "dispatch.h"
#include "../include/cumoe/train.h"

#include <stdio.h>

_Static_assert((int)FAULT_TOKEN_ID == (int)CUMOE_FAULT_TOKEN_ID && (int)FAULT_SEQUENCE == (int)CUMOE_FAULT_SEQUENCE,
               "kernels/train.h has other codes");

/* ---- what all share ---- */

/* A [1, count] vector of one of `dtypes`. */
static cumoe_status check_vector(struct context *context, const char *name, cumoe_view v, int64_t count,
                                 uint32_t dtypes)
{
  const operand want = {name, 1, count, dtypes, 0};
  return check_operand(context, &want, v);
}

cumoe_status check_count(const char *name, int64_t count)
{
  REQUIRE(count >= 0 && count <= INT32_MAX, CUMOE_ERR_INVALID_ARGUMENT, "%s is %lld, must be 0 .. 2^31 - 1", name,
          (long long)count);
  return CUMOE_OK;
}

cumoe_status check_flags(const char *name, uint32_t flags, uint32_t known)
{
  REQUIRE(!(flags & ~known), CUMOE_ERR_INVALID_ARGUMENT, "%s is 0x%x, known are 0x%x", name, flags, known);
  return CUMOE_OK;
}

cumoe_status check_zero(const char *name, int32_t reserved)
{
  REQUIRE(reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "%s is %d, must be 0", name, (int)reserved);
  return CUMOE_OK;
}

matrix matrix_of(cumoe_view v)
{
  return (matrix){(void *)(uintptr_t)v.data, v.ld, v.dtype};
}

matrix matrix_mut(cumoe_view_mut v)
{
  return matrix_of(cumoe_const(v));
}

/* A gradient of parameters like `x`'s, if it is wanted. */
static cumoe_status check_gradient(struct context *context, const char *name, cumoe_view_mut v, int64_t rows,
                                   int64_t cols, int32_t dtype)
{
  const operand want = {name, rows, cols, DTYPE_BIT(dtype & 31) | DTYPE_BIT(CUMOE_F32), 0};
  return check_optional(context, &want, cumoe_const(v));
}

/* ---- embedding ---- */

static cumoe_status check_ids(struct context *context, const char *name, cumoe_view ids)
{
  TRY(check_owner(context, name, &ids));
  const operand want = {name, 1, ids.cols, INDEX_BITS, 0};
  TRY(check_counted(context, &want, ids));
  return check_count(name, ids.cols);
}

cumoe_status cumoe_embedding(cumoe_context handle, cumoe_view table, cumoe_view ids, cumoe_view_mut y,
                             cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_input(context, "table", table));
  TRY(check_count("table.rows", table.rows));
  TRY(check_ids(context, "ids", ids));
  const operand want = {"y", ids.cols, table.cols, DTYPE_BIT(table.dtype & 31), 0};
  TRY(check_operand(context, &want, cumoe_const(y)));
  const named_view views[] = {{"y", cumoe_const(y)}, {"table", table}, {"ids", ids}};
  TRY(check_overlaps(views, 1, 3));
  const embedding_args e = {.units = table.cols ? ids.cols : 0,
                            .table = matrix_of(table),
                            .ids = matrix_of(ids),
                            .y = matrix_mut(y),
                            .tokens = ids.cols,
                            .vocabulary = table.rows,
                            .cols = table.cols,
                            .fault = context->fault};
  ON_DEVICE(context, dispatch(context, OP_embed, &e, stream));
}

static size_t sort_bytes(int64_t tokens, int64_t vocabulary)
{
  return (size_t)(vocabulary + 1 + tokens) * sizeof(int32_t);
}

cumoe_status cumoe_embedding_backward_workspace(cumoe_context handle, int64_t tokens, int64_t vocabulary, size_t *bytes)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(check_count("tokens", tokens));
  TRY(check_count("vocabulary", vocabulary));
  *bytes = sort_bytes(tokens, vocabulary);
  return CUMOE_OK;
}

static cumoe_status check_embedding_backward(struct context *context, const cumoe_embedding_backward_args *a)
{
  TRY(check_flags("args.flags", a->flags, CUMOE_TRAIN_ACCUMULATE));
  TRY(check_ids(context, "args.ids", a->ids));
  TRY(check_owner(context, "args.dy", &a->dy));
  const operand dy = {"args.dy", a->ids.cols, a->dy.cols, FLOAT_BITS, 0};
  TRY(check_counted(context, &dy, a->dy));
  const cumoe_view table = cumoe_const(a->dtable);
  TRY(check_owner(context, "args.dtable", &table));
  const operand want = {"args.dtable", table.rows, a->dy.cols, DTYPE_BIT(a->dy.dtype & 31) | DTYPE_BIT(CUMOE_F32), 0};
  TRY(check_counted(context, &want, table));
  TRY(check_count("args.dtable.rows", table.rows));
  TRY(check_scratch(context, cumoe_const(a->workspace), sort_bytes(a->ids.cols, table.rows)));
  const named_view views[] = {
      {"args.dtable", table}, {"args.workspace", cumoe_const(a->workspace)}, {"args.dy", a->dy}, {"args.ids", a->ids}};
  return check_overlaps(views, 2, 4);
}

static cumoe_status run_units(struct context *context, operation op, embedding_args *e, int64_t units,
                              cumoe_stream stream)
{
  e->units = units;
  return dispatch(context, op, e, stream);
}

static cumoe_status run_embedding_backward(struct context *context, embedding_args *e, cumoe_stream stream)
{
  if (on_cpu(context)) {
    TRY(run_units(context, OP_embedding_sort, e, 1, stream));
  } else {
    TRY(run_units(context, OP_embedding_clear, e, e->vocabulary + 1, stream));
    TRY(run_units(context, OP_embedding_count, e, e->tokens, stream));
    TRY(run_units(context, OP_embedding_scan, e, 1, stream));
    TRY(run_units(context, OP_embedding_place, e, e->tokens, stream));
  }
  return run_units(context, OP_embedding_backward, e, e->cols ? e->vocabulary : 0, stream);
}

cumoe_status cumoe_embedding_backward(cumoe_context handle, const cumoe_embedding_backward_args *args,
                                      cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_embedding_backward_args a;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &a));
  TRY(check_embedding_backward(context, &a));
  int32_t *begins = a.workspace.data;
  embedding_args e = {.table = matrix_mut(a.dtable),
                      .ids = matrix_of(a.ids),
                      .y = matrix_of(a.dy),
                      .begins = begins,
                      .order = begins + a.dtable.rows + 1,
                      .tokens = a.ids.cols,
                      .vocabulary = a.dtable.rows,
                      .cols = a.dy.cols,
                      .accumulate = (a.flags & CUMOE_TRAIN_ACCUMULATE) != 0,
                      .fault = context->fault};
  ON_DEVICE(context, run_embedding_backward(context, &e, stream));
}

/* ---- norms ---- */

/* On CUDA sums over runs of rows lie behind the rows' statistics. */
static size_t norm_bytes(struct context *context, int64_t rows, int64_t cols)
{
  const size_t sums = on_cpu(context) ? 0 : (size_t)NORM_RUNS(rows) * (size_t)cols;
  return ((size_t)rows + sums) * sizeof(double[2]);
}

cumoe_status cumoe_norm_backward_workspace(cumoe_context handle, int64_t rows, int64_t cols, size_t *bytes)
{
  begin_call(__func__);
  struct context *context;
  TRY(find_context(handle, &context));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(check_count("cols", cols));
  const int64_t most = ((int64_t)1 << 46) / (cols ? cols : 1);
  REQUIRE(rows >= 0 && rows <= most, CUMOE_ERR_INVALID_ARGUMENT, "rows is %lld, must be 0 .. 2^46 / cols = %lld",
          (long long)rows, (long long)most);
  *bytes = norm_bytes(context, rows, cols);
  return CUMOE_OK;
}

static cumoe_status check_norm_backward(struct context *context, const cumoe_norm_backward_args *a, bool centered)
{
  TRY(check_flags("args.flags", a->flags, CUMOE_TRAIN_ACCUMULATE));
  TRY(check_not_negative("args.eps", a->eps));
  TRY(check_zero("args.reserved", a->reserved));
  TRY(check_input(context, "args.x", a->x));
  TRY(check_count("args.x.cols", a->x.cols));
  TRY(check_same_shape(context, "args.dy", a->dy, a->x));
  const operand weight = {"args.weight", 1, a->x.cols, DTYPE_BIT(a->x.dtype & 31) | DTYPE_BIT(CUMOE_F32), 0};
  const operand dx = {"args.dx", a->x.rows, a->x.cols, DTYPE_BIT(a->x.dtype & 31), 0};
  TRY(check_optional(context, &weight, a->weight));
  TRY(check_optional(context, &dx, cumoe_const(a->dx)));
  TRY(check_gradient(context, "args.dweight", a->dweight, 1, a->x.cols, a->x.dtype));
  if (!centered) TRY(check_absent("args.dbias", cumoe_const(a->dbias), "rmsnorm has no bias"));
  TRY(check_gradient(context, "args.dbias", a->dbias, 1, a->x.cols, a->x.dtype));
  TRY(check_scratch(context, cumoe_const(a->workspace), norm_bytes(context, a->x.rows, a->x.cols)));
  const named_view views[] = {{"args.dx", cumoe_const(a->dx)},
                              {"args.dweight", cumoe_const(a->dweight)},
                              {"args.dbias", cumoe_const(a->dbias)},
                              {"args.workspace", cumoe_const(a->workspace)},
                              {"args.x", a->x},
                              {"args.weight", a->weight},
                              {"args.dy", unless_in_place(a->dy, a->dx)}};
  return check_overlaps(views, 4, 7);
}

static cumoe_status run_norm_backward(struct context *context, norm_backward_args *n, cumoe_stream stream)
{
  const bool parameters = n->dweight.data || n->dbias.data;
  n->units = n->cols ? n->rows : 0;
  TRY(dispatch(context, OP_norm_stats, n, stream));
  if (!on_cpu(context)) {
    n->units = parameters ? NORM_RUNS(n->rows) * NORM_PARTS(n->cols) : 0;
    TRY(dispatch(context, OP_norm_partials, n, stream));
  }
  n->units = parameters ? (n->cols + NORM_COLUMNS - 1) / NORM_COLUMNS : 0;
  TRY(dispatch(context, OP_norm_dparameters, n, stream));
  n->units = n->dx.data && n->cols ? n->rows : 0;
  return dispatch(context, OP_norm_dx, n, stream);
}

static cumoe_status norm_backward(cumoe_context handle, bool centered, const cumoe_norm_backward_args *args,
                                  cumoe_stream stream)
{
  struct context *context;
  cumoe_norm_backward_args a;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &a));
  TRY(check_norm_backward(context, &a, centered));
  norm_backward_args n = {.x = matrix_of(a.x),
                          .weight = matrix_of(a.weight),
                          .dy = matrix_of(a.dy),
                          .dx = matrix_mut(a.dx),
                          .dweight = matrix_mut(a.dweight),
                          .dbias = matrix_mut(a.dbias),
                          .stats = a.workspace.data,
                          .partials = (double *)a.workspace.data + 2 * a.x.rows,
                          .rows = a.x.rows,
                          .cols = a.x.cols,
                          .centered = centered,
                          .accumulate = (a.flags & CUMOE_TRAIN_ACCUMULATE) != 0,
                          .eps = a.eps};
  ON_DEVICE(context, run_norm_backward(context, &n, stream));
}

cumoe_status cumoe_layernorm_backward(cumoe_context context, const cumoe_norm_backward_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return norm_backward(context, true, args, stream);
}

cumoe_status cumoe_rmsnorm_backward(cumoe_context context, const cumoe_norm_backward_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return norm_backward(context, false, args, stream);
}

/* ---- elementwise, softmax ---- */

static cumoe_status elementwise_backward(cumoe_context handle, operation op, int32_t function, const char *name,
                                         cumoe_view x, cumoe_view dy, cumoe_view_mut dx, cumoe_stream stream)
{
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_input(context, name, x));
  TRY(check_same_shape(context, "dy", dy, x));
  TRY(check_same_shape(context, "dx", cumoe_const(dx), x));
  TRY(check_in_place("dx", dx, name, x));
  TRY(check_in_place("dx", dx, "dy", dy));
  const int64_t a_row = op == OP_softmax_backward ? 1 : RUNS_IN_ROW(x.cols);
  const elementwise_backward_args e = {.units = x.cols ? x.rows * a_row : 0,
                                       .x = matrix_of(x),
                                       .dy = matrix_of(dy),
                                       .dx = matrix_mut(dx),
                                       .cols = x.cols,
                                       .function = function};
  ON_DEVICE(context, dispatch(context, op, &e, stream));
}

#define ELEMENTWISE_BACKWARD(name, function)                                                                           \
  cumoe_status cumoe_##name##_backward(cumoe_context context, cumoe_view x, cumoe_view dy, cumoe_view_mut dx,          \
                                       cumoe_stream stream)                                                            \
  {                                                                                                                    \
    begin_call_on(__func__, stream);                                                                                   \
    return elementwise_backward(context, OP_elementwise_backward, function, "x", x, dy, dx, stream);                   \
  }
ELEMENTWISE_BACKWARD(relu, EW_RELU)
ELEMENTWISE_BACKWARD(sigmoid, EW_SIGMOID)
ELEMENTWISE_BACKWARD(silu, EW_SILU)
ELEMENTWISE_BACKWARD(gelu, EW_GELU)
ELEMENTWISE_BACKWARD(gelu_tanh, EW_GELU_TANH)

cumoe_status cumoe_softmax_backward(cumoe_context context, cumoe_view y, cumoe_view dy, cumoe_view_mut dx,
                                    cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  REQUIRE(y.cols <= INT32_MAX, CUMOE_ERR_INVALID_ARGUMENT, "y.cols is %lld, must be at most 2^31 - 1",
          (long long)y.cols);
  return elementwise_backward(context, OP_softmax_backward, 0, "y", y, dy, dx, stream);
}

/* ---- loss ---- */

static cumoe_status check_cross_entropy(struct context *context, const cumoe_cross_entropy_args *a)
{
  const bool ignores = a->flags & CUMOE_LOSS_IGNORE;
  TRY(check_flags("args.flags", a->flags, CUMOE_LOSS_IGNORE));
  TRY(check_finite("args.scale", a->scale));
  TRY(check_zero("args.reserved", a->reserved));
  REQUIRE(a->ignore == 0 || ignores, CUMOE_ERR_INVALID_ARGUMENT, "args.ignore is %lld, must be 0 without LOSS_IGNORE",
          (long long)a->ignore);
  TRY(check_input(context, "args.logits", a->logits));
  TRY(check_count("args.logits.rows", a->logits.rows));
  TRY(check_count("args.logits.cols", a->logits.cols));
  TRY(check_vector(context, "args.targets", a->targets, a->logits.rows, INDEX_BITS));
  TRY(check_vector(context, "args.loss", cumoe_const(a->loss), 1, DTYPE_BIT(CUMOE_F32)));
  TRY(check_vector(context, "args.losses", cumoe_const(a->losses), a->logits.rows, DTYPE_BIT(CUMOE_F32)));
  TRY(check_vector(context, "args.counted", cumoe_const(a->counted), 1, DTYPE_BIT(CUMOE_I64)));
  const operand d = {"args.dlogits", a->logits.rows, a->logits.cols, DTYPE_BIT(a->logits.dtype & 31), 0};
  TRY(check_optional(context, &d, cumoe_const(a->dlogits)));
  const named_view views[] = {{"args.loss", cumoe_const(a->loss)},
                              {"args.losses", cumoe_const(a->losses)},
                              {"args.counted", cumoe_const(a->counted)},
                              {"args.dlogits", cumoe_const(a->dlogits)},
                              {"args.targets", a->targets},
                              {"args.logits", unless_in_place(a->logits, a->dlogits)}};
  return check_overlaps(views, 4, 6);
}

static cumoe_status run_cross_entropy(struct context *context, cross_entropy_args *c, cumoe_stream stream)
{
  c->units = 1;
  TRY(dispatch(context, OP_cross_entropy_count, c, stream));
  c->units = c->tokens;
  TRY(dispatch(context, OP_cross_entropy_rows, c, stream));
  c->units = 1;
  return dispatch(context, OP_cross_entropy_mean, c, stream);
}

cumoe_status cumoe_cross_entropy(cumoe_context handle, const cumoe_cross_entropy_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_cross_entropy_args a;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &a));
  TRY(check_cross_entropy(context, &a));
  cross_entropy_args c = {.logits = matrix_of(a.logits),
                          .targets = matrix_of(a.targets),
                          .dlogits = matrix_mut(a.dlogits),
                          .loss = a.loss.data,
                          .losses = a.losses.data,
                          .counted = a.counted.data,
                          .tokens = a.logits.rows,
                          .vocabulary = a.logits.cols,
                          .ignore = a.flags & CUMOE_LOSS_IGNORE ? a.ignore : -1,
                          .scale = a.scale == 0 ? 1 : a.scale,
                          .fault = context->fault};
  ON_DEVICE(context, run_cross_entropy(context, &c, stream));
}

/* ---- optimiser ---- */

enum { MOST_GRADIENTS = 1 << 20 };

/* One that has been refused, by its number: to name all of them takes longer than to check them. */
static cumoe_status refuse_gradient(struct context *context, const cumoe_view *gradients, int64_t number)
{
  char name[32];
  (void)snprintf(name, sizeof name, "gradients[%lld]", (long long)number);
  return check_input(context, name, gradients[number]);
}

/* Sums of squares: one a run of a row. */
static cumoe_status count_runs(struct context *context, const cumoe_view *gradients, int64_t count, int64_t *runs)
{
  REQUIRE(count >= 0 && count <= MOST_GRADIENTS, CUMOE_ERR_INVALID_ARGUMENT, "count is %lld, must be 0 .. 2^20",
          (long long)count);
  REQUIRE(gradients || count == 0, CUMOE_ERR_INVALID_ARGUMENT, "gradients is null, and there are %lld",
          (long long)count);
  *runs = 0;
  for (int64_t i = 0; i < count; i++) {
    if (check_input(context, "gradients", gradients[i]) != CUMOE_OK) return refuse_gradient(context, gradients, i);
    REQUIRE(!__builtin_add_overflow(*runs, gradients[i].rows * RUNS_IN_ROW(gradients[i].cols), runs) &&
                *runs < (int64_t)1 << 43,
            CUMOE_ERR_INVALID_ARGUMENT, "gradients are larger than an address space");
  }
  return CUMOE_OK;
}

cumoe_status cumoe_global_norm_workspace(cumoe_context handle, const cumoe_view *gradients, int64_t count,
                                         size_t *bytes)
{
  begin_call(__func__);
  struct context *context;
  int64_t runs;
  TRY(find_context(handle, &context));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(count_runs(context, gradients, count, &runs));
  *bytes = (size_t)runs * sizeof(double);
  return CUMOE_OK;
}

static cumoe_status check_global_norm(struct context *context, const cumoe_global_norm_args *a, int64_t *runs)
{
  TRY(check_not_negative("args.max_norm", a->max_norm));
  TRY(check_finite("args.scale", a->scale));
  TRY(check_zero("args.reserved", a->reserved));
  TRY(count_runs(context, a->gradients, a->count, runs));
  TRY(check_vector(context, "args.norm", cumoe_const(a->norm), 1, DTYPE_BIT(CUMOE_F32)));
  TRY(check_vector(context, "args.factor", cumoe_const(a->factor), 1, DTYPE_BIT(CUMOE_F32)));
  const operand step = {"args.step", 1, 1, DTYPE_BIT(CUMOE_I64), 0};
  TRY(check_optional(context, &step, cumoe_const(a->step)));
  TRY(check_scratch(context, cumoe_const(a->workspace), (size_t)*runs * sizeof(double)));
  named_view views[] = {{"args.norm", cumoe_const(a->norm)},
                        {"args.factor", cumoe_const(a->factor)},
                        {"args.step", cumoe_const(a->step)},
                        {"args.workspace", cumoe_const(a->workspace)},
                        {"args.gradients", {0}}};
  TRY(check_overlaps(views, 4, 4));
  for (int64_t i = 0; i < a->count; i++) {
    views[4].view = a->gradients[i];
    TRY(check_overlaps(views, 4, 5));
  }
  return CUMOE_OK;
}

static cumoe_status run_global_norm(struct context *context, const cumoe_global_norm_args *a, global_norm_args *n,
                                    cumoe_stream stream)
{
  for (int64_t i = 0; i < a->count; i++) {
    const cumoe_view g = a->gradients[i];
    n->units = g.rows * RUNS_IN_ROW(g.cols);
    n->gradient = matrix_of(g);
    n->cols = g.cols;
    TRY(dispatch(context, OP_squares, n, stream));
    n->sums += n->units;
  }
  n->units = 1;
  n->sums = a->workspace.data;
  return dispatch(context, OP_total, n, stream);
}

cumoe_status cumoe_global_norm(cumoe_context handle, const cumoe_global_norm_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_global_norm_args a;
  int64_t runs;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &a));
  TRY(check_global_norm(context, &a, &runs));
  global_norm_args n = {.sums = a.workspace.data,
                        .count = runs,
                        .norm = a.norm.data,
                        .factor = a.factor.data,
                        .step = a.step.data,
                        .max_norm = a.max_norm,
                        .scale = a.scale == 0 ? 1 : a.scale};
  ON_DEVICE(context, run_global_norm(context, &a, &n, stream));
}

static cumoe_status check_rates(const cumoe_adamw_args *a)
{
  TRY(check_flags("args.flags", a->flags, 0));
  TRY(check_not_negative("args.rate", a->rate));
  TRY(check_not_negative("args.beta1", a->beta1));
  TRY(check_not_negative("args.beta2", a->beta2));
  REQUIRE(a->beta1 < 1 && a->beta2 < 1, CUMOE_ERR_INVALID_ARGUMENT,
          "args.beta1 is %g and args.beta2 %g, must be below 1", (double)a->beta1, (double)a->beta2);
  TRY(check_not_negative("args.eps", a->eps));
  TRY(check_not_negative("args.decay", a->decay));
  return check_zero("args.reserved", a->reserved);
}

static cumoe_status check_adamw(struct context *context, const cumoe_adamw_args *a)
{
  const cumoe_view g = a->gradient;
  TRY(check_rates(a));
  TRY(check_input(context, "args.gradient", g));
  TRY(check_vector(context, "args.step", a->step, 1, DTYPE_BIT(CUMOE_I64)));
  const operand factor = {"args.factor", 1, 1, DTYPE_BIT(CUMOE_F32), 0};
  const operand schedule = {"args.schedule", 1, 1, DTYPE_BIT(CUMOE_F32), 0};
  TRY(check_optional(context, &factor, a->factor));
  TRY(check_optional(context, &schedule, a->schedule));
  const named_view views[] = {{"args.master", cumoe_const(a->master)},
                              {"args.first", cumoe_const(a->first)},
                              {"args.second", cumoe_const(a->second)},
                              {"args.weights", cumoe_const(a->weights)},
                              {"args.gradient", g},
                              {"args.step", a->step},
                              {"args.factor", a->factor},
                              {"args.schedule", a->schedule}};
  for (int i = 0; i < 3; i++) {
    const operand want = {views[i].name, g.rows, g.cols, DTYPE_BIT(CUMOE_F32), 0};
    TRY(check_operand(context, &want, views[i].view));
  }
  const operand weights = {"args.weights", g.rows, g.cols, FLOAT_BITS, 0};
  TRY(check_optional(context, &weights, views[3].view));
  return check_overlaps(views, 4, 8);
}

static float or_else(float value, float otherwise)
{
  return value == 0 ? otherwise : value;
}

cumoe_status cumoe_adamw(cumoe_context handle, const cumoe_adamw_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *context;
  cumoe_adamw_args a;
  TRY(find_context(handle, &context));
  TRY(take_struct("args", args, &a));
  TRY(check_adamw(context, &a));
  const adamw_args w = {.units = a.gradient.rows * RUNS_IN_ROW(a.gradient.cols),
                        .gradient = matrix_of(a.gradient),
                        .master = matrix_mut(a.master),
                        .first = matrix_mut(a.first),
                        .second = matrix_mut(a.second),
                        .weights = matrix_mut(a.weights),
                        .step = a.step.data,
                        .factor = a.factor.data,
                        .schedule = a.schedule.data,
                        .cols = a.gradient.cols,
                        .rate = a.rate,
                        .beta1 = or_else(a.beta1, .9f),
                        .beta2 = or_else(a.beta2, .999f),
                        .eps = or_else(a.eps, 1e-8f),
                        .decay = a.decay};
  ON_DEVICE(context, dispatch(context, OP_adamw, &w, stream));
}
