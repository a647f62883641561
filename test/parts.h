/* A layer's parts for tests: weights in every layout on host and device, a route made by the test itself. */
#ifndef TEST_PARTS_H
#define TEST_PARTS_H

#include "oracle.h"

typedef enum fill { FILL_NORMAL, FILL_SAME_SIGN, FILL_INTEGERS } fill;

typedef struct weights_form {
  int32_t gate_order, up_major, down_major;
  int32_t bias; /* 0 or its dtype */
  int32_t gap;  /* unused rows between experts */
  bool per_expert;
  cumoe_format up, down;
  bool one_global; /* for gate and up */
} weights_form;

tensor random_tensor(rng *r, int32_t dtype, int64_t rows, int64_t cols, double deviation); /* quick for large ones */

/* Prepared for the oracle. */
host_weights random_weights(rng *r, const cumoe_moe_desc *desc, int32_t experts, int32_t inter, weights_form form);
host_weights weights_new(const cumoe_moe_desc *desc, int32_t experts, int32_t inter, weights_form form);
void weights_fill(rng *r, host_weights *w, fill kind);
/* Sets element (out, in) of a part, wherever the layout has it. */
void weights_set(host_weights *w, int part, int64_t expert, int64_t out, int64_t in, double value);
cumoe_weights weights_put(cumoe_context context, const host_weights *w, weights_form form);

/* A caller's route, made from destinations (local experts, or -1, -2); unused rows lie between the experts as far
 * as dropped slots leave room. */
typedef struct host_route {
  tensor counts, offsets, row_pair, slot_row;
  int64_t rows; /* end of the last expert */
} host_route;
host_route route_new(const tensor *destinations, int32_t experts);
cumoe_route route_put(cumoe_context context, const host_route *route);
bool row_used(const host_route *route, int64_t row);

/* The recorded fault is `code` (CUMOE_FAULT_NONE: none); then it is cleared. */
void check_fault(cumoe_context context, cumoe_stream stream, int32_t code);

#endif
