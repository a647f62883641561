/* See exchange.h and kernels/ep/ep.h: flags are C11 atomics, data are ordinary memory between them. */
#include "clock.h"
#include "exchange.h"
#include "fault.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

/* ---- words ---- */

void cpu_ep_store(void *word, uint64_t value)
{
  atomic_store_explicit((_Atomic uint64_t *)word, value, memory_order_release);
}

uint64_t cpu_ep_load(const void *word)
{
  return atomic_load_explicit((_Atomic uint64_t *)(uintptr_t)word, memory_order_acquire);
}

/* More ranks than cores are normal: a rank that waits yields, and soon sleeps. */
static void pause_briefly(int64_t turn)
{
  const struct timespec nap = {.tv_nsec = 20000};
  if (turn < 200)
    sched_yield();
  else
    nanosleep(&nap, NULL);
}

/* Until the upper half of *word has reached `least`: 0; or the abort word says something; or the time is up. */
static uint64_t wait_for(const void *word, uint32_t least, const void *abort, const ep_ways *ways, const void *timeout)
{
  const int64_t begin = now_ns();
  for (int64_t turn = 0;; turn++) {
    if ((int32_t)((uint32_t)(cpu_ep_load(word) >> 32) - least) >= 0) return 0;
    const uint64_t given_up = ep_heeded(ways, cpu_ep_load(abort));
    if (given_up) return given_up;
    if (now_ns() - begin > (int64_t)cpu_ep_load(timeout)) return EP_LATE;
    pause_briefly(turn);
  }
}

static bool replace(char *word, uint64_t was, uint64_t by)
{
  return atomic_compare_exchange_strong((_Atomic uint64_t *)(void *)word, &was, by);
}

void cpu_ep_give_up(char *const *arenas, const ep_layout *at, const ep_shape *shape, const ep_ways *ways, int32_t self,
                    uint64_t word)
{
  char *own = arenas[self] + at->abort;
  for (uint64_t was = cpu_ep_load(own); !ep_heeded(ways, was) && !replace(own, was, word);) was = cpu_ep_load(own);
  for (int32_t r = 0; r < shape->ranks; r++)
    if (r != self) cpu_ep_store(arenas[r] + at->abort, word);
}

/* ---- where things lie ---- */

static char *const *arenas_of(const ep_args *a)
{
  return (char *const *)(void *)(a->arena + a->at.bases);
}

static char *lane_of(const ep_args *a, int32_t rank)
{
  return arenas_of(a)[rank] + a->at.lane + (uint64_t)a->lane * a->at.lane_bytes;
}

static uint64_t *exchange_of(const ep_args *a)
{
  return (uint64_t *)(void *)(lane_of(a, a->rank) + a->at.exchange);
}

/* Row `row` of segment `segment` of an array with so many bytes a row. */
static uint64_t row_at(const ep_args *a, int32_t segment, int64_t row, uint64_t row_bytes)
{
  return ((uint64_t)segment * (uint64_t)a->shape.capacity + (uint64_t)row) * row_bytes;
}

static uint64_t hidden_bytes(const ep_args *a)
{
  return (uint64_t)a->shape.hidden * (uint64_t)a->shape.element;
}

/* As the ranks have sent them. */
static const int32_t *ids_sent(const ep_args *a)
{
  return (const int32_t *)(const void *)(lane_of(a, a->rank) + a->at.ids);
}

/* ---- put ---- */

int64_t cpu_ep_tokens(token_count tokens, fault_sink fault)
{
  check_token_count(tokens, fault);
  return tokens_present(tokens);
}

static int64_t id_of(const ep_args *a, int64_t token, int32_t slot)
{
  const int64_t at = token * a->ids_ld + slot;
  return a->ids_dtype == DT_I64 ? ((const int64_t *)a->ids)[at] : ((const int32_t *)a->ids)[at];
}

/* Entries in use, but those of ranks that were left out; `nth` of them at *place. An entry that names no rank is in
 * use, to be found. */
static int32_t places_of(const ep_args *a, const ep_ways *ways, int64_t expert, int32_t nth, int32_t *place)
{
  const int32_t *entry = a->placement + expert * a->placement_ld;
  int32_t count = 0;
  for (int32_t i = 0; i < a->replicas && entry[i] >= 0; i++) {
    const int32_t rank = entry[i] >> EP_PLACE_SHIFT;
    if (rank < a->shape.ranks && !ep_is_active(ways, rank)) continue;
    if (count++ == nth) *place = entry[i];
  }
  return count;
}

