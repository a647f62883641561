/* One door for one operation: argument struct -> shape -> row of the table -> grid -> launch. */
#ifndef CUMOE_DISPATCH_H
#define CUMOE_DISPATCH_H

#include "check.h"
#include "weights.h"
#include "plan.h"

/* `args` is the operation's struct of kernels/args.h. Inside enter_device/leave_device. */
cumoe_status dispatch(struct context *context, operation op, const void *args, cumoe_stream stream);

/* Whether `up` should copy its rows (plan.h: wants_copy). */
bool dispatch_wants_copy(struct context *context, const gemm_args *up);

/* Whether `down` should follow `up` by expert (plan.h: goes_by_expert). */
bool dispatch_goes_by_expert(struct context *context, const gemm_args *up, const gemm_args *down);

/* Whether few_up and few_down should do for map, up, down and combine (plan.h: wants_few). */
bool dispatch_wants_few(struct context *context, const few_args *few);

/* Whether few_up should do what few_down would as well, where the router runs before it (plan.h: few_in_one). */
bool dispatch_few_in_one(struct context *context);

/* Whether few_up should do for the gate as well (plan.h: few_up_gates). */
bool dispatch_few_up_gates(struct context *context, const gate_args *gate);

/* The stages' raw form, shared by the single calls and by the forward pass. */
typedef struct route_pointers {
  int32_t *counts, *offsets, *row_pair, *slot_row;
} route_pointers;

map_args map_arguments(const struct plan *plan, cumoe_view ids, cumoe_view expert_map, route_pointers route,
                       void *hist);
gemm_args up_arguments(const struct plan *plan, const struct weights *weights, cumoe_view x,
                       const route_pointers *route, cumoe_view pair_weights);
gemm_args down_arguments(const struct plan *plan, const struct weights *weights, cumoe_view h,
                         const route_pointers *route, int64_t tokens);
cumoe_status dispatch_map(struct context *context, const map_args *args, cumoe_stream stream);
router_args router_arguments(cumoe_view x, cumoe_view weight, cumoe_view bias, token_count tokens, float *logits,
                             int64_t logits_ld);
cumoe_status dispatch_router(struct context *context, cumoe_view x, cumoe_view weight, cumoe_view bias,
                             token_count tokens, float *logits, int64_t logits_ld, cumoe_stream stream);
gate_args gate_arguments(struct context *context, const cumoe_routing *routing, cumoe_view logits,
                         cumoe_view select_bias, cumoe_view_mut ids, cumoe_view_mut weights);

combine_args combine_arguments(const struct plan *plan, const int32_t *slot_row, const cumoe_combine_args *args,
                               int64_t tokens);

static inline token_count all_tokens(int64_t tokens)
{
  return (token_count){tokens, NULL};
}

#endif
