/*
 * The exchange of ep.h between GPUs that reach each other's memory. Ranks push: 16-byte stores, a fence at system
 * scope, one flag a rank; whoever waits polls its own memory. Only waits spin, one CTA each, and none without a limit
 * of time.
 */
#include "ep/words.cuh"
#include "ep/ep.h"

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

/* Of this rank and lane: exchanges so far, and CTAs that have come to the end of a put, of an answer. */
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
DEVICE unsigned row_step()
{
  return gridDim.x * WARPS;
}

/* For what is small: all threads; all warps, the last one first, as few rows are moved by the first ones. */
DEVICE unsigned cta_of_grid()
{
  return blockIdx.y * gridDim.x + blockIdx.x;
}
DEVICE unsigned ctas_of_grid()
{
  return gridDim.x * gridDim.y;
}
DEVICE unsigned warp_from_last()
{
  return ctas_of_grid() * WARPS - 1 - (cta_of_grid() * WARPS + warp_id());
}

/* ---- flags ---- */

/* The last CTA to come tells all ranks, behind everything that any CTA has stored; true there. A CTA by itself needs no
 * fence besides its flags' release, which holds for all its threads behind the barrier. sent NULL: `tokens` to all. */
DEVICE bool tell_when_all_have_come(const ep_args &a, uint64_t words, const uint32_t *sent, uint32_t tokens,
                                    unsigned *came, uint32_t exchange)
{
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = true;
    if (ctas_of_grid() > 1) {
      __threadfence_system();
      last = atomicAdd(came, 1) == ctas_of_grid() - 1;
      __threadfence();
    }
    if (last) *came = 0;
    if (last) counters_of(a)->exchanges = exchange;
  }
  __syncthreads();
  if (!last) return false;
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x)
    if (is_active(a, r))
      store_release_system(lane_of(a, r) + words + (uint64_t)a.rank * EP_LINE,
                           ep_flag(exchange, sent ? sent[r] : tokens));
  return true;
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

/* The host may change it while this waits, and graphs outlive what they were made with. */
DEVICE uint64_t timeout_ns(const ep_args &a)
{
  return *reinterpret_cast<const volatile uint64_t *>(a.arena + a.at.timeout);
}

/* Until a rank's flag tells of this exchange: what else it tells. */
DEVICE bool wait_for_rank(const ep_args &a, const char *flag, uint32_t exchange, int phase, int rank, uint32_t *tokens)
{
  const uint64_t begin = now_ns();
  for (unsigned turn = 0;; turn++) {
    const uint64_t word = load_acquire_system(flag);
    *tokens = (uint32_t)word;
    if ((int32_t)((uint32_t)(word >> 32) - exchange) >= 0) return true;
    if (turn % 8) continue;
    if (has_given_up(a)) return false;
    if (now_ns() - begin > timeout_ns(a)) give_up(a, phase, rank);
  }
}

/* One CTA; a thread polls the flags of its ranks. False: the group has given up. arrived NULL, or out: tokens of each
 * rank, at most what there is room for; 0 of one that was left out. */
