/* Regions one behind the other in a workspace, each at a multiple of 256 bytes. */
#ifndef CUMOE_CARVE_H
#define CUMOE_CARVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct carver {
  size_t at;
  bool overflow; /* past 2^62 bytes */
} carver;

/* Reserves rows * cols elements; where they begin. */
static inline size_t carve(carver *c, int64_t rows, int64_t cols, size_t element)
{
  uint64_t bytes, end;
  const size_t start = c->at;
  if (__builtin_mul_overflow((uint64_t)rows, (uint64_t)cols * element, &bytes) ||
      __builtin_add_overflow(start + 255, bytes, &end) || end >> 62)
    c->overflow = true;
  else
    c->at = (size_t)((start + bytes + 255) & ~(uint64_t)255);
  return start;
}

#endif
