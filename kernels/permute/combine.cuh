/*
 * The combine: each output element gathers its k expert outputs. A thread owns one 16-byte column of a few
 * tokens and has eight of their rows in flight; where k is small, it takes more tokens: the latency of memory
 * is the limit. The sum runs in slot order, in f32.
 *
 * PLACE says which tokens a CTA has, where their outputs go and how a grid waits for the one ahead: own_outputs, or
 * those of other ranks (ep/answer.cuh).
 */
#ifndef CUMOE_COMBINE_CUH
#define CUMOE_COMBINE_CUH

#include "device/ptx.cuh"

/* Where y(t, j) begins: a row of y, the token's own x, or nowhere (dropped). */
template <class In> DEVICE const In *slot_source(const combine_args &a, int64_t token, int row)
{
  if (row >= 0 && row < a.rows_cap) return static_cast<const In *>(a.y) + row * a.y_ld;
  return row == ROW_IDENTITY && a.x ? static_cast<const In *>(a.x) + token * a.x_ld : nullptr;
}

/* Eight elements (f32: four) as they lie in memory. */
template <class In> struct column_of {
  static constexpr int SIZE = 16 / sizeof(In);
  uint4 raw;
  DEVICE float operator[](int i) const { return to_f32(reinterpret_cast<const In *>(&raw)[i]); }
};

/* Slots of a token whose rows are in flight. */
template <class In, int SLOTS> struct slots_in_flight {
  column_of<In> y[SLOTS];
  float weight[SLOTS]; /* 0: y was not loaded */
  int row[SLOTS];

  /* No branches: what is known of the slots first, then all rows. Slots past the last one weigh 0. */
  template <class F> DEVICE void look_up(const combine_args &a, int64_t token, int first, F read)
  {
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
      const int slot = min(first + j, a.top_k - 1);
      row[j] = read(a.slot_row + token * a.top_k + slot);
      weight[j] = a.pair_weights ? read(a.pair_weights + token * a.pair_weights_ld + slot) : 1.f;
    }
  }

  /* All threads of a token read the same: from L1, unless that may hold stale lines. */
  DEVICE void look_up(const combine_args &a, int64_t token, int first)
  {
    if (a.protocol.early_inputs)
      look_up(a, token, first, [](auto at) { return load_relaxed(at); });
    else
      look_up(a, token, first, [](auto at) { return *at; });
  }

  DEVICE void load(const combine_args &a, int64_t token, int first, int at)
  {
#pragma unroll
    for (int j = 0; j < SLOTS; j++) {
      const In *source = slot_source<In>(a, token, row[j]);
      if (!source || first + j >= a.top_k) weight[j] = 0;
      y[j] = {ld_global_no_allocate(source + at, weight[j] != 0)};
      if (a.on_input && weight[j] != 0) weight[j] = 1;
    }
  }
};

template <class In> DEVICE void add(column_of<In> y, float weight, float (&sum)[column_of<In>::SIZE])
{
  if (weight == 0) return; /* never multiplied: 0 * NaN would not be 0 */
#pragma unroll
  for (int i = 0; i < column_of<In>::SIZE; i++) sum[i] = fmaf(weight, y[i], sum[i]);
}

template <class In> DEVICE column_of<In> load_shared(const combine_args &a, int64_t token, int at)
{
  return {ld_global(static_cast<const In *>(a.shared) + token * a.shared_ld + at, true)};
}

/* The residual may be `out` itself: each element is read by the thread that writes it. */
template <class Out, int VECTOR, class PLACE>
DEVICE void store_sum(const combine_args &a, int64_t token, int at, const float (&sum)[VECTOR], const PLACE &place)
{
  float out[VECTOR] = {};
  if (a.residual) load_f32<VECTOR>(static_cast<const Out *>(a.residual) + token * a.residual_ld + at, out);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) out[i] = a.residual ? fmaf(a.out_scale, sum[i], out[i]) : a.out_scale * sum[i];
  place.template store_sum<Out>(a, token, at, out);
}

