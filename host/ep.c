/* cumoe_ep_forward and its three parts: checks, and a straight line an exchange (ep_round.h). */
#include "arguments.h"
#include "carve.h"
#include "check.h"
#include "context.h"
#include "ep_round.h"
#include "plan.h"

/* ---- a call's own memory ---- */

static cumoe_status lay_out_workspace(const group *g, ep_workspace *w)
{
  const int64_t one = g->shape.capacity, all = one * g->shape.ranks, k = g->shape.top_k;
  const int64_t hidden = g->shape.hidden;
  const size_t element = (size_t)g->shape.element;
  size_t shared = 0;
  carver c = {0, false}; /* past 2^62 bytes the arena would be, too */
  *w = (ep_workspace){0};
  TRY(cumoe_plan_workspace(g->shard, all, &w->inner_bytes));
  if (serves_own(g, one)) TRY(cumoe_plan_workspace(g->shard, one, &w->own_bytes));
  if (g->shared) TRY(cumoe_plan_workspace(g->shared, one, &shared));
  if (shared > w->inner_bytes) w->inner_bytes = shared;
  w->logits = carve(&c, one, router_experts(&g->plan.desc), 4);
  w->ids = carve(&c, one, k, 4);
  w->weights = carve(&c, one, k, 4);
  w->gate_logit = carve(&c, one, 1, 4);
  w->rows = carve(&c, one, g->shape.exact ? k : g->shape.ranks, 4);
  w->slots = carve(&c, g->ways.dedup && !on_cpu(g->context) ? one : 0, g->shape.ranks, 4);
  w->sent = carve(&c, 1, g->shape.ranks, 4);
  w->present = carve(&c, 1, 1, 4);
  w->arrived = carve(&c, 1, g->shape.ranks, 4);
  w->ids_here = carve(&c, all, k, 4);
  w->y = carve(&c, all * ep_answers(&g->shape), hidden, element);
  w->shared_y = carve(&c, g->shared ? one : 0, hidden, element);
  w->counts = carve(&c, 1, g->plan.desc.local_experts, 4);
  w->inner = carve(&c, 1, (int64_t)w->inner_bytes, 1);
  w->own = carve(&c, 1, (int64_t)w->own_bytes, 1);
  w->bytes = c.at;
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
  TRY(check_off_arena(c));
  const named_view views[] = {LAYER_OUTPUTS(&a), {"args.placement", c->args.placement}};
  TRY(check_overlaps(views, LAYER_OUTPUT_COUNT, sizeof views / sizeof *views));
  return check_layer_overlaps(&a, &with);
}

static cumoe_status check_rounds(ep_call *c)
{
  const int64_t capacity = c->g->shape.capacity, tokens = c->layer.x.rows;
  if (c->args.tokens_max == 0) c->args.tokens_max = capacity;
  const int64_t most = c->args.tokens_max;
  REQUIRE(most > 0 && most <= CUMOE_MAX_PAIRS / c->g->shape.top_k, CUMOE_ERR_INVALID_ARGUMENT,
          "args.tokens_max is %lld, must be 0 (config.max_tokens) .. %d (CUMOE_MAX_PAIRS / top_k)", (long long)most,
          (int)(CUMOE_MAX_PAIRS / c->g->shape.top_k));
  REQUIRE(tokens <= most, CUMOE_ERR_INVALID_ARGUMENT, "args.x.rows is %lld, must be at most args.tokens_max = %lld",
          (long long)tokens, (long long)most);
  c->rounds = (most + capacity - 1) / capacity;
  if (c->whole)
    REQUIRE(c->args.round == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.round is %d, must be 0: this call makes all rounds",
            (int)c->args.round);
  REQUIRE(c->args.round >= 0 && c->args.round < c->rounds, CUMOE_ERR_INVALID_ARGUMENT,
          "args.round is %d, must be 0 .. %lld (of the rounds that args.tokens_max needs)", (int)c->args.round,
          (long long)c->rounds - 1);
  return CUMOE_OK;
}

static cumoe_status check_call(ep_call *c)
{
  REQUIRE(c->args.reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "args.reserved is %d, must be 0", (int)c->args.reserved);
  REQUIRE(c->args.lane >= 0 && c->args.lane < c->g->shape.lanes, CUMOE_ERR_INVALID_ARGUMENT,
          "args.lane is %d, must be 0 .. lanes - 1 = %d", (int)c->args.lane, (int)c->g->shape.lanes - 1);
  TRY(check_placement(c));
  TRY(check_ep_layer(c));
  return check_rounds(c);
}

/* ---- calls ---- */

/* A call that fails halfway leaves others waiting: they are told. */
static cumoe_status give_up(const group *g, ep_part which)
{
  const int phase = which == PART_DISPATCH ? EP_DISPATCH : EP_RETURN;
  wire_give_up(g, ep_abort_word(EP_FAILED, phase, g->rank, g->rank));
  return CUMOE_OK;
}

static cumoe_status give_up_entered(const group *g, ep_part which)
{
  ON_DEVICE_RELAXED(g->context, give_up(g, which));
}

static cumoe_status run_part(const ep_call *c, ep_part which, int64_t number)
{
  static cumoe_status (*const parts[2][PARTS])(const ep_round *) = {{dispatch_round, serve_round, combine_round},
                                                                    {dispatch_aside, serve_aside, combine_aside}};
  ep_round r = open_round(c, number);
  cumoe_status status = which == PART_DISPATCH ? locate_fill(&r) : CUMOE_OK;
  if (status == CUMOE_OK) status = parts[r.aside][which](&r);
  if (status != CUMOE_OK && status != CUMOE_ERR_PEER) AND_THEN(status, give_up_entered(c->g, which));
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
  if (!on_cpu(c->g->context) || (next == which && which == PART_DISPATCH)) return CUMOE_OK; /* which looks itself */
  TRY(wire_load_abort(c->g, &end));
  if (end) return ep_explain(c->g, end);
  if (next == which) return CUMOE_OK;
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
  for (int64_t i = 0; i < c.rounds; i++)
    for (ep_part which = PART_DISPATCH; which < PARTS; which++) TRY(run_part(&c, which, i));
  return CUMOE_OK;
}
