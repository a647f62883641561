#include "cases_ops.h"
#include "cases.h"
#include "oracle.h"

#include <math.h>

static const double u = 0x1p-24, tiny = 0x1p-119;

/* ---- layouts --------------------------------------------------------------------------------------- */

typedef enum layout { PACKED, ALIGNED_ROWS, ODD_ROWS, IN_PLACE, LAYOUTS } layout;

/* The row before the view, a guard, moves its base as its ld. */
static int64_t pad_of(layout l, int64_t cols)
{
  if (l == PACKED) return 0;
  if (l == ALIGNED_ROWS) return 8 + (8 - cols % 8) % 8;
  return cols % 2 ? 2 : 1;
}

/* Where y goes: a place of its own, or x itself. */
static cumoe_view_mut place_for(cumoe_context context, layout l, cumoe_view x)
{
  if (l == IN_PLACE)
    return (cumoe_view_mut){(void *)(uintptr_t)x.data, x.rows, x.cols, x.ld, x.owner, x.device, x.dtype};
  return device_new(context, x.dtype, x.rows, x.cols, pad_of(l, x.cols));
}

/* Compares with the first layout; the first with what is wanted. False: the case is over. */
static bool take_result(cumoe_context context, layout l, cumoe_view_mut y, tensor *first, const bounded *want)
{
  tensor got = device_get(context, cumoe_const(y));
  check_guards(context, "y", y);
  if (got.rows * got.cols == 0) return true;
  if (l != PACKED) return check_same("another layout", &got, first);
  *first = got;
  return check_bounded("y", &got, want);
}

/* ---- data ------------------------------------------------------------------------------------------ */

typedef enum data_kind { NUMBERS, HOSTILE, FAR_MEAN, DATA_KINDS } data_kind;

/* HOSTILE: large numbers, and a NaN, infinities and zeros strewn in; row 1, if there is one, is all -infinity. */
static tensor make_data(rng *r, data_kind kind, int32_t dtype, int64_t rows, int64_t cols)
{
  const double odd[] = {NAN, INFINITY, -INFINITY, 0., -0., 1e-30, -80, 90};
  tensor t = tensor_normal(r, dtype, rows, cols, kind == FAR_MEAN ? 500 : 0, kind == FAR_MEAN ? 1 : 3);
  if (kind != HOSTILE) return t;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < cols; j++) {
      const bool dense = i % 3 == 2; /* the other rows have few of them, or none */
      if (rng_below(r, dense ? 4 : 1000) == 0) tensor_set(&t, i, j, odd[rng_below(r, 8)]);
      if (i == 1) tensor_set(&t, i, j, -INFINITY);
    }
  return t;
}

/* ---- elementwise ----------------------------------------------------------------------------------- */

typedef enum function { ADD, MUL, SCALE, RELU, SIGMOID, SILU, GELU, GELU_TANH, FUNCTIONS } function;
static const char *const function_names[] = {"add", "mul", "scale", "relu", "sigmoid", "silu", "gelu", "gelu_tanh"};
static const float factor = -1.7f;

static cumoe_status call(cumoe_context context, function f, cumoe_view x, cumoe_view other, cumoe_view_mut y)
{
  switch (f) {
  case ADD: return cumoe_add(context, x, other, y, NULL);
  case MUL: return cumoe_mul(context, x, other, y, NULL);
  case SCALE: return cumoe_scale(context, factor, x, y, NULL);
  case RELU: return cumoe_relu(context, x, y, NULL);
  case SIGMOID: return cumoe_sigmoid(context, x, y, NULL);
  case SILU: return cumoe_silu(context, x, y, NULL);
  case GELU: return cumoe_gelu(context, x, y, NULL);
  default: return cumoe_gelu_tanh(context, x, y, NULL);
  }
}

