/* The backward of the layer: what a call is checked for, and where its intermediates lie. */
#ifndef CUMOE_HOST_BACKWARD_H
#define CUMOE_HOST_BACKWARD_H

#include "check.h"
#include "context.h"
#include "weights.h"
#include "../include/cumoe/backward.h"
#include "../kernels/backward.h"

/* Offsets of what the forward keeps. */
typedef struct kept_layout {
  size_t logits, ids, weights, z, shared_z, shared_logit, bytes;
  route_layout route;
} kept_layout;

/* What the rows of one weights object need: of the routed experts, of the shared one. */
typedef struct rows_layout {
  size_t d_h, h, d_z, along;
  size_t d_rows; /* on CUDA it holds the copy of x first */
  size_t d_out;  /* the copy of d out, on CUDA alone */
  int64_t rows;  /* how many there is room for */
} rows_layout;

typedef struct scratch_layout {
  rows_layout routed, shared;
  size_t d_weights, d_logits, d_router, shared_weight, d_shared_weight; /* d_shared_weight: of its gate's logit */
  size_t count, token_loss, pair_scale;
  route_layout padded;                         /* of padded rows */
  size_t tickets;                              /* of the products of padded rows, on CUDA */
  size_t row_token;                            /* of padded rows, on CUDA */
  size_t runs_counts, runs_offsets, runs_sums; /* of tokens, on CUDA */
  size_t parts;                                /* gate_backward_args, where parts_logits */
  size_t hist;                                 /* of the map, where nothing was kept */
  size_t kept;                                 /* where there is no other place for it */
  size_t bytes;
} scratch_layout;

/* INVALID_ARGUMENT past 2^62 bytes; `name`: of the tokens, for the text. */
cumoe_status lay_out_kept(const char *name, const struct plan *plan, int64_t tokens, kept_layout *at);
cumoe_status lay_out_scratch(const char *name, const struct plan *plan, int64_t tokens, bool kept, scratch_layout *at);

/* How many runs of tokens sums over all tokens are cut into: enough to keep all SMs busy; 1 on the CPU. */
int32_t runs_of(const struct plan *plan, int64_t tokens);

/* Whether gradients of logits may be multiplied in two parts of 16 bits, by the layer's kernels; and the runs then. */
bool parts_logits(const struct plan *plan);
int32_t part_runs_of(const struct plan *plan, int64_t tokens);

static inline int64_t halves_of(const cumoe_moe_desc *d)
{
  return d->flags & CUMOE_MOE_UNGATED ? 1 : 2;
}

static inline row_matrix rows_of_view(cumoe_view v, int32_t of)
{
  return (row_matrix){v.data, v.ld, v.dtype, of};
}

typedef struct backward_operands {
  layer_operands layer;
  const struct weights *d_weights, *d_shared; /* NULL: not wanted */
} backward_operands;

cumoe_status check_without_formats(const struct plan *plan);
/* Weights bound to the memory of gradients, whose experts share none; *found is NULL without a handle. */
cumoe_status find_gradient(const char *name, cumoe_weights handle, const struct plan *plan, bool shared,
                           const struct weights **found);
cumoe_status check_keep(const struct plan *plan, const layer_operands *layer, const cumoe_moe_args *a,
                        cumoe_view_mut kept);
/* `a` becomes what backward reads of it: without the forward's outputs and workspace. */
cumoe_status check_backward(cumoe_plan plan, cumoe_weights weights, cumoe_moe_args *a, const cumoe_moe_grads *g,
                            backward_operands *with);

/* Zeros, in what there is. */
cumoe_status clear_gradient(struct context *context, cumoe_view_mut d, cumoe_stream stream);
/* From d weights and coefficients of losses to d logits. */
cumoe_status run_gate_backward(struct context *context, const gate_backward_args *a, cumoe_stream stream);

/* Gate and up as one matrix of 2 I channels, in the order that they have in memory: false if they are not one. */
bool join_halves(const struct weights *w, expert_matrix *joined, int32_t *order);
/* What down_drawn gets besides. */
typedef struct drawn_work {
  int32_t *tickets;
  bool beside; /* the grid ahead does not touch what the product does */
} drawn_work;

/* Products of rows and transposed weights: the forward's kernels where they serve. work: NULL, or for down_drawn. */
cumoe_status multiply_rows(struct context *context, const rows_product_args *a, const drawn_work *work,
                           cumoe_stream stream);

/* What down_activated gets besides. */
typedef struct activated_work {
  int32_t *tickets;
  const activation_args *act; /* of kept z: its rows begin at z_offsets */
  const int32_t *row_token, *z_offsets;
  const float *row_weight;
  int64_t z_rows;
  float *parts; /* pair_gradient_args */
  bool counts;  /* it tells how much of h and d z is there (kernels/backward.h) */
} activated_work;

/* d h, of padded rows, or those of tokens (row_token), and at once what the activation's gradient makes of it: d h's
 * place gets parts of <d h, h>. *served: whether there is a kernel; else nothing is done. */
cumoe_status multiply_activated(struct context *context, const rows_product_args *a, const activated_work *work,
                                cumoe_stream stream, bool *served);
/* Matrix and biases, whichever are there; d: `halves` of n channels each. */
cumoe_status add_up_rows(struct context *context, const weight_gradient_args *a, cumoe_stream stream);

#endif
