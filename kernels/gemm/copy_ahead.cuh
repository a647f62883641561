/*
 * A copy of up's rows in row order, made by the kernel that multiplies them. Idle producer warps copy, a little ahead
 * of the products, and the thread that loads a tile waits until its rows are there. As a launch of its own the copy
 * would take the time of its writes, in which the tensor cores do nothing.
 *
 * Warps draw tickets for the next few rows, so no CTA waits for one that has not started.
 */
#ifndef CUMOE_COPY_AHEAD_CUH
#define CUMOE_COPY_AHEAD_CUH

#include "device/quant.cuh"
#include "device/ptx_sm90.cuh"

/* Rows that the route has; those of bad routes, too, are all copied. */
DEVICE int32_t rows_to_copy(const gemm_args &args)
{
  return (int32_t)min((int64_t)max(load_relaxed(args.offsets + args.experts), 0), args.rows_cap);
}

/* ---- copying ---- */

/* Returns a ticket; lane i gets the pair of its row i. */
DEVICE int32_t draw_rows(const gemm_args &args, int32_t total, int32_t &pair)
{
  int32_t ticket = 0;
  if (lane_id() == 0) ticket = atomicAdd(args.protocol.progress + PROGRESS_COPY_TICKETS, 1);
  ticket = __shfl_sync(ALL_LANES, ticket, 0);
  const int64_t row = (int64_t)ticket * COPY_TICKET + lane_id();
  pair = lane_id() < COPY_TICKET && row < total ? __ldg(args.row_pair + row) : 0;
  return ticket;
}

/* EACH vectors a lane at once, up to the last one. */
template <int EACH, bool INSIDE> DEVICE void copy_vectors(uint4 *to, const uint4 *from, int vectors, bool there)
{
  uint4 value[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++)
    value[i] = ld_global_no_allocate(from + i * WARP_SIZE, INSIDE || (there && i * WARP_SIZE < vectors));
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (INSIDE || i * WARP_SIZE < vectors) to[i * WARP_SIZE] = value[i];
}

/* One row of X; zeros for a token that is none. */
template <class X> DEVICE void copy_row(const gemm_args &args, int32_t row, int32_t token)
{
  constexpr int MOST = 8, SOME = 4; /* 128 bytes a lane: what registers hold */
  const uint4 *from = reinterpret_cast<const uint4 *>(static_cast<const X *>(args.a) + token * args.a_ld) + lane_id();
  uint4 *to = static_cast<uint4 *>(args.protocol.x_copy) + (int64_t)row * (args.k / operand<X>::PER_16) + lane_id();
  int left = args.k / operand<X>::PER_16 - lane_id();
#pragma unroll 1
  for (; token >= 0 && left > (MOST - 1) * WARP_SIZE; left -= MOST * WARP_SIZE) {
    copy_vectors<MOST, true>(to, from, left, true);
    to += MOST * WARP_SIZE, from += MOST * WARP_SIZE;
  }
#pragma unroll 1
  for (; left > 0; left -= SOME * WARP_SIZE) {
    copy_vectors<SOME, false>(to, from, left, token >= 0);
    to += SOME * WARP_SIZE, from += SOME * WARP_SIZE;
  }
}

DEVICE float *copied_scales(const gemm_args &args)
{
  return reinterpret_cast<float *>(static_cast<char *>(args.protocol.x_copy) + COPIED_SCALES(args.rows_cap, args.k));
}

/* The scales of `count` rows of codes; lane i has the token of row first + i. */
DEVICE void copy_row_scales(const gemm_args &args, int32_t first, int count, int32_t token)
{
  const int i = lane_id() % COPY_TICKET, groups = row_group(args, args.k - 1) + 1;
  const int32_t from = __shfl_sync(ALL_LANES, token, i);
  float *to = copied_scales(args) + first + i;
  for (int g = lane_id() / COPY_TICKET; i < count && g < groups; g += WARP_SIZE / COPY_TICKET)
    to[g * SCALE_LD(args.rows_cap)] = from >= 0 ? args.a_scale[g * args.a_scale_ld + from] : 0.f;
}

/* Whole warps, any number of them. The next ticket is drawn while one is copied. */
template <class X> DEVICE void copy_rows(const gemm_args &args)
{
  const int32_t total = rows_to_copy(args), tickets = total ? (total - 1) / COPY_TICKET + 1 : 0;
  int32_t pairs = (int32_t)token_total(args.tokens) * args.top_k; /* below 2^31 */
  int32_t pair, next_pair;
  int32_t ticket = draw_rows(args, total, pair);
#pragma unroll 1
  while (ticket < tickets) {
    const int32_t next = draw_rows(args, total, next_pair), first = ticket * COPY_TICKET;
    const int count = min(COPY_TICKET, total - first);
    if constexpr (operand<X>::BITS == 8)
      pairs = (int32_t)token_total(args.tokens) * args.top_k; /* registers are full */
    const bool there = (uint32_t)pair < (uint32_t)pairs;
    if (!there) report_fault_inline(args.fault, FAULT_ROUTE, 0, pair);
    const int32_t token = there ? (int32_t)((uint32_t)pair / (uint32_t)args.top_k) : -1;
#pragma unroll 1
    for (int i = 0; i < count; i++) copy_row<X>(args, first + i, __shfl_sync(ALL_LANES, token, i));
    if constexpr (operand<X>::BITS == 8) copy_row_scales(args, first, count, token);
    __syncwarp();
    __threadfence();
    if (lane_id() == 0) atomicAdd(args.protocol.progress + PROGRESS_COPIED + first / COPY_GROUP, count);
    ticket = next;
    pair = next_pair;
  }
}

/* ---- waiting ---- */

/* Whether rows `first` .. `first + count - 1` are there, for bulk copies that this thread starts. Rows past the last one
 * count as there. */
DEVICE bool rows_are_there(const gemm_args &args, int32_t total, int32_t first, int32_t count)
{
  const int group = first / COPY_GROUP, groups = (first + count - 1) / COPY_GROUP + 1 - group;
  bool missing = false;
#pragma unroll 4
  for (int i = 0; i < groups; i++)
    missing |= load_relaxed(args.protocol.progress + PROGRESS_COPIED + group + i) <
               min(total - (group + i) * COPY_GROUP, COPY_GROUP);
  if (!missing) __threadfence();
  return !missing;
}

#endif
