/* A rank's experts of few tokens on sm_90a, whose outputs go to the tokens' ranks: few_up's row of 32 tokens, bf16 and
 * f16, where that does all. */
#include "ep/few_answer.cuh"
#include "gemm/major.cuh"

using operation_few_up = operation_up;

#define ANSWERS_few_up_32(X, W, Y, SCALE, MAJOR, BM, BK, STAGES, WARPS, CTAS, SMEM)                                    \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      cumoe_ep_few_##X(const __grid_constant__ few_args args, const __grid_constant__ ep_args a)                       \
  {                                                                                                                    \
    using factors = of_major<product<X, W, Y, SCALE_##SCALE, operation_few_up>, MAJOR_##MAJOR>;                        \
    if (threadIdx.x == 0) exchange_of_cta() = &a;                                                                      \
    KERNEL_BODY(SMEM, few, few_shape<factors, BM, BK, STAGES, WARPS, false, true>)                                     \
  }
#define ANSWERS_few_up_1(...)
#define ANSWERS_few_down_1(...)
#define ANSWERS_few_down_32(...)

#define ROWS_few_sm90
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  ANSWERS_##op##_##BM(X, W, Y, SCALE, MAJOR, BM, BK, STAGES, WARPS, CTAS, SMEM)
#include "variants.def"
