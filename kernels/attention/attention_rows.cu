/*
 * Attention without tiles: forward of f32, backward of every type, and rotary embedding. A warp has a query's head, or
 * a key's, and goes through what it sees in order, so that the sums are those of no schedule.
 */
#include "attention/row.cuh"
#include "train/elements.cuh"

template <class T, int UNITS, int LANES, int THREADS> DEVICE void row_attention(const attention_args &a)
{
  static_assert(LANES == WARP_SIZE && UNITS == THREADS / WARP_SIZE, "a warp a head");
  const int64_t unit = (int64_t)blockIdx.x * UNITS + warp_id();
  if (unit >= a.units) return;
  const int64_t query = unit / a.heads;
  const int head = (int)(unit - query * a.heads);
  attend_row<T>(a, sequence_with(a, query), {query, head}, head / (a.heads / a.kv_heads), 0, a.head_dim);
}

/* ---- backward ---- */

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

template <int UNITS> DEVICE void any_attention_dq(const attention_args &a)
{
  const int64_t unit = (int64_t)blockIdx.x * UNITS + warp_id();
  if (unit >= a.units) return;
  const int64_t query = unit / a.heads;
  const int head = (int)(unit - query * a.heads), d = a.head_dim, group = a.heads / a.kv_heads;
  const int64_t from = (int64_t)(head / group) * d, at = (int64_t)head * d;
  const sequence s = sequence_with(a, query);
  const range seen = keys_seen(a, s, query);
  float dq[ROW_EACH] = {0}, k[ROW_EACH], v[ROW_EACH];
  loaded_query q;
  load_head<void>(q.dout, a.dout, query, at, d);
  load_head<void>(q.q, a.out, query, at, d);
  q.delta = dot_of_heads(q.q, q.dout);
  if (lane_id() == 0) store_at(a.delta, query, head, q.delta);
  load_head<void>(q.q, a.q, query, at, d);
  q.lse = load_at(a.lse, query, head);
  for (int64_t j = seen.begin; j < seen.end; j++) {
    load_head<void>(k, a.k, s.key + j, from, d);
    load_head<void>(v, a.v, s.key + j, from, d);
    add_scaled(dq, gradient_of(a, q, k, v).score, k);
  }
  store_head(a.dq, query, at, 0, d, dq);
}

template <int UNITS> DEVICE void any_attention_dkv(const attention_args &a)
{
  const int64_t unit = (int64_t)blockIdx.x * UNITS + warp_id();
  if (unit >= a.units) return;
  const int64_t row = unit / a.kv_heads;
  const int kv_head = (int)(unit - row * a.kv_heads), d = a.head_dim, group = a.heads / a.kv_heads;
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

/* A CTA a head. */
template <int UNITS> DEVICE void any_attention_dsinks(const attention_args &a)
{
  constexpr int WARPS = 8;
  __shared__ double part[WARPS];
  const int64_t head = blockIdx.x;
  const double sink = load_at(a.sinks, 0, head);
  double sum = 0;
  for (int64_t query = threadIdx.x; query < a.queries; query += WARPS * WARP_SIZE) {
    const float lse = load_at(a.lse, query, head);
    if (lse != -INFINITY) sum -= exp(sink - (double)lse) * (double)load_at(a.delta, query, head);
  }
  sum = warp_sum(sum);
  if (lane_id() == 0) part[warp_id()] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = a.accumulate ? (double)load_at(a.dsinks, 0, head) : 0.;
  for (int w = 0; w < WARPS; w++) total += part[w];
  store_at(a.dsinks, 0, head, (float)total);
}

/* ---- rotary embedding: in double, rounded once ---- */

DEVICE void turn_pair(const rope_args &r, int64_t token, int64_t place, int64_t begin, int i)
{
  const int64_t at = begin + (r.interleaved ? 2 * i : i), other = at + (r.interleaved ? 1 : r.half);
  const double a = get(r.x, token, at), b = get(r.x, token, other), cosine = get(r.cosine, place, i);
  const double sine = r.backward ? -get(r.sine, place, i) : get(r.sine, place, i);
  put(r.y, token, at, a * cosine - b * sine);
  put(r.y, token, other, b * cosine + a * sine);
}

template <int UNITS> DEVICE void any_rope(const rope_args &r)
{
  const int64_t token = blockIdx.x, place = r.positions.data ? id_at(r.positions, token) : token;
  const bool inside = place >= 0 && place < r.places;
  const int rest = r.head_dim - 2 * r.half, each = r.half + rest;
  if (!inside && threadIdx.x == 0) report_fault(r.fault, FAULT_SEQUENCE, 0, token);
  for (int64_t i = threadIdx.x; inside && i < (int64_t)r.heads * each; i += blockDim.x) {
    const int64_t begin = i / each * r.head_dim;
    const int pair = (int)(i % each);
    if (pair < r.half)
      turn_pair(r, token, place, begin, pair);
    else
      store_at(r.y, token, begin + r.half + pair, load_at(r.x, token, begin + r.half + pair));
  }
  for (int64_t c = threadIdx.x; !inside && c < (int64_t)r.heads * r.head_dim; c += blockDim.x)
    store_at(r.y, token, c, 0);
}

/* ---- kernels ---- */

using x = void;
#define ROWS_attention_rows
#define BODY_row(op, T, UNITS, LANES, THREADS) row_attention<T, UNITS, LANES, THREADS>(a)
#define BODY_any(op, T, UNITS, LANES, THREADS) any_##op<UNITS>(a)
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ ARGUMENTS_##op a)              \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    BODY_##form(op, X, UNITS, LANES, (WARPS)*WARP_SIZE);                                                               \
  }
#define ARGUMENTS_attention        attention_args
#define ARGUMENTS_attention_dq     attention_args
#define ARGUMENTS_attention_dkv    attention_args
#define ARGUMENTS_attention_dsinks attention_args
#define ARGUMENTS_rope             rope_args
#include "variants.def"
