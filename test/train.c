/*
 * cumoe/train.h: values and gradients against double and differences in double, adjoints, accumulation, what is left
 * untouched, bad device data, the same bits from any number of threads.
 */
#include <math.h>

#include "gradient.h"
#include "parts.h"
#include "../bench/decoder.h"

/* Aligned, as the row before it is a whole number of 256 bytes. */
static cumoe_view_mut room_for(cumoe_context context, size_t bytes)
{
  return device_new(context, CUMOE_U8, 1, (int64_t)bytes, (int64_t)(255 - (bytes + 255) % 256));
}

static tensor vector_of(int32_t dtype, int64_t count, const double *values)
{
  tensor t = tensor_new(dtype, 1, count);
  for (int64_t i = 0; i < count; i++) tensor_set(&t, 0, i, values[i]);
  return t;
}

static cumoe_view_mut put_mut(cumoe_context context, const tensor *t, int64_t pad)
{
  return as_mut(device_put(context, t, pad));
}

static tensor filled(int32_t dtype, int64_t rows, int64_t cols, double value)
{
  tensor t = tensor_new(dtype, rows, cols);
  for (int64_t i = 0; i < rows * cols; i++) tensor_set(&t, 0, i, value);
  return t;
}

/* ---- embedding -------------------------------------------------------------------------------------- */

enum { VOCABULARY = 11 };

/* Integers: sums are exact whatever the type. The ids: every third is hostile if asked for. */
static tensor make_ids(rng *r, int32_t dtype, int64_t tokens, bool hostile)
{
  static const double bad[] = {-1, -100, VOCABULARY, INT32_MAX};
  tensor ids = tensor_new(dtype, 1, tokens);
  for (int64_t t = 0; t < tokens; t++)
    tensor_set(&ids, 0, t, hostile && t % 3 == 1 ? bad[t / 3 % 4] : (double)rng_below(r, VOCABULARY - 1));
  return ids;
}

static bool counts(const tensor *ids, int64_t t)
{
  const double id = tensor_get(ids, 0, t);
  return id >= 0 && id < VOCABULARY;
}

static tensor embedding_gradient(cumoe_context context, const tensor *ids, const tensor *dy, const tensor *before,
                                 int32_t dtype, int pad)
{
  cumoe_embedding_backward_args a = {.size = sizeof a, .dy = device_put(context, dy, pad)};
  size_t bytes = 0;
  a.ids = device_put(context, ids, 0);
  a.flags = before ? CUMOE_TRAIN_ACCUMULATE : 0;
  a.dtable = before ? put_mut(context, before, pad) : device_new(context, dtype, VOCABULARY, dy->cols, pad);
  CHECK_OK(cumoe_embedding_backward_workspace(context, ids->cols, VOCABULARY, &bytes));
  a.workspace = room_for(context, bytes);
  CHECK_OK(cumoe_embedding_backward(context, &a, NULL));
  check_guards(context, "dtable", a.dtable);
  check_guards(context, "workspace", a.workspace);
  return device_get(context, cumoe_const(a.dtable));
}

static void run_embedding(cumoe_context context, int32_t dtype, int64_t tokens, int64_t cols, bool hostile)
{
  rng r = {(uint64_t)(tokens + cols)};
  case_begin("%s, %d tokens, %d columns%s", cumoe_dtype_name((cumoe_dtype)dtype), (int)tokens, (int)cols,
             hostile ? ", hostile" : "");
  const tensor table = tensor_integers(&r, dtype, VOCABULARY, cols, 9),
               dy = tensor_integers(&r, dtype, tokens, cols, 2);
  const tensor ids = make_ids(&r, hostile ? CUMOE_I64 : CUMOE_I32, tokens, hostile);
  const cumoe_view_mut y = device_new(context, dtype, tokens, cols, 3);
  CHECK_OK(cumoe_embedding(context, device_put(context, &table, 1), device_put(context, &ids, 0), y, NULL));
  check_guards(context, "y", y);
  check_fault(context, NULL, hostile && tokens > 7 ? CUMOE_FAULT_TOKEN_ID : CUMOE_FAULT_NONE);
  tensor want = tensor_new(dtype, tokens, cols), sum = tensor_new(CUMOE_F32, VOCABULARY, cols);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = 0; c < cols && counts(&ids, t); c++) {
      const int64_t id = (int64_t)tensor_get(&ids, 0, t);
      tensor_set(&want, t, c, tensor_get(&table, id, c));
      tensor_set(&sum, id, c, tensor_get(&sum, id, c) + tensor_get(&dy, t, c));
    }
  const tensor got = device_get(context, cumoe_const(y));
  if (tokens > 0) check_same("y", &got, &want);
  const tensor gradient = embedding_gradient(context, &ids, &dy, NULL, CUMOE_F32, 5);
  check_same("dtable", &gradient, &sum);
  const tensor twice = embedding_gradient(context, &ids, &dy, &gradient, CUMOE_F32, 0);
  for (int64_t i = 0; i < VOCABULARY * cols; i++) tensor_set(&sum, 0, i, 2 * tensor_get(&sum, 0, i));
  check_same("accumulated", &twice, &sum);
  check_fault(context, NULL, hostile && tokens > 7 ? CUMOE_FAULT_TOKEN_ID : CUMOE_FAULT_NONE);
  case_end();
}

