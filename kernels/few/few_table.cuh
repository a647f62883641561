/*
 * FORM_ring: what a CTA has in shared memory, and what every CTA of it finds out for itself before it begins: which experts the
 * tokens go to (few_up can be the gate), and which pairs are multiplied together. The rest is few.cuh.
 */
#ifndef CUMOE_FEW_TABLE_CUH
#define CUMOE_FEW_TABLE_CUH

#include "device/common.cuh"
#include "route/gate.cuh"
#include "route/pairs.cuh"

template <class T_, int TOKENS_, int BK_, int STAGES_, int WARPS> struct few_layout {
  using layout = few_layout;
  using T = T_;
  static constexpr int TOKENS = TOKENS_, PAIRS = FEW_PAIRS(TOKENS);                                   /* at most */
  static constexpr int BK = BK_, STAGES = STAGES_, ROWS = 16, EIGHTS = ROWS / 8, WEIGHTS = ROWS * BK; /* elements */
  static constexpr int COLUMNS = TOKENS == 1 ? 1 : (int)FEW_COLUMNS, COLUMN_K = 2 * BK; /* of a stage, at most */
  /* Warps. Helpers have part in the gate and in the outputs. (H200: with more than 8 consumers of 3 stages, or 4 stages, one token
   * takes up to 3 us longer, with fewer 3 to 4 %.) */
  static constexpr int HELPERS = TOKENS > 1 ? 6 : 0, CONSUMERS = WARPS - 2 - HELPERS, FINISHER = CONSUMERS,
                       CLERK = FINISHER + 1, WRITERS = WARPS - FINISHER;
  static constexpr int THREADS = WARPS * WARP_SIZE, BUFFERS = 3;
  static constexpr int GROUPS = BK / 32, CHUNKS = BK / 8, COPY_ROWS = WARP_SIZE / CHUNKS, COPIES = ROWS / COPY_ROWS;
  static_assert(BK == 128 && THREADS >= PAIRS && PAIRS % WARP_SIZE == 0 && PAIRS <= 256, "few.cuh, few_column");
};

/* up or down */
template <class LAYOUT, bool UP_> struct few_part : LAYOUT {
  static constexpr bool UP = UP_, WIDE = !UP_; /* WIDE: has slices of 8 rows, too */
};

template <class T, bool UP, int TOKENS, int BK, int STAGES, int WARPS>
using few_shape = few_part<few_layout<T, TOKENS, BK, STAGES, WARPS>, UP>;

/* A pair, which is its row of h, and its token; negative: none. */
using few_column = int16_t;
DEVICE few_column few_column_of(int pair, int token)
{
  return (few_column)(token << 8 | pair);
}
DEVICE int pair_of(few_column column)
{
  return column & 255;
}
DEVICE int token_of(few_column column)
{
  return column >> 8;
}

/* An active expert's weights: gate and up, or, where there is only one half, that twice. */
struct few_halves {
  const void *low, *high;
};

/* Who has chosen what. "An active expert" stands for up to FEW_COLUMNS of its pairs: with more it is there again, and its weights
 * are read again. In the order of their first pairs. */
template <int PAIRS> struct few_table {
  int32_t to[PAIRS];                                 /* of each pair: local expert, ROW_DROPPED or ROW_IDENTITY */
  alignas(16) few_column column[PAIRS][FEW_COLUMNS]; /* of an active expert */
  alignas(16) few_halves weights[PAIRS];             /* of an active expert, up's */
  const void *down[PAIRS];                           /* of an active expert, down's weights */
  int16_t expert[PAIRS];                             /* likewise */
  float weight[PAIRS];                               /* of a pair's y in its token's sum; 0: it has none */
  uint32_t first[PAIRS / WARP_SIZE];                 /* a bit a pair: the first of an active expert */
};

struct few_range {
  int first, count;
};

/* A slice, and the same k of its expert's tokens: zeros where there are fewer. */
template <class S> struct few_stage_of {
  typename S::T weights[S::WEIGHTS], columns[S::COLUMNS][S::COLUMN_K];
};
template <class S> using few_stage = few_stage_of<typename S::layout>;

template <class S> struct few_memory {
  few_stage_of<S> ring[S::CONSUMERS][S::STAGES];
  float4 partial[S::BUFFERS][S::CONSUMERS][WARP_SIZE]; /* accumulators as they are, of some units in turn */
  typename S::T y[S::PAIRS][S::ROWS];                  /* of the channels at hand */
  uint64_t summed[S::BUFFERS], taken[S::BUFFERS];
  uint64_t weighed;       /* passed when the pairs have their weights */
  uint64_t ready, stored; /* passed when y is there, and when it may be another */
  uint64_t dealt;         /* passed when it is known what the CTA does of up next */
  int32_t place[2];       /* what it does: at first; then */
  few_range own;          /* eights of down */
  few_table<S::PAIRS> table;
  gate_scratch scratch[2]; /* the clerk's, the finisher's */
};
template <class S> using few_smem = few_memory<typename S::layout>;

