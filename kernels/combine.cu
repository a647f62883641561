/*
 * The combine: each output element gathers its k expert outputs. A thread owns one 16-byte column of a few tokens
 * and has all their rows in flight before the first sum; where k is small, more tokens make up for it, because
 * the price of a launch is waiting for memory, not arithmetic. The sum runs in slot order, in f32.
 */
#include "mma.cuh"

/* Where y(t, j) begins: a row of y, the token's own x, or nowhere (dropped). */
template <class In> DEVICE const In *slot_source(const combine_args &a, int64_t token, int slot)
{
  const int row = a.slot_row[token * a.top_k + slot];
  if (row >= 0 && row < a.rows_cap) return static_cast<const In *>(a.y) + row * a.y_ld;
  return row == ROW_IDENTITY && a.x ? static_cast<const In *>(a.x) + token * a.x_ld : nullptr;
}

/* By one thread a token, outside the loops: a call among them would cost the registers that hold rows in flight. */
DEVICE void check_rows(const combine_args &a, int64_t token)
{
  for (int slot = 0; slot < a.top_k; slot++) {
    const int row = a.slot_row[token * a.top_k + slot];
    if (row >= a.rows_cap || row < ROW_IDENTITY || (row == ROW_IDENTITY && !a.x)) report_fault(a.fault, FAULT_ROUTE, slot, token);
  }
}

template <class In> DEVICE void unpack(const uint4 &raw, float (&value)[16 / sizeof(In)])
{
#pragma unroll
  for (int i = 0; i < 16 / (int)sizeof(In); i++) value[i] = to_f32(reinterpret_cast<const In *>(&raw)[i]);
}

/* Some slots of a token, in flight. */
template <int SLOTS> struct slots {
  uint4 y[SLOTS];
  float weight[SLOTS]; /* 0: y was not loaded */
};

/* Without branches: what is known of the slots first, then all rows. Slots past the last one weigh 0. */
template <class In, int SLOTS>
DEVICE void load_slots(const combine_args &a, int64_t token, int first, int column, slots<SLOTS> &s)
{
  const In *source[SLOTS];
#pragma unroll
  for (int j = 0; j < SLOTS; j++) {
    const int slot = min(first + j, a.top_k - 1);
    source[j] = slot_source<In>(a, token, slot);
    const float weight = a.pair_weights ? a.pair_weights[token * a.pair_weights_ld + slot] : 1.f;
    s.weight[j] = source[j] && first + j < a.top_k ? weight : 0.f;
  }
#pragma unroll
  for (int j = 0; j < SLOTS; j++) s.y[j] = ld_global_nc_no_allocate(source[j] + column, s.weight[j] != 0);
}

template <class In, int SLOTS, int VECTOR> DEVICE void add_slots(const slots<SLOTS> &s, float (&sum)[VECTOR])
{
#pragma unroll
  for (int j = 0; j < SLOTS; j++) {
    if (s.weight[j] == 0) continue; /* never multiplied: 0 * NaN would not be 0 */
    float y[VECTOR];
    unpack<In>(s.y[j], y);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sum[i] = fmaf(s.weight[j], y[i], sum[i]);
  }
}

template <class In, int VECTOR>
DEVICE void add_shared(const combine_args &a, int64_t token, int column, float (&sum)[VECTOR])
{
  if (!a.shared) return;
  float y[VECTOR];
  load_f32<VECTOR>(static_cast<const In *>(a.shared) + token * a.shared_ld + column, y);
  float weight = a.shared_logit ? 1.f / (1.f + expf(-a.shared_logit[token * a.shared_logit_ld])) : 1.f;
#pragma unroll
  for (int i = 0; i < VECTOR; i++) sum[i] = fmaf(weight, y[i], sum[i]);
}

/* The residual may be `out` itself: each element is read by the thread that writes it. */
template <class Out, int VECTOR>
DEVICE void store_sum(const combine_args &a, int64_t token, int column, const float (&sum)[VECTOR])
{
  float out[VECTOR] = {};
  if (a.residual) load_f32<VECTOR>(static_cast<const Out *>(a.residual) + token * a.residual_ld + column, out);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) out[i] = a.residual ? fmaf(a.out_scale, sum[i], out[i]) : a.out_scale * sum[i];
  store_f32<VECTOR>(static_cast<Out *>(a.out) + token * a.out_ld + column, out);
}

template <class In, class Out, int TOKENS, int SLOTS>
DEVICE void reduce_tokens(const combine_args &a, int64_t first_token, int64_t tokens, int column)
{
  slots<SLOTS> in_flight[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; t++)
    if (first_token + t < tokens) load_slots<In>(a, first_token + t, 0, column, in_flight[t]);
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    if (first_token + t >= tokens) break;
    float sum[16 / sizeof(In)] = {};
    add_slots<In>(in_flight[t], sum);
    for (int slot = SLOTS; slot < a.top_k; slot += SLOTS) {
      load_slots<In>(a, first_token + t, slot, column, in_flight[t]);
      add_slots<In>(in_flight[t], sum);
    }
    add_shared<In>(a, first_token + t, column, sum);
    store_sum<Out>(a, first_token + t, column, sum);
  }
}

/* out[t * k + j] = y(t, j), four rows in flight. */
template <class In, class Out> DEVICE void copy_slots(const combine_args &a, int64_t token, int column)
{
#pragma unroll 4
  for (int slot = 0; slot < a.top_k; slot++) {
    const In *source = slot_source<In>(a, token, slot);
    float y[16 / sizeof(In)];
    unpack<In>(ld_global_nc_no_allocate(source + column, source != nullptr), y);
    store_f32(static_cast<Out *>(a.out) + (token * a.top_k + slot) * a.out_ld + column, y);
  }
}

template <class In, class Out, int COLUMNS> DEVICE void combine_gather(const combine_args &a)
{
  const unsigned slices = ceil_div(a.hidden, COLUMNS);
  const int column = blockIdx.x % slices * COLUMNS + threadIdx.x * (16 / sizeof(In));
  const int64_t tokens = token_total(a.tokens), count = COMBINE_TOKENS(a.top_k);
  const int64_t first_token = blockIdx.x / slices * count;
  check_token_count(a.tokens, a.fault);
  if (column >= a.hidden || first_token >= tokens) return;
  const int64_t end = min(first_token + count, tokens);
  if (column == 0)
    for (int64_t t = first_token; t < end; t++) check_rows(a, t);
  if (!a.reduce)
    for (int64_t t = first_token; t < end; t++) copy_slots<In, Out>(a, t, column);
  else if (count == 4) reduce_tokens<In, Out, 4, 2>(a, first_token, tokens, column);
  else if (count == 2) reduce_tokens<In, Out, 2, 4>(a, first_token, tokens, column);
  else reduce_tokens<In, Out, 1, 8>(a, first_token, tokens, column);
}

#define ROWS_combine
#define VARIANT(op, arch, file, form, in, w, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                           \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                        \
      VARIANT_NAME(op, arch, form, in, w, BM, BN, BK)(const __grid_constant__ op##_args a)                    \
  {                                                                                                           \
    static_assert(BN == WARPS * WARP_SIZE * 16 / (int)sizeof(in), "16 bytes a thread");                       \
    op##_##form<in, w, BN>(a);                                                                                \
  }
#include "variants.def"
