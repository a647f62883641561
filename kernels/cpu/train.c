/* What training adds around the layer, in double, rounded once; the order of every sum is that of rows and columns. */
#include <math.h>
#include <stddef.h>
#include <string.h>
#include "fault.h"
#include "matrix.h"

/* ---- embedding ---- */

/* Its row of the table; -1: none. */
static int64_t row_of_token(const embedding_args *e, int64_t token)
{
  const int64_t id = id_at(&e->ids, token);
  if (id < e->vocabulary) return id < 0 ? -1 : id;
  record_fault(e->fault, FAULT_TOKEN_ID, 0, token);
  return -1;
}

void cpu_embed(const void *args, int64_t begin, int64_t end)
{
  const embedding_args *e = args;
  const int64_t bytes = format_bits(dense_format(e->y.dtype)) / 8;
  for (int64_t t = begin; t < end; t++) {
    const int64_t row = row_of_token(e, t);
    char *to = (char *)e->y.data + t * e->y.ld * bytes;
    if (row < 0)
      memset(to, 0, (size_t)(e->cols * bytes));
    else
      memcpy(to, (const char *)e->table.data + row * e->table.ld * bytes, (size_t)(e->cols * bytes));
  }
}

/* By counting: begins[v] is moved along while the tokens of v are listed, then all are moved back. */
void cpu_embedding_sort(const void *args, int64_t begin, int64_t end)
{
  const embedding_args *e = args;
  int32_t *begins = e->begins;
  if (begin == end) return;
  memset(begins, 0, (size_t)(e->vocabulary + 1) * sizeof *begins);
  for (int64_t t = 0; t < e->tokens; t++) {
    const int64_t row = row_of_token(e, t);
    if (row >= 0) begins[row + 1]++;
  }
  for (int64_t v = 0; v < e->vocabulary; v++) begins[v + 1] += begins[v];
  for (int64_t t = 0; t < e->tokens; t++) {
    const int64_t row = row_of_token(e, t);
    if (row >= 0) e->order[begins[row]++] = (int32_t)t;
  }
  memmove(begins + 1, begins, (size_t)e->vocabulary * sizeof *begins);
  begins[0] = 0;
}

enum { RUN = 64 }; /* sums of a run of columns lie on the stack */

static void sum_of_tokens(const embedding_args *e, int64_t row, int64_t first, int64_t count)
{
  double sum[RUN] = {0}, one[RUN];
  if (e->accumulate) get_run(sum, &e->table, row, first, count);
  for (int32_t i = e->begins[row]; i < e->begins[row + 1]; i++) {
    get_run(one, &e->y, e->order[i], first, count);
    for (int64_t c = 0; c < count; c++) sum[c] += one[c];
  }
  for (int64_t c = 0; c < count; c++) put(&e->table, row, first + c, sum[c]);
}

void cpu_embedding_backward(const void *args, int64_t begin, int64_t end)
{
  const embedding_args *e = args;
  for (int64_t row = begin; row < end; row++) {
    if (e->accumulate && e->begins[row] == e->begins[row + 1]) continue;
    for (int64_t c = 0; c < e->cols; c += RUN) sum_of_tokens(e, row, c, least(RUN, e->cols - c));
  }
}

/* ---- norms ---- */

void cpu_norm_stats(const void *args, int64_t begin, int64_t end)
{
  const norm_backward_args *n = args;
  for (int64_t row = begin; row < end; row++) {
    double mean = 0, squares = 0;
    for (int64_t c = 0; c < n->cols && n->centered; c++) mean += get(&n->x, row, c);
    mean /= (double)n->cols;
    for (int64_t c = 0; c < n->cols; c++) {
      const double distance = get(&n->x, row, c) - mean;
      squares += distance * distance;
    }
    n->stats[row][0] = mean;
    n->stats[row][1] = 1 / sqrt(squares / (double)n->cols + (double)n->eps);
  }
}

static void store_sums(const matrix *to, const double *sum, int64_t first, int64_t count, int accumulate)
{
  for (int64_t c = 0; c < count && to->data; c++)
    put(to, 0, first + c, accumulate ? get(to, 0, first + c) + sum[c] : sum[c]);
}

