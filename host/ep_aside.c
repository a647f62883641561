/* An exchange of many tokens: rows and sums travel by a stream of their own, beside the experts. */
#include "context.h"
#include "ep_round.h"

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
  char *lane = ep_lane(c), *y = lane + r->at.y + first * hidden * g->shape.element;
  return (cumoe_moe_args){.size = sizeof(cumoe_moe_args),
                          .x = r->x,
                          .ids = cumoe_matrix(lane + r->at.ids + first * k * 4, CUMOE_I32, r->tokens, k, k),
                          .weights = cumoe_matrix(lane + r->at.weights + first * k * 4, CUMOE_F32, r->tokens, k, k),
                          .device_tokens = r->present,
                          .expert_map = cumoe_vector(g->arena + g->at.every_expert, CUMOE_I32, g->shape.experts),
                          .out = cumoe_matrix_mut(y, dtype, r->tokens, hidden, hidden),
                          .counts_out = c->layer.counts_out,
                          .load = c->layer.load,
                          .workspace = cumoe_vector_mut(ep_region(c, c->at.own), CUMOE_U8, (int64_t)c->at.own_bytes)};
}

static cumoe_status serve_own(const ep_round *r, uint32_t parts, int32_t spared)
{
  if (!r->own) return CUMOE_OK;
  const cumoe_moe_args a = own_args(r);
  layer_ends ends = {.checked = is_checked(r), .parts = parts, .spared = spared};
  return forward_between(r->c->g->shard, r->c->weights, &a, r->c->stream, &ends);
}

/* By dedup the gate says which rows go where; else they leave while it works. */
cumoe_status dispatch_aside(const ep_round *r)
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
  TRY(launch_next(r, MOVE_WAIT_TOKENS, wait, NULL));
  return forward_between(r->c->g->shard, r->c->weights, a, r->c->stream, &up);
}

/* What down does beside sums starts early, so that it has its SMs before these take the rest. */
cumoe_status serve_aside(const ep_round *r)
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

cumoe_status combine_aside(const ep_round *r)
{
  ep_args a = r->move;
  a.late = true;
  TRY(follow_side(r));
  TRY(launch_next(r, MOVE_WAIT_ANSWERS, a, NULL));
  return collect(r);
}
