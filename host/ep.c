/* cumoe_ep_forward and its three parts: a straight line an exchange, of the layer's stages and moves between ranks. */
#include "arguments.h"
#include "check.h"
#include "context.h"
#include "dispatch.h"
#include "ep.h"
#include "plan.h"

/* ---- a call's own memory ---- */

/* Byte offsets. */
typedef struct ep_workspace {
  size_t logits, ids, weights, gate_logit, rows, slots, sent, present, arrived, ids_here, y, shared_y, counts, inner,
      own;
  size_t inner_bytes; /* of the layers inside, one after the other */
  size_t own_bytes;   /* of this rank's own tokens, where these are a layer of their own */
  size_t bytes;
} ep_workspace;

static size_t take(size_t *end, int64_t rows, int64_t row_bytes)
{
  const size_t at = *end;
  *end = (at + (size_t)rows * (size_t)row_bytes + 255) / 256 * 256;
  return at;
}

/* Of so many own tokens. */
static bool goes_aside(const group *g, int64_t tokens)
{
  return tokens >= g->aside_tokens;
}

/* As a layer of their own, besides. */
static bool serves_own(const group *g, int64_t tokens)
{
  return goes_aside(g, tokens) && tokens * g->shape.top_k / g->shape.experts >= g->own_rows;
}

static cumoe_status lay_out_workspace(const group *g, ep_workspace *w)
{
  const int64_t one = g->shape.capacity, all = one * g->shape.ranks, k = g->shape.top_k;
  const int64_t row = (int64_t)g->shape.hidden * g->shape.element;
  size_t shared = 0, end = 0;
  *w = (ep_workspace){0};
  TRY(cumoe_plan_workspace(g->shard, all, &w->inner_bytes));
  if (serves_own(g, one)) TRY(cumoe_plan_workspace(g->shard, one, &w->own_bytes));
  if (g->shared) TRY(cumoe_plan_workspace(g->shared, one, &shared));
  if (shared > w->inner_bytes) w->inner_bytes = shared;
  w->logits = take(&end, one, 4 * (int64_t)router_experts(&g->plan.desc));
  w->ids = take(&end, one, 4 * k);
  w->weights = take(&end, one, 4 * k);
  w->gate_logit = take(&end, one, 4);
  w->rows = take(&end, one, 4 * (g->shape.exact ? k : (int64_t)g->shape.ranks));
  w->slots = take(&end, g->ways.dedup && !on_cpu(g->context) ? one : 0, 4 * (int64_t)g->shape.ranks);
  w->sent = take(&end, 1, 4 * (int64_t)g->shape.ranks);
  w->present = take(&end, 1, 4);
  w->arrived = take(&end, 1, 4 * (int64_t)g->shape.ranks);
  w->ids_here = take(&end, all, 4 * k);
  w->y = take(&end, all, row * ep_answers(&g->shape));
  w->shared_y = take(&end, g->shared ? one : 0, row);
  w->counts = take(&end, 1, 4 * (int64_t)g->plan.desc.local_experts);
  w->inner = take(&end, (int64_t)w->inner_bytes, 1);
  w->own = take(&end, (int64_t)w->own_bytes, 1);
  w->bytes = end;
  return CUMOE_OK;
}

cumoe_status cumoe_ep_workspace(cumoe_group handle, size_t *bytes)
{
  begin_call(__func__);
  group *g;
  ep_workspace w;
  TRY(find_group(handle, &g));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  TRY(lay_out_workspace(g, &w));
  *bytes = w.bytes;
  return CUMOE_OK;
}

/* ---- checks ---- */

typedef struct ep_call {
  const char *name;
  group *g;
  cumoe_weights weights;
  cumoe_ep_args args;
  cumoe_moe_args layer;
  ep_workspace at;
  char *workspace;
  cumoe_stream stream;
  bool whole;     /* all parts in one call */
  int64_t tokens; /* that are there; on a GPU, where args.device_tokens may say fewer, at most */
  int64_t rounds;
} ep_call;

