/*
 * From logits to rows: the gate (a warp a token) and the map (counting by chunks of pairs, no sorting).
 *
 * The gate ranks by integers that order like floats, so that ties are exact and NaN has a place; a token's
 * logits are read into registers once, and again only where they were chosen. The map ranks a pair among the
 * pairs of its expert by what lies before it: in its warp (match), in earlier warps (counts in shared
 * memory), in earlier chunks (counts in global memory). Nothing depends on the order in which warps or CTAs
 * run.
 */
#include "dtype.cuh"
#include "pairs.cuh"

using map_count_args = map_args;

/* ---- gate: keys ---- */

/* Orders like the float, NaN lowest: greater float, greater key; -0 = +0. 0 is below every float: not to be
 * chosen. */
constexpr uint32_t KEY_NONE = 0, KEY_NAN = 1;

DEVICE uint32_t key_of(float value)
{
  uint32_t bits = __float_as_uint(value + 0.f);
  uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return value == value ? key : KEY_NAN;
}

DEVICE float value_of(uint32_t key)
{
  float value = __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
  return key == KEY_NAN ? __uint_as_float(0x7fffffffu) : value;
}

/* ---- gate: scores, as in the public manual (cumoe_routing) ---- */

/* One token's softmax over all experts, where the score is that. */
struct gate_token {
  int64_t logits; /* index of its first logit */
  float max, sum;
};

DEVICE bool weigh_after(const gate_args &a)
{
  return a.flags & ROUTE_SCORE_AFTER_TOPK;
}
DEVICE bool softmax_over_all(const gate_args &a)
{
  return a.score == SCORE_SOFTMAX && !weigh_after(a);
}

constexpr float LARGEST = 3.402823466e38f;
DEVICE float finite_or_nan(float l)
{
  return l > LARGEST ? LARGEST : l;
}
DEVICE float not_a_number()
{
  return __uint_as_float(0x7fffffffu);
}

DEVICE float load_logit(const gate_args &a, int64_t index)
{
  return finite_or_nan(load_any(a.logits, index, a.logits_dtype));
}

DEVICE float soft_cap(const gate_args &a, float l)
{
  return a.softcap > 0 ? a.softcap * tanhf(l / a.softcap) : l;
}

/* NaN and -Inf have no part in a softmax. */
DEVICE float softmax_term(float l, float max)
{
  return l > -INFINITY ? expf(l - max) : 0.f;
}

DEVICE float score_of(const gate_args &a, const gate_token &t, float l)
{
  switch (a.score) {
  case SCORE_SIGMOID: return 1.f / (1.f + expf(-l));
  case SCORE_SQRT_SOFTPLUS: return sqrtf(l > 20.f ? l + log1pf(expf(-l)) : log1pf(expf(l)));
  case SCORE_IDENTITY: return l;
  default: return weigh_after(a) ? l : t.sum > 0 ? softmax_term(l, t.max) / t.sum : 0.f;
  }
}

/* ---- gate: groups ---- */

struct best_two {
  uint32_t first, second;
};

DEVICE best_two better(best_two a, best_two b)
{
  return {max(a.first, b.first), max(min(a.first, b.first), max(a.second, b.second))};
}

/* The key of a group's score, known to the `lanes` lanes that share the group. Each starts at another place,
 * so that groups whose size is a multiple of 32 words do not meet in one bank. */
DEVICE uint32_t group_key(const gate_args &a, const uint32_t *choice, int group, int lanes)
{
  const int size = a.experts / a.n_group, steps = ceil_div(size, lanes);
  best_two best = {KEY_NONE, KEY_NONE};
  int step = group % steps;
  for (int i = 0; i < steps; i++) {
    int at = step * lanes + lane_id() % lanes;
    if (group < a.n_group && at < size) best = better(best, {choice[group * size + at], KEY_NONE});
    step = step + 1 == steps ? 0 : step + 1;
  }
  for (int mask = lanes / 2; mask > 0; mask /= 2)
    best = better(best, {__shfl_xor_sync(ALL_LANES, best.first, mask), __shfl_xor_sync(ALL_LANES, best.second, mask)});
  if (group >= a.n_group) return KEY_NONE;
  return a.group_score == GROUP_BEST || size == 1 ? best.first : key_of(value_of(best.first) + value_of(best.second));
}

