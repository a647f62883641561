/* Rows, pairs and experts of a row_map (kernels/backward.h), as kernels/cpu/backward_pairs.h has them: whatever its
 * arrays hold, nothing outside is reached. */
#ifndef CUMOE_BACKWARD_ROWS_CUH
#define CUMOE_BACKWARD_ROWS_CUH

#include "backward.h"
#include "device/ptx.cuh"

struct row_span {
  int64_t begin, count;
};

DEVICE int64_t clamped(int64_t v, int64_t low, int64_t high)
{
  return min(max(v, low), high);
}

DEVICE row_span rows_of_expert(const row_map &m, int expert, bool *bad = nullptr)
{
  const int64_t begin = m.counts ? m.offsets[expert] : 0, count = m.counts ? m.counts[expert] : token_total(m.tokens);
  const int64_t first = clamped(begin, 0, m.rows_cap), kept = clamped(count, 0, m.rows_cap - first);
  if (bad) *bad = count != 0 && (first != begin || kept != count);
  return {first, kept};
}

/* The end of the last expert's rows, with those that fill up to a whole block. */
DEVICE int64_t end_of_rows(const row_map &m)
{
  return clamped(m.counts ? (int64_t)m.offsets[m.experts] : round_up(token_total(m.tokens), (int64_t)ROW_STEP), 0,
                 m.rows_cap);
}

DEVICE float weight_of_pair(const row_map &m, int64_t pair)
{
  return m.pair_weights ? m.pair_weights[pair / m.top_k * m.pair_weights_ld + pair % m.top_k] : 1.f;
}

/* The pair of a row, or -1: there is none, or the route names one that does not exist. */
DEVICE int64_t pair_of_row(const row_map &m, int64_t row)
{
  const int64_t pair = m.row_pair ? m.row_pair[row] : row;
  return pair >= 0 && pair < token_total(m.tokens) * m.top_k ? pair : -1;
}

/* The same, but -1 also where the pair is dropped. */
DEVICE int64_t pair_kept(const row_map &m, int64_t row)
{
  const int64_t pair = pair_of_row(m, row);
  return pair < 0 || weight_of_pair(m, pair) == 0 ? -1 : pair;
}

/* The row of a pair, or ROW_DROPPED, also for a pair of weight 0, or ROW_IDENTITY. */
DEVICE int64_t row_of_pair(const row_map &m, int64_t pair)
{
  const int64_t row = m.slot_row ? m.slot_row[pair] : pair;
  if (weight_of_pair(m, pair) == 0) return ROW_DROPPED;
  if ((row >= 0 && row < m.rows_cap) || row == ROW_IDENTITY) return row;
  if (row != ROW_DROPPED) report_fault(m.fault, FAULT_ROUTE, pair % m.top_k, pair / m.top_k);
  return ROW_DROPPED;
}

/* Where a row begins in a matrix, in elements. */
DEVICE int64_t start_of(const row_matrix &a, const row_map &m, int64_t row, int64_t pair)
{
  return (a.form == OF_ROW ? row : a.form == OF_TOKEN ? pair / m.top_k : pair) * a.ld;
}

/* The expert whose run a row lies in: the last that begins at it or before. */
DEVICE int expert_of_row(const int32_t *offsets, int experts, int64_t row)
{
  int low = 0, high = experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <int THREADS> struct scan_smem {
  int32_t part[THREADS / WARP_SIZE];
};

/* Returns the sum of `own` over the threads before; *all: over all threads. Both are at most `most`, so that nothing
 * overflows. By the whole CTA. */
template <int THREADS> DEVICE int64_t scan_before(scan_smem<THREADS> &smem, int64_t own, int64_t most, int64_t *all)
{
  int32_t upto = (int32_t)min(own, most);
#pragma unroll
  for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
    const int32_t other = __shfl_up_sync(ALL_LANES, upto, distance);
    if (lane_id() >= distance) upto = (int32_t)min((int64_t)upto + other, most);
  }
  __syncthreads();
  if (lane_id() == WARP_SIZE - 1) smem.part[warp_id()] = upto;
  __syncthreads();
  int64_t before = 0, total = 0;
  for (int w = 0; w < THREADS / WARP_SIZE; w++) {
    if (w == warp_id()) before = total;
    total = min(total + smem.part[w], most);
  }
  const int32_t earlier = __shfl_up_sync(ALL_LANES, upto, 1);
  *all = total;
  return lane_id() == 0 ? before : min(before + earlier, most);
}

/* Half `half` of an expert's matrix: its base; *first: its first element there. */
DEVICE const void *matrix_of(const expert_matrix &b, int half, int64_t expert, int64_t *first)
{
  *first = b.table[half] ? 0 : expert * b.expert_stride;
  return b.table[half] ? b.table[half][expert] : b.base[half];
}

DEVICE void store_any(void *base, int64_t at, int dtype, float value)
{
  if (dtype == DT_F32)
    static_cast<float *>(base)[at] = value;
  else if (dtype == DT_F16)
    static_cast<f16 *>(base)[at] = from_f32<f16>(value);
  else
    static_cast<bf16 *>(base)[at] = from_f32<bf16>(value);
}

template <int N> DEVICE void store_any(void *base, int64_t at, int dtype, const float (&value)[N])
{
  if (dtype == DT_F32)
    store_f32<N>(static_cast<float *>(base) + at, value);
  else if (dtype == DT_F16)
    store_f32<N>(static_cast<f16 *>(base) + at, value);
  else
    store_f32<N>(static_cast<bf16 *>(base) + at, value);
}

#endif
