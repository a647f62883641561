/* Activations of the masked form: rows that experts have room for, of which those that are there become codes. */
#ifndef CUMOE_MASKED_H
#define CUMOE_MASKED_H

#include "args.h"

/*
 * As quantize (args.h), of a matrix of [experts * capacity] rows: row r is expert r / capacity's, and is there if
 * r % capacity < counts[r / capacity]; others are neither read nor written. Of `rows` the cap counts, offsets and
 * row_pair do not. CPU unit: one row.
 */
typedef struct quantize_masked_args {
  quantize_args rows;
  const int32_t *counts; /* device */
  int32_t capacity;
} quantize_masked_args;

#endif
