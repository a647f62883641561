/* The layer: plan, workspace, and the forward pass in a straight line. */
#include "dispatch.h"
#include "objects.h"

#include <stdlib.h>
#include <string.h>

/* ---- plan ---- */

cumoe_status cumoe_moe_supports(int32_t device, const cumoe_moe_desc *desc, char *why, size_t why_bytes)
{
  begin_call(__func__);
  cumoe_moe_desc d;
  cumoe_status status = device < CUMOE_DEVICE_CPU
                            ? fail(CUMOE_ERR_INVALID_ARGUMENT, "device is %d, not a device", (int)device)
                            : check_moe_desc(desc, &d);
  if (why && why_bytes) {
    const char *text = status == CUMOE_OK ? "" : cumoe_last_error();
    const size_t length = strlen(text) < why_bytes ? strlen(text) : why_bytes - 1;
    memcpy(why, text, length);
    why[length] = 0;
  }
  return status;
}

cumoe_status cumoe_plan_create(cumoe_context handle, const cumoe_moe_desc *desc, cumoe_plan *plan)
{
  begin_call(__func__);
  struct context *context;
  cumoe_moe_desc d;
  REQUIRE(plan, CUMOE_ERR_INVALID_ARGUMENT, "plan is null");
  *plan = NULL;
  TRY(find_context(handle, &context));
  TRY(check_moe_desc(desc, &d));
  struct plan *p = malloc(sizeof *p);
  REQUIRE(p, CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", sizeof *p);
  *p = (struct plan){context, d};
  *plan = publish_object(OBJECT_PLAN, context, p);
  if (*plan) return CUMOE_OK;
  free(p);
  return fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for another plan");
}

cumoe_status find_plan(cumoe_plan handle, const struct plan **plan)
{
  void *found;
  TRY(find_object(OBJECT_PLAN, "plan", handle, &found));
  *plan = found;
  return check_process((*plan)->context);
}

static cumoe_status end_plan(void *plan)
{
  free(plan);
  return CUMOE_OK;
}

cumoe_status plans_abandon(struct context *context)
{
  return retire_objects(OBJECT_PLAN, context, end_plan);
}

cumoe_status cumoe_plan_destroy(cumoe_plan handle)
{
  begin_call(__func__);
  void *found;
  if (!handle) return CUMOE_OK;
  TRY(find_object(OBJECT_PLAN, "plan", handle, &found));
  return retire_object(handle) ? end_plan(found) : find_object(OBJECT_PLAN, "plan", handle, &found);
}

cumoe_status cumoe_plan_workspace(cumoe_plan handle, int64_t tokens, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  workspace_layout layout;
  TRY(find_plan(handle, &plan));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  const int32_t most = INT32_MAX / plan->desc.routing.top_k;
  REQUIRE(tokens >= 0 && tokens <= most, CUMOE_ERR_INVALID_ARGUMENT, "tokens is %lld, must be 0 .. %d (2^31 / top_k)",
          (long long)tokens, (int)most);
  REQUIRE(plan_workspace_layout(&plan->desc, tokens, &layout), CUMOE_ERR_INVALID_ARGUMENT,
          "tokens is %lld: the workspace would exceed 2^62 bytes", (long long)tokens);
  *bytes = layout.bytes;
  return CUMOE_OK;
}

/* ---- forward ---- */

/* A call under way: the caller's arguments, and where every intermediate lies. */
typedef struct pass {
  const struct plan *plan;
  const struct weights *shared; /* of the shared expert, or NULL */
  const cumoe_moe_args *args;
  cumoe_stream stream;
  token_count tokens;
  workspace_layout at;
  char *workspace;
  cumoe_view ids, weights; /* of the routing, wherever it came from */
  route_pointers route;
} pass;

static void *region(const pass *p, size_t offset)
{
  return p->workspace + offset;
}

static cumoe_view_mut or_region(cumoe_view_mut given, const pass *p, size_t offset, cumoe_dtype dtype, int64_t cols)
{
  return given.data ? given : cumoe_matrix_mut(region(p, offset), dtype, p->tokens.count, cols, cols);
}

/* The gate, if ids and weights are not the caller's; where they will be, in any case. */
static gate_args gate_pass(pass *p)
{
  const cumoe_moe_args *a = p->args;
  const cumoe_moe_desc *d = &p->plan->desc;
  const int32_t experts = router_experts(d);
  p->ids = a->ids;
  p->weights = a->weights;
  if (a->ids.data) return (gate_args){0};
  const cumoe_view own = cumoe_matrix(region(p, p->at.logits), CUMOE_F32, p->tokens.count, experts, experts);
  const cumoe_view_mut ids = or_region(a->ids_out, p, p->at.ids, CUMOE_I32, d->routing.top_k);
  const cumoe_view_mut weights = or_region(a->weights_out, p, p->at.weights, CUMOE_F32, d->routing.top_k);
  gate_args g = gate_arguments(p->plan->context, &d->routing, a->router_weight.data ? own : a->logits, a->select_bias,
                               ids, weights);
  g.tokens = p->tokens;
  p->ids = cumoe_const(ids);
  p->weights = cumoe_const(weights);
  return g;
}

/* x -> logits, if they are not the caller's; few_up may want some memory cleared */
static cumoe_status run_router(const pass *p, void *clear, size_t bytes)
{
  const cumoe_moe_args *a = p->args;
  const int32_t experts = router_experts(&p->plan->desc);
  if (!a->router_weight.data) return CUMOE_OK;
  router_args r = router_arguments(a->x, a->router_weight, a->router_bias, p->tokens, region(p, p->at.logits), experts);
  r.protocol.fill = clear;
  r.protocol.fill_vectors = (int32_t)(bytes / 16);
  return dispatch(p->plan->context, OP_router, &r, p->stream);
}

/* logits -> ids and weights, if they are not the caller's */
static cumoe_status run_gate(const pass *p, const gate_args *gate)
{
  return p->args->ids.data ? CUMOE_OK : dispatch(p->plan->context, OP_gate, gate, p->stream);
}

static map_args map_pass(pass *p)
{
  const cumoe_moe_args *a = p->args;
  p->route = (route_pointers){region(p, p->at.counts), region(p, p->at.offsets), region(p, p->at.row_pair),
                              region(p, p->at.slot_row)};
  map_args m = map_arguments(p->plan, p->ids, a->expert_map, p->route, region(p, p->at.hist));
  m.tokens = p->tokens;
  m.counts_out = a->counts_out.data;
  m.load = a->load.data;
  m.protocol.progress = region(p, p->at.progress);
  return m;
}

/* ids -> where each pair's row lies */
static cumoe_status map_rows(pass *p)
{
  const map_args m = map_pass(p);
  return dispatch_map(p->plan->context, &m, p->stream);
}

/* up and down of one weights object; route NULL: the shared expert, where every token is a row */
static cumoe_status run_experts(const pass *p, const struct weights *weights, const route_pointers *route,
                                size_t h_offset, size_t y_offset)
{
  const cumoe_moe_desc *d = &p->plan->desc;
  const bool weigh_input = route && d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  const bool discarded = route && discards_rows(d, p->tokens.count);
  const cumoe_view none = {0};
  gemm_args up = up_arguments(p->plan, weights, p->args->x, route, weigh_input ? p->weights : none);
  up.tokens = p->tokens;
  up.c = region(p, h_offset);
  up.c_ld = weights->inter;
  up.protocol.evict_last = discarded;
  const cumoe_view h = cumoe_matrix(up.c, (cumoe_dtype)d->dtype, up.rows_cap, weights->inter, weights->inter);
  /* The map is behind both; behind up of the routed experts it is the grid before, unless the shared expert lies between. */
  up.protocol.early_inputs = !route || p->shared;
  gemm_args down = down_arguments(p->plan, weights, h, route, p->tokens.count);
  down.protocol.early_inputs = true;
  down.tokens = p->tokens;
  down.c = region(p, y_offset);
  down.c_ld = d->hidden;
  down.protocol.evict_last = discarded;
  if (route) {
    up.protocol.progress = down.protocol.progress = region(p, p->at.progress);
    up.protocol.by_expert = down.protocol.by_expert = dispatch_goes_by_expert(p->plan->context, &up, &down);
    /* An expert's rows: up is the last to read them there, down the first to write. */
    if (dispatch_wants_copy(p->plan->context, &up)) up.protocol.x_copy = down.c;
  }
  TRY(dispatch(p->plan->context, OP_up, &up, p->stream));
  return dispatch(p->plan->context, OP_down, &down, p->stream);
}

static cumoe_status run_shared(const pass *p)
{
  const cumoe_moe_args *a = p->args;
  const cumoe_view none = {0};
  if (!p->shared) return CUMOE_OK;
  TRY(run_experts(p, p->shared, NULL, p->at.shared_h, p->at.shared_y));
  if (!a->shared_gate.data) return CUMOE_OK;
  return dispatch_router(p->plan->context, a->x, a->shared_gate, none, p->tokens, region(p, p->at.shared_logit), 1,
                         p->stream);
}

/* Looking slots up before the wait saves a trip to L2 once a CTA, but goes past L1: for a grid of one wave. (With it, T 8192
 * took 12 to 19 % longer on an H200.) */
enum { EARLY_COMBINE_TOKENS = 64 };

static combine_args combine_pass(const pass *p)
{
  const cumoe_moe_args *a = p->args;
  const cumoe_moe_desc *d = &p->plan->desc;
  const cumoe_dtype dtype = (cumoe_dtype)d->dtype;
  const int64_t tokens = p->tokens.count, rows = tokens * d->routing.top_k, hidden = d->hidden;
  const bool weigh = !(d->flags & CUMOE_MOE_UNREDUCED) || d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  cumoe_combine_args c = {
      .out_scale = a->out_scale, .x = a->x, .residual = a->residual, .device_tokens = a->device_tokens, .out = a->out};
  c.y = cumoe_matrix(region(p, p->at.y), dtype, rows, hidden, hidden);
  if (weigh) c.pair_weights = p->weights;
  if (p->shared) c.shared = cumoe_matrix(region(p, p->at.shared_y), dtype, tokens, hidden, hidden);
  if (a->shared_gate.data) c.shared_logit = cumoe_matrix(region(p, p->at.shared_logit), CUMOE_F32, tokens, 1, 1);
  combine_args raw = combine_arguments(p->plan, p->route.slot_row, &c, tokens);
  raw.protocol.early_inputs = tokens <= EARLY_COMBINE_TOKENS;
  return raw;
}

/* h and y are the workspace's, and combine is the last to want them. */
static void give_up_rows(const pass *p, combine_args *combine)
{
  const cumoe_moe_desc *d = &p->plan->desc;
  if (!discards_rows(d, p->tokens.count)) return;
  combine->protocol.discard_h = region(p, p->at.h);
  combine->protocol.discard_h_row = d->inter * (int64_t)cumoe_dtype_bytes((cumoe_dtype)d->dtype);
}

static cumoe_status combine_rows(const pass *p)
{
  combine_args raw = combine_pass(p);
  give_up_rows(p, &raw);
  return dispatch(p->plan->context, OP_combine, &raw, p->stream);
}

/* Few tokens: one grid for map, up, down and combine, and often for the gate, or two if there is no router ahead, which
 * fills with ones what the CTAs tell each other through. */
static void link_few(const pass *p, const gate_args *gate, few_args *few)
{
  if (!p->args->router_weight.data || !dispatch_few_in_one(p->plan->context)) return;
  uint64_t *words = region(p, p->at.few_words);
  few->protocol.tickets = (int32_t *)(words + few->up.rows_cap);
  if (!dispatch_few_up_gates(p->plan->context, gate)) return;
  few->protocol.weights = words;
  few->gate = *gate;
}

static few_args few_arguments(pass *p, const struct weights *weights, const gate_args *gate)
{
  const cumoe_moe_desc *d = &p->plan->desc;
  const cumoe_view none = {0};
  few_args few = {.map = map_pass(p)};
  few.up = up_arguments(p->plan, weights, p->args->x, &p->route, none);
  few.up.c = region(p, p->at.h);
  few.up.c_ld = weights->inter;
  const cumoe_view h = cumoe_matrix(few.up.c, (cumoe_dtype)d->dtype, few.up.rows_cap, weights->inter, weights->inter);
  few.down = down_arguments(p->plan, weights, h, &p->route, p->tokens.count);
  few.out = combine_pass(p);
  link_few(p, gate, &few);
  return few;
}

static bool takes_few(pass *p, const struct weights *weights, const gate_args *gate, few_args *few)
{
  const cumoe_moe_desc *d = &p->plan->desc;
  if (p->tokens.count > FEW_TOKENS) return false; /* first: for many tokens nothing is filled in or looked up */
  if (d->flags & CUMOE_MOE_UNREDUCED || d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT) return false;
  *few = few_arguments(p, weights, gate);
  return dispatch_wants_few(p->plan->context, few);
}

static cumoe_status run_few(const pass *p, const gate_args *gate, const few_args *few)
{
  TRY(run_router(p, few->up.c, few->protocol.tickets ? p->at.few_fill : 0));
  if (!few->protocol.weights) TRY(run_gate(p, gate));
  TRY(run_shared(p));
  TRY(dispatch(p->plan->context, OP_few_up, few, p->stream));
  return few->protocol.tickets ? CUMOE_OK : dispatch(p->plan->context, OP_few_down, few, p->stream);
}

static cumoe_status run(pass *p, const struct weights *weights)
{
  const gate_args gate = gate_pass(p);
  few_args few;
  if (takes_few(p, weights, &gate, &few)) return run_few(p, &gate, &few);
  TRY(run_router(p, NULL, 0));
  TRY(run_gate(p, &gate));
  TRY(map_rows(p));
  TRY(run_shared(p));
  TRY(run_experts(p, weights, &p->route, p->at.h, p->at.y));
  return combine_rows(p);
}

cumoe_status cumoe_moe_forward(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  cumoe_moe_args a;
  layer with;
  TRY(take_struct("args", args, &a));
  TRY(check_forward(plan, weights, &a, &with));
  if (a.x.rows == 0) return CUMOE_OK;
  pass p = {.plan = with.plan,
            .shared = with.shared,
            .args = &a,
            .stream = stream,
            .tokens = {a.x.rows, a.device_tokens.data},
            .workspace = a.workspace.data};
  (void)plan_workspace_layout(&with.plan->desc, a.x.rows, &p.at);
  device_scope scope;
  TRY(enter_device(with.plan->context, &scope));
  const cumoe_status status = run(&p, with.weights);
  leave_device(&scope);
  return status;
}
