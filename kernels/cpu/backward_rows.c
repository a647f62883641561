/* What the backward does row by row and token by token: activation, gradients of weights of pairs, d x. */
#include <stdbool.h>
#include "backward.h"
#include "backward_pairs.h"

/* ---- activation ---- */

/* act(g) and its slope, in z before any limit. At a kink the slope is that from the left. */
typedef struct activated {
  double value, slope;
} activated;

static activated activate(const activation_args *a, double g)
{
  switch (a->act) {
  case ACT_SILU: {
    const double s = 1 / (1 + exp(-g));
    return (activated){g * s, s * (1 + g * (1 - s))};
  }
  case ACT_SWIGLU_OAI: {
    const double s = 1 / (1 + exp(-a->act_alpha * g));
    return (activated){g * s, s * (1 + a->act_alpha * g * (1 - s))};
  }
  case ACT_GELU_ERF: {
    const double p = 0.5 * (1 + erf(g * 0.70710678118654752440));
    return (activated){g * p, p + g * 0.39894228040143267794 * exp(-0.5 * g * g)};
  }
  case ACT_GELU_TANH: {
    const double t = tanh(0.79788456080286535588 * (g + 0.044715 * g * g * g));
    return (activated){0.5 * g * (1 + t),
                       0.5 * (1 + t) + 0.5 * g * (1 - t * t) * 0.79788456080286535588 * (1 + 0.134145 * g * g)};
  }
  case ACT_RELU: return (activated){g < 0 ? 0 : g, g <= 0 ? 0 : 1};
  case ACT_RELU2: return (activated){g < 0 ? 0 : g * g, g <= 0 ? 0 : 2 * g};
  default: return (activated){g, 1};
  }
}

static double bounded(double v, double low, double high)
{
  return v < low ? low : v > high ? high : v;
}

/* What was bounded has slope 0; a NaN stays one. */
static double slope_within(double v, double low, double high)
{
  return v < low || v > high ? 0 : 1;
}

typedef struct unit_row {
  double h, d_gate, d_up;
} unit_row;

static unit_row gated_unit(const activation_args *a, double gate, double up, double d_h)
{
  const double limit = a->act_limit, plus = a->act == ACT_SWIGLU_OAI ? 1 : 0;
  const activated v = activate(a, bounded(gate, -INFINITY, a->gate_limit));
  const double u = bounded(up, -limit, limit) + plus;
  return (unit_row){v.value * u, d_h * u * v.slope * slope_within(gate, -INFINITY, a->gate_limit),
                    d_h * v.value * slope_within(up, -limit, limit)};
}

static unit_row plain_unit(const activation_args *a, double z, double d_h)
{
  const activated v = activate(a, z);
  return (unit_row){v.value, d_h * v.slope, 0};
}

/* Where gate and up of a row begin, and how far one is from the next. */
typedef struct halves_at {
  int64_t gate, up, step;
} halves_at;

static halves_at halves_of(const activation_args *a, int64_t row)
{
  const int64_t first = row * (a->gated ? 2 : 1) * a->inter, step = a->gated && a->order >= GATE_UP_PAIRS ? 2 : 1;
  const int64_t second = first + (step == 2 ? 1 : a->inter);
  const bool up_first = a->order == UP_FIRST || a->order == UP_GATE_PAIRS;
  return a->gated && up_first ? (halves_at){second, first, step} : (halves_at){first, second, step};
}

static void activate_row(const activation_args *a, int64_t row, int64_t pair)
{
  const int64_t h = row * a->inter;
  const halves_at z = halves_of(a, a->z_row ? a->z_row[pair] : row), d_z = halves_of(a, row);
  const double given = weight_of_pair(&a->map, pair), weight = a->weighs ? given : 1, of_h = a->weighs_h ? given : 1;
  double along = 0;
  for (int32_t i = 0; i < a->inter; i++) {
    const double first = load_element(a->z, z.gate + i * z.step, a->dtype),
                 d_h = a->d_h ? (double)a->scale * load_element(a->d_h, h + i, a->d_h_dtype) : 0;
    const unit_row u = a->gated ? gated_unit(a, first, load_element(a->z, z.up + i * z.step, a->dtype), weight * d_h)
                                : plain_unit(a, first, weight * d_h);
    store_element(a->h, h + i, a->dtype, u.h);
    along += d_h * load_element(a->h, h + i, a->dtype);
    if (a->weighs_h) store_element(a->h, h + i, a->dtype, of_h * u.h);
    if (!a->d_h) continue;
    store_element(a->d_z, d_z.gate + i * d_z.step, a->dtype, u.d_gate);
    if (a->gated) store_element(a->d_z, d_z.up + i * d_z.step, a->dtype, u.d_up);
  }
  if (a->along) a->along[row] = along;
}

