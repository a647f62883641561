/* Rows of a route on the CPU device: whatever its arrays hold, nothing outside is reached. */
#ifndef CUMOE_CPU_ROWS_H
#define CUMOE_CPU_ROWS_H

#include "fault.h"

typedef struct row_run {
  int64_t first, end;
} row_run;

static inline int64_t within(int64_t v, int64_t low, int64_t high)
{
  return v < low ? low : v > high ? high : v;
}

/* counts NULL: one expert, whose rows are the tokens. */
static inline row_run rows_of_expert(const int32_t *counts, const int32_t *offsets, token_count tokens,
                                     int64_t rows_cap, int64_t expert, fault_sink fault)
{
  const int64_t begin = counts ? offsets[expert] : 0, count = counts ? counts[expert] : tokens_present(tokens);
  row_run run = {within(begin, 0, rows_cap), 0};
  run.end = run.first + within(count, 0, rows_cap - run.first);
  if (count != 0 && (run.first != begin || run.end - run.first != count)) record_fault(fault, FAULT_ROUTE, expert, 0);
  return run;
}

/* The pair of a row; -1: the route is bad here. */
static inline int64_t pair_of_row(const int32_t *row_pair, int64_t row, int64_t pairs, fault_sink fault)
{
  if (row_pair == NULL) return row;
  if (row_pair[row] >= 0 && row_pair[row] < pairs) return row_pair[row];
  record_fault(fault, FAULT_ROUTE, 0, 0);
  return -1;
}

#endif
