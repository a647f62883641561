/* Backward of elementwise functions and of softmax. */
#ifndef CUMOE_ELEMENTWISE_CUH
#define CUMOE_ELEMENTWISE_CUH

#include "train/elements.cuh"
#include "train/sums.cuh"

/* Of x and of -x; neither overflows, and a small one keeps its digits. */
template <class R> struct sigmoids {
  R own, other;
  DEVICE sigmoids(R x)
  {
    const R e = exp_of(-fabs(x)), large = 1 / (1 + e), small = e * large;
    own = x < 0 ? small : large;
    other = x < 0 ? large : small;
  }
};

template <class R> DEVICE R gelu_slope(R x)
{
  return (R).5 * erfc_of(-x * (R)0.70710678118654752440) + x * (R)0.39894228040143267794 * exp_of((R)-.5 * x * x);
}

template <class R> DEVICE R gelu_tanh_slope(R x)
{
  const R z = (R)1.5957691216057307117 * x * (1 + (R).044715 * x * x); /* 1 + tanh z/2 = 2 sigmoid(z) */
  const R dz = (R)1.5957691216057307117 * (1 + (R)(3 * .044715) * x * x);
  const sigmoids<R> s(z);
  return s.own + x * dz * s.own * s.other;
}

/* As kernels/cpu/train.c: factors that are 0 where another is infinite are left out. */
template <class R> DEVICE R slope(int function, R x)
{
  if (function == EW_RELU) return x > 0 ? (R)1 : x <= 0 ? (R)0 : x;
  if (function != EW_SIGMOID && fabs(x) > (R)1e3) return x > 0;
  if (function == EW_GELU) return gelu_slope(x);
  if (function == EW_GELU_TANH) return gelu_tanh_slope(x);
  const sigmoids<R> s(x);
  return function == EW_SIGMOID ? s.own * s.other : s.own + x * s.own * s.other;
}

struct raw_pair {
  raw_vector x, dy;
};

DEVICE raw_pair fetch_pair(const elementwise_backward_args &e, int64_t row, span columns)
{
  return {fetch(e.x, row, columns), fetch(e.dy, row, columns)};
}

template <class R>
DEVICE void get_pair(R (&x)[VECTOR], R (&dy)[VECTOR], const elementwise_backward_args &e, const raw_pair &raw)
{
  get_values(x, raw.x, e.x.dtype);
  get_values(dy, raw.dy, e.dy.dtype);
}

template <int THREADS> DEVICE void any_elementwise_backward(const elementwise_backward_args &e)
{
  const run_of_row run(e.cols);
  in_type_of(e.x, [&](auto real) {
    const auto bring = [&](span columns) { return fetch_pair(e, run.row, columns); };
    for_fetched_vectors<THREADS>(run.columns, bring, [&](span columns, const raw_pair &raw) {
      decltype(real) x[VECTOR], dy[VECTOR];
      get_pair(x, dy, e, raw);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) dy[i] *= slope(e.function, x[i]);
      put_vector(dy, e.dx, run.row, columns);
    });
  });
}

template <int THREADS> DEVICE void any_softmax_backward(const elementwise_backward_args &e)
{
  const int64_t row = blockIdx.x;
  in_type_of(e.x, [&](auto real) {
    using R = decltype(real);
    double sum = 0;
    R y[VECTOR], dy[VECTOR];
    const auto bring = [&](span columns) { return fetch_pair(e, row, columns); };
    for_fetched_vectors<THREADS>({0, e.cols}, bring, [&](span, const raw_pair &raw) {
      get_pair(y, dy, e, raw);
      sum += sum_of_products(y, dy);
    });
    const R mean = (R)cta_sum<THREADS>(sum);
    for_fetched_vectors<THREADS>({0, e.cols}, bring, [&](span columns, const raw_pair &raw) {
      get_pair(y, dy, e, raw);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) dy[i] = y[i] * (dy[i] - mean);
      put_vector(dy, e.dx, row, columns);
    });
  });
}

#endif
