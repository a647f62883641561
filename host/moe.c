/* The layer: its plan, its workspace, and the forward pass in a straight line. */
#include "arguments.h"
#include "check.h"
#include "context.h"
#include "debug.h"
#include "dispatch.h"
#include "objects.h"
#include "status.h"
#include "tmap.h"

#include <math.h>
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

static double activated(int32_t act, double g)
{
  switch (act) {
  case CUMOE_ACT_SILU: return g / (1 + exp(-g));
  case CUMOE_ACT_GELU_ERF: return .5 * g * erfc(-.70710678118654752440 * g);
  case CUMOE_ACT_GELU_TANH: return g / (1 + exp(-1.59576912160573071176 * (g + .044715 * g * g * g)));
  case CUMOE_ACT_RELU2: return g * g;
  default: return g;
  }
}

/* The bound of g: with LIMIT_AFTER the g from which on act(g) is past the limit, as all of them grow from 0 on. */
static float gate_limit_of(const cumoe_moe_desc *d)
{
  if (!(d->act_limit > 0)) return INFINITY;
  if (!(d->flags & CUMOE_MOE_LIMIT_AFTER)) return d->act_limit;
  double low = 0, high = (double)d->act_limit + 1;
  for (int i = 0; i < 64; ++i) {
    const double middle = .5 * (low + high);
    if (activated(d->act, middle) < (double)d->act_limit)
      low = middle;
    else
      high = middle;
  }
  return (float)high;
}

static cumoe_status end_plan(void *plan)
{
  free(plan);
  return CUMOE_OK;
}

static cumoe_status end_plans(struct context *context)
{
  return retire_objects(OBJECT_PLAN, context, end_plan);
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
  *p = (struct plan){context, d, gate_limit_of(&d)};
  on_close(context, CLOSE_PLANS, end_plans);
  watch_leaks(context);
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
  return CUMOE_OK;
}

cumoe_status drop_plan(cumoe_plan handle)
{
  void *found;
  if (!handle) return CUMOE_OK;
  TRY(find_object(OBJECT_PLAN, "plan", handle, &found));
  return retire_object(handle) ? end_plan(found) : find_object(OBJECT_PLAN, "plan", handle, &found);
}

cumoe_status cumoe_plan_destroy(cumoe_plan handle)
{
  begin_call(__func__);
  return drop_plan(handle);
}

cumoe_status cumoe_plan_workspace(cumoe_plan handle, int64_t tokens, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  workspace_layout layout;
  TRY(find_plan(handle, &plan));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(check_tokens("tokens", tokens, 0, plan->desc.routing.top_k));
  TRY(check_layout("tokens", plan, tokens, &layout));
  *bytes = layout.bytes;
  return CUMOE_OK;
}

/* ---- forward: the checks ---- */

bool is_chosen(const cumoe_moe_args *a)
{
  return !absent(&a->ids) && absent(&a->weights) && !(absent(&a->router_weight) && absent(&a->logits));
}

bool is_routed(const cumoe_moe_args *a)
{
  return a->ids.data && !is_chosen(a);
}

static cumoe_status check_router_operands(const struct plan *plan, const cumoe_moe_args *a)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t experts = router_experts(d), own_hidden = a->router_weight.cols;
  const uint32_t own = DTYPE_BIT(d->dtype), f32 = DTYPE_BIT(CUMOE_F32);
  const bool own_x = !absent(&a->router_x);
  const operand weight = {"args.router_weight", experts, own_x ? own_hidden : d->hidden, own | f32, 16},
                bias = {"args.router_bias", 1, experts, own | f32, 0},
                x = {"args.router_x", a->x.rows, own_hidden, own, 16};
  TRY(check_operand(plan->context, &weight, a->router_weight));
  TRY(check_optional(plan->context, &bias, a->router_bias));
  if (!own_x) return CUMOE_OK;
  REQUIRE(own_hidden >= 8 && own_hidden % 8 == 0 && own_hidden <= INT32_MAX / 2, CUMOE_ERR_INVALID_ARGUMENT,
          "args.router_weight.cols is %lld, must be a positive multiple of 8", (long long)own_hidden);
  return check_operand(plan->context, &x, a->router_x);
}

