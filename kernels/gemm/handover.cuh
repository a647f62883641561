/*
 * From up to down by expert. The CTAs of up do not end together. So a grid of down that starts early does not wait for
 * the last of them, but, before each expert, until that expert's h is stored, which for the first ones is long so.
 */
#ifndef CUMOE_HANDOVER_CUH
#define CUMOE_HANDOVER_CUH

#include "gemm/schedule.cuh"

/* How many channels of an expert's row tiles are stored. */
DEVICE int32_t *h_stored(const gemm_args &args, int expert)
{
  return args.protocol.progress + PROGRESS_STORED(args.rows_cap) + expert;
}

/* Up, by one thread, after a barrier behind the stores of a tile's channels. */
DEVICE void add_h_stored(const gemm_args &args, int expert, int channels)
{
  add_release(h_stored(args, expert), channels);
}

/* Down, whose row tiles are up's. */
DEVICE bool h_is_there(const gemm_args &args, const tile_table &table, int expert)
{
  const uint32_t all = (uint32_t)(table.before[expert + 1] - table.before[expert]) * (uint32_t)args.k;
  return (uint32_t)load_acquire(h_stored(args, expert)) == all;
}

#endif