struct combine_part;

/* A part of the tokens' rows after the other. */
struct own_outputs {
  static constexpr bool ALWAYS_ALL = true;
  DEVICE bool all() const { return true; } /* also tokens and slots without a row, which are 0 */
  DEVICE void wait() const { wait_for_earlier_grids(); }
  DEVICE combine_part part(const combine_args &a, unsigned cta, int columns) const;
  template <class Out, int VECTOR>
  DEVICE void store_sum(const combine_args &a, int64_t token, int at, const float (&value)[VECTOR]) const
  {
    store_f32<VECTOR>(static_cast<Out *>(a.out) + token * a.out_ld + at, value);
  }
  template <class Out, int VECTOR>
  DEVICE void store_row(const combine_args &a, int64_t token, int slot, int at, const float (&value)[VECTOR]) const
  {
    store_f32<VECTOR>(static_cast<Out *>(a.out) + (token * a.top_k + slot) * a.out_ld + at, value);
  }
};

/* TOKENS > 1: top_k <= SLOTS. The loop over tokens stays a loop, which moves the rows down: unrolled, it
 * would hold the addresses and sums of all of them at once. */
template <class In, class Out, int TOKENS, int SLOTS, class PLACE>
DEVICE void reduce_tokens(const combine_args &a, int64_t first_token, int tokens, int at, const PLACE &place)
{
  slots_in_flight<In, SLOTS> slots[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) slots[t].look_up(a, first_token + min(t, tokens - 1), 0);
  if (a.protocol.early_inputs) place.wait();
#pragma unroll
  for (int t = 0; t < TOKENS; t++) slots[t].load(a, first_token + min(t, tokens - 1), 0, at);
#pragma unroll 1
  for (int t = 0; t < tokens; t++) {
    const int64_t token = first_token + t;
    float sum[column_of<In>::SIZE] = {};
    bool any = place.all(); /* of its slots has a row */
    for (int first = 0;;) {
      if constexpr (!PLACE::ALWAYS_ALL)
#pragma unroll
        for (int j = 0; j < SLOTS; j++) any |= slots[0].row[j] >= 0;
#pragma unroll
      for (int j = 0; j < SLOTS; j++) add(slots[0].y[j], slots[0].weight[j], sum);
      first += SLOTS;
      if (TOKENS > 1 || first >= a.top_k) break;
      slots[0].look_up(a, token, first);
      slots[0].load(a, token, first, at);
    }
    if (a.shared) add(load_shared<In>(a, token, at), shared_weight(a, token), sum);
    if (any) store_sum<Out>(a, token, at, sum, place);
#pragma unroll
    for (int next = 1; next < TOKENS; next++) slots[next - 1] = slots[next];
  }
}

/* out[t * k + j] = y(t, j), four rows in flight. */
template <class In, class Out, class PLACE>
DEVICE void copy_slots(const combine_args &a, int64_t token, int at, const PLACE &place)
{
#pragma unroll 4
  for (int slot = 0; slot < a.top_k; slot++) {
    const int row = a.slot_row[token * a.top_k + slot];
    const bool weightless = a.pair_weights && a.pair_weights[token * a.pair_weights_ld + slot] == 0;
    const In *source = weightless ? nullptr : slot_source<In>(a, token, row);
    const column_of<In> y = {ld_global_no_allocate(source + at, source != nullptr)};
    float out[column_of<In>::SIZE];
#pragma unroll
    for (int i = 0; i < column_of<In>::SIZE; i++) out[i] = y[i];
    if (place.all() || row >= 0) place.template store_row<Out>(a, token, slot, at, out);
  }
}

/* A CTA's part: a slice of the columns of some tokens. */
struct combine_part {
  int64_t first_token;
  int tokens, most; /* tokens: may be less than 1 */
  unsigned slice, slices;

  DEVICE combine_part(const combine_args &a, unsigned cta, int columns)
      : most(COMBINE_TOKENS(a.top_k)), slices(ceil_div(a.hidden, columns))
  {
    slice = cta % slices;
    first_token = (int64_t)(cta / slices) * most;
    tokens = (int)min(token_total(a.tokens) - first_token, (int64_t)most);
  }
};