/* Which others write at any time, and whose messages are under way. */
static named_view arena_of(const group *g)
{
  const uint64_t bytes = g->staged ? g->staging.bytes : g->at.bytes;
  return (named_view){"the group's arena", cumoe_vector(g->arena, CUMOE_U8, (int64_t)bytes)};
}

static cumoe_status check_off_arena(const ep_call *c)
{
  const cumoe_moe_args *a = &c->layer;
  const named_view views[] = {
      arena_of(c->g), LAYER_INPUTS(a), READ(a, residual), LAYER_OUTPUTS(a), {"args.placement", c->args.placement}};
  return check_overlaps(views, 1, sizeof views / sizeof *views);
}

static cumoe_status check_placement(const ep_call *c)
{
  const cumoe_view p = c->args.placement;
  const operand want = {"args.placement", c->g->shape.experts, p.cols, DTYPE_BIT(CUMOE_I32), 0};
  TRY(check_operand(c->g->context, &want, p));
  REQUIRE(p.cols >= 1 && p.cols <= EP_MAX_REPLICAS, CUMOE_ERR_INVALID_ARGUMENT,
          "args.placement.cols is %lld, must be 1 .. %d", (long long)p.cols, EP_MAX_REPLICAS);
  return CUMOE_OK;
}

/* The layer's own checks, with the map that its experts have inside. */
static cumoe_status check_ep_layer(const ep_call *c)
{
  const group *g = c->g;
  cumoe_moe_args a = c->layer;
  layer_operands with;
  TRY(check_absent("args.expert_map", a.expert_map, "args.placement says where experts are"));
  a.expert_map = cumoe_vector(g->arena + g->at.every_expert, CUMOE_I32, g->shape.experts);
  TRY(check_layer_operands(&g->plan, c->weights, &a, &with));
  const named_view arena = arena_of(g);
  TRY(check_off_weights(&arena, 1, "weights", with.weights));
  if (with.shared) TRY(check_off_weights(&arena, 1, "args.shared", with.shared));
  TRY(check_workspace_view(g->context, "args.workspace", cumoe_const(a.workspace), c->at.bytes));
  return check_layer_overlaps(&a, &with);
}

static cumoe_status check_rounds(ep_call *c)
{
  const int64_t capacity = c->g->shape.capacity, tokens = c->layer.x.rows;
  if (c->args.tokens_max == 0) c->args.tokens_max = capacity;
  const int64_t most = c->args.tokens_max;
  REQUIRE(most > 0 && most <= INT32_MAX / c->g->shape.top_k, CUMOE_ERR_INVALID_ARGUMENT,
          "args.tokens_max is %lld, must be 0 (config.max_tokens) .. %d (2^31 / top_k)", (long long)most,
          (int)(INT32_MAX / c->g->shape.top_k));
  REQUIRE(tokens <= most, CUMOE_ERR_INVALID_ARGUMENT, "args.x.rows is %lld, must be at most args.tokens_max = %lld",
          (long long)tokens, (long long)most);
  c->rounds = (most + capacity - 1) / capacity;
  return CUMOE_OK;
}

static cumoe_status check_call(ep_call *c)
{
  REQUIRE(c->args.reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.reserved is %d, must be 0", (int)c->args.reserved);
  REQUIRE(c->args.lane >= 0 && c->args.lane < c->g->shape.lanes, CUMOE_ERR_INVALID_ARGUMENT,
          "args.lane is %d, must be 0 .. lanes - 1 = %d", (int)c->args.lane, (int)c->g->shape.lanes - 1);
  TRY(check_placement(c));
  TRY(check_ep_layer(c));
  TRY(check_rounds(c));
  return check_off_arena(c);
}

/* ---- one exchange: what its parts have in common ---- */

typedef struct ep_round {
  const ep_call *c;
  int64_t number, first, tokens; /* the last two: of this rank's */
  ep_shape shape;                /* capacity: of the segments that this exchange has */
  ep_layout at;
  cumoe_view present; /* of these tokens, or absent */
  cumoe_view x, ids, weights;
  cumoe_gate_args gate; /* what makes ids and weights, where the caller has not given both */
  bool gated;
  bool aside; /* rows and sums travel by a stream of their own, beside the experts */
  bool own;   /* and this rank's own tokens are a layer of their own */
  ep_args move;
} ep_round;

static void *region(const ep_call *c, size_t offset)
{
  return c->workspace + offset;
}

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
  return given.data ? part_mut(r, given) : cumoe_matrix_mut(region(r->c, offset), dtype, r->tokens, cols, cols);
}

