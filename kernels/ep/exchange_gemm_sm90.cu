/* Up and down of a rank on sm_90a, bf16 and f16, beside what ranks send each other: gemm_sm90's rows. */
#include "ep/gemm_ranks.cuh"
#include "gemm/packed.cuh"

using operation_ranks_up = operation_up_arriving;
using operation_ranks_down = operation_down_answered;

#define ROWS_gemm_sm90
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                \
      cumoe_ep_##op##_##X(const __grid_constant__ gemm_sm90_args args, const __grid_constant__ ep_args a)              \
  {                                                                                                                    \
    using factors = of_major<product<X, W, Y, SCALE_##SCALE, operation_ranks_##op>, MAJOR_##MAJOR>;                    \
    if (threadIdx.x == 0) exchange_of_cta() = &a;                                                                      \
    KERNEL_BODY(SMEM, wgmma, wgmma_or_packed<factors, CLUSTER, BM, BN, BK, STAGES, WARPS>)                             \
  }
#include "variants.def"
