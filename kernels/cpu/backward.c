/* The grouped products of the backward: rows times transposed weights, and rows times rows. */
#include <stdbool.h>
#include "backward.h"
#include "backward_pairs.h"
#include "multiply.h"

enum { ROW_BLOCK = 16, DEPTH = 8 };

static const void *matrix_of(const expert_matrix *b, int h, int64_t expert, int64_t *first)
{
  *first = b->table[h] ? 0 : expert * b->expert_stride;
  return b->table[h] ? b->table[h][expert] : b->base[h];
}

/* ---- c = a b ---- */

typedef struct product_tile {
  double b[DEPTH][CPU_N_BLOCK], a[DEPTH], sum[ROW_BLOCK][CPU_N_BLOCK];
  int64_t start[ROW_BLOCK]; /* of a's rows; -1: the route is bad here, all zeros */
} product_tile;

static void load_block(product_tile *t, const rows_product_args *p, int h, int64_t expert, int32_t n0, int32_t k0,
                       int32_t depth)
{
  int64_t first;
  const void *base = matrix_of(&p->b, h, expert, &first);
  for (int32_t n = 0; n < CPU_N_BLOCK; n++) {
    const int64_t at = first + (n0 + n) * p->b.n_stride + k0 * p->b.k_stride;
    if (n0 + n < p->n)
      load_run(&t->b[0][n], CPU_N_BLOCK, base, at, p->b.k_stride, depth, (weight_format)p->b.format);
    else
      for (int32_t k = 0; k < depth; k++) t->b[k][n] = 0;
  }
}

static void multiply_half(product_tile *t, const rows_product_args *p, int h, int64_t expert, int32_t n0, int count)
{
  for (int32_t k0 = 0; k0 < p->k; k0 += DEPTH) {
    const int32_t depth = p->k - k0 < DEPTH ? p->k - k0 : DEPTH;
    load_block(t, p, h, expert, n0, k0, depth);
    for (int r = 0; r < count; r++) {
      if (t->start[r] < 0) continue;
      load_run(t->a, 1, p->a.base, t->start[r] + (int64_t)h * p->k + k0, 1, depth, dense_format(p->a.dtype));
      multiply_row(t->sum[r], t->a, t->b, depth);
    }
  }
}

static void multiply_rows(product_tile *t, const rows_product_args *p, int64_t expert, int32_t n0, int64_t row,
                          int count)
{
  for (int r = 0; r < count; r++) {
    const int64_t pair = pair_of_map(&p->map, row + r);
    t->start[r] = pair < 0 ? -1 : start_of(&p->a, &p->map, row + r, pair);
    for (int n = 0; n < CPU_N_BLOCK; n++) t->sum[r][n] = 0;
  }
  for (int h = 0; h < p->halves; h++) multiply_half(t, p, h, expert, n0, count);
  for (int r = 0; r < count; r++)
    for (int32_t n = 0; n < CPU_N_BLOCK && n0 + n < p->n; n++)
      store_element(p->c, (row + r) * p->c_ld + n0 + n, p->c_dtype, f32_range(p->scale * t->sum[r][n]));
}

void cpu_rows_product(const void *args, int64_t begin, int64_t end)
{
  const rows_product_args *p = args;
  const int64_t blocks = PRODUCT_BLOCKS(p->n);
  product_tile t;
  for (int64_t i = begin; i < end && i < blocks * p->map.experts; i++) {
    const row_run run = rows_of_map(&p->map, i / blocks);
    const int32_t n0 = (int32_t)(i % blocks) * CPU_N_BLOCK;
    for (int64_t row = run.first; row < run.end; row += ROW_BLOCK)
      multiply_rows(&t, p, i / blocks, n0, row, (int)(run.end - row < ROW_BLOCK ? run.end - row : ROW_BLOCK));
  }
}

/* ---- d = a^T b ---- */

typedef struct gradient_tile {
  double a[GRADIENT_BLOCK][DEPTH], b[DEPTH][CPU_N_BLOCK], sum[GRADIENT_BLOCK][CPU_N_BLOCK];
} gradient_tile;

typedef struct gradient_unit {
  int64_t expert;
  row_run run;
  int32_t h, n0, width;
} gradient_unit;