static void test_embedding(cumoe_context context)
{
  for (int i = 0; i < 3; i++) {
    run_embedding(context, case_dtypes[i], 37, 130, false);
    run_embedding(context, case_dtypes[i], 37, 7, true);
    run_embedding(context, case_dtypes[i], 0, 16, false);
  }
  case_begin("rows that no token has stay as they were, bit by bit");
  const double two[] = {3, 3};
  const tensor ids = vector_of(CUMOE_I32, 2, two), dy = filled(CUMOE_BF16, 2, 4, 1),
               before = filled(CUMOE_BF16, 11, 4, NAN);
  const tensor after = embedding_gradient(context, &ids, &dy, &before, CUMOE_BF16, 0);
  for (int64_t row = 0; row < VOCABULARY; row++) CHECK(row == 3 || tensor_row_equal(&after, &before, row));
  case_end();
}

/* ---- norms ------------------------------------------------------------------------------------------ */

typedef struct norm_case {
  int64_t rows, cols;
  int32_t dtype, weight_dtype; /* 0: none */
  bool centered, in_place;
} norm_case;

typedef struct norm_problem {
  const norm_case *c;
  double *x, *weight, *bias, *dy;
} norm_problem;

static double norm_loss(const void *user)
{
  const norm_problem *p = user;
  double sum = 0;
  for (int64_t row = 0; row < p->c->rows; row++) {
    const int64_t n = p->c->cols;
    const double *x = p->x + row * n;
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < n && p->c->centered; i++) mean += x[i] / (double)n;
    for (int64_t i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean) / (double)n;
    for (int64_t i = 0; i < n; i++)
      sum += p->dy[row * n + i] * ((x[i] - mean) / sqrt(squares + (double)1e-3f) * p->weight[i] + p->bias[i]);
  }
  return sum;
}

static cumoe_status norm_backward(cumoe_context context, const norm_case *c, cumoe_norm_backward_args *a)
{
  size_t bytes = 0;
  a->size = sizeof *a;
  a->eps = 1e-3f;
  CHECK_OK(cumoe_norm_backward_workspace(context, c->rows, c->cols, &bytes));
  a->workspace = room_for(context, bytes);
  return (c->centered ? cumoe_layernorm_backward : cumoe_rmsnorm_backward)(context, a, NULL);
}

static void run_norm(cumoe_context context, const norm_case *c)
{
  rng r = {(uint64_t)(c->rows * 31 + c->cols)};
  case_begin("%s [%d, %d] %s, weight %s%s", c->centered ? "layernorm" : "rmsnorm", (int)c->rows, (int)c->cols,
             cumoe_dtype_name((cumoe_dtype)c->dtype),
             c->weight_dtype ? cumoe_dtype_name((cumoe_dtype)c->weight_dtype) : "none",
             c->in_place ? ", in place" : "");
  const int32_t parameters = c->weight_dtype ? c->weight_dtype : CUMOE_F32;
  const tensor x = tensor_normal(&r, c->dtype, c->rows, c->cols, .5, 1),
               dy = tensor_normal(&r, c->dtype, c->rows, c->cols, 0, 1);
  const tensor weight =
      c->weight_dtype ? tensor_normal(&r, parameters, 1, c->cols, 1, .3) : filled(CUMOE_F32, 1, c->cols, 1);
  const tensor bias = filled(CUMOE_F32, 1, c->cols, 0);
  const norm_problem p = {c, doubles_of(&x), doubles_of(&weight), doubles_of(&bias), doubles_of(&dy)};
  cumoe_norm_backward_args a = {.x = device_put(context, &x, 3), .dy = device_put(context, &dy, 1)};
  if (c->weight_dtype) a.weight = device_put(context, &weight, 0);
  a.dx = c->in_place ? as_mut(a.dy) : device_new(context, c->dtype, c->rows, c->cols, 2);
  a.dweight = device_new(context, parameters, 1, c->cols, 0);
  if (c->centered) a.dbias = device_new(context, CUMOE_F32, 1, c->cols, 0);
  CHECK_OK(norm_backward(context, c, &a));
  check_guards(context, "dx", a.dx);
  check_guards(context, "dweight", a.dweight);
  check_guards(context, "workspace", a.workspace);
  const tensor dx = device_get(context, cumoe_const(a.dx)), dweight = device_get(context, cumoe_const(a.dweight));
  check_gradient("dx", norm_loss, &p, p.x, &dx, 1e-9);
  check_gradient("dweight", norm_loss, &p, p.weight, &dweight, 1e-9);
  if (c->centered) {
    const tensor dbias = device_get(context, cumoe_const(a.dbias));
    check_gradient("dbias", norm_loss, &p, p.bias, &dbias, 1e-9);
  }
  case_end();
}

