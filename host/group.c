/* Groups of ranks: configured, created, given up, destroyed. See ep.h; how ranks join and leave: ep_join.c. */
#include "check.h"
#include "context.h"
#include "debug.h"
#include "ep.h"
#include "objects.h"
#include "plan.h"

#include <stdlib.h>
#include <string.h>

_Static_assert((int)CUMOE_MAX_RANKS == EP_MAX_RANKS && (int)CUMOE_MAX_LANES == EP_MAX_LANES &&
                   (int)CUMOE_MAX_REPLICAS == EP_MAX_REPLICAS && CUMOE_MAX_EXPERTS <= 1 << EP_PLACE_SHIFT,
               "the manual's limits are the kernels'");
_Static_assert((int)CUMOE_GROUP_TIMEOUT == EP_TIMEOUT && (int)CUMOE_GROUP_FAILED == EP_FAILED &&
                   (int)CUMOE_GROUP_ABORTED == EP_ASKED && (int)CUMOE_PHASE_CREATE == EP_CREATE &&
                   (int)CUMOE_PHASE_DISPATCH == EP_DISPATCH && (int)CUMOE_PHASE_RETURN == EP_RETURN &&
                   (int)CUMOE_PHASE_DESTROY == EP_DESTROY && (int)CUMOE_PHASE_SET_ACTIVE == EP_ACTIVE,
               "an abort word says what the manual names");

/* ---- the configuration ---- */

/* Packets are between GPUs that reach each other's memory; as many as EXACT's answers are would take too much of it. */
static int32_t packets_of(const struct plan *plan, const cumoe_group_config *c)
{
  const bool none = on_cpu(plan->context) || c->flags & (CUMOE_GROUP_EXACT | CUMOE_GROUP_NCCL);
  return none ? 0 : (int32_t)(c->max_tokens < EP_PACKET_TOKENS ? c->max_tokens : EP_PACKET_TOKENS);
}

static ep_shape shape_of_group(const struct plan *plan, const cumoe_group_config *c)
{
  const cumoe_moe_desc *d = &plan->desc;
  return (ep_shape){.ranks = c->ranks,
                    .lanes = c->lanes,
                    .experts = d->num_experts,
                    .top_k = d->routing.top_k,
                    .hidden = d->hidden,
                    .element = (int32_t)cumoe_dtype_bytes((cumoe_dtype)d->dtype),
                    .exact = (c->flags & CUMOE_GROUP_EXACT) != 0,
                    .packets = packets_of(plan, c),
                    .capacity = c->max_tokens};
}

/* What the plan and the configuration make impossible together. */
static cumoe_status check_served(const cumoe_moe_desc *d, const cumoe_group_config *c)
{
  const bool exact = c->flags & CUMOE_GROUP_EXACT;
  REQUIRE(!(d->flags & CUMOE_MOE_UNREDUCED), CUMOE_ERR_NOT_SUPPORTED, "desc.flags of the plan has UNREDUCED");
  REQUIRE(d->routing.top_k <= d->num_experts, CUMOE_ERR_NOT_SUPPORTED,
          "routing.top_k of the plan is %d, must be at most num_experts = %d", (int)d->routing.top_k,
          (int)d->num_experts);
  REQUIRE(exact || c->ranks <= MAX_TOP_K, CUMOE_ERR_NOT_SUPPORTED,
          "config.ranks is %d, must be at most %d without CUMOE_GROUP_EXACT", (int)c->ranks, MAX_TOP_K);
  REQUIRE(exact || d->routing.identity_experts == 0, CUMOE_ERR_NOT_SUPPORTED,
          "routing.identity_experts of the plan is %d, must be 0 without CUMOE_GROUP_EXACT",
          (int)d->routing.identity_experts);
  REQUIRE(!(c->flags & CUMOE_GROUP_NCCL) || c->lanes == 1, CUMOE_ERR_NOT_SUPPORTED,
          "config.lanes is %d, must be 1 with CUMOE_GROUP_NCCL: a group and a communicator for each", (int)c->lanes);
  return CUMOE_OK;
}