/* Runs of both operands, weighed; zeros of a pair that is dropped, for 0 * NaN would not be 0. */
static void load_rows(gradient_tile *t, const weight_gradient_args *g, const gradient_unit *u, int64_t row, int depth,
                      int32_t k0)
{
  const int32_t columns = g->k - k0 < CPU_N_BLOCK ? g->k - k0 : CPU_N_BLOCK;
  for (int r = 0; r < DEPTH; r++) {
    const int64_t pair = r < depth ? pair_of_map(&g->map, row + r) : -1;
    const double weight = pair < 0 ? 0 : weight_of_pair(&g->map, pair);
    for (int n = 0; n < GRADIENT_BLOCK; n++) t->a[n][r] = 0;
    for (int k = 0; k < CPU_N_BLOCK; k++) t->b[r][k] = 0;
    if (weight == 0) continue;
    load_run(&t->a[0][r], DEPTH, g->a.base, start_of(&g->a, &g->map, row + r, pair) + g->a_half[u->h] + u->n0 * g->a_n,
             g->a_n, u->width, dense_format(g->a.dtype));
    for (int n = 0; n < u->width && g->weighs == WEIGHS_A; n++) t->a[n][r] *= weight;
    if (columns <= 0) continue;
    load_run(t->b[r], 1, g->b.base, start_of(&g->b, &g->map, row + r, pair) + k0, 1, columns, dense_format(g->b.dtype));
    for (int k = 0; k < columns && g->weighs == WEIGHS_B; k++) t->b[r][k] *= weight;
  }
}

static void store_gradient(const weight_gradient_args *g, const void *base, int64_t at, int32_t dtype, double sum)
{
  void *to = (void *)(uintptr_t)base;
  const double before = g->accumulates ? load_element(base, at, dtype) : 0;
  store_element(to, at, dtype, f32_range(before + f32_range(g->scale * sum)));
}

static void sum_columns(gradient_tile *t, const weight_gradient_args *g, const gradient_unit *u, int32_t k0)
{
  memset(t->sum, 0, sizeof t->sum);
  for (int64_t row = u->run.first; row < u->run.end; row += DEPTH) {
    const int depth = (int)(u->run.end - row < DEPTH ? u->run.end - row : DEPTH);
    load_rows(t, g, u, row, depth, k0);
    for (int n = 0; n < u->width; n++) multiply_row(t->sum[n], t->a[n], t->b, depth);
  }
  int64_t first;
  const void *base = matrix_of(&g->d, u->h, u->expert, &first);
  for (int n = 0; n < u->width; n++)
    for (int32_t k = 0; k < CPU_N_BLOCK && k0 + k < g->k; k++)
      store_gradient(g, base, first + (u->n0 + n) * g->d.n_stride + (k0 + k) * g->d.k_stride, g->d_dtype, t->sum[n][k]);
}

static void sum_bias(gradient_tile *t, const weight_gradient_args *g, const gradient_unit *u)
{
  double sum[GRADIENT_BLOCK] = {0};
  for (int64_t row = u->run.first; row < u->run.end; row += DEPTH) {
    load_rows(t, g, u, row, (int)(u->run.end - row < DEPTH ? u->run.end - row : DEPTH), g->k);
    for (int n = 0; n < u->width; n++)
      for (int r = 0; r < DEPTH; r++) sum[n] += t->a[n][r];
  }
  for (int n = 0; n < u->width; n++)
    store_gradient(g, g->d.bias[u->h], u->expert * g->d.bias_expert_stride + (u->n0 + n) * g->d.bias_n_stride,
                   g->d.bias_dtype, sum[n]);
}

static void add_up(const weight_gradient_args *g, int64_t begin, int64_t end, bool bias)
{
  const int64_t blocks = GRADIENT_BLOCKS(g->n);
  gradient_tile t;
  for (int64_t i = begin; i < end && i < blocks * g->halves * g->map.experts; i++) {
    gradient_unit u = {.expert = i / blocks / g->halves, .h = (int32_t)(i / blocks % g->halves)};
    u.n0 = (int32_t)(i % blocks) * GRADIENT_BLOCK;
    u.width = g->n - u.n0 < GRADIENT_BLOCK ? g->n - u.n0 : GRADIENT_BLOCK;
    u.run = rows_of_map(&g->map, u.expert);
    if (g->accumulates && u.run.first == u.run.end) continue;
    if (bias && g->d.bias[u.h]) sum_bias(&t, g, &u);
    if (!bias)
      for (int32_t k0 = 0; k0 < g->k; k0 += CPU_N_BLOCK) sum_columns(&t, g, &u, k0);
  }
}

void cpu_weight_gradient(const void *args, int64_t begin, int64_t end)
{
  add_up(args, begin, end, false);
}

void cpu_bias_gradient(const void *args, int64_t begin, int64_t end)
{
  add_up(args, begin, end, true);
}