static void test_norms(cumoe_context context)
{
  static const norm_case cases[] = {{5, 64, CUMOE_F32, CUMOE_F32, false, false},
                                    {131, 8, CUMOE_BF16, CUMOE_F32, false, true}, /* runs of rows on CUDA */
                                    {259, 5, CUMOE_F32, CUMOE_F32, true, false},
                                    {5, 64, CUMOE_F32, CUMOE_F32, true, true},
                                    {3, 131, CUMOE_BF16, CUMOE_F32, false, true},
                                    {3, 131, CUMOE_BF16, CUMOE_BF16, true, false},
                                    {9, 7, CUMOE_F16, 0, false, false},
                                    {9, 7, CUMOE_F16, CUMOE_F16, true, false},
                                    {2, 1, CUMOE_F32, 0, true, false},
                                    {0, 16, CUMOE_F32, CUMOE_F32, true, false}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) run_norm(context, &cases[i]);
}

/* Equal elements, so large that what lies between them and a 0 overflows once it is scaled. */
static void test_far_mean(cumoe_context context)
{
  const norm_case c = {1, 5, CUMOE_BF16, 0, true, false};
  case_begin("a mean far away");
  const tensor x = filled(CUMOE_BF16, 1, 5, 3e37);
  tensor dy = tensor_new(CUMOE_BF16, 1, 5);
  for (int64_t i = 0; i < 5; i++) tensor_set(&dy, 0, i, (double)i);
  cumoe_norm_backward_args a = {.x = device_put(context, &x, 0), .dy = device_put(context, &dy, 0)};
  a.dx = device_new(context, CUMOE_BF16, 1, 5, 0);
  CHECK_OK(norm_backward(context, &c, &a));
  const tensor dx = device_get(context, cumoe_const(a.dx));
  for (int64_t i = 0; i < 5; i++) {
    const double want = (double)(i - 2) / sqrt((double)1e-3f);
    CHECK(fabs(tensor_get(&dx, 0, i) - want) <= 0x1p-8 * fabs(want));
  }
  case_end();
}

static void test_norm_parts(cumoe_context context)
{
  const norm_case c = {4, 24, CUMOE_F32, 0, true, false};
  rng r = {5};
  case_begin("each output alone is the same bits, accumulating adds, a NaN stays in its row of dx");
  const tensor x = tensor_normal(&r, CUMOE_F32, 4, 24, 0, 1), dy = tensor_integers(&r, CUMOE_F32, 4, 24, 3);
  cumoe_norm_backward_args a = {.x = device_put(context, &x, 0), .dy = device_put(context, &dy, 0)};
  a.dbias = device_new(context, CUMOE_F32, 1, 24, 0);
  CHECK_OK(norm_backward(context, &c, &a));
  const tensor once = device_get(context, cumoe_const(a.dbias));
  a.flags = CUMOE_TRAIN_ACCUMULATE;
  CHECK_OK(norm_backward(context, &c, &a));
  const tensor twice = device_get(context, cumoe_const(a.dbias));
  for (int64_t i = 0; i < 24; i++) CHECK(tensor_get(&twice, 0, i) == 2 * tensor_get(&once, 0, i));
  cumoe_norm_backward_args b = {.x = a.x, .dy = a.dy, .dx = device_new(context, CUMOE_F32, 4, 24, 0)};
  CHECK_OK(norm_backward(context, &c, &b));
  cumoe_norm_backward_args all = {.x = a.x, .dy = a.dy, .dx = device_new(context, CUMOE_F32, 4, 24, 0)};
  all.dbias = device_new(context, CUMOE_F32, 1, 24, 0);
  CHECK_OK(norm_backward(context, &c, &all));
  const tensor alone = device_get(context, cumoe_const(b.dx)), together = device_get(context, cumoe_const(all.dx));
  const tensor dbias = device_get(context, cumoe_const(all.dbias));
  check_same("dx", &alone, &together);
  check_same("dbias", &dbias, &once);
  tensor bad = tensor_copy(&x);
  tensor_set(&bad, 2, 5, NAN);
  b.x = device_put(context, &bad, 0);
  b.dy = device_put(context, &dy, 0);
  b.dx = device_new(context, CUMOE_F32, 4, 24, 0);
  CHECK_OK(norm_backward(context, &c, &b));
  const tensor dx = device_get(context, cumoe_const(b.dx));
  for (int64_t i = 0; i < 4 * 24; i++) CHECK(isnan(tensor_get(&dx, 0, i)) == (i / 24 == 2));
  b.dx = as_mut(b.dy); /* of one row, whatever its ld */
  b.x.rows = b.dy.rows = b.dx.rows = 1;
  b.dx.ld = b.dy.ld + 8;
  CHECK_OK(norm_backward(context, &c, &b));
  case_end();
}

/* ---- elementwise, softmax --------------------------------------------------------------------------- */

typedef enum function { RELU, SIGMOID, SILU, GELU, GELU_TANH, SOFTMAX, FUNCTIONS } function;
static const char *const names[] = {"relu", "sigmoid", "silu", "gelu", "gelu_tanh", "softmax"};

static cumoe_status call(cumoe_context c, function f, cumoe_view x, cumoe_view dy, cumoe_view_mut dx)
{
  switch (f) {
  case RELU: return cumoe_relu_backward(c, x, dy, dx, NULL);
  case SIGMOID: return cumoe_sigmoid_backward(c, x, dy, dx, NULL);
  case SILU: return cumoe_silu_backward(c, x, dy, dx, NULL);
  case GELU: return cumoe_gelu_backward(c, x, dy, dx, NULL);
  case GELU_TANH: return cumoe_gelu_tanh_backward(c, x, dy, dx, NULL);
  default: return cumoe_softmax_backward(c, x, dy, dx, NULL);
  }
}