/* Bit g: group g stays. */
DEVICE uint64_t open_groups(const gate_args &a, const uint32_t *choice)
{
  int lanes = WARP_SIZE;
  while (lanes > 1 && lanes * a.n_group > WARP_SIZE) lanes /= 2;
  uint32_t low = group_key(a, choice, lane_id() / lanes, lanes);
  low = __shfl_sync(ALL_LANES, low, lane_id() * lanes % WARP_SIZE);
  if (lane_id() >= a.n_group) low = KEY_NONE;
  uint32_t high = a.n_group > WARP_SIZE ? group_key(a, choice, lane_id() + WARP_SIZE, 1) : KEY_NONE;
  uint64_t open = 0;
  for (int i = 0; i < a.topk_group; i++) {
    uint32_t best = __reduce_max_sync(ALL_LANES, max(low, high));
    if (best == KEY_NONE) break;
    unsigned mine = low == best ? lane_id() : high == best ? lane_id() + WARP_SIZE : ~0u;
    unsigned group = __reduce_min_sync(ALL_LANES, mine);
    open |= 1ull << group;
    if (group == lane_id()) low = KEY_NONE;
    if (group == lane_id() + WARP_SIZE) high = KEY_NONE;
  }
  return open;
}

/* Experts of closed groups lose their keys. expert / size by a product: exact below 1024. */
DEVICE void close_groups(const gate_args &a, uint32_t *choice)
{
  const unsigned inverse = ceil_div(1u << 21, (unsigned)(a.experts / a.n_group));
  const uint64_t open = open_groups(a, choice);
  __syncwarp();
  for (unsigned e = lane_id(); e < a.experts; e += WARP_SIZE)
    if (!(open >> (e * inverse >> 21) & 1)) choice[e] = KEY_NONE;
}

/* ---- gate: what the experts are ranked by ---- */

/* N logits a lane, in flight together: value[i] is that of expert first + 32 i + lane. Returns the first
 * NaN's expert. */
template <int N, class T> DEVICE unsigned load_logits(const gate_args &a, int64_t row, int first, float (&value)[N])
{
  const T *logits = static_cast<const T *>(a.logits) + row;
  unsigned first_nan = ~0u;
#pragma unroll
  for (int i = 0; i < N; i++) {
    int e = first + i * WARP_SIZE + lane_id();
    value[i] = e < a.experts ? to_f32(logits[e]) : -INFINITY;
  }
#pragma unroll
  for (int i = N - 1; i >= 0; i--) {
    value[i] = finite_or_nan(value[i]);
    if (value[i] != value[i]) first_nan = first + i * WARP_SIZE + lane_id();
  }
  return first_nan;
}

template <int N> DEVICE unsigned load_logits(const gate_args &a, int64_t row, int first, float (&value)[N])
{
  switch (a.logits_dtype) {
  case DT_F16: return load_logits<N, f16>(a, row, first, value);
  case DT_BF16: return load_logits<N, bf16>(a, row, first, value);
  default: return load_logits<N, f32>(a, row, first, value);
  }
}

template <int N> DEVICE void softmax_over_lanes(const gate_args &a, gate_token &t, const float (&l)[N])
{
  float sum = 0;
  t.max = -INFINITY;
#pragma unroll
  for (int i = 0; i < N; i++) t.max = fmaxf(t.max, l[i]);
  t.max = warp_max(t.max);
#pragma unroll
  for (int i = 0; i < N; i++) sum += softmax_term(l[i], t.max);
  t.sum = warp_sum(sum);
}

