/* Expands a file's rows of variants.def into kernels of the form drawn or dealt, whose header the file includes; it
 * defines ROWS_<file> first. */
#include "gemm/major.cuh"

#ifndef FEW_SM90_TAKES
#define FEW_SM90_TAKES few_args
#endif

#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ FEW_SM90_TAKES args)     \
  {                                                                                                                    \
    using factors = of_major<product<X, W, Y, SCALE_##SCALE, operation_up>, MAJOR_##MAJOR>;                            \
    KERNEL_BODY(SMEM, form, form##_layout<factors, BM, BN, BK, STAGES, WARPS>)                                         \
  }
#include "variants.def"
