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

constexpr int LINES_AT_ONCE = 4; /* of a lane: parts of a row */

/* A row that another rank sends as lines, to x's copy; waits for each. */
DEVICE void copy_lines(const gemm_args &args, const ep_args &a, int32_t row, const char *from, uint64_t flag, int width)
{
  const int parts = parts_of_row(a);
  char *to = static_cast<char *>(args.protocol.x_copy) + (int64_t)row * width * 16;
  patience p;
#pragma unroll 1
  for (int first = 0; first < parts; first += LINES_AT_ONCE) {
    line_words line[LINES_AT_ONCE];
#pragma unroll
    for (int j = 0; j < LINES_AT_ONCE; j++)
      if (first + j < parts) line[j] = load_line_system(from + (first + j) * (EP_LINES * EP_LINE) + lane_id() * 16);
#pragma unroll
    for (int j = 0; j < LINES_AT_ONCE; j++) {
      if (first + j >= parts) break;
      while (!are_whole(line[j], flag)) {
        if (__any_sync(ALL_LANES, p.ends(a, EP_DISPATCH, a.rank, true))) return;
        line[j] = load_line_system(from + (first + j) * (EP_LINES * EP_LINE) + lane_id() * 16);
      }
      const int vector = (first + j) * EP_LINE_VECTORS + vector_of_lane();
      if (vector >= width) continue;
      if (has_flag())
        *reinterpret_cast<uint64_t *>(to + vector * 16 + (has_second_half() ? 8 : 0)) = line[j].words.x;
      else
        *reinterpret_cast<ulonglong2 *>(to + vector * 16) = line[j].words;
    }
  }
}

template <class S> struct arriving<S, true> {
  using X = typename S::X;

  DEVICE static int32_t *tickets() { return &counters_of(*exchange_of_cta())->up_units; }

  /* As copy_rows of copy_ahead.cuh. */
  DEVICE static void copy_rows(const gemm_args &args)
  {
    const ep_args &a = *exchange_of_cta();
    const int32_t total = rows_to_copy(args), copies = total ? (total - 1) / COPY_TICKET + 1 : 0;
    int32_t pair, next_pair;
    const uint64_t flag = line_flag(load_relaxed(reinterpret_cast<const int32_t *>(&counters_of(a)->serving)));
    int32_t ticket = draw_rows(args, total, pair);
#pragma unroll 1
    while (ticket < copies) {
      const int32_t next = draw_rows(args, total, next_pair);
      copy_ticket(args, ticket * COPY_TICKET, min(COPY_TICKET, total - ticket * COPY_TICKET), pair, flag);
      ticket = next;
      pair = next_pair;
    }
  }

  DEVICE static void copy_ticket(const gemm_args &args, int first, int count, int32_t pair, uint64_t flag)
  {
    const ep_args &a = *exchange_of_cta();
    const int32_t pairs = (int32_t)token_total(args.tokens) * args.top_k, capacity = (int32_t)a.shape.capacity;
    const bool there = (uint32_t)pair < (uint32_t)pairs;
    if (!there) report_fault_inline(args.fault, FAULT_ROUTE, 0, pair);
    const int32_t token = there ? (int32_t)((uint32_t)pair / (uint32_t)args.top_k) : 0, source = token / capacity;
    const uint32_t all_there = __ballot_sync(ALL_LANES, there);
    const char *x = source == a.rank ? static_cast<const char *>(a.x) + (token - source * capacity) * a.x_ld * a.shape.element
                                     : lane_of(a, a.rank) + a.at.sent + token * ep_line_row(&a.shape);
    const uint32_t as_lines = __ballot_sync(ALL_LANES, source != a.rank);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      const char *from = reinterpret_cast<const char *>(__shfl_sync(ALL_LANES, (uint64_t)x, i));
      if (as_lines >> i & all_there >> i & 1)
        copy_lines(args, a, first + i, from, flag, row_vectors(a));
      else
        copy_row_from<X>(args, first + i, reinterpret_cast<const X *>(from), all_there >> i & 1);
    }
    __syncwarp();
    __threadfence();
    if (lane_id() == 0) atomicAdd(args.protocol.progress + PROGRESS_COPIED + first / COPY_GROUP, count);
  }
};

#endif