static cumoe_view_mut own_logits(const ep_round *r)
{
  const int32_t experts = router_experts(&r->c->g->plan.desc);
  return cumoe_matrix_mut(region(r->c, r->c->at.logits), CUMOE_F32, r->tokens, experts, experts);
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
                      .rows = region(c, c->at.rows),
                      .slots = g->ways.dedup ? region(c, c->at.slots) : NULL,
                      .sent = region(c, c->at.sent),
                      .all_tokens = {c->layer.x.rows, c->layer.device_tokens.data},
                      .aside = r->aside,
                      .own = r->own,
                      .present = region(c, c->at.present),
                      .arrived = region(c, c->at.arrived),
                      .ids_here = region(c, c->at.ids_here),
                      .y_here = region(c, c->at.y),
                      .fault = g->context->fault};
  if ((r->number > 0 || r->own) && c->layer.counts_out.data) {
    r->move.counts = region(c, c->at.counts);
    r->move.counts_sum = c->layer.counts_out.data;
  }
  for (int32_t i = 0; i < EP_NEAR_RANKS && i < g->shape.ranks; i++) r->move.near[i] = g->arenas[i];
}

/* One exchange takes the caller's count as it is; of several each has its own, of which a kernel writes the part. */
static cumoe_view count_of_round(const ep_call *c)
{
  if (on_cpu(c->g->context)) return (cumoe_view){0};
  if (c->rounds == 1 || !c->layer.device_tokens.data) return c->layer.device_tokens;
  return cumoe_vector(region(c, c->at.present), CUMOE_I32, 1);
}

static char *lane_of(const ep_call *c)
{
  return c->g->arena + c->g->at.lane + (uint64_t)c->args.lane * c->g->at.lane_bytes;
}

static ep_round open_round(const ep_call *c, int64_t number)
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

/* What ran before may have been a call by itself. of: as wire_move has it. */
static cumoe_status launch_on(const ep_round *r, cumoe_stream stream, move which, const ep_args *a, const void *of)
{
  name_call_on(r->c->name, stream);
  return wire_move(r->c->g, which, a, of, stream);
}

static cumoe_status launch_move(const ep_round *r, move which, ep_args a, const void *of)
{
  return launch_on(r, r->c->stream, which, &a, of);
}

