/* The combine as an operation: see combine.cuh. */
#include "permute/combine.cuh"

/* CTAs an SM: on sm_90, 16-bit rows fit 72 registers without spills. */
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ == 900
#define RESIDENT(in, CTAS) (sizeof(in) == 2 ? CTAS + 1 : CTAS)
#else
#define RESIDENT(in, CTAS) CTAS
#endif

#define ROWS_combine
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, RESIDENT(X, CTAS))                                    \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ op##_args a)                   \
  {                                                                                                                    \
    static_assert(COLUMNS * sizeof(X) == LANES * 16 && LANES == WARPS * WARP_SIZE, "16 bytes a thread");               \
    op##_##form<X, Y, COLUMNS>(a);                                                                                     \
  }
#include "variants.def"