/* Copies it, with defaults filled in. */
static cumoe_status take_config(const struct plan *plan, const cumoe_group_config *from, cumoe_group_config *c)
{
  const int32_t k = plan->desc.routing.top_k;
  const uint32_t known = CUMOE_GROUP_EXACT | CUMOE_GROUP_DEDUP | CUMOE_GROUP_NCCL;
  TRY(take_struct("config", from, c));
  if (c->lanes == 0) c->lanes = 1;
  REQUIRE(!(c->flags & ~known), CUMOE_ERR_INVALID_ARGUMENT, "config.flags is 0x%x, known are 0x%x", c->flags, known);
  REQUIRE(c->reserved == 0, CUMOE_ERR_INVALID_ARGUMENT, "config.reserved is %d, must be 0", (int)c->reserved);
  REQUIRE(c->ranks >= 1 && c->ranks <= EP_MAX_RANKS, CUMOE_ERR_INVALID_ARGUMENT, "config.ranks is %d, must be 1 .. %d",
          (int)c->ranks, EP_MAX_RANKS);
  REQUIRE(c->lanes >= 1 && c->lanes <= EP_MAX_LANES, CUMOE_ERR_INVALID_ARGUMENT,
          "config.lanes is %d, must be 0 (1) .. %d", (int)c->lanes, EP_MAX_LANES);
  REQUIRE(c->max_tokens >= 1 && c->max_tokens <= CUMOE_MAX_PAIRS / k / c->ranks, CUMOE_ERR_INVALID_ARGUMENT,
          "config.max_tokens is %lld, must be 1 .. %d (CUMOE_MAX_PAIRS / top_k / ranks)", (long long)c->max_tokens,
          (int)(CUMOE_MAX_PAIRS / k / c->ranks));
  TRY(check_timeout("config.timeout_ns", &c->timeout_ns));
  return check_served(&plan->desc, c);
}

static cumoe_status take_others(const cumoe_group_config *c, const void *own)
{
  REQUIRE(!c->comm && !c->nccl, CUMOE_ERR_INVALID_ARGUMENT,
          "config.comm or config.nccl is given, config.flags has no CUMOE_GROUP_NCCL");
  REQUIRE(c->arenas, CUMOE_ERR_INVALID_ARGUMENT, "config.arenas is null");
  for (int32_t r = 0; r < c->ranks; r++)
    REQUIRE(c->arenas[r] && (uintptr_t)c->arenas[r] % EP_ALIGN == 0, CUMOE_ERR_INVALID_ARGUMENT,
            "config.arenas[%d] is %p, must be an address aligned to %d", (int)r, c->arenas[r], EP_ALIGN);
  REQUIRE(c->arenas[c->rank] == own, CUMOE_ERR_INVALID_ARGUMENT,
          "config.arenas[%d] is %p, must be arena.data %p: the rank's own", (int)c->rank, c->arenas[c->rank], own);
  return CUMOE_OK;
}

static cumoe_status take_arenas(const struct plan *plan, const cumoe_group_config *c, uint64_t bytes,
                                cumoe_view_mut arena)
{
  const operand want = {"arena", 1, arena.cols, DTYPE_BIT(CUMOE_U8), EP_ALIGN};
  REQUIRE(c->rank >= 0 && c->rank < c->ranks, CUMOE_ERR_INVALID_ARGUMENT,
          "config.rank is %d, must be 0 .. ranks - 1 = %d", (int)c->rank, (int)c->ranks - 1);
  const bool staged = c->flags & CUMOE_GROUP_NCCL;
  REQUIRE(c->comm || !staged, CUMOE_ERR_INVALID_ARGUMENT, "config.comm is null, config.flags has CUMOE_GROUP_NCCL");
  TRY(check_operand(plan->context, &want, cumoe_const(arena)));
  REQUIRE((uint64_t)arena.cols >= bytes, CUMOE_ERR_WORKSPACE, "arena has %lld bytes, %llu are needed",
          (long long)arena.cols, (unsigned long long)bytes);
  return staged ? CUMOE_OK : take_others(c, arena.data);
}

static uint64_t arena_bytes(const ep_shape *shape, const cumoe_group_config *c)
{
  return c->flags & CUMOE_GROUP_NCCL ? ep_lay_out_staging(shape, 0).bytes : ep_lay_out(shape).bytes;
}