static cumoe_status run_move(const ep_round *r, move which)
{
  ep_args a = r->move;
  a.then_waits = which == MOVE_ANSWER && waits_in_answer(r);
  return launch_move(r, which, a, NULL);
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

static cumoe_status run_routing(const ep_round *r)
{
  if (!r->gated || r->tokens == 0) return CUMOE_OK;
  if (r->c->layer.router_weight.data) TRY(run_router(r));
  return gates_in_put(r) ? CUMOE_OK : cumoe_gate_with(r->c->g->handle, &r->gate, r->c->stream);
}

/* Behind the router, which has waited for all that was before, put may begin at once. */
static cumoe_status run_put(const ep_round *r, ep_load load)
{
  const group *g = r->c->g;
  ep_args a = r->move;
  a.puts = load;
  a.then_waits = waits_in_put(r);
  if (!gates_in_put(r)) return launch_move(r, MOVE_PUT, a, NULL);
  const gate_args gate = gating(r);
  a.early = r->c->layer.router_weight.data && !g->staged;
  a.packets = load == EP_PUTS_ALL && r->tokens <= g->shape.packets;
  return launch_move(r, MOVE_GATE_PUT, a, &gate);
}

/* The shared expert is a layer of one expert, which every token chooses. */
static cumoe_status run_shared(const ep_round *r)
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
      .out = cumoe_matrix_mut(region(c, c->at.shared_y), dtype, r->tokens, g->shape.hidden, g->shape.hidden),
      .workspace = cumoe_vector_mut(region(c, c->at.inner), CUMOE_U8, (int64_t)c->at.inner_bytes)};
  TRY(cumoe_moe_forward(g->shared, c->layer.shared, &a, c->stream));
  if (!c->layer.shared_gate.data) return CUMOE_OK;
  const cumoe_router_args gate = {.size = sizeof gate,
                                  .flags = g->plan.desc.flags & CUMOE_MOE_BATCH_INVARIANT,
                                  .x = r->x,
                                  .weight = c->layer.shared_gate,
                                  .device_tokens = r->present,
                                  .logits = cumoe_matrix_mut(region(c, c->at.gate_logit), CUMOE_F32, r->tokens, 1, 1)};
  return cumoe_router_with(c->g->handle, &gate, c->stream);
}

static cumoe_status count_round(const ep_round *r)
{
  return r->present.data && r->c->rounds > 1 ? run_move(r, MOVE_COUNT) : CUMOE_OK;
}

static cumoe_status dispatch_round(const ep_round *r)
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
  return cumoe_vector_mut(region(c, c->at.counts), CUMOE_I32, c->g->plan.desc.local_experts);
}

/* This rank's experts, over what all ranks have sent. */
static cumoe_moe_args shard_args(const ep_round *r)
{
  const ep_call *c = r->c;
  const group *g = c->g;
  const cumoe_dtype dtype = (cumoe_dtype)g->plan.desc.dtype;
  const int64_t rows = r->shape.capacity * g->shape.ranks, hidden = g->shape.hidden, k = g->shape.top_k;
  return (cumoe_moe_args){.size = sizeof(cumoe_moe_args),
                          .x = cumoe_matrix(lane_of(c) + r->at.x, dtype, rows, hidden, hidden),
                          .ids = cumoe_matrix(region(c, c->at.ids_here), CUMOE_I32, rows, k, k),
                          .weights = cumoe_matrix(lane_of(c) + r->at.weights, CUMOE_F32, rows, k, k),
                          .expert_map = cumoe_vector(g->arena + g->at.every_expert, CUMOE_I32, g->shape.experts),
                          .out =
                              cumoe_matrix_mut(region(c, c->at.y), dtype, rows * ep_answers(&g->shape), hidden, hidden),
                          .counts_out = counts_of_round(r),
                          .load = c->layer.load,
                          .workspace = cumoe_vector_mut(region(c, c->at.inner), CUMOE_U8, (int64_t)c->at.inner_bytes)};
}

/* Put fills what the experts want filled, if they are so few, unless the shared expert has that memory in between. */
static bool fills_in_put(const ep_round *r)
{
  const group *g = r->c->g;
  return !on_cpu(g->context) && !g->shared && r->shape.capacity * g->shape.ranks <= FEW_TOKENS;
}

/* What the layers inside are given lies in the arena and the workspace, which were checked. On a GPU a look would cost
 * the host about 1 us for each part of a layer; the CPU device, where tests go through all shapes, has it. */
static bool is_checked(const ep_round *r)
{
  return !on_cpu(r->c->g->context);
}

