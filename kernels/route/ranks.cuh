/* The gate: a key for each of a token's experts, in registers or in shared memory. */
#ifndef CUMOE_RANKS_CUH
#define CUMOE_RANKS_CUH

#include "route/groups.cuh"

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
  static_assert(DENSE_FORMATS == 3, "f16, bf16 and f32 are all that logits may be");
  switch (a.logits_dtype) {
  case DT_F16: return load_logits<N, f16>(a, row, first, value);
  case DT_BF16: return load_logits<N, bf16>(a, row, first, value);
  default: return load_logits<N, f32>(a, row, first, value);
  }
}

/* value[i] = of(i, value[i]). IN_TURN: one after the other, so that the code of `of` is there once; as registers have
 * no index, all values move on by one place each time. */
template <bool IN_TURN, int N, class F> DEVICE void each_value(float (&value)[N], F of)
{
  if constexpr (!IN_TURN) {
#pragma unroll
    for (int i = 0; i < N; i++) value[i] = of(i, value[i]);
  } else {
#pragma unroll 1
    for (int i = 0; i < N; i++) {
      const float last = of(i, value[0]);
#pragma unroll
      for (int j = 1; j < N; j++) value[j - 1] = value[j];
      value[N - 1] = last;
    }
  }
}

/* EXACT_SUM: experts are ranked by it (kernels/score.h). */
template <bool EXACT_SUM, bool IN_TURN = false, int N>
DEVICE void softmax_over_lanes(const gate_args &a, gate_token &t, float (&l)[N])
{
  float sum = 0;
  t.max = -INFINITY;
#pragma unroll
  for (int i = 0; i < N; i++) t.max = fmaxf(t.max, l[i]);
  t.max = warp_max(t.max);
  each_value<IN_TURN>(l, [&](int, float logit) {
    sum += EXACT_SUM ? exact_softmax_term(logit, t.max) : softmax_term(logit, t.max);
    return logit;
  });
  t.sum = warp_sum(sum);
}

/* Of logits their soft cap and what experts are ranked by besides, exactly. */
template <bool IN_TURN, int N> DEVICE void cap_scores(const gate_args &a, gate_token &t, float (&l)[N])
{
  each_value<IN_TURN>(l, [&](int, float logit) { return exact_cap(a.softcap, logit); });
  if (softmax_over_all(a)) softmax_over_lanes<true, IN_TURN>(a, t, l);
}

/* What scores of a token's experts have in common, if logits fit registers. By a loop each: for who waits for something
 * else meanwhile. Returns the first NaN's expert. */
template <int N> DEVICE unsigned sum_scores(const gate_args &a, gate_token &t)
{
  float l[N];
  const unsigned first_nan = load_logits(a, t.logits, 0, l);
  if (!softmax_over_all(a)) return first_nan;
  if (GATE_BY_LOGIT(a))
    softmax_over_lanes<false, true>(a, t, l);
  else
    cap_scores<true>(a, t, l);
  return first_nan;
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

/* In registers: keys of the scores, where a bias or groups make them differ from the logits'. IN_TURN: for who waits
 * for something else meanwhile. */
template <bool IN_TURN, int N> DEVICE unsigned keys_of_scores(const gate_args &a, gate_token &t, uint32_t (&key)[N])
{
  float l[N];
  const unsigned first_nan = load_logits(a, t.logits, 0, l);
  cap_scores<IN_TURN>(a, t, l);
  each_value<IN_TURN>(
      l, [&](int i, float logit) { return __uint_as_float(key_of_score(a, t, i * WARP_SIZE + lane_id(), logit)); });
#pragma unroll
  for (int i = 0; i < N; i++) key[i] = __float_as_uint(l[i]);
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

/* In shared memory: for more experts than fit registers, or groups that are not whole rows of lanes. */
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

#endif
