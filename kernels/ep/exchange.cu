/*
 * The exchange of ep.h between GPUs that reach each other's memory. Ranks push: 16-byte stores, a fence at system
 * scope, one flag a rank; whoever waits polls its own memory. Only waits spin, one CTA each, and none without a limit
 * of time.
 */
#include "ep/words.cuh"
#include "ep/ep.h"
#include "permute/combine.cuh"
#include "route/gate.cuh"

/* ---- where things lie ---- */

DEVICE char *arena_of(const ep_args &a, int rank)
{
  if (a.shape.ranks <= EP_NEAR_RANKS) return a.near[rank];
  return reinterpret_cast<char *const *>(a.arena + a.at.bases)[rank];
}

DEVICE char *lane_of(const ep_args &a, int rank)
{
  return arena_of(a, rank) + a.at.lane + (uint64_t)a.lane * a.at.lane_bytes;
}

/* Of this rank and lane: exchanges so far, and CTAs that have come to the end of a put, of an answer, where there are
 * more than words of a flag. */
struct counters {
  unsigned long long exchanges;
  unsigned put, answered;
};
DEVICE counters *counters_of(const ep_args &a)
{
  return reinterpret_cast<counters *>(lane_of(a, a.rank) + a.at.exchange);
}

/* It has not been left out. The host changes the words between calls. */
DEVICE bool is_active(const ep_args &a, int rank)
{
  return reinterpret_cast<const uint64_t *>(a.arena + a.at.active)[rank / 64] >> rank % 64 & 1;
}

/* While the grid ahead runs: words that a layer's weights have driven out of L2. */
DEVICE void look_ahead(const ep_args &a, uint64_t words)
{
  if (threadIdx.x == 0) prefetch(counters_of(a));
  if (threadIdx.x == 1) prefetch(a.arena + a.at.abort);
  if (threadIdx.x == 2) prefetch(a.arena + a.at.active);
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x)
    prefetch(lane_of(a, a.rank) + words + (uint64_t)r * EP_LINE);
}

DEVICE void look_ahead_at_places(const ep_args &a)
{
  const int64_t entries = (a.shape.experts - 1) * a.placement_ld + a.replicas;
  for (int64_t i = threadIdx.x * (int64_t)(EP_LINE / sizeof(int32_t)); i < entries;
       i += blockDim.x * (int64_t)(EP_LINE / sizeof(int32_t)))
    prefetch(a.placement + i);
}

/* A warp moves a part of a row, 16 bytes a thread at a time: blockIdx.y says which part, and all its loads are under
 * way together. Rows are dealt to the warps of blockIdx.x. */
constexpr int WARPS = 16, PART = 8 * WARP_SIZE;
static_assert(PART * 16 == EP_PART_BYTES && WARPS * WARP_SIZE == EP_MOVE_THREADS, "the host makes the grids");

struct row_part {
  uint4 value[8];
};

DEVICE int row_vectors(const ep_args &a)
{
  return a.shape.hidden * a.shape.element / 16;
}

DEVICE int vector_of(int i)
{
  return (int)blockIdx.y * PART + i * WARP_SIZE + lane_id();
}

DEVICE void load_part(row_part &p, const void *row, int width)
{
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (vector_of(i) < width) p.value[i] = static_cast<const uint4 *>(row)[vector_of(i)];
}

DEVICE void store_part(const row_part &p, void *row, int width)
{
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (vector_of(i) < width) static_cast<uint4 *>(row)[vector_of(i)] = p.value[i];
}

DEVICE unsigned first_row()
{
  return blockIdx.x * WARPS + warp_id();
}
DEVICE unsigned row_step(const ep_args &a)
{
  return a.movers * WARPS;
}

DEVICE unsigned cta_of_grid(const ep_args &a)
{
  return blockIdx.y * a.movers + blockIdx.x;
}
DEVICE unsigned ctas_of_grid(const ep_args &a)
{
  return a.movers * gridDim.y;
}

/* ---- flags ---- */