/* In registers: keys of the logits themselves. Every score keeps their order, but may round. */
template <int N> DEVICE unsigned keys_of_logits(const gate_args &a, gate_token &t, uint32_t (&key)[N])
{
  float l[N];
  unsigned first_nan = load_logits(a, t.logits, 0, l);
  if (softmax_over_all(a)) softmax_over_lanes(a, t, l);
#pragma unroll
  for (int i = 0; i < N; i++) key[i] = i * WARP_SIZE + lane_id() < a.experts ? key_of(l[i]) : KEY_NONE;
  return first_nan;
}

/* The same for groups of whole rows of 32 lanes: their best two by reductions that do not wait for each other, then lane
 * g ranks group g. */
template <int N> DEVICE void close_groups_of_rows(const gate_args &a, uint32_t (&key)[N])
{
  const int rows = a.experts / a.n_group / WARP_SIZE;
  best_two group = {KEY_NONE, KEY_NONE};
#pragma unroll
  for (int i = 0; i < N; i++) {
    const uint32_t first = __reduce_max_sync(ALL_LANES, key[i]);
    const int winner = __ffs(__ballot_sync(ALL_LANES, key[i] == first)) - 1;
    const uint32_t second = __reduce_max_sync(ALL_LANES, lane_id() == winner ? KEY_NONE : key[i]);
    if (i / rows == lane_id()) group = better(group, {first, second});
  }
  const uint32_t mine = lane_id() >= a.n_group        ? KEY_NONE
                        : a.group_score == GROUP_BEST ? group.first
                                                      : key_of(value_of(group.first) + value_of(group.second));
  int above = 0;
#pragma unroll
  for (int g = 0; g < N; g++) {
    const uint32_t other = __shfl_sync(ALL_LANES, mine, g);
    above += other > mine || (other == mine && g < lane_id());
  }
  const unsigned open = __ballot_sync(ALL_LANES, mine != KEY_NONE && above < a.topk_group);
#pragma unroll
  for (int i = 0; i < N; i++)
    if (!(open >> i / rows & 1)) key[i] = KEY_NONE;
}

/* In registers: keys of the scores, where a bias or groups make them differ from the logits'. */
template <int N> DEVICE unsigned keys_of_scores(const gate_args &a, gate_token &t, uint32_t (&key)[N])
{
  float l[N];
  const unsigned first_nan = load_logits(a, t.logits, 0, l);
#pragma unroll
  for (int i = 0; i < N; i++) l[i] = i * WARP_SIZE + lane_id() < a.experts ? soft_cap(a, l[i]) : l[i];
  if (softmax_over_all(a)) softmax_over_lanes(a, t, l);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int e = i * WARP_SIZE + lane_id();
    const float bias = a.select_bias && e < a.experts ? a.select_bias[e] : 0.f;
    const float value = l[i] == l[i] ? score_of(a, t, l[i]) + bias : l[i];
    key[i] = e < a.experts ? key_of(value) : KEY_NONE;
  }
  if (a.n_group > 0) close_groups_of_rows(a, key);
  return first_nan;
}

/* A lane's values in shared memory are those of experts lane, lane + 32, ..; first logits, then keys. */
template <class F> DEVICE void each_own_expert(const gate_args &a, F use)
{
#pragma unroll 4
  for (int e = lane_id(); e < a.experts; e += WARP_SIZE) use(e);
}

DEVICE void softmax_over_row(const gate_args &a, gate_token &t, const float *l)
{
  float max = -INFINITY, sum = 0;
  each_own_expert(a, [&](int e) { max = fmaxf(max, soft_cap(a, l[e])); });
  t.max = warp_max(max);
  each_own_expert(a, [&](int e) { sum += softmax_term(soft_cap(a, l[e]), t.max); });
  t.sum = warp_sum(sum);
}

