/* Backward of attention of one query's head, or of one key's, by a warp: as row.cuh. */
#ifndef CUMOE_ATTENTION_BACKWARD_ROW_CUH
#define CUMOE_ATTENTION_BACKWARD_ROW_CUH

#include "attention/row.cuh"

struct loaded_query {
  float q[ROW_EACH], dout[ROW_EACH], lse, delta;
};

/* What a pair of query and key gives: its weight, and the gradient of the score before the cap. */
struct pair_gradient {
  float weight, score;
};

DEVICE pair_gradient gradient_of(const attention_args &a, const loaded_query &q, const float (&k)[ROW_EACH],
                                 const float (&v)[ROW_EACH])
{
  const float s = cap_score(a, (float)a.scale * dot_of_heads(q.q, k)), along = dot_of_heads(q.dout, v);
  const float weight = s == -INFINITY || q.lse == -INFINITY ? 0.f : exp_of(s - q.lse);
  if (weight == 0) return {0, 0};
  const float t = a.softcap > 0 ? s / (float)a.softcap : 0.f;
  return {weight, weight * (along - q.delta) * (1 - t * t) * (float)a.scale};
}

DEVICE void add_scaled(float (&to)[ROW_EACH], float factor, const float (&from)[ROW_EACH])
{
#pragma unroll
  for (int i = 0; i < ROW_EACH; i++) to[i] = fmaf(factor, from[i], to[i]);
}

/* The sum of dout out. */
DEVICE float delta_of_row(const attention_args &a, int64_t query, int head)
{
  const int d = a.head_dim;
  float out[ROW_EACH], dout[ROW_EACH];
  load_head<void>(out, a.out, query, (int64_t)head * d, d);
  load_head<void>(dout, a.dout, query, (int64_t)head * d, d);
  return dot_of_heads(out, dout);
}

DEVICE void dq_of_row(const attention_args &a, int64_t query, int head, float delta)
{
  const int d = a.head_dim, group = a.heads / a.kv_heads;
  const int64_t from = (int64_t)(head / group) * d, at = (int64_t)head * d;
  const sequence s = sequence_with(a, query);
  const range seen = keys_seen(a, s, query);
  float dq[ROW_EACH] = {0}, k[ROW_EACH], v[ROW_EACH];
  loaded_query q;
  load_head<void>(q.q, a.q, query, at, d);
  load_head<void>(q.dout, a.dout, query, at, d);
  q.lse = load_at(a.lse, query, head);
  q.delta = delta;
  for (int64_t j = seen.begin; j < seen.end; j++) {
    load_head<void>(k, a.k, s.key + j, from, d);
    load_head<void>(v, a.v, s.key + j, from, d);
    add_scaled(dq, gradient_of(a, q, k, v).score, k);
  }
  store_head(a.dq, query, at, 0, d, dq);
}

DEVICE void dkv_of_row(const attention_args &a, int64_t row, int kv_head)
{
  const int d = a.head_dim, group = a.heads / a.kv_heads;
  const int64_t from = (int64_t)kv_head * d;
  float k[ROW_EACH], v[ROW_EACH], dk[ROW_EACH] = {0}, dv[ROW_EACH] = {0};
  loaded_query q;
  load_head<void>(k, a.k, row, from, d);
  load_head<void>(v, a.v, row, from, d);
  for (int64_t i = 0; i < a.sequences; i++) {
    const sequence s = sequence_of(a, i);
    if (row < s.key || row >= s.key + s.keys) continue;
    const range by = queries_seeing(a, s, row - s.key);
    for (int64_t query = by.begin; query < by.end; query++)
      for (int h = 0; h < group; h++) {
        const int64_t head = kv_head * group + h;
        load_head<void>(q.q, a.q, query, head * d, d);
        load_head<void>(q.dout, a.dout, query, head * d, d);
        q.lse = load_at(a.lse, query, head);
        q.delta = load_at(a.delta, query, head);
        const pair_gradient g = gradient_of(a, q, k, v);
        add_scaled(dk, g.score, q.q);
        add_scaled(dv, g.weight, q.dout);
      }
  }
  store_head(a.dk, row, from, 0, d, dk);
  store_head(a.dv, row, from, 0, d, dv);
}

#endif
