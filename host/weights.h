/* Weights, as an object: where each projection lies, in one normal form, and who owns that memory. */
#ifndef CUMOE_HOST_WEIGHTS_H
#define CUMOE_HOST_WEIGHTS_H

#include "moe.h"

enum { MAX_BOUND = 6 /* gate, up, down; the data and the biases of each */ };

/* A view of an owned buffer, as it was when it was bound. */
typedef struct bound_view {
  const char *name;
  uint64_t owner;
} bound_view;

struct weights {
  struct context *context;
  int32_t experts, hidden, inter, dtype;
  bool gated;
  expert_matrix up, down; /* normal form */
  void *tables;           /* device arrays behind up.table and down.table, or NULL */
  size_t table_bytes;
  bound_view bound[MAX_BOUND]; /* views that have an owner */
  int32_t bound_count;
};

/* Live weights of the plan's context that fit its layer, on buffers that live. `name` is for texts. */
cumoe_status find_weights(const char *name, cumoe_weights handle, const struct plan *plan, int32_t experts,
                          int32_t inter, const struct weights **weights);

/* Frees all of a context that closes: the device is idle. */
cumoe_status weights_abandon(struct context *context);

#endif