typedef struct function_problem {
  function f;
  int64_t rows, cols;
  double *x, *dy;
} function_problem;

static double value_of(function f, double x)
{
  switch (f) {
  case RELU: return x > 0 ? x : 0;
  case SIGMOID: return 1 / (1 + exp(-x));
  case SILU: return x / (1 + exp(-x));
  case GELU: return x / 2 * erfc(-x / sqrt(2));
  default: return x / 2 * (1 + tanh(sqrt(2 / acos(-1)) * (x + .044715 * x * x * x)));
  }
}

static double function_loss(const void *user)
{
  const function_problem *p = user;
  double loss = 0;
  for (int64_t row = 0; row < p->rows; row++) {
    const double *x = p->x + row * p->cols, *dy = p->dy + row * p->cols;
    double sum = 0;
    for (int64_t i = 0; i < p->cols && p->f == SOFTMAX; i++) sum += exp(x[i]);
    for (int64_t i = 0; i < p->cols; i++) loss += dy[i] * (p->f == SOFTMAX ? exp(x[i]) / sum : value_of(p->f, x[i]));
  }
  return loss;
}

/* Softmax's backward gets y: of f32, so that its rounding stays small beside the other types'. */
static void run_function(cumoe_context context, function f, int32_t dtype, int where)
{
  rng r = {(uint64_t)f + 3};
  case_begin("%s %s, %s", names[f], cumoe_dtype_name((cumoe_dtype)dtype),
             where == 0   ? "apart"
             : where == 1 ? "dx is x"
                          : "dx is dy");
  const tensor x = tensor_normal(&r, dtype, 3, 17, .5, 2), dy = tensor_normal(&r, dtype, 3, 17, 0, 1);
  const function_problem p = {f, 3, 17, doubles_of(&x), doubles_of(&dy)};
  const cumoe_view xv = device_put(context, &x, 5), dyv = device_put(context, &dy, 5);
  if (f == SOFTMAX) CHECK_OK(cumoe_softmax(context, xv, as_mut(xv), NULL));
  const cumoe_view_mut dx = where == 0 ? device_new(context, dtype, 3, 17, 2) : as_mut(where == 1 ? xv : dyv);
  CHECK_OK(call(context, f, xv, dyv, dx));
  check_guards(context, "dx", dx);
  const tensor got = device_get(context, cumoe_const(dx));
  check_gradient("dx", function_loss, &p, p.x, &got, f == SOFTMAX ? 4 * unit_roundoff(dtype) : 1e-9);
  case_end();
}

static void test_functions(cumoe_context context)
{
  for (function f = 0; f < FUNCTIONS; f++)
    for (int i = 0; i < 9; i++) run_function(context, f, case_dtypes[i % 3], i / 3);
}

/* Work is dealt out in runs of a row (kernels/train.h). */
static void test_wide(cumoe_context context)
{
  enum { ROWS = 2, COLS = 9001 };
  rng r = {6};
  int wrong = 0;
  case_begin("relu: rows of several runs");
  const tensor x = tensor_normal(&r, CUMOE_F32, ROWS, COLS, 0, 1), dy = tensor_normal(&r, CUMOE_F32, ROWS, COLS, 3, 1);
  const cumoe_view_mut dx = device_new(context, CUMOE_F32, ROWS, COLS, 0);
  CHECK_OK(cumoe_relu_backward(context, device_put(context, &x, 0), device_put(context, &dy, 0), dx, NULL));
  const tensor got = device_get(context, cumoe_const(dx));
  for (int64_t i = 0; i < ROWS * COLS; i++)
    wrong += tensor_get(&got, 0, i) != (tensor_get(&x, 0, i) > 0 ? tensor_get(&dy, 0, i) : 0);
  CHECK_MSG(wrong == 0, "%d of %d elements", wrong, ROWS * COLS);
  case_end();
}

/* Far from 0 the slope is 0 or 1, and never NaN; a NaN stays in its element, in softmax in its row. */
static void test_far(cumoe_context context)
{
  static const double far[] = {-INFINITY, -3e38, -1e4, -800, 800, 1e4, 3e38, INFINITY, NAN, 0};
  for (function f = 0; f < SOFTMAX; f++) {
    case_begin("%s", names[f]);
    const tensor x = vector_of(CUMOE_F32, 10, far), dy = filled(CUMOE_F32, 1, 10, 2);
    const cumoe_view_mut dx = device_new(context, CUMOE_F32, 1, 10, 0);
    CHECK_OK(call(context, f, device_put(context, &x, 0), device_put(context, &dy, 0), dx));
    const tensor got = device_get(context, cumoe_const(dx));
    for (int i = 0; i < 8; i++)
      CHECK_MSG(tensor_get(&got, 0, i) == (i < 4 || f == SIGMOID ? 0 : 2), "at %g: %g", far[i], tensor_get(&got, 0, i));
    CHECK(isnan(tensor_get(&got, 0, 8)) && tensor_get(&got, 0, 9) == (f == RELU ? 0 : f == SIGMOID ? .5 : 1));
    case_end();
  }
  case_begin("softmax: a NaN stays in its row");
  rng r = {4};
  tensor y = tensor_normal(&r, CUMOE_F16, 3, 8, 0, 1);
  tensor_set(&y, 1, 7, NAN);
  const cumoe_view_mut dx = device_new(context, CUMOE_F16, 3, 8, 0);
  const cumoe_view yv = device_put(context, &y, 0);
  CHECK_OK(cumoe_softmax_backward(context, yv, yv, dx, NULL));
  const tensor got = device_get(context, cumoe_const(dx));
  for (int64_t i = 0; i < 24; i++) CHECK(isnan(tensor_get(&got, 0, i)) == (i / 8 == 1));
  case_end();
}

