/* Groups of ranks that do not reach each other's memory: NCCL carries what they write. See ep.h. */
#include "context.h"
#include "ep.h"

/* One group of NCCL's calls, ended whatever happens in it: else the thread's next calls of NCCL would belong to it. */
cumoe_status staged_carry(const group *g, uint64_t pieces, cumoe_stream stream)
{
  const nccl *n = &g->nccl;
  const ep_staging *s = &g->staging;
  const char *call = "ncclSend";
  TRY(nccl_status(n, "ncclGroupStart", n->group_start()));
  int result = 0;
  for (int32_t r = 0; r < g->shape.ranks; r++)
    for (int i = 0; i < s->count; i++) {
      if (result != 0 || !(pieces >> i & 1)) continue;
      const uint64_t bytes = s->pieces[i].bytes;
      const char *from = g->arena + s->messages + (uint64_t)r * s->message_bytes + s->pieces[i].from;
      result = n->send(from, bytes, NCCL_UINT8, r, n->comm, stream);
      if (result != 0) continue;
      result = n->receive(g->arena + s->pieces[i].to + (uint64_t)r * bytes, bytes, NCCL_UINT8, r, n->comm, stream);
      if (result != 0) call = "ncclRecv";
    }
  const int ended = n->group_end();
  TRY(nccl_status(n, call, result));
  return nccl_status(n, "ncclGroupEnd", ended);
}

cumoe_status staged_bring(group *g, uint64_t pieces)
{
  TRY(staged_carry(g, pieces, g->stream));
  if (on_cpu(g->context)) return CUMOE_OK;
  return nccl_await(&g->nccl, "ncclGroupEnd", g->stream, timeout_of(g), &g->stuck);
}

void staged_arguments(const group *g, move which, int32_t tier, ep_args *a)
{
  const bool puts = ep_puts(which), answers = ep_answers_by(which);
  if (puts || answers) a->at.bases = g->to.bases;
  const ep_layout to = ep_in_tier(g->to, &g->staging.tiers.of[tier]);
  if (puts) a->at.in = to.in, a->at.x = to.x, a->at.ids = to.ids, a->at.weights = to.weights;
  if (answers) a->at.back = to.back, a->at.y = to.y;
  /* A wait whose time is up says so in its own arena alone: no other can be reached. */
  for (int32_t r = 0; !puts && !answers && r < EP_NEAR_RANKS && r < g->shape.ranks; r++) a->near[r] = g->arena;
}