/* The place that serves a slot, or ROW_DROPPED, or ROW_IDENTITY. */
static int32_t place_of(const ep_args *a, const ep_ways *ways, int64_t token, int32_t slot)
{
  const int64_t id = id_of(a, token, slot), zero_end = (int64_t)a->shape.experts + a->zero_experts;
  if (id == -1) return ROW_DROPPED;
  if (id < 0 || id >= zero_end + a->identity_experts) {
    record_fault(a->fault, FAULT_EXPERT_ID, slot, token);
    return ROW_DROPPED;
  }
  if (id >= a->shape.experts) return id < zero_end ? ROW_DROPPED : ROW_IDENTITY;
  int32_t place = -1;
  const int32_t count = places_of(a, ways, id, -1, &place);
  if (count) places_of(a, ways, id, (int32_t)((a->first_token + token) % count), &place);
  if (place >= 0 && place >> EP_PLACE_SHIFT < a->shape.ranks) return place;
  record_fault(a->fault, FAULT_EXPERT_MAP, slot, token);
  return ROW_DROPPED;
}

static bool is_on(int32_t place, int32_t rank)
{
  return place >= 0 && place >> EP_PLACE_SHIFT == rank;
}

/* A token as row `row` of this rank's segment there, and the rows of y that will answer it. */
static void send_token(const ep_args *a, int32_t to, int64_t token, int64_t row, const int32_t *places)
{
  const int32_t k = a->shape.top_k;
  const uint64_t width = hidden_bytes(a), slots = row_at(a, a->rank, row, (uint64_t)k);
  char *lane = lane_of(a, to);
  int32_t *ids = (int32_t *)(void *)(lane + a->at.ids) + slots;
  memcpy(lane + a->at.x + row_at(a, a->rank, row, width), (const char *)a->x + token * a->x_ld * a->shape.element,
         width);
  memcpy((float *)(void *)(lane + a->at.weights) + slots, a->weights + token * a->weights_ld,
         (uint64_t)k * sizeof(float));
  for (int32_t slot = 0; slot < k; slot++) {
    const bool there = is_on(places[slot], to);
    ids[slot] = there ? places[slot] & ((1 << EP_PLACE_SHIFT) - 1) : -1;
    if (there && a->shape.exact) a->rows[token * k + slot] = (int32_t)row_at(a, to, row, (uint64_t)k) + slot;
    if (there && !a->shape.exact) a->rows[token * a->shape.ranks + to] = (int32_t)row_at(a, to, row, 1);
  }
}

/* To each rank behind what it has got before: sent[r] tokens. By gathering all have got the same. */
static void put_token(const ep_args *a, const ep_ways *ways, int64_t token, uint32_t *sent)
{
  const int32_t k = a->shape.top_k, ranks = a->shape.ranks;
  int32_t places[MAX_TOP_K];
  for (int32_t slot = 0; slot < k; slot++) {
    places[slot] = place_of(a, ways, token, slot);
    if (a->shape.exact) a->rows[token * k + slot] = places[slot];
  }
  for (int32_t r = 0; r < ranks; r++) {
    bool goes = !ways->dedup;
    if (!a->shape.exact) a->rows[token * ranks + r] = ROW_DROPPED;
    for (int32_t slot = 0; slot < k; slot++) goes |= is_on(places[slot], r);
    if (goes && ep_is_active(ways, r)) send_token(a, r, token, sent[r]++, places);
  }
}

/* To all ranks, also those that get nothing; tokens: for each, or NULL. */
static void publish(const ep_args *a, const ep_ways *ways, uint64_t words, const uint32_t *tokens)
{
  const uint32_t exchange = (uint32_t)*exchange_of(a);
  for (int32_t r = 0; r < a->shape.ranks; r++)
    if (ep_is_active(ways, r))
      cpu_ep_store(lane_of(a, r) + words + (uint64_t)a->rank * EP_LINE, ep_flag(exchange, tokens ? tokens[r] : 0));
}