/* In shared memory, for what registers have no room or no order for: many experts, bias, groups. */
DEVICE unsigned keys_in_shared(const gate_args &a, gate_token &t, bool by_logit, uint32_t *choice)
{
  constexpr int N = 8;
  float *values = reinterpret_cast<float *>(choice), l[N];
  unsigned first_nan = ~0u;
  for (int first = 0; first < a.experts; first += N * WARP_SIZE) {
    first_nan = min(first_nan, load_logits(a, t.logits, first, l));
#pragma unroll
    for (int i = 0; i < N; i++)
      if (first + i * WARP_SIZE + lane_id() < MAX_EXPERTS) values[first + i * WARP_SIZE + lane_id()] = l[i];
  }
  if (softmax_over_all(a)) softmax_over_row(a, t, values);
  each_own_expert(a, [&](int e) {
    float value = values[e];
    if (!by_logit && value == value) {
      value = score_of(a, t, soft_cap(a, value));
      if (a.select_bias) value += a.select_bias[e];
    }
    choice[e] = key_of(value);
  });
  __syncwarp();
  if (a.n_group > 0) close_groups(a, choice);
  return first_nan;
}

/* ---- gate: the best k ---- */

/* A lane's candidates: N keys in registers, each the best of `each` consecutive experts of the lane; if that
 * is more than one, the keys of all are in shared memory, and `sub` holds two bits a key: which of them it
 * is. */
