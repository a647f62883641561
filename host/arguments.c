/* See arguments.h. */
#include "arguments.h"
#include "context.h"

#include <math.h>

router_args router_arguments(cumoe_view x, cumoe_view weight, cumoe_view bias, token_count tokens, float *logits,
                             int64_t logits_ld)
{
  return (router_args){.x = x.data,
                       .w = weight.data,
                       .bias = bias.data,
                       .logits = logits,
                       .x_ld = x.ld,
                       .w_ld = weight.ld,
                       .logits_ld = logits_ld,
                       .tokens = tokens,
                       .experts = (int32_t)weight.rows,
                       .hidden = (int32_t)x.cols,
                       .x_dtype = x.dtype,
                       .w_dtype = weight.dtype,
                       .bias_dtype = bias.data ? bias.dtype : DT_NONE,
                       .round_dtype = DT_F32,
                       .scale = 1};
}

gate_args gate_rule(const cumoe_routing *r, int32_t experts)
{
  const bool by_logit = r->flags & CUMOE_ROUTE_CHOOSE_BY_LOGIT || r->score == CUMOE_SCORE_SPARSEMIXER;
  return (gate_args){.experts = experts - r->always_experts,
                     .score = by_logit ? SCORE_IDENTITY : r->score,
                     .weigh = r->score,
                     .top_k = r->top_k,
                     .always = r->always_experts,
                     .n_group = r->n_group,
                     .topk_group = r->topk_group,
                     .group_score = r->group_score,
                     .flags = r->flags,
                     .routed_scale = r->routed_scale == 0 ? 1 : r->routed_scale,
                     .softcap = r->softcap,
                     .renorm_eps = r->renorm_eps,
                     .renorm_min = r->renorm_min,
                     .mixer_eps = r->mixer_eps};
}

gate_args gate_arguments(struct context *context, const cumoe_routing *r, cumoe_view logits, const gate_inputs *inputs,
                         cumoe_view ids, cumoe_view weights)
{
  const cumoe_view where = inputs->given.data ? inputs->given : ids;
  gate_args a = gate_rule(r, (int32_t)logits.cols);
  a.logits = logits.data;
  a.select_bias = inputs->select_bias.data;
  a.expert_scale = inputs->expert_scale.data;
  a.given = inputs->given.data;
  a.ids = (void *)(uintptr_t)ids.data;
  a.weights = (float *)(uintptr_t)weights.data;
  a.logits_ld = logits.ld;
  a.ids_ld = where.ld;
  a.weights_ld = weights.ld;
  a.tokens = all_tokens(logits.rows);
  a.logits_dtype = logits.dtype;
  a.ids_dtype = where.dtype;
  a.fault = context->fault;
  return a;
}

map_args map_arguments(const struct plan *plan, cumoe_view ids, cumoe_view expert_map, route_pointers route, void *hist)
{
  const cumoe_moe_desc *d = &plan->desc;
  const map_chunks cut = map_chunking(ids.rows * d->routing.top_k);
  return (map_args){.ids = ids.data,
                    .ids_ld = ids.ld,
                    .expert_map = expert_map.data,
                    .counts = route.counts,
                    .offsets = route.offsets,
                    .row_pair = route.row_pair,
                    .slot_row = route.slot_row,
                    .hist = hist,
                    .tokens = all_tokens(ids.rows),
                    .ids_dtype = ids.dtype,
                    .top_k = d->routing.top_k,
                    .num_experts = d->num_experts,
                    .zero_experts = d->routing.zero_experts,
                    .identity_experts = d->routing.identity_experts,
                    .local_experts = d->local_experts,
                    .chunks = cut.chunks,
                    .chunk_pairs = cut.chunk_pairs,
                    .fault = plan->context->fault};
}

static gemm_args gemm_arguments(const struct plan *plan, const struct weights *weights, cumoe_view a,
                                const route_pointers *route)
{
  const cumoe_moe_desc *d = &plan->desc;
  gemm_args g = {.a = a.data,
                 .a_ld = a.ld,
                 .experts = weights->experts,
                 .top_k = d->routing.top_k,
                 .dtype = d->dtype,
                 .act = ACT_IDENTITY,
                 .fault = plan->context->fault};
  if (route) {
    g.counts = route->counts;
    g.offsets = route->offsets;
  }
  return g;
}

gemm_args up_arguments(const struct plan *plan, const struct weights *weights, cumoe_view x,
                       const route_pointers *route, cumoe_view pair_weights)
{
  const cumoe_moe_desc *d = &plan->desc;
  gemm_args g = gemm_arguments(plan, weights, x, route);
  g.b = weights->up;
  g.rows = weights->up_rows;
  g.tokens = all_tokens(x.rows);
  g.rows_cap = route ? x.rows * d->routing.top_k : x.rows;
  g.row_pair = route ? route->row_pair : NULL;
  g.pair_weights = pair_weights.data;
  g.pair_weights_ld = pair_weights.ld;
  g.n = weights->inter;
  g.k = weights->hidden;
  g.act = d->act;
  g.gated = weights->gated;
  g.act_alpha = d->act_alpha;
  g.act_limit = d->act_limit > 0 ? d->act_limit : INFINITY;
  g.gate_limit = plan->gate_limit;
  return g;
}

gemm_args down_arguments(const struct plan *plan, const struct weights *weights, cumoe_view h,
                         const route_pointers *route, int64_t tokens)
{
  gemm_args g = gemm_arguments(plan, weights, h, route);
  g.b = weights->down;
  g.rows = weights->down_rows;
  g.tokens = all_tokens(tokens);
  g.rows_cap = route ? tokens * plan->desc.routing.top_k : tokens;
  g.n = weights->hidden;
  g.k = weights->inter;
  return g;
}

