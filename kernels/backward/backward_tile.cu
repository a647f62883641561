/* The gradients of weights of 16 bits on tensor cores, on every GPU. */
#include "backward/tile.cuh"

#define ROWS_backward_tile
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS) VARIANT_NAME(                                  \
      op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ weight_gradient_args args)            \
  {                                                                                                                    \
    KERNEL_BODY(SMEM, gradient, gradient_shape<X, BM, BN, BK, STAGES, WARPS>)                                          \
  }
#include "variants.def"