/* CTA `cta` of so many tells all ranks what it has stored: its share of each flag's words. sent NULL: `tokens` to all. */
DEVICE void tell(const ep_args &a, uint64_t words, const uint32_t *sent, uint32_t tokens, uint32_t exchange,
                 unsigned cta, unsigned ctas)
{
#pragma unroll 1
  for (int i = threadIdx.x; i < a.shape.ranks * EP_FLAG_WORDS; i += blockDim.x) {
    const int r = i / EP_FLAG_WORDS, word = i % EP_FLAG_WORDS;
    if (word % ctas == cta && is_active(a, r))
      store_release_system(lane_of(a, r) + words + (uint64_t)a.rank * EP_LINE + word * sizeof(uint64_t),
                           ep_flag(exchange, sent ? sent[r] : tokens));
  }
}

/* The last CTA to come tells for all; true there. */
DEVICE bool tell_when_all_have_come(const ep_args &a, uint64_t words, const uint32_t *sent, uint32_t tokens,
                                    unsigned *came, uint32_t exchange)
{
  __shared__ bool last;
  if (threadIdx.x == 0) {
    last = true;
    if (ctas_of_grid(a) > 1) {
      __threadfence_system();
      last = atomicAdd(came, 1) == ctas_of_grid(a) - 1;
      __threadfence();
    }
    if (last) *came = 0;
    if (last) counters_of(a)->exchanges = exchange;
  }
  __syncthreads();
  if (last) tell(a, words, sent, tokens, exchange, 0, 1);
  return last;
}

/* Behind everything that any CTA has stored. A release holds for all threads of a CTA behind the barrier. True in one
 * CTA, which waits for the others if anybody does; it has heard of all CTAs of this grid then, too, and may count. */
DEVICE bool tell_all(const ep_args &a, uint64_t words, const uint32_t *sent, uint32_t tokens, unsigned *came,
                     uint32_t exchange)
{
  __syncthreads();
  if (!a.then_waits || ctas_of_grid(a) > EP_FLAG_WORDS)
    return tell_when_all_have_come(a, words, sent, tokens, came, exchange);
  tell(a, words, sent, tokens, exchange, cta_of_grid(a), ctas_of_grid(a));
  return cta_of_grid(a) == 0;
}

/* The group has given up; words of ranks that were left out say nothing. */
DEVICE bool is_heeded(const ep_args &a, uint64_t word)
{
  const int by = (int)(word & 0xffff);
  return word != 0 && (by >= EP_MAX_RANKS || is_active(a, by));
}

DEVICE bool has_given_up(const ep_args &a)
{
  return is_heeded(a, load_acquire_system(a.arena + a.at.abort));
}

DEVICE void give_up(const ep_args &a, int phase, int about)
{
  const unsigned long long word = ep_abort_word(EP_TIMEOUT, phase, about, a.rank);
  unsigned long long *own = reinterpret_cast<unsigned long long *>(a.arena + a.at.abort), was = 0, found;
  while ((found = atomicCAS(own, was, word)) != was && !is_heeded(a, found)) was = found;
  for (int r = 0; r < a.shape.ranks; r++)
    if (r != a.rank && is_active(a, r)) store_release_system(arena_of(a, r) + a.at.abort, word);
}

/* Until a word of a rank's flag tells of this exchange: what else it tells. This rank's own CTAs come whatever the
 * others do: it has not counted the exchange before they have read the count. */
DEVICE bool wait_for_word(const ep_args &a, const char *word, uint32_t exchange, int phase, int rank, uint32_t *tokens)
{
  const uint64_t begin = now_ns();
  for (unsigned turn = 0;; turn++) {
    const uint64_t value = load_acquire_system(word);
    *tokens = (uint32_t)value;
    if ((int32_t)((uint32_t)(value >> 32) - exchange) >= 0) return true;
    if (turn % 8) continue;
    const bool late = now_ns() - begin > (uint64_t)a.timeout_ns;
    if ((rank != a.rank || late) && has_given_up(a)) return false;
    if (late) give_up(a, phase, rank);
  }
}

