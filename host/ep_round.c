/* An exchange: a straight line of the layer's stages and moves between ranks, by the caller's stream. */
#include "arguments.h"
#include "context.h"
#include "dispatch.h"
#include "ep_round.h"
#include "plan.h"

/* ---- one exchange: what its parts have in common ---- */

/* This round's rows of a view that has a row a token. */
static cumoe_view part(const ep_round *r, cumoe_view v)
{
  if (!v.data) return v;
  v.data = (const char *)v.data + r->first * v.ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  v.rows = r->tokens;
  return v;
}

static cumoe_view_mut part_mut(const ep_round *r, cumoe_view_mut v)
{
  if (v.data) v.data = (char *)v.data + r->first * v.ld * (int64_t)cumoe_dtype_bytes((cumoe_dtype)v.dtype);
  v.rows = r->tokens;
  return v;
}

static cumoe_view_mut or_region(const ep_round *r, cumoe_view_mut given, size_t offset, cumoe_dtype dtype, int64_t cols)
{
  return given.data ? part_mut(r, given) : cumoe_matrix_mut(ep_region(r->c, offset), dtype, r->tokens, cols, cols);
}

static cumoe_view_mut own_logits(const ep_round *r)
{
  const int32_t experts = router_experts(&r->c->g->plan.desc);
  return cumoe_matrix_mut(ep_region(r->c, r->c->at.logits), CUMOE_F32, r->tokens, experts, experts);
}

/* Where ids and weights of this round's tokens are, wherever they come from. */
static void locate_routing(ep_round *r)
{
  const ep_call *c = r->c;
  const cumoe_moe_args *a = &c->layer;
  const int32_t k = c->g->shape.top_k;
  const bool from_x = a->router_weight.data != NULL, from_logits = a->logits.data != NULL;
  r->ids = part(r, a->ids);
  r->weights = part(r, a->weights);
  r->gated = from_x || from_logits;
  if (!r->gated) return;
  r->gate = (cumoe_gate_args){.size = sizeof r->gate,
                              .routing = c->g->plan.desc.routing,
                              .logits = from_x ? cumoe_const(own_logits(r)) : part(r, a->logits),
                              .select_bias = a->select_bias,
                              .expert_scale = a->expert_scale,
                              .chosen = r->ids,
                              .device_tokens = r->present,
                              .weights = or_region(r, a->weights_out, c->at.weights, CUMOE_F32, k)};
  r->weights = cumoe_const(r->gate.weights);
  if (a->ids.data) return;
  r->gate.ids = or_region(r, a->ids_out, c->at.ids, CUMOE_I32, k);
  r->ids = cumoe_const(r->gate.ids);
}

/* Of any rank's tokens: what all ranks know. */
static int64_t most_of_round(const ep_call *c, int64_t number)
{
  const int64_t capacity = c->g->shape.capacity, left = c->args.tokens_max - number * capacity;
  return left < capacity ? left : capacity;
}

/* A matter of this rank alone: the others see the same rows, flags and sums. */
static bool is_aside(const ep_round *r)
{
  return r->c->whole && goes_aside(r->c->g, r->tokens) &&
         ep_form_of(&r->shape, most_of_round(r->c, r->number)) == EP_ROWS;
}

/* Of two counts of rows, later rounds would have a third one to add to. */
static bool is_own(const ep_round *r)
{
  const bool counts_again = r->number > 0 && r->c->layer.counts_out.data;
  return r->aside && !counts_again && serves_own(r->c->g, r->tokens);
}