cumoe_status cumoe_ep_arena(cumoe_plan handle, const cumoe_group_config *config, size_t *bytes)
{
  begin_call(__func__);
  const struct plan *plan;
  cumoe_group_config c;
  TRY(find_plan(handle, &plan));
  TRY(take_config(plan, config, &c));
  REQUIRE(bytes, CUMOE_ERR_INVALID_ARGUMENT, "bytes is null");
  const ep_shape shape = shape_of_group(plan, &c);
  *bytes = arena_bytes(&shape, &c);
  return CUMOE_OK;
}

/* ---- giving up ---- */

typedef struct abort_facts {
  int32_t cause, phase, about, by;
} abort_facts;

static abort_facts abort_facts_of(uint64_t word)
{
  return (abort_facts){(int32_t)(word >> 56 & 0x7f), (int32_t)(word >> 48 & 0xff), (int32_t)(word >> 16 & 0xffff),
                       (int32_t)(word & 0xffff)};
}

cumoe_status ep_explain(const group *g, uint64_t word)
{
  static const char *const did[] = {"",
                                    "joined (create)",
                                    "sent its tokens (dispatch)",
                                    "returned its results (return)",
                                    "left (destroy)",
                                    "told where it is (set_active)"};
  const abort_facts f = abort_facts_of(word);
  const char *what = f.phase > 0 && f.phase <= EP_ACTIVE ? did[f.phase] : "answered";
  if (f.cause == EP_TIMEOUT && f.by == g->rank)
    return fail(CUMOE_ERR_PEER, "rank %d has not %s within %g s: the group has given up", (int)f.about, what,
                (double)timeout_of(g) * 1e-9);
  if (f.cause == EP_TIMEOUT)
    return fail(CUMOE_ERR_PEER, "rank %d gave up: rank %d had not %s in time", (int)f.by, (int)f.about, what);
  if (f.cause == EP_FAILED)
    return fail(CUMOE_ERR_PEER, "rank %d gave up: a call of its own failed before it had %s", (int)f.by, what);
  return fail(CUMOE_ERR_PEER, "rank %d has aborted the group", (int)f.by);
}

/* By NCCL kernels may wait behind what it has not brought: they run when the communicator has been ended. */
static cumoe_status give_up(group *g)
{
  __atomic_store_n(&g->asked, true, __ATOMIC_RELEASE);
  const uint64_t word = ep_abort_word(EP_ASKED, EP_NO_PHASE, g->rank, g->rank);
  wire_give_up(g, word);
  return g->staged ? wire_store(g, g->rank, g->at.abort, word) : CUMOE_OK;
}

cumoe_status cumoe_group_abort(cumoe_group handle)
{
  begin_call(__func__);
  group *g;
  TRY(find_group(handle, &g));
  ON_DEVICE_RELAXED(g->context, give_up(g));
}

static cumoe_status read_fault(const group *g, cumoe_group_fault *fault)
{
  uint64_t word = 0;
  TRY(wire_load_abort(g, &word));
  const abort_facts f = abort_facts_of(word);
  const cumoe_group_fault record = {0, f.cause, f.phase, f.about, f.by, 0};
  give_struct(&record, fault);
  return CUMOE_OK;
}

cumoe_status cumoe_group_fault_read(cumoe_group handle, cumoe_group_fault *fault)
{
  begin_call(__func__);
  group *g;
  TRY(find_group(handle, &g));
  TRY(check_struct("fault", fault));
  ON_DEVICE_RELAXED(g->context, read_fault(g, fault));
}

/* ---- how long it waits ---- */

static cumoe_status set_timeout(group *g, int64_t timeout_ns)
{
  __atomic_store_n(&g->timeout_ns, timeout_ns, __ATOMIC_RELAXED);
  return wire_store(g, g->rank, g->at.timeout, (uint64_t)timeout_ns);
}

cumoe_status cumoe_group_set_timeout(cumoe_group handle, int64_t timeout_ns)
{
  begin_call(__func__);
  group *g;
  TRY(find_group(handle, &g));
  REQUIRE(!g->staged, CUMOE_ERR_NOT_SUPPORTED,
          "config.flags of the group has CUMOE_GROUP_NCCL: NCCL waits without a limit");
  TRY(check_timeout("timeout_ns", &timeout_ns));
  ON_DEVICE_RELAXED(g->context, set_timeout(g, timeout_ns));
}

