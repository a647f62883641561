/*
 * Rows of activations in the order of the map, each as its expert multiplies it (args.h: quantize_args, by_expert):
 * codes by the expert's own scale, or elements in the expert's order of k. A CTA has a row, a thread eight neighbours.
 */
#ifndef CUMOE_ARRANGE_CUH
#define CUMOE_ARRANGE_CUH

#include "quant/quantize.cuh"
#include "arrange.h"

/* Eight elements from k on of a row in another order. */
template <class X> DEVICE uint4 load_ordered(const quantize_args &a, const X *from, const int32_t *order, int k)
{
  union {
    uint4 vector;
    X element[EACH];
  } eight;
#pragma unroll
  for (int i = 0; i < EACH; i++) eight.element[i] = from[ordered(order, k + i, a.cols)];
  return eight.vector;
}

template <class X, int THREADS> DEVICE void order_row(const quantize_args &a, int64_t row, int32_t expert)
{
  const int32_t *order = order_of_expert(&a, expert);
  const X *from = static_cast<const X *>(a.x) + source_of_row(&a, row) * a.x_ld;
  X *to = static_cast<X *>(a.codes) + row * a.codes_ld;
  for (int k = threadIdx.x * EACH; k < a.cols; k += THREADS * EACH)
    *reinterpret_cast<uint4 *>(to + k) = load_ordered(a, from, order, k);
}

/* s8 has no code for NaN: the row's scale says so. */
template <class X, class Q, int THREADS> DEVICE bool has_nan(const quantize_args &a, const X *from)
{
  if constexpr (same_type<Q, e4m3>) {
    return false;
  } else {
    bool nan = false;
    for (int k = threadIdx.x * EACH; k < a.cols; k += THREADS * EACH) {
      float value[EACH];
      load_f32<EACH>(from + k, value);
#pragma unroll
      for (int i = 0; i < EACH; i++) nan |= value[i] != value[i];
    }
    return __syncthreads_or(nan);
  }
}

template <class X, class Q, int THREADS> DEVICE void quantize_row(const quantize_args &a, int64_t row, int32_t expert)
{
  const X *from = static_cast<const X *>(a.x) + source_of_row(&a, row) * a.x_ld;
  uint8_t *to = static_cast<uint8_t *>(a.codes) + row * a.codes_ld;
  const float given = a.format.static_scale[expert * a.static_stride];
  const float scale = has_nan<X, Q, THREADS>(a, from) ? __int_as_float(0x7fc00000) : given, inverse = __frcp_rn(scale);
  for (int k = threadIdx.x * EACH; k < a.cols; k += THREADS * EACH) {
    float value[EACH];
    load_f32<EACH>(from + k, value);
    *reinterpret_cast<uint2 *>(to + k) =
        make_uint2(quantize_four<Q>(value, inverse), quantize_four<Q>(value + 4, inverse));
  }
  if (threadIdx.x == 0) a.scale[row] = scale;
}

/* X and Y of the same type: elements in order; else codes. */
template <class X, class Y, int THREADS> DEVICE void arrange_row(const quantize_args &a, int64_t row, int32_t expert)
{
  if constexpr (same_type<X, Y>)
    order_row<X, THREADS>(a, row, expert);
  else
    quantize_row<X, Y, THREADS>(a, row, expert);
}

#endif