static bounded expected(function f, double x, double other, bool wide)
{
  const double z = 2 * sqrt(2 / acos(-1)) * (x + .044715 * x * x * x);
  double y = 0, error = u;
  switch (f) {
  case ADD: y = x + other; break;
  case MUL: y = x * other; break;
  case SCALE: y = (double)factor * x; break;
  case RELU: y = x < 0 ? 0 : x, error = 0; break;
  case SIGMOID: y = 1 / (1 + exp(-x)), error = wide ? 8 * u + 2 * u * fabs(x) : 32 * u + 4 * u * fabs(x); break;
  case SILU: y = x / (1 + exp(-x)), error = wide ? 8 * u + 2 * u * fabs(x) : 32 * u + 4 * u * fabs(x); break;
  case GELU: y = x / 2 * erfc(-x / sqrt(2)), error = wide ? 10 * u + 2 * u * x * x : 32 * u + 8 * u * x * x; break;
  default: y = x / (1 + exp(-z)), error = wide ? 8 * u + 4 * u * fabs(z) : 32 * u + 8 * u * fabs(z);
  }
  if (!isfinite(y)) return (bounded){y, 0};
  return (bounded){y, f <= RELU ? error * fabs(y) : fmin(error, 1) * fabs(y) + tiny};
}

static void run_elementwise(cumoe_context context, function f, int32_t dtype, int64_t rows, int64_t cols,
                            data_kind kind)
{
  if (!case_wanted(dtype)) return;
  rng r = {(uint64_t)(rows * 1000 + cols)};
  case_begin("%s [%d, %d] %s data %d", function_names[f], (int)rows, (int)cols, cumoe_dtype_name((cumoe_dtype)dtype),
             (int)kind);
  tensor x = make_data(&r, kind, dtype, rows, cols), other = make_data(&r, NUMBERS, dtype, rows, cols), first;
  bounded *want = scratch((size_t)(rows * cols), sizeof *want);
  for (int64_t i = 0; i < rows * cols; i++)
    want[i] = oracle_stored(expected(f, tensor_get(&x, 0, i), tensor_get(&other, 0, i), dtype == CUMOE_F32), dtype);
  for (layout l = 0; l < LAYOUTS; l++) {
    set_poison(l % 2);
    cumoe_view xv = device_put(context, &x, pad_of(l, cols)), ov = device_put(context, &other, pad_of(l, cols));
    cumoe_view_mut y = place_for(context, l, xv);
    if (!case_served(context, call(context, f, xv, ov, y), function_names[f])) return;
    if (!take_result(context, l, y, &first, want)) break;
  }
  case_end();
}

void cases_elementwise(cumoe_context context)
{
  static const int32_t shapes[][2] = {{0, 5},   {5, 0},    {1, 1},    {1, 7},    {1, 8},    {3, 9},       {7, 31},
                                      {33, 16}, {2, 1023}, {3, 4099}, {1, 8191}, {1, 8193}, {1, 24581},   {1025, 8},
                                      {9, 513}, {2000, 1}, {2, 8192}, {5, 8185}, {1, 8192}, {2, 2 * 8192}};
  for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++)
    for (int type = 0; type < 3; type++) {
      function f = (function)((i + type) % FUNCTIONS);
      run_elementwise(context, f, case_dtypes[type], shapes[i][0], shapes[i][1], NUMBERS);
    }
  for (function f = 0; f < FUNCTIONS; f++)
    for (int type = 0; type < 3; type++) {
      run_elementwise(context, f, case_dtypes[type], 9, 517, HOSTILE);
      run_elementwise(context, f, case_dtypes[type], 3, 5000, NUMBERS);
    }
}

/* ---- softmax --------------------------------------------------------------------------------------- */

