/* The experts of few tokens on sm_90a, bf16 and f16, N-major weights, behind a router. */
#include "few/dealt.cuh"
#include "gemm/major.cuh"

#define ROWS_few_dealt_sm90
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ few_sm90_args args)      \
  {                                                                                                                    \
    using factors = of_major<product<X, W, Y, SCALE_##SCALE, operation_up>, MAJOR_##MAJOR>;                            \
    KERNEL_BODY(SMEM, dealt, dealt_layout<factors, BM, BN, BK, STAGES, WARPS>)                                         \
  }
#include "variants.def"
