/*
 * The grouped GEMM, up and down, for every layout. One unit is (expert, CPU_N_BLOCK output channels).
 *
 * Weights are brought once a tile into double, channel innermost, and a few rows run over them: the sum of an
 * element is then a plain loop over k, the same whatever the tile and the other rows are, and the compiler
 * vectorises over channels without reordering anything. A product of two floats is exact in double.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include "cpu.h"
#include "element.h"
#include "multiply.h"
#include "rows.h"
#include "../encode.h"

/* The tile lies on the stack, a caller's may be small, and fits L1: 4 KiB of weights, 8 of sums. */
enum { ROW_BLOCK = 16, K_BLOCK = 8 };

typedef struct tile {
  double w[2][K_BLOCK][CPU_N_BLOCK];
  double a[ROW_BLOCK][K_BLOCK];
  double sum[2][ROW_BLOCK][CPU_N_BLOCK];
} tile;

/* What one unit works on. */
typedef struct unit {
  int64_t expert;
  int32_t n0, width, halves; /* channels n0 .. n0 + width - 1 */
} unit;

typedef struct row_source {
  int64_t row, pair; /* of a; row -1: the route is bad here, reads as zeros */
} row_source;

static row_source source_of(const gemm_args *g, int64_t row)
{
  const int64_t pair = pair_of_row(g->row_pair, row, tokens_present(g->tokens) * g->top_k, g->fault);
  if (pair < 0) return (row_source){-1, 0};
  return (row_source){g->row_pair == NULL || g->packed ? row : pair / g->top_k, pair};
}

/* What one scale belongs to, but for the code: the rows of a tile's channels begin at a multiple of K_BLOCK, in which
 * no scale changes. */
typedef struct scaling {
  double factor, value;
  int32_t zero;
} scaling;

static scaling scaling_of(const expert_matrix *b, int h, int64_t expert, int32_t n, int32_t k)
{
  const int32_t dtype = b->scale.dtype;
  scaling s = {read_scale(scale_at(&b->scale, h, expert, n, k), dtype), 0, zero_point(b, h, expert, n, k)};
  if (b->format == FORMAT_af4) s.value = read_scale(value_at(b, h, expert, n, k), dtype);
  if (!b->global[h]) return s;
  const double global = b->global[h][expert * b->global_stride];
  s.factor = b->global_over ? s.factor / global : s.factor * global;
  return s;
}

/* Codes become weights. Those of s8 that are unsigned were read as signed. */
static void scale_weights(double *w, int32_t depth, scaling s, weight_format format)
{
  const bool is_unsigned = format == FORMAT_s8 && s.zero == 128;
  for (int32_t k = 0; k < depth; k++) {
    double *at = w + k * CPU_N_BLOCK;
    *at = (*at + (is_unsigned && *at < 0 ? 256 : 0) - s.zero) * s.factor + s.value;
  }
}

static void load_weights(tile *t, const gemm_args *g, const unit *u, int32_t k0, int32_t depth)
{
  const expert_matrix *b = &g->b;
  for (int h = 0; h < u->halves; h++) {
    const void *p = b->table[h] ? b->table[h][u->expert] : b->base[h];
    int64_t first = b->table[h] ? 0 : u->expert * b->expert_stride;
    for (int32_t n = 0; n < u->width; n++) {
      const weight_format format = (weight_format)b->format;
      double *w = &t->w[h][0][n];
      load_run(w, CPU_N_BLOCK, p, first + (u->n0 + n) * b->n_stride + k0 * b->k_stride, b->k_stride, depth, format);
      if (format_is_scaled(format)) scale_weights(w, depth, scaling_of(b, h, u->expert, u->n0 + n, k0), format);
    }
    for (int32_t n = u->width; n < CPU_N_BLOCK; n++)
      for (int32_t k = 0; k < depth; k++) t->w[h][k][n] = 0;
  }
}

static double clamp(double v, double low, double high)
{
  return v < low ? low : v > high ? high : v;
}