/* A CTA; a thread polls a word. False: the group has given up. arrived NULL, or out: tokens of each rank, at most what
 * there is room for; 0 of one that was left out. */
DEVICE bool wait_for_all(const ep_args &a, uint64_t words, int phase, uint32_t exchange, int32_t *arrived)
{
  const char *own = lane_of(a, a.rank) + words;
  /* A thread of its own looks whether the group has given up before. */
  bool all = threadIdx.x != blockDim.x - 1 || !has_given_up(a);
#pragma unroll 1
  for (int i = threadIdx.x; i < a.shape.ranks * EP_FLAG_WORDS; i += blockDim.x) {
    const int r = i / EP_FLAG_WORDS, word = i % EP_FLAG_WORDS;
    uint32_t tokens = 0;
    if (is_active(a, r) && (all || r == a.rank))
      all &= wait_for_word(a, own + (uint64_t)r * EP_LINE + word * sizeof(uint64_t), exchange, phase, r, &tokens);
    if (arrived && word == 0) arrived[r] = (int32_t)min((int64_t)tokens, a.shape.capacity);
  }
  return __syncthreads_and(all);
}

DEVICE uint32_t exchange_now(const ep_args &a)
{
  return (uint32_t) * (volatile unsigned long long *)&counters_of(a)->exchanges;
}

/* ---- put ---- */

DEVICE int64_t id_of(const ep_args &a, int64_t token, int slot)
{
  const int64_t at = token * a.ids_ld + slot;
  return a.ids_dtype == DT_I64 ? static_cast<const int64_t *>(a.ids)[at] : static_cast<const int32_t *>(a.ids)[at];
}

/* Entries in use, but those of ranks that were left out; `nth` of them at *place. An entry that names no rank is in
 * use, to be found. */
DEVICE unsigned places_of(const ep_args &a, const int32_t *entries, unsigned nth, int *place)
{
  unsigned count = 0;
  for (int i = 0; i < a.replicas && entries[i] >= 0; i++) {
    const int rank = entries[i] >> EP_PLACE_SHIFT;
    if (rank < a.shape.ranks && !is_active(a, rank)) continue;
    if (count++ == nth) *place = entries[i];
  }
  return count;
}

/* The place that serves a slot, or ROW_DROPPED, or ROW_IDENTITY. */
DEVICE int place_of(const ep_args &a, int64_t token, int slot, int64_t id, bool report)
{
  const int64_t zero_end = (int64_t)a.shape.experts + a.zero_experts;
  if (id == -1) return ROW_DROPPED;
  if (id < 0 || id >= zero_end + a.identity_experts) {
    if (report) report_fault(a.fault, FAULT_EXPERT_ID, slot, token);
    return ROW_DROPPED;
  }
  if (id >= a.shape.experts) return id < zero_end ? ROW_DROPPED : ROW_IDENTITY;
  int place = -1;
  const int32_t *entries = a.placement + id * a.placement_ld;
  const unsigned count = places_of(a, entries, 0, &place);
  if (count > 1) places_of(a, entries, (unsigned)(a.first_token + token) % count, &place);
  if (place >= 0 && place >> EP_PLACE_SHIFT < a.shape.ranks) return place;
  if (report) report_fault(a.fault, FAULT_EXPERT_MAP, slot, token);
  return ROW_DROPPED;
}

/* The row of this rank's segment there that a token takes, or -1: it does not go there. */
DEVICE int row_there(const ep_args &a, unsigned token, int rank)
{
  if (a.slots) return a.slots[(int64_t)token * a.shape.ranks + rank];
  return is_active(a, rank) ? (int)token : -1;
}

