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

constexpr int LAG = EP_ROW_STAGES / 2; /* pieces whose copies out may be under way */

struct rows_smem {
  char stage[EP_ROW_STAGES][EP_ROW_PIECE];
  uint64_t full[EP_ROW_STAGES], empty[EP_ROW_STAGES];
  int32_t rows_with[EP_ROW_KEYS]; /* of each expert, then where they begin */
  int32_t count[EP_NEAR_RANKS];   /* of rows to each rank */
};
static_assert(sizeof(rows_smem) <= EP_ROW_SMEM, "the host asks for it");

DEVICE void cp_async_bulk_store(void *global, const void *shared, uint32_t bytes)
{
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int PENDING> DEVICE void wait_until_read()
{
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING> DEVICE void wait_until_made()
{
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

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

/* What both warps have: a ring of stages, and the CTA's rows, 32 to a rank, then to the next one. */
struct row_mover {
  const ep_args &a;
  rows_smem &s;
  own_tokens own; /* that are sent as they come, else sorted */
  bool sorted;
  pipeline_state<EP_ROW_STAGES> at;

  DEVICE int bytes() const { return a.shape.hidden * a.shape.element; }
  DEVICE int rows_to(int rank) const { return sorted ? s.count[rank] : own.count(); }

  DEVICE int most_rows() const
  {
    int most = 1; /* that there are none is told as well */
    for (int r = 0; r < a.shape.ranks; r++)
      if (r != a.rank) most = max(most, rows_to(r));
    return most;
  }

  template <class MOVER> DEVICE static void move(MOVER &m)
  {
    const int most = m.most_rows();
#pragma unroll 1
    for (int first = 0; first < most; first += WARP_SIZE)
#pragma unroll 1
      for (int turn = 1; turn < m.a.shape.ranks; turn++) m.move_some(m, rank_of_turn(m.a, turn), first);
  }

  template <class MOVER> DEVICE static void move_some(MOVER &m, int rank, int first)
  {
    const int i = first + lane_id();
    const bool has = i < m.rows_to(rank);
    const int token = !has ? 0 : m.sorted ? m.a.order[list_of(m.a, rank) + i].token : (int)m.own.at(i);
    const int row = has ? row_there(m.a, active_ranks(m.a), token, rank) : -1;
    uint32_t who = __ballot_sync(ALL_LANES, row >= 0);
#pragma unroll 1
    for (; who; who &= who - 1) {
      const int lane = __ffs((int)who) - 1;
      m.row(__shfl_sync(ALL_LANES, token, lane), __shfl_sync(ALL_LANES, row, lane), rank);
    }
    if (first == 0 || first < m.rows_to(rank)) m.end_of_some(rank, first + WARP_SIZE);
  }
};

struct row_loader : row_mover {
  DEVICE void row(int token, int, int)
  {
    const char *from = static_cast<const char *>(a.x) + token * a.x_ld * a.shape.element;
#pragma unroll 1
    for (int done = 0; done < bytes(); done += EP_ROW_PIECE, at.advance()) {
      const int piece = min(bytes() - done, (int)EP_ROW_PIECE);
      wait_for(&s.empty[at.stage], at.phase ^ 1);
      if (lane_id() == 0) {
        mbarrier_arrive_expect_tx(&s.full[at.stage], piece);
        cp_async_bulk(s.stage[at.stage], from + done, piece, &s.full[at.stage]);
      }
      __syncwarp();
    }
  }
  DEVICE void end_of_some(int, int) {}
};

/* A rank is told when LAG copies more are under way, or no more come. */
struct row_storer : row_mover {
  uint32_t exchange;
  int copies = 0;                           /* so far */
  int untold = -1, upto = 0, untold_at = 0; /* a rank, what it will be told, and the copies that this needs */

  DEVICE void row(int, int row, int rank)
  {
    char *to = lane_of(a, rank) + a.at.x + (a.rank * a.shape.capacity + row) * (int64_t)bytes();
#pragma unroll 1
    for (int done = 0; done < bytes(); done += EP_ROW_PIECE, at.advance()) {
      wait_for(&s.full[at.stage], at.phase);
      if (lane_id() == 0) {
        cp_async_bulk_store(to + done, s.stage[at.stage], min(bytes() - done, (int)EP_ROW_PIECE));
        wait_until_read<LAG>();
        if (copies >= LAG) mbarrier_arrive(&s.empty[(at.stage + EP_ROW_STAGES - LAG) % EP_ROW_STAGES]);
      }
      __syncwarp();
      if (++copies == untold_at + LAG) tell_untold<LAG>();
    }
  }

  template <int PENDING> DEVICE void tell_untold()
  {
    if (untold >= 0 && lane_id() == 0) {
      wait_until_made<PENDING>();
      char *words = lane_of(a, untold) + a.at.sent + (uint64_t)a.rank * EP_LINE;
      if (is_active(a, untold)) store_relaxed_system(words + blockIdx.x * sizeof(uint64_t), ep_flag(exchange, upto));
    }
    untold = -1;
  }

  /* Rows before `end` have been sent to the rank. */
  DEVICE void end_of_some(int rank, int end)
  {
    if (!sorted) return;
    tell_untold<0>();
    untold = rank, untold_at = copies;
    upto = end < s.count[rank] ? a.order[list_of(a, rank) + end].expert : NO_EXPERT;
  }
};

/* This CTA's words of the flag that says that all is there. */
DEVICE void tell_of_all_rows(const ep_args &a, uint32_t tokens, uint32_t exchange)
{
  for (int r = 0; r < a.shape.ranks; r++) {
    const int word = lane_id();
    char *words = lane_of(a, r) + a.at.in + (uint64_t)a.rank * EP_LINE;
    if (word < EP_FLAG_WORDS && ep_is_word_of(EP_PUTS_ROWS, word) && word % EP_ROW_CTAS == blockIdx.x &&
        is_active(a, r))
      store_relaxed_system(words + word * sizeof(uint64_t), ep_flag(exchange, tokens));
  }
}

DEVICE void store_rows(const row_mover &mover, uint32_t tokens, uint32_t exchange)
{
  row_storer storer = {mover, exchange};
  row_mover::move(storer);
  storer.tell_untold<0>();
  if (lane_id() == 0) wait_until_made<0>();
  __syncwarp();
  if (storer.sorted) tell_of_all_rows(storer.a, tokens, exchange);
}

/* a.more: of the first tokens, before these are known to have experts. Those who hear of slots may take all SMs for an
 * up that waits for rows: so these are told of when all CTAs of the last rows are there (ep/arriving.cuh). */
DEVICE void send_rows(const ep_args &a, rows_smem &s)
{
  if (threadIdx.x < EP_ROW_STAGES) {
    mbarrier_init(&s.full[threadIdx.x], 1);
    mbarrier_init(&s.empty[threadIdx.x], 1);
  }
  fence_mbarrier_init();
  __syncthreads();
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
  const row_mover mover = {a, s, own, !a.more};
  if (warp_id() == 0) {
    row_loader loader = {mover};
    row_mover::move(loader);
  } else if (warp_id() == 1) {
    store_rows(mover, tokens, exchange);
  }
}

#endif