static void prepare_moves(ep_round *r)
{
  const ep_call *c = r->c;
  const group *g = c->g;
  const cumoe_routing *routing = &g->plan.desc.routing;
  r->aside = is_aside(r);
  r->own = is_own(r);
  r->move = (ep_args){.arena = g->arena,
                      .shape = r->shape,
                      .at = r->at,
                      .rank = g->rank,
                      .lane = c->args.lane,
                      .local_experts = g->plan.desc.local_experts,
                      .zero_experts = routing->zero_experts,
                      .identity_experts = routing->identity_experts,
                      .x = r->x.data,
                      .ids = r->ids.data,
                      .weights = r->weights.data,
                      .x_ld = r->x.ld,
                      .ids_ld = r->ids.ld,
                      .weights_ld = r->weights.ld,
                      .placement = c->args.placement.data,
                      .placement_ld = c->args.placement.ld,
                      .replicas = (int32_t)c->args.placement.cols,
                      .ids_dtype = r->ids.dtype,
                      .tokens = {r->tokens, r->present.data},
                      .first_token = r->first,
                      .rows = ep_region(c, c->at.rows),
                      .slots = g->ways.dedup ? ep_region(c, c->at.slots) : NULL,
                      .sent = ep_region(c, c->at.sent),
                      .all_tokens = {c->layer.x.rows, c->layer.device_tokens.data},
                      .aside = r->aside,
                      .own = r->own,
                      .present = ep_region(c, c->at.present),
                      .arrived = ep_region(c, c->at.arrived),
                      .ids_here = ep_region(c, c->at.ids_here),
                      .y_here = ep_region(c, c->at.y),
                      .fault = g->context->fault};
  if ((r->number > 0 || r->own) && c->layer.counts_out.data) {
    r->move.counts = ep_region(c, c->at.counts);
    r->move.counts_sum = c->layer.counts_out.data;
  }
  for (int32_t i = 0; i < EP_NEAR_RANKS && i < g->shape.ranks; i++) r->move.near[i] = g->arenas[i];
}

/* One exchange takes the caller's count as it is; of several each has its own, of which a kernel writes the part. */
static cumoe_view count_of_round(const ep_call *c)
{
  if (on_cpu(c->g->context)) return (cumoe_view){0};
  if (c->rounds == 1 || !c->layer.device_tokens.data) return c->layer.device_tokens;
  return cumoe_vector(ep_region(c, c->at.present), CUMOE_I32, 1);
}

ep_round open_round(const ep_call *c, int64_t number)
{
  const group *g = c->g;
  const int64_t capacity = g->shape.capacity, all = c->tokens;
  const int64_t first = number * capacity < all ? number * capacity : all;
  ep_round r = {.c = c,
                .number = number,
                .first = first,
                .tokens = all - first < capacity ? all - first : capacity,
                .shape = g->shape};
  const ep_tier *tier = &g->tiers.of[ep_tier_for(&g->tiers, most_of_round(c, number))];
  r.shape.capacity = tier->tokens;
  r.at = ep_in_tier(g->at, tier);
  r.x = part(&r, c->layer.x);
  r.present = count_of_round(c);
  locate_routing(&r);
  prepare_moves(&r);
  return r;
}

/* On a GPU a grid that has told the others waits for them as well, where nothing comes between. */
static bool waits_in_answer(const ep_round *r)
{
  return r->c->whole && !on_cpu(r->c->g->context) && !r->c->g->staged && !r->aside;
}

static bool waits_in_put(const ep_round *r)
{
  return waits_in_answer(r) && !r->c->g->shared;
}

/* How answers go: decided by what all ranks have in common. */
static ep_form answers_of(const ep_round *r)
{
  return ep_form_of(&r->shape, most_of_round(r->c, r->number));
}

cumoe_status launch_on(const ep_round *r, cumoe_stream stream, move which, const ep_args *a, const void *of)
{
  name_call_on(r->c->name, stream);
  return wire_move(r->c->g, which, a, of, stream);
}

cumoe_status launch_next(const ep_round *r, move which, ep_args a, const void *of)
{
  return launch_on(r, r->c->stream, which, &a, of);
}

cumoe_status run_move(const ep_round *r, move which)
{
  ep_args a = r->move;
  a.then_waits = which == MOVE_ANSWER && waits_in_answer(r);
  return launch_next(r, which, a, NULL);
}

/* ---- dispatch ---- */

