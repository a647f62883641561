/* cumoe_group_set_active: the ranks that stay agree on the exchange to go on from. See kernels/ep/ep.h. */
#include "check.h"
#include "context.h"
#include "ep.h"

#include <string.h>

/* ---- masks ---- */

enum { MASK_WORDS = EP_MAX_RANKS / 64 };

static bool has(const uint64_t *mask, int32_t rank)
{
  return mask[rank / 64] >> rank % 64 & 1;
}

static int32_t left_out(const group *g, const uint64_t *mask)
{
  int32_t out = 0;
  for (int32_t r = 0; r < g->shape.ranks; r++) out += !has(mask, r);
  return out;
}

/* FNV-1a */
static uint32_t hash_of(const uint64_t *mask)
{
  uint32_t hash = 2166136261u;
  for (int i = 0; i < MASK_WORDS * 8; i++) hash = (hash ^ (uint32_t)(mask[i / 8] >> i % 8 * 8 & 0xff)) * 16777619u;
  return hash;
}

/* Copies it; words past those that the caller has are 0. */
static cumoe_status take_mask(const group *g, const uint64_t *active, uint64_t *mask)
{
  const int32_t ranks = g->shape.ranks, words = (ranks + 63) / 64;
  REQUIRE(active, CUMOE_ERR_INVALID_ARGUMENT, "active is null");
  memcpy(mask, active, (size_t)words * sizeof *mask);
  REQUIRE(ranks % 64 == 0 || mask[words - 1] >> ranks % 64 == 0, CUMOE_ERR_INVALID_ARGUMENT,
          "active[%d] is 0x%llx, has a rank past config.ranks = %d", words - 1, (unsigned long long)mask[words - 1],
          (int)ranks);
  REQUIRE(has(mask, g->rank), CUMOE_ERR_INVALID_ARGUMENT, "active leaves out rank %d, which makes the call",
          (int)g->rank);
  for (int32_t r = 0; r < ranks; r++)
    REQUIRE(!has(mask, r) || ep_is_active(&g->ways, r), CUMOE_ERR_INVALID_ARGUMENT,
            "active has rank %d, which was left out before", (int)r);
  REQUIRE(left_out(g, mask) > left_out(g, g->ways.active), CUMOE_ERR_INVALID_ARGUMENT,
          "active leaves out no rank that takes part");
  return CUMOE_OK;
}

/* ---- where to go on ---- */

static uint64_t exchange_of(const group *g, int32_t lane)
{
  return g->at.lane + (uint64_t)lane * g->at.lane_bytes + g->at.exchange;
}

/* Exchanges of each lane so far. */
static cumoe_status load_lanes(const group *g, uint32_t *exchanges)
{
  uint64_t word;
  for (int32_t l = 0; l < g->shape.lanes; l++) {
    TRY(wire_load(g, exchange_of(g, l), &word));
    exchanges[l] = (uint32_t)word;
  }
  return CUMOE_OK;
}

/* How far a rank has come with a mask: the more ranks it leaves out, the further. */
static uint32_t has_told(const group *g, const uint64_t *mask)
{
  return 2 * (uint32_t)left_out(g, mask);
}

static uint32_t has_cleared(const group *g, const uint64_t *mask)
{
  return has_told(g, mask) + 1;
}

static cumoe_status tell(const group *g, const uint64_t *mask, uint32_t how_far)
{
  const uint64_t word = ep_flag(how_far, hash_of(mask));
  for (int32_t r = 0; r < g->shape.ranks; r++)
    if (has(mask, r)) TRY(wire_store(g, r, ep_hello(g, g->rank) + HELLO_MASK, word));
  return CUMOE_OK;
}

static cumoe_status tell_lanes(const group *g, const uint64_t *mask, const uint32_t *exchanges)
{
  uint64_t lanes = 0;
  for (int32_t l = 0; l < g->shape.lanes; l++) lanes |= (uint64_t)exchanges[l] << 32 * l;
  for (int32_t r = 0; r < g->shape.ranks; r++)
    if (has(mask, r)) TRY(wire_store(g, r, ep_hello(g, g->rank) + HELLO_LANES, lanes));
  return tell(g, mask, has_told(g, mask));
}

