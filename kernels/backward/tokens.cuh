/* What the backward does row by row and token by token (kernels/cpu/backward_rows.c), but for the activation. */
#ifndef CUMOE_BACKWARD_TOKENS_CUH
#define CUMOE_BACKWARD_TOKENS_CUH

#include "backward/activation.cuh"

/* ---- rows in another order ---- */

template <int THREADS> struct pad_smem {
  int32_t begin[MAX_EXPERTS + 1], from[MAX_EXPERTS], count[MAX_EXPERTS];
  scan_smem<THREADS> scan;
};

/* Where each expert's rows begin, unpadded (from) and padded (begin). Every CTA works it out for itself. */
template <int THREADS> DEVICE void place_experts(const pad_args &p, pad_smem<THREADS> &smem)
{
  const int experts = p.map.experts, each = ceil_div(experts, THREADS);
  const int first = min((int)threadIdx.x * each, experts), last = min(first + each, experts);
  int64_t own = 0, all;
  for (int e = first; e < last; e++) {
    bool bad;
    const row_range rows = rows_of_expert(p.map, e, &bad);
    smem.from[e] = (int32_t)rows.begin;
    smem.count[e] = (int32_t)rows.count;
    own = min(own + round_up(rows.count, (int64_t)ROW_STEP), p.rows_cap);
    if (bad && blockIdx.x == 0) report_fault(p.map.fault, FAULT_ROUTE, e, 0);
  }
  int64_t at = scan_before<THREADS>(smem.scan, own, p.rows_cap, &all);
  for (int e = first; e < last; e++) {
    smem.begin[e] = (int32_t)at;
    smem.count[e] = (int32_t)min((int64_t)smem.count[e], p.rows_cap - at);
    at = min(at + round_up((int64_t)smem.count[e], (int64_t)ROW_STEP), p.rows_cap);
  }
  if (threadIdx.x == 0) smem.begin[experts] = (int32_t)all;
  __syncthreads();
}

template <int THREADS> DEVICE int32_t padded_row(const pad_args &p, const pad_smem<THREADS> &smem, int64_t pair)
{
  const int32_t row = p.map.slot_row[pair];
  if (row < 0) return row;
  const int e = expert_of_row(p.map.offsets, p.map.experts, row);
  const int64_t at = row - (int64_t)p.map.offsets[e];
  if (row < p.map.rows_cap && at >= 0 && at < smem.count[e]) return (int32_t)(smem.begin[e] + at);
  report_fault(p.map.fault, FAULT_ROUTE, pair % p.map.top_k, pair / p.map.top_k);
  return ROW_DROPPED;
}

template <int THREADS> DEVICE void any_pad(const pad_args &p)
{
  __shared__ pad_smem<THREADS> smem;
  place_experts<THREADS>(p, smem);
  const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (blockIdx.x == 0)
    for (int e = threadIdx.x; e <= p.map.experts; e += THREADS) {
      p.offsets[e] = smem.begin[e];
      if (e < p.map.experts) p.counts[e] = smem.count[e];
    }
  for (int64_t word = i; p.tickets && word < TICKET_WORDS(p.map.experts); word += (int64_t)gridDim.x * THREADS)
    p.tickets[word] = 0;
  if (i < smem.begin[p.map.experts]) {
    const int e = expert_of_row(smem.begin, p.map.experts, i);
    const int64_t at = i - smem.begin[e];
    const int64_t pair = at < smem.count[e] ? pair_of_row(p.map, smem.from[e] + at) : -1;
    p.row_pair[i] = (int32_t)pair;
    const float weight = pair < 0 ? 0.f : weight_of_pair(p.map, pair);
    if (p.row_weight) p.row_weight[i] = weight;
    if (p.row_token) p.row_token[i] = weight == 0 ? -1 : (int32_t)(pair / p.map.top_k);
  }
  if (i < token_total(p.map.tokens) * p.map.top_k) p.slot_row[i] = padded_row<THREADS>(p, smem, i);
}

/* A row from one type to another, times a weight. */
template <int THREADS> DEVICE void convert_row(const copy_rows_args &c, int64_t from, int64_t to, float weight)
{
  for (int i = threadIdx.x * PACKET; i < c.cols; i += THREADS * PACKET) {
    float value[PACKET];
    load_any<PACKET>(c.a.base, from + i, c.a.dtype, value);
#pragma unroll
    for (int j = 0; j < PACKET; j++) value[j] *= weight;
    store_any<PACKET>(c.to, to + i, c.dtype, value);
  }
}