/* ---- the group as an object ---- */

cumoe_status find_group(cumoe_group handle, group **found)
{
  void *object;
  TRY(find_object(OBJECT_GROUP, "group", handle, &object));
  *found = object;
  return CUMOE_OK;
}

static cumoe_status end_group(void *object)
{
  group *g = object;
  const cumoe_status status = wire_close(g);
  free(g);
  return status;
}

static cumoe_status end_groups(struct context *context)
{
  return retire_objects(OBJECT_GROUP, context, end_group);
}

/* The layers inside: this rank's experts over the tokens of all ranks, and the shared expert alone. */
static cumoe_status make_plans(group *g, cumoe_context context)
{
  const cumoe_moe_desc *d = &g->plan.desc;
  cumoe_moe_desc shard = *d, shared = *d;
  shard.size = shared.size = sizeof shard;
  shard.shared_inter = shared.shared_inter = 0;
  shard.out_dtype = shared.out_dtype = d->dtype;
  shard.routing = (cumoe_routing){.top_k = d->routing.top_k, .flags = d->routing.flags & CUMOE_ROUTE_WEIGHT_ON_INPUT};
  shard.shared_up_format = shard.shared_down_format = (cumoe_format){0};
  if (g->shape.exact) shard.flags |= CUMOE_MOE_UNREDUCED;
  TRY(cumoe_plan_create(context, &shard, &g->shard));
  if (d->shared_inter == 0) return CUMOE_OK;
  shared.num_experts = shared.local_experts = 1;
  shared.inter = d->shared_inter;
  shared.flags |= CUMOE_MOE_UNREDUCED;
  shared.routing = (cumoe_routing){.top_k = 1};
  shared.up_format = d->shared_up_format;
  shared.down_format = d->shared_down_format;
  shared.shared_up_format = shared.shared_down_format = (cumoe_format){0};
  return cumoe_plan_create(context, &shared, &g->shared);
}

static cumoe_status drop_plans(const group *g)
{
  cumoe_status status = drop_plan(g->shard);
  AND_THEN(status, drop_plan(g->shared));
  return status;
}

static cumoe_status write_constants(const group *g)
{
  int32_t every[MAX_EXPERTS];
  for (int32_t e = 0; e < g->shape.experts; e++) every[e] = e < g->plan.desc.local_experts ? e : -1;
  TRY(wire_write(g, g->rank, g->at.active, g->ways.active, sizeof g->ways.active));
  TRY(wire_store(g, g->rank, g->at.timeout, (uint64_t)g->timeout_ns));
  TRY(wire_write(g, g->rank, g->to.bases, g->arenas, (size_t)g->shape.ranks * sizeof *g->arenas));
  for (int32_t r = 0; g->staged && r < g->shape.ranks; r++) /* of whoever waits */
    TRY(wire_write(g, g->rank, g->at.bases + (uint64_t)r * sizeof g->arena, &g->arena, sizeof g->arena));
  return wire_write(g, g->rank, g->at.every_expert, every, (size_t)g->shape.experts * sizeof *every);
}

static cumoe_status open_wired(group *g)
{
  TRY(wire_open(g));
  TRY(ep_check_fresh(g));
  TRY(write_constants(g));
  return ep_join(g);
}

static cumoe_status open_entered(group *g)
{
  ON_DEVICE_RELAXED(g->context, open_wired(g));
}

/* Before anything is made. */
static cumoe_status take_comm(group *g, const cumoe_group_config *c)
{
  TRY(nccl_open(&g->nccl, c->nccl, c->comm));
  REQUIRE(nccl_has_sends(&g->nccl), CUMOE_ERR_NOT_SUPPORTED, "config.comm needs NCCL %s, with ncclSend: this is %s",
          say_nccl(NCCL_SENDS_SINCE).text, say_nccl(g->nccl.version).text);
  return nccl_check(&g->nccl, c->rank, c->ranks, g->context->device);
}

/* Staged, arenas[r] is where rank r's arena would begin for its segments of this rank to lie in the message to it
 * (ep_staging). Only segments are reached from there: below the own arena there need not be memory. */