/* What comes beside logits, or ids where the caller chose. */
static cumoe_status check_gate_operands(const struct plan *plan, const cumoe_moe_args *a)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t tokens = a->x.rows, experts = router_experts(d), k = d->routing.top_k;
  const uint32_t f32 = DTYPE_BIT(CUMOE_F32);
  const bool mixes = d->routing.score == CUMOE_SCORE_SPARSEMIXER;
  const operand logits = {"args.logits", tokens, experts, FLOAT_BITS, 0}, ids = {"args.ids", tokens, k, INDEX_BITS, 0};
  const operand select_bias = {"args.select_bias", 1, experts - d->routing.always_experts, f32, 0},
                expert_scale = {"args.expert_scale", 1, experts, f32, 0};
  TRY(check_optional(plan->context, &logits, a->logits));
  TRY(check_optional(plan->context, &select_bias, a->select_bias));
  TRY(check_optional(plan->context, &expert_scale, a->expert_scale));
  if (mixes) TRY(check_absent("args.select_bias", a->select_bias, "the score is SPARSEMIXER"));
  if (!is_chosen(a)) return CUMOE_OK;
  TRY(check_absent("args.select_bias", a->select_bias, "the caller has chosen"));
  TRY(check_absent("args.ids_out", cumoe_const(a->ids_out), "the caller has chosen"));
  return check_operand(plan->context, &ids, a->ids);
}

static cumoe_status check_routed(const struct plan *plan, const cumoe_moe_args *a)
{
  const int64_t tokens = a->x.rows, k = plan->desc.routing.top_k;
  const operand ids = {"args.ids", tokens, k, INDEX_BITS, 0},
                weights = {"args.weights", tokens, k, DTYPE_BIT(CUMOE_F32), 0};
  TRY(check_operand(plan->context, &ids, a->ids));
  TRY(check_operand(plan->context, &weights, a->weights));
  TRY(check_absent("args.select_bias", a->select_bias, "the caller has routed"));
  TRY(check_absent("args.expert_scale", a->expert_scale, "the caller has routed"));
  TRY(check_absent("args.ids_out", cumoe_const(a->ids_out), "the caller has routed"));
  return check_absent("args.weights_out", cumoe_const(a->weights_out), "the caller has routed");
}

static cumoe_status check_routing_inputs(const struct plan *plan, const cumoe_moe_args *a)
{
  const cumoe_moe_desc *d = &plan->desc;
  const operand expert_map = {"args.expert_map", 1, d->num_experts, DTYPE_BIT(CUMOE_I32), 0};
  const bool from_x = !absent(&a->router_weight),
             from_ids = (!absent(&a->ids) || !absent(&a->weights)) && !is_chosen(a);
  const bool from_logits = !absent(&a->logits) || (!from_x && !from_ids && a->x.rows == 0);
  REQUIRE(from_x + from_logits + from_ids == 1, CUMOE_ERR_INVALID_ARGUMENT,
          "exactly one of args.router_weight, args.logits and args.ids + args.weights must be given");
  if (!from_x) TRY(check_absent("args.router_bias", a->router_bias, "there is no router_weight"));
  if (!from_x) TRY(check_absent("args.router_x", a->router_x, "there is no router_weight"));
  if (from_x) TRY(check_router_operands(plan, a));
  TRY(from_ids ? check_routed(plan, a) : check_gate_operands(plan, a));
  REQUIRE(d->local_experts == d->num_experts || !absent(&a->expert_map), CUMOE_ERR_INVALID_ARGUMENT,
          "args.expert_map is absent, but only %d of %d experts are local", (int)d->local_experts, (int)d->num_experts);
  return check_optional(plan->context, &expert_map, a->expert_map);
}

