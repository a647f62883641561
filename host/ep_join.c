/*
 * How the ranks of a group join and leave (kernels/ep/ep.h). Each has a line of words in every arena, its hello, in
 * which it tells how far it has come:
 *   HAS_TOLD     what it was created with is in its line: every rank compares that with its own
 *   HAS_WRITTEN  a pattern is at both ends of every array that it will write, in all arenas
 *   HAS_SEEN     it has found the patterns of all ranks in its own arena, and so may be sent tokens
 *   HAS_LEFT     it writes no more: once all ranks have left, an arena may end
 */
#include "check.h"
#include "context.h"
#include "ep.h"

#include <string.h>

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

/* This rank's line in arenas[]. */
static uint64_t own_hello(const group *g)
{
  return g->to.hello + (uint64_t)g->rank * EP_LINE;
}

static cumoe_status tell_state(group *g, uint32_t state)
{
  for (int32_t r = 0; r < g->shape.ranks; r++) TRY(wire_store(g, r, own_hello(g), ep_flag(state, 0)));
  if (!g->staged) return CUMOE_OK;
  return staged_bring(g, state == HAS_WRITTEN ? UINT64_MAX : (uint64_t)1 << PIECE_HELLO);
}

static cumoe_status wait_for_state(const group *g, int32_t r, uint32_t state)
{
  uint64_t end;
  TRY(wire_wait(g, ep_hello(g, r), state, true, &end));
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

/* This rank has found what others may not see, such as wires that lead elsewhere: they are told to give up. */
static cumoe_status give_up_create(const group *g, int32_t about, cumoe_status status)
{
  wire_give_up(g, ep_abort_word(EP_FAILED, EP_CREATE, about, g->rank));
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

/* Where ranks disagree, each of them sees the same difference: all fail with a text of their own, and none has to be
 * told. */
static cumoe_status compare_facts(const group *g, int32_t r)
{
#define FACT(name, value) name,
  static const char *const names[] = {FACT_LIST(FACT)};
#undef FACT
  uint64_t line[1 + FACTS], own[FACTS];
  const uint64_t *theirs = line + 1;
  facts_of(g, own);
  TRY(wire_read(g, ep_hello(g, r) + HELLO_FACTS, line, sizeof line));
  TRY(check_wired(g, r, (int32_t)theirs[FACT_RANK], (int32_t)line[0]));
  for (int i = 0; i < FACTS; i++)
    REQUIRE(i == FACT_RANK || own[i] == theirs[i], CUMOE_ERR_INVALID_ARGUMENT,
            "%s is %llu on rank %d and %llu on rank %d", names[i], (unsigned long long)own[i], (int)g->rank,
            (unsigned long long)theirs[i], (int)r);
  return CUMOE_OK;
}

cumoe_status ep_check_fresh(const group *g)
{
  uint64_t word = 0, any = 0;
  TRY(wire_load(g, ep_hello(g, g->rank), &any));
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

/* ---- the wires ---- */

/* The first and the last bytes of what rank `from` writes in rank `to`'s arena, array by array. */
enum { PATTERN_BYTES = 16 };

static unsigned char pattern(int32_t from, int32_t to, uint64_t at)
{
  const uint64_t mixed = (at * 1024 + (uint64_t)from) * 1024 + (uint64_t)to + 1;
  return (unsigned char)(mixed * 0x9e3779b97f4a7c15u >> 56);
}

/* One end of an array. same NULL: its pattern is written to rank `to`, at at + shift of its arena (staged: its
 * message); else looked for at `at` of the own arena. */
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

/* All ends of a tier's arrays in a lane, as try_end: `own` as this rank reads them, `others` as it writes them. */
static cumoe_status patterns_of(const group *g, int32_t from, int32_t to, int32_t lane, const ep_tier *own,
                                const ep_tier *others, bool *same)
{
  for (segment i = SEGMENT_X; i < SEGMENTS; i++) {
    const uint64_t bytes = ep_segment_bytes(&g->shape, own->tokens, i), shift = others->at[i] - own->at[i];
    const uint64_t start = g->at.lane + (uint64_t)lane * g->at.lane_bytes + own->at[i] + (uint64_t)from * bytes;
    const size_t part = bytes < PATTERN_BYTES ? (size_t)bytes : PATTERN_BYTES;
    TRY(try_end(g, from, to, start, shift, part, same));
    TRY(try_end(g, from, to, start + bytes - part, shift, part, same));
  }
  return CUMOE_OK;
}

/* *same becomes false where one is not there. */
static cumoe_status patterns(const group *g, int32_t from, int32_t to, bool *same)
{
  const ep_tiers *others = g->staged ? &g->staging.tiers : &g->tiers;
  for (int32_t lane = 0; lane < g->shape.lanes; lane++)
    for (int32_t i = 0; i < g->tiers.count; i++)
      TRY(patterns_of(g, from, to, lane, &g->tiers.of[i], &others->of[i], same));
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

cumoe_status ep_join(group *g)
{
  TRY(tell_facts(g));
  for (int32_t r = 0; r < g->shape.ranks; r++) {
    TRY(wait_for_state(g, r, HAS_TOLD));
    TRY(compare_facts(g, r));
  }
  return try_wires(g);
}

/* ---- leaving ---- */

cumoe_status ep_leave(group *g)
{
  uint64_t end;
  if (g->staged) return CUMOE_OK; /* nobody does */
  TRY(tell_state(g, HAS_LEFT));
  for (int32_t r = 0; r < g->shape.ranks; r++) {
    if (!ep_is_active(&g->ways, r)) continue;
    TRY(wire_wait(g, ep_hello(g, r), HAS_LEFT, false, &end));
    if (end) return ep_explain(g, ep_abort_word(EP_TIMEOUT, EP_DESTROY, r, g->rank));
  }
  return CUMOE_OK;
}