/* ---- loss ------------------------------------------------------------------------------------------- */

typedef struct loss_problem {
  int64_t rows, cols;
  double *x;
  const tensor *targets;
  double ignore, scale; /* ignore -1: none */
} loss_problem;

static bool is_counted(const loss_problem *p, int64_t t)
{
  const double target = tensor_get(p->targets, 0, t);
  return target >= 0 && target < (double)p->cols && target != p->ignore;
}

static double loss_of(const void *user)
{
  const loss_problem *p = user;
  double loss = 0, counted = 0;
  for (int64_t t = 0; t < p->rows; t++) {
    const double *x = p->x + t * p->cols;
    double sum = 0;
    if (!is_counted(p, t)) continue;
    for (int64_t v = 0; v < p->cols; v++) sum += exp(x[v]);
    loss += log(sum) - x[(int64_t)tensor_get(p->targets, 0, t)];
    counted++;
  }
  return counted > 0 ? p->scale * loss / counted : 0;
}

typedef struct loss_call {
  cumoe_cross_entropy_args a;
  tensor loss, losses, counted, dlogits;
} loss_call;

static loss_call run_loss(cumoe_context context, const tensor *logits, const tensor *targets, uint32_t flags,
                          int64_t ignore, float scale, bool in_place)
{
  loss_call c = {.a = {.size = sizeof c.a, .flags = flags, .ignore = ignore, .scale = scale}};
  c.a.logits = device_put(context, logits, 3);
  c.a.targets = device_put(context, targets, 0);
  c.a.loss = device_new(context, CUMOE_F32, 1, 1, 0);
  c.a.losses = device_new(context, CUMOE_F32, 1, logits->rows, 0);
  c.a.counted = device_new(context, CUMOE_I64, 1, 1, 0);
  c.a.dlogits = in_place ? as_mut(c.a.logits) : device_new(context, logits->dtype, logits->rows, logits->cols, 1);
  CHECK_OK(cumoe_cross_entropy(context, &c.a, NULL));
  check_guards(context, "dlogits", c.a.dlogits);
  check_guards(context, "losses", c.a.losses);
  c.loss = device_get(context, cumoe_const(c.a.loss));
  c.losses = device_get(context, cumoe_const(c.a.losses));
  c.counted = device_get(context, cumoe_const(c.a.counted));
  c.dlogits = device_get(context, cumoe_const(c.a.dlogits));
  return c;
}

static void test_loss(cumoe_context context)
{
  static const double ids[] = {3, 0, -1, 16, -100, 7, 2000, 2, 3};
  for (int i = 0; i < 6; i++) {
    rng r = {(uint64_t)i};
    const bool ignores = i % 2;
    case_begin("%s%s", cumoe_dtype_name((cumoe_dtype)case_dtypes[i % 3]), ignores ? ", a class ignored, in place" : "");
    const tensor logits = tensor_normal(&r, case_dtypes[i % 3], 9, 17, 0, 2);
    const tensor targets = vector_of(i < 3 ? CUMOE_I32 : CUMOE_I64, 9, ids);
    const loss_problem p = {9, 17, doubles_of(&logits), &targets, ignores ? 3 : -1, ignores ? -2.5 : 1};
    const loss_call c = run_loss(context, &logits, &targets, ignores ? CUMOE_LOSS_IGNORE : 0, ignores ? 3 : 0,
                                 ignores ? -2.5f : 0, ignores);
    const double want = loss_of(&p) / p.scale, got = tensor_get(&c.loss, 0, 0);
    CHECK_MSG(fabs(got - want) <= 1e-6 * want, "loss %.9g, want %.9g", got, want);
    CHECK(tensor_get(&c.counted, 0, 0) == (ignores ? 4 : 6));
    check_gradient("dlogits", loss_of, &p, p.x, &c.dlogits, 1e-8);
    for (int64_t t = 0; t < 9; t++) CHECK((tensor_get(&c.losses, 0, t) == 0) == !is_counted(&p, t));
    check_fault(context, NULL, CUMOE_FAULT_TOKEN_ID);
    case_end();
  }
}