void cpu_norm_dparameters(const void *args, int64_t begin, int64_t end)
{
  const norm_backward_args *n = args;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t first = unit * NORM_COLUMNS, count = least(NORM_COLUMNS, n->cols - first);
    double x[NORM_COLUMNS], dy[NORM_COLUMNS], dweight[NORM_COLUMNS] = {0}, dbias[NORM_COLUMNS] = {0};
    for (int64_t row = 0; row < n->rows; row++) {
      get_run(x, &n->x, row, first, count);
      get_run(dy, &n->dy, row, first, count);
      for (int64_t c = 0; c < count; c++) {
        dweight[c] += dy[c] * ((x[c] - n->stats[row][0]) * n->stats[row][1]);
        dbias[c] += dy[c];
      }
    }
    store_sums(&n->dweight, dweight, first, count, n->accumulate);
    store_sums(&n->dbias, dbias, first, count, n->accumulate);
  }
}

void cpu_norm_dx(const void *args, int64_t begin, int64_t end)
{
  const norm_backward_args *n = args;
  const double cols = (double)n->cols;
  for (int64_t row = begin; row < end; row++) {
    const double mean = n->stats[row][0], scale = n->stats[row][1];
    double of_g = 0, of_gh = 0; /* means over the row */
    for (int64_t c = 0; c < n->cols; c++) {
      const double g = get(&n->dy, row, c) * (n->weight.data ? get(&n->weight, 0, c) : 1);
      of_g += g;
      of_gh += g * ((get(&n->x, row, c) - mean) * scale);
    }
    of_g = n->centered ? of_g / cols : 0;
    of_gh /= cols;
    for (int64_t c = 0; c < n->cols; c++) {
      const double g = get(&n->dy, row, c) * (n->weight.data ? get(&n->weight, 0, c) : 1);
      put(&n->dx, row, c, scale * (g - of_g - (get(&n->x, row, c) - mean) * scale * of_gh));
    }
  }
}

/* ---- elementwise, softmax ---- */

static double sigmoid(double x)
{
  return 1 / (1 + exp(-x));
}

/* Factors that are 0 where another is infinite are left out: of a far x the slope is 0 or 1. */
static double slope(int32_t function, double x)
{
  const double s = sigmoid(x), far = fabs(x) > 1e3 ? (x > 0) : NAN;
  const double z = 1.5957691216057307117 * x * (1 + .044715 * x * x); /* 1 + tanh z/2 = 2 sigmoid(z) */
  const double dz = 1.5957691216057307117 * (1 + 3 * .044715 * x * x);
  switch (function) {
  case EW_RELU: return x > 0 ? 1 : x <= 0 ? 0 : x;
  case EW_SIGMOID: return s * sigmoid(-x);
  case EW_SILU: return far == far ? far : s + x * s * sigmoid(-x);
  case EW_GELU:
    return far == far ? far : .5 * erfc(-x * 0.70710678118654752440) + x * 0.39894228040143267794 * exp(-.5 * x * x);
  default: return far == far ? far : sigmoid(z) + x * dz * sigmoid(z) * sigmoid(-z);
  }
}

void cpu_elementwise_backward(const void *args, int64_t begin, int64_t end)
{
  const elementwise_backward_args *e = args;
  const int64_t runs = RUNS_IN_ROW(e->cols);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t row = unit / runs, first = unit % runs * NORM_RUN, last = least(first + NORM_RUN, e->cols);
    for (int64_t c = first; c < last; c++)
      put(&e->dx, row, c, get(&e->dy, row, c) * slope(e->function, get(&e->x, row, c)));
  }
}

void cpu_softmax_backward(const void *args, int64_t begin, int64_t end)
{
  const elementwise_backward_args *e = args;
  for (int64_t row = begin; row < end; row++) {
    double sum = 0;
    for (int64_t c = 0; c < e->cols; c++) sum += get(&e->x, row, c) * get(&e->dy, row, c);
    for (int64_t c = 0; c < e->cols; c++) put(&e->dx, row, c, get(&e->x, row, c) * (get(&e->dy, row, c) - sum));
  }
}

/* ---- loss ---- */

/* -1: not counted. */
static int64_t target_of(const cross_entropy_args *a, int64_t token)
{
  const int64_t target = id_at(&a->targets, token);
  if (target < 0 || target == a->ignore) return -1;
  if (target < a->vocabulary) return target;
  record_fault(a->fault, FAULT_TOKEN_ID, 0, token);
  return -1;
}

