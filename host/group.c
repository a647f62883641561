/* Groups of ranks: they agree, try their wires, give up together and leave together. See kernels/ep/ep.h. */
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

static ep_shape shape_of_group(const cumoe_moe_desc *d, const cumoe_group_config *c)
{
  return (ep_shape){.ranks = c->ranks,
                    .lanes = c->lanes,
                    .experts = d->num_experts,
                    .top_k = d->routing.top_k,
                    .hidden = d->hidden,
                    .element = (int32_t)cumoe_dtype_bytes((cumoe_dtype)d->dtype),
                    .exact = (c->flags & CUMOE_GROUP_EXACT) != 0,
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

static cumoe_status check_timeout(const char *name, int64_t *timeout_ns)
{
  REQUIRE(*timeout_ns >= 0, CUMOE_ERR_INVALID_ARGUMENT, "%s is %lld, must be 0 (30 s) or more", name,
          (long long)*timeout_ns);
  if (*timeout_ns == 0) *timeout_ns = INT64_C(30000000000);
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
  REQUIRE(c->max_tokens >= 1 && c->max_tokens <= INT32_MAX / k / c->ranks, CUMOE_ERR_INVALID_ARGUMENT,
          "config.max_tokens is %lld, must be 1 .. %d (2^31 / top_k / ranks)", (long long)c->max_tokens,
          (int)(INT32_MAX / k / c->ranks));
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
  const ep_shape shape = shape_of_group(&plan->desc, &c);
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

static cumoe_status give_up(const group *g, int cause, int phase, int about)
{
  wire_give_up(g, ep_abort_word(cause, phase, about, g->rank));
  return CUMOE_OK;
}

cumoe_status cumoe_group_abort(cumoe_group handle)
{
  begin_call(__func__);
  group *g;
  TRY(find_group(handle, &g));
  ON_DEVICE_RELAXED(g->context, give_up(g, EP_ASKED, EP_NO_PHASE, g->rank));
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

/* ---- what ranks say of themselves ---- */

/* States of a rank, in the upper half of the first word of its hello lines. */
enum { HAS_TOLD = 1, HAS_WRITTEN, HAS_SEEN, HAS_LEFT };

#define FACT_LIST(X)                                                                                                   \
  X("the library's version", CUMOE_VERSION)                                                                            \
  X("config.rank", g->rank)                                                                                            \
  X("config.ranks", g->shape.ranks)                                                                                    \
  X("config.lanes", g->shape.lanes)                                                                                    \
  X("config.max_tokens", g->shape.capacity)                                                                            \
  X("config.flags", flags_of(g))                                                                                       \
  X("desc.num_experts", g->shape.experts)                                                                              \
  X("routing.top_k", g->shape.top_k)                                                                                   \
  X("desc.hidden", g->shape.hidden)                                                                                    \
  X("the device: 0 the CPU, 1 a GPU:", !on_cpu(g->context))                                                            \
  X("desc.dtype", g->plan.desc.dtype)                                                                                  \
  X("the hash of the rest of desc", hash_of(&g->plan.desc))
enum { FACT_RANK = 1, FACTS = 12, FACT_WORDS = (HELLO_LANES - HELLO_FACTS) / 8 - 1 };
_Static_assert(FACTS <= FACT_WORDS, "a line holds a flag, whom it is for, and the facts");

static uint32_t flags_of(const group *g)
{
  return (g->shape.exact ? CUMOE_GROUP_EXACT : 0) | (g->ways.dedup ? CUMOE_GROUP_DEDUP : 0) |
         (g->staged ? CUMOE_GROUP_NCCL : 0);
}

/* FNV-1a of all that all ranks must share: not how many experts one of them has. */
static uint64_t hash_of(const cumoe_moe_desc *desc)
{
  cumoe_moe_desc d = *desc;
  uint64_t hash = 14695981039346656037u;
  d.size = 0;
  d.local_experts = 0;
  for (size_t i = 0; i < sizeof d; i++) hash = (hash ^ ((const unsigned char *)&d)[i]) * 1099511628211u;
  return hash;
}

static void facts_of(const group *g, uint64_t facts[FACTS])
{
  size_t n = 0;
#define FACT(name, value) facts[n++] = (uint64_t)(value);
  FACT_LIST(FACT)
#undef FACT
}

/* Rank `from`'s line in the own arena. */
static uint64_t hello(const group *g, int32_t from)
{
  return g->at.hello + (uint64_t)from * EP_LINE;
}

/* This rank's line in arenas[]. */
static uint64_t own_hello(const group *g)
{
  return g->to.hello + (uint64_t)g->rank * EP_LINE;
}

static cumoe_status tell_state(group *g, uint32_t state)
{
  for (int32_t r = 0; r < g->shape.ranks; r++) TRY(wire_store(g, r, own_hello(g), ep_flag(state, 0)));
  if (!g->staged) return CUMOE_OK;
  return staged_bring(g, state == HAS_WRITTEN ? (1u << PIECES) - 1 : 1u << PIECE_HELLO);
}

static cumoe_status wait_for_state(const group *g, int32_t r, uint32_t state)
{
  uint64_t end;
  TRY(wire_wait(g, hello(g, r), state, true, &end));
  REQUIRE(end != EP_LATE || !g->staged, CUMOE_ERR_PEER, "rank %d failed where this one did not", (int)r);
  if (end == EP_LATE) wire_give_up(g, end = ep_abort_word(EP_TIMEOUT, EP_CREATE, r, g->rank));
  return end ? ep_explain(g, end) : CUMOE_OK;
}

static cumoe_status tell_facts(group *g)
{
  for (int32_t r = 0; r < g->shape.ranks; r++) {
    uint64_t line[1 + FACTS] = {(uint64_t)r};
    facts_of(g, line + 1);
    TRY(wire_write(g, r, own_hello(g) + HELLO_FACTS, line, sizeof line));
  }
  return tell_state(g, HAS_TOLD);
}

/* Where wires lead elsewhere, not every rank can see it. */
static cumoe_status give_up_create(const group *g, int32_t about, cumoe_status status)
{
  CUMOE_IGNORE(give_up(g, EP_FAILED, EP_CREATE, about));
  return status;
}

static cumoe_status check_wired(const group *g, int32_t r, int32_t wrote, int32_t to)
{
  if (wrote == r && to == g->rank) return CUMOE_OK;
  return give_up_create(
      g, r,
      fail(CUMOE_ERR_INVALID_ARGUMENT,
           "config.arenas: in rank %d's arena, the line of rank %d holds what rank %d wrote for rank %d", (int)g->rank,
           (int)r, (int)wrote, (int)to));
}

/* What ranks say differs for all of them: each finds it by itself, so that all have the text. */
static cumoe_status compare_facts(const group *g, int32_t r)
{
#define FACT(name, value) name,
  static const char *const names[] = {FACT_LIST(FACT)};
#undef FACT
  uint64_t line[1 + FACTS], own[FACTS];
  const uint64_t *theirs = line + 1;
  facts_of(g, own);
  TRY(wire_read(g, hello(g, r) + HELLO_FACTS, line, sizeof line));
  TRY(check_wired(g, r, (int32_t)theirs[FACT_RANK], (int32_t)line[0]));
  for (int i = 0; i < FACTS; i++)
    REQUIRE(i == FACT_RANK || own[i] == theirs[i], CUMOE_ERR_INVALID_ARGUMENT,
            "%s is %llu on rank %d and %llu on rank %d", names[i], (unsigned long long)own[i], (int)g->rank,
            (unsigned long long)theirs[i], (int)r);
  return CUMOE_OK;
}

/* ---- the wires ---- */

/* The first and the last bytes of what rank `from` writes in rank `to`'s arena, array by array. */
enum { PATTERN_BYTES = 16, PATTERN_ARRAYS = 4 };

static unsigned char pattern(int32_t from, int32_t to, uint64_t at)
{
  const uint64_t mixed = (at * 1024 + (uint64_t)from) * 1024 + (uint64_t)to + 1;
  return (unsigned char)(mixed * 0x9e3779b97f4a7c15u >> 56);
}

/* One end of an array: written there, `shift` behind, or looked for in the own arena. */
static cumoe_status try_end(const group *g, int32_t from, int32_t to, uint64_t at, uint64_t shift, size_t bytes,
                            bool *same)
{
  unsigned char want[PATTERN_BYTES], got[PATTERN_BYTES];
  for (size_t i = 0; i < bytes; i++) want[i] = pattern(from, to, at + i);
  if (!same) return wire_write(g, to, at + shift, want, bytes);
  TRY(wire_read(g, at, got, bytes));
  *same &= memcmp(want, got, bytes) == 0;
  return CUMOE_OK;
}

/* same NULL: writes; else clears *same where one is not there. */
static cumoe_status patterns(const group *g, int32_t from, int32_t to, bool *same)
{
  const uint64_t tokens = (uint64_t)g->shape.capacity, row = (uint64_t)g->shape.hidden * (uint64_t)g->shape.element;
  const uint64_t k = (uint64_t)g->shape.top_k;
  const uint64_t at[PATTERN_ARRAYS] = {g->at.x, g->at.ids, g->at.weights, g->at.y};
  const uint64_t there[PATTERN_ARRAYS] = {g->to.x, g->to.ids, g->to.weights, g->to.y};
  const uint64_t bytes[PATTERN_ARRAYS] = {tokens * row, tokens * k * 4, tokens * k * 4,
                                          tokens * row * (uint64_t)ep_answers(&g->shape)};
  for (int32_t lane = 0; lane < g->shape.lanes; lane++)
    for (int i = 0; i < PATTERN_ARRAYS; i++) {
      const uint64_t start = g->at.lane + (uint64_t)lane * g->at.lane_bytes + at[i] + (uint64_t)from * bytes[i];
      const size_t part = bytes[i] < PATTERN_BYTES ? (size_t)bytes[i] : PATTERN_BYTES;
      TRY(try_end(g, from, to, start, there[i] - at[i], part, same));
      TRY(try_end(g, from, to, start + bytes[i] - part, there[i] - at[i], part, same));
    }
  return CUMOE_OK;
}

static cumoe_status check_patterns(const group *g, int32_t r)
{
  bool same = true;
  TRY(patterns(g, r, g->rank, &same));
  if (same) return CUMOE_OK;
  if (g->staged)
    return give_up_create(g, r,
                          fail(CUMOE_ERR_INVALID_ARGUMENT,
                               "config.comm: what rank %d has sent to rank %d is not in its arena", (int)r,
                               (int)g->rank));
  return give_up_create(g, r,
                        fail(CUMOE_ERR_INVALID_ARGUMENT,
                             "config.arenas: what rank %d wrote for rank %d is not in its arena: they overlap, or lead "
                             "elsewhere",
                             (int)r, (int)g->rank));
}

static cumoe_status see_patterns(const group *g)
{
  for (int32_t r = 0; r < g->shape.ranks; r++) {
    TRY(wait_for_state(g, r, HAS_WRITTEN));
    TRY(check_patterns(g, r));
  }
  return CUMOE_OK;
}

/* Staged, the others wait in NCCL for what comes next: they get it, and see by it that this rank has failed. */
static cumoe_status let_go(group *g, cumoe_status status)
{
  error_text text;
  save_error(&text);
  if (g->staged) CUMOE_IGNORE(tell_state(g, HAS_TOLD));
  restore_error(&text);
  return status;
}

static cumoe_status try_wires(group *g)
{
  const int32_t ranks = g->shape.ranks;
  for (int32_t r = 0; r < ranks; r++) TRY(patterns(g, g->rank, r, NULL));
  TRY(tell_state(g, HAS_WRITTEN));
  const cumoe_status seen = see_patterns(g);
  if (seen != CUMOE_OK) return let_go(g, seen);
  TRY(tell_state(g, HAS_SEEN));
  for (int32_t r = 0; r < ranks; r++) TRY(wait_for_state(g, r, HAS_SEEN));
  return CUMOE_OK;
}

static cumoe_status join(group *g)
{
  TRY(tell_facts(g));
  for (int32_t r = 0; r < g->shape.ranks; r++) {
    TRY(wait_for_state(g, r, HAS_TOLD));
    TRY(compare_facts(g, r));
  }
  return try_wires(g);
}

/* ---- the group as an object ---- */

cumoe_status find_group(cumoe_group handle, group **found)
{
  void *object;
  TRY(find_object(OBJECT_GROUP, "group", handle, &object));
  *found = object;
  return check_process((*found)->context);
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

static void drop_plans(const group *g)
{
  CUMOE_IGNORE(cumoe_plan_destroy(g->shard));
  CUMOE_IGNORE(cumoe_plan_destroy(g->shared));
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

/* No other rank writes to a lane before this one has seen the patterns. */
static cumoe_status check_fresh(const group *g)
{
  uint64_t word = 0, any = 0;
  TRY(wire_load(g, hello(g, g->rank), &any));
  for (int32_t lane = 0; lane < g->shape.lanes; lane++) {
    const uint64_t words = g->at.lane + (uint64_t)lane * g->at.lane_bytes;
    TRY(wire_load(g, words + g->at.exchange, &word));
    any |= word;
    for (int32_t r = 0; r < g->shape.ranks; r++) {
      TRY(wire_load(g, words + g->at.in + (uint64_t)r * EP_LINE, &word));
      any |= word;
      TRY(wire_load(g, words + g->at.back + (uint64_t)r * EP_LINE, &word));
      any |= word;
    }
  }
  if (any == 0) return CUMOE_OK;
  return give_up_create(g, g->rank,
                        fail(CUMOE_ERR_INVALID_ARGUMENT, "arena of rank %d was not filled with zeros", (int)g->rank));
}

static cumoe_status open_wired(group *g)
{
  TRY(wire_open(g));
  TRY(check_fresh(g));
  TRY(write_constants(g));
  return join(g);
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

/* As addresses alone: below the arena there need not be memory. */
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
  begin_call(call);
  return open_entered(g);
}

static cumoe_status close_entered(group *g)
{
  GIVE_BACK_RELAXED(g->context, end_group(g));
}

cumoe_status cumoe_group_create(cumoe_context of, cumoe_plan handle, const cumoe_group_config *config,
                                cumoe_view_mut arena, cumoe_group *made)
{
  begin_call(__func__);
  struct context *context;
  const struct plan *plan;
  cumoe_group_config c;
  REQUIRE(made, CUMOE_ERR_INVALID_ARGUMENT, "group is null");
  *made = NULL;
  TRY(find_context(of, &context));
  TRY(find_plan(handle, &plan));
  REQUIRE(plan->context == context, CUMOE_ERR_WRONG_DEVICE, "plan belongs to another context");
  TRY(take_config(plan, config, &c));
  const ep_shape shape = shape_of_group(&plan->desc, &c);
  TRY(take_arenas(plan, &c, arena_bytes(&shape, &c), arena));
  const size_t bytes = sizeof(group) + (size_t)c.ranks * sizeof(char *);
  group *g = calloc(1, bytes);
  REQUIRE(g, CUMOE_ERR_OUT_OF_MEMORY, "no host memory for %zu bytes", bytes);
  g->context = context;
  g->handle = of;
  g->plan = *plan;
  g->shape = shape;
  g->at = g->to = ep_lay_out(&shape);
  g->rank = c.rank;
  g->ways.dedup = c.flags & CUMOE_GROUP_DEDUP;
  for (int32_t r = 0; r < c.ranks; r++) g->ways.active[r / 64] |= (uint64_t)1 << r % 64;
  g->timeout_ns = c.timeout_ns;
  g->arena = arena.data;
  g->staged = c.flags & CUMOE_GROUP_NCCL;
  if (g->staged)
    place_messages(g);
  else
    memcpy(g->arenas, c.arenas, (size_t)c.ranks * sizeof *g->arenas);
  cumoe_status status = g->staged ? take_comm(g, &c) : CUMOE_OK;
  if (status == CUMOE_OK) status = open_group(g, of, __func__);
  on_close(context, CLOSE_GROUPS, end_groups);
  if (status == CUMOE_OK && !(*made = publish_object(OBJECT_GROUP, context, g)))
    status = fail(CUMOE_ERR_OUT_OF_MEMORY, "no host memory for another group");
  if (status == CUMOE_OK) return CUMOE_OK;
  drop_plans(g);
  if (g->stuck && publish_object(OBJECT_GROUP, context, g)) return status; /* until the context ends: as of arenas */
  CUMOE_IGNORE(close_entered(g));
  return status;
}

/* Until then a rank may write to this arena. */
static cumoe_status leave(group *g)
{
  uint64_t end;
  if (g->staged) return CUMOE_OK; /* nobody does */
  TRY(tell_state(g, HAS_LEFT));
  for (int32_t r = 0; r < g->shape.ranks; r++) {
    if (!ep_is_active(&g->ways, r)) continue;
    TRY(wire_wait(g, hello(g, r), HAS_LEFT, false, &end));
    if (end) return ep_explain(g, ep_abort_word(EP_TIMEOUT, EP_DESTROY, r, g->rank));
  }
  return CUMOE_OK;
}

static cumoe_status leave_entered(group *g)
{
  ON_DEVICE_RELAXED(g->context, leave(g));
}

cumoe_status cumoe_group_destroy(cumoe_group handle)
{
  begin_call(__func__);
  group *g;
  if (!handle) return CUMOE_OK;
  TRY(find_group(handle, &g));
  if (!retire_object(handle)) return find_group(handle, &g);
  const cumoe_status status = leave_entered(g);
  drop_plans(g);
  const cumoe_status closed = close_entered(g);
  return status != CUMOE_OK ? status : closed;
}
