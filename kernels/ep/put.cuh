/* What a rank sends of its tokens: rows of x, and ids and weights; by dedup only to the ranks that have an expert. And
 * the gate, where a warp has a token's in registers and there is no dedup. */
#ifndef CUMOE_EP_PUT_CUH
#define CUMOE_EP_PUT_CUH

#include "ep/arena.cuh"
#include "route/gate.cuh"

DEVICE int64_t id_of(const ep_args &a, int64_t token, int slot)
{
  const int64_t at = token * a.ids_ld + slot;
  return a.ids_dtype == DT_I64 ? static_cast<const int64_t *>(a.ids)[at] : static_cast<const int32_t *>(a.ids)[at];
}

/* Where experts are, and which ranks have not been left out: as they lie in memory, or copies. */
struct place_table {
  const int32_t *entries;
  const uint64_t *active;
};

DEVICE place_table places_in_memory(const ep_args &a)
{
  return {a.placement, active_ranks(a)};
}

/* How many of an expert's entries are in use, without those of ranks that were left out; *place: number `nth` of them.
 * An entry that names no rank counts, so that place_of reports it. */
DEVICE unsigned places_of(const ep_args &a, const uint64_t *active, const int32_t *entries, unsigned nth, int *place)
{
  unsigned count = 0;
  for (int i = 0; i < a.replicas && entries[i] >= 0; i++) {
    const int rank = entries[i] >> EP_PLACE_SHIFT;
    if (rank < a.shape.ranks && !is_among(active, rank)) continue;
    if (count++ == nth) *place = entries[i];
  }
  return count;
}

/* The place that serves a slot, or ROW_DROPPED, or ROW_IDENTITY. */
DEVICE int place_of(const ep_args &a, const place_table &t, int64_t token, int slot, int64_t id, bool report)
{
  const int64_t zero_end = (int64_t)a.shape.experts + a.zero_experts;
  if (id == -1) return ROW_DROPPED;
  if (id < 0 || id >= zero_end + a.identity_experts) {
    if (report) report_fault(a.fault, FAULT_EXPERT_ID, slot, token);
    return ROW_DROPPED;
  }
  if (id >= a.shape.experts) return id < zero_end ? ROW_DROPPED : ROW_IDENTITY;
  int place = -1;
  const int32_t *entries = t.entries + id * a.placement_ld;
  const unsigned count = places_of(a, t.active, entries, 0, &place);
  if (count > 1) places_of(a, t.active, entries, (unsigned)(a.first_token + token) % count, &place);
  if (place >= 0 && place >> EP_PLACE_SHIFT < a.shape.ranks) return place;
  if (report) report_fault(a.fault, FAULT_EXPERT_MAP, slot, token);
  return ROW_DROPPED;
}

/* The row of this rank's segment there that a token takes, or -1: it does not go there. */
DEVICE int row_there(const ep_args &a, const uint64_t *active, unsigned token, int rank)
{
  if (a.own && rank == a.rank) return (int)token;
  if (a.slots) return a.slots[(int64_t)token * a.shape.ranks + rank];
  return is_among(active, rank) ? (int)token : -1;
}

DEVICE void load_row(const ep_args &a, unsigned token, row_part &p)
{
  load_part(p, static_cast<const char *>(a.x) + token * a.x_ld * a.shape.element, row_vectors(a));
}

/* Of many tokens all others in turn, each token's warp from another one on, then its own: no rank gets the rows of all
 * others at once while links to the rest idle. Of few this would only be more code to fetch. */
DEVICE int rank_in_turn(const ep_args &a, unsigned token, int i)
{
  const int others = a.shape.ranks - 1;
  if (a.packets) return i;
  return i < others ? (int)((a.rank + 1 + (token + i) % others) % a.shape.ranks) : a.rank;
}

DEVICE void store_row(const ep_args &a, unsigned token, const row_part &p)
{
  const int width = row_vectors(a);
  const int64_t bytes = (int64_t)width * 16, first = a.rank * a.shape.capacity;
  for (int i = 0; i < a.shape.ranks - a.own; i++) {
    const int r = rank_in_turn(a, token, i);
    const int row = row_there(a, active_ranks(a), token, r);
    if (row >= 0) store_part(p, lane_of(a, r) + a.at.x + (first + row) * bytes, width);
  }
}

DEVICE void put_row(const ep_args &a, unsigned token)
{
  row_part p;
  load_row(a, token, p);
  store_row(a, token, p);
}

/* Of a slot: the expert there, or -1, and the weight. */
DEVICE void store_slot_there(const ep_args &a, int r, int row, int id, float weight)
{
  const int k = a.shape.top_k, slot = lane_id();
  const int64_t at = (a.rank * a.shape.capacity + row) * k + slot;
  reinterpret_cast<int32_t *>(lane_of(a, r) + a.at.ids)[at] = id;
  reinterpret_cast<float *>(lane_of(a, r) + a.at.weights)[at] = weight;
}

/* Of own tokens that are a layer of their own, whose ids no wait looks at. */
DEVICE int own_id(const ep_args &a, unsigned token, int id)
{
  if (id < a.local_experts) return id;
  report_fault(a.fault, FAULT_EXPERT_ID, lane_id(), token);
  return -1;
}

