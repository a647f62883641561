/* A call of the backward, or of the forward that keeps, under way: what both have. */
#ifndef CUMOE_HOST_BACKWARD_PASS_H
#define CUMOE_HOST_BACKWARD_PASS_H

#include "arguments.h"
#include "backward.h"

typedef struct pass {
  struct context *context;
  const struct plan *plan;
  const struct weights *weights, *shared; /* shared: NULL without */
  const cumoe_moe_args *args;
  token_count tokens;
  kept_layout at;
  char *kept;
  void *hist, *rows;            /* of the map; room for x in the order of rows, where it is copied */
  int32_t *progress;            /* of up and down that work together (kernels/protocol.h), or NULL */
  cumoe_view ids, pair_weights; /* of the routing, wherever they come from */
  route_pointers route;
  cumoe_stream stream;
} pass;

static inline void *region(char *base, size_t offset)
{
  return base + offset;
}

static inline cumoe_view small_region(char *base, size_t offset, cumoe_dtype dtype, int64_t rows, int64_t cols)
{
  return cumoe_matrix(region(base, offset), dtype, rows, cols, cols);
}

static inline bool weighs_input(const pass *p)
{
  return p->plan->desc.routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
}

static inline bool is_unreduced(const pass *p)
{
  return p->plan->desc.flags & CUMOE_MOE_UNREDUCED;
}

pass pass_of(const layer_operands *with, const cumoe_moe_args *a, char *kept, cumoe_stream stream);

/* The routed experts' rows, as a route has them; and rows that are the tokens: the shared expert's, the router's. */
row_map route_rows(const pass *p, route_pointers route);
row_map token_rows(const pass *p);

gate_args gate_of(const pass *p, cumoe_view ids, cumoe_view weights);
/* How gate and up lie in z and in d z: as in the weights, where these are one matrix. */
int32_t order_of(const struct weights *w);
activation_args activation_of(const pass *p, const struct weights *w, const row_map *map);

/* Routing, and gate and up before the activation: into p->kept. */
cumoe_status keep_forward(const pass *p);

#endif