static void test_loss_corners(cumoe_context context)
{
  static const double one[] = {1, 1, 1}, none[] = {-1, -1, -1};
  case_begin("no token counts");
  tensor logits = filled(CUMOE_F32, 3, 4, 0), targets = vector_of(CUMOE_I32, 3, none);
  loss_call c = run_loss(context, &logits, &targets, 0, 0, 0, false);
  CHECK(tensor_get(&c.loss, 0, 0) == 0 && tensor_get(&c.counted, 0, 0) == 0);
  for (int64_t i = 0; i < 12; i++) CHECK(tensor_get(&c.dlogits, 0, i) == 0);
  case_end();
  case_begin("no tokens");
  const tensor empty = tensor_new(CUMOE_F32, 0, 4), no_targets = tensor_new(CUMOE_I32, 1, 0);
  c = run_loss(context, &empty, &no_targets, 0, 0, 0, false);
  CHECK(tensor_get(&c.loss, 0, 0) == 0 && tensor_get(&c.counted, 0, 0) == 0);
  case_end();
  case_begin("large logits, a NaN");
  targets = vector_of(CUMOE_I32, 3, one);
  logits = filled(CUMOE_F32, 3, 4, 1e30);
  tensor_set(&logits, 1, 2, -1e30);
  tensor_set(&logits, 2, 3, NAN);
  c = run_loss(context, &logits, &targets, 0, 0, 0, false);
  CHECK(fabs(tensor_get(&c.losses, 0, 0) - log(4)) < 1e-6 && fabs(tensor_get(&c.losses, 0, 1) - log(3)) < 1e-6);
  CHECK(isnan(tensor_get(&c.losses, 0, 2)) && isnan(tensor_get(&c.loss, 0, 0)));
  for (int64_t i = 0; i < 12; i++) CHECK(isnan(tensor_get(&c.dlogits, 0, i)) == (i >= 8));
  case_end();
}

/* ---- optimiser -------------------------------------------------------------------------------------- */

enum { TENSORS = 3 };

static double run_norm_of(cumoe_context context, const tensor *g, float max_norm, float scale, double *factor,
                          cumoe_view_mut step)
{
  cumoe_view views[TENSORS];
  size_t bytes = 0;
  for (int i = 0; i < TENSORS; i++) views[i] = device_put(context, &g[i], i);
  cumoe_global_norm_args a = {
      .size = sizeof a, .max_norm = max_norm, .scale = scale, .gradients = views, .count = TENSORS, .step = step};
  a.norm = device_new(context, CUMOE_F32, 1, 1, 0);
  a.factor = device_new(context, CUMOE_F32, 1, 1, 0);
  CHECK_OK(cumoe_global_norm_workspace(context, views, TENSORS, &bytes));
  a.workspace = room_for(context, bytes);
  CHECK_OK(cumoe_global_norm(context, &a, NULL));
  check_guards(context, "workspace", a.workspace);
  const tensor norm = device_get(context, cumoe_const(a.norm)), f = device_get(context, cumoe_const(a.factor));
  *factor = tensor_get(&f, 0, 0);
  return tensor_get(&norm, 0, 0);
}

static bool close_to(double got, double want)
{
  return CHECK_MSG(fabs(got - want) <= 1e-6 * fabs(want), "%.9g, want %.9g", got, want);
}

static void test_global_norm(cumoe_context context)
{
  rng r = {8};
  case_begin("clipped, not clipped, scaled, not finite");
  tensor g[TENSORS] = {tensor_normal(&r, CUMOE_F32, 3, 5001, 0, 1), tensor_normal(&r, CUMOE_BF16, 7, 3, 0, 1),
                       tensor_normal(&r, CUMOE_F16, 1, 64, 0, 1)};
  const tensor zero = filled(CUMOE_I64, 1, 1, 0);
  const cumoe_view_mut step = put_mut(context, &zero, 0);
  double squares = 0, factor;
  for (int i = 0; i < TENSORS; i++)
    for (int64_t j = 0; j < g[i].rows * g[i].cols; j++) squares += pow(tensor_get(&g[i], 0, j), 2);
  const double norm = sqrt(squares);
  close_to(run_norm_of(context, g, 1, 0, &factor, step), norm);
  close_to(factor, 1 / norm);
  close_to(run_norm_of(context, g, 1e6f, 0, &factor, step), norm);
  CHECK(factor == 1);
  close_to(run_norm_of(context, g, 0, .5f, &factor, step), norm / 2);
  CHECK(factor == .5);
  close_to(run_norm_of(context, g, 1, .5f, &factor, step), norm / 2);
  close_to(factor, 1 / norm);
  tensor_set(&g[1], 6, 2, INFINITY);
  CHECK(isinf(run_norm_of(context, g, 1, 0, &factor, step)) && isnan(factor));
  const tensor steps = device_get(context, cumoe_const(step));
  CHECK(tensor_get(&steps, 0, 0) == 4);
  case_end();
}

typedef struct adamw_state {
  cumoe_adamw_args a;
  double *w, *m, *v;
  int64_t count;
} adamw_state;

static adamw_state new_state(cumoe_context context, rng *r, int64_t rows, int64_t cols)
{
  const tensor w = tensor_normal(r, CUMOE_F32, rows, cols, 0, 1), zero = filled(CUMOE_F32, rows, cols, 0);
  adamw_state s = {.a = {.size = sizeof s.a, .rate = 1e-2f, .decay = .1f}, .count = rows * cols};
  s.a.master = put_mut(context, &w, 1);
  s.a.first = put_mut(context, &zero, 2);
  s.a.second = put_mut(context, &zero, 3);
  s.a.weights = device_new(context, CUMOE_BF16, rows, cols, 4);
  s.w = doubles_of(&w);
  s.m = doubles_of(&zero);
  s.v = doubles_of(&zero);
  return s;
}

