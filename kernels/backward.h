/*
 * Argument structs of the backward's kernels, beside those of args.h: the CPU device's so far. Letters and conventions
 * are those of args.h. Sums run in double, in an order that depends on nothing but the operands.
 */
#ifndef CUMOE_BACKWARD_KERNELS_H
#define CUMOE_BACKWARD_KERNELS_H

#include "args.h"

/*
 * Whose rows are whose: those of expert e are offsets[e] .. offsets[e] + counts[e] - 1, row r is of pair row_pair[r],
 * and a pair's row is slot_row[pair]. All four NULL: one expert, whose row r is token r. Pairs of weight 0 are dropped;
 * no pair_weights: none is.
 */
typedef struct row_map {
  const int32_t *counts, *offsets, *row_pair, *slot_row;
  const float *pair_weights;
  int64_t pair_weights_ld;
  token_count tokens;
  int64_t rows_cap;
  int32_t experts, top_k;
  fault_sink fault;
} row_map;

/* Which of its rows a matrix has for row r: r, that of its token or that of its pair. */
enum { OF_ROW = 0, OF_TOKEN, OF_PAIR };
typedef struct row_matrix {
  const void *base;
  int64_t ld;
  int32_t dtype, form;
} row_matrix;

/* The weights as a product from their outputs to their inputs reads them. */
static inline expert_matrix transposed(expert_matrix b)
{
  const int64_t n_stride = b.n_stride;
  b.n_stride = b.k_stride;
  b.k_stride = n_stride;
  return b;
}

/* c[r, n] = scale * sum over h and k of a(r)[h * K + k] * b_h(e, n, k), rounded once. Unit: (expert, block of
 * CPU_N_BLOCK columns), n fastest. */
typedef struct rows_product_args {
  row_map map;
  row_matrix a;
  expert_matrix b;
  void *c;
  int64_t c_ld;
  int32_t c_dtype, halves, n, k;
  float scale;
} rows_product_args;

/*
 * d_h(e, n, k) = sum over rows r of e of scale * a(r)[h * N + n] * b(r)[k]; its bias: without b(r). a or b is
 * multiplied by the pair's weight first, if `weighs` says so. Added to what is there if `accumulates`: then that of an
 * expert without rows stays as it is. base and table NULL: the bias alone. Unit: (expert, half, block of GRADIENT_BLOCK
 * n), n fastest.
 */
typedef struct weight_gradient_args {
  row_map map;
  row_matrix a, b;
  expert_matrix d; /* written */
  int32_t d_dtype, halves, n, k;
  int32_t weighs, accumulates;
  float scale;
} weight_gradient_args;

enum { GRADIENT_BLOCK = 32 };
#define GRADIENT_BLOCKS(n) (((n) + GRADIENT_BLOCK - 1) / GRADIENT_BLOCK)
#define PRODUCT_BLOCKS(n)  (((n) + CPU_N_BLOCK - 1) / CPU_N_BLOCK)
enum { WEIGHS_NONE = 0, WEIGHS_A, WEIGHS_B };

/* h[r] = act(z[r]), rounded; with d_h also d_z[r] = w(r) * act'(z[r]) d_h[r], rounded; 0 if the pair is dropped. z and
 * d_z: [rows, halves I], the gate first. Unit: a token. */
typedef struct activation_args {
  row_map map;
  const void *z;
  const float *d_h; /* [rows, I] or NULL */
  void *h, *d_z;
  int32_t inter, dtype, act, gated, weighs;
  float act_alpha, act_limit, gate_limit; /* gemm_args */
} activation_args;

/*
 * d_weights[t, j] = scale * <d_out(t, j), y(t, j)>, by <d_h, h> + scale * <d_out, bias> of a row, without y; of an
 * identity expert scale * <d_out, x>; on_input: <d_rows, x>; 0 of a dropped pair, and of all if unweighed. sigmoid: and
 * times w (1 - w), for the logit behind w. Unit: a token.
 */
typedef struct pair_gradient_args {
  row_map map;
  row_matrix d_out, x;
  const float *d_h;
  const void *h, *d_rows;
  expert_matrix down; /* its bias */
  float *d_weights;
  int64_t d_weights_ld;
  int32_t hidden, inter, dtype, on_input, unweighed, sigmoid;
  float scale;
} pair_gradient_args;

/* y[t] = 1 / (1 + exp(-x[t])). Unit: a token. */
typedef struct sigmoid_args {
  const float *x;
  float *y;
  token_count tokens;
} sigmoid_args;

/*
 * d_x[t] = sum over slots in their order of d_rows[row] (on_input: weighed), of an identity expert scale * w * d_out
 * (unreduced: d_out), + d_shared[t] + d_router[t] + d_gate[t] * gate; rounded once. Unit: a token.
 */
typedef struct gather_args {
  row_map map;
  row_matrix d_out, gate;
  const void *d_rows, *d_shared;  /* of dtype; d_shared or NULL */
  const float *d_router, *d_gate; /* [T, H] and [T], or NULL */
  const float *weights;           /* of identity experts: [T, k] as the map's; NULL: unreduced */
  int64_t weights_ld;
  void *d_x;
  int64_t d_x_ld;
  int32_t d_x_dtype, hidden, dtype, on_input;
  float scale;
} gather_args;

/*
 * From d weights to d logits, the choice being a constant: g.given are the ids. And the losses of the gate, by
 * coefficients that are 0 where there is none:
 *   balance * E * sum_e f_e P_e    f_e: the part of all slots that chose e; P_e: the mean of p_e over tokens
 *   z * mean of log(sum_e exp(l_e))^2
 * gate_count: unit: a column e; gate_backward: a token; gate_scale: a column; gate_loss: 1.
 */
typedef struct gate_backward_args {
  gate_args g;
  const float *d_weights; /* [T, k] */
  float *d_logits;        /* [T, E] */
  int64_t d_weights_ld, d_logits_ld;
  float balance, z;
  int64_t *count;        /* [E]: slots of each expert */
  double *token_loss;    /* [T, 2]: what each token adds */
  double *pair_scale;    /* [T, k]: what each pair adds to d_expert_scale */
  float *d_expert_scale; /* [E] or NULL */
  float *losses;         /* [2] or NULL */
  int32_t accumulates;   /* onto d_expert_scale */
} gate_backward_args;

#endif