static cumoe_status give_up(const group *g, int cause, int32_t about, cumoe_status status)
{
  const uint64_t word = ep_abort_word(cause, EP_ACTIVE, about, g->rank);
  wire_give_up(g, word);
  return cause == EP_TIMEOUT ? ep_explain(g, word) : status;
}

/* Until rank r has told of the same mask; its lanes may have come further. */
static cumoe_status hear(const group *g, const uint64_t *mask, int32_t r, uint32_t *furthest)
{
  uint64_t word, lanes, end;
  TRY(wire_wait(g, ep_hello(g, r) + HELLO_MASK, has_told(g, mask), false, &end));
  if (end) return give_up(g, EP_TIMEOUT, r, CUMOE_OK);
  TRY(wire_load(g, ep_hello(g, r) + HELLO_MASK, &word));
  if ((uint32_t)word != hash_of(mask))
    return give_up(g, EP_FAILED, r,
                   fail(CUMOE_ERR_INVALID_ARGUMENT, "active is not what rank %d says: it leaves out %d ranks, this %d",
                        (int)r, (int)(word >> 33), (int)left_out(g, mask)));
  TRY(wire_load(g, ep_hello(g, r) + HELLO_LANES, &lanes));
  for (int32_t l = 0; l < g->shape.lanes; l++) {
    const uint32_t theirs = (uint32_t)(lanes >> 32 * l);
    if ((int32_t)(theirs - furthest[l]) > 0) furthest[l] = theirs;
  }
  return CUMOE_OK;
}

/* All that stay have told: none of them stores an abort word for what is over. */
static cumoe_status go_on(group *g, const uint64_t *mask, const uint32_t *furthest)
{
  for (int32_t l = 0; l < g->shape.lanes; l++) {
    TRY(wire_store(g, g->rank, exchange_of(g, l), furthest[l]));
    g->next[l] = PART_DISPATCH;
  }
  for (int i = 0; i < MASK_WORDS; i++) __atomic_store_n(&g->ways.active[i], mask[i], __ATOMIC_RELAXED);
  TRY(wire_write(g, g->rank, g->at.active, mask, MASK_WORDS * sizeof *mask));
  return wire_store(g, g->rank, g->at.abort, 0);
}

/* Who went on at once might abort, or fail, while another rank has its abort word still to clear. One that was asked
 * for meanwhile, or that only some have kept, is told again. */
static cumoe_status meet_again(group *g, const uint64_t *mask)
{
  uint64_t end = 0;
  TRY(tell(g, mask, has_cleared(g, mask)));
  for (int32_t r = 0; r < g->shape.ranks; r++) {
    if (!has(mask, r)) continue;
    TRY(wire_wait(g, ep_hello(g, r) + HELLO_MASK, has_cleared(g, mask), false, &end));
    if (end) return give_up(g, EP_TIMEOUT, r, CUMOE_OK);
  }
  TRY(wire_load_abort(g, &end));
  if (__atomic_load_n(&g->asked, __ATOMIC_ACQUIRE)) end = ep_abort_word(EP_ASKED, EP_NO_PHASE, g->rank, g->rank);
  if (end == 0) return CUMOE_OK;
  wire_give_up(g, end);
  return ep_explain(g, end);
}

static cumoe_status agree(group *g, const uint64_t *mask)
{
  uint32_t furthest[EP_MAX_LANES];
  __atomic_store_n(&g->asked, false, __ATOMIC_RELEASE);
  TRY(load_lanes(g, furthest));
  TRY(tell_lanes(g, mask, furthest));
  for (int32_t r = 0; r < g->shape.ranks; r++)
    if (has(mask, r)) TRY(hear(g, mask, r, furthest));
  TRY(go_on(g, mask, furthest));
  return meet_again(g, mask);
}

cumoe_status cumoe_group_set_active(cumoe_group handle, const uint64_t *active)
{
  begin_call(__func__);
  group *g;
  uint64_t mask[MASK_WORDS] = {0};
  TRY(find_group(handle, &g));
  REQUIRE(!g->staged, CUMOE_ERR_NOT_SUPPORTED,
          "config.flags of the group has CUMOE_GROUP_NCCL: make another group, of a communicator of those that stay");
  TRY(take_mask(g, active, mask));
  ON_DEVICE_RELAXED(g->context, agree(g, mask));
}