DEVICE combine_part own_outputs::part(const combine_args &a, unsigned cta, int columns) const
{
  return combine_part(a, cta, columns);
}

/* By one warp of the CTAs that share the tokens. */
DEVICE void check_rows(const combine_args &a, const combine_part &part)
{
  for (int i = lane_id(); i < part.tokens * a.top_k; i += WARP_SIZE) {
    const int row = a.slot_row[part.first_token * a.top_k + i];
    if (row >= a.rows_cap || row < ROW_IDENTITY || (row == ROW_IDENTITY && !a.x))
      report_fault_inline(a.fault, FAULT_ROUTE, i % a.top_k, part.first_token + i / a.top_k);
  }
}

DEVICE void discard_row_line(const combine_args &a, int64_t slot, const void *base, int64_t row_bytes, int64_t at)
{
  const int row = a.slot_row[slot];
  if (row >= 0 && row < a.rows_cap) discard_l2(static_cast<const char *>(base) + row * row_bytes + at);
}

/* Rows of y that the warp has read, and the CTA's share of the tokens' rows of h: what L2 has not yet written to memory
 * would be written while the next layer reads its weights. */
template <class In> DEVICE void discard_rows(const combine_args &a, const combine_part &part, int at)
{
  const int64_t first = part.first_token * a.top_k;
  const int slots = part.tokens * a.top_k, lines = (int)(a.protocol.discard_h_row / DISCARD_LINE);
  __syncwarp();
  if (threadIdx.x % (DISCARD_LINE / 16) == 0 && at < a.hidden)
#pragma unroll 1
    for (int i = 0; i < slots; i++) discard_row_line(a, first + i, a.y, a.y_ld * sizeof(In), at * (int64_t)sizeof(In));
#pragma unroll 1
  for (int i = part.slice * blockDim.x + threadIdx.x; i < slots * lines; i += part.slices * blockDim.x)
    discard_row_line(a, first + i / lines, a.protocol.discard_h, a.protocol.discard_h_row, i % lines * DISCARD_LINE);
}

/* After all stores. The part is computed again: kept, it would cost registers. */
template <class In, int COLUMNS, class PLACE> DEVICE void leave(const combine_args &a, const PLACE &place)
{
  const combine_part part = place.part(a, ctaid_x(), COLUMNS);
  if (a.protocol.discard_h) discard_rows<In>(a, part, part.slice * COLUMNS + threadIdx.x * column_of<In>::SIZE);
  if (threadIdx.x < WARP_SIZE && part.slice == 0) check_rows(a, part);
}

template <class In, class Out, int COLUMNS, class PLACE = own_outputs>
DEVICE void combine_gather(const combine_args &a, const PLACE &place = {})
{
  if (!a.protocol.early_inputs || !a.reduce) place.wait();
  const combine_part part = place.part(a, blockIdx.x, COLUMNS);
  const int at = part.slice * COLUMNS + threadIdx.x * column_of<In>::SIZE, tokens = part.tokens;
  check_token_count(a.tokens, a.fault);
  if (tokens <= 0) return place.wait();
  if (at >= a.hidden) place.wait();
  if (at < a.hidden) {
    if (!a.reduce)
      for (int t = 0; t < tokens; t++) copy_slots<In, Out>(a, part.first_token + t, at, place);
    else if (part.most == 8)
      reduce_tokens<In, Out, 8, 1>(a, part.first_token, tokens, at, place);
    else if (part.most == 4)
      reduce_tokens<In, Out, 4, 2>(a, part.first_token, tokens, at, place);
    else if (part.most == 2)
      reduce_tokens<In, Out, 2, 4>(a, part.first_token, tokens, at, place);
    else
      reduce_tokens<In, Out, 1, 8>(a, part.first_token, 1, at, place);
  }
  leave<In, COLUMNS>(a, place);
}

#endif