/* Kernels are chosen by what all ranks know to come. */
static layer_ends ends_of(const ep_round *r)
{
  const group *g = r->c->g;
  const bool answers = answers_of(r) == EP_PACKETS && r->c->whole && !r->move.counts; /* those finish adds up */
  return (layer_ends){.checked = is_checked(r),
                      .rank_tokens = most_of_round(r->c, r->number) * g->shape.ranks,
                      .filled = fills_in_put(r),
                      .returns = !on_cpu(g->context),
                      .few_row = answers ? g->few_row : 0};
}

static cumoe_status locate_fill(ep_round *r)
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
                             .y = cumoe_matrix(lane_of(c) + r->at.y, dtype, rows, hidden, hidden),
                             .x = r->x,
                             .residual = a->residual.rows == 1 ? a->residual : part(r, a->residual),
                             .device_tokens = r->present,
                             .out = part_mut(r, a->out)};
  if (g->shape.exact) args.pair_weights = r->weights;
  if (g->shared) args.shared = cumoe_matrix(region(c, c->at.shared_y), dtype, r->tokens, hidden, hidden);
  if (a->shared_gate.data) args.shared_logit = cumoe_matrix(region(c, c->at.gate_logit), CUMOE_F32, r->tokens, 1, 1);
  combine_args combine = combine_arguments(&g->plan, region(c, c->at.rows), &args, r->tokens);
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
  return launch_move(r, MOVE_FINISH, a, &collect);
}

static cumoe_status run_return(const ep_round *r, const combine_args *combine)
{
  ep_args a = r->move;
  a.packets = answers_of(r);
  a.then_waits = waits_in_answer(r) && !a.packets;
  return launch_move(r, MOVE_RETURN, a, combine);
}

static cumoe_status run_few(const ep_round *r, const layer_ends *ends)
{
  ep_args a = r->move;
  a.movers = (int32_t)ends->few_grid;
  return launch_move(r, MOVE_FEW, a, ends->few);
}

static cumoe_status serve_round(const ep_round *r)
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

static cumoe_status collect(const ep_round *r)
{
  const combine_args combine = collecting(r);
  if (r->tokens == 0) return CUMOE_OK;
  ON_DEVICE(r->c->g->context, dispatch(r->c->g->context, OP_combine, &combine, r->c->stream));
}

static cumoe_status combine_round(const ep_round *r)
{
  if (answers_of(r) != EP_ROWS) return r->c->whole ? CUMOE_OK : finish(r, false, true, false);
  if (!waits_in_answer(r)) TRY(run_move(r, MOVE_WAIT_ANSWERS));
  return collect(r);
}

/* ---- rows and sums aside ---- */

/*
 * Of many tokens rows leave while the router and the gate work, by a stream of the group's; ids are taken and the map
 * is made before rows are waited for. Where own tokens are many, and as much travels, these are a layer of their own,
 * whose products run meanwhile: up while others' rows arrive, down while the last sums leave; and the others' down is
 * in two parts, the second beside sums of the first part's outputs.
 *
 *   caller's  router, gate, slots | up of own | wait | up, down of the rest: first part, second | down of own | collect
 *   side      rows .............. | ids, map                                      sums ....... sums
 *
 * Slots are told of behind fences that wait for rows as well: up of own does not wait for others' slots.
 */

static cudaStream_t side_of(const ep_round *r)
{
  return r->c->g->side[r->c->args.lane];
}

static cumoe_status follow_caller(const ep_round *r)
{
  name_call_on(r->c->name, r->c->stream);
  return wire_follow(r->c->g, r->c->args.lane, side_of(r), r->c->stream);
}

static cumoe_status follow_side(const ep_round *r)
{
  name_call_on(r->c->name, r->c->stream);
  return wire_follow(r->c->g, r->c->args.lane, r->c->stream, side_of(r));
}

static cumoe_status launch_aside(const ep_round *r, move which, const ep_args *a, const void *of)
{
  return launch_on(r, side_of(r), which, a, of);
}

