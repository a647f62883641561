/* The plan of a layer, as an object. */
#ifndef CUMOE_HOST_MOE_H
#define CUMOE_HOST_MOE_H

#include "status.h"
#include "../include/cumoe/moe.h"

struct weights;

struct plan {
  struct context *context;
  cumoe_moe_desc desc; /* defaults filled in: local_experts, out_dtype, act_alpha, routed_scale */
  float gate_limit;    /* gemm_args */
};

cumoe_status find_plan(cumoe_plan handle, const struct plan **plan);

/* What a call of cumoe_moe_forward works with. */
typedef struct layer_operands {
  const struct plan *plan;
  const struct weights *weights, *shared; /* shared: NULL without */
} layer_operands;

/* All arguments but the workspace; then, where that is one, that nothing lies over anything else. */
cumoe_status check_layer_operands(const struct plan *plan, cumoe_weights weights, const cumoe_moe_args *a,
                                  layer_operands *with);
cumoe_status check_layer_workspace(const struct plan *plan, const cumoe_moe_args *a);
cumoe_status check_layer_overlaps(const cumoe_moe_args *a, const layer_operands *with);

/* The caller has chosen, and the gate weighs; the caller has done both. */
bool is_chosen(const cumoe_moe_args *a);
bool is_routed(const cumoe_moe_args *a);

#endif
