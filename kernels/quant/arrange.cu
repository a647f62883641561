/* Rows of activations in the order of the map, each as its expert multiplies it. */
#include "quant/arrange.cuh"

template <class X, class Y, int WARPS> DEVICE void quantize_expert(const quantize_args &a)
{
  constexpr int THREADS = WARPS * WARP_SIZE;
  wait_for_earlier_grids();
  const int64_t rows = token_total(a.rows);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    arrange_row<X, Y, THREADS>(a, row, expert_of_row(&a, row));
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
