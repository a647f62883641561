/*
 * Argument structs of the backward's kernels, beside those of args.h, whose letters and conventions are these. Sums run
 * in double on the CPU device, in f32 on CUDA (of what one thread or one token has, in double), in an order that
 * depends on nothing but the operands.
 *
 * Rows of the backward lie as the route has them, or padded: each expert's first row is then a multiple of ROW_STEP,
 * and rows that fill up to the next expert's belong to no pair. Rows of no pair, and of pairs that are dropped, are
 * zeros in h and in d z. So a product over an expert's rows may take whole blocks of ROW_STEP. On CUDA, x and d out are
 * copied into padded order, zeros likewise, so that tensor maps describe all operands, or gathered by who reads them.
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

enum { ROW_STEP = 64 };
/* Room for padded rows; `experts` have no more rows than `pairs`. */
#define PADDED_ROWS(pairs, experts)                                                                                    \
  (((pairs) + ((experts) < (pairs) ? (experts) : (pairs)) * (int64_t)(ROW_STEP - 1) + ROW_STEP - 1) / ROW_STEP *       \
   ROW_STEP)

/*
 * The route's rows padded: counts and offsets of experts (offsets[E]: the end of the last), row_pair[r], -1 of a row
 * that is no pair's, up to that end, and slot_row[t, j], negative where the route's is. Of a bad route, what does not
 * fit is left out. Unit: a pair or a row up to rows_cap, whichever are more.
 */
typedef struct pad_args {
  row_map map;
  int32_t *counts, *offsets, *row_pair, *slot_row;
  float *row_weight;  /* NULL, or of each row: its pair's weight, 0 where there is none. CUDA only */
  int32_t *row_token; /* NULL, or of each row: its token, -1 where there is none or its pair is dropped. CUDA only */
  int32_t *tickets;   /* NULL, or TICKET_WORDS(experts), which become 0 */
  int64_t rows_cap;
} pad_args;

/* What the backward's two products by down_drawn draw, each from its own words (kernels/protocol.h), and gradients of
 * weights, each from a word; and what d h says of itself, if its protocol is by_expert: of each expert how many octets
 * of channels of rows of h and d z are stored. CUDA only. */
enum {
  TICKETS_OF_D_H = 0,
  TICKETS_OF_D_ROWS = PROGRESS_COPIED,
  TICKETS_OF_UP = 2 * PROGRESS_COPIED,
  TICKETS_OF_DOWN,
  D_H_STORED
};
#define TICKET_WORDS(experts) (D_H_STORED + (experts))

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

/* to[r] = a(r), of `dtype`, rounded, times the pair's weight first if `weighs`, of every row up to the end of the last
 * expert's; zeros of rows that are no pair's or whose pair is dropped. Unit: a row; on CUDA, where COPIES_BY_TOKEN, a
 * token, and after all of these a block of ROW_STEP rows, of which it clears those that are no pair's. */
typedef struct copy_rows_args {
  row_map map;
  row_matrix a;
  void *to;
  int64_t to_ld;
  int32_t cols, dtype, weighs;
} copy_rows_args;

/* Rows that are the same but for where they go are read once. */
#define COPIES_BY_TOKEN(c)                                                                                             \
  ((c)->map.slot_row && (c)->map.row_pair && (c)->a.form == OF_TOKEN && !(c)->weighs && (c)->a.dtype == (c)->dtype)

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
 * d_h(e, n, k) = sum over rows r of e of scale * a(r)[a_half[h] + n * a_n] * b(r)[k]; its bias: without b(r). a or b is
 * multiplied by the pair's weight first, if `weighs` says so. Added to what is there if `accumulates`: then that of an
 * expert without rows stays as it is. padded: rows are, a and b are OF_ROW and zeros where no pair is, up to the next
 * multiple of ROW_STEP; but one of them may be OF_TOKEN, whose rows row_token has, and nobody weighs. weight_gradient:
 * all but the bias, which is there; bias_gradient: the bias. Unit: (expert, half, block of GRADIENT_BLOCK n), n
 * fastest.
 * tickets: 0 before; units are drawn from it by kernels that can, else dealt in turn.
 * Hints to a kernel that starts early (kernels/protocol.h): nobody wants or touches what the grid ahead does (beside),
 * but for a d h (d_h: the words of its tickets; d_h_octets of a row): then its counts tell what is there.
 */
typedef struct weight_gradient_args {
  row_map map;
  row_matrix a, b;
  expert_matrix d; /* written */
  int64_t a_half[2], a_n;
  int32_t d_dtype, halves, n, k;
  int32_t weighs, accumulates, padded;
  int32_t beside, d_h_octets;
  const int32_t *d_h;       /* NULL: none */
  const int32_t *row_token; /* as pad makes it, or NULL */
  int32_t *tickets;         /* NULL: none */
  float scale;
} weight_gradient_args;

/* On CUDA a sum over all tokens is cut into runs of tokens, each of which is an expert to weight_gradient; add_runs
 * then adds the runs' sums in their order. cut: counts [runs], offsets [runs + 1], multiples of ROW_STEP but for the
 * last token's. Unit: a run. */
typedef struct cut_args {
  token_count tokens;
  int32_t *counts, *offsets;
  int32_t runs;
} cut_args;