/* In double, from the definition; what the device stores is rounded each step. */
static void step_by_hand(adamw_state *s, const tensor *g, double factor, double schedule, int t)
{
  const double rate = (double)1e-2f * schedule, decay = (double).1f, b1 = (double).9f, b2 = (double).999f;
  for (int64_t i = 0; i < s->count; i++) {
    const double gradient = factor * tensor_get(g, 0, i);
    s->m[i] = b1 * s->m[i] + (1 - b1) * gradient;
    s->v[i] = b2 * s->v[i] + (1 - b2) * gradient * gradient;
    s->w[i] -=
        rate * decay * s->w[i] + rate * s->m[i] / (1 - pow(b1, t)) / (sqrt(s->v[i] / (1 - pow(b2, t))) + (double)1e-8f);
  }
}

static void test_adamw(cumoe_context context)
{
  for (int i = 0; i < 3; i++) {
    rng r = {(uint64_t)i};
    case_begin("five steps, gradient %s", cumoe_dtype_name((cumoe_dtype)case_dtypes[i]));
    adamw_state s = new_state(context, &r, 3, 4099);
    const double numbers[] = {.25, 2};
    const tensor factor = vector_of(CUMOE_F32, 1, numbers), schedule = vector_of(CUMOE_F32, 1, numbers + 1);
    s.a.factor = device_put(context, &factor, 0);
    s.a.schedule = device_put(context, &schedule, 0);
    for (int t = 1; t <= 5; t++) {
      const tensor g = tensor_normal(&r, case_dtypes[i], 3, 4099, 0, 1), now = filled(CUMOE_I64, 1, 1, t);
      s.a.gradient = device_put(context, &g, t);
      s.a.step = device_put(context, &now, 0);
      CHECK_OK(cumoe_adamw(context, &s.a, NULL));
      step_by_hand(&s, &g, .25, 2, t);
    }
    const tensor w = device_get(context, cumoe_const(s.a.master)),
                 rounded = device_get(context, cumoe_const(s.a.weights));
    bounded *want = scratch((size_t)s.count, sizeof *want);
    for (int64_t j = 0; j < s.count; j++) want[j] = (bounded){s.w[j], 0x1p-21 * (fabs(s.w[j]) + .1)};
    check_bounded("master", &w, want);
    for (int64_t j = 0; j < s.count; j++)
      if (tensor_get(&rounded, 0, j) != round_to(tensor_get(&w, 0, j), CUMOE_BF16))
        CHECK_MSG(false, "weights are not master");
    check_guards(context, "master", s.a.master);
    check_guards(context, "weights", s.a.weights);
    case_end();
  }
  case_begin("a step whose factor is NaN changes nothing");
  rng r = {1};
  adamw_state s = new_state(context, &r, 2, 9);
  const double nan = NAN;
  const tensor g = filled(CUMOE_F32, 2, 9, INFINITY), now = filled(CUMOE_I64, 1, 1, 1),
               factor = vector_of(CUMOE_F32, 1, &nan);
  const tensor before = device_get(context, cumoe_const(s.a.master));
  s.a.gradient = device_put(context, &g, 0);
  s.a.step = device_put(context, &now, 0);
  s.a.factor = device_put(context, &factor, 0);
  CHECK_OK(cumoe_adamw(context, &s.a, NULL));
  const tensor after = device_get(context, cumoe_const(s.a.master)), zero = filled(CUMOE_F32, 2, 9, 0);
  const tensor second = device_get(context, cumoe_const(s.a.second));
  check_same("master", &after, &before);
  check_same("second", &second, &zero);
  check_untouched(context, "weights", s.a.weights, 0);
  case_end();
}

/* ---- a whole decoder -------------------------------------------------------------------------------- */

/* The loss with one parameter moved along its own gradient. */
static double loss_beside(decoder *model, const decoder_parameter *p, const float *w, const float *g, double by,
                          const int32_t *tokens)
{
  const int64_t numbers = decoder_numbers(model);
  float *moved = scratch((size_t)numbers, sizeof *moved), loss = NAN;
  memcpy(moved, w, (size_t)numbers * sizeof *moved);
  for (int64_t i = 0; i < p->pieces * p->rows * (p->cols ? p->cols : 1); i++)
    moved[p->at + i] += (float)(by * (double)g[p->at + i]);
  CHECK_MSG(decoder_write(model, DECODER_WEIGHTS, moved) && decoder_run(model, tokens, tokens + 1, false, &loss), "%s",
            decoder_error(model));
  return (double)loss;
}

/* For each parameter: the slope of the loss along its gradient is the gradient's square. All experts are chosen, so
 * that no choice changes under way. */
