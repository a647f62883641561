/* Gradients of weights of 16 bits on sm_90a. */
#include "backward/gradient.cuh"

#define ROWS_backward_gradient_sm90
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS)*WARP_SIZE, CTAS) VARIANT_NAME(  \
      op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ weight_gradient_sm90_args args)       \
  {                                                                                                                    \
    KERNEL_BODY(SMEM, gradient, gradient_shape<X, Y, CLUSTER, BM, BN, BK, STAGES, WARPS>)                              \
  }
#include "variants.def"
