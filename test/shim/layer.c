#include "layer.h"

bool own_call(cudaError_t error, const char *call)
{
  return CHECK_MSG(error == cudaSuccess, "%s: %s", call, cudaGetErrorName(error));
}

cumoe_view_mut lend(world *w, int32_t dtype, int64_t rows, int64_t cols)
{
  const uintptr_t at = w->next;
  w->next += ((uintptr_t)(rows * cols) * cumoe_dtype_bytes((cumoe_dtype)dtype) + 4096) / 4096 * 4096;
  return cumoe_matrix_mut((void *)at, (cumoe_dtype)dtype, rows, cols, cols);
}

cumoe_view lend_in(world *w, int32_t dtype, int64_t rows, int64_t cols)
{
  return cumoe_const(lend(w, dtype, rows, cols));
}

void open_one(world *w)
{
  CHECK_OK(cumoe_context_create(1, NULL, &w->context));
  const int before = shim_current_device();
  OWN(cudaSetDevice(1));
  OWN(cudaStreamCreateWithFlags(&w->stream, cudaStreamNonBlocking));
  if (before < 0)
    shim_drop_context();
  else
    OWN(cudaSetDevice(before));
}

void open_two(world *w)
{
  OWN(cudaSetDevice(0));
  open_one(w);
  CHECK_OK(cumoe_context_create(0, NULL, &w->other));
}

cumoe_moe_desc describe(int32_t dtype)
{
  return (cumoe_moe_desc){.size = sizeof(cumoe_moe_desc),
                          .num_experts = EXPERTS,
                          .hidden = HIDDEN,
                          .inter = INTER,
                          .dtype = dtype,
                          .routing = cumoe_routing_mixtral(TOP_K)};
}

cumoe_weights_desc describe_weights(world *w, int32_t dtype, int32_t experts, int32_t inter, int32_t order)
{
  cumoe_weights_desc d = {.size = sizeof d,
                          .experts = experts,
                          .hidden = HIDDEN,
                          .inter = inter,
                          .gate_order = order,
                          .up_major = CUMOE_OUT_IN,
                          .down_major = CUMOE_OUT_IN};
  const bool separate = order == CUMOE_GATE_UP_SEPARATE, fused = !separate && order != CUMOE_UNGATED;
  const int64_t rows = (int64_t)experts * inter;
  if (fused) d.gate_up.data = lend_in(w, dtype, 2 * rows, HIDDEN);
  if (separate) d.gate.data = lend_in(w, dtype, rows, HIDDEN);
  if (!fused) d.up.data = lend_in(w, dtype, rows, HIDDEN);
  d.down.data = lend_in(w, dtype, (int64_t)experts * HIDDEN, inter);
  return d;
}

void bind_layer(world *w, const cumoe_moe_desc *desc, int32_t order)
{
  CHECK_OK(cumoe_plan_create(w->context, desc, &w->plan));
  const cumoe_weights_desc routed = describe_weights(w, desc->dtype, EXPERTS, desc->inter, order);
  CHECK_OK(cumoe_weights_bind(w->context, &routed, &w->weights));
  if (desc->shared_inter == 0) return;
  const cumoe_weights_desc shared = describe_weights(w, desc->dtype, 1, desc->shared_inter, order);
  CHECK_OK(cumoe_weights_bind(w->context, &shared, &w->shared));
}

void small_layer(world *w)
{
  const cumoe_moe_desc d = describe(CUMOE_BF16);
  open_one(w);
  bind_layer(w, &d, CUMOE_GATE_UP_CONCAT);
}

static cumoe_moe_desc describe_wide(void)
{
  cumoe_moe_desc d = describe(CUMOE_BF16);
  d.inter = FEW_INTER;
  return d;
}

void wide_layer(world *w)
{
  const cumoe_moe_desc d = describe_wide();
  open_one(w);
  bind_layer(w, &d, CUMOE_UP_GATE_CONCAT);
}

void shared_layer(world *w)
{
  cumoe_moe_desc d = describe(CUMOE_F16);
  d.shared_inter = 128;
  d.out_dtype = CUMOE_F32;
  open_two(w);
  bind_layer(w, &d, CUMOE_GATE_UP_INTERLEAVED);
}

static cumoe_moe_desc describe_formats(void)
{
  cumoe_moe_desc d = describe(CUMOE_BF16);
  d.up_format = cumoe_format_fp8_block(CUMOE_F32);
  d.down_format = cumoe_format_int8(CUMOE_F32);
  return d;
}