/* ---- table ---- */

/* Experts whose first pair comes before `pair`. */
template <int PAIRS> DEVICE int active_before(const few_table<PAIRS> &t, int pair)
{
  int before = 0;
#pragma unroll
  for (int i = 0; i < PAIRS / WARP_SIZE; i++) {
    const int there = min(max(pair - i * WARP_SIZE, 0), (int)WARP_SIZE);
    before += __popc((uint32_t)(t.first[i] & ((1ull << there) - 1)));
  }
  return before;
}

template <class S> DEVICE void place_expert(const few_args &args, few_table<S::PAIRS> &t, int active, int expert)
{
  using T = typename S::T;
  const expert_matrix &up = args.up.b;
  t.expert[active] = (int16_t)expert;
  if (S::UP) t.weights[active] = {expert_base<T>(up, 0, expert), expert_base<T>(up, args.up.gated ? 1 : 0, expert)};
  if (!S::UP || args.protocol.tickets) t.down[active] = expert_base<T>(args.down.b, 0, expert);
}

/* Of one token: every pair is an expert of its own, also where two name the same. */
template <class S> DEVICE void place_pairs_of_one(const few_args &args, few_table<S::PAIRS> &t, int pair, int to)
{
  const uint32_t firsts = __ballot_sync(ALL_LANES, to >= 0);
  if (lane_id() == 0) t.first[0] = firsts;
  if (to < 0) return;
  const int active = __popc(firsts & ((1u << pair) - 1));
  place_expert<S>(args, t, active, to);
  *reinterpret_cast<uint4 *>(t.column[active]) = make_uint4(0xffff0000u | few_column_of(pair, 0), ~0u, ~0u, ~0u);
}

/* Lies where stages will be. */
template <int PAIRS> struct few_places {
  uint8_t in_warp[PAIRS / WARP_SIZE][MAX_EXPERTS];  /* pairs of a warp with that expert */
  uint8_t active[MAX_EXPERTS][PAIRS / FEW_COLUMNS]; /* of an expert's pairs, eight by eight */
};

/* Pairs before this one with the same expert. All threads; the first of them have a pair each. */
template <int PAIRS> DEVICE int count_alike(few_places<PAIRS> &s, int experts, int pair, int to)
{
  const int words = ceil_div(experts, 4), warp = warp_id();
  for (int i = threadIdx.x; i < PAIRS / WARP_SIZE * words; i += blockDim.x)
    reinterpret_cast<uint32_t *>(s.in_warp[i / words])[i % words] = 0;
  __syncthreads();
  const unsigned peers = __match_any_sync(ALL_LANES, to), earlier = peers & ((1u << lane_id()) - 1);
  if (pair < PAIRS && to >= 0 && earlier == 0) s.in_warp[warp][to] = (uint8_t)__popc(peers);
  __syncthreads();
  int before = __popc(earlier);
  for (int w = 0; w < min(warp, PAIRS / WARP_SIZE) && to >= 0; w++) before += s.in_warp[w][to];
  return before;
}

/* All threads. The first of them have a pair each, which goes to `to`. */
template <class S> DEVICE void place_pairs(const few_args &args, few_smem<S> &smem, int pair, int to, int token)
{
  few_table<S::PAIRS> &t = smem.table;
  few_places<S::PAIRS> &s = *reinterpret_cast<few_places<S::PAIRS> *>(&smem.ring);
  static_assert(sizeof s <= sizeof smem.ring, "room for it");
  const int before = count_alike<S::PAIRS>(s, args.map.local_experts, pair, to);
  const bool first = to >= 0 && before % FEW_COLUMNS == 0;
  const uint32_t firsts = __ballot_sync(ALL_LANES, first);
  if (pair < S::PAIRS && lane_id() == 0) t.first[warp_id()] = firsts;
  __syncthreads();
  if (first) {
    const int active = active_before(t, pair);
    s.active[to][before / FEW_COLUMNS] = (uint8_t)active;
    place_expert<S>(args, t, active, to);
  }
  __syncthreads();
  if (to >= 0) t.column[s.active[to][before / FEW_COLUMNS]][before % FEW_COLUMNS] = few_column_of(pair, token);
}

/* ---- gate ---- */

constexpr int FEW_KEYS = 8; /* a lane's */

/* Lies where stages will be. */
template <class S> struct few_gate_smem {
  uint32_t key[S::TOKENS][FEW_KEYS][WARP_SIZE];
  gate_scratch scratch[S::THREADS / WARP_SIZE];
};

/* All threads: the keys of all scores, an expert a thread. */
template <class S> DEVICE void score_experts(const gate_args &a, few_gate_smem<S> &s)
{
  const int rows = ceil_div(a.experts, WARP_SIZE), items = (int)token_total(a.tokens) * rows;
#pragma unroll 1
  for (int item = warp_id(); item < items; item += S::THREADS / WARP_SIZE) {
    const int token = item / rows, row = item - token * rows, e = row * WARP_SIZE + lane_id();
    const int64_t logits = token * a.logits_ld;
    const float l = e < a.experts ? soft_cap(a, load_logit(a, logits + e)) : -INFINITY;
    s.key[token][row][lane_id()] = key_of_score(a, {logits, 0.f, 0.f}, e, l);
  }
  __syncthreads();
}

