/* Attention of one query's head by a warp, key by key in f32: every type, layout and size; what tiles leave to it. */
#ifndef CUMOE_ATTENTION_ROW_CUH
#define CUMOE_ATTENTION_ROW_CUH

#include "attention/sequence.cuh"

constexpr int ROW_EACH = ATTENTION_MAX_HEAD / WARP_SIZE; /* a lane's elements: WARP_SIZE apart */
constexpr float LOG2_OF_E = 1.44269504088896340736f, LN_2 = .693147180559945309417f;

DEVICE float load_at(const matrix &m, int64_t row, int64_t column)
{
  return load_any(m.data, row * m.ld + column, m.dtype);
}

DEVICE void store_at(const matrix &m, int64_t row, int64_t column, float value)
{
  const int64_t at = row * m.ld + column;
  if (m.dtype == DT_F32)
    static_cast<float *>(m.data)[at] = value;
  else if (m.dtype == DT_F16)
    static_cast<f16 *>(m.data)[at] = from_f32<f16>(value);
  else
    static_cast<bf16 *>(m.data)[at] = from_f32<bf16>(value);
}

/* A lane's part of a head. T void: the type is known at run time. */
template <class T>
DEVICE void load_head(float (&value)[ROW_EACH], const matrix &m, int64_t row, int64_t first, int count)
{
#pragma unroll
  for (int i = 0; i < ROW_EACH; i++) {
    const int column = lane_id() + i * WARP_SIZE;
    value[i] = 0;
    if (column < count) {
      if constexpr (same_type<T, void>)
        value[i] = load_at(m, row, first + column);
      else
        value[i] = to_f32(static_cast<const T *>(m.data)[row * m.ld + first + column]);
    }
  }
}

DEVICE void store_head(const matrix &m, int64_t row, int64_t first, int begin, int end, const float (&value)[ROW_EACH])
{
#pragma unroll
  for (int i = 0; i < ROW_EACH; i++) {
    const int column = lane_id() + i * WARP_SIZE;
    if (column >= begin && column < end) store_at(m, row, first + column, value[i]);
  }
}

DEVICE float dot_of_heads(const float (&a)[ROW_EACH], const float (&b)[ROW_EACH])
{
  float sum = 0;
#pragma unroll
  for (int i = 0; i < ROW_EACH; i++) sum = fmaf(a[i], b[i], sum);
  return warp_sum(sum);
}

/* e^x */
DEVICE float exp_of(float x)
{
  return ex2_approx_ftz(x * LOG2_OF_E);
}

/* To 2^-22 of 1: by e^2x, which is infinite or 0 where it is large. */
DEVICE float tanh_of(float x)
{
  const float y = x * (2 * LOG2_OF_E);
  return 1 - __fdividef(2.f, 1 + ex2_approx_ftz(y > 126.f ? 126.f : y));
}

DEVICE float cap_score(const attention_args &a, float score)
{
  const float cap = (float)a.softcap;
  return cap > 0 ? cap * tanh_of(score / cap) : score;
}

/* Columns begin .. end - 1 of the head's result, and its lse if begin is 0. */
template <class T>
DEVICE void attend_row(const attention_args &a, const sequence &s, query_head at, int kv_head, int begin, int end)
{
  const int d = a.head_dim;
  const range seen = keys_seen(a, s, at.query);
  const float scale = (float)a.scale;
  const float sink = a.sinks.data && s.index >= 0 ? load_at(a.sinks, 0, at.head) : -INFINITY;
  float most = sink, sum = sink != -INFINITY, q[ROW_EACH], k[ROW_EACH], v[ROW_EACH], out[ROW_EACH] = {0};
  load_head<T>(q, a.q, at.query, (int64_t)at.head * d, d);
  for (int64_t j = seen.begin; j < seen.end; j++) {
    const int64_t row = row_of_key(a, s, j);
    if (row < 0) continue;
    load_head<T>(k, a.k, row, (int64_t)kv_head * d, d);
    load_head<T>(v, a.v, row, (int64_t)kv_head * d, d);
    const float score = cap_score(a, scale * dot_of_heads(q, k));
    if (score == -INFINITY) continue;
    const float smaller = score > most ? exp_of(most - score) : 1.f;
    if (score > most) most = score;
    const float weight = exp_of(score - most);
    sum = fmaf(sum, smaller, weight);
#pragma unroll
    for (int i = 0; i < ROW_EACH; i++) out[i] = fmaf(out[i], smaller, weight * v[i]);
  }
  const float each = sum == 0 ? 0.f : 1 / sum;
#pragma unroll
  for (int i = 0; i < ROW_EACH; i++) out[i] *= each;
  store_head(a.out, at.query, (int64_t)at.head * d, begin, end, out);
  if (a.lse.data && begin == 0 && lane_id() == 0)
    store_at(a.lse, at.query, at.head, sum == 0 ? -INFINITY : most + logf(sum));
}

/* The same, rare: whatever a tile made of it. */
template <class T>
__device__ __noinline__ void attend_again(const attention_args &a, int64_t query, int head, int begin, int end)
{
  attend_row<T>(a, sequence_with(a, query), {query, head}, head / (a.heads / a.kv_heads), begin, end);
}

#endif