/* Copies bits; from NULL: zeros. Four vectors in flight. */
template <int THREADS> DEVICE void copy_row(const uint4 *from, uint4 *to, int vectors)
{
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += THREADS) to[i] = ld_global_no_allocate(from + i, from != nullptr);
}

DEVICE uint4 *row_copied(const copy_rows_args &c, int64_t row)
{
  return reinterpret_cast<uint4 *>(static_cast<char *>(c.to) + row * c.to_ld * (c.dtype == DT_F32 ? 4 : 2));
}

/* A token to all of its rows, by one read. Of a bad route, a row outside is left out. */
template <int THREADS> DEVICE void copy_token(const copy_rows_args &c, int64_t token, int vectors)
{
  __shared__ int64_t rows[MAX_TOP_K];
  __shared__ bool dropped[MAX_TOP_K];
  const int64_t end = end_of_rows(c.map);
  const int k = c.map.top_k, slot = threadIdx.x;
  if (slot < k) {
    const int64_t pair = token * k + slot, row = c.map.slot_row[pair];
    rows[slot] = row < end ? row : ROW_DROPPED;
    dropped[slot] = weight_of_pair(c.map, pair) == 0;
  }
  __syncthreads();
  const uint4 *from = reinterpret_cast<const uint4 *>(static_cast<const char *>(c.a.base) +
                                                      token * c.a.ld * (c.dtype == DT_F32 ? 4 : 2));
#pragma unroll 2
  for (int i = threadIdx.x; i < vectors; i += THREADS) {
    const uint4 value = ld_global_no_allocate(from + i, true);
#pragma unroll 4
    for (int j = 0; j < k; j++)
      if (rows[j] >= 0) row_copied(c, rows[j])[i] = dropped[j] ? make_uint4(0, 0, 0, 0) : value;
  }
}

/* Of a block, the rows that are no pair's: a warp has every so many. */
template <int THREADS> DEVICE void clear_rows(const copy_rows_args &c, int64_t block, int vectors)
{
  const int64_t end = min(end_of_rows(c.map), (block + 1) * ROW_STEP);
  for (int64_t row = block * ROW_STEP + warp_id(); row < end; row += THREADS / WARP_SIZE)
    if (pair_of_row(c.map, row) < 0)
      for (int i = lane_id(); i < vectors; i += WARP_SIZE) row_copied(c, row)[i] = make_uint4(0, 0, 0, 0);
}

template <int THREADS> DEVICE void copy_tokens(const copy_rows_args &c, int64_t unit)
{
  const int64_t tokens = c.map.tokens.count;
  const int vectors = c.cols * (c.dtype == DT_F32 ? 4 : 2) / 16;
  if (unit >= tokens)
    clear_rows<THREADS>(c, unit - tokens, vectors);
  else if (unit < token_total(c.map.tokens))
    copy_token<THREADS>(c, unit, vectors);
}

template <int THREADS> DEVICE void any_copy_rows(const copy_rows_args &c)
{
  if (COPIES_BY_TOKEN(&c)) return copy_tokens<THREADS>(c, blockIdx.x);
  const int64_t row = blockIdx.x;
  if (row >= end_of_rows(c.map)) return;
  const int64_t pair = pair_kept(c.map, row), from = pair < 0 ? 0 : start_of(c.a, c.map, row, pair);
  const int bytes = c.dtype == DT_F32 ? 4 : 2;
  if (pair >= 0 && (c.weighs || c.a.dtype != c.dtype))
    return convert_row<THREADS>(c, from, row * c.to_ld, c.weighs ? weight_of_pair(c.map, pair) : 1.f);
  const char *source = static_cast<const char *>(c.a.base) + from * bytes;
  copy_row<THREADS>(pair < 0 ? nullptr : reinterpret_cast<const uint4 *>(source), row_copied(c, row),
                    c.cols * bytes / 16);
}

/* ---- weights of pairs ---- */

/* Of the whole warp; x NULL: 0. Any alignment. */
DEVICE float dot_rows(const void *a, int64_t a_first, int a_dtype, const void *b, int64_t b_first, int64_t b_step,
                      int b_dtype, int count)
{
  float sum = 0;
  for (int i = lane_id(); i < count; i += WARP_SIZE)
    sum = fmaf(load_any(a, a_first + i, a_dtype), load_any(b, b_first + i * b_step, b_dtype), sum);
  return warp_sum(sum);
}

/* What a pair's gradient has of dot products along the hidden dimension, by the whole warp: with an identity expert <d
 * out, x>; where the weight is on the input <d row, x>; else <d out, bias of down>, as `along` is without the bias. */
