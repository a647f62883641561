/* The public stages: check, fill the argument struct, dispatch. */
#include "arguments.h"
#include "buffer.h"
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "route.h"
#include "status.h"

/* ---- router ---- */

static cumoe_status check_router(struct context *context, cumoe_view x, cumoe_view weight, cumoe_view bias,
                                 cumoe_view logits)
{
  TRY(check_owner(context, "weight", &weight)); /* its shape means nothing once it is freed; the same below */
  REQUIRE(!absent(&weight), CUMOE_ERR_INVALID_ARGUMENT, "weight is absent");
  REQUIRE(weight.rows >= 1 && weight.rows <= CUMOE_MAX_EXPERTS, CUMOE_ERR_INVALID_ARGUMENT,
          "weight.rows is %lld, must be 1 .. %d", (long long)weight.rows, CUMOE_MAX_EXPERTS);
  REQUIRE(weight.cols >= 8 && weight.cols % 8 == 0 && weight.cols <= INT32_MAX / 2, CUMOE_ERR_INVALID_ARGUMENT,
          "weight.cols is %lld, must be a positive multiple of 8", (long long)weight.cols);
  const operand x_want = {"x", x.rows, weight.cols, FLOAT_BITS, 16};
  TRY(check_counted(context, &x_want, x));
  TRY(check_tokens("x.rows", x.rows, 0, 1));
  const uint32_t types = DTYPE_BIT(x.dtype & 31) | DTYPE_BIT(CUMOE_F32);
  const operand weight_want = {"weight", weight.rows, weight.cols, types, 16},
                bias_want = {"bias", 1, weight.rows, types, 0};
  const operand logits_want = {"logits", x.rows, weight.rows, DTYPE_BIT(CUMOE_F32), 0};
  TRY(check_operand(context, &weight_want, weight));
  TRY(check_optional(context, &bias_want, bias));
  return check_operand(context, &logits_want, logits);
}

static cumoe_status run_router(cumoe_context handle, const cumoe_router_args *a, cumoe_stream stream)
{
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_router(context, a->x, a->weight, a->bias, cumoe_const(a->logits)));
  TRY(check_device_tokens(context, "args.device_tokens", a->device_tokens));
  TRY(check_not_negative("args.logit_scale", a->logit_scale));
  if (a->logits_dtype) TRY(check_dense("args.logits_dtype", a->logits_dtype, CUMOE_ERR_INVALID_ARGUMENT));
  REQUIRE(!(a->flags & ~(uint32_t)CUMOE_MOE_BATCH_INVARIANT), CUMOE_ERR_INVALID_ARGUMENT,
          "args.flags is 0x%x, known is BATCH_INVARIANT", a->flags);
  const named_view views[] = {{"logits", cumoe_const(a->logits)},
                              {"x", a->x},
                              {"weight", a->weight},
                              {"bias", a->bias},
                              {"args.device_tokens", a->device_tokens}};
  TRY(check_overlaps(views, 1, 5));
  if (a->x.rows == 0) return CUMOE_OK;
  const token_count tokens = {a->x.rows, a->device_tokens.data};
  router_args r = router_arguments(a->x, a->weight, a->bias, tokens, a->logits.data, a->logits.ld);
  if (a->logits_dtype) r.round_dtype = a->logits_dtype;
  if (a->logit_scale > 0) r.scale = a->logit_scale;
  const choice_hint hint = {0, a->flags & CUMOE_MOE_BATCH_INVARIANT};
  ON_DEVICE(context, dispatch_by(context, OP_router, &r, &hint, stream));
}

cumoe_status cumoe_router(cumoe_context context, cumoe_view x, cumoe_view weight, cumoe_view bias,
                          cumoe_view_mut logits, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const cumoe_router_args a = {.x = x, .weight = weight, .bias = bias, .logits = logits};
  return run_router(context, &a, stream);
}

cumoe_status cumoe_router_with(cumoe_context context, const cumoe_router_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  cumoe_router_args a;
  TRY(take_struct("args", args, &a));
  return run_router(context, &a, stream);
}

/* ---- gate ---- */

