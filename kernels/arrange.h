/* Which expert a row belongs to, and what of x it is made of (args.h: quantize_args): one definition for the CPU and
 * every GPU. */
#ifndef CUMOE_ARRANGE_H
#define CUMOE_ARRANGE_H

#include "args.h"
#include "exact.h"

/* The last expert whose rows begin at the row or before it: those that have none begin where the next one does. */
EXACT int32_t expert_of_row(const quantize_args *a, int64_t row)
{
  int32_t low = 0, high = a->offsets ? a->experts : 1;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (a->offsets[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* Row of x. A pair that is none reads row 0. */
EXACT int64_t source_of_row(const quantize_args *a, int64_t row)
{
  if (!a->row_pair) return row;
  const int64_t source = a->row_pair[row] / a->top_k;
  return source >= 0 && source < a->x_rows ? source : 0;
}

EXACT const int32_t *order_of_expert(const quantize_args *a, int32_t expert)
{
  return a->order_table ? a->order_table[expert] : a->order + expert * a->order_stride;
}

/* Element k of a row in order of that; what is no element counts as the nearest one. */
EXACT int32_t ordered(const int32_t *order, int32_t k, int32_t count)
{
  const int32_t at = order[k];
  return at < 0 ? 0 : at < count ? at : count - 1;
}

#endif