static void expect_softmax(const tensor *x, int64_t row, bounded *want)
{
  const bool wide = x->dtype == CUMOE_F32;
  double most = -INFINITY, sum = 0, off = 0;
  for (int64_t i = 0; i < x->cols; i++) most = fmax(most, tensor_get(x, row, i));
  for (int64_t i = 0; i < x->cols; i++) {
    const double d = most - tensor_get(x, row, i), error = wide ? 4 * u + 3 * u * d : 16 * u + 4 * u * d;
    want[i] = (bounded){exp(-d), error};
    sum += want[i].value;
    off += want[i].value > 0 ? want[i].value * error : 0;
  }
  for (int64_t i = 0; i < x->cols; i++) {
    const double y = want[i].value / sum, error = want[i].bound + off / sum + 40 * u;
    want[i] = oracle_stored(isnan(y) ? (bounded){y, 0} : (bounded){y, y > 0 ? y * error + tiny : tiny}, x->dtype);
  }
}

static void run_softmax(cumoe_context context, int32_t dtype, int64_t rows, int64_t cols, data_kind kind)
{
  if (!case_wanted(dtype)) return;
  rng r = {(uint64_t)(rows * 1000 + cols)};
  case_begin("softmax [%d, %d] %s data %d", (int)rows, (int)cols, cumoe_dtype_name((cumoe_dtype)dtype), (int)kind);
  tensor x = make_data(&r, kind, dtype, rows, cols), first;
  bounded *want = scratch((size_t)(rows * cols), sizeof *want);
  for (int64_t row = 0; row < rows; row++) expect_softmax(&x, row, want + row * cols);
  for (layout l = 0; l < LAYOUTS; l++) {
    set_poison(l % 2);
    cumoe_view xv = device_put(context, &x, pad_of(l, cols));
    cumoe_view_mut y = place_for(context, l, xv);
    if (!case_served(context, cumoe_softmax(context, xv, y, NULL), "cumoe_softmax")) return;
    if (!take_result(context, l, y, &first, want)) break;
  }
  case_end();
}

/* Around what the rows of the table hold, and beyond the longest. */
static const int32_t lengths[] = {
    1,    2,    7,    8,    9,     33,    63,    64,    65,    127,   129,   200,   255,   256,    257,    511,
    512,  513,  1023, 1024, 1025,  2047,  2048,  2049,  2880,  3071,  3072,  3073,  4095,  4096,   4097,   5760,
    8191, 8192, 8193, 9000, 16383, 16384, 16385, 32767, 32768, 32771, 65535, 65536, 65537, 131071, 131072, 131075};
enum { LENGTHS = sizeof lengths / sizeof *lengths };

static int64_t rows_for(int i)
{
  const int64_t few[] = {3, 1, 9, 33, 2, 67}, most = 40000 / lengths[i] + 2;
  return few[i % 6] < most ? few[i % 6] : most;
}

void cases_softmax(cumoe_context context)
{
  for (int type = 0; type < 3; type++) {
    run_softmax(context, case_dtypes[type], 0, 9, NUMBERS);
    run_softmax(context, case_dtypes[type], 4, 0, NUMBERS);
    run_softmax(context, case_dtypes[type], 300, 12, HOSTILE);
    for (int i = 0; i < LENGTHS; i++)
      run_softmax(context, case_dtypes[type], rows_for(i), lengths[i], i % 2 ? NUMBERS : HOSTILE);
  }
}

/* ---- norms ----------------------------------------------------------------------------------------- */

typedef struct norm_case {
  int64_t rows, cols;
  int32_t dtype, weight_dtype, bias_dtype; /* 0: none */
  bool centered;
  data_kind kind;
  float eps;
} norm_case;

static double parameter(const tensor *t, int64_t i, double otherwise)
{
  return t->data ? tensor_get(t, 0, i) : otherwise;
}

