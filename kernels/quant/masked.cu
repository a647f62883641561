/*
 * Rows that experts have room for (masked.h). A CTA takes a few rows of an expert's room at a time, all experts' first
 * ones first: what is beyond a count costs one look at it, and the rows that are there spread over all CTAs.
 */
#include "quant/arrange.cuh"
#include "masked.h"

/* Rows of a piece of an expert's room. */
enum { PIECE = 8 };

struct room_piece {
  int32_t expert;
  row_range rows; /* those that are there, for one CTA */
};

DEVICE int64_t room_pieces(const quantize_masked_args &m)
{
  return (int64_t)m.rows.experts * ceil_div(m.capacity, (int)PIECE);
}

DEVICE room_piece piece_of_room(const quantize_masked_args &m, int64_t piece)
{
  const int32_t expert = (int32_t)(piece % m.rows.experts), first = (int32_t)(piece / m.rows.experts) * PIECE;
  const int32_t there = min(m.counts[expert], m.capacity), base = expert * m.capacity;
  return {expert, {base + first, base + min(there, first + PIECE), 0, 1}};
}

template <class X, class Q, int WARPS> DEVICE void quantize_masked_codes(const quantize_masked_args &m)
{
  __shared__ float warp_most[WARPS];
  wait_for_earlier_grids();
  for (int64_t i = blockIdx.x; i < room_pieces(m); i += gridDim.x) {
    const room_piece piece = piece_of_room(m, i);
    if (piece.rows.begin < piece.rows.end) quantize_range<X, Q, WARPS>(m.rows, piece.rows, warp_most);
  }
}

template <class X, class Y, int WARPS> DEVICE void quantize_masked_expert(const quantize_masked_args &m)
{
  wait_for_earlier_grids();
  for (int64_t i = blockIdx.x; i < room_pieces(m); i += gridDim.x) {
    const room_piece piece = piece_of_room(m, i);
    for (int32_t row = piece.rows.begin; row < piece.rows.end; row++)
      arrange_row<X, Y, WARPS * WARP_SIZE>(m.rows, row, piece.expert);
  }
}

#define ROWS_masked
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ op##_args a)                   \
  {                                                                                                                    \
    static_assert(UNITS * LANES == WARPS * WARP_SIZE, "a thread has a vector of its unit");                            \
    op##_##form<X, Y, WARPS>(a);                                                                                       \
  }
#include "variants.def"