/* A token's ids and weights to rank r, a lane a slot, and the rows of y that will answer it. */
template <bool PACKETS>
DEVICE void put_slots_to(const ep_args &a, const place_table &t, unsigned token, int r, int place, float weight,
                         uint32_t exchange)
{
  const int k = a.shape.top_k, slot = lane_id(), row = row_there(a, t.active, token, r);
  const bool there = place >= 0 && place >> EP_PLACE_SHIFT == r;
  const bool any = __any_sync(ALL_LANES, there);
  const int id = there ? place & ((1 << EP_PLACE_SHIFT) - 1) : -1;
  if (row >= 0 && slot < k) {
    if (PACKETS)
      store_words_system(slot_packet(a, r, a.rank, row, slot),
                         make_packet(exchange, make_uint2((uint32_t)id, __float_as_uint(weight))).words);
    else
      store_slot_there(a, r, row, a.own && r == a.rank ? own_id(a, token, id) : id, weight);
  }
  const int64_t answer = r * a.shape.capacity + row;
  if (a.shape.exact && there) a.rows[(int64_t)token * k + slot] = (int32_t)(answer * k) + slot;
  if (!a.shape.exact && slot == 0) a.rows[(int64_t)token * a.shape.ranks + r] = any ? (int32_t)answer : ROW_DROPPED;
}

/* A lane a slot. */
template <bool PACKETS>
DEVICE void put_slots(const ep_args &a, const place_table &t, unsigned token, int64_t id, float weight,
                      uint32_t exchange)
{
  const int k = a.shape.top_k, slot = lane_id();
  const int place = slot < k ? place_of(a, t, token, slot, id, true) : ROW_DROPPED;
  if (a.shape.exact && slot < k && place < 0) a.rows[(int64_t)token * k + slot] = place;
  for (int r = 0; r < a.shape.ranks; r++) put_slots_to<PACKETS>(a, t, token, r, place, weight, exchange);
}

/* x read once, stored to each rank that the token goes to; while that is on its way ids and weights, by the warp that
 * has the first part of the row. */
DEVICE void put_tokens(const ep_args &a, unsigned tokens)
{
  const int slot = lane_id();
  const bool slots = blockIdx.y == 0 && a.puts != EP_PUTS_ROWS, there = slots && slot < a.shape.top_k;
  for (unsigned token = blockIdx.x * WARPS + warp_id(); token < tokens; token += a.movers * WARPS) {
    const int64_t id = there ? id_of(a, token, slot) : -1;
    const float weight = there ? a.weights[token * a.weights_ld + slot] : 0.f;
    if (a.puts != EP_PUTS_SLOTS) put_row(a, token);
    if (slots) put_slots<false>(a, places_in_memory(a), token, id, weight, 0);
  }
}

/* ---- the gate ---- */

/* Half of the warps have the rows, the others, of CTAs that have first parts of rows, the gate and the slots. */
constexpr int HALF = WARPS / 2;

DEVICE bool has_rows()
{
  return warp_id() < HALF;
}

DEVICE void put_rows_of_half(const ep_args &a, unsigned tokens)
{
  for (unsigned token = blockIdx.x * HALF + warp_id(); token < tokens; token += a.movers * HALF) put_row(a, token);
}

/* Gates as most models have them, some of it as constants: the code that is fetched, cold, between the router and the
 * experts is short, and lies in one place. */
DEVICE bool has_constants(const gate_args &g, int score, int experts)
{
  return g.logits_dtype == DT_F32 && g.softcap <= 0 && g.score == score && g.weigh == score && g.experts == experts;
}
DEVICE gate_args with_constants(gate_args g, int score, int experts)
{
  g.logits_dtype = DT_F32, g.softcap = 0;
  g.score = g.weigh = score, g.experts = experts;
  return g;
}

/* As keys_of_scores (route/ranks.cuh) of sigmoids, operation by operation, or ranks would choose otherwise than one
 * GPU; several values at a time: one after the other they would wait for themselves, all at once would be more code
 * than time. */
template <int N, int AT_ONCE> DEVICE void keys_of_sigmoids(float (&l)[N], const float *bias, uint32_t (&key)[N])
{
#pragma unroll 1
  for (int i = 0; i < N; i += AT_ONCE) {
    float done[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const float choice = exact_add(exact_score(SCORE_SIGMOID, l[j]), bias[(i + j) * WARP_SIZE + lane_id()]);
      done[j] = __uint_as_float(key_of(l[j] == l[j] ? choice : l[j]));
    }
#pragma unroll
    for (int j = 0; j < N; j++) l[j] = j + AT_ONCE < N ? l[j + AT_ONCE] : done[j + AT_ONCE - N];
  }
#pragma unroll
  for (int i = 0; i < N; i++) key[i] = __float_as_uint(l[i]);
}