/* d[r, c] = scale * sum over runs of sums[run, r, c], onto what is there if `accumulates`; then, without tokens,
 * nothing is written. Unit: an element. */
typedef struct add_runs_args {
  const float *sums; /* [runs, rows, cols] */
  void *d;
  int64_t d_ld, rows, cols;
  token_count tokens;
  int32_t runs, d_dtype, accumulates;
  float scale;
} add_runs_args;

/*
 * weight_gradient of padded rows through tensor maps (host/tmap.c encodes them):
 *   p, q  (column, row) of the operand whose columns are rows of d in memory, and of the other; a box is 64 x the
 *         kernel's BK
 *   d     (column, row, half, expert), in memory; a box is 128 bytes x 64. up_first: the half that lies first is half 1
 */
typedef struct weight_gradient_sm90_args {
  weight_gradient_args g;
  unsigned char p[128] __attribute__((aligned(64)));
  unsigned char q[128] __attribute__((aligned(64)));
  unsigned char d[128] __attribute__((aligned(64)));
  int32_t up_first;
} weight_gradient_sm90_args;

enum { GRADIENT_BLOCK = 32 };
#define GRADIENT_BLOCKS(n) (((n) + GRADIENT_BLOCK - 1) / GRADIENT_BLOCK)
#define PRODUCT_BLOCKS(n)  (((n) + CPU_N_BLOCK - 1) / CPU_N_BLOCK)
enum { WEIGHS_NONE = 0, WEIGHS_A, WEIGHS_B };

/*
 * h[r] = act(z), rounded; with d_h also d_z[r] = w * act'(z) scale * d_h[r], rounded, and along[r] = scale * <d_h[r],
 * h[r]>. All zeros where the pair is dropped, and where there is none. w is 1 unless `weighs`; weighs_h: h is w *
 * act(z) in memory. z of a pair is in row z_row[pair], or (NULL) in the row itself. z and d_z: [rows, halves I], gate
 * and up as `order` says. Unit: a row, up to the end of the last expert's.
 */
enum { GATE_FIRST = 0, UP_FIRST, GATE_UP_PAIRS, UP_GATE_PAIRS };
typedef struct activation_args {
  row_map map;
  const int32_t *z_row;
  const void *z, *d_h; /* d_h: [rows, I] or NULL */
  void *h, *d_z;
  double *along; /* [rows] */
  int32_t inter, dtype, d_h_dtype, act, gated, order, weighs, weighs_h;
  float act_alpha, act_limit, gate_limit; /* gemm_args */
  float scale;
} activation_args;

/*
 * d_weights[t, j] = along[r] + scale * <d_out, bias> of a row; of an identity expert scale * <d_out, x>; on_input:
 * <d_rows, x>; 0 of a dropped pair, and of all if unweighed. sigmoid: and times w (1 - w), for the logit behind w.
 * Unit: a token, on CUDA a pair.
 */
typedef struct pair_gradient_args {
  row_map map;
  row_matrix d_out, x;
  const double *along;
  const float *parts; /* CUDA only: of each row ALONG_PARTS(parts_of), which add up to `along`; or NULL */
  const void *d_rows;
  expert_matrix down; /* its bias */
  float *d_weights;
  int64_t d_weights_ld;
  int32_t hidden, dtype, on_input, unweighed, sigmoid, parts_of;
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
  const void *d_rows, *d_shared; /* of dtype; d_shared or NULL */
  const void *d_router;          /* [T, H] of d_router_dtype, or NULL */
  const float *d_gate;           /* [T], or NULL */
  const float *weights;          /* of identity experts: [T, k] as the map's; NULL: unreduced */
  int64_t weights_ld;
  void *d_x;
  int64_t d_x_ld;
  int32_t d_x_dtype, d_router_dtype, hidden, dtype, on_input;
  float scale;
} gather_args;

/*
 * From d weights to d logits, the choice being a constant: g.given are the ids. And the losses of the gate, by
 * coefficients that are 0 where there is none:
 *   balance * E * sum_e f_e P_e    f_e: the part of all slots that chose e; P_e: the mean of p_e over tokens
 *   z * mean of log(sum_e exp(l_e))^2
 * gate_count: unit: a column e; gate_backward: a token; gate_scale: a column; gate_loss: 1.
 * gate_backward makes d_weights as well, a token's by a warp, if has_pairs: a launch less. beside: as of a gradient of
 * weights.
 */
typedef struct gate_backward_args {
  gate_args g;
  const float *d_weights; /* [T, k] */
  float *d_logits;        /* [T, E] */
  void *parts;            /* NULL or [T, 2 E]: parts_scale d_logits as bf16, then what that leaves */
  int64_t d_weights_ld, d_logits_ld;
  float parts_scale;
  float balance, z;
  int64_t *count;            /* [E]: slots of each expert */
  double *token_loss;        /* [T, 2]: what each token adds */
  double *pair_scale;        /* [T, k]: what each pair adds to d_expert_scale */
  float *d_expert_scale;     /* [E] or NULL */
  float *losses;             /* [2] or NULL */
  int32_t accumulates;       /* onto d_expert_scale */
  int32_t beside, has_pairs; /* CUDA only */
  pair_gradient_args pairs;
} gate_backward_args;

#endif