void formats_layer(world *w)
{
  static const void *scales[EXPERTS];
  const cumoe_moe_desc d = describe_formats();
  open_one(w);
  CHECK_OK(cumoe_plan_create(w->context, &d, &w->plan));
  cumoe_weights_desc weights = describe_weights(w, CUMOE_E4M3, EXPERTS, INTER, CUMOE_GATE_UP_CONCAT);
  weights.up_format = d.up_format;
  weights.down_format = d.down_format;
  weights.dtype = CUMOE_BF16;
  weights.down.data.dtype = CUMOE_I8;
  for (int e = 0; e < EXPERTS; e++) scales[e] = lend_in(w, CUMOE_F32, 2 * INTER / 128, HIDDEN / 128).data;
  weights.gate_up.scale.data = lend_in(w, CUMOE_F32, 2 * INTER / 128, HIDDEN / 128);
  weights.gate_up.scale.data.data = NULL;
  weights.gate_up.scale.per_expert = scales;
  weights.down.scale.data = lend_in(w, CUMOE_F32, EXPERTS * HIDDEN, 1);
  CHECK_OK(cumoe_weights_bind(w->context, &weights, &w->weights));
}

void unreduced_layer(world *w)
{
  cumoe_moe_desc d = describe(CUMOE_F32);
  d.flags = CUMOE_MOE_UNREDUCED | CUMOE_MOE_UNGATED;
  d.act = CUMOE_ACT_RELU2;
  d.routing.flags |= CUMOE_ROUTE_WEIGHT_ON_INPUT;
  open_one(w);
  bind_layer(w, &d, CUMOE_UNGATED);
}

cumoe_moe_args arguments(world *w, const cumoe_moe_desc *d, int64_t tokens)
{
  const bool unreduced = d->flags & CUMOE_MOE_UNREDUCED;
  cumoe_moe_args a = {.size = sizeof a};
  size_t bytes = 0;
  CHECK_OK(cumoe_plan_workspace(w->plan, tokens, &bytes));
  a.x = lend_in(w, d->dtype, tokens, HIDDEN);
  a.out = lend(w, d->out_dtype ? d->out_dtype : d->dtype, unreduced ? tokens * TOP_K : tokens, HIDDEN);
  a.workspace = lend(w, CUMOE_U8, 1, (int64_t)bytes);
  a.shared = w->shared;
  return a;
}

cumoe_status run_routed(world *w)
{
  const cumoe_moe_desc d = describe(CUMOE_BF16);
  cumoe_moe_args a = arguments(w, &d, 4);
  a.ids = lend_in(w, CUMOE_I32, 4, TOP_K);
  a.weights = lend_in(w, CUMOE_F32, 4, TOP_K);
  return cumoe_moe_forward(w->plan, w->weights, &a, w->stream);
}

/* A forward that keeps and its backward, from the router on; tokens enough for sums by runs of them. */
cumoe_status both_ways(world *w, int64_t tokens)
{
  const cumoe_moe_desc d = describe(CUMOE_BF16);
  cumoe_moe_args a = arguments(w, &d, tokens);
  size_t kept = 0, bytes = 0;
  CHECK_OK(cumoe_moe_kept(w->plan, tokens, &kept));
  CHECK_OK(cumoe_moe_backward_workspace(w->plan, tokens, 1, &bytes));
  a.router_weight = lend_in(w, CUMOE_BF16, EXPERTS, HIDDEN);
  const cumoe_view_mut keeps = lend(w, CUMOE_U8, 1, (int64_t)kept);
  const cumoe_status status = cumoe_moe_forward_keep(w->plan, w->weights, &a, keeps, w->stream);
  if (status != CUMOE_OK) return status;
  const cumoe_moe_grads g = {.size = sizeof g,
                             .balance = 1,
                             .d_out = lend_in(w, CUMOE_BF16, tokens, HIDDEN),
                             .kept = cumoe_const(keeps),
                             .d_x = lend(w, CUMOE_BF16, tokens, HIDDEN),
                             .d_router_weight = lend(w, CUMOE_F32, EXPERTS, HIDDEN),
                             .d_router_bias = lend(w, CUMOE_F32, 1, EXPERTS),
                             .losses = lend(w, CUMOE_F32, 1, 2),
                             .workspace = lend(w, CUMOE_U8, 1, (int64_t)bytes)};
  a.out = a.workspace = (cumoe_view_mut){0};
  return cumoe_moe_backward(w->plan, w->weights, &a, &g, w->stream);
}

cumoe_status run_both_ways(world *w)
{
  return both_ways(w, 600);
}

cumoe_status run_formats(world *w)
{
  const cumoe_moe_desc d = describe_formats();
  cumoe_moe_args a = arguments(w, &d, 40);
  a.ids = lend_in(w, CUMOE_I32, 40, TOP_K);
  a.weights = lend_in(w, CUMOE_F32, 40, TOP_K);
  return cumoe_moe_forward(w->plan, w->weights, &a, w->stream);
}

cumoe_status run_logits(world *w)
{
  const cumoe_moe_desc d = describe(CUMOE_BF16);
  cumoe_moe_args a = arguments(w, &d, 3000); /* several chunks of the map, the sm_90a kernels */
  a.logits = lend_in(w, CUMOE_F32, 3000, EXPERTS);
  a.ids_out = lend(w, CUMOE_I64, 3000, TOP_K);
  a.counts_out = lend(w, CUMOE_I32, 1, EXPERTS);
  return cumoe_moe_forward(w->plan, w->weights, &a, w->stream);
}

