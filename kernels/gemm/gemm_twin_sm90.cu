/* Grouped GEMM of sm_90a, weights of mx4, activations as two codes each. */
#include "gemm/twin.cuh"

#define ROWS_gemm_twin_sm90
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ gemm_args args)          \
  {                                                                                                                    \
    using factors = product<X, W, Y, SCALE_##SCALE, operation_##op>;                                                   \
    KERNEL_BODY(SMEM, mixed, twin_shape<factors, CLUSTER, BM, BN, BK, STAGES, WARPS>)                                  \
  }
#include "variants.def"