template <int N> struct candidates {
  uint32_t key[N];
  int each = 1;
  unsigned sub = 0;

  DEVICE void refresh(const gate_args &a, const uint32_t *choice, int i, uint32_t &best, unsigned &which) const
  {
    best = KEY_NONE, which = 0;
    for (int g = 0; g < each; g++) {
      int e = (i * each + g) * WARP_SIZE + lane_id();
      uint32_t other = e < a.experts ? choice[e] : KEY_NONE;
      if (other > best) best = other, which = g;
    }
  }

  DEVICE void load(const gate_args &a, const uint32_t *choice)
  {
    each = ceil_div(a.experts, N * WARP_SIZE);
#pragma unroll
    for (int i = 0; i < N; i++) {
      unsigned which;
      refresh(a, choice, i, key[i], which);
      sub |= which << 2 * i;
    }
  }

  /* A tree; of equals the lower. */
  DEVICE uint32_t best(int &where) const
  {
    uint32_t k[N];
    int w[N];
#pragma unroll
    for (int i = 0; i < N; i++) k[i] = key[i], w[i] = i;
#pragma unroll
    for (int width = N / 2; width > 0; width /= 2)
#pragma unroll
      for (int i = 0; i < width; i++) {
        const bool right = k[2 * i + 1] > k[2 * i];
        k[i] = right ? k[2 * i + 1] : k[2 * i], w[i] = right ? w[2 * i + 1] : w[2 * i];
      }
    where = w[0];
    return k[0];
  }

  DEVICE unsigned expert(int where) const
  {
    return (where * each + (sub >> 2 * where & 3)) * WARP_SIZE + lane_id();
  }

  DEVICE void remove(const gate_args &a, uint32_t *choice, int where)
  {
    uint32_t next = KEY_NONE;
    if (each > 1) {
      unsigned which;
      choice[expert(where)] = KEY_NONE;
      refresh(a, choice, where, next, which);
      sub = (sub & ~(3u << 2 * where)) | which << 2 * where;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
      if (i == where) key[i] = next;
  }
};

struct chosen_expert {
  int id; /* -1: there are fewer */
  uint32_t key;
};

/* A warp's notes. */
struct gate_scratch {
  uint4 best[WARP_SIZE / 4];        /* of each lane */
  chosen_expert found[WARP_SIZE];   /* in any order */
  chosen_expert ordered[WARP_SIZE]; /* best first */
};

/* The k-th best of the lanes' best keys, which at least k keys reach; KEY_NONE if fewer lanes have one. */
DEVICE uint32_t kth_of_lanes(uint32_t best, int k, gate_scratch &s)
{
  reinterpret_cast<uint32_t *>(s.best)[lane_id()] = best;
  __syncwarp();
  int above = 0;
#pragma unroll
  for (int i = 0; i < WARP_SIZE / 4; i++) {
    const uint4 other = s.best[i];
    above += (other.x > best) + (other.y > best) + (other.z > best) + (other.w > best);
  }
  return __reduce_min_sync(ALL_LANES, above < k ? best : ~0u);
}

/* Notes the keys that reach the threshold, if the lane's key does; returns how many there are by now. */
DEVICE int note_key(uint32_t key, int id, uint32_t threshold, int found, gate_scratch &s)
{
  const bool reaches = key >= threshold;
  const unsigned lanes = __ballot_sync(ALL_LANES, reaches);
  const int at = found + __popc(lanes & ((1u << lane_id()) - 1));
  if (reaches && at < WARP_SIZE) s.found[at] = {id, key};
  return found + __popc(lanes);
}

template <int N>
DEVICE int note_keys(const gate_args &a, const candidates<N> &c, const uint32_t *choice, uint32_t threshold,
                     gate_scratch &s)
{
  int found = 0;
  if (c.each == 1) {
#pragma unroll
    for (int i = 0; i < N; i++) found = note_key(c.key[i], i * WARP_SIZE + lane_id(), threshold, found, s);
  } else {
    for (int first = 0; first < a.experts; first += WARP_SIZE) {
      const int e = first + lane_id();
      found = note_key(e < a.experts ? choice[e] : KEY_NONE, e, threshold, found, s);
    }
  }
  return found;
}

/* The quick way, where a threshold leaves at most a warp of candidates: each counts those that rank above it.
 */
template <int N>
DEVICE bool take_few(const gate_args &a, const candidates<N> &c, const uint32_t *choice, gate_scratch &s,
                     chosen_expert &chosen)
{
  int where;
  const uint32_t threshold = kth_of_lanes(c.best(where), a.top_k, s);
  if (threshold == KEY_NONE) return false;
  const int found = note_keys(a, c, choice, threshold, s);
  if (found > WARP_SIZE) return false;
  __syncwarp();
  const chosen_expert own = lane_id() < found ? s.found[lane_id()] : chosen_expert{-1, KEY_NONE};
  int above = 0;
#pragma unroll 4
  for (int i = 0; i < found; i++) {
    const chosen_expert other = s.found[i];
    above += other.key > own.key || (other.key == own.key && other.id < own.id);
  }
  if (lane_id() < found) s.ordered[above] = own;
  __syncwarp();
  if (lane_id() < a.top_k) chosen = s.ordered[lane_id()];
  return true;
}

/* One after the other, for many ties and much of a row. */
template <int N> DEVICE void take_in_turn(const gate_args &a, candidates<N> &c, uint32_t *choice, chosen_expert &chosen)
{
#pragma unroll 1
  for (int j = 0; j < a.top_k; j++) {
    int where;
    const uint32_t best = c.best(where), winner = __reduce_max_sync(ALL_LANES, best);
    if (winner == KEY_NONE) break;
    const unsigned id = __reduce_min_sync(ALL_LANES, best == winner ? c.expert(where) : ~0u);
    if (lane_id() == j) chosen = {(int)id, winner};
    if (id % WARP_SIZE == lane_id()) c.remove(a, choice, where);
  }
}

/* Lane j gets the j-th best expert. */
template <int N> DEVICE chosen_expert take_best(const gate_args &a, candidates<N> &c, uint32_t *choice, gate_scratch &s)
{
  chosen_expert chosen = {-1, KEY_NAN};
  if (!take_few(a, c, choice, s, chosen)) take_in_turn(a, c, choice, chosen);
  return chosen;
}

/* Lane j: the weight of slot j from its logit, NaN where there is none. */
DEVICE float slot_weight(const gate_args &a, const gate_token &t, float l)
{
  float weight = 0;
  if (weigh_after(a)) {
    float term = softmax_term(l, warp_max(fmaxf(l, -INFINITY))), sum = warp_sum(term);
    weight = sum > 0 ? term / sum : 0.f;
  } else if (l == l) {
    weight = score_of(a, t, l);
  }
  if (a.flags & ROUTE_RENORMALIZE) {
    float divisor = fmaxf(warp_sum(weight) + a.renorm_eps, a.renorm_min);
    weight = divisor > 0 ? weight / divisor : 0.f;
  }
  return weight * a.routed_scale;
}

/* N: keys a lane holds in registers. */
template <int N>
DEVICE void route_token(const gate_args &a, int64_t token, bool in_registers, uint32_t *choice, gate_scratch &scratch)
{
  const bool by_logit = !a.select_bias && a.n_group == 0;
  gate_token t = {token * a.logits_ld, 0.f, 0.f};
  candidates<N> c;
  unsigned first_nan = ~0u;
  if (in_registers) {
    first_nan = N < 8 || by_logit ? keys_of_logits(a, t, c.key) : keys_of_scores(a, t, c.key);
  } else if (N == 8) {
    first_nan = keys_in_shared(a, t, by_logit, choice);
    c.load(a, choice);
  }
  first_nan = __reduce_min_sync(ALL_LANES, first_nan);
  if (first_nan != ~0u && lane_id() == 0) report_token_fault(a.tokens, a.fault, FAULT_NAN_LOGIT, first_nan, token);
  const chosen_expert chosen = take_best(a, c, choice, scratch);
  float l = by_logit ? value_of(chosen.key) : chosen.id >= 0 ? load_logit(a, t.logits + chosen.id) : not_a_number();
  const float weight = slot_weight(a, t, soft_cap(a, l));
  if (lane_id() >= a.top_k) return;
  if (a.ids_dtype == DT_I64)
    static_cast<int64_t *>(a.ids)[token * a.ids_ld + lane_id()] = chosen.id;
  else
    static_cast<int32_t *>(a.ids)[token * a.ids_ld + lane_id()] = chosen.id;
  a.weights[token * a.weights_ld + lane_id()] = weight;
}

/* One token by one warp. */
DEVICE void choose_for_token(const gate_args &a, int64_t token, uint32_t *choice, gate_scratch &scratch)
{
  const bool by_logit = !a.select_bias && a.n_group == 0, capped_softmax = softmax_over_all(a) && a.softcap > 0;
  const bool whole_rows = a.n_group == 0 || a.experts / a.n_group % WARP_SIZE == 0;
  if (a.experts > 256 || !whole_rows || (by_logit && capped_softmax))
    route_token<8>(a, token, false, choice, scratch);
  else if (by_logit && a.experts <= 64)
    route_token<2>(a, token, true, choice, scratch);
  else if (by_logit && a.experts <= 128)
    route_token<4>(a, token, true, choice, scratch);
  else
    route_token<8>(a, token, true, choice, scratch);
}

template <int TOKENS> DEVICE void gate_warp(const gate_args &a)
{
  __shared__ uint32_t choice[TOKENS][MAX_EXPERTS];
  __shared__ gate_scratch scratch[TOKENS];
  const int64_t token = (int64_t)blockIdx.x * TOKENS + warp_id();
  check_token_count(a.tokens, a.fault);
  if (token < token_total(a.tokens)) choose_for_token(a, token, choice[warp_id()], scratch[warp_id()]);
}

/* ---- map ---- */

/* 32 warps in blocks of 8: the rows of an expert in seven warps still count in a byte. */
constexpr int RUN = 1024, RUN_WARPS = RUN / WARP_SIZE, BLOCK_WARPS = 8, BLOCKS = RUN_WARPS / BLOCK_WARPS;

struct map_shared {
  int32_t next[MAX_EXPERTS]; /* counts first, then the row that the run's first pair of each expert gets */
  union {
    int32_t earlier[MAX_EXPERTS]; /* rows in earlier chunks */
    int32_t warp_rows[RUN_WARPS]; /* of the experts that a warp scans */
  };
  uint16_t in_block[BLOCKS][MAX_EXPERTS];  /* rows in each block of warps */
  uint8_t in_warp[RUN_WARPS][MAX_EXPERTS]; /* rows in each warp, then in the earlier warps of its block */
};
static_assert(sizeof(map_shared) <= 48 * 1024, "static shared memory");

struct pair_range {
  int64_t begin, end, padded_end; /* this chunk's pairs; up to padded_end: of tokens that are not there */
};

DEVICE pair_range chunk_of(const map_args &a)
{
  int64_t begin = (int64_t)blockIdx.x * a.chunk_pairs, end = begin + a.chunk_pairs;
  return {begin, min(end, token_total(a.tokens) * a.top_k), min(end, a.tokens.count * a.top_k)};
}

/* Integer sums: the order of the atomics does not show. */
DEVICE void count_chunk(const map_args &a, pair_range chunk, int32_t *count)
{
  for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x) count[e] = 0;
  __syncthreads();
  for (int64_t pair = chunk.begin + threadIdx.x; pair < chunk.end; pair += blockDim.x) {
    int to = destination<false>(a, pair);
    if (to >= 0) atomicAdd(&count[to], 1);
  }
  __syncthreads();
}