static void expect_norm(const norm_case *c, const tensor *x, int64_t row, const tensor *weight, const tensor *bias,
                        bounded *want)
{
  double sum = 0, size = 0, squares = 0;
  for (int64_t i = 0; i < c->cols; i++) sum += tensor_get(x, row, i), size += fabs(tensor_get(x, row, i));
  const double n = (double)c->cols, mean = c->centered ? sum / n : 0;
  for (int64_t i = 0; i < c->cols; i++) squares += pow(tensor_get(x, row, i) - mean, 2);
  const double variance = squares / n + (double)c->eps, scale = 1 / sqrt(variance);
  const double off = c->centered ? 40 * u * size / n : 0; /* of the mean; the variance feels its square */
  const double off_factor = 40 * u + (off + u * fabs(mean)) * (off + u * fabs(mean)) / variance;
  for (int64_t i = 0; i < c->cols; i++) {
    const double d = tensor_get(x, row, i) - mean, w = parameter(weight, i, 1), b = parameter(bias, i, 0);
    const double y = d * scale * w + b;
    const double error = (off + u * fabs(d) + fabs(d) * off_factor) * scale * fabs(w) + 4 * u * (fabs(y) + fabs(b));
    want[i] = oracle_stored(isfinite(y) ? (bounded){y, error + tiny} : (bounded){y, 0}, c->dtype);
  }
}

static tensor make_parameter(rng *r, int32_t dtype, int64_t cols)
{
  return dtype ? tensor_normal(r, dtype, 1, cols, 1, .5) : (tensor){0};
}

static cumoe_view put_parameter(cumoe_context context, const tensor *t, layout l)
{
  return t->data ? device_put(context, t, pad_of(l, t->cols)) : no_view();
}

static void run_norm(cumoe_context context, const norm_case *c)
{
  if (!case_wanted(c->dtype)) return;
  rng r = {(uint64_t)(c->rows * 1000 + c->cols)};
  case_begin("%s [%d, %d] %s weight %s bias %s data %d", c->centered ? "layernorm" : "rmsnorm", (int)c->rows,
             (int)c->cols, cumoe_dtype_name((cumoe_dtype)c->dtype), cumoe_dtype_name((cumoe_dtype)c->weight_dtype),
             cumoe_dtype_name((cumoe_dtype)c->bias_dtype), (int)c->kind);
  tensor x = make_data(&r, c->kind, c->dtype, c->rows, c->cols), first;
  tensor weight = make_parameter(&r, c->weight_dtype, c->cols), bias = make_parameter(&r, c->bias_dtype, c->cols);
  bounded *want = scratch((size_t)(c->rows * c->cols), sizeof *want);
  for (int64_t row = 0; row < c->rows; row++) expect_norm(c, &x, row, &weight, &bias, want + row * c->cols);
  for (layout l = 0; l < LAYOUTS; l++) {
    set_poison(l % 2);
    cumoe_view xv = device_put(context, &x, pad_of(l, c->cols)), wv = put_parameter(context, &weight, l),
               bv = put_parameter(context, &bias, l);
    cumoe_view_mut y = place_for(context, l, xv);
    cumoe_status status = c->centered ? cumoe_layernorm(context, xv, wv, bv, c->eps, y, NULL)
                                      : cumoe_rmsnorm(context, xv, wv, c->eps, y, NULL);
    if (!case_served(context, status, "norm")) return;
    if (!take_result(context, l, y, &first, want)) break;
  }
  case_end();
}

void cases_norm(cumoe_context context)
{
  for (int type = 0; type < 3; type++) {
    const int32_t dtype = case_dtypes[type], parameters[] = {dtype, 0, CUMOE_F32};
    run_norm(context, &(norm_case){0, 9, dtype, 0, 0, true, NUMBERS, 1e-5f});
    run_norm(context, &(norm_case){4, 0, dtype, 0, 0, false, NUMBERS, 1e-5f});
    run_norm(context, &(norm_case){300, 12, dtype, dtype, dtype, true, HOSTILE, 1e-5f});
    for (int i = 0; i < LENGTHS; i++)
      for (int centered = 0; centered < 2; centered++)
        run_norm(context,
                 &(norm_case){rows_for(i), lengths[i], dtype, parameters[i % 3], centered ? parameters[i / 3 % 3] : 0,
                              centered, (data_kind)(i % DATA_KINDS), i % 4 ? 1e-5f : 0.25f});
  }
}
