/*
 * up by wgmma, of rows that arrive from other ranks meanwhile, in the order in which it comes to their experts
 * (ep/rows.cuh). Idle producer warps copy rows, as ever (copy_ahead.cuh), and before they read of a rank's segment they
 * wait until it has told that it has sent the rows of the expert.
 *
 * Who waits here may take all SMs: nothing that these rows depend on may still have to start.
 */
#ifndef CUMOE_EP_ARRIVING_CUH
#define CUMOE_EP_ARRIVING_CUH

#include "ep/flags.cuh"
#include "gemm/major.cuh"
#include "gemm/wgmma.cuh"

/* What is known to have come: of ranks that send in order, all rows of experts below this one; of others, all (a bit a
 * rank). */
struct come {
  int experts;
  uint32_t all;
};

/* The least that a rank's CTAs tell of, by half a warp; as its word is of this exchange. */
DEVICE int told_of(const ep_args &a, uint32_t exchange, int rank)
{
  const int word = lane_id() % EP_FLAG_WORDS;
  const char *words = lane_of(a, a.rank) + a.at.sent + (uint64_t)rank * EP_LINE;
  int told = INT32_MAX;
  if (word < EP_ROW_CTAS) {
    const uint64_t value = load_relaxed_system(words + word * sizeof(uint64_t));
    const int32_t after = (int32_t)((uint32_t)(value >> 32) - exchange);
    told = after > 0 ? INT32_MAX : after < 0 ? 0 : (int)(uint32_t)value;
  }
#pragma unroll
  for (int lanes = EP_FLAG_WORDS / 2; lanes > 0; lanes /= 2) told = min(told, __shfl_xor_sync(ALL_LANES, told, lanes));
  return told;
}

/* Until each of the sorted ranks has told that it has sent all rows of the expert, or the group has given up. */
DEVICE void wait_for_expert(const ep_args &a, uint32_t exchange, uint32_t sorted, int expert, come &known)
{
  int least = INT32_MAX;
#pragma unroll 1
  for (int r = 0; r < a.shape.ranks; r += 2) {
    const int rank = r + lane_id() / EP_FLAG_WORDS;
    const bool counts = rank < a.shape.ranks && sorted >> rank & 1 && is_active(a, rank);
    int told = 0;
    for (patience p;;) {
      told = told_of(a, exchange, counts ? rank : a.rank);
      if (__all_sync(ALL_LANES, !counts || told > expert)) break;
      if (__any_sync(ALL_LANES, p.ends(a, EP_DISPATCH, rank, true))) {
        known.experts = INT32_MAX;
        return;
      }
    }
    if (counts) least = min(least, told);
  }
  known.experts = min(least, __shfl_xor_sync(ALL_LANES, least, EP_FLAG_WORDS));
  (void)load_acquire_system(lane_of(a, a.rank) + a.at.sent);
}

DEVICE void wait_for_all_rows_of(const ep_args &a, uint32_t exchange, int rank)
{
  const char *words = lane_of(a, a.rank) + a.at.in + (uint64_t)rank * EP_LINE;
  uint32_t tokens;
  if (lane_id() < EP_FLAG_WORDS && ep_is_word_of(EP_PUTS_ROWS, lane_id()) && is_active(a, rank))
    (void)wait_for_word<true>(a, words + lane_id() * sizeof(uint64_t), exchange, EP_DISPATCH, rank, &tokens);
  __syncwarp();
}

template <class S> struct arriving<S, true> {
  using X = typename S::X;

  DEVICE static int32_t *tickets() { return &counters_of(*exchange_of_cta())->up_units; }

  /* As copy_rows of copy_ahead.cuh. */
  DEVICE static void copy_rows(const gemm_args &args)
  {
    const ep_args &a = *exchange_of_cta();
    const int32_t total = rows_to_copy(args), copies = total ? (total - 1) / COPY_TICKET + 1 : 0;
    come known = {0, 1u << a.rank};
    int expert = 0, pair, next_pair;
    int32_t ticket = draw_rows(args, total, pair);
#pragma unroll 1
    while (ticket < copies) {
      const int32_t next = draw_rows(args, total, next_pair);
      copy_ticket(args, ticket * COPY_TICKET, min(COPY_TICKET, total - ticket * COPY_TICKET), pair, expert, known);
      ticket = next;
      pair = next_pair;
    }
  }

  DEVICE static void wait_for_sources(const gemm_args &args, uint32_t sources, int last, int &expert, come &known)
  {
    const ep_args &a = *exchange_of_cta();
    const uint32_t sorted = load_relaxed(reinterpret_cast<const int32_t *>(&counters_of(a)->sorted));
    const uint32_t exchange = load_relaxed(reinterpret_cast<const int32_t *>(&counters_of(a)->serving));
    while (expert + 1 < args.experts && load_relaxed(args.offsets + expert + 1) <= last) expert++;
    const int key = min(expert, EP_ROW_KEYS - 1);
    if (sources & sorted & ~known.all && known.experts <= key) wait_for_expert(a, exchange, sorted & ~known.all, key, known);
    for (uint32_t left = sources & ~sorted & ~known.all; left; left &= left - 1)
      wait_for_all_rows_of(a, exchange, __ffs((int)left) - 1);
    known.all |= sources & ~sorted;
  }

  DEVICE static void copy_ticket(const gemm_args &args, int first, int count, int32_t pair, int &expert, come &known)
  {
    const ep_args &a = *exchange_of_cta();
    const int32_t pairs = (int32_t)token_total(args.tokens) * args.top_k, capacity = (int32_t)a.shape.capacity;
    const bool there = (uint32_t)pair < (uint32_t)pairs;
    if (!there) report_fault_inline(args.fault, FAULT_ROUTE, 0, pair);
    const int32_t token = there ? (int32_t)((uint32_t)pair / (uint32_t)args.top_k) : 0, source = token / capacity;
    const uint32_t all_there = __ballot_sync(ALL_LANES, there);
    wait_for_sources(args, __reduce_or_sync(ALL_LANES, lane_id() < count ? 1u << source : 0), first + count - 1, expert,
                     known);
    const X *x = source == a.rank ? static_cast<const X *>(a.x) + (token - source * capacity) * a.x_ld
                                  : static_cast<const X *>(args.a) + token * args.a_ld;
#pragma unroll 1
    for (int i = 0; i < count; i++)
      copy_row_from<X>(args, first + i, reinterpret_cast<const X *>(__shfl_sync(ALL_LANES, (uint64_t)x, i)),
                       all_there >> i & 1);
    __syncwarp();
    __threadfence();
    if (lane_id() == 0) atomicAdd(args.protocol.progress + PROGRESS_COPIED + first / COPY_GROUP, count);
  }
};

#endif