/* The row of a pair that is dropped is there all the same: products run over it. */
static void clear_row(const activation_args *a, int64_t row)
{
  const int64_t halves = a->gated ? 2 : 1;
  for (int64_t i = 0; i < a->inter; i++) store_element(a->h, row * a->inter + i, a->dtype, 0);
  for (int64_t i = 0; i < halves * a->inter && a->d_h; i++)
    store_element(a->d_z, row * halves * a->inter + i, a->dtype, 0);
  if (a->along) a->along[row] = 0;
}

void cpu_activation(const void *args, int64_t begin, int64_t end)
{
  const activation_args *a = args;
  const int64_t last = end_of_map(&a->map);
  for (int64_t row = begin; row < end && row < last; row++) {
    const int64_t pair = pair_kept(&a->map, row);
    if (pair < 0 || (a->z_row && (a->z_row[pair] < 0 || a->z_row[pair] >= a->map.tokens.count * a->map.top_k)))
      clear_row(a, row);
    else
      activate_row(a, row, pair);
  }
}

/* ---- rows in another order ---- */

static int32_t padded_row(const pad_args *p, int64_t pair)
{
  const int32_t row = p->map.slot_row[pair];
  if (row < 0) return row;
  const int64_t e = expert_of_row(&p->map, row), at = row - (int64_t)p->map.offsets[e];
  if (row < p->map.rows_cap && at >= 0 && at < p->counts[e]) return (int32_t)(p->offsets[e] + at);
  record_fault(p->map.fault, FAULT_ROUTE, pair % p->map.top_k, pair / p->map.top_k);
  return ROW_DROPPED;
}

void cpu_pad(const void *args, int64_t begin, int64_t end)
{
  const pad_args *p = args;
  const int64_t pairs = tokens_present(p->map.tokens) * p->map.top_k;
  int64_t at = 0;
  if (begin != 0 || end <= 0) return;
  for (int32_t e = 0; e < p->map.experts; e++) {
    const row_run run = rows_of_map(&p->map, e);
    const int64_t count = within(run.end - run.first, 0, p->rows_cap - at);
    p->counts[e] = (int32_t)count;
    p->offsets[e] = (int32_t)at;
    for (int64_t i = 0; i < (count + ROW_STEP - 1) / ROW_STEP * ROW_STEP; i++)
      p->row_pair[at++] = i < count ? (int32_t)pair_of_map(&p->map, run.first + i) : -1;
  }
  p->offsets[p->map.experts] = (int32_t)at;
  for (int64_t pair = 0; pair < pairs; pair++) p->slot_row[pair] = padded_row(p, pair);
}

void cpu_copy_rows(const void *args, int64_t begin, int64_t end)
{
  const copy_rows_args *c = args;
  const int64_t last = end_of_map(&c->map);
  for (int64_t row = begin; row < end && row < last; row++) {
    const int64_t pair = pair_kept(&c->map, row), from = start_of(&c->a, &c->map, row, pair < 0 ? 0 : pair);
    const double weight = pair >= 0 && c->weighs ? weight_of_pair(&c->map, pair) : 1;
    for (int64_t i = 0; i < c->cols; i++)
      store_element(c->to, row * c->to_ld + i, c->dtype,
                    pair < 0 ? 0 : weight * load_element(c->a.base, from + i, c->a.dtype));
  }
}

/* ---- weights of pairs ---- */

static double dot(const void *a, int64_t a_first, int a_dtype, const void *b, int64_t b_first, int b_dtype,
                  int64_t count)
{
  double sum = 0;
  for (int64_t i = 0; i < count; i++)
    sum += (double)load_element(a, a_first + i, a_dtype) * load_element(b, b_first + i, b_dtype);
  return sum;
}

