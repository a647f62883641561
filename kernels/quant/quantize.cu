/* Activations become codes: all rows, dealt to the grid. */
#include "quant/quantize.cuh"

template <class X, class Q, int WARPS> DEVICE void quantize_codes(const quantize_args &a)
{
  __shared__ float warp_most[WARPS];
  wait_for_earlier_grids();
  const row_range rows = {0, (int32_t)token_total(a.rows), blockIdx.x, gridDim.x};
  quantize_range<X, Q, WARPS>(a, rows, warp_most);
}

#define ROWS_quantize
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ op##_args a)                   \
  {                                                                                                                    \
    static_assert(COLUMNS == GROUP && LANES == GROUP_LANES && UNITS * LANES == WARPS * WARP_SIZE,                      \
                  "half a warp a group");                                                                              \
    op##_##form<X, Y, WARPS>(a);                                                                                       \
  }
#include "variants.def"