/* A token's ids and weights to rank r, a lane a slot, and the rows of y that will answer it. */
DEVICE void put_slots_to(const ep_args &a, unsigned token, int r, int place, float weight)
{
  const int k = a.shape.top_k, slot = lane_id(), row = row_there(a, token, r);
  const bool there = place >= 0 && place >> EP_PLACE_SHIFT == r;
  const bool any = __any_sync(ALL_LANES, there);
  if (row >= 0 && slot < k) {
    const int64_t at = (a.rank * a.shape.capacity + row) * k + slot;
    reinterpret_cast<int32_t *>(lane_of(a, r) + a.at.ids)[at] = there ? place & ((1 << EP_PLACE_SHIFT) - 1) : -1;
    reinterpret_cast<float *>(lane_of(a, r) + a.at.weights)[at] = weight;
  }
  const int64_t answer = r * a.shape.capacity + row;
  if (a.shape.exact && there) a.rows[(int64_t)token * k + slot] = (int32_t)(answer * k) + slot;
  if (!a.shape.exact && slot == 0) a.rows[(int64_t)token * a.shape.ranks + r] = any ? (int32_t)answer : ROW_DROPPED;
}

/* A lane a slot. */
DEVICE void put_slots(const ep_args &a, unsigned token, int64_t id, float weight)
{
  const int k = a.shape.top_k, slot = lane_id();
  const int place = slot < k ? place_of(a, token, slot, id, true) : ROW_DROPPED;
  if (a.shape.exact && slot < k && place < 0) a.rows[(int64_t)token * k + slot] = place;
  for (int r = 0; r < a.shape.ranks; r++) put_slots_to(a, token, r, place, weight);
}

DEVICE void put_given_slots(const ep_args &a, unsigned token)
{
  const int slot = lane_id();
  const bool there = slot < a.shape.top_k;
  put_slots(a, token, there ? id_of(a, token, slot) : -1, there ? a.weights[token * a.weights_ld + slot] : 0.f);
}

DEVICE void store_row(const ep_args &a, unsigned token, const row_part &p)
{
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16, first = a.rank * a.shape.capacity;
  for (int r = 0; r < a.shape.ranks; r++) {
    const int row = row_there(a, token, r);
    if (row >= 0) store_part(p, lane_of(a, r) + a.at.x + (first + row) * bytes, width);
  }
}

DEVICE void load_row(const ep_args &a, unsigned token, row_part &p)
{
  load_part(p, static_cast<const char *>(a.x) + token * a.x_ld * a.shape.element, row_vectors(a));
}

/* x read once, stored to each rank that the token goes to; what is small meanwhile, by the warp that has the first part
 * of the row. */
DEVICE void put_tokens(const ep_args &a, unsigned tokens)
{
  for (unsigned token = first_row(); token < tokens; token += row_step(a)) {
    row_part p;
    load_row(a, token, p);
    if (blockIdx.y == 0) put_given_slots(a, token);
    store_row(a, token, p);
  }
}

/* ---- the gate of few tokens ---- */

DEVICE gate_slot choose_slots_of(const gate_args &g, int64_t token, gate_scratch &scratch)
{
  const bool by_logit = GATE_BY_LOGIT(g);
  if (by_logit && g.experts <= 64) return route_token<2>(g, token, true, nullptr, scratch);
  if (by_logit && g.experts <= 128) return route_token<4>(g, token, true, nullptr, scratch);
  return route_token<8>(g, token, true, nullptr, scratch);
}

/* Half of the warps have the rows, the others, of the CTAs that have first parts, the gate and the slots. */
DEVICE void gate_and_put_tokens(const gate_args &g, const ep_args &a, unsigned tokens)
{
  __shared__ gate_scratch scratch[WARPS];
  const bool moves = warp_id() < WARPS / 2;
  if (!moves && blockIdx.y != 0) return;
  for (unsigned token = blockIdx.x * (WARPS / 2) + warp_id() % (WARPS / 2); token < tokens;
       token += a.movers * (WARPS / 2)) {
    if (moves) {
      row_part p;
      load_row(a, token, p);
      store_row(a, token, p);
    } else {
      const gate_slot slot = choose_slots_of(g, token, scratch[warp_id()]);
      store_slot(g, token, slot);
      put_slots(a, token, slot.id, slot.weight);
    }
  }
}

