/* The experts of several tokens on sm_90a, weights of 4 bits with scales. */
#include "few/drawn.cuh"
#include "gemm/major.cuh"

#define ROWS_few_drawn_sm90
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ few_args args)           \
  {                                                                                                                    \
    using factors = of_major<product<X, W, Y, SCALE_##SCALE, operation_up>, MAJOR_##MAJOR>;                            \
    KERNEL_BODY(SMEM, drawn, drawn_layout<factors, BM, BN, BK, STAGES, WARPS>)                                         \
  }
#include "variants.def"