static cumoe_status check_gate(struct context *context, const cumoe_gate_args *a)
{
  const int64_t tokens = a->logits.rows, experts = a->logits.cols, k = a->routing.top_k;
  const uint32_t f32 = DTYPE_BIT(CUMOE_F32);
  const bool chosen = !absent(&a->chosen);
  const operand logits = {"logits", tokens, experts, FLOAT_BITS, 0}, ids = {"ids", tokens, k, INDEX_BITS, 0},
                given = {"args.chosen", tokens, k, INDEX_BITS, 0}, weights = {"weights", tokens, k, f32, 0};
  const operand bias = {"select_bias", 1, experts - a->routing.always_experts, f32, 0},
                scale = {"args.expert_scale", 1, experts, f32, 0};
  TRY(check_operand(context, &logits, a->logits));
  TRY(check_optional(context, &bias, a->select_bias));
  TRY(check_optional(context, &scale, a->expert_scale));
  TRY(check_device_tokens(context, "args.device_tokens", a->device_tokens));
  if (a->routing.score == CUMOE_SCORE_SPARSEMIXER)
    TRY(check_absent("select_bias", a->select_bias, "the score is SPARSEMIXER"));
  if (chosen) {
    TRY(check_operand(context, &given, a->chosen));
    TRY(check_absent("ids", cumoe_const(a->ids), "args.chosen has them"));
    TRY(check_absent("select_bias", a->select_bias, "args.chosen has chosen"));
  } else {
    TRY(check_operand(context, &ids, cumoe_const(a->ids)));
  }
  TRY(check_operand(context, &weights, cumoe_const(a->weights)));
  const named_view views[] = {{"ids", cumoe_const(a->ids)},
                              {"weights", cumoe_const(a->weights)},
                              {"logits", a->logits},
                              {"select_bias", a->select_bias},
                              {"args.expert_scale", a->expert_scale},
                              {"args.chosen", a->chosen},
                              {"args.device_tokens", a->device_tokens}};
  return check_overlaps(views, 2, sizeof views / sizeof *views);
}

static cumoe_status run_gate(cumoe_context handle, const cumoe_gate_args *a, cumoe_stream stream)
{
  struct context *context;
  TRY(find_context(handle, &context));
  TRY(check_owner(context, "logits", &a->logits));
  REQUIRE(!absent(&a->logits), CUMOE_ERR_INVALID_ARGUMENT, "logits is absent");
  REQUIRE(a->logits.cols >= 1 && a->logits.cols <= CUMOE_MAX_EXPERTS, CUMOE_ERR_INVALID_ARGUMENT,
          "logits.cols is %lld, must be 1 .. %d", (long long)a->logits.cols, CUMOE_MAX_EXPERTS);
  TRY(check_routing(&a->routing, (int32_t)a->logits.cols));
  TRY(check_gate(context, a));
  if (a->logits.rows == 0) return CUMOE_OK;
  const gate_inputs inputs = {a->select_bias, a->expert_scale, a->chosen};
  gate_args g = gate_arguments(context, &a->routing, a->logits, &inputs, cumoe_const(a->ids), cumoe_const(a->weights));
  g.tokens.device = a->device_tokens.data;
  ON_DEVICE(context, dispatch(context, OP_gate, &g, stream));
}

cumoe_status cumoe_gate(cumoe_context context, const cumoe_routing *routing, cumoe_view logits, cumoe_view select_bias,
                        cumoe_view_mut ids, cumoe_view_mut weights, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  struct context *found;
  TRY(find_context(context, &found)); /* before what is read: its text comes first */
  REQUIRE(routing, CUMOE_ERR_INVALID_ARGUMENT, "routing is null");
  const cumoe_gate_args a = {
      .routing = *routing, .logits = logits, .select_bias = select_bias, .ids = ids, .weights = weights};
  return run_gate(context, &a, stream);
}

