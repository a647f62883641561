/*
 * The gate: a token's experts and their weights from its logits, by a warp. Experts are ranked by integers that order
 * like floats, so that ties are exact and NaN has a place; a token's logits are read into registers once, and again
 * only where they were chosen.
 */
#ifndef CUMOE_GATE_CUH
#define CUMOE_GATE_CUH

#include "device/dtype.cuh"
#include "score.h"

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
  return GATE_SOFTMAX_OVER_ALL(a);
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
  return a.softcap > 0 && l > -INFINITY ? a.softcap * tanhf(l / a.softcap) : l;
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

/* EXACT_SUM: experts are ranked by it (kernels/score.h). */
template <bool EXACT_SUM, int N> DEVICE void softmax_over_lanes(const gate_args &a, gate_token &t, const float (&l)[N])
{
  float sum = 0;
  t.max = -INFINITY;
#pragma unroll
  for (int i = 0; i < N; i++) t.max = fmaxf(t.max, l[i]);
  t.max = warp_max(t.max);
#pragma unroll
  for (int i = 0; i < N; i++) sum += EXACT_SUM ? exact_softmax_term(l[i], t.max) : softmax_term(l[i], t.max);
  t.sum = warp_sum(sum);
}

/* In registers: keys of the logits themselves. Every score keeps their order, but may round. `weigh`: weights will be
 * asked for. */
template <int N>
DEVICE unsigned keys_of_logits(const gate_args &a, gate_token &t, uint32_t (&key)[N], bool weigh = true)
{
  float l[N];
  unsigned first_nan = load_logits(a, t.logits, 0, l);
  if (weigh && softmax_over_all(a)) softmax_over_lanes<false>(a, t, l);
#pragma unroll
  for (int i = 0; i < N; i++) key[i] = i * WARP_SIZE + lane_id() < a.experts ? key_of(l[i]) : KEY_NONE;
  return first_nan;
}

/* The same for groups of whole rows of 32 lanes: their best two by reductions that do not wait for each other, then
 * lane g ranks group g. */
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

/* What a soft-capped logit is ranked by, before the bias. */
DEVICE float choice_of(const gate_args &a, const gate_token &t, float l)
{
  if (!softmax_over_all(a)) return exact_score(a.score, l);
  return t.sum > 0 ? exact_div(exact_softmax_term(l, t.max), t.sum) : 0.f;
}

/* Of an expert's soft-capped logit. */
DEVICE uint32_t key_of_score(const gate_args &a, const gate_token &t, int e, float l)
{
  const float bias = a.select_bias && e < a.experts ? a.select_bias[e] : 0.f;
  const float value = l == l ? exact_add(choice_of(a, t, l), bias) : l;
  return e < a.experts ? key_of(value) : KEY_NONE;
}

/* In registers: keys of the scores, where a bias or groups make them differ from the logits'. */
template <int N> DEVICE unsigned keys_of_scores(const gate_args &a, gate_token &t, uint32_t (&key)[N])
{
  float l[N];
  const unsigned first_nan = load_logits(a, t.logits, 0, l);
#pragma unroll
  for (int i = 0; i < N; i++) l[i] = exact_cap(a.softcap, l[i]);
  if (softmax_over_all(a)) softmax_over_lanes<true>(a, t, l);
#pragma unroll
  for (int i = 0; i < N; i++) key[i] = key_of_score(a, t, i * WARP_SIZE + lane_id(), l[i]);
  if (a.n_group > 0) close_groups_of_rows(a, key);
  return first_nan;
}

/* A lane's values in shared memory are those of experts lane, lane + 32, ..; first logits, then keys. */
template <class F> DEVICE void each_own_expert(const gate_args &a, F use)
{
#pragma unroll 4
  for (int e = lane_id(); e < a.experts; e += WARP_SIZE) use(e);
}

/* The same sum as softmax_over_lanes. */
DEVICE void softmax_over_row(const gate_args &a, gate_token &t, bool exact, const float *l)
{
  float max = -INFINITY, sum = 0;
  const auto capped = [&](float value) { return exact ? exact_cap(a.softcap, value) : soft_cap(a, value); };
  each_own_expert(a, [&](int e) { max = fmaxf(max, capped(l[e])); });
  t.max = warp_max(max);
  each_own_expert(a, [&](int e) {
    const float value = capped(l[e]);
    sum += exact ? exact_softmax_term(value, t.max) : softmax_term(value, t.max);
  });
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
  if (softmax_over_all(a)) softmax_over_row(a, t, !by_logit, values);
  each_own_expert(a, [&](int e) {
    float value = values[e];
    if (!by_logit && value == value) {
      value = choice_of(a, t, exact_cap(a.softcap, value));
      if (a.select_bias) value = exact_add(value, a.select_bias[e]);
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
  } else if (l > -INFINITY) {
    weight = score_of(a, t, l);
  }
  if (a.flags & ROUTE_RENORMALIZE) {
    const float scale = RENORM_SCALE(a);
    weight *= scale;
    const float divisor = fmaxf(fmaf(a.renorm_eps, scale, warp_sum(weight)), a.renorm_min * scale);
    weight = divisor > 0 ? weight / divisor : 0.f;
  }
  return weight * a.routed_scale;
}

/* What lane j knows of slot j. */
struct gate_slot {
  int id;
  float weight;
};

DEVICE void store_slot(const gate_args &a, int64_t token, gate_slot slot)
{
  if (lane_id() >= a.top_k) return;
  if (a.ids_dtype == DT_I64)
    static_cast<int64_t *>(a.ids)[token * a.ids_ld + lane_id()] = slot.id;
  else
    static_cast<int32_t *>(a.ids)[token * a.ids_ld + lane_id()] = slot.id;
  a.weights[token * a.weights_ld + lane_id()] = slot.weight;
}

/* From a token's keys. `all`: also the weights, and a report of NaN; else the ids alone. */
template <int N>
DEVICE gate_slot choose_slots(const gate_args &a, const gate_token &t, int64_t token, unsigned first_nan, bool all,
                              candidates<N> &c, uint32_t *choice, gate_scratch &scratch)
{
  first_nan = __reduce_min_sync(ALL_LANES, first_nan);
  if (all && first_nan != ~0u && lane_id() == 0)
    report_token_fault(a.tokens, a.fault, FAULT_NAN_LOGIT, first_nan, token);
  const chosen_expert chosen = take_best(a, c, choice, scratch);
  if (!all) return {chosen.id, 0.f};
  float l = GATE_BY_LOGIT(a) ? value_of(chosen.key)
            : chosen.id >= 0 ? load_logit(a, t.logits + chosen.id)
                             : not_a_number();
  return {chosen.id, slot_weight(a, t, soft_cap(a, l))};
}

/* One token by one warp. N: keys a lane holds in registers. */
template <int N>
DEVICE gate_slot route_token(const gate_args &a, int64_t token, bool in_registers, uint32_t *choice,
                             gate_scratch &scratch)
{
  const bool by_logit = GATE_BY_LOGIT(a);
  gate_token t = {token * a.logits_ld, 0.f, 0.f};
  candidates<N> c;
  unsigned first_nan = ~0u;
  if (in_registers) {
    first_nan = N < 8 || by_logit ? keys_of_logits(a, t, c.key) : keys_of_scores(a, t, c.key);
  } else if (N == 8) {
    first_nan = keys_in_shared(a, t, by_logit, choice);
    c.load(a, choice);
  }
  return choose_slots(a, t, token, first_nan, true, c, choice, scratch);
}

#endif