/* CTAs behind the movers. */
DEVICE void fill_with_ones(const ep_args &a)
{
  const int ctas = (gridDim.x - a.movers) * gridDim.y, cta = (blockIdx.x - a.movers) * gridDim.y + blockIdx.y;
  for (int i = cta * blockDim.x + threadIdx.x; i < a.fill_vectors; i += ctas * blockDim.x)
    static_cast<uint4 *>(a.fill)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

/* ---- who is told what, by dedup ---- */

/* Bits: ranks first .. first + 31 that have an expert of the token. */
DEVICE uint32_t ranks_of(const ep_args &a, int64_t token, int first)
{
  uint32_t ranks = 0;
  for (int slot = 0; slot < a.shape.top_k; slot++) {
    const int place = place_of(a, token, slot, id_of(a, token, slot), false), to = (place >> EP_PLACE_SHIFT) - first;
    if (place >= 0 && to >= 0 && to < 32) ranks |= 1u << to;
  }
  return ranks;
}

/* Tokens so far to each of 32 ranks, and of the 1,024 at hand, of each warp. */
struct slots_smem {
  uint32_t before[WARP_SIZE], of_warp[EP_WAIT_THREADS / WARP_SIZE][WARP_SIZE];
};

/* A thread a token, and a lane a rank where they are counted. */
DEVICE void take_slots(const ep_args &a, slots_smem &s, int64_t token, bool is_token, int first)
{
  const int ranks = min(a.shape.ranks - first, WARP_SIZE), warps = blockDim.x / WARP_SIZE;
  const uint32_t to = is_token ? ranks_of(a, token, first) : 0, below = (1u << lane_id()) - 1;
  uint32_t base = s.before[lane_id()], all = 0;
  for (int r = 0; r < WARP_SIZE; r++) {
    const uint32_t who = __ballot_sync(ALL_LANES, to >> r & 1);
    if (lane_id() == r) s.of_warp[warp_id()][r] = __popc(who);
  }
  __syncthreads();
  for (int w = 0; w < warps; w++) {
    if (w == warp_id()) base += all;
    all += s.of_warp[w][lane_id()];
  }
  for (int r = 0; r < ranks; r++) {
    const uint32_t who = __ballot_sync(ALL_LANES, to >> r & 1), start = __shfl_sync(ALL_LANES, base, r);
    if (is_token) a.slots[token * a.shape.ranks + first + r] = to >> r & 1 ? (int)(start + __popc(who & below)) : -1;
  }
  __syncthreads();
  if (warp_id() == 0) s.before[lane_id()] += all;
  __syncthreads();
}

/* In the tokens' order, so that segments are the same on every run. One CTA: 1,024 tokens take it some 3 us. */
extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS) cumoe_ep_slots(const __grid_constant__ ep_args a)
{
  __shared__ slots_smem s;
  wait_for_earlier_grids();
  const int64_t tokens = token_total(a.tokens);
  for (int first = 0; first < a.shape.ranks; first += WARP_SIZE) {
    if (warp_id() == 0) s.before[lane_id()] = 0;
    __syncthreads();
    for (int64_t token = threadIdx.x; token - threadIdx.x < tokens; token += blockDim.x)
      take_slots(a, s, token, token < tokens, first);
    if (warp_id() == 0 && first + lane_id() < a.shape.ranks) a.sent[first + lane_id()] = s.before[lane_id()];
    __syncthreads();
  }
}

/* ---- a round's part of the tokens that the device has counted ---- */

extern "C" __global__ void __launch_bounds__(WARP_SIZE) cumoe_ep_count(const __grid_constant__ ep_args a)
{
  wait_for_earlier_grids();
  if (threadIdx.x != 0) return;
  report_token_count(a.all_tokens, a.fault);
  *a.present = (int32_t)min(max(token_total(a.all_tokens) - a.first_token, (int64_t)0), a.tokens.count);
}

