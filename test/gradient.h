/* Gradients against differences of the function itself, in double. */
#ifndef TEST_GRADIENT_H
#define TEST_GRADIENT_H

#include "test.h"

/* A scalar function of numbers that lie in memory that `user` leads to. */
typedef double scalar_function(const void *user);

/* Of `from`'s numbers, as doubles, in scratch memory. */
double *doubles_of(const tensor *from);

/* got[i] is the derivative by x[i]: within the rounding of its type, and `slack` times the largest of them. */
void check_gradient(const char *what, scalar_function *f, const void *user, double *x, const tensor *got, double slack);

/* sum of a b: f's part of <dy, y>. */
double dot_of(const double *a, const double *b, int64_t count);

/* A case: what `run` gives is the same bits whatever number of threads the CPU device has. */
void check_threads(const char *name, tensor (*run)(cumoe_context context));

#endif
