/*
 * From up to down by expert. A grid of down that starts early finds all CTAs of up at work, or done; instead of
 * waiting for the last of them it waits, before each expert, until that expert's h is there, which for the first ones
 * is long so. What up's CTAs end apart (H200: the last one 5 to 8 % after the mean) is then down's time.
 */
#ifndef CUMOE_HANDOVER_CUH
#define CUMOE_HANDOVER_CUH

#include "gemm/schedule.cuh"

/* How many channels of an expert's row tiles are stored. */
DEVICE int32_t *h_made(const gemm_args &args, int expert)
{
  return args.protocol.progress + PROGRESS_STORED(args.rows_cap) + expert;
}

/* Up, by one thread, behind a barrier that the stores of a tile's channels stand before. */
DEVICE void tell_h_made(const gemm_args &args, int expert, int channels)
{
  add_release(h_made(args, expert), channels);
}

/* Down, whose row tiles are up's. */
DEVICE void await_h(const gemm_args &args, const tile_table &table, int expert)
{
  const uint32_t all = (uint32_t)(table.before[expert + 1] - table.before[expert]) * (uint32_t)args.k;
  while ((uint32_t)load_acquire(h_made(args, expert)) != all) {
  }
}

#endif