static double bias_part(const pair_gradient_args *a, int64_t row, int64_t d_out)
{
  const expert_matrix *b = &a->down;
  double sum = 0;
  if (!b->bias[0]) return 0;
  const int64_t first = expert_of_row(&a->map, row) * b->bias_expert_stride;
  for (int32_t i = 0; i < a->hidden; i++)
    sum += (double)load_element(a->d_out.base, d_out + i, a->d_out.dtype) *
           load_element(b->bias[0], first + i * b->bias_n_stride, b->bias_dtype);
  return a->scale * sum;
}

static double pair_gradient(const pair_gradient_args *a, int64_t token, int32_t slot)
{
  const int64_t row = row_of_pair(&a->map, token, slot), pair = token * a->map.top_k + slot;
  if (row == ROW_DROPPED || a->unweighed) return 0;
  const int64_t d_out = start_of(&a->d_out, &a->map, row, pair), x = start_of(&a->x, &a->map, row, pair);
  if (row == ROW_IDENTITY)
    return a->scale * dot(a->d_out.base, d_out, a->d_out.dtype, a->x.base, x, a->x.dtype, a->hidden);
  if (a->on_input) return dot(a->d_rows, row * a->hidden, a->dtype, a->x.base, x, a->x.dtype, a->hidden);
  return a->along[row] + bias_part(a, row, d_out);
}

void cpu_pair_gradient(const void *args, int64_t begin, int64_t end)
{
  const pair_gradient_args *a = args;
  const int64_t tokens = tokens_present(a->map.tokens);
  for (int64_t token = begin; token < end && token < tokens; token++)
    for (int32_t slot = 0; slot < a->map.top_k; slot++) {
      const double d = f32_range(pair_gradient(a, token, slot)),
                   w = weight_of_pair(&a->map, token * a->map.top_k + slot);
      a->d_weights[token * a->d_weights_ld + slot] = (float)(a->sigmoid ? d * w * (1 - w) : d);
    }
}

void cpu_sigmoid(const void *args, int64_t begin, int64_t end)
{
  const sigmoid_args *a = args;
  const int64_t tokens = tokens_present(a->tokens);
  for (int64_t token = begin; token < end && token < tokens; token++)
    a->y[token] = (float)(1 / (1 + exp(-(double)a->x[token])));
}

/* ---- d x ---- */

static void add_row(double *sum, const void *base, int64_t first, int dtype, int64_t count, double factor)
{
  for (int64_t i = 0; i < count; i++) sum[i] += factor * load_element(base, first + i, dtype);
}

/* Columns c0 .. c0 + count - 1 of one token. */
static void gather_columns(const gather_args *a, int64_t token, int64_t c0, int64_t count, double *sum)
{
  const int32_t k = a->map.top_k;
  for (int32_t slot = 0; slot < k; slot++) {
    const int64_t row = row_of_pair(&a->map, token, slot), pair = token * k + slot;
    if (row >= 0)
      add_row(sum, a->d_rows, row * a->hidden + c0, a->dtype, count, a->on_input ? weight_of_pair(&a->map, pair) : 1);
    else if (row == ROW_IDENTITY)
      add_row(sum, a->d_out.base, start_of(&a->d_out, &a->map, row, pair) + c0, a->d_out.dtype, count,
              a->weights ? (double)a->scale * a->weights[token * a->weights_ld + slot] : 1);
  }
  if (a->d_shared) add_row(sum, a->d_shared, token * a->hidden + c0, a->dtype, count, 1);
  if (a->d_router) add_row(sum, a->d_router, token * a->hidden + c0, a->d_router_dtype, count, 1);
  if (a->d_gate) add_row(sum, a->gate.base, c0, a->gate.dtype, count, a->d_gate[token]);
  for (int64_t i = 0; i < count; i++)
    store_element(a->d_x, token * a->d_x_ld + c0 + i, a->d_x_dtype, f32_range(sum[i]));
}

void cpu_gather(const void *args, int64_t begin, int64_t end)
{
  enum { COLUMNS = 256 };
  const gather_args *a = args;
  const int64_t tokens = tokens_present(a->map.tokens);
  for (int64_t token = begin; token < end && token < tokens; token++)
    for (int64_t c = 0; c < a->hidden; c += COLUMNS) {
      double sum[COLUMNS] = {0};
      gather_columns(a, token, c, a->hidden - c < COLUMNS ? a->hidden - c : COLUMNS, sum);
    }
}