static cumoe_status check_shared(const struct plan *plan, const cumoe_moe_args *a, const struct weights **shared)
{
  const cumoe_moe_desc *d = &plan->desc;
  if (d->shared_inter == 0) {
    REQUIRE(!a->shared, CUMOE_ERR_INVALID_ARGUMENT, "args.shared is given, desc.shared_inter is 0");
    return check_absent("args.shared_gate", a->shared_gate, "there is no shared expert");
  }
  const operand gate = {"args.shared_gate", 1, d->hidden, DTYPE_BIT(d->dtype) | DTYPE_BIT(CUMOE_F32), 16};
  TRY(find_weights("args.shared", a->shared, plan, true, shared));
  return check_optional(plan->context, &gate, a->shared_gate);
}

static cumoe_status check_outputs(const struct plan *plan, const cumoe_moe_args *a)
{
  const cumoe_moe_desc *d = &plan->desc;
  const int64_t tokens = a->x.rows, k = d->routing.top_k;
  const bool unreduced = d->flags & CUMOE_MOE_UNREDUCED;
  const uint32_t out_type = DTYPE_BIT(d->out_dtype);
  const operand out = {"args.out", unreduced ? tokens * k : tokens, d->hidden, out_type, 16},
                residual = {"args.residual", tokens, d->hidden, out_type, 16};
  const operand ids_out = {"args.ids_out", tokens, k, INDEX_BITS, 0},
                weights_out = {"args.weights_out", tokens, k, DTYPE_BIT(CUMOE_F32), 0};
  const operand counts_out = {"args.counts_out", 1, d->local_experts, DTYPE_BIT(CUMOE_I32), 0},
                load = {"args.load", 1, d->local_experts, DTYPE_BIT(CUMOE_I64), 0};
  TRY(check_operand(plan->context, &out, cumoe_const(a->out)));
  TRY(check_rows_or_one(plan->context, &residual, a->residual));
  if (unreduced) TRY(check_absent("args.residual", a->residual, "the plan is UNREDUCED"));
  TRY(check_optional(plan->context, &ids_out, cumoe_const(a->ids_out)));
  TRY(check_optional(plan->context, &weights_out, cumoe_const(a->weights_out)));
  TRY(check_optional(plan->context, &counts_out, cumoe_const(a->counts_out)));
  TRY(check_optional(plan->context, &load, cumoe_const(a->load)));
  return CUMOE_OK;
}

cumoe_status check_layer_overlaps(const cumoe_moe_args *a, const layer_operands *with)
{
  const named_view views[] = {
      LAYER_OUTPUTS(a), LAYER_INPUTS(a), {"args.residual", unless_in_place(a->residual, a->out)}};
  TRY(check_off_weights(views, LAYER_OUTPUT_COUNT, "weights", with->weights));
  if (with->shared) TRY(check_off_weights(views, LAYER_OUTPUT_COUNT, "args.shared", with->shared));
  return check_overlaps(views, LAYER_OUTPUT_COUNT, sizeof views / sizeof *views);
}

cumoe_status check_layer_workspace(const struct plan *plan, const cumoe_moe_args *a)
{
  workspace_layout layout;
  TRY(check_layout("args.x.rows", plan, a->x.rows, &layout));
  return check_workspace_view(plan->context, "args.workspace", cumoe_const(a->workspace), layout.bytes);
}