/* One token, which few_up and few_down take. */
cumoe_status run_wide(world *w)
{
  const cumoe_moe_desc d = describe_wide();
  cumoe_moe_args a = arguments(w, &d, 1);
  a.logits = lend_in(w, CUMOE_F32, 1, EXPERTS);
  a.counts_out = lend(w, CUMOE_I32, 1, EXPERTS);
  a.residual = cumoe_const(a.out);
  return cumoe_moe_forward(w->plan, w->weights, &a, w->stream);
}

/* The same from hidden states, where few_up is the gate, too. */
cumoe_status run_wide_routed(world *w)
{
  const cumoe_moe_desc d = describe_wide();
  cumoe_moe_args a = arguments(w, &d, 1);
  a.router_weight = lend_in(w, CUMOE_BF16, EXPERTS, HIDDEN);
  a.ids_out = lend(w, CUMOE_I64, 1, TOP_K);
  a.weights_out = lend(w, CUMOE_F32, 1, TOP_K);
  return cumoe_moe_forward(w->plan, w->weights, &a, w->stream);
}

cumoe_status run_everything(world *w)
{
  cumoe_moe_desc d = describe(CUMOE_F16);
  d.out_dtype = CUMOE_F32;
  d.shared_inter = 128;
  cumoe_moe_args a = arguments(w, &d, 64);
  a.router_weight = lend_in(w, CUMOE_F16, EXPERTS, HIDDEN);
  a.shared_gate = lend_in(w, CUMOE_F16, 1, HIDDEN);
  a.residual = cumoe_const(a.out);
  a.device_tokens = lend_in(w, CUMOE_I32, 1, 1);
  return cumoe_moe_forward(w->plan, w->weights, &a, w->stream);
}

cumoe_status run_unreduced(world *w)
{
  cumoe_moe_desc d = describe(CUMOE_F32);
  d.flags = CUMOE_MOE_UNREDUCED;
  cumoe_moe_args a = arguments(w, &d, 5);
  a.logits = lend_in(w, CUMOE_BF16, 5, EXPERTS);
  return cumoe_moe_forward(w->plan, w->weights, &a, w->stream);
}

cumoe_status run_router(world *w)
{
  enum { TOKENS = 4000, MANY = 128 }; /* enough logits for the sm_90a kernel */
  const cumoe_view x = lend_in(w, CUMOE_BF16, TOKENS, HIDDEN), none = {0};
  return cumoe_router(w->context, x, lend_in(w, CUMOE_BF16, MANY, HIDDEN), none, lend(w, CUMOE_F32, TOKENS, MANY),
                      w->stream);
}

cumoe_status run_stages(world *w)
{
  enum { TOKENS = 9 };
  const cumoe_view x = lend_in(w, CUMOE_BF16, TOKENS, HIDDEN), none = {0};
  const cumoe_view_mut logits = lend(w, CUMOE_F32, TOKENS, EXPERTS), ids = lend(w, CUMOE_I32, TOKENS, TOP_K),
                       weights = lend(w, CUMOE_F32, TOKENS, TOP_K), h = lend(w, CUMOE_BF16, TOKENS * TOP_K, INTER),
                       y = lend(w, CUMOE_BF16, TOKENS * TOP_K, HIDDEN), unused = {0};
  const cumoe_routing routing = cumoe_routing_mixtral(TOP_K);
  const cumoe_route route = {.size = sizeof route,
                             .counts = lend(w, CUMOE_I32, 1, EXPERTS),
                             .offsets = lend(w, CUMOE_I32, 1, EXPERTS + 1),
                             .row_pair = lend(w, CUMOE_I32, 1, TOKENS * TOP_K),
                             .slot_row = lend(w, CUMOE_I32, TOKENS, TOP_K)};
  const cumoe_combine_args combine = {.size = sizeof combine,
                                      .y = cumoe_const(y),
                                      .pair_weights = cumoe_const(weights),
                                      .out = lend(w, CUMOE_BF16, TOKENS, HIDDEN)};
  STEP(cumoe_router(w->context, x, lend_in(w, CUMOE_BF16, EXPERTS, HIDDEN), none, logits, w->stream));
  STEP(cumoe_gate(w->context, &routing, cumoe_const(logits), none, ids, weights, w->stream));
  STEP(cumoe_map(w->plan, cumoe_const(ids), none, &route, unused, w->stream));
  STEP(cumoe_up(w->plan, w->weights, x, &route, none, h, w->stream));
  STEP(cumoe_permute(w->plan, x, &route, y, w->stream)); /* y is free until down */
  STEP(cumoe_up_permuted(w->plan, w->weights, cumoe_const(y), &route, none, h, w->stream));
  STEP(cumoe_down(w->plan, w->weights, cumoe_const(h), &route, y, w->stream));
  return cumoe_combine(w->plan, &route, &combine, w->stream);
}