static cumoe_status put_rows_aside(const ep_round *r)
{
  ep_args a = r->move;
  a.puts = EP_PUTS_ROWS;
  a.late = true;
  a.sms = r->own ? EP_ASIDE_PUT_CTAS : 2 * EP_ASIDE_PUT_CTAS;
  TRY(follow_caller(r));
  return launch_aside(r, MOVE_PUT, &a, NULL);
}

/* Slots, behind which rows are waited for, to the map; beside own tokens' products. */
static cumoe_status map_aside(const ep_round *r, const cumoe_moe_args *a)
{
  ep_args wait = r->move;
  layer_ends map = ends_of(r);
  const cumoe_stream stream = r->own ? side_of(r) : r->c->stream;
  wait.puts = EP_PUTS_SLOTS;
  wait.more = true;
  wait.late = r->own;
  map.parts = LAYER_MAP;
  if (r->own) TRY(follow_caller(r));
  TRY(launch_on(r, stream, MOVE_WAIT_TOKENS, &wait, NULL));
  TRY(launch_on(r, stream, MOVE_TAKE_IDS, &r->move, NULL));
  return forward_between(r->c->g->shard, r->c->weights, a, stream, &map);
}

/* Own rows are where the caller has them, ids and weights in this rank's segment, where put lays them. */
static cumoe_moe_args own_args(const ep_round *r)
{
  const ep_call *c = r->c;
  const group *g = c->g;
  const cumoe_dtype dtype = (cumoe_dtype)g->plan.desc.dtype;
  const int64_t first = g->rank * r->shape.capacity, hidden = g->shape.hidden, k = g->shape.top_k;
  char *lane = lane_of(c), *y = lane + r->at.y + first * hidden * g->shape.element;
  return (cumoe_moe_args){.size = sizeof(cumoe_moe_args),
                          .x = r->x,
                          .ids = cumoe_matrix(lane + r->at.ids + first * k * 4, CUMOE_I32, r->tokens, k, k),
                          .weights = cumoe_matrix(lane + r->at.weights + first * k * 4, CUMOE_F32, r->tokens, k, k),
                          .device_tokens = r->present,
                          .expert_map = cumoe_vector(g->arena + g->at.every_expert, CUMOE_I32, g->shape.experts),
                          .out = cumoe_matrix_mut(y, dtype, r->tokens, hidden, hidden),
                          .counts_out = c->layer.counts_out,
                          .load = c->layer.load,
                          .workspace = cumoe_vector_mut(region(c, c->at.own), CUMOE_U8, (int64_t)c->at.own_bytes)};
}

static cumoe_status serve_own(const ep_round *r, uint32_t parts, int32_t spared)
{
  if (!r->own) return CUMOE_OK;
  const cumoe_moe_args a = own_args(r);
  layer_ends ends = {.checked = is_checked(r), .parts = parts, .spared = spared};
  return forward_between(r->c->g->shard, r->c->weights, &a, r->c->stream, &ends);
}

/* By dedup the gate says which rows go where; else they leave while it works. */
static cumoe_status dispatch_aside(const ep_round *r)
{
  const bool dedup = r->c->g->ways.dedup;
  TRY(count_round(r));
  if (!dedup) TRY(put_rows_aside(r));
  TRY(run_routing(r));
  if (dedup) TRY(run_move(r, MOVE_SLOTS));
  if (dedup) TRY(put_rows_aside(r));
  TRY(run_put(r, EP_PUTS_SLOTS));
  return run_shared(r);
}

/* Sums of `columns` outputs from the first one on, or (0) of all; beside products by some SMs. */
static cumoe_status return_aside(const ep_round *r, const layer_ends *ends, bool more, bool beside)
{
  const int64_t shift = ends->first * (int64_t)r->shape.element;
  combine_args c = ends->combine;
  ep_args a = r->move;
  a.late = true;
  a.sms = beside ? EP_ASIDE_RETURN_SMS : 0;
  if (!ends->combines) return launch_aside(r, MOVE_ANSWER, &a, NULL);
  if (ends->cuts) {
    c.y = (const char *)c.y + shift;
    c.hidden = ends->columns;
    a.at.y += (uint64_t)shift;
  }
  if (more) a.counts = NULL, c.protocol.discard_h = NULL; /* which down still reads */
  a.more = more;
  return launch_aside(r, MOVE_RETURN, &a, &c);
}

