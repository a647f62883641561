/*
 * Attention without tiles: forward and backward of f32, backward of large heads, and rotary embedding. A warp has a
 * query's head, or a key's, and goes through what it sees in order, so that the sums are those of no schedule.
 */
#include "attention/backward_row.cuh"
#include "train/elements.cuh"

template <class T, int UNITS, int LANES, int THREADS> DEVICE void row_attention(const attention_args &a)
{
  static_assert(LANES == WARP_SIZE && UNITS == THREADS / WARP_SIZE, "a warp a head");
  /* Those that no query is in, too, are recorded if they are inconsistent. */
  for (int64_t i = threadIdx.x; blockIdx.x == 0 && i < a.sequences; i += THREADS) (void)sequence_of(a, i);
  const int64_t unit = (int64_t)blockIdx.x * UNITS + warp_id();
  if (unit >= a.units) return;
  const int64_t query = unit / a.heads;
  const int head = (int)(unit - query * a.heads);
  attend_row<T>(a, sequence_with(a, query), {query, head}, head / (a.heads / a.kv_heads), 0, a.head_dim);
}

/* ---- backward ---- */

template <int UNITS> DEVICE void any_attention_dq(const attention_args &a)
{
  const int64_t unit = (int64_t)blockIdx.x * UNITS + warp_id();
  if (unit >= a.units) return;
  const int64_t query = unit / a.heads;
  const int head = (int)(unit - query * a.heads);
  const float delta = delta_of_row(a, query, head);
  if (lane_id() == 0) store_at(a.delta, query, head, delta);
  dq_of_row(a, query, head, delta);
}

template <int UNITS> DEVICE void any_attention_dkv(const attention_args &a)
{
  const int64_t unit = (int64_t)blockIdx.x * UNITS + warp_id();
  if (unit >= a.units) return;
  const int64_t row = unit / a.kv_heads;
  dkv_of_row(a, row, (int)(unit - row * a.kv_heads));
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