DEVICE float pair_products(const pair_gradient_args &a, int64_t row, int64_t pair)
{
  const int64_t d_out = start_of(a.d_out, a.map, row, pair), x = start_of(a.x, a.map, row, pair);
  if (row == ROW_IDENTITY)
    return a.scale * dot_rows(a.d_out.base, d_out, a.d_out.dtype, a.x.base, x, 1, a.x.dtype, a.hidden);
  if (a.on_input) return dot_rows(a.d_rows, row * a.hidden, a.dtype, a.x.base, x, 1, a.x.dtype, a.hidden);
  const expert_matrix &b = a.down;
  const int64_t e = a.map.counts ? expert_of_row(a.map.offsets, a.map.experts, row) : 0;
  return a.scale * dot_rows(a.d_out.base, d_out, a.d_out.dtype, b.bias[0], e * b.bias_expert_stride, b.bias_n_stride,
                            b.bias_dtype, a.hidden);
}

DEVICE double along_row(const pair_gradient_args &a, int64_t row)
{
  if (!a.parts) return a.along[row];
  const int parts = ALONG_PARTS(a.parts_of); /* a multiple of 4 */
  const float4 *from = reinterpret_cast<const float4 *>(a.parts + row * parts);
  double sum = 0;
  for (int i = 0; i < parts / 4; i++)
    sum += ((double)from[i].x + (double)from[i].y) + ((double)from[i].z + (double)from[i].w);
  return sum;
}

/* A lane has a pair. Pairs that need pair_products get them one after the other, from all lanes together. */
DEVICE void gradient_of_pairs(const pair_gradient_args &a, int64_t pair, bool there)
{
  const int64_t row = there ? row_of_pair(a.map, pair) : ROW_DROPPED;
  const bool counts = row != ROW_DROPPED && !a.unweighed, summed = counts && row >= 0 && !a.on_input;
  double d = summed ? along_row(a, row) : 0;
  unsigned more = __ballot_sync(ALL_LANES, counts && (!summed || a.down.bias[0]));
  for (; more; more &= more - 1) {
    const int lane = __ffs(more) - 1;
    const float sum = pair_products(a, __shfl_sync(ALL_LANES, row, lane), __shfl_sync(ALL_LANES, pair, lane));
    if (lane == lane_id()) d += (double)sum;
  }
  if (!there) return;
  const double w = (double)weight_of_pair(a.map, pair);
  const float rounded = (float)d;
  a.d_weights[pair / a.map.top_k * a.d_weights_ld + pair % a.map.top_k] =
      a.sigmoid ? (float)((double)rounded * w * (1 - w)) : rounded;
}

template <int THREADS, int UNITS> DEVICE void any_pair_gradient(const pair_gradient_args &a)
{
  const int64_t first = (int64_t)blockIdx.x * UNITS, tokens = min(token_total(a.map.tokens) - first, (int64_t)UNITS);
  const int pairs = (int)max(tokens, (int64_t)0) * a.map.top_k;
  for (int i = warp_id() * WARP_SIZE; i < pairs; i += THREADS)
    gradient_of_pairs(a, first * a.map.top_k + i + lane_id(), i + lane_id() < pairs);
}

template <int THREADS> DEVICE void any_sigmoid(const sigmoid_args &a)
{
  const int64_t token = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (token < token_total(a.tokens)) a.y[token] = (float)(1 / (1 + exp(-(double)a.x[token])));
}

/* ---- d x ---- */

struct gathered {
  int64_t row[MAX_TOP_K]; /* ROW_DROPPED: none */
  float factor[MAX_TOP_K];
};

DEVICE void look_up(const gather_args &a, int64_t token, gathered &g)
{
  const int j = threadIdx.x;
  if (j >= a.map.top_k) return;
  const int64_t pair = token * a.map.top_k + j;
  g.row[j] = row_of_pair(a.map, pair);
  g.factor[j] = g.row[j] == ROW_IDENTITY ? (a.weights ? a.scale * a.weights[token * a.weights_ld + j] : 1.f)
                : a.on_input             ? weight_of_pair(a.map, pair)
                                         : 1.f;
}

template <class T> DEVICE void add_packet(float (&sum)[PACKET], float factor, const T *from)
{
  float value[PACKET];
  load_f32<PACKET>(from, value);
#pragma unroll
  for (int j = 0; j < PACKET; j++) sum[j] = fmaf(factor, value[j], sum[j]);
}

