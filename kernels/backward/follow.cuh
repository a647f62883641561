/*
 * What follows d h, the activation's gradient, by warps of the same kernel that its products leave idle. As a launch of
 * its own it takes as long as memory takes for gate and up, h, d h and d z, in which tensor cores do nothing.
 */
#ifndef CUMOE_FOLLOW_CUH
#define CUMOE_FOLLOW_CUH

#include "backward/activation.cuh"
#include "gemm/wgmma.cuh"

DEVICE int32_t draw_followed(const activation_args &a)
{
  int32_t ticket = 0;
  if (lane_id() == 0) ticket = atomicAdd(a.progress + FOLLOW_TICKETS(a.map.rows_cap, a.map.experts), 1);
  return __shfl_sync(ALL_LANES, ticket, 0);
}

/* Whether all of an expert's d h is stored; false: not yet, and this CTA's products have ended. */
template <class S> DEVICE bool wait_for_d_h(const gemm_args &args, wgmma_smem<S> &smem, int expert)
{
  const int32_t all = (smem.table.before[expert + 1] - smem.table.before[expert]) * args.n;
  bool stored;
  do {
    stored = load_acquire(h_stored(args, expert)) == all;
  } while (!stored && !products_ended(smem));
  return __shfl_sync(ALL_LANES, (int)stored, 0); /* lanes may have left at different times */
}

template <class S> DEVICE void follow_products(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  const activation_args &a = reinterpret_cast<const down_backward_args &>(args).activation;
  const int32_t tickets = (int32_t)(end_of_rows(a.map) / FOLLOW_ROWS);
  int expert = 0;
#pragma unroll 1
  for (;;) {
    const int32_t ticket = draw_followed(a), row = ticket * FOLLOW_ROWS;
    if (ticket >= tickets) return;
    while (expert + 1 < a.map.experts && load_relaxed(a.map.offsets + expert + 1) <= row) expert++;
    if (!wait_for_d_h<S>(args.g, smem, expert)) return;
#pragma unroll 1
    for (int i = 0; i < FOLLOW_ROWS; i++) activation_of_row<typename S::Y>(a, row + i);
    if (lane_id() == 0) a.progress[FOLLOW_DONE(a.map.rows_cap, a.map.experts) + ticket] = true;
    if (__shfl_sync(ALL_LANES, (int)products_ended(smem), 0)) return;
  }
}

#endif
