/* The inner loop of the CPU device's products: a row times CPU_N_BLOCK columns. Each sum is a plain loop over k, which
 * the compiler vectorises over columns without reordering anything. */
#ifndef CUMOE_CPU_MULTIPLY_H
#define CUMOE_CPU_MULTIPLY_H

#include "../args.h"

/* Of a loop whose elements are the thread's own and stored just before, where sanitizers see them: here they take ten
 * times as long. */
#define UNCHECKED __attribute__((no_sanitize("address", "undefined", "thread")))

UNCHECKED static inline void multiply_row(double *restrict sum, const double *restrict a,
                                          double (*restrict w)[CPU_N_BLOCK], int32_t depth)
{
  enum { LANES = 8 };
  for (int32_t n = 0; n < CPU_N_BLOCK; n += LANES) {
    double part[LANES];
    for (int i = 0; i < LANES; i++) part[i] = sum[n + i];
    for (int32_t k = 0; k < depth; k++)
      for (int i = 0; i < LANES; i++) part[i] += a[k] * w[k][n + i];
    for (int i = 0; i < LANES; i++) sum[n + i] = part[i];
  }
}

#endif
