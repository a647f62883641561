/* Expands a file's rows of variants.def into kernels of the form wgmma; the file defines ROWS_<file> first. */
#include "gemm/packed.cuh"

#ifndef GEMM_SM90_TAKES
#define GEMM_SM90_TAKES gemm_sm90_args
#endif

#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ GEMM_SM90_TAKES args)    \
  {                                                                                                                    \
    using factors = of_major<product<X, W, Y, SCALE_##SCALE, operation_##op>, MAJOR_##MAJOR>;                          \
    KERNEL_BODY(SMEM, wgmma, wgmma_or_packed<factors, CLUSTER, BM, BN, BK, STAGES, WARPS>)                             \
  }
#include "variants.def"