/* A part of down's outputs, behind which the side stream comes. */
static cumoe_status run_down(const ep_round *r, const cumoe_moe_args *a, int32_t first, int32_t columns,
                             layer_ends *ends)
{
  *ends = ends_of(r);
  ends->parts = LAYER_DOWN;
  ends->first = first;
  ends->columns = columns;
  ends->spared = first > 0 ? EP_ASIDE_RETURN_SMS : 0;
  return forward_between(r->c->g->shard, r->c->weights, a, r->c->stream, ends);
}

/* Where the second part of down begins, which is as many outputs as the first one has; 0: there is none. */
static int32_t second_part(const ep_round *r)
{
  const int32_t hidden = r->shape.hidden, tiles = (hidden / 2 + EP_ASIDE_COLUMNS - 1) / EP_ASIDE_COLUMNS;
  return r->own && tiles * EP_ASIDE_COLUMNS < hidden ? tiles * EP_ASIDE_COLUMNS : 0;
}

/* All up to down: maps, own tokens' up, and up behind the wait for rows. */
static cumoe_status run_up(const ep_round *r, const cumoe_moe_args *a)
{
  ep_args wait = r->move;
  layer_ends up = ends_of(r);
  wait.puts = EP_PUTS_ROWS;
  wait.late = r->own;
  up.parts = LAYER_UP;
  TRY(serve_own(r, LAYER_MAP, 0)); /* both maps count for args.load */
  TRY(map_aside(r, a));
  TRY(serve_own(r, LAYER_UP, EP_ASIDE_PUT_CTAS));
  if (r->own) TRY(follow_side(r));
  TRY(launch_move(r, MOVE_WAIT_TOKENS, wait, NULL));
  return forward_between(r->c->g->shard, r->c->weights, a, r->c->stream, &up);
}

/* What down does beside sums starts early, so that it has its SMs before these take the rest. */
static cumoe_status serve_aside(const ep_round *r)
{
  const cumoe_moe_args a = shard_args(r);
  const int32_t hidden = r->shape.hidden, half = second_part(r);
  layer_ends last, part;
  TRY(run_up(r, &a));
  TRY(run_down(r, &a, 0, half, &last));
  TRY(follow_caller(r));
  if (last.cuts) {
    part = last;
    TRY(run_down(r, &a, half, hidden - half, &last));
    TRY(return_aside(r, &part, true, true));
    TRY(follow_caller(r));
  }
  TRY(serve_own(r, LAYER_DOWN, EP_ASIDE_RETURN_SMS));
  return return_aside(r, &last, false, r->own);
}

static cumoe_status combine_aside(const ep_round *r)
{
  ep_args a = r->move;
  a.late = true;
  TRY(follow_side(r));
  TRY(launch_move(r, MOVE_WAIT_ANSWERS, a, NULL));
  return collect(r);
}

/* ---- calls ---- */

/* A call that fails halfway leaves others waiting: they are told. */
static cumoe_status give_up(const group *g)
{
  wire_give_up(g, ep_abort_word(EP_FAILED, EP_DISPATCH, g->rank, g->rank));
  return CUMOE_OK;
}

static cumoe_status give_up_entered(const group *g)
{
  ON_DEVICE_RELAXED(g->context, give_up(g));
}

