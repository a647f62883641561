/* Elements of a matrix by pointer, in double. */
#ifndef CUMOE_CPU_MATRIX_H
#define CUMOE_CPU_MATRIX_H

#include "../train.h"
#include "element.h"

static inline double get(const matrix *m, int64_t row, int64_t col)
{
  return load_element(m->data, row * m->ld + col, m->dtype);
}

static inline void put(const matrix *m, int64_t row, int64_t col, double value)
{
  store_element(m->data, row * m->ld + col, m->dtype, value);
}

/* `count` elements of a row, from `first`. */
static inline void get_run(double *to, const matrix *m, int64_t row, int64_t first, int64_t count)
{
  load_run(to, 1, m->data, row * m->ld + first, 1, count, dense_format(m->dtype));
}

static inline void put_run(const matrix *m, int64_t row, int64_t first, int64_t count, const double *from)
{
  for (int64_t i = 0; i < count; i++) put(m, row, first + i, from[i]);
}

/* Of a vector of ids, targets, positions. */
static inline int64_t id_at(const matrix *m, int64_t i)
{
  return m->dtype == DT_I64 ? ((const int64_t *)m->data)[i] : ((const int32_t *)m->data)[i];
}

static inline int64_t least(int64_t a, int64_t b)
{
  return a < b ? a : b;
}

#endif