cumoe_status check_layer_operands(const struct plan *plan, cumoe_weights weights, const cumoe_moe_args *a,
                                  layer_operands *with)
{
  *with = (layer_operands){.plan = plan};
  const cumoe_moe_desc *d = &plan->desc;
  TRY(find_weights("weights", weights, plan, false, &with->weights));
  REQUIRE(a->flags == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.flags is %#x, must be 0", (unsigned)a->flags);
  REQUIRE(a->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.reserved is %d, must be 0", (int)a->reserved);
  TRY(check_tokens("args.x.rows", a->x.rows, 0, d->routing.top_k));
  const operand x = {"args.x", a->x.rows, d->hidden, DTYPE_BIT(d->dtype), 16};
  TRY(check_finite("args.out_scale", a->out_scale));
  TRY(check_counted(plan->context, &x, a->x));
  TRY(check_device_tokens(plan->context, "args.device_tokens", a->device_tokens));
  TRY(check_routing_inputs(plan, a));
  TRY(check_shared(plan, a, &with->shared));
  return check_outputs(plan, a);
}

static cumoe_status check_forward(cumoe_plan handle, cumoe_weights weights, const cumoe_moe_args *a,
                                  layer_operands *with)
{
  const struct plan *plan;
  TRY(find_plan(handle, &plan));
  TRY(check_layer_operands(plan, weights, a, with));
  TRY(check_layer_workspace(plan, a));
  return check_layer_overlaps(a, with);
}

/* Of a call whose arguments need no look: the objects alone, which may have ended. */
static cumoe_status find_operands(cumoe_plan handle, cumoe_weights weights, layer_operands *with)
{
  const struct plan *plan;
  TRY(find_plan(handle, &plan));
  *with = (layer_operands){.plan = plan};
  return find_weights("weights", weights, plan, false, &with->weights);
}

/* ---- forward: where everything lies ---- */

/* A call under way: the caller's arguments, what will be launched, and where every intermediate lies. */
typedef struct forward {
  const struct plan *plan;
  const struct weights *shared; /* of the shared expert, or NULL */
  const cumoe_moe_args *args;
  layer_plan lp;
  token_count tokens;
  char *workspace;
  cumoe_view ids, weights; /* of the routing, wherever it came from */
  route_pointers route;
} forward;

static void *region(const forward *p, size_t offset)
{
  return p->workspace + offset;
}

static cumoe_view or_region(cumoe_view_mut given, const forward *p, size_t offset, cumoe_dtype dtype, int64_t cols)
{
  return cumoe_const(given.data ? given : cumoe_matrix_mut(region(p, offset), dtype, p->tokens.count, cols, cols));
}

static void locate(forward *p)
{
  const cumoe_moe_args *a = p->args;
  const workspace_layout *at = &p->lp.at;
  const int32_t k = p->plan->desc.routing.top_k;
  p->ids = a->ids.data ? a->ids : or_region(a->ids_out, p, at->ids, CUMOE_I32, k);
  p->weights = is_routed(a) ? a->weights : or_region(a->weights_out, p, at->weights, CUMOE_F32, k);
  p->route = route_in(p->workspace, &at->route);
}

/* ---- forward: arguments of each stage ---- */

typedef struct layer_arguments {
  mapped_args router, shared_gate, up, down, shared_up, shared_down;
  few_sm90_args few;
  gate_args gate;
  map_args map;
  quantize_args x, h, shared_x, shared_h;
  combine_args combine;
} layer_arguments;

static mapped_args *mapped_of(layer_arguments *l, stage s)
{
  switch (s) {
  case STAGE_router: return &l->router;
  case STAGE_shared_gate: return &l->shared_gate;
  case STAGE_up: return &l->up;
  case STAGE_down: return &l->down;
  case STAGE_shared_up: return &l->shared_up;
  case STAGE_shared_down: return &l->shared_down;
  default: return NULL;
  }
}

static const void *arguments_of(layer_arguments *l, stage s)
{
  switch (s) {
  case STAGE_gate: return &l->gate;
  case STAGE_map_count:
  case STAGE_map: return &l->map;
  case STAGE_quantize_x:
  case STAGE_arrange_x: return &l->x;
  case STAGE_quantize_h: return &l->h;
  case STAGE_shared_quantize_x: return &l->shared_x;
  case STAGE_shared_quantize_h: return &l->shared_h;
  case STAGE_combine: return &l->combine;
  case STAGE_few_up:
  case STAGE_few_down: return &l->few;
  default: return mapped_of(l, s);
  }
}

static map_args map_pass(const forward *p)
{
  map_args m = layer_map(p->plan, p->args, p->ids, p->route, region(p, p->lp.at.hist));
  m.protocol.progress = region(p, p->lp.at.progress);
  return m;
}

/* up and down of one weights object; route NULL: the shared expert, where every token is a row. */
static void experts_pass(const forward *p, const struct weights *weights, const route_pointers *route, gemm_args *up,
                         gemm_args *down)
{
  const cumoe_moe_desc *d = &p->plan->desc;
  const bool weigh_input = route && d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT;
  const cumoe_view none = {0};
  *up = up_arguments(p->plan, weights, p->args->x, route, weigh_input ? p->weights : none);
  up->tokens = p->tokens;
  up->c = region(p, route ? p->lp.at.h : p->lp.at.shared_h);
  up->c_ld = weights->inter;
  const cumoe_view h = cumoe_matrix(up->c, (cumoe_dtype)d->dtype, up->rows_cap, weights->inter, weights->inter);
  *down = down_arguments(p->plan, weights, h, route, p->tokens.count);
  down->tokens = p->tokens;
  down->c = region(p, route ? p->lp.at.y : p->lp.at.shared_y);
  down->c_ld = d->hidden;
}

/* Rows of the route: its last offset says how many. */
static token_count rows_of_route(const forward *p, int64_t cap)
{
  return (token_count){cap, p->route.offsets + p->plan->desc.local_experts};
}

/* The router lies ahead of those that make codes of x, and has waited for all before: they need not. */
static bool router_is_ahead(const forward *p)
{
  return p->lp.steps[STAGE_router].row >= 0;
}

static void quantize_routed(const forward *p, const struct weights *w, layer_arguments *l)
{
  const workspace_layout *at = &p->lp.at;
  gemm_args *up = &l->up.gemm.g, *down = &l->down.gemm.g;
  const token_count rows = rows_of_route(p, down->rows_cap);
  l->x = quantize_arguments(p->plan, up, w->up_order.by_expert ? rows : p->tokens, &w->up_order, region(p, at->x_codes),
                            region(p, at->x_scale));
  l->x.early_inputs = router_is_ahead(p);
  l->h = quantize_arguments(p->plan, down, rows, &w->down_order, region(p, at->h_codes), region(p, at->h_scale));
}

/* Rows that the plan brings into fixed point first; `codes` may be where they are. */
static void fix_rows(const forward *p, stage at, gemm_args *g, token_count rows, void *codes, size_t scale,
                     quantize_args *q)
{
  static const row_order in_order;
  const int32_t row = p->lp.steps[at].row;
  if (row < 0 || variants[row].form != FORM_fixed) return;
  g->rows = (row_format){.mode = ROWS_FIXED, .element = variants[row].y, .group = FIXED_GROUP};
  *q = quantize_arguments(p->plan, g, rows, &in_order, codes, region(p, scale));
}

/* Up makes what the quantize between it and down would. */
static void code_h(const forward *p, layer_arguments *l)
{
  const quantize_args *h = &l->h;
  if (!p->lp.codes_h) return;
  gemm_sm90_args *up = &l->up.gemm;
  up->g.c = h->codes;
  up->g.c_ld = h->codes_ld;
  up->g.dtype = h->format.element;
  up->c_scale = h->scale;
  up->c_scale_ld = h->scale_ld;
  up->c_static_scale = h->format.static_scale;
  up->c_mode = h->format.mode;
  up->c_power_of_two = h->format.power_of_two;
}

/* x goes where y will be, h stays where it is. */
static void fix_routed(const forward *p, layer_arguments *l)
{
  const workspace_layout *at = &p->lp.at;
  gemm_args *up = &l->up.gemm.g, *down = &l->down.gemm.g;
  fix_rows(p, STAGE_arrange_x, up, p->tokens, region(p, at->y), at->x_scale, &l->x);
  fix_rows(p, STAGE_quantize_h, down, rows_of_route(p, down->rows_cap), (void *)down->a, at->h_scale, &l->h);
}

static void quantize_shared(const forward *p, layer_arguments *l)
{
  const workspace_layout *at = &p->lp.at;
  l->shared_x = quantize_arguments(p->plan, &l->shared_up.gemm.g, p->tokens, &p->shared->up_order,
                                   region(p, at->shared_x_codes), region(p, at->shared_x_scale));
  l->shared_x.early_inputs = router_is_ahead(p);
  l->shared_h = quantize_arguments(p->plan, &l->shared_down.gemm.g, p->tokens, &p->shared->down_order,
                                   region(p, at->shared_h_codes), region(p, at->shared_h_scale));
}

/* How the kernels of a routed layer work together: kernels/protocol.h. */
static void link_experts(const forward *p, gemm_args *up, gemm_args *down)
{
  const layer_plan *lp = &p->lp;
  /* The map is behind both: it is the grid before up, unless something lies between. */
  up->protocol.early_inputs = p->shared != NULL || lp->steps[STAGE_arrange_x].row >= 0;
  down->protocol.early_inputs = true;
  up->protocol.progress = down->protocol.progress = region(p, lp->at.progress);
  up->protocol.by_expert = down->protocol.by_expert = lp->by_expert;
  up->protocol.evict_last = down->protocol.evict_last = lp->discards_rows;
  /* An expert's rows: up is the last to read them there, down the first to write. Of codes: plan.c. */
  if (lp->copies_rows) up->protocol.x_copy = up->rows.mode == ROWS_AS_THEY_ARE ? down->c : region(p, lp->at.x_copy);
}

static combine_args combine_pass(const forward *p)
{
  const workspace_layout *at = &p->lp.at;
  return layer_combine(p->plan, p->args, at, p->route.slot_row, p->weights, region(p, at->shared_logit));
}

static void routed_pass(const forward *p, const struct weights *weights, layer_arguments *l)
{
  const cumoe_moe_desc *d = &p->plan->desc;
  l->map = map_pass(p);
  experts_pass(p, weights, &p->route, &l->up.gemm.g, &l->down.gemm.g);
  link_experts(p, &l->up.gemm.g, &l->down.gemm.g);
  quantize_routed(p, weights, l);
  code_h(p, l);
  fix_routed(p, l);
  l->combine = combine_pass(p);
  l->combine.protocol.early_inputs = p->lp.combine_looks_ahead;
  if (!p->lp.discards_rows) return;
  l->combine.protocol.discard_h = l->up.gemm.g.c;
  l->combine.protocol.discard_h_row = d->inter * (int64_t)cumoe_dtype_bytes((cumoe_dtype)l->up.gemm.g.dtype);
}

static void link_dealt(const forward *p, few_sm90_args *few)
{
  const workspace_layout *at = &p->lp.at;
  for (int i = 0; i < 2; ++i) {
    const cut_layout *c = &at->cut[i];
    few->cut[i] = (dealt_cut){region(p, c->parts), region(p, c->small), {c->part_k[0], c->part_k[1]}, c->last};
  }
  few->items = region(p, at->few_items);
  few->columns = at->dealt_columns;
}

/* One grid does all: the router fills what its CTAs tell each other through. */
static void link_few(const forward *p, layer_arguments *l)
{
  const workspace_layout *at = &p->lp.at;
  few_args *few = &l->few.f;
  uint64_t *words = region(p, at->few_words);
  few->protocol.tickets = (int32_t *)(words + few->up.rows_cap);
  l->router.router.r.protocol.fill = region(p, at->h);
  const bool dealt = variants[p->lp.steps[STAGE_few_up].row].form == FORM_dealt;
  if (dealt) link_dealt(p, &l->few);
  l->router.router.r.protocol.fill_vectors = (int32_t)((dealt ? at->dealt_fill : at->few_fill) / 16);
  if (!p->lp.few_gates) return;
  few->protocol.weights = words;
  few->gate = l->gate;
}

static void few_pass(const forward *p, const struct weights *weights, layer_arguments *l)
{
  few_args *few = &l->few.f;
  *few = (few_args){.map = map_pass(p), .out = combine_pass(p)};
  experts_pass(p, weights, &p->route, &few->up, &few->down);
  few->out.protocol.early_inputs = p->lp.combine_looks_ahead;
  if (p->lp.few_in_one) link_few(p, l);
}

static bool runs_before(const forward *p, stage at)
{
  for (stage s = 0; s < at; ++s)
    if (p->lp.steps[s].row >= 0) return true;
  return false;
}

static void shared_pass(const forward *p, layer_arguments *l)
{
  const cumoe_moe_args *a = p->args;
  const cumoe_view none = {0};
  experts_pass(p, p->shared, NULL, &l->shared_up.gemm.g, &l->shared_down.gemm.g);
  quantize_shared(p, l);
  /* Of few tokens whose ids the caller has it is the first grid of all: what the caller ran before may have written its
   * operands. */
  l->shared_up.gemm.g.protocol.early_inputs = runs_before(p, STAGE_shared_up);
  l->shared_down.gemm.g.protocol.early_inputs = true;
  if (a->shared_gate.data)
    l->shared_gate.router.r =
        router_arguments(a->x, a->shared_gate, none, p->tokens, region(p, p->lp.at.shared_logit), 1);
}

static void fill(const forward *p, const struct weights *weights, layer_arguments *l)
{
  const cumoe_moe_args *a = p->args;
  float *logits = region(p, p->lp.at.logits);
  if (a->router_weight.data) l->router.router.r = layer_router(p->plan, a, logits);
  if (!is_routed(a)) l->gate = layer_gate(p->plan, a, logits, p->ids, p->weights);
  if (p->lp.few)
    few_pass(p, weights, l);
  else
    routed_pass(p, weights, l);
  if (p->shared) shared_pass(p, l);
}

/* ---- forward: the launches ---- */

static bool serves_router(const cumoe_moe_args *a)
{
  const cumoe_view x = router_input(a);
  return tmap_serves_views(&x, &a->router_weight);
}

static layer_call call_of(const layer_operands *with, const cumoe_moe_args *a)
{
  layer_call c = {.tokens = a->x.rows,
                  .up = with->weights->up_facts,
                  .down = with->weights->down_facts,
                  .has_router = a->router_weight.data != NULL,
                  .has_map = a->expert_map.data != NULL,
                  .has_ids = is_routed(a),
                  .has_chosen = is_chosen(a),
                  .logits_f32 = a->logits.data == NULL || a->logits.dtype == CUMOE_F32,
                  .has_expert_scale = a->expert_scale.data != NULL,
                  .has_select_bias = a->select_bias.data != NULL,
                  .has_shared = with->shared != NULL,
                  .has_shared_gate = a->shared_gate.data != NULL};
  if (c.has_router)
    c.router_dtype = a->router_weight.dtype, c.router_tmap = serves_router(a),
    c.router_hidden = (int32_t)a->router_weight.cols;
  if (c.has_shared) c.shared_up = with->shared->up_facts, c.shared_down = with->shared->down_facts;
  if (c.has_shared_gate)
    c.shared_gate_dtype = a->shared_gate.dtype, c.shared_gate_tmap = tmap_serves_views(&a->x, &a->shared_gate);
  return c;
}

/* What a router would do for a few_up that does all. */
static cumoe_status fill_words(const router_protocol *p, cumoe_stream stream)
{
  TRY_CUDA(cudaMemsetAsync(p->fill, 0xff, (size_t)p->fill_vectors * 16, stream));
  return CUMOE_OK;
}

/* Dense weights at a constant distance. */
static bool cuts_columns(const gemm_args *g)
{
  return !format_is_scaled((weight_format)g->b.format) && !g->b.table[0];
}

/* Outputs first .. of down alone. Units that are drawn are so once (PROGRESS_DOWN_TICKETS). */
static void cut_columns(gemm_args *g, int32_t first, int32_t columns)
{
  if (first > 0) g->protocol.by_expert = false;
  expert_matrix *b = &g->b;
  b->base[0] = (const char *)b->base[0] + format_bytes((weight_format)b->format, first * b->n_stride);
  if (b->bias[0])
    b->bias[0] =
        (const char *)b->bias[0] + first * b->bias_n_stride * (int64_t)cumoe_dtype_bytes((cumoe_dtype)b->bias_dtype);
  g->c = (char *)g->c + first * (int64_t)cumoe_dtype_bytes((cumoe_dtype)g->dtype);
  g->n = columns;
}

static bool is_among(stage s, uint32_t parts)
{
  const uint32_t part = s == STAGE_map_count || s == STAGE_map ? LAYER_MAP : s <= STAGE_up ? LAYER_UP : LAYER_DOWN;
  return parts == 0 || parts & part;
}

static bool is_callers(stage s, const layer_ends *ends)
{
  return (s == STAGE_combine && ends->combines) || (s == STAGE_few_up && ends->fews);
}

/* Whatever may fail but the launches themselves comes before the first of them. */
static cumoe_status run(const forward *p, const struct weights *weights, cumoe_stream stream, layer_ends *ends)
{
  struct context *context = p->plan->context;
  layer_arguments l;
  fill(p, weights, &l);
  ends->combines = ends->returns && p->lp.steps[STAGE_combine].row >= 0;
  if (ends->combines) ends->combine = l.combine;
  const launch_step *few = &p->lp.steps[STAGE_few_up];
  ends->fews = p->lp.few_in_one && few->row + 1 == ends->few_row;
  if (ends->fews) *ends->few = l.few.f, ends->few_grid = few->grid;
  ends->cuts = ends->columns && !p->lp.few && cuts_columns(&l.down.gemm.g);
  if (ends->cuts) cut_columns(&l.down.gemm.g, ends->first, ends->columns);
  for (stage s = 0; s < STAGE_COUNT; ++s)
    if (is_among(s, ends->parts) && mapped_of(&l, s)) TRY(encode_maps(context, &p->lp.steps[s], mapped_of(&l, s)));
  TRY(encode_few_maps(context, &p->lp.steps[STAGE_few_up], &l.few));
  if (p->lp.few_fills) TRY(fill_words(&l.router.router.r.protocol, stream));
  for (stage s = 0; s < STAGE_COUNT; ++s) {
    const launch_step step = p->lp.steps[s];
    if (step.row < 0 || !is_among(s, ends->parts) || is_callers(s, ends)) continue;
    TRY(launch(context, &step, arguments_of(&l, s), stream));
  }
  return CUMOE_OK;
}

/* All of it, or in `rest` without some SMs. */
static const machine *spare(const machine *all, int32_t sms, machine *rest)
{
  if (sms == 0) return all;
  *rest = *all;
  rest->sms -= sms;
  return rest;
}

/* `a` is args, filled in, to which `p` points. */
static cumoe_status prepare(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args, const layer_ends *ends,
                            cumoe_moe_args *a, layer_operands *with, forward *p)
{
  TRY(take_struct("args", args, a));
  TRY(ends->checked ? find_operands(plan, weights, with) : check_forward(plan, weights, a, with));
  if (a->x.rows == 0) return CUMOE_OK;
  struct context *context = with->plan->context;
  layer_call call = call_of(with, a);
  call.filled = ends->filled;
  call.rank_tokens = ends->rank_tokens;
  machine rest;
  const machine *m = spare(&context->machine, ends->spared, &rest);
  *p = (forward){.plan = with->plan,
                 .shared = with->shared,
                 .args = a,
                 .lp = plan_layer(m, &with->plan->desc, &call),
                 .tokens = tokens_of_layer(a),
                 .workspace = a->workspace.data};
  TRY(check_layer_plan(context, &p->lp));
  locate(p);
  return CUMOE_OK;
}

cumoe_status forward_between(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args, cumoe_stream stream,
                             layer_ends *ends)
{
  cumoe_moe_args a;
  layer_operands with;
  forward p;
  ends->combines = ends->fews = false;
  TRY(prepare(plan, weights, args, ends, &a, &with, &p));
  if (a.x.rows == 0) return CUMOE_OK;
  ON_DEVICE(with.plan->context, run(&p, with.weights, stream, ends));
}

cumoe_status find_fill(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args, const layer_ends *ends,
                       void **fill, int32_t *vectors)
{
  cumoe_moe_args a;
  layer_operands with;
  forward p;
  *vectors = 0;
  TRY(prepare(plan, weights, args, ends, &a, &with, &p));
  if (a.x.rows == 0 || !p.lp.few_in_one) return CUMOE_OK;
  *fill = region(&p, p.lp.at.h);
  *vectors = (int32_t)(p.lp.at.few_fill / 16);
  return CUMOE_OK;
}

cumoe_status cumoe_moe_forward(cumoe_plan plan, cumoe_weights weights, const cumoe_moe_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  layer_ends none = {0};
  return forward_between(plan, weights, args, stream, &none);
}
