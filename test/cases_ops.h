/*
 * The cases of elementwise operations, softmax and norms, on any context and for each forced kernel, against double.
 * What an element may be off, before it is stored in its type (u = 2^-24; results down to 2^-119 may be 0):
 *   add, mul, scale   u |y|                relu  0
 *   sigmoid, silu     (8 u + 2 u |x|) |y|  16-bit types: (32 u + 4 u |x|) |y|
 *   gelu              (10 u + 2 u x^2) |y|               (32 u + 8 u x^2) |y|
 *   gelu_tanh         (8 u + 4 u |z|) |y|                (32 u + 8 u |z|) |y|   z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
 *   softmax           the exponentials' (4 u + 3 u d) e, (16 u + 4 u d) e for d = max - x, and 40 u |y| for the sum
 *   norms             40 u in sums, carried through the formula
 * Every case runs in four layouts: packed, with aligned rows, with odd rows, and in place; the bits must be the same.
 */
#ifndef TEST_CASES_OPS_H
#define TEST_CASES_OPS_H

#include "test.h"

void cases_elementwise(cumoe_context context);
void cases_softmax(cumoe_context context);
void cases_norm(cumoe_context context);

#endif
