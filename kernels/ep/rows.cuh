/*
 * Rows of x to the other ranks, for an up that multiplies what arrives. The first tokens' leave while the router and the
 * gate work, in the order of tokens; the others in that of their first experts there, as up comes to them, and not where
 * there is none. Own rows stay: up reads them where the caller has them.
 *
 * By bulk copies through shared memory. Of these a thread knows which of its own have been made, at another GPU as
 * well; so flags follow them without a fence, which would wait for all that other SMs store to other GPUs meanwhile,
 * until the last of it. PTX orders a flag behind a copy by such a fence alone; but a copy that is waited for lies in
 * the reader's memory before the flag leaves.
 */
#ifndef CUMOE_EP_ROWS_CUH
#define CUMOE_EP_ROWS_CUH

#include "device/pipeline.cuh"
#include "ep/flags.cuh"
#include "ep/put.cuh"

struct rows_smem {
  int32_t rows_with[EP_ROW_KEYS]; /* of each expert, then where they begin */
  int32_t count[EP_NEAR_RANKS];   /* of rows to each rank */
};

/* ---- the order of rows: a CTA has every EP_ROW_CTAS-th token, and sorts these by itself ---- */

/* Of a CTA's tokens those from this one on. */
struct own_tokens {
  int64_t first, end;

  DEVICE int64_t at(int64_t i) const { return first + i * EP_ROW_CTAS; }
  DEVICE int count() const { return end > first ? (int)((end - first - 1) / EP_ROW_CTAS + 1) : 0; }
};

DEVICE int64_t list_of(const ep_args &a, int rank)
{
  const int64_t share = (a.shape.capacity + EP_ROW_CTAS - 1) / EP_ROW_CTAS;
  return ((int64_t)rank * EP_ROW_CTAS + blockIdx.x) * share;
}

constexpr int NO_EXPERT = INT32_MAX;

/* Each token's first expert at each rank. */
DEVICE void find_first_experts(const ep_args &a, own_tokens own)
{
  const int k = a.shape.top_k, count = own.count();
  for (int r = 0; r < a.shape.ranks; r++)
    for (int i = threadIdx.x; i < count; i += EP_ROW_THREADS) a.first_experts[list_of(a, r) + i] = NO_EXPERT;
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < count * k; i += EP_ROW_THREADS) {
    const int64_t token = own.at(i / k);
    const int slot = i % k, place = place_of(a, places_in_memory(a), token, slot, id_of(a, token, slot), false);
    if (place < 0) continue;
    const int expert = min(place & ((1 << EP_PLACE_SHIFT) - 1), EP_ROW_KEYS - 1);
    atomicMin(a.first_experts + list_of(a, place >> EP_PLACE_SHIFT) + i / k, expert);
  }
  __syncthreads();
}

/* By a warp; returns the sum of all. */
DEVICE int begin_each(int32_t (&rows_with)[EP_ROW_KEYS])
{
  constexpr int EACH = EP_ROW_KEYS / WARP_SIZE;
  int sum = 0;
  for (int i = 0; i < EACH; i++) sum += rows_with[lane_id() * EACH + i];
  const int upto = warp_scan(sum);
  for (int i = 0, at = upto - sum; i < EACH; i++) {
    const int rows = rows_with[lane_id() * EACH + i];
    rows_with[lane_id() * EACH + i] = at;
    at += rows;
  }
  return __shfl_sync(ALL_LANES, upto, WARP_SIZE - 1);
}

