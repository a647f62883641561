/* Elementwise operations, softmax, norms and the matrix product, in double, rounded once. */
#include <math.h>
#include <stddef.h>
#include <string.h>
#include "cpu.h"
#include "element.h"

/* ---- elementwise: a unit is UNIT_ELEMENTS of a row ---- */

static double apply(const elementwise_args *e, double x, double other)
{
  switch (e->function) {
  case EW_ADD: return x + other;
  case EW_MUL: return x * other;
  case EW_SCALE: return (double)e->factor * x;
  case EW_RELU: return x < 0 ? 0 : x;
  case EW_SIGMOID: return 1 / (1 + exp(-x));
  case EW_SILU: return x / (1 + exp(-x));
  case EW_GELU: return .5 * x * erfc(-x * 0.70710678118654752440);
  default: return x / (1 + exp(-1.5957691216057307117 * x * (1 + .044715 * x * x))); /* 1 + tanh z = 2 sigmoid(2z) */
  }
}

static void apply_unit(const elementwise_args *e, int64_t row, int64_t first)
{
  const int64_t unit = UNIT_ELEMENTS(e->dtype), end = first + unit < e->cols ? first + unit : e->cols;
  for (int64_t c = first; c < end; c++) {
    double x = load_element(e->a, row * e->a_ld + c, e->dtype);
    double other = e->b ? load_element(e->b, row * e->b_ld + c, e->dtype) : 0;
    store_element(e->y, row * e->y_ld + c, e->dtype, apply(e, x, other));
  }
}

void cpu_elementwise(const void *args, int64_t begin, int64_t end)
{
  const elementwise_args *e = args;
  const int64_t unit = UNIT_ELEMENTS(e->dtype), in_row = (e->cols + unit - 1) / unit;
  int64_t row = begin / in_row, at = begin % in_row;
  for (int64_t i = begin; i < end; i++) {
    apply_unit(e, row, at * unit);
    if (++at == in_row) at = 0, row++;
  }
}

/* ---- softmax, norms: a unit is a row ---- */

static void softmax_row(const softmax_args *s, int64_t row)
{
  const int64_t x = row * s->x_ld, y = row * s->y_ld;
  double most = -INFINITY, sum = 0;
  for (int32_t c = 0; c < s->cols; c++) most = fmax(most, load_element(s->x, x + c, s->dtype));
  for (int32_t c = 0; c < s->cols; c++) sum += exp(load_element(s->x, x + c, s->dtype) - most);
  for (int32_t c = 0; c < s->cols; c++)
    store_element(s->y, y + c, s->dtype, exp(load_element(s->x, x + c, s->dtype) - most) / sum);
}

void cpu_softmax(const void *args, int64_t begin, int64_t end)
{
  for (int64_t row = begin; row < end; row++) softmax_row(args, row);
}

static void norm_row(const norm_args *n, int64_t row)
{
  const int64_t x = row * n->x_ld, y = row * n->y_ld;
  double mean = 0, squares = 0;
  for (int32_t c = 0; c < n->cols && n->centered; c++) mean += load_element(n->x, x + c, n->dtype);
  mean /= n->cols;
  for (int32_t c = 0; c < n->cols; c++) {
    double distance = load_element(n->x, x + c, n->dtype) - mean;
    squares += distance * distance;
  }
  double factor = 1 / sqrt(squares / n->cols + (double)n->eps);
  for (int32_t c = 0; c < n->cols; c++) {
    double weight = n->weight ? load_element(n->weight, c, n->weight_dtype) : 1;
    double bias = n->bias ? load_element(n->bias, c, n->bias_dtype) : 0;
    store_element(n->y, y + c, n->dtype, (load_element(n->x, x + c, n->dtype) - mean) * factor * weight + bias);
  }
}

void cpu_norm(const void *args, int64_t begin, int64_t end)
{
  for (int64_t row = begin; row < end; row++) norm_row(args, row);
}

/* ---- matrix product: a unit is MATMUL_ROWS rows of one c ---- */

enum { K_BLOCK = 8, N_BLOCK = 64 }; /* a tile lies on the stack: 4 KiB of b, 4 of sums */

typedef struct tile {
  double a[MATMUL_ROWS][K_BLOCK], b[K_BLOCK][N_BLOCK], sum[MATMUL_ROWS][N_BLOCK];
} tile;

static int smaller(int64_t a, int b)
{
  return a < b ? (int)a : b;
}

static void load_tile(tile *t, const matmul_args *m, int64_t batch, int64_t row, int rows, int64_t k, int depth,
                      int64_t n, int width)
{
  const int64_t a_row = m->transpose_a ? 1 : m->a_ld, a_k = m->transpose_a ? m->a_ld : 1;
  const int64_t b_k = m->transpose_b ? 1 : m->b_ld, b_n = m->transpose_b ? m->b_ld : 1;
  const int64_t a = batch * m->a_stride + row * a_row + k * a_k, b = batch * m->b_stride + k * b_k + n * b_n;
  const weight_format format = dense_format(m->dtype);
  for (int r = 0; r < rows; r++) load_run(t->a[r], 1, m->a, a + r * a_row, a_k, depth, format);
  if (m->transpose_b)
    for (int i = 0; i < width; i++) load_run(&t->b[0][i], N_BLOCK, m->b, b + i * b_n, b_k, depth, format);
  else
    for (int i = 0; i < depth; i++) load_run(t->b[i], 1, m->b, b + i * b_k, b_n, width, format);
}

static void multiply_row(double *restrict sum, const double *restrict a, const double (*restrict b)[N_BLOCK], int depth)
{
  for (int k = 0; k < depth; k++)
    for (int n = 0; n < N_BLOCK; n++) sum[n] += a[k] * b[k][n];
}

static void store_block(const tile *t, const matmul_args *m, int64_t first, int rows, int width)
{
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < width; n++) {
      const int64_t at = first + r * m->c_ld + n;
      const double before = m->beta != 0 ? (double)m->beta * load_element(m->c, at, m->c_dtype) : 0;
      const double product = m->k > 0 ? (double)m->alpha * t->sum[r][n] : 0;
      store_element(m->c, at, m->c_dtype, product + before);
    }
}

static void multiply_block(tile *t, const matmul_args *m, int64_t batch, int64_t row)
{
  const int rows = smaller(m->m - row, MATMUL_ROWS);
  for (int64_t n = 0; n < m->n; n += N_BLOCK) {
    const int width = smaller(m->n - n, N_BLOCK);
    memset(t->sum, 0, sizeof t->sum);
    for (int64_t k = 0; k < m->k; k += K_BLOCK) {
      const int depth = smaller(m->k - k, K_BLOCK);
      load_tile(t, m, batch, row, rows, k, depth, n, width);
      for (int r = 0; r < rows; r++) multiply_row(t->sum[r], t->a[r], (const double(*)[N_BLOCK])t->b, depth);
    }
    store_block(t, m, batch * m->c_stride + row * m->c_ld + n, rows, width);
  }
}

void cpu_matmul(const void *args, int64_t begin, int64_t end)
{
  const matmul_args *m = args;
  const int64_t blocks = (m->m + MATMUL_ROWS - 1) / MATMUL_ROWS;
  tile t = {0}; /* what a narrow tile leaves unset is multiplied, and not stored */
  for (int64_t i = begin; i < end; i++) multiply_block(&t, m, i / blocks, i % blocks * MATMUL_ROWS);
}