/* ---- waits ---- */

constexpr int IDS_IN_FLIGHT = 4;

/* What a peer sends is not trusted; rows past its tokens hold what earlier exchanges left. */
DEVICE int take_id(const ep_args &a, const int32_t *arrived, unsigned at, int id)
{
  const unsigned k = a.shape.top_k, room = (unsigned)a.shape.capacity * k, source = at / room,
                 slot = at - source * room;
  if (source >= (unsigned)a.shape.ranks || slot >= arrived[source] * k || id == -1) return -1;
  if (id >= 0 && id < a.local_experts) return id;
  report_fault(a.fault, FAULT_EXPERT_ID, slot % k, slot / k);
  return -1;
}

/* Both arrays' regions end on 256 bytes, so the last vector may hang over. */
DEVICE void take_ids(const ep_args &a, const int32_t *arrived)
{
  const unsigned ids = (unsigned)a.shape.ranks * (unsigned)a.shape.capacity * a.shape.top_k,
                 vectors = ceil_div(ids, 4u);
  const int4 *from = reinterpret_cast<const int4 *>(lane_of(a, a.rank) + a.at.ids);
  int4 *to = reinterpret_cast<int4 *>(a.ids_here), v[IDS_IN_FLIGHT];
  for (unsigned first = threadIdx.x; first < vectors; first += IDS_IN_FLIGHT * blockDim.x) {
#pragma unroll
    for (int j = 0; j < IDS_IN_FLIGHT; j++)
      if (first + j * blockDim.x < vectors) v[j] = from[first + j * blockDim.x];
#pragma unroll
    for (int j = 0; j < IDS_IN_FLIGHT; j++) {
      const unsigned i = first + j * blockDim.x, at = i * 4;
      if (i >= vectors) break;
      to[i] = make_int4(take_id(a, arrived, at, v[j].x), take_id(a, arrived, at + 1, v[j].y),
                        take_id(a, arrived, at + 2, v[j].z), take_id(a, arrived, at + 3, v[j].w));
    }
  }
}

/* Leaves what has arrived, for the experts and for the answer. */
DEVICE void wait_for_tokens(const ep_args &a, uint32_t exchange)
{
  __shared__ int32_t arrived[EP_MAX_RANKS];
  const bool all = wait_for_all(a, a.at.in, EP_DISPATCH, exchange, arrived);
  let_next_grid_start();
  if (threadIdx.x == 0) counters_of(a)->exchanges = exchange;
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x) {
    if (!all) arrived[r] = 0;
    a.arrived[r] = arrived[r];
  }
  __syncthreads();
  take_ids(a, arrived);
}

DEVICE void wait_for_answers(const ep_args &a, uint32_t exchange)
{
  wait_for_all(a, a.at.back, EP_RETURN, exchange, nullptr);
  let_next_grid_start();
}

extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS) cumoe_ep_wait_tokens(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.in);
  wait_for_earlier_grids_alone();
  wait_for_tokens(a, exchange_now(a));
}

extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS, 1)
    cumoe_ep_wait_answers(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.back);
  wait_for_earlier_grids_alone();
  wait_for_answers(a, exchange_now(a));
}

/* Where nothing comes between, a CTA that has told the others waits for them: a grid less. */
template <class PUT> DEVICE void put(const ep_args &a, PUT put_all)
{
  look_ahead(a, a.at.in);
  look_ahead_at_places(a);
  wait_for_earlier_grids_alone();
  if ((int)blockIdx.x >= a.movers) return fill_with_ones(a);
  if (!a.then_waits) let_next_grid_start();
  const unsigned tokens = (unsigned)token_total(a.tokens);
  counters *c = counters_of(a);
  const uint32_t exchange = (uint32_t)c->exchanges + 1; /* nobody changes it before all CTAs have come */
  put_all(tokens);
  if (tell_all(a, a.at.in, a.slots ? a.sent : nullptr, tokens, &c->put, exchange) && a.then_waits)
    wait_for_tokens(a, exchange);
}

extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS, 1) cumoe_ep_put(const __grid_constant__ ep_args a)
{
  put(a, [&](unsigned tokens) { put_tokens(a, tokens); });
}

extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS)
    cumoe_ep_gate_put(const __grid_constant__ gate_args g, const __grid_constant__ ep_args a)
{
  put(a, [&](unsigned tokens) {
    check_token_count(g.tokens, g.fault);
    gate_and_put_tokens(g, a, tokens);
  });
}

/* ---- answer ---- */

/* Rows are dealt to the warps rank by rank in turn. */
struct answer_row {
  int64_t token; /* in all segments */
  int source, answer;
  unsigned row; /* in its segment */
  bool here;    /* this rank has it: of the slot, or of any */
};

DEVICE answer_row row_to_answer(const ep_args &a, unsigned i, unsigned end)
{
  const unsigned ranks = a.shape.ranks, answers = ep_answers(&a.shape);
  answer_row r;
  r.source = (int)((a.rank + i) % ranks);
  r.row = i / ranks;
  r.answer = (int)(r.row % answers);
  r.token = r.source * a.shape.capacity + r.row / answers;
  const bool sent = i < end && r.row < a.arrived[r.source] * answers;
  const int slot = a.shape.exact ? r.answer : lane_id();
  r.here = __any_sync(ALL_LANES, sent && slot < a.shape.top_k && a.ids_here[r.token * a.shape.top_k + slot] >= 0);
  return r;
}

DEVICE unsigned rows_to_answer(const ep_args &a)
{
  int most = 0;
  for (int r = lane_id(); r < a.shape.ranks; r += WARP_SIZE) most = max(most, a.arrived[r]);
  return (unsigned)warp_max(most) * ep_answers(&a.shape) * a.shape.ranks;
}

DEVICE void answer_rows(const ep_args &a)
{
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16, answers = ep_answers(&a.shape), here = a.rank * a.shape.capacity * answers;
  const unsigned end = rows_to_answer(a);
  answer_row r = row_to_answer(a, first_row(), end), next;
  for (unsigned i = first_row(); i < end; i += row_step(a), r = next) {
    row_part p;
    if (r.here) load_part(p, static_cast<const char *>(a.y_here) + (r.token * answers + r.answer) * bytes, width);
    next = row_to_answer(a, i + row_step(a), end);
    if (r.here) store_part(p, lane_of(a, r.source) + a.at.y + (here + r.row) * bytes, width);
  }
}

/* Of later rounds. */
DEVICE void add_counts(const ep_args &a)
{
  if (!a.counts || cta_of_grid(a) != 0) return;
  for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x) a.counts_sum[e] += a.counts[e];
}

extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS) cumoe_ep_answer(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.back);
  wait_for_earlier_grids_alone();
  if (!a.then_waits) let_next_grid_start();
  counters *c = counters_of(a);
  const uint32_t exchange = (uint32_t)c->exchanges;
  answer_rows(a);
  add_counts(a);
  if (tell_all(a, a.at.back, nullptr, 0, &c->answered, exchange) && a.then_waits) wait_for_answers(a, exchange);
}

/* ---- answer by the layer's combine, whose outputs go to the tokens' ranks ---- */