template <int PAIRS> DEVICE void map_count_chunk(const map_args &a)
{
  __shared__ int32_t count[MAX_EXPERTS];
  count_chunk(a, chunk_of(a), count);
  for (int e = threadIdx.x; e < a.local_experts; e += blockDim.x)
    a.hist[(int64_t)blockIdx.x * a.local_experts + e] = count[e];
}

/* Every CTA adds up the whole table: cheaper than a third launch, and `earlier` falls out of it. */
DEVICE void sum_chunks(const map_args &a, map_shared &s)
{
  const int columns = round_up(a.local_experts, WARP_SIZE), readers = blockDim.x / columns;
  const int e = threadIdx.x % columns, reader = threadIdx.x / columns;
  s.next[threadIdx.x] = s.earlier[threadIdx.x] = 0;
  __syncthreads();
  if (e < a.local_experts && reader < readers) {
    int total = 0, earlier = 0;
#pragma unroll 16
    for (int chunk = reader; chunk < a.chunks; chunk += readers) {
      int rows = a.hist[(int64_t)chunk * a.local_experts + e];
      total += rows;
      if (chunk < blockIdx.x) earlier += rows;
    }
    atomicAdd(&s.next[e], total);
    atomicAdd(&s.earlier[e], earlier);
  }
  __syncthreads();
}