quantize_args quantize_arguments(const struct plan *plan, gemm_args *g, token_count rows, const row_order *order,
                                 void *codes, float *scale)
{
  const quantize_args q = {.x = g->a,
                           .codes = codes,
                           .scale = scale,
                           .x_ld = g->a_ld,
                           .codes_ld = g->k,
                           .scale_ld = SCALE_LD(rows.count),
                           .rows = rows,
                           .cols = g->k,
                           .dtype = plan->desc.dtype,
                           .format = g->rows,
                           .by_expert = order->by_expert,
                           .experts = g->experts,
                           .top_k = g->top_k,
                           .offsets = g->offsets,
                           .row_pair = order->by_expert ? g->row_pair : NULL,
                           .x_rows = g->tokens.count,
                           .static_stride = order->static_stride,
                           .order_stride = order->stride,
                           .order = order->base,
                           .order_table = order->table};
  const bool to_codes = g->rows.mode != ROWS_AS_THEY_ARE;
  if (!to_codes && !order->by_expert) return q;
  g->a = q.codes;
  g->a_ld = q.codes_ld;
  g->packed = order->by_expert;
  if (to_codes) g->a_scale = q.scale;
  g->a_scale_ld = q.scale_ld;
  return q;
}

combine_args combine_arguments(const struct plan *plan, const int32_t *slot_row, const cumoe_combine_args *a,
                               int64_t tokens)
{
  const cumoe_moe_desc *d = &plan->desc;
  return (combine_args){.y = a->y.data,
                        .x = a->x.data,
                        .shared = a->shared.data,
                        .residual = a->residual.data,
                        .out = a->out.data,
                        .y_ld = a->y.ld,
                        .x_ld = a->x.ld,
                        .shared_ld = a->shared.ld,
                        .residual_ld = a->residual.rows == 1 ? 0 : a->residual.ld,
                        .out_ld = a->out.ld,
                        .slot_row = slot_row,
                        .pair_weights = a->pair_weights.data,
                        .pair_weights_ld = a->pair_weights.ld,
                        .shared_logit = a->shared_logit.data,
                        .shared_logit_ld = a->shared_logit.ld,
                        .tokens = {tokens, a->device_tokens.data},
                        .rows_cap = a->y.rows,
                        .top_k = d->routing.top_k,
                        .hidden = d->hidden,
                        .dtype = d->dtype,
                        .out_dtype = d->out_dtype,
                        .reduce = !(d->flags & CUMOE_MOE_UNREDUCED),
                        .out_scale = a->out_scale == 0 ? 1 : a->out_scale,
                        .on_input = (d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT) != 0,
                        .fault = plan->context->fault};
}

/* ---- the layer's ---- */

router_args layer_router(const struct plan *plan, const cumoe_moe_args *a, float *logits)
{
  const cumoe_routing *r = &plan->desc.routing;
  router_args l = router_arguments(router_input(a), a->router_weight, a->router_bias, tokens_of_layer(a), logits,
                                   router_experts(&plan->desc));
  if (r->logits_dtype) l.round_dtype = r->logits_dtype;
  if (r->logit_scale > 0) l.scale = r->logit_scale;
  return l;
}

gate_args layer_gate(const struct plan *plan, const cumoe_moe_args *a, const float *logits, cumoe_view ids,
                     cumoe_view weights)
{
  const int32_t experts = router_experts(&plan->desc);
  const cumoe_view own = cumoe_matrix(logits, CUMOE_F32, a->x.rows, experts, experts);
  const gate_inputs inputs = {a->select_bias, a->expert_scale, is_chosen(a) ? a->ids : (cumoe_view){0}};
  gate_args g = gate_arguments(plan->context, &plan->desc.routing, a->router_weight.data ? own : a->logits, &inputs,
                               ids, weights);
  g.tokens = tokens_of_layer(a);
  return g;
}

map_args layer_map(const struct plan *plan, const cumoe_moe_args *a, cumoe_view ids, route_pointers route, void *hist)
{
  map_args m = map_arguments(plan, ids, a->expert_map, route, hist);
  m.tokens = tokens_of_layer(a);
  m.counts_out = a->counts_out.data;
  m.load = a->load.data;
  return m;
}

combine_args layer_combine(const struct plan *plan, const cumoe_moe_args *a, const workspace_layout *at,
                           const int32_t *slot_row, cumoe_view pair_weights, const float *shared_logit)
{
  const cumoe_moe_desc *d = &plan->desc;
  const cumoe_dtype dtype = (cumoe_dtype)d->dtype;
  const char *workspace = a->workspace.data;
  const int64_t tokens = a->x.rows, rows = tokens * d->routing.top_k, hidden = d->hidden;
  const bool weigh = !(d->flags & CUMOE_MOE_UNREDUCED) || d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  cumoe_combine_args c = {
      .out_scale = a->out_scale, .x = a->x, .residual = a->residual, .device_tokens = a->device_tokens, .out = a->out};
  c.y = cumoe_matrix(workspace + at->y, dtype, rows, hidden, hidden);
  if (weigh) c.pair_weights = pair_weights;
  if (d->shared_inter) c.shared = cumoe_matrix(workspace + at->shared_y, dtype, tokens, hidden, hidden);
  if (a->shared_gate.data) c.shared_logit = cumoe_matrix(shared_logit, CUMOE_F32, tokens, 1, 1);
  return combine_arguments(plan, slot_row, &c, tokens);
}
