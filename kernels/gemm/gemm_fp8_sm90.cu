/* Grouped GEMM of sm_90a, codes of a byte. */
#define ROWS_gemm_fp8_sm90
#include "gemm/wgmma.cuh"

#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ gemm_sm90_args args)     \
  {                                                                                                                    \
    using factors = product<X, W, Y, SCALE_##SCALE, operation_##op>;                                                   \
    KERNEL_BODY(SMEM, wgmma, wgmma_shape<factors, CLUSTER, BM, BN, BK, STAGES, WARPS>)                                 \
  }
#include "variants.def"