static cumoe_status run_router(const ep_round *r)
{
  const cumoe_moe_args *a = &r->c->layer;
  const cumoe_moe_desc *d = &r->c->g->plan.desc;
  const cumoe_router_args router = {.size = sizeof router,
                                    .logits_dtype = d->routing.logits_dtype,
                                    .logit_scale = d->routing.logit_scale,
                                    .flags = d->flags & CUMOE_MOE_BATCH_INVARIANT,
                                    .x = a->router_x.data ? part(r, a->router_x) : r->x,
                                    .weight = a->router_weight,
                                    .bias = a->router_bias,
                                    .device_tokens = r->present,
                                    .logits = own_logits(r)};
  return cumoe_router_with(r->c->g->handle, &router, r->c->stream);
}

/* What the gate's kernel gets; the layer has been checked. */
static gate_args gating(const ep_round *r)
{
  const cumoe_gate_args *a = &r->gate;
  const gate_inputs inputs = {a->select_bias, a->expert_scale, a->chosen};
  const cumoe_view_mut ids = a->ids;
  gate_args g = gate_arguments(r->c->g->context, &a->routing, a->logits, &inputs,
                               ids.data ? cumoe_const(ids) : a->chosen, cumoe_const(a->weights));
  g.tokens.device = a->device_tokens.data;
  return g;
}

/* Put is the gate as well: a grid less, and rows leave meanwhile. By dedup their ranks are counted in between. */
static bool gates_in_put(const ep_round *r)
{
  const group *g = r->c->g;
  if (on_cpu(g->context) || g->ways.dedup || !r->gated || r->tokens == 0) return false;
  const gate_args gate = gating(r);
  return GATE_IN_REGISTERS(gate) && !GATE_HAS_RULES(gate);
}

cumoe_status run_routing(const ep_round *r)
{
  if (!r->gated || r->tokens == 0) return CUMOE_OK;
  if (r->c->layer.router_weight.data) TRY(run_router(r));
  return gates_in_put(r) ? CUMOE_OK : cumoe_gate_with(r->c->g->handle, &r->gate, r->c->stream);
}

/* Behind the router, which has waited for all that was before, put may begin at once. */
cumoe_status run_put(const ep_round *r, ep_load load)
{
  const group *g = r->c->g;
  ep_args a = r->move;
  a.puts = load;
  a.then_waits = waits_in_put(r);
  if (!gates_in_put(r)) return launch_next(r, MOVE_PUT, a, NULL);
  const gate_args gate = gating(r);
  a.early = r->c->layer.router_weight.data && !g->staged;
  a.packets = load == EP_PUTS_ALL && r->tokens <= g->shape.packets;
  return launch_next(r, MOVE_GATE_PUT, a, &gate);
}

/* The shared expert is a layer of one expert, which every token chooses. */
cumoe_status run_shared(const ep_round *r)
{
  const ep_call *c = r->c;
  const group *g = c->g;
  if (!g->shared || r->tokens == 0) return CUMOE_OK;
  const cumoe_dtype dtype = (cumoe_dtype)g->plan.desc.dtype;
  const char *zeros = g->arena + g->at.first_expert;
  const cumoe_moe_args a = {
      .size = sizeof a,
      .x = r->x,
      .ids = cumoe_matrix(zeros, CUMOE_I32, r->tokens, 1, 1),
      .weights = cumoe_matrix(zeros, CUMOE_F32, r->tokens, 1, 1),
      .device_tokens = r->present,
      .out = cumoe_matrix_mut(ep_region(c, c->at.shared_y), dtype, r->tokens, g->shape.hidden, g->shape.hidden),
      .workspace = cumoe_vector_mut(ep_region(c, c->at.inner), CUMOE_U8, (int64_t)c->at.inner_bytes)};
  TRY(cumoe_moe_forward(g->shared, c->layer.shared, &a, c->stream));
  if (!c->layer.shared_gate.data) return CUMOE_OK;
  const cumoe_router_args gate = {.size = sizeof gate,
                                  .flags = g->plan.desc.flags & CUMOE_MOE_BATCH_INVARIANT,
                                  .x = r->x,
                                  .weight = c->layer.shared_gate,
                                  .device_tokens = r->present,
                                  .logits =
                                      cumoe_matrix_mut(ep_region(c, c->at.gate_logit), CUMOE_F32, r->tokens, 1, 1)};
  return cumoe_router_with(c->g->handle, &gate, c->stream);
}