/* bias: 0 where there is none. */
DEVICE gate_slot choose_by_sigmoids(const gate_args &g, const float *bias, int64_t token, gate_scratch &scratch)
{
  constexpr int N = 8;
  gate_args k = with_constants(g, SCORE_SIGMOID, N * WARP_SIZE);
  k.n_group = N, k.flags &= ~ROUTE_SCORE_AFTER_TOPK;
  const gate_token t = {token * k.logits_ld, 0.f, 0.f};
  candidates<N> c;
  float l[N];
  const unsigned first_nan = load_logits(k, t.logits, 0, l);
  keys_of_sigmoids<N, 2>(l, bias, c.key);
  close_groups_of_rows(k, c.key);
  return choose_slots<N, false>(k, t, token, first_nan, true, c, nullptr, scratch);
}
DEVICE gate_slot choose_of_128(const gate_args &g, int64_t token, gate_scratch &scratch)
{
  gate_args k = with_constants(g, SCORE_SOFTMAX, 128);
  k.select_bias = nullptr, k.n_group = 0;
  return route_token<4>(k, token, true, nullptr, scratch);
}

DEVICE gate_slot choose_slots_of(const gate_args &g, const float *bias, int64_t token, gate_scratch &scratch)
{
  const bool by_logit = GATE_BY_LOGIT(g);
  if (g.n_group == 8 && has_constants(g, SCORE_SIGMOID, 256)) return choose_by_sigmoids(g, bias, token, scratch);
  if (by_logit && has_constants(g, SCORE_SOFTMAX, 128)) return choose_of_128(g, token, scratch);
  if (by_logit && g.experts <= 64) return route_token<2>(g, token, true, nullptr, scratch);
  if (by_logit && g.experts <= 128) return route_token<4>(g, token, true, nullptr, scratch);
  return route_token<8, false, true>(g, token, true, nullptr, scratch); /* shorter code: it is read once */
}

/* Copies for the warps that have the gate, made while they wait for the router: of a placement that is so small, and of
 * what the gate adds to scores, which the layer's weights have driven out of L2 and the gate reads a row after the
 * other. */
constexpr int PLACES_AT_HAND = 1024, ACTIVE_WORDS = EP_MAX_RANKS / 64, BIAS_AT_HAND = 256;
struct places_at_hand {
  int32_t entries[PLACES_AT_HAND];
  uint64_t active[ACTIVE_WORDS];
  float bias[BIAS_AT_HAND];
};

DEVICE place_table take_places(const gate_args &g, const ep_args &a, places_at_hand &s)
{
  const int64_t entries = (a.shape.experts - 1) * a.placement_ld + a.replicas;
  const int first = threadIdx.x - HALF * WARP_SIZE;
  const bool fits = entries <= PLACES_AT_HAND;
  for (int i = first; fits && i < entries; i += HALF * WARP_SIZE) s.entries[i] = a.placement[i];
  if (first < ACTIVE_WORDS) s.active[first] = active_ranks(a)[first];
  if (first < BIAS_AT_HAND) s.bias[first] = g.select_bias && first < g.experts ? g.select_bias[first] : 0.f;
  barrier_of_last(HALF * WARP_SIZE);
  return {fits ? s.entries : a.placement, s.active};
}

DEVICE void gate_and_put_slots(const gate_args &g, const ep_args &a, const place_table &t, const float *bias,
                               unsigned tokens, uint32_t exchange)
{
  __shared__ gate_scratch scratch[HALF];
  if (blockIdx.y != 0) return;
  for (unsigned token = blockIdx.x * HALF + warp_id() - HALF; token < tokens; token += a.movers * HALF) {
    const gate_slot slot = choose_slots_of(g, bias, token, scratch[warp_id() - HALF]);
    if (a.packets)
      put_slots<true>(a, t, token, slot.id, slot.weight, exchange);
    else
      put_slots<false>(a, t, token, slot.id, slot.weight, exchange);
    store_slot(g, token, slot);
  }
}

/* CTAs behind the movers. */
DEVICE void fill_with_ones(const ep_args &a)
{
  const int ctas = (gridDim.x - a.movers) * gridDim.y, cta = (blockIdx.x - a.movers) * gridDim.y + blockIdx.y;
  for (int i = cta * blockDim.x + threadIdx.x; i < a.fill_vectors; i += ctas * blockDim.x)
    static_cast<uint4 *>(a.fill)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

/* ---- which row of its segment a token takes at each rank, by dedup ---- */

/* Bits: ranks first .. first + 31 that have an expert of the token. */
DEVICE uint32_t ranks_of(const ep_args &a, int64_t token, int first)
{
  uint32_t ranks = 0;
  for (int slot = 0; slot < a.shape.top_k; slot++) {
    const int place = place_of(a, places_in_memory(a), token, slot, id_of(a, token, slot), false),
              to = (place >> EP_PLACE_SHIFT) - first;
    if (place >= 0 && to >= 0 && to < 32) ranks |= 1u << to;
  }
  return ranks;
}

/* Tokens to each of 32 ranks: those before the 1,024 at hand, and of these, each warp's. */
struct slots_smem {
  uint32_t before[WARP_SIZE], of_warp[EP_WAIT_THREADS / WARP_SIZE][WARP_SIZE];
};

/* A thread has a token. Where tokens are counted, a lane has a rank. */
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

#endif