static double activate(const gemm_args *g, double gate, double up)
{
  if (g->gated) {
    gate = clamp(gate, -INFINITY, g->gate_limit);
    up = clamp(up, -(double)g->act_limit, g->act_limit);
  }
  switch (g->act) {
  case ACT_SILU: return gate / (1 + exp(-gate)) * up;
  case ACT_GELU_ERF: return 0.5 * gate * (1 + erf(gate * 0.70710678118654752440)) * up;
  case ACT_GELU_TANH:
    return 0.5 * gate * (1 + tanh(0.79788456080286535588 * (gate + 0.044715 * gate * gate * gate))) * up;
  case ACT_RELU: return (gate < 0 ? 0 : gate) * up;
  case ACT_RELU2: return (gate < 0 ? 0 : gate * gate) * up;
  case ACT_SWIGLU_OAI: return gate / (1 + exp(-g->act_alpha * gate)) * (up + 1);
  default: return gate * up;
  }
}

static double bias_of(const expert_matrix *b, int h, int64_t expert, int32_t n)
{
  if (b->bias[h] == NULL) return 0;
  return load_element(b->bias[h], expert * b->bias_expert_stride + n * b->bias_n_stride, b->bias_dtype);
}

static void store_row(const tile *t, const gemm_args *g, const unit *u, int64_t row, int at, row_source from)
{
  double weight = 1;
  if (from.row >= 0 && g->pair_weights)
    weight = g->pair_weights[from.pair / g->top_k * g->pair_weights_ld + from.pair % g->top_k];
  for (int32_t n = 0; n < u->width; n++) {
    double v[2] = {0, 1};
    for (int h = 0; h < u->halves; h++)
      v[h] = f32_range(f32_range(t->sum[h][at][n]) * weight) + bias_of(&g->b, h, u->expert, u->n0 + n);
    store_element(g->c, row * g->c_ld + u->n0 + n, g->dtype, activate(g, v[0], v[1]));
  }
}

/* As they are, or codes and the scale of their group, which lies in one too. */
static void load_activations(double *a, const gemm_args *g, int64_t row, int32_t k0, int32_t depth)
{
  const row_format *f = &g->rows;
  const weight_format codes = f->element == DT_E4M3 ? FORMAT_e4m3 : FORMAT_s8;
  load_run(a, 1, g->a, row * g->a_ld + k0, 1, depth, g->a_scale ? codes : dense_format(g->dtype));
  if (!g->a_scale) return;
  const double scale = g->a_scale[(f->origin + k0) / f->group * g->a_scale_ld + row];
  for (int32_t k = 0; k < depth; k++) a[k] *= scale;
}

static void multiply_rows(tile *t, const gemm_args *g, const unit *u, int64_t first, int count)
{
  row_source from[ROW_BLOCK];
  for (int r = 0; r < count; r++) from[r] = source_of(g, first + r);
  for (int h = 0; h < u->halves; h++)
    for (int r = 0; r < count; r++)
      for (int n = 0; n < CPU_N_BLOCK; n++) t->sum[h][r][n] = 0;
  for (int32_t k0 = 0; k0 < g->k; k0 += K_BLOCK) {
    int32_t depth = g->k - k0 < K_BLOCK ? g->k - k0 : K_BLOCK;
    load_weights(t, g, u, k0, depth);
    for (int r = 0; r < count; r++) {
      if (from[r].row < 0) continue;
      load_activations(t->a[r], g, from[r].row, k0, depth);
      for (int h = 0; h < u->halves; h++) multiply_row(t->sum[h][r], t->a[r], t->w[h], depth);
    }
  }
  for (int r = 0; r < count; r++) store_row(t, g, u, first + r, r, from[r]);
}

void cpu_gemm(const void *args, int64_t begin, int64_t end)
{
  const gemm_args *g = args;
  int64_t blocks = (g->n + CPU_N_BLOCK - 1) / CPU_N_BLOCK;
  tile t;
  for (int64_t i = begin; i < end && i < blocks * g->experts; i++) {
    unit u = {.expert = i / blocks, .n0 = (int32_t)(i % blocks) * CPU_N_BLOCK, .halves = g->gated ? 2 : 1};
    u.width = g->n - u.n0 < CPU_N_BLOCK ? g->n - u.n0 : CPU_N_BLOCK;
    const row_run run = rows_of_expert(g->counts, g->offsets, g->tokens, g->rows_cap, u.expert, g->fault);
    for (int64_t row = run.first; row < run.end; row += ROW_BLOCK)
      multiply_rows(&t, g, &u, row, (int)(run.end - row < ROW_BLOCK ? run.end - row : ROW_BLOCK));
  }
}
