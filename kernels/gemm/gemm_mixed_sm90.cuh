/* Expands a file's rows of variants.def into kernels, of form mixed or fixed; the file defines ROWS_<file> first. */
#include "gemm/fixed.cuh"

#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ gemm_args args)          \
  {                                                                                                                    \
    using factors = product<X, W, Y, SCALE_##SCALE, operation_##op>;                                                   \
    KERNEL_BODY(SMEM, mixed, form##_shape<factors, CLUSTER, BM, BN, BK, STAGES, WARPS>)                                \
  }
#include "variants.def"