DEVICE void sort_rows_to(const ep_args &a, rows_smem &s, own_tokens own, int rank)
{
  const int count = own.count();
  const int32_t *experts = a.first_experts + list_of(a, rank);
  for (int i = threadIdx.x; i < EP_ROW_KEYS; i += EP_ROW_THREADS) s.rows_with[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += EP_ROW_THREADS) {
    const int expert = load_relaxed(experts + i);
    if (expert != NO_EXPERT) atomicAdd(&s.rows_with[expert], 1);
  }
  __syncthreads();
  if (warp_id() == 0) {
    const int all = begin_each(s.rows_with);
    if (lane_id() == 0) s.count[rank] = all;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += EP_ROW_THREADS) {
    const int expert = load_relaxed(experts + i);
    if (expert != NO_EXPERT)
      a.order[list_of(a, rank) + atomicAdd(&s.rows_with[expert], 1)] = {(int32_t)own.at(i), expert};
  }
  __syncthreads();
}

/* ---- moving ---- */

DEVICE int rank_of_turn(const ep_args &a, int turn)
{
  return (a.rank + turn) % a.shape.ranks;
}

constexpr int ROW_WARPS = EP_ROW_THREADS / WARP_SIZE, PARTS_AT_ONCE = 9;

DEVICE char *row_lines(const ep_args &a, int at, int from, int64_t row)
{
  return lane_of(a, at) + a.at.sent + (from * a.shape.capacity + row) * ep_line_row(&a.shape);
}

/* By a warp. */
DEVICE void send_row(const ep_args &a, int64_t token, int row, int rank, uint32_t exchange)
{
  const uint4 *from = reinterpret_cast<const uint4 *>(static_cast<const char *>(a.x) + token * a.x_ld * a.shape.element);
  char *to = row_lines(a, rank, a.rank, row);
  const int width = row_vectors(a), parts = parts_of_row(a);
#pragma unroll 1
  for (int first = 0; first < parts; first += PARTS_AT_ONCE) {
    uint4 value[PARTS_AT_ONCE];
#pragma unroll
    for (int j = 0; j < PARTS_AT_ONCE; j++) {
      const int vector = (first + j) * EP_LINE_VECTORS + vector_of_lane();
      value[j] = first + j < parts && vector < width ? load_relaxed_vector(from + vector) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < PARTS_AT_ONCE; j++)
      if (first + j < parts) store_as_lines(to + (first + j) * (EP_LINES * EP_LINE), exchange, value[j]);
  }
}

DEVICE void send_list(const ep_args &a, const rows_smem &s, own_tokens own, bool sorted, uint32_t exchange)
{
  int most = 0;
  for (int r = 0; r < a.shape.ranks; r++)
    if (r != a.rank) most = max(most, sorted ? s.count[r] : own.count());
#pragma unroll 1
  for (int i = warp_id(); i < most; i += ROW_WARPS)
#pragma unroll 1
    for (int turn = 1; turn < a.shape.ranks; turn++) {
      const int rank = rank_of_turn(a, turn);
      if (i >= (sorted ? s.count[rank] : own.count())) continue;
      const int64_t token = sorted ? a.order[list_of(a, rank) + i].token : own.at(i);
      const int row = row_there(a, active_ranks(a), token, rank);
      if (row >= 0) send_row(a, token, row, rank, exchange);
    }
}

/* a.more: of the first tokens, before these are known to have experts. Those who hear of slots may take all SMs for an
 * up that waits for rows: so these are told of when all CTAs of the last rows are there (ep/arriving.cuh). */
DEVICE void send_rows(const ep_args &a, rows_smem &s)
{
  wait_for_earlier_grids();
  const unsigned tokens = tokens_of_round(a);
  const uint32_t exchange = exchange_now(a) + 1;
  const int64_t middle = min((int64_t)tokens, a.first_sorted);
  const own_tokens own = {(a.more ? 0 : middle) + blockIdx.x, a.more ? middle : (int64_t)tokens};
  if (!a.more) {
    if (rows_have_started(a, exchange))
      tell_words_of_slots(a, tokens | EP_SORTED, exchange);
    find_first_experts(a, own);
    for (int turn = 1; turn < a.shape.ranks; turn++) sort_rows_to(a, s, own, rank_of_turn(a, turn));
  }
  send_list(a, s, own, !a.more, exchange);
}

#endif
