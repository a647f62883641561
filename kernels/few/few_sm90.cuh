/* Expands a file's rows of variants.def into kernels of the forms few and fixed; the file defines ROWS_<file> first. */
#include "few/few.cuh"
#include "gemm/major.cuh"

using operation_few_up = operation_up;
using operation_few_down = operation_down;
constexpr bool IS_WHOLE_few = false, IS_WHOLE_fixed = true;

#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ few_args args)           \
  {                                                                                                                    \
    using factors = of_major<product<X, W, Y, SCALE_##SCALE, operation_##op>, MAJOR_##MAJOR>;                          \
    KERNEL_BODY(SMEM, few, few_shape<factors, BM, BK, STAGES, WARPS, IS_WHOLE_##form>)                                 \
  }
#include "variants.def"