void cpu_ep_put(const ep_args *a, const ep_ways *ways)
{
  const int64_t tokens = tokens_present(a->tokens);
  uint32_t sent[EP_MAX_RANKS] = {0};
  ++*exchange_of(a);
  for (int64_t token = 0; token < tokens; token++) put_token(a, ways, token, sent);
  publish(a, ways, a->at.in, sent);
}

/* ---- answer ---- */

/* The rows of one token that this rank was sent for: of each slot, or their sum. Who has sent an expert that is not
 * here adds the answer up all the same: y has zeros there. */
static void answer_token(const ep_args *a, int32_t source, int64_t token)
{
  const int32_t k = a->shape.top_k, answers = ep_answers(&a->shape);
  const uint64_t width = hidden_bytes(a);
  const int32_t *ids = ids_sent(a) + row_at(a, source, token, (uint64_t)k);
  char *to = lane_of(a, source) + a->at.y + row_at(a, a->rank, token, width * (uint64_t)answers);
  const char *from = (const char *)a->y_here + row_at(a, source, token, width * (uint64_t)answers);
  bool any = false;
  for (int32_t slot = 0; slot < k; slot++) {
    any |= ids[slot] != -1;
    if (a->shape.exact && ids[slot] != -1) memcpy(to + (uint64_t)slot * width, from + (uint64_t)slot * width, width);
  }
  if (!a->shape.exact && any) memcpy(to, from, width);
}

static int64_t tokens_from(const ep_args *a, const ep_ways *ways, int32_t source)
{
  if (!ep_is_active(ways, source)) return 0;
  const int64_t tokens = (uint32_t)cpu_ep_load(lane_of(a, a->rank) + a->at.in + (uint64_t)source * EP_LINE);
  return tokens < a->shape.capacity ? tokens : a->shape.capacity;
}

void cpu_ep_answer(const ep_args *a, const ep_ways *ways)
{
  for (int32_t source = 0; source < a->shape.ranks; source++)
    for (int64_t token = tokens_from(a, ways, source); token-- > 0;) answer_token(a, source, token);
  for (int32_t e = 0; a->counts && e < a->local_experts; e++) a->counts_sum[e] += a->counts[e];
  publish(a, ways, a->at.back, NULL);
}

/* ---- waits ---- */

/* Until all ranks have told of this exchange. */
static uint64_t wait_for_all(const ep_args *a, const ep_ways *ways, uint64_t words, int phase)
{
  const char *own = lane_of(a, a->rank);
  for (int32_t r = 0; r < a->shape.ranks; r++) {
    if (!ep_is_active(ways, r)) continue;
    const uint64_t end = wait_for(own + words + (uint64_t)r * EP_LINE, (uint32_t)*exchange_of(a),
                                  a->arena + a->at.abort, ways, a->arena + a->at.timeout);
    if (end != EP_LATE && end != 0) return end;
    if (end == 0) continue;
    const uint64_t word = ep_abort_word(EP_TIMEOUT, phase, r, a->rank);
    cpu_ep_give_up(arenas_of(a), &a->at, &a->shape, ways, a->rank, word);
    return word;
  }
  return 0;
}

/* What a peer sends is not trusted. Rows past its tokens hold what earlier exchanges left. */
static void take_ids(const ep_args *a, const ep_ways *ways, int32_t source)
{
  const int32_t k = a->shape.top_k;
  const int64_t tokens = tokens_from(a, ways, source);
  const uint64_t first = row_at(a, source, 0, (uint64_t)k);
  const int32_t *from = ids_sent(a) + first;
  int32_t *to = a->ids_here + first;
  for (int64_t i = 0; i < a->shape.capacity * k; i++) {
    const int32_t id = i < tokens * k ? from[i] : -1;
    const bool here = id >= 0 && id < a->local_experts;
    if (!here && id != -1) record_fault(a->fault, FAULT_EXPERT_ID, i % k, i / k);
    to[i] = here ? id : -1;
  }
}

uint64_t cpu_ep_wait_tokens(const ep_args *a, const ep_ways *ways)
{
  const uint64_t end = wait_for_all(a, ways, a->at.in, EP_DISPATCH);
  for (int32_t r = 0; end == 0 && r < a->shape.ranks; r++) take_ids(a, ways, r);
  return end;
}

uint64_t cpu_ep_wait_answers(const ep_args *a, const ep_ways *ways)
{
  return wait_for_all(a, ways, a->at.back, EP_RETURN);
}