/* Sum of `count` over the threads before this one. */
DEVICE int scan_threads(int count, int32_t *warp_rows)
{
  const int inclusive = warp_scan(count);
  __syncthreads();
  if (lane_id() == WARP_SIZE - 1) warp_rows[warp_id()] = inclusive;
  __syncthreads();
  const int of_warp = warp_rows[lane_id()];
  return __shfl_sync(ALL_LANES, warp_scan(of_warp) - of_warp, warp_id()) + inclusive - count;
}

/* Counts to offsets, a thread an expert; the first CTA writes them out. */
DEVICE void lay_out_rows(const map_args &a, map_shared &s)
{
  const int e = threadIdx.x;
  const bool is_expert = e < a.local_experts;
  const int count = is_expert ? s.next[e] : 0, earlier = is_expert && a.chunks > 1 ? s.earlier[e] : 0;
  const int offset = scan_threads(count, s.warp_rows);
  if (is_expert) s.next[e] = offset + earlier;
  __syncthreads();
  if (blockIdx.x != 0 || !is_expert) return;
  a.counts[e] = count;
  a.offsets[e] = offset;
  if (e == a.local_experts - 1) a.offsets[e + 1] = offset + count;
  if (a.counts_out) a.counts_out[e] = count;
  if (a.load) a.load[e] += count;
}

/* Rows a warp -> rows in the earlier warps of its block and rows a block; a thread takes four experts of a
 * block. */