static void place_messages(group *g)
{
  g->staging = ep_lay_out_staging(&g->shape, g->rank);
  g->to = g->staging.to;
  for (int64_t r = 0; r < g->shape.ranks; r++)
    g->arenas[r] = (char *)((uintptr_t)g->arena + (uintptr_t)((r - g->rank) * (int64_t)g->staging.message_bytes));
}

static cumoe_status open_group(group *g, cumoe_context context, const char *call)
{
  TRY(make_plans(g, context));
  begin_call(call); /* once more: the plans' own calls have begun since */
  return open_entered(g);
}

static cumoe_status close_entered(group *g)
{
  GIVE_BACK_RELAXED(g->context, end_group(g));
}

/* The object alone: nothing is opened, and no other rank is met. */
static cumoe_status new_group(const struct plan *plan, const cumoe_group_config *c, cumoe_view_mut arena, group **made)
{
  const ep_shape shape = shape_of_group(plan, c);
  TRY(take_arenas(plan, c, arena_bytes(&shape, c), arena));
  const size_t bytes = sizeof(group) + (size_t)c->ranks * sizeof(char *);
  group *g = *made = calloc(1, bytes);
  REQUIRE(g, CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", bytes);
  g->context = plan->context;
  g->plan = *plan;
  g->shape = shape;
  g->at = g->to = ep_lay_out(&shape);
  g->tiers = ep_lay_out_tiers(&shape);
  g->rank = c->rank;
  g->ways.dedup = c->flags & CUMOE_GROUP_DEDUP;
  for (int32_t r = 0; r < c->ranks; r++) g->ways.active[r / 64] |= (uint64_t)1 << r % 64;
  g->aside_tokens = g->own_rows = INT64_MAX; /* until there is a stream for it (ep_wire.c) */
  g->timeout_ns = c->timeout_ns;
  g->arena = arena.data;
  g->staged = c->flags & CUMOE_GROUP_NCCL;
  if (g->staged)
    place_messages(g);
  else
    memcpy(g->arenas, c->arenas, (size_t)c->ranks * sizeof *g->arenas);
  return CUMOE_OK;
}

cumoe_status cumoe_group_create(cumoe_context of, cumoe_plan handle, const cumoe_group_config *config,
                                cumoe_view_mut arena, cumoe_group *made)
{
  begin_call(__func__);
  struct context *context;
  const struct plan *plan;
  cumoe_group_config c;
  group *g;
  REQUIRE(made, CUMOE_ERR_INVALID_ARGUMENT, "group is null");
  *made = NULL;
  TRY(find_context(of, &context));
  TRY(find_plan(handle, &plan));
  REQUIRE(plan->context == context, CUMOE_ERR_WRONG_DEVICE, "plan belongs to another context");
  TRY(take_config(plan, config, &c));
  TRY(new_group(plan, &c, arena, &g));
  g->handle = of;
  cumoe_status status = g->staged ? take_comm(g, &c) : CUMOE_OK;
  if (status == CUMOE_OK) status = open_group(g, of, __func__);
  on_close(context, CLOSE_GROUPS, end_groups);
  if (status == CUMOE_OK && !(*made = publish_object(OBJECT_GROUP, context, g)))
    status = fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for another group");
  if (status == CUMOE_OK) return CUMOE_OK;
  AND_THEN(status, drop_plans(g));
  /* NCCL may still write to the arena: the group stays until its context ends, as stuck arenas do. */
  if (g->stuck && publish_object(OBJECT_GROUP, context, g)) return status;
  AND_THEN(status, close_entered(g));
  return status;
}

static cumoe_status leave_entered(group *g)
{
  ON_DEVICE_RELAXED(g->context, ep_leave(g));
}

cumoe_status cumoe_group_destroy(cumoe_group handle)
{
  begin_call(__func__);
  group *g;
  if (!handle) return CUMOE_OK;
  TRY(find_group(handle, &g));
  if (!retire_object(handle)) return find_group(handle, &g);
  cumoe_status status = leave_entered(g);
  AND_THEN(status, drop_plans(g));
  AND_THEN(status, close_entered(g));
  return status;
}
