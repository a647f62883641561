/* A rank's membership in a group, and where everything of an exchange lies. */
#ifndef CUMOE_HOST_EP_H
#define CUMOE_HOST_EP_H

#include "moe.h"
#include "../include/cumoe/ep.h"
#include "../kernels/ep/ep.h"

typedef struct group {
  struct context *context;
  cumoe_context handle;     /* of the context */
  struct plan plan;         /* a copy: the caller's may end before the group */
  cumoe_plan shard, shared; /* what a rank does for all: its experts unreduced or summed; the shared expert, or NULL */
  ep_shape shape;
  ep_layout at;
  int32_t rank;
  int64_t timeout_ns;
  char *arena;
  char *arenas[]; /* of all ranks */
} group;

/* Offsets of an arena; a pure function. Valid shapes only: nothing overflows 2^62. */
ep_layout ep_lay_out(const ep_shape *shape);

/* Byte offsets of a call's own memory. */
typedef struct ep_workspace {
  size_t logits, ids, weights, gate_logit, rows, ids_here, y, shared_y, inner;
  size_t inner_bytes; /* of the layers inside, one after the other */
  size_t bytes;
} ep_workspace;
cumoe_status ep_lay_out_workspace(const group *g, ep_workspace *w);

cumoe_status find_group(cumoe_group handle, group **found);

/* PEER, with words for what an abort word says. */
cumoe_status ep_explain(const group *g, uint64_t word);
/* The same of this rank's own, if there is one. */
cumoe_status ep_check_alive(const group *g);
void ep_give_up(const group *g, int cause, int phase, int about);

#endif