/* Of a row, eight elements as they lie; zeros, and no access, of a negative one. */
template <class T> struct fetched_packet {
  static constexpr int VECTORS = PACKET * sizeof(T) / 16;
  uint4 raw[VECTORS];

  DEVICE fetched_packet(const gather_args &a, int64_t row, int i)
  {
    const T *from = static_cast<const T *>(a.d_rows) + max(row, (int64_t)0) * a.hidden + i;
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
      raw[v] = ld_global_no_allocate(reinterpret_cast<const uint4 *>(from) + v, row >= 0);
  }
  DEVICE void add(float (&sum)[PACKET], float factor) const
  {
#pragma unroll
    for (int j = 0; j < PACKET; j += 2) {
      const uint4 &v = raw[j * sizeof(T) / 16];
      const int word = j * (int)sizeof(T) / 4 % 4;
      float2 pair;
      if constexpr (sizeof(T) == 4)
        pair = make_float2(__uint_as_float((&v.x)[word]), __uint_as_float((&v.x)[word + 1]));
      else
        pair = unpack_pair<T>((&v.x)[word]);
      sum[j] = fmaf(factor, pair.x, sum[j]);
      sum[j + 1] = fmaf(factor, pair.y, sum[j + 1]);
    }
  }
};

/* Experts' rows, eight or four in flight, so that no load waits for another. Then what identity experts are given. */
template <class T>
DEVICE void add_slots(const gather_args &a, const gathered &g, int64_t token, int i, float (&sum)[PACKET])
{
  int j = 0;
  if constexpr (sizeof(T) == 2)
    for (; j + 8 <= a.map.top_k; j += 8) {
      const fetched_packet<T> value[8] = {{a, g.row[j], i},     {a, g.row[j + 1], i}, {a, g.row[j + 2], i},
                                          {a, g.row[j + 3], i}, {a, g.row[j + 4], i}, {a, g.row[j + 5], i},
                                          {a, g.row[j + 6], i}, {a, g.row[j + 7], i}};
#pragma unroll
      for (int c = 0; c < 8; c++) value[c].add(sum, g.row[j + c] >= 0 ? g.factor[j + c] : 0.f);
    }
  for (; j + 4 <= a.map.top_k; j += 4) {
    const fetched_packet<T> value[4] = {
        {a, g.row[j], i}, {a, g.row[j + 1], i}, {a, g.row[j + 2], i}, {a, g.row[j + 3], i}};
#pragma unroll
    for (int c = 0; c < 4; c++) value[c].add(sum, g.row[j + c] >= 0 ? g.factor[j + c] : 0.f);
  }
  for (; j < a.map.top_k; j++)
    if (g.row[j] >= 0) fetched_packet<T>(a, g.row[j], i).add(sum, g.factor[j]);
  for (j = 0; j < a.map.top_k; j++) {
    if (g.row[j] != ROW_IDENTITY) continue;
    float value[PACKET];
    load_any<PACKET>(a.d_out.base, start_of(a.d_out, a.map, 0, token * a.map.top_k + j) + i, a.d_out.dtype, value);
#pragma unroll
    for (int c = 0; c < PACKET; c++) sum[c] = fmaf(g.factor[j], value[c], sum[c]);
  }
}

template <class T> DEVICE void add_router_part(const gather_args &a, int64_t at, float (&sum)[PACKET])
{
  if (a.d_router_dtype == DT_F32)
    add_packet<f32>(sum, 1.f, static_cast<const f32 *>(a.d_router) + at);
  else
    add_packet<T>(sum, 1.f, static_cast<const T *>(a.d_router) + at);
}

template <class T, int THREADS> DEVICE void gather_token(const gather_args &a, const gathered &g, int64_t token)
{
  for (int i = threadIdx.x * PACKET; i < a.hidden; i += THREADS * PACKET) {
    float sum[PACKET] = {};
    add_slots<T>(a, g, token, i, sum);
    if (a.d_shared) add_packet<T>(sum, 1.f, static_cast<const T *>(a.d_shared) + token * a.hidden + i);
    if (a.d_router) add_router_part<T>(a, token * a.hidden + i, sum);
#pragma unroll
    for (int j = 0; j < PACKET; j++)
      if (a.d_gate) sum[j] = fmaf(a.d_gate[token], load_any(a.gate.base, i + j, a.gate.dtype), sum[j]);
    store_any<PACKET>(a.d_x, token * a.d_x_ld + i, a.d_x_dtype, sum);
  }
}

template <int THREADS> DEVICE void any_gather(const gather_args &a)
{
  __shared__ gathered g;
  const int64_t token = blockIdx.x;
  if (token >= token_total(a.map.tokens)) return;
  look_up(a, token, g);
  __syncthreads();
  if (a.dtype == DT_F32) return gather_token<f32, THREADS>(a, g, token);
  if (a.dtype == DT_F16) return gather_token<f16, THREADS>(a, g, token);
  gather_token<bf16, THREADS>(a, g, token);
}

#endif