DEVICE bool wait_for_all(const ep_args &a, uint64_t words, int phase, int32_t *arrived)
{
  const uint32_t exchange = (uint32_t) * (volatile unsigned long long *)&counters_of(a)->exchanges;
  const char *own = lane_of(a, a.rank) + words;
  /* A thread of its own looks whether the group has given up before. */
  bool all = threadIdx.x != blockDim.x - 1 || !has_given_up(a);
  for (int r = threadIdx.x; r < a.shape.ranks && all; r += blockDim.x) {
    uint32_t tokens = 0;
    if (is_active(a, r)) all = wait_for_rank(a, own + (uint64_t)r * EP_LINE, exchange, phase, r, &tokens);
    if (arrived) arrived[r] = (int32_t)min((int64_t)tokens, a.shape.capacity);
  }
  return __syncthreads_and(all);
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
DEVICE int place_of(const ep_args &a, int64_t token, int slot, bool report)
{
  const int64_t id = id_of(a, token, slot), zero_end = (int64_t)a.shape.experts + a.zero_experts;
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

/* x read once, stored to each rank that the token goes to. */
DEVICE void put_rows(const ep_args &a, unsigned tokens)
{
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16, first = a.rank * a.shape.capacity;
  for (unsigned token = first_row(); token < tokens; token += row_step()) {
    row_part p;
    load_part(p, static_cast<const char *>(a.x) + token * a.x_ld * a.shape.element, width);
    for (int r = 0; r < a.shape.ranks; r++) {
      const int row = row_there(a, token, r);
      if (row >= 0) store_part(p, lane_of(a, r) + a.at.x + (first + row) * bytes, width);
    }
  }
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

DEVICE void put_slots(const ep_args &a, unsigned tokens)
{
  const int k = a.shape.top_k, slot = lane_id();
  for (unsigned token = warp_from_last(); token < tokens; token += ctas_of_grid() * WARPS) {
    const int place = slot < k ? place_of(a, token, slot, true) : ROW_DROPPED;
    const float weight = slot < k ? a.weights[token * a.weights_ld + slot] : 0.f;
    if (a.shape.exact && slot < k && place < 0) a.rows[(int64_t)token * k + slot] = place;
    for (int r = 0; r < a.shape.ranks; r++) put_slots_to(a, token, r, place, weight);
  }
}

/* ---- who is told what, by dedup ---- */

/* Bits: ranks first .. first + 31 that have an expert of the token. */
DEVICE uint32_t ranks_of(const ep_args &a, int64_t token, int first)
{
  uint32_t ranks = 0;
  for (int slot = 0; slot < a.shape.top_k; slot++) {
    const int place = place_of(a, token, slot, false), to = (place >> EP_PLACE_SHIFT) - first;
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
DEVICE void wait_for_tokens(const ep_args &a)
{
  __shared__ int32_t arrived[EP_MAX_RANKS];
  const bool all = wait_for_all(a, a.at.in, EP_DISPATCH, arrived);
  let_next_grid_start();
  for (int r = threadIdx.x; r < a.shape.ranks; r += blockDim.x) {
    if (!all) arrived[r] = 0;
    a.arrived[r] = arrived[r];
  }
  __syncthreads();
  take_ids(a, arrived);
}

DEVICE void wait_for_answers(const ep_args &a)
{
  wait_for_all(a, a.at.back, EP_RETURN, nullptr);
  let_next_grid_start();
}

extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS) cumoe_ep_wait_tokens(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.in);
  wait_for_earlier_grids_alone();
  wait_for_tokens(a);
}

extern "C" __global__ void __launch_bounds__(EP_WAIT_THREADS) cumoe_ep_wait_answers(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.back);
  wait_for_earlier_grids_alone();
  wait_for_answers(a);
}

/* Where nothing comes between, the CTA that has told the others waits for them: a grid less. */
extern "C" __global__ void __launch_bounds__(EP_MOVE_THREADS) cumoe_ep_put(const __grid_constant__ ep_args a)
{
  look_ahead(a, a.at.in);
  look_ahead_at_places(a);
  wait_for_earlier_grids_alone();
  if (!a.then_waits) let_next_grid_start();
  const unsigned tokens = (unsigned)token_total(a.tokens);
  counters *c = counters_of(a);
  const uint32_t exchange = (uint32_t)c->exchanges + 1; /* none but the last CTA changes it, when all have come */
  put_rows(a, tokens);
  put_slots(a, tokens);
  if (tell_when_all_have_come(a, a.at.in, a.slots ? a.sent : nullptr, tokens, &c->put, exchange) && a.then_waits)
    wait_for_tokens(a);
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
  for (unsigned i = first_row(); i < end; i += row_step(), r = next) {
    row_part p;
    if (r.here) load_part(p, static_cast<const char *>(a.y_here) + (r.token * answers + r.answer) * bytes, width);
    next = row_to_answer(a, i + row_step(), end);
    if (r.here) store_part(p, lane_of(a, r.source) + a.at.y + (here + r.row) * bytes, width);
  }
}

/* Of later rounds. */
DEVICE void add_counts(const ep_args &a)
{
  if (!a.counts || cta_of_grid() != 0) return;
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
  if (tell_when_all_have_come(a, a.at.back, nullptr, 0, &c->answered, exchange) && a.then_waits) wait_for_answers(a);
}
