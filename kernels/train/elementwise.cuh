/* Backward of the elementwise functions and of softmax. */
#ifndef CUMOE_ELEMENTWISE_CUH
#define CUMOE_ELEMENTWISE_CUH

#include "train/elements.cuh"
#include "train/sums.cuh"

DEVICE double sigmoid(double x)
{
  return 1 / (1 + exp(-x));
}

/* As kernels/cpu/train.c: factors that are 0 where another is infinite are left out. */
DEVICE double slope(int function, double x)
{
  if (function == EW_RELU) return x > 0 ? 1. : x <= 0 ? 0. : x;
  if (function == EW_SIGMOID) return sigmoid(x) * sigmoid(-x);
  if (fabs(x) > 1e3) return x > 0;
  if (function == EW_SILU) return sigmoid(x) + x * sigmoid(x) * sigmoid(-x);
  if (function == EW_GELU)
    return .5 * erfc(-x * 0.70710678118654752440) + x * 0.39894228040143267794 * exp(-.5 * x * x);
  const double z = 1.5957691216057307117 * x * (1 + .044715 * x * x); /* 1 + tanh z/2 = 2 sigmoid(z) */
  const double dz = 1.5957691216057307117 * (1 + 3 * .044715 * x * x);
  return sigmoid(z) + x * dz * sigmoid(z) * sigmoid(-z);
}

template <int THREADS> DEVICE void any_elementwise_backward(const elementwise_backward_args &e)
{
  const run_of_row run(e.cols);
  for (int64_t c = run.begin + threadIdx.x; c < run.end; c += THREADS)
    put(e.dx, run.row, c, get(e.dy, run.row, c) * slope(e.function, get(e.x, run.row, c)));
}

template <int THREADS> DEVICE void any_softmax_backward(const elementwise_backward_args &e)
{
  const int64_t row = blockIdx.x;
  double sum = 0;
  for (int64_t c = threadIdx.x; c < e.cols; c += THREADS) sum += get(e.x, row, c) * get(e.dy, row, c);
  sum = cta_sum<THREADS>(sum);
  for (int64_t c = threadIdx.x; c < e.cols; c += THREADS)
    put(e.dx, row, c, get(e.x, row, c) * (get(e.dy, row, c) - sum));
}

#endif
