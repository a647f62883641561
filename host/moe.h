/* The plan of a layer, as an object. */
#ifndef CUMOE_HOST_MOE_H
#define CUMOE_HOST_MOE_H

#include "status.h"
#include "../include/cumoe/moe.h"

struct plan {
  struct context *context;
  cumoe_moe_desc desc; /* defaults filled in: local_experts, out_dtype, act_alpha, routed_scale */
  float gate_limit;    /* gemm_args */
};

cumoe_status find_plan(cumoe_plan handle, const struct plan **plan);

#endif
