/* From checked views to the kernels' argument structs (kernels/args.h): what the single stages and the layer share. */
#ifndef CUMOE_ARGUMENTS_H
#define CUMOE_ARGUMENTS_H

#include "choice.h"
#include "weights.h"
#include "../include/cumoe/stages.h"

/* A route's four arrays. */
typedef struct route_pointers {
  int32_t *counts, *offsets, *row_pair, *slot_row;
} route_pointers;

static inline route_pointers route_in(char *base, const route_layout *at)
{
  return (route_pointers){(int32_t *)(base + at->counts), (int32_t *)(base + at->offsets),
                          (int32_t *)(base + at->row_pair), (int32_t *)(base + at->slot_row)};
}

static inline token_count all_tokens(int64_t tokens)
{
  return (token_count){tokens, NULL};
}

/* Logits as they come. */
router_args router_arguments(cumoe_view x, cumoe_view weight, cumoe_view bias, token_count tokens, float *logits,
                             int64_t logits_ld);

/* What a gate reads besides logits; `given`: ids, of which the weights are made. */
typedef struct gate_inputs {
  cumoe_view select_bias, expert_scale, given;
} gate_inputs;

/* What the routing alone says of a gate; experts: columns of the logits. */
gate_args gate_rule(const cumoe_routing *routing, int32_t experts);
gate_args gate_arguments(struct context *context, const cumoe_routing *routing, cumoe_view logits,
                         const gate_inputs *inputs, cumoe_view ids, cumoe_view weights);
map_args map_arguments(const struct plan *plan, cumoe_view ids, cumoe_view expert_map, route_pointers route,
                       void *hist);

/* route NULL: dense, every token is a row of the only expert. */
gemm_args up_arguments(const struct plan *plan, const struct weights *weights, cumoe_view x,
                       const route_pointers *route, cumoe_view pair_weights);
gemm_args down_arguments(const struct plan *plan, const struct weights *weights, cumoe_view h,
                         const route_pointers *route, int64_t tokens);

/* The activations of a product become codes, or an expert's own row, where the format wants it: `g` reads these
 * instead. rows: how many there are. */
quantize_args quantize_arguments(const struct plan *plan, gemm_args *g, token_count rows, const row_order *order,
                                 void *codes, float *scale);
combine_args combine_arguments(const struct plan *plan, const int32_t *slot_row, const cumoe_combine_args *args,
                               int64_t tokens);

/* The layer's own, by what a call of it was given: for the forward, the one that keeps, and the backward. */
static inline token_count tokens_of_layer(const cumoe_moe_args *a)
{
  return (token_count){a->x.rows, a->device_tokens.data};
}

static inline cumoe_view router_input(const cumoe_moe_args *a)
{
  return a->router_x.data ? a->router_x : a->x;
}

router_args layer_router(const struct plan *plan, const cumoe_moe_args *a, float *logits);
/* logits: where the router has left them, if there is one. */
gate_args layer_gate(const struct plan *plan, const cumoe_moe_args *a, const float *logits, cumoe_view ids,
                     cumoe_view weights);
map_args layer_map(const struct plan *plan, const cumoe_moe_args *a, cumoe_view ids, route_pointers route, void *hist);
/* Of y and the shared expert's in args.workspace. */
combine_args layer_combine(const struct plan *plan, const cumoe_moe_args *a, const workspace_layout *at,
                           const int32_t *slot_row, cumoe_view pair_weights, const float *shared_logit);

#endif