DEVICE void scan_warps(const map_args &a, map_shared &s)
{
  constexpr int WORDS = MAX_EXPERTS / 4;
  const int word = threadIdx.x % WORDS, block = threadIdx.x / WORDS;
  if (word * 4 >= a.local_experts) return;
  uint32_t rows[BLOCK_WARPS], before = 0;
#pragma unroll
  for (int w = 0; w < BLOCK_WARPS; w++)
    rows[w] = reinterpret_cast<uint32_t *>(s.in_warp[block * BLOCK_WARPS + w])[word];
#pragma unroll
  for (int w = 0; w < BLOCK_WARPS; w++) {
    reinterpret_cast<uint32_t *>(s.in_warp[block * BLOCK_WARPS + w])[word] = before;
    if (w < BLOCK_WARPS - 1) before += rows[w];
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    s.in_block[block][word * 4 + i] = (before >> 8 * i & 0xff) + (rows[BLOCK_WARPS - 1] >> 8 * i & 0xff);
}

/* A thread's pair: the local expert it goes to, and its place among the warp's pairs of that expert. */
struct ranked_pair {
  int64_t pair;
  int to, before;
};

DEVICE ranked_pair rank_run(const map_args &a, map_shared &s, pair_range chunk, int64_t begin)
{
  const int64_t pair = begin + threadIdx.x;
  const int to = pair < chunk.end ? destination<true>(a, pair) : ROW_DROPPED;
  uint8_t *own = s.in_warp[warp_id()];
  for (int word = lane_id(); word * 4 < a.local_experts; word += WARP_SIZE) reinterpret_cast<uint32_t *>(own)[word] = 0;
  __syncwarp();
  const unsigned peers = __match_any_sync(ALL_LANES, to);
  const int before = __popc(peers & ((1u << lane_id()) - 1));
  if (to >= 0 && before == 0) own[to] = __popc(peers);
  __syncthreads();
  scan_warps(a, s);
  __syncthreads();
  return {pair, to, before};
}

DEVICE int rows_in_run(const map_shared &s, int expert)
{
  int rows = 0;
  for (int block = 0; block < BLOCKS; block++) rows += s.in_block[block][expert];
  return rows;
}

DEVICE void place_pair(const map_args &a, const map_shared &s, pair_range chunk, ranked_pair r)
{
  int row = r.to;
  if (r.to >= 0) {
    row = s.next[r.to] + s.in_warp[warp_id()][r.to] + r.before;
    for (int block = 0; block < warp_id() / BLOCK_WARPS; block++) row += s.in_block[block][r.to];
    a.row_pair[row] = (int32_t)r.pair;
  }
  if (r.pair < chunk.padded_end) a.slot_row[r.pair] = row;
}

/* For up, which begins when this grid is complete. */
DEVICE void clear_progress(const map_args &a)
{
  if (!a.progress) return;
  const int64_t words = COPY_PROGRESS(a.tokens.count * a.top_k), step = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) a.progress[i] = 0;
}

/* The first run is ranked before rows are laid out: alone, it needs no other count. */
template <int PAIRS> DEVICE void map_chunk(const map_args &a)
{
  static_assert(PAIRS == RUN && RUN >= MAX_EXPERTS, "a thread a pair, a thread an expert");
  __shared__ __align__(16) map_shared s;
  const pair_range chunk = chunk_of(a);
  const bool is_expert = threadIdx.x < a.local_experts;
  check_token_count(a.tokens, a.fault);
  clear_progress(a);
  ranked_pair r = rank_run(a, s, chunk, chunk.begin);
  if (a.chunks > 1)
    sum_chunks(a, s);
  else if (chunk.end - chunk.begin > RUN)
    count_chunk(a, chunk, s.next);
  else if (is_expert)
    s.next[threadIdx.x] = rows_in_run(s, threadIdx.x);
  lay_out_rows(a, s);
  for (int64_t begin = chunk.begin;;) {
    place_pair(a, s, chunk, r);
    begin += RUN;
    if (begin >= chunk.padded_end) break;
    __syncthreads();
    if (is_expert) s.next[threadIdx.x] += rows_in_run(s, threadIdx.x);
    r = rank_run(a, s, chunk, begin);
  }
}

/* ---- kernels ---- */

#define ROWS_route
#define VARIANT(op, arch, file, form, in, w, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                                    \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      VARIANT_NAME(op, arch, form, in, w, BM, BN, BK)(const __grid_constant__ op##_args a)                             \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    op##_##form<BM>(a);                                                                                                \
  }
#include "variants.def"
