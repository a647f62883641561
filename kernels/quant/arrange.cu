/*
 * Rows of activations in the order of the map, each as its expert multiplies it (args.h: quantize_args, by_expert):
 * codes by the expert's own scale, or elements in the expert's order of k. A CTA has a row, a thread eight neighbours.
 */
#include "device/quant.cuh"
#include "arrange.h"

enum { EACH = 8 };

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

template <class X, int THREADS> DEVICE void order_row(const quantize_args &a, int64_t row)
{
  const int32_t *order = order_of_expert(&a, expert_of_row(&a, row));
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

template <class X, class Q, int THREADS> DEVICE void quantize_row(const quantize_args &a, int64_t row)
{
  const X *from = static_cast<const X *>(a.x) + source_of_row(&a, row) * a.x_ld;
  uint8_t *to = static_cast<uint8_t *>(a.codes) + row * a.codes_ld;
  const float given = a.format.static_scale[expert_of_row(&a, row) * a.static_stride];
  const float scale = has_nan<X, Q, THREADS>(a, from) ? __int_as_float(0x7fc00000) : given, inverse = __frcp_rn(scale);
  for (int k = threadIdx.x * EACH; k < a.cols; k += THREADS * EACH) {
    float value[EACH];
    load_f32<EACH>(from + k, value);
    *reinterpret_cast<uint2 *>(to + k) =
        make_uint2(quantize_four<Q>(value, inverse), quantize_four<Q>(value + 4, inverse));
  }
  if (threadIdx.x == 0) a.scale[row] = scale;
}

template <class X, class Y, int WARPS> DEVICE void quantize_expert(const quantize_args &a)
{
  constexpr int THREADS = WARPS * WARP_SIZE;
  wait_for_earlier_grids();
  const int64_t rows = token_total(a.rows);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    if constexpr (same_type<X, Y>)
      order_row<X, THREADS>(a, row);
    else
      quantize_row<X, Y, THREADS>(a, row);
}

#define ROWS_arrange
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ op##_args a)                   \
  {                                                                                                                    \
    static_assert(COLUMNS == EACH && LANES == 1 && UNITS == WARPS * WARP_SIZE, "eight elements a thread");             \
    op##_##form<X, Y, WARPS>(a);                                                                                       \
  }
#include "variants.def"