static void test_decoder(cumoe_context context)
{
  const decoder_config c = {.layers = 2,
                            .hidden = 32,
                            .vocab = 40,
                            .heads = 4,
                            .kv_heads = 2,
                            .head_dim = 8,
                            .experts = 3,
                            .top_k = 3,
                            .inter = 16,
                            .batch = 3,
                            .length = 11,
                            .norm_eps = 1e-6,
                            .rope_base = 100,
                            .clip = 1,
                            .dtype = CUMOE_F32};
  char error[600] = "";
  int32_t tokens[34];
  rng r = {77};
  float loss = 0;
  case_begin("the slope of the loss along each parameter's gradient");
  decoder *model = decoder_create(context, &c, error, sizeof error);
  if (!CHECK_MSG(model != NULL, "%s", error)) {
    case_end();
    return;
  }
  const int64_t numbers = decoder_numbers(model);
  float *w = scratch((size_t)numbers, sizeof *w), *g = scratch((size_t)numbers, sizeof *g);
  const decoder_parameter *list;
  const int32_t count = decoder_parameters(model, &list);
  for (int i = 0; i < 34; i++) tokens[i] = (int32_t)rng_below(&r, 40);
  for (int32_t i = 0; i < count; i++)
    for (int64_t j = 0; j < list[i].pieces * list[i].rows * (list[i].cols ? list[i].cols : 1); j++)
      w[list[i].at + j] = (float)((list[i].cols ? 0 : 1) + .25 * rng_normal(&r));
  CHECK(decoder_write(model, DECODER_WEIGHTS, w) && decoder_run(model, tokens, tokens + 1, true, &loss) &&
        decoder_read(model, DECODER_GRADIENTS, g));
  for (int32_t i = 0; i < count; i++) {
    double squares = 0;
    for (int64_t j = 0; j < list[i].pieces * list[i].rows * (list[i].cols ? list[i].cols : 1); j++)
      squares += pow((double)g[list[i].at + j], 2);
    const double by = .01 / sqrt(squares), rise = loss_beside(model, &list[i], w, g, by, tokens) -
                                                  loss_beside(model, &list[i], w, g, -by, tokens);
    CHECK_MSG(squares > 0 && fabs(rise / (2 * by) - squares) <= .005 * squares, "%s: slope %.6g, square %.6g",
              list[i].name, rise / (2 * by), squares);
  }
  decoder_destroy(model);
  case_end();
}

/* ---- threads, devices ------------------------------------------------------------------------------- */

static tensor norm_parameters(cumoe_context context)
{
  const norm_case c = {301, 200, CUMOE_F32, CUMOE_F32, true, false};
  rng r = {2};
  const tensor x = tensor_normal(&r, CUMOE_F32, c.rows, c.cols, 1, 3),
               dy = tensor_normal(&r, CUMOE_F32, c.rows, c.cols, 0, 1);
  cumoe_norm_backward_args a = {.x = device_put(context, &x, 0), .dy = device_put(context, &dy, 0)};
  a.dweight = device_new(context, CUMOE_F32, 1, c.cols, 0);
  CHECK_OK(norm_backward(context, &c, &a));
  return device_get(context, cumoe_const(a.dweight));
}

static tensor embedded(cumoe_context context)
{
  rng r = {3};
  const tensor ids = make_ids(&r, CUMOE_I32, 500, true), dy = tensor_normal(&r, CUMOE_F32, 500, 65, 0, 1);
  return embedding_gradient(context, &ids, &dy, NULL, CUMOE_F32, 0);
}

static tensor loss_gradient(cumoe_context context)
{
  rng r = {4};
  const tensor logits = tensor_normal(&r, CUMOE_F32, 300, 31, 0, 3), ids = make_ids(&r, CUMOE_I32, 300, false);
  return run_loss(context, &logits, &ids, 0, 0, 0, false).loss;
}

static tensor clipped(cumoe_context context)
{
  rng r = {6};
  tensor g[TENSORS], all = tensor_new(CUMOE_F32, 1, 1);
  double factor;
  for (int i = 0; i < TENSORS; i++) g[i] = tensor_normal(&r, CUMOE_F32, 40, 4100, 0, 1);
  (void)run_norm_of(context, g, 1, 0, &factor, no_view_mut());
  tensor_set(&all, 0, 0, factor);
  return all;
}

static void test_threads(void)
{
  check_threads("norm", norm_parameters);
  check_threads("embedding", embedded);
  check_threads("loss", loss_gradient);
  check_threads("global norm", clipped);
}

static const test_group groups[] = {
    ALONE("threads", test_threads, ONCE),
    GROUP("embedding", test_embedding, ANYWHERE),
    GROUP("norms", test_norms, ANYWHERE),
    GROUP("parts of norms", test_norm_parts, ANYWHERE),
    GROUP("norms far from 0", test_far_mean, ANYWHERE),
    GROUP("functions", test_functions, ANYWHERE),
    GROUP("wide rows", test_wide, ANYWHERE),
    GROUP("far from 0", test_far, ANYWHERE),
    GROUP("loss", test_loss, ANYWHERE),
    GROUP("corners of the loss", test_loss_corners, ANYWHERE),
    GROUP("global norm", test_global_norm, ANYWHERE),
    GROUP("AdamW", test_adamw, ANYWHERE),
    GROUP("a whole decoder", test_decoder, ON_CPU),
};
TEST_MAIN(groups)