cumoe_status count_round(const ep_round *r)
{
  return r->present.data && r->c->rounds > 1 ? run_move(r, MOVE_COUNT) : CUMOE_OK;
}

cumoe_status dispatch_round(const ep_round *r)
{
  const group *g = r->c->g;
  TRY(count_round(r));
  TRY(run_routing(r));
  if (g->ways.dedup && !on_cpu(g->context)) TRY(run_move(r, MOVE_SLOTS));
  TRY(run_put(r, EP_PUTS_ALL));
  return run_shared(r);
}

/* ---- experts ---- */

static cumoe_view_mut counts_of_round(const ep_round *r)
{
  const ep_call *c = r->c;
  if (!r->move.counts) return c->layer.counts_out;
  return cumoe_vector_mut(ep_region(c, c->at.counts), CUMOE_I32, c->g->plan.desc.local_experts);
}

cumoe_moe_args shard_args(const ep_round *r)
{
  const ep_call *c = r->c;
  const group *g = c->g;
  const cumoe_dtype dtype = (cumoe_dtype)g->plan.desc.dtype;
  const int64_t rows = r->shape.capacity * g->shape.ranks, hidden = g->shape.hidden, k = g->shape.top_k;
  return (cumoe_moe_args){
      .size = sizeof(cumoe_moe_args),
      .x = cumoe_matrix(ep_lane(c) + r->at.x, dtype, rows, hidden, hidden),
      .ids = cumoe_matrix(ep_region(c, c->at.ids_here), CUMOE_I32, rows, k, k),
      .weights = cumoe_matrix(ep_lane(c) + r->at.weights, CUMOE_F32, rows, k, k),
      .expert_map = cumoe_vector(g->arena + g->at.every_expert, CUMOE_I32, g->shape.experts),
      .out = cumoe_matrix_mut(ep_region(c, c->at.y), dtype, rows * ep_answers(&g->shape), hidden, hidden),
      .counts_out = counts_of_round(r),
      .load = c->layer.load,
      .workspace = cumoe_vector_mut(ep_region(c, c->at.inner), CUMOE_U8, (int64_t)c->at.inner_bytes)};
}

/* Put fills what the experts want filled, if they are so few, unless the shared expert has that memory in between. */
static bool fills_in_put(const ep_round *r)
{
  const group *g = r->c->g;
  return !on_cpu(g->context) && !g->shared && r->shape.capacity * g->shape.ranks <= FEW_TOKENS;
}

/* What the layers inside are given lies in the arena and the workspace, which were checked. On a GPU a look would cost
 * the host about 1 us for each part of a layer; the CPU device, where tests go through all shapes, has it. */
bool is_checked(const ep_round *r)
{
  return !on_cpu(r->c->g->context);
}

/* Kernels are chosen by what all ranks know to come. */
layer_ends ends_of(const ep_round *r)
{
  const group *g = r->c->g;
  const bool answers = answers_of(r) == EP_PACKETS && r->c->whole && !r->move.counts; /* those finish adds up */
  return (layer_ends){.checked = is_checked(r),
                      .rank_tokens = most_of_round(r->c, r->number) * g->shape.ranks,
                      .filled = fills_in_put(r),
                      .returns = !on_cpu(g->context),
                      .few_row = answers ? g->few_row : 0};
}

cumoe_status locate_fill(ep_round *r)
{
  const layer_ends ends = ends_of(r);
  if (!ends.filled) return CUMOE_OK;
  const cumoe_moe_args a = shard_args(r);
  return find_fill(r->c->g->shard, r->c->weights, &a, &ends, &r->move.fill, &r->move.fill_vectors);
}

