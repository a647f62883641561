/* Weights, as an object: where each projection lies, in one normal form, and whose memory that is. */
#ifndef CUMOE_HOST_WEIGHTS_H
#define CUMOE_HOST_WEIGHTS_H

#include "check.h"
#include "moe.h"
#include "plan.h"

enum { MAX_BOUND = 21 /* gate, up, down; codes, scales, zero points, order, bias, global, input_scale of each */ };

/* What makes rows of an expert's own of activations: quantize_args. */
typedef struct row_order {
  bool by_expert;
  int64_t static_stride, stride;
  const int32_t *base;
  const int32_t *const *table;
} row_order;

/* What was bound: `count` matrices of one shape, in order of their addresses. */
typedef struct bound_part {
  const char *name;
  uint64_t owner; /* of the view; 0: foreign memory */
  span first;
  uintptr_t stride;        /* bytes from one matrix to the next, or */
  const uintptr_t *begins; /* where each begins; NULL: by stride */
  int32_t count;
} bound_part;

struct weights {
  struct context *context;
  int32_t experts, hidden, inter, dtype; /* dtype: of the activations */
  bool gated;
  int32_t gate_order;
  cumoe_format up_format, down_format;
  expert_matrix up, down;        /* normal form */
  row_format up_rows, down_rows; /* what activations become */
  row_order up_order, down_order;
  bound_matrix up_facts, down_facts; /* what a choice of kernels depends on */
  void *tables;                      /* device arrays behind up.table and down.table, or NULL */
  size_t table_bytes;
  bound_part parts[MAX_BOUND];
  int32_t part_count;
  uintptr_t begins[]; /* of parts with pointers: room for four tables of `experts` each, for gate, up and down */
};

/* Live weights of the plan's context that fit its experts, or its shared expert, on buffers that live. `name` is for
 * texts. */
cumoe_status find_weights(const char *name, cumoe_weights handle, const struct plan *plan, bool shared,
                          const struct weights **weights);

/* Live weights, whatever they are for, on buffers that live. */
cumoe_status find_any_weights(const char *name, cumoe_weights handle, const struct weights **weights);

/* None of these views, which are written, lies over a matrix or a bias; between them it may. */
cumoe_status check_off_weights(const named_view *outputs, int count, const char *name, const struct weights *weights);

/* Weights that are written: nothing of theirs lies over anything else of theirs, or of `other`. */
cumoe_status check_apart(const char *name, const struct weights *weights, const char *other_name,
                         const struct weights *other);
/* Zeros in all that is bound: of gradients. */
cumoe_status clear_weights(struct context *context, const struct weights *w, cumoe_stream stream);

#endif