struct outputs_of_ranks {
  const ep_args &a;
  unsigned number; /* of the part, in turn over segments and slices */
  static constexpr bool ALL = false;
  DEVICE void wait() const
  {
    wait_for_earlier_grids_alone();
    if (!a.then_waits) let_next_grid_start();
  }
  /* Parts of segments in turn, so that no link idles; this rank's own is the last one. */
  DEVICE combine_part part(const combine_args &c, unsigned, int columns) const
  {
    combine_part p(c, number, columns);
    const unsigned group = number / p.slices, ranks = a.shape.ranks, source = (a.rank + 1 + group) % ranks,
                   row = group / ranks * p.most;
    p.first_token = source * a.shape.capacity + row;
    p.tokens = min(load_relaxed(&a.arrived[source]) - (int)row, p.most);
    return p;
  }
  template <class Out> DEVICE Out *answer(int64_t token, int slot, int answers) const
  {
    const unsigned capacity = (unsigned)a.shape.capacity, source = (unsigned)token / capacity,
                   row = (unsigned)token - source * capacity;
    const int64_t at = ((int64_t)a.rank * capacity + row) * answers + slot;
    return reinterpret_cast<Out *>(lane_of(a, source) + a.at.y) + at * a.shape.hidden;
  }
  template <class Out> DEVICE Out *sum(const combine_args &, int64_t token) const { return answer<Out>(token, 0, 1); }
  template <class Out> DEVICE Out *row(const combine_args &c, int64_t token, int slot) const
  {
    return answer<Out>(token, slot, c.top_k);
  }
};

template <class In, int COLUMNS> DEVICE void return_rows(const combine_args &c, const ep_args &a)
{
  const unsigned most = COMBINE_TOKENS(c.top_k), slices = ceil_div(c.hidden, COLUMNS),
                 parts = a.shape.ranks * (((unsigned)a.shape.capacity + most - 1) / most) * slices;
  look_ahead(a, a.at.back);
#pragma unroll 1
  for (unsigned i = blockIdx.x; i < parts; i += a.movers) combine_gather<In, In, COLUMNS>(c, outputs_of_ranks{a, i});
  counters *k = counters_of(a);
  const uint32_t exchange = (uint32_t)k->exchanges;
  add_counts(a);
  if (tell_all(a, a.at.back, nullptr, 0, &k->answered, exchange) && a.then_waits) wait_for_answers(a, exchange);
}

#define RETURN(name, In, COLUMNS)                                                                                      \
  extern "C" __global__ void __launch_bounds__(EP_RETURN_THREADS, 5)                                                   \
      cumoe_ep_return_##name(const __grid_constant__ combine_args c, const __grid_constant__ ep_args a)                \
  {                                                                                                                    \
    static_assert(COLUMNS * sizeof(In) == EP_RETURN_THREADS * 16, "16 bytes a thread");                                \
    return_rows<In, COLUMNS>(c, a);                                                                                    \
  }
RETURN(bf16, bf16, 1024)
RETURN(f16, f16, 1024)
RETURN(f32, float, 512)

/* ---- few tokens: answer, wait and combine in one grid, whose few CTAs all wait ---- */

template <class In, class Out> DEVICE void finish(const combine_args &c, const ep_args &a)
{
  look_ahead(a, a.at.back);
  wait_for_earlier_grids_alone();
  const uint32_t exchange = (uint32_t)counters_of(a)->exchanges;
  answer_rows(a);
  add_counts(a);
  __syncthreads();
  tell(a, a.at.back, nullptr, 0, exchange, cta_of_grid(a), ctas_of_grid(a));
  if (!wait_for_all(a, a.at.back, EP_RETURN, exchange, nullptr)) return;
  let_next_grid_start();
  const int columns = ceil_div(c.hidden, column_of<In>::SIZE), items = (int)token_total(c.tokens) * columns;
  for (int i = cta_of_grid(a) * blockDim.x + threadIdx.x; i < items; i += ctas_of_grid(a) * blockDim.x) {
    const int token = i / columns;
    reduce_tokens<In, Out, 1, 4>(c, token, 1, (i - token * columns) * column_of<In>::SIZE, own_outputs{});
  }
}

#define FINISH(in, out, In, Out)                                                                                       \
  extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS)                                                        \
      cumoe_ep_finish_##in##_##out(const __grid_constant__ combine_args c, const __grid_constant__ ep_args a)          \
  {                                                                                                                    \
    finish<In, Out>(c, a);                                                                                             \
  }
FINISH(bf16, bf16, bf16, bf16)
FINISH(bf16, f32, bf16, float)
FINISH(f16, f16, f16, f16)
FINISH(f16, f32, f16, float)
FINISH(f32, f32, float, float)
