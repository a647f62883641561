/* d h of sm_90a and what follows it, bf16 and f16. */
#include "backward/follow.cuh"
#include "gemm/packed.cuh"

#define ROWS_backward_follow_sm90
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ down_backward_args all)  \
  {                                                                                                                    \
    using factors = of_major<product<X, W, Y, SCALE_##SCALE, operation_##op>, MAJOR_##MAJOR>;                          \
    const gemm_sm90_args &args = all.gemm;                                                                             \
    KERNEL_BODY(SMEM, wgmma, wgmma_or_packed<factors, CLUSTER, BM, BN, BK, STAGES, WARPS>)                             \
  }
#include "variants.def"