cumoe_status cumoe_gate_with(cumoe_context context, const cumoe_gate_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  cumoe_gate_args a;
  TRY(take_struct("args", args, &a));
  REQUIRE(a.reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.reserved is %d, must be 0", (int)a.reserved);
  return run_gate(context, &a, stream);
}

/* ---- route ---- */

cumoe_status take_route(const cumoe_route **route, cumoe_route *copy)
{
  TRY(take_struct("route", *route, copy));
  *route = copy;
  return CUMOE_OK;
}

cumoe_status check_route(const struct plan *plan, const cumoe_route *route, int64_t tokens)
{
  const cumoe_moe_desc *d = &plan->desc;
  const uint32_t i32 = DTYPE_BIT(CUMOE_I32);
  REQUIRE(route->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "route.reserved is %d, must be 0", (int)route->reserved);
  const operand counts = {"route.counts", 1, d->local_experts, i32, 4},
                offsets = {"route.offsets", 1, (int64_t)d->local_experts + 1, i32, 4};
  const operand row_pair = {"route.row_pair", 1, tokens * d->routing.top_k, i32, 4};
  const operand slot_row = {"route.slot_row", tokens, d->routing.top_k, i32, 4};
  TRY(check_operand(plan->context, &counts, cumoe_const(route->counts)));
  TRY(check_operand(plan->context, &offsets, cumoe_const(route->offsets)));
  TRY(check_operand(plan->context, &row_pair, cumoe_const(route->row_pair)));
  TRY(check_operand(plan->context, &slot_row, cumoe_const(route->slot_row)));
  REQUIRE(tokens <= 1 || route->slot_row.ld == route->slot_row.cols, CUMOE_ERR_LAYOUT,
          "route.slot_row.ld is %lld, must be top_k = %lld", (long long)route->slot_row.ld,
          (long long)route->slot_row.cols);
  return check_device_tokens(plan->context, "route.device_tokens", route->device_tokens);
}

/* ---- map ---- */

cumoe_status run_map(struct context *context, const map_args *args, cumoe_stream stream)
{
  const bool counts = args->chunks > 1 && !on_cpu(context);
  launch_step count = {0}, place = {0};
  if (counts) TRY(choose_step(context, OP_map_count, args, NULL, &count));
  TRY(choose_step(context, OP_map, args, NULL, &place));
  if (counts) TRY(launch(context, &count, args, stream));
  return launch(context, &place, args, stream);
}

static size_t hist_bytes(const struct plan *plan, int64_t tokens)
{
  const map_chunks cut = map_chunking(tokens * plan->desc.routing.top_k);
  return cut.chunks > 1 ? (size_t)cut.chunks * (size_t)plan->desc.local_experts * 4 : 0;
}

cumoe_status cumoe_map_workspace(cumoe_plan handle, int64_t tokens, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  TRY(find_plan(handle, &plan));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(check_tokens("tokens", tokens, 0, plan->desc.routing.top_k));
  *bytes = (size_t)map_room(tokens * plan->desc.routing.top_k) * (size_t)plan->desc.local_experts * 4;
  return CUMOE_OK;
}

static route_pointers pointers_of(const cumoe_route *route)
{
  return (route_pointers){route->counts.data, route->offsets.data, route->row_pair.data, route->slot_row.data};
}

/* Rows are written through what was counted: overlapping arrays would send them anywhere. */
static cumoe_status check_map_overlaps(const cumoe_route *route, cumoe_view workspace, cumoe_view ids,
                                       cumoe_view expert_map)
{
  const named_view views[] = {ROUTE_VIEWS(route),
                              {"workspace", workspace},
                              {"ids", ids},
                              {"expert_map", expert_map},
                              {"route.device_tokens", route->device_tokens}};
  return check_overlaps(views, 5, sizeof views / sizeof *views);
}

cumoe_status cumoe_map(cumoe_plan handle, cumoe_view ids, cumoe_view expert_map, const cumoe_route *route,
                       cumoe_view_mut workspace, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  cumoe_route copy;
  TRY(find_plan(handle, &plan));
  TRY(take_route(&route, &copy));
  const cumoe_moe_desc *d = &plan->desc;
  TRY(check_tokens("ids.rows", ids.rows, 0, d->routing.top_k));
  const operand ids_want = {"ids", ids.rows, d->routing.top_k, INDEX_BITS, 0},
                map_want = {"expert_map", 1, d->num_experts, DTYPE_BIT(CUMOE_I32), 0};
  TRY(check_counted(plan->context, &ids_want, ids));
  TRY(check_optional(plan->context, &map_want, expert_map));
  REQUIRE(d->local_experts == d->num_experts || !absent(&expert_map), CUMOE_ERR_INVALID_ARGUMENT,
          "expert_map is absent, but only %d of %d experts are local", (int)d->local_experts, (int)d->num_experts);
  TRY(check_route(plan, route, ids.rows));
  const size_t need = hist_bytes(plan, ids.rows);
  const operand workspace_want = {"workspace", 1, workspace.cols, DTYPE_BIT(CUMOE_U8), 16};
  if (need) {
    const cumoe_view given = cumoe_const(workspace);
    TRY(check_owner(plan->context, "workspace", &given));
    REQUIRE(workspace.cols >= 0 && (size_t)workspace.cols >= need, CUMOE_ERR_WORKSPACE,
            "workspace has %lld bytes, %zu are needed", (long long)workspace.cols, need);
    TRY(check_operand(plan->context, &workspace_want, cumoe_const(workspace)));
  }
  TRY(check_map_overlaps(route, cumoe_const(need ? workspace : (cumoe_view_mut){0}), ids, expert_map));
  if (ids.rows == 0) return CUMOE_OK;
  map_args a = map_arguments(plan, ids, expert_map, pointers_of(route), workspace.data);
  a.tokens = tokens_of_route(route, ids.rows);
  ON_DEVICE(plan->context, run_map(plan->context, &a, stream));
}

/* ---- up, down ---- */

operand rows_operand(const struct plan *plan, const char *name, int64_t tokens, int32_t cols)
{
  return (operand){name, tokens * plan->desc.routing.top_k, cols, DTYPE_BIT(plan->desc.dtype), 16};
}

cumoe_status tokens_of(const struct plan *plan, const cumoe_route *route, int64_t *tokens)
{
  const cumoe_view slots = cumoe_const(route->slot_row);
  TRY(check_owner(plan->context, "route.slot_row", &slots));
  *tokens = slots.rows;
  return check_tokens("route.slot_row.rows", slots.rows, 0, plan->desc.routing.top_k);
}

/* A stage has no room for other activations. */
static cumoe_status check_as_they_are(const char *name, const cumoe_format *f)
{
  REQUIRE(f->rows == CUMOE_ROWS_AS_THEY_ARE, CUMOE_ERR_NOT_SUPPORTED,
          "%s.rows is %d: activations become codes in cumoe_moe_forward and cumoe_masked_forward only", name,
          (int)f->rows);
  REQUIRE(!f->act_order, CUMOE_ERR_NOT_SUPPORTED,
          "%s.act_order is %d: activations get another order in cumoe_moe_forward and cumoe_masked_forward only", name,
          (int)f->act_order);
  return CUMOE_OK;
}

/* What cumoe_up and cumoe_up_permuted have in common; `in` is checked: x, or rows. */
static cumoe_status up_stage(const struct plan *plan, const struct weights *weights, named_view in, int64_t tokens,
                             bool permuted, const cumoe_route *route, cumoe_view pair_weights, cumoe_view_mut h,
                             cumoe_stream stream)
{
  const cumoe_moe_desc *d = &plan->desc;
  const operand h_want = rows_operand(plan, "h", tokens, d->inter);
  const operand weights_want = {"pair_weights", tokens, d->routing.top_k, DTYPE_BIT(CUMOE_F32), 0};
  TRY(check_route(plan, route, tokens));
  if (d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT)
    TRY(check_operand(plan->context, &weights_want, pair_weights));
  else
    TRY(check_absent("pair_weights", pair_weights, "the plan does not weigh the input"));
  TRY(check_with_more(plan->context, &h_want, cumoe_const(h)));
  const named_view views[] = {{"h", cumoe_const(h)},
                              in,
                              {"pair_weights", pair_weights},
                              ROUTE_VIEWS(route),
                              {"route.device_tokens", route->device_tokens}};
  TRY(check_off_weights(views, 1, "weights", weights));
  TRY(check_overlaps(views, 1, sizeof views / sizeof *views));
  if (tokens == 0) return CUMOE_OK;
  TRY(check_as_they_are("desc.up_format", &d->up_format));
  const route_pointers pointers = pointers_of(route);
  cumoe_view x = in.view;
  x.rows = tokens;
  gemm_args g = up_arguments(plan, weights, x, &pointers, pair_weights);
  g.tokens = tokens_of_route(route, tokens);
  g.packed = permuted;
  g.c = h.data;
  g.c_ld = h.ld;
  const choice_hint hint = {0, is_invariant(d)};
  ON_DEVICE(plan->context, dispatch_by(plan->context, OP_up, &g, &hint, stream));
}

cumoe_status cumoe_up(cumoe_plan plan_handle, cumoe_weights weights_handle, cumoe_view x, const cumoe_route *route,
                      cumoe_view pair_weights, cumoe_view_mut h, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  const struct weights *weights;
  cumoe_route copy;
  TRY(find_plan(plan_handle, &plan));
  TRY(take_route(&route, &copy));
  const cumoe_moe_desc *d = &plan->desc;
  TRY(find_weights("weights", weights_handle, plan, false, &weights));
  TRY(check_tokens("x.rows", x.rows, 0, d->routing.top_k));
  const operand x_want = {"x", x.rows, d->hidden, DTYPE_BIT(d->dtype), 16};
  TRY(check_counted(plan->context, &x_want, x));
  const named_view in = {"x", x};
  return up_stage(plan, weights, in, x.rows, false, route, pair_weights, h, stream);
}

cumoe_status cumoe_up_permuted(cumoe_plan plan_handle, cumoe_weights weights_handle, cumoe_view rows,
                               const cumoe_route *route, cumoe_view pair_weights, cumoe_view_mut h, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  const struct weights *weights;
  cumoe_route copy;
  int64_t tokens = 0;
  TRY(find_plan(plan_handle, &plan));
  TRY(take_route(&route, &copy));
  const cumoe_moe_desc *d = &plan->desc;
  TRY(find_weights("weights", weights_handle, plan, false, &weights));
  TRY(tokens_of(plan, route, &tokens));
  const operand rows_want = rows_operand(plan, "rows", tokens, d->hidden);
  TRY(check_with_more(plan->context, &rows_want, rows));
  const named_view in = {"rows", rows};
  return up_stage(plan, weights, in, tokens, true, route, pair_weights, h, stream);
}

/* ---- permute ---- */

cumoe_status cumoe_permute(cumoe_plan handle, cumoe_view x, const cumoe_route *route, cumoe_view_mut rows,
                           cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  cumoe_route copy;
  TRY(find_plan(handle, &plan));
  TRY(take_route(&route, &copy));
  const cumoe_moe_desc *d = &plan->desc;
  TRY(check_tokens("x.rows", x.rows, 0, d->routing.top_k));
  const operand x_want = {"x", x.rows, d->hidden, DTYPE_BIT(d->dtype), 16};
  const operand rows_want = rows_operand(plan, "rows", x.rows, d->hidden);
  TRY(check_counted(plan->context, &x_want, x));
  TRY(check_route(plan, route, x.rows));
  TRY(check_with_more(plan->context, &rows_want, cumoe_const(rows)));
  const named_view views[] = {
      {"rows", cumoe_const(rows)}, {"x", x}, ROUTE_VIEWS(route), {"route.device_tokens", route->device_tokens}};
  TRY(check_overlaps(views, 1, sizeof views / sizeof *views));
  if (x.rows == 0) return CUMOE_OK;
  const permute_args a = {.x = x.data,
                          .rows = rows.data,
                          .x_ld = x.ld,
                          .rows_ld = rows.ld,
                          .slot_row = route->slot_row.data,
                          .tokens = tokens_of_route(route, x.rows),
                          .rows_cap = x.rows * d->routing.top_k,
                          .top_k = d->routing.top_k,
                          .hidden = d->hidden,
                          .element = (int32_t)cumoe_dtype_bytes((cumoe_dtype)d->dtype),
                          .fault = plan->context->fault};
  ON_DEVICE(plan->context, dispatch(plan->context, OP_permute, &a, stream));
}

/* ---- down ---- */

cumoe_status cumoe_down(cumoe_plan plan_handle, cumoe_weights weights_handle, cumoe_view h, const cumoe_route *route,
                        cumoe_view_mut y, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  const struct weights *weights;
  cumoe_route copy;
  TRY(find_plan(plan_handle, &plan));
  TRY(take_route(&route, &copy));
  const cumoe_moe_desc *d = &plan->desc;
  TRY(find_weights("weights", weights_handle, plan, false, &weights));
  int64_t tokens = 0;
  TRY(tokens_of(plan, route, &tokens));
  TRY(check_route(plan, route, tokens));
  const operand h_want = rows_operand(plan, "h", tokens, d->inter), y_want = rows_operand(plan, "y", tokens, d->hidden);
  TRY(check_with_more(plan->context, &h_want, h));
  TRY(check_with_more(plan->context, &y_want, cumoe_const(y)));
  const named_view views[] = {
      {"y", cumoe_const(y)}, {"h", h}, ROUTE_VIEWS(route), {"route.device_tokens", route->device_tokens}};
  TRY(check_off_weights(views, 1, "weights", weights));
  TRY(check_overlaps(views, 1, sizeof views / sizeof *views));
  if (tokens == 0) return CUMOE_OK;
  const route_pointers pointers = pointers_of(route);
  TRY(check_as_they_are("desc.down_format", &d->down_format));
  gemm_args g = down_arguments(plan, weights, h, &pointers, tokens);
  g.tokens = tokens_of_route(route, tokens);
  g.c = y.data;
  g.c_ld = y.ld;
  const choice_hint hint = {0, is_invariant(d)};
  ON_DEVICE(plan->context, dispatch_by(plan->context, OP_down, &g, &hint, stream));
}

/* ---- combine ---- */

static cumoe_status check_combine(const struct plan *plan, const cumoe_route *route, const cumoe_combine_args *a,
                                  int64_t tokens)
{
  TRY(check_route(plan, route, tokens));
  const cumoe_moe_desc *d = &plan->desc;
  const bool unreduced = d->flags & CUMOE_MOE_UNREDUCED, on_input = d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  const uint32_t own = DTYPE_BIT(d->dtype), f32 = DTYPE_BIT(CUMOE_F32), out_type = DTYPE_BIT(d->out_dtype);
  const operand y = rows_operand(plan, "args.y", tokens, d->hidden), x = {"args.x", tokens, d->hidden, own, 16};
  const operand pair_weights = {"args.pair_weights", tokens, d->routing.top_k, f32, 0};
  const operand shared = {"args.shared", tokens, d->hidden, own, 16},
                shared_logit = {"args.shared_logit", tokens, 1, f32, 0};
  const operand residual = {"args.residual", tokens, d->hidden, out_type, 16};
  TRY(check_finite("args.out_scale", a->out_scale));
  TRY(check_with_more(plan->context, &y, a->y));
  if (on_input)
    TRY(check_optional(plan->context, &pair_weights, a->pair_weights));
  else if (unreduced)
    TRY(check_absent("args.pair_weights", a->pair_weights, "the plan is UNREDUCED"));
  else
    TRY(check_operand(plan->context, &pair_weights, a->pair_weights));
  if (d->routing.identity_experts)
    TRY(check_operand(plan->context, &x, a->x));
  else
    TRY(check_optional(plan->context, &x, a->x));
  TRY(check_optional(plan->context, &shared, a->shared));
  if (absent(&a->shared))
    TRY(check_absent("args.shared_logit", a->shared_logit, "there is no args.shared"));
  else
    TRY(check_optional(plan->context, &shared_logit, a->shared_logit));
  TRY(check_rows_or_one(plan->context, &residual, a->residual));
  TRY(check_device_tokens(plan->context, "args.device_tokens", a->device_tokens));
  if (unreduced) TRY(check_absent("args.shared", a->shared, "the plan is UNREDUCED"));
  if (unreduced) TRY(check_absent("args.residual", a->residual, "the plan is UNREDUCED"));
  const named_view views[] = {{"args.out", cumoe_const(a->out)},
                              {"args.y", a->y},
                              {"args.x", a->x},
                              {"args.pair_weights", a->pair_weights},
                              {"args.residual", unless_in_place(a->residual, a->out)},
                              {"args.shared", a->shared},
                              {"args.shared_logit", a->shared_logit},
                              {"args.device_tokens", a->device_tokens},
                              {"route.device_tokens", route->device_tokens},
                              ROUTE_VIEWS(route)};
  return check_overlaps(views, 1, sizeof views / sizeof *views);
}

cumoe_status cumoe_combine(cumoe_plan handle, const cumoe_route *route, const cumoe_combine_args *args,
                           cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  const struct plan *plan;
  cumoe_route copy;
  cumoe_combine_args a;
  TRY(find_plan(handle, &plan));
  TRY(take_route(&route, &copy));
  TRY(take_struct("args", args, &a));
  const cumoe_moe_desc *d = &plan->desc;
  const bool unreduced = d->flags & CUMOE_MOE_UNREDUCED;
  int64_t tokens = 0;
  TRY(tokens_of(plan, route, &tokens));
  const operand out = {"args.out", unreduced ? tokens * d->routing.top_k : tokens, d->hidden, DTYPE_BIT(d->out_dtype),
                       16};
  TRY(check_operand(plan->context, &out, cumoe_const(a.out)));
  TRY(check_combine(plan, route, &a, tokens));
  if (tokens == 0) return CUMOE_OK;
  if (absent(&a.device_tokens)) a.device_tokens = route->device_tokens;
  const combine_args c = combine_arguments(plan, route->slot_row.data, &a, tokens);
  ON_DEVICE(plan->context, dispatch(plan->context, OP_combine, &c, stream));
}