/* The ids of a token's slots, by a warp. N: keys of a lane. */
template <int N, class S> DEVICE int choose_few(const gate_args &a, int token, few_gate_smem<S> &s)
{
  gate_token t = {token * a.logits_ld, 0.f, 0.f};
  candidates<N> c;
  if (N < FEW_KEYS || GATE_BY_LOGIT(a)) {
    keys_of_logits(a, t, c.key, false);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) c.key[i] = i * WARP_SIZE < a.experts ? s.key[token][i][lane_id()] : KEY_NONE;
    if (a.n_group > 0) close_groups_of_rows(a, c.key);
  }
  return take_best(a, c, nullptr, s.scratch[warp_id()]).id;
}

/* By every CTA for itself: leaves the ids in the table's `to`. */
template <class S> DEVICE void choose_experts(gate_args a, few_smem<S> &smem)
{
  a.logits_dtype = DT_F32; /* the router's */
  few_gate_smem<S> &s = *reinterpret_cast<few_gate_smem<S> *>(&smem.ring);
  static_assert(sizeof s <= sizeof smem.ring, "room for it");
  const bool by_logit = GATE_BY_LOGIT(a);
  if (!by_logit) score_experts(a, s);
#pragma unroll 1
  for (int token = warp_id(); token < token_total(a.tokens); token += S::THREADS / WARP_SIZE) {
    const int id =
        by_logit && a.experts <= 4 * WARP_SIZE ? choose_few<4>(a, token, s) : choose_few<FEW_KEYS>(a, token, s);
    if (lane_id() < a.top_k) smem.table.to[token * a.top_k + lane_id()] = id;
  }
  __syncthreads();
}

/* What the gate leaves behind, also the weights, for all: by a warp of whoever has the place, a token each. */
template <class S> DEVICE void write_routing(const few_args &args, int place, gate_scratch &scratch)
{
  gate_args a = args.gate;
  a.logits_dtype = DT_F32;
#pragma unroll 1
  for (int token = gridDim.x - 1 - place; token < token_total(a.tokens); token += gridDim.x) {
    const gate_slot slot = route_token<FEW_KEYS>(a, token, true, nullptr, scratch);
    if (lane_id() < a.top_k)
      store_relaxed(args.protocol.weights + token * a.top_k + lane_id(), (uint64_t)__float_as_uint(slot.weight));
    store_slot(a, token, slot);
  }
}

/* ---- where pairs go ---- */

/* Where a pair goes. */
template <class S> DEVICE int look_up_pair(const few_args &args, const few_table<S::PAIRS> &t, int token, int pair)
{
  const map_args &map = args.map;
  const bool report = S::UP && blockIdx.x == 0;
  if (S::UP && args.protocol.weights) {
    const int slot = pair - token * map.top_k;
    return report ? destination_of<true, settled_reader>(map, t.to[pair], token, slot)
                  : destination_of<false, settled_reader>(map, t.to[pair], token, slot);
  }
  return report ? destination<true, settled_reader>(map, pair) : destination<false, settled_reader>(map, pair);
}

/* All threads; returns the number of active experts. In a grid of down alone, before the one ahead has ended: of what was
 * complete when that started. */
template <class S> DEVICE int build_few_table(const few_args &args, few_smem<S> &smem)
{
  few_table<S::PAIRS> &t = smem.table;
  const int top_k = args.map.top_k, pair = threadIdx.x, token = S::TOKENS == 1 ? 0 : pair / top_k;
  int to = ROW_DROPPED;
  if (pair < S::PAIRS) {
    if (pair < (int)token_total(args.map.tokens) * top_k) to = look_up_pair<S>(args, t, token, pair);
    t.to[pair] = to;
    if (S::TOKENS == 1)
      place_pairs_of_one<S>(args, t, pair, to);
    else
      *reinterpret_cast<uint4 *>(t.column[pair]) = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
  if (S::TOKENS > 1) place_pairs<S>(args, smem, pair, to, token);
  __syncthreads();
  return active_before(t, S::PAIRS);
}

/* By a warp of the last CTA. */
template <class S> DEVICE void report_counts(const map_args &a, const few_table<S::PAIRS> &t)
{
  if (blockIdx.x != gridDim.x - 1 || (!a.counts_out && !a.load)) return;
  for (int e = lane_id(); e < a.local_experts; e += WARP_SIZE) {
    int count = 0;
    for (int pair = 0; pair < S::PAIRS; pair++) count += t.to[pair] == e;
    if (a.counts_out) a.counts_out[e] = count;
    if (a.load) a.load[e] += count;
  }
}

#endif