static cumoe_status run_part(const ep_call *c, ep_part which, int64_t number)
{
  static cumoe_status (*const parts[2][PARTS])(const ep_round *) = {{dispatch_round, serve_round, combine_round},
                                                                    {dispatch_aside, serve_aside, combine_aside}};
  ep_round r = open_round(c, number);
  cumoe_status status = which == PART_DISPATCH ? locate_fill(&r) : CUMOE_OK;
  if (status == CUMOE_OK) status = parts[r.aside][which](&r);
  if (status != CUMOE_OK && status != CUMOE_ERR_PEER) CUMOE_IGNORE(give_up_entered(c->g));
  if (status == CUMOE_OK) c->g->next[c->args.lane] = (ep_part)((which + 1) % PARTS);
  return status;
}

/* What a GPU has done so far the host cannot know: a graph may have been replayed. */
static cumoe_status check_order(const ep_call *c, ep_part which)
{
  static const char *const names[PARTS] = {"cumoe_ep_dispatch or cumoe_ep_forward", "cumoe_ep_experts",
                                           "cumoe_ep_combine"};
  uint64_t end = 0;
  const ep_part next = c->g->next[c->args.lane];
  if (!on_cpu(c->g->context) || next == which) return CUMOE_OK;
  TRY(wire_load_abort(c->g, &end));
  if (end) return ep_explain(c->g, end);
  return fail(CUMOE_ERR_INVALID_ARGUMENT, "args.lane is %d, where the next call must be %s", (int)c->args.lane,
              names[next]);
}

static cumoe_status open_call(ep_call *c, cumoe_group handle, const cumoe_ep_args *args, ep_part first)
{
  TRY(find_group(handle, &c->g));
  TRY(take_struct("args", args, &c->args));
  TRY(take_struct("args.layer", c->args.layer, &c->layer));
  TRY(lay_out_workspace(c->g, &c->at));
  name_call_on(c->name, c->stream);
  TRY(check_call(c));
  c->workspace = c->layer.workspace.data;
  TRY(check_order(c, first));
  c->tokens = c->layer.x.rows;
  if (!on_cpu(c->g->context)) return CUMOE_OK;
  c->tokens = cpu_ep_tokens((token_count){c->tokens, c->layer.device_tokens.data}, c->g->context->fault);
  return CUMOE_OK;
}

static cumoe_status one_part(ep_call c, cumoe_group handle, const cumoe_ep_args *args, ep_part which)
{
  TRY(open_call(&c, handle, args, which));
  REQUIRE(c.args.round >= 0 && c.args.round < c.rounds, CUMOE_ERR_INVALID_ARGUMENT,
          "args.round is %d, must be 0 .. %lld (of the rounds that args.tokens_max needs)", (int)c.args.round,
          (long long)c.rounds - 1);
  return run_part(&c, which, c.args.round);
}

cumoe_status cumoe_ep_dispatch(cumoe_group handle, cumoe_weights weights, const cumoe_ep_args *args,
                               cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return one_part((ep_call){.name = __func__, .weights = weights, .stream = stream}, handle, args, PART_DISPATCH);
}

cumoe_status cumoe_ep_experts(cumoe_group handle, cumoe_weights weights, const cumoe_ep_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return one_part((ep_call){.name = __func__, .weights = weights, .stream = stream}, handle, args, PART_EXPERTS);
}

cumoe_status cumoe_ep_combine(cumoe_group handle, cumoe_weights weights, const cumoe_ep_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  return one_part((ep_call){.name = __func__, .weights = weights, .stream = stream}, handle, args, PART_COMBINE);
}

cumoe_status cumoe_ep_forward(cumoe_group handle, cumoe_weights weights, const cumoe_ep_args *args, cumoe_stream stream)
{
  begin_call_on(__func__, stream);
  ep_call c = {.name = __func__, .weights = weights, .stream = stream, .whole = true};
  TRY(open_call(&c, handle, args, PART_DISPATCH));
  REQUIRE(c.args.round == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.round is %d, must be 0: this call makes all rounds",
          (int)c.args.round);
  for (int64_t i = 0; i < c.rounds; i++)
    for (ep_part which = PART_DISPATCH; which < PARTS; which++) TRY(run_part(&c, which, i));
  return CUMOE_OK;
}
