/* Rows and pairs of a row_map, for the kernels of the backward. */
#ifndef CUMOE_CPU_BACKWARD_PAIRS_H
#define CUMOE_CPU_BACKWARD_PAIRS_H

#include "../backward.h"
#include "element.h"
#include "rows.h"

static inline row_run rows_of_map(const row_map *m, int64_t expert)
{
  return rows_of_expert(m->counts, m->offsets, m->tokens, m->rows_cap, expert, m->fault);
}

/* The pair of a row that is one; -1: the route is bad here, or the pair is of a token that is not there. */
static inline int64_t pair_of_map(const row_map *m, int64_t row)
{
  return pair_of_row(m->row_pair, row, tokens_present(m->tokens) * m->top_k, m->fault);
}

/* Where the last expert's rows end, padding included. */
static inline int64_t end_of_map(const row_map *m)
{
  const int64_t padded = (tokens_present(m->tokens) + ROW_STEP - 1) / ROW_STEP * ROW_STEP;
  return within(m->counts ? m->offsets[m->experts] : padded, 0, m->rows_cap);
}

/* The pair of any row up to there, unless it is dropped; -1: none. */
static inline int64_t pair_kept(const row_map *m, int64_t row)
{
  const int64_t pair = m->row_pair ? m->row_pair[row] : row;
  if (pair < 0 || pair >= tokens_present(m->tokens) * m->top_k) return -1;
  return m->pair_weights && m->pair_weights[pair / m->top_k * m->pair_weights_ld + pair % m->top_k] == 0 ? -1 : pair;
}

/* The expert whose run a row lies in: the last that begins at it or before. */
static inline int64_t expert_of_row(const row_map *m, int64_t row)
{
  int64_t low = 0, high = m->counts ? m->experts : 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (m->offsets[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* The row of a pair, or ROW_DROPPED, also for a pair of weight 0, or ROW_IDENTITY. */
static inline int64_t row_of_pair(const row_map *m, int64_t token, int32_t slot)
{
  const int64_t pair = token * m->top_k + slot, row = m->slot_row ? m->slot_row[pair] : pair;
  if (m->pair_weights && m->pair_weights[token * m->pair_weights_ld + slot] == 0) return ROW_DROPPED;
  if ((row >= 0 && row < m->rows_cap) || row == ROW_IDENTITY) return row;
  if (row != ROW_DROPPED) record_fault(m->fault, FAULT_ROUTE, slot, token);
  return ROW_DROPPED;
}

static inline double weight_of_pair(const row_map *m, int64_t pair)
{
  return m->pair_weights ? m->pair_weights[pair / m->top_k * m->pair_weights_ld + pair % m->top_k] : 1;
}

/* Where a row begins in a matrix, in elements. */
static inline int64_t start_of(const row_matrix *a, const row_map *m, int64_t row, int64_t pair)
{
  return (a->form == OF_ROW ? row : a->form == OF_TOKEN ? pair / m->top_k : pair) * a->ld;
}

#endif