/* The layer's combine, over rows from all ranks: a slot's by itself, or a rank's sum of them with weight 1. */
static combine_args collecting(const ep_round *r)
{
  const ep_call *c = r->c;
  const group *g = c->g;
  const cumoe_moe_args *a = &c->layer;
  const int64_t hidden = g->shape.hidden, rows = r->shape.capacity * g->shape.ranks * ep_answers(&g->shape);
  const cumoe_dtype dtype = (cumoe_dtype)g->plan.desc.dtype;
  cumoe_combine_args args = {.out_scale = a->out_scale,
                             .y = cumoe_matrix(ep_lane(c) + r->at.y, dtype, rows, hidden, hidden),
                             .x = r->x,
                             .residual = a->residual.rows == 1 ? a->residual : part(r, a->residual),
                             .device_tokens = r->present,
                             .out = part_mut(r, a->out)};
  if (g->shape.exact) args.pair_weights = r->weights;
  if (g->shared) args.shared = cumoe_matrix(ep_region(c, c->at.shared_y), dtype, r->tokens, hidden, hidden);
  if (a->shared_gate.data) args.shared_logit = cumoe_matrix(ep_region(c, c->at.gate_logit), CUMOE_F32, r->tokens, 1, 1);
  combine_args combine = combine_arguments(&g->plan, ep_region(c, c->at.rows), &args, r->tokens);
  if (!g->shape.exact) combine.top_k = g->shape.ranks;
  return combine;
}

/* Of packets and lines. The one grid that answers, waits and sums up starts early where another answers. tells: that
 * one does not say that it has read all. */
static cumoe_status finish(const ep_round *r, bool answers, bool sums, bool tells)
{
  const combine_args collect = collecting(r);
  ep_args a = r->move;
  a.packets = answers_of(r);
  a.then_waits = sums;
  a.tells = tells;
  a.early = sums && !answers && r->c->whole;
  if (!answers) a.y_here = NULL;
  return launch_next(r, MOVE_FINISH, a, &collect);
}

static cumoe_status run_return(const ep_round *r, const combine_args *combine)
{
  ep_args a = r->move;
  a.packets = answers_of(r);
  a.then_waits = waits_in_answer(r) && !a.packets;
  return launch_next(r, MOVE_RETURN, a, combine);
}

static cumoe_status run_few(const ep_round *r, const layer_ends *ends)
{
  ep_args a = r->move;
  a.movers = (int32_t)ends->few_grid;
  return launch_next(r, MOVE_FEW, a, ends->few);
}

cumoe_status serve_round(const ep_round *r)
{
  const ep_call *c = r->c;
  const cumoe_moe_args a = shard_args(r);
  few_args few;
  layer_ends ends = ends_of(r);
  ends.few = &few;
  if (!waits_in_put(r)) TRY(run_move(r, MOVE_WAIT_TOKENS));
  TRY(forward_between(c->g->shard, c->weights, &a, c->stream, &ends));
  if (ends.combines) TRY(run_return(r, &ends.combine));
  if (ends.fews) TRY(run_few(r, &ends));
  if (answers_of(r) != EP_ROWS) {
    const bool answered = ends.combines || ends.fews;
    return answered && !c->whole ? CUMOE_OK : finish(r, !answered, c->whole, ends.fews);
  }
  return ends.combines ? CUMOE_OK : run_move(r, MOVE_ANSWER);
}

/* ---- combine ---- */

cumoe_status collect(const ep_round *r)
{
  const combine_args combine = collecting(r);
  if (r->tokens == 0) return CUMOE_OK;
  ON_DEVICE(r->c->g->context, dispatch(r->c->g->context, OP_combine, &combine, r->c->stream));
}

cumoe_status combine_round(const ep_round *r)
{
  if (answers_of(r) != EP_ROWS) return r->c->whole ? CUMOE_OK : finish(r, false, true, false);
  if (!waits_in_answer(r)) TRY(run_move(r, MOVE_WAIT_ANSWERS));
  return collect(r);
}
