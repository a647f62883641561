/* An exchange of a call under way: what its two forms have in common, and their parts. */
#ifndef CUMOE_HOST_EP_ROUND_H
#define CUMOE_HOST_EP_ROUND_H

#include "ep.h"
#include "../include/cumoe/stages.h"

/* A call's own memory: byte offsets. */
typedef struct ep_workspace {
  size_t logits, ids, weights, gate_logit, rows, slots, sent, present, arrived, ids_here, y, shared_y, counts, inner,
      own;
  size_t inner_bytes; /* of the layers inside, one after the other */
  size_t own_bytes;   /* of this rank's own tokens, where these are a layer of their own */
  size_t bytes;
} ep_workspace;

/* Of so many own tokens. */
static inline bool goes_aside(const group *g, int64_t tokens)
{
  return tokens >= g->aside_tokens;
}

/* As a layer of their own, besides. */
static inline bool serves_own(const group *g, int64_t tokens)
{
  return goes_aside(g, tokens) && tokens * g->shape.top_k / g->shape.experts >= g->own_rows;
}

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

static inline void *ep_region(const ep_call *c, size_t offset)
{
  return c->workspace + offset;
}

static inline char *ep_lane(const ep_call *c)
{
  return c->g->arena + c->g->at.lane + (uint64_t)c->args.lane * c->g->at.lane_bytes;
}

ep_round open_round(const ep_call *c, int64_t number);

/* ---- what an exchange is made of (ep_round.c) ---- */

/* What ran before may have been a call by itself. of: as wire_move has it. */
cumoe_status launch_on(const ep_round *r, cumoe_stream stream, move which, const ep_args *a, const void *of);
cumoe_status launch_next(const ep_round *r, move which, ep_args a, const void *of); /* on the caller's stream */
cumoe_status run_move(const ep_round *r, move which);
/* Of dispatch. */
cumoe_status count_round(const ep_round *r);
cumoe_status run_routing(const ep_round *r);
cumoe_status run_put(const ep_round *r, ep_load load);
cumoe_status run_shared(const ep_round *r);
/* Of this rank's experts, over what all ranks have sent. */
bool is_checked(const ep_round *r);
cumoe_moe_args shard_args(const ep_round *r);
layer_ends ends_of(const ep_round *r);
cumoe_status locate_fill(ep_round *r);
/* Of combine: the sums over what ranks have answered. */
cumoe_status collect(const ep_round *r);

/* ---- its parts: one stream (ep_round.c), or rows and sums aside (ep_aside.c) ---- */

cumoe_status dispatch_round(const ep_round *r);
cumoe_status serve_round(const ep_round *r);
cumoe_status combine_round(const ep_round *r);
cumoe_status dispatch_aside(const ep_round *r);
cumoe_status serve_aside(const ep_round *r);
cumoe_status combine_aside(const ep_round *r);

#endif