void cpu_cross_entropy_count(const void *args, int64_t begin, int64_t end)
{
  const cross_entropy_args *a = args;
  int64_t counted = 0;
  for (int64_t t = 0; t < a->tokens && begin < end; t++) counted += target_of(a, t) >= 0;
  *a->counted = counted;
}

static void loss_of_row(const cross_entropy_args *a, int64_t t, int64_t target)
{
  const double share = (double)a->scale / (double)*a->counted;
  double most = -INFINITY, sum = 0;
  for (int64_t v = 0; v < a->vocabulary; v++) most = fmax(most, get(&a->logits, t, v));
  for (int64_t v = 0; v < a->vocabulary; v++) sum += exp(get(&a->logits, t, v) - most);
  a->losses[t] = (float)(log(sum) + (most - get(&a->logits, t, target)));
  for (int64_t v = 0; v < a->vocabulary && a->dlogits.data; v++)
    put(&a->dlogits, t, v, share * (exp(get(&a->logits, t, v) - most) / sum - (v == target)));
}

void cpu_cross_entropy_rows(const void *args, int64_t begin, int64_t end)
{
  const cross_entropy_args *a = args;
  for (int64_t t = begin; t < end; t++) {
    const int64_t target = target_of(a, t);
    if (target >= 0) {
      loss_of_row(a, t, target);
      continue;
    }
    a->losses[t] = 0;
    for (int64_t v = 0; v < a->vocabulary && a->dlogits.data; v++) put(&a->dlogits, t, v, 0);
  }
}

void cpu_cross_entropy_mean(const void *args, int64_t begin, int64_t end)
{
  const cross_entropy_args *a = args;
  double sum = 0;
  for (int64_t t = 0; t < a->tokens && begin < end; t++) sum += (double)a->losses[t];
  *a->loss = *a->counted ? (float)(sum / (double)*a->counted) : 0;
}

/* ---- optimiser ---- */

void cpu_squares(const void *args, int64_t begin, int64_t end)
{
  const global_norm_args *a = args;
  const int64_t runs = RUNS_IN_ROW(a->cols);
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t row = unit / runs, first = unit % runs * NORM_RUN, last = least(first + NORM_RUN, a->cols);
    double sum = 0, value;
    for (int64_t c = first; c < last; c++) value = get(&a->gradient, row, c), sum += value * value;
    a->sums[unit] = sum;
  }
}

void cpu_total(const void *args, int64_t begin, int64_t end)
{
  const global_norm_args *a = args;
  const double scale = (double)a->scale, most = (double)a->max_norm;
  double sum = 0;
  for (int64_t i = 0; i < a->count && begin < end; i++) sum += a->sums[i];
  const double norm = fabs(scale) * sqrt(sum);
  const int finite = isfinite(norm) && isfinite((float)norm);
  *a->norm = (float)norm;
  *a->factor = !finite ? NAN : (float)(most > 0 && norm > most ? scale * (most / norm) : scale);
  if (a->step && finite) ++*a->step;
}

void cpu_adamw(const void *args, int64_t begin, int64_t end)
{
  const adamw_args *a = args;
  const double factor = a->factor ? (double)*a->factor : 1, t = (double)(*a->step < 1 ? 1 : *a->step);
  const double rate = (double)a->rate * (a->schedule ? (double)*a->schedule : 1);
  const double beta1 = (double)a->beta1, beta2 = (double)a->beta2;
  const double first = 1 - pow(beta1, t), second = 1 - pow(beta2, t);
  const int64_t runs = RUNS_IN_ROW(a->cols);
  if (!isfinite(factor)) return;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t row = unit / runs, from = unit % runs * NORM_RUN, to = least(from + NORM_RUN, a->cols);
    for (int64_t c = from; c < to; c++) {
      const double g = factor * get(&a->gradient, row, c), w = get(&a->master, row, c);
      const double m = beta1 * get(&a->first, row, c) + (1 - beta1) * g;
      const double v = beta2 * get(&a->second, row, c) + (1 - beta2) * g * g;
      put(&a->master, row, c,
          w - rate * (double)a->decay * w - rate * (m / first) / (sqrt(v / second) + (double)a->eps));
      put(&a->first, row, c, m);
      put(&a->second, row, c, v);
      if (a->weights.data) put(&a->weights, row, c, get(&a->master, row, c));
    }
  }
}
