/*
 * Argument structs of the kernels that training adds (cumoe/train.h), and these kernels on the CPU device. As args.h:
 * offsets in 64 bits, leading dimensions in elements, a CPU kernel does the units begin .. end - 1. Each begins with
 * how many units there are; on CUDA they are the same.
 */
#ifndef CUMOE_KERNELS_TRAIN_H
#define CUMOE_KERNELS_TRAIN_H

#include "args.h"

/* What these kernels record, besides the codes of args.h. */
enum { FAULT_TOKEN_ID = FAULT_ROUTE + 1, FAULT_SEQUENCE };

/* A matrix by pointer. data NULL: absent. */
typedef struct matrix {
  void *data;
  int64_t ld;
  int32_t dtype;
} matrix;

typedef void train_kernel(const void *args, int64_t begin, int64_t end);

/* Embedding: `begins` [V + 1] and `order` [T] list the tokens of each id, in their order; sort, one unit, writes them.
 * embed: a unit is a token. embedding_backward: a unit is an id.
 * On CUDA clear (a unit is an id, or the one past them), count (a token), scan (one) and place (a token) leave ends for
 * begins: id v has order[v ? begins[v - 1] : 0 .. begins[v] - 1], in any order; backward puts that right. */
typedef struct embedding_args {
  int64_t units;
  matrix table, ids, y; /* backward: dtable, and dy for y */
  int32_t *begins, *order;
  int64_t tokens, vocabulary, cols;
  int32_t accumulate;
  fault_sink fault;
} embedding_args;
train_kernel cpu_embed, cpu_embedding_sort, cpu_embedding_backward;

/* Norms: a unit of stats and dx is a row, of dparameters NORM_COLUMNS columns. stats: mean and scale of a row. On CUDA
 * dparameters adds up what partials has left of each run of NORM_ROWS rows: [run][weight, bias][cols]; its unit is
 * NORM_PART columns of a run. */
enum { NORM_COLUMNS = 32, NORM_ROWS = 128, NORM_PART = 128 };
#define NORM_RUNS(rows)  (((rows) + NORM_ROWS - 1) / NORM_ROWS)
#define NORM_PARTS(cols) (((cols) + NORM_PART - 1) / NORM_PART)
typedef struct norm_backward_args {
  int64_t units;
  matrix x, weight, dy, dx, dweight, dbias;
  double (*stats)[2], *partials;
  int64_t rows, cols;
  int32_t centered, accumulate;
  float eps;
} norm_backward_args;
train_kernel cpu_norm_stats, cpu_norm_dparameters, cpu_norm_dx;

/* Of a row: what several units take. */
enum { NORM_RUN = 4096 };
#define RUNS_IN_ROW(cols) (((cols) + NORM_RUN - 1) / NORM_RUN)

/* function: EW_* of the forward. A unit is NORM_RUN elements of a row, of softmax a row. */
typedef struct elementwise_backward_args {
  int64_t units;
  matrix x, dy, dx; /* softmax: y for x */
  int64_t cols;
  int32_t function;
} elementwise_backward_args;
train_kernel cpu_elementwise_backward, cpu_softmax_backward;

/* count and mean: one unit. rows: a unit is a token. */
typedef struct cross_entropy_args {
  int64_t units;
  matrix logits, targets, dlogits;
  float *loss, *losses;
  int64_t *counted;
  int64_t tokens, vocabulary, ignore; /* ignore -1: none besides the negative ones */
  float scale;
  fault_sink fault;
} cross_entropy_args;
train_kernel cpu_cross_entropy_count, cpu_cross_entropy_rows, cpu_cross_entropy_mean;

/* squares: of one matrix; a unit is NORM_RUN elements of a row, whose sum it writes. total: one unit adds all up. */
typedef struct global_norm_args {
  int64_t units;
  matrix gradient;
  int64_t cols;
  double *sums; /* squares: of this matrix; total: of all */
  int64_t count;
  float *norm, *factor;
  int64_t *step;
  float max_norm, scale;
} global_norm_args;
train_kernel cpu_squares, cpu_total;

/* A unit is NORM_RUN elements of a row. */
typedef struct adamw_args {
  int64_t units;
  matrix gradient, master, first, second, weights;
  const int64_t *step;
  const float *factor, *schedule; /* NULL: 1 */
  int64_t cols;
  float rate, beta1, beta2, eps, decay;
} adamw_args;
train_kernel cpu_adamw;

#endif
