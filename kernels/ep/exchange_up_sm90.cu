/* On sm_90a, beside the exchange that brings its rows: up of a rank's experts, of the rows of gemm_sm90, bf16 and f16;
 * and what sends those rows. */
#include "ep/arriving.cuh"
#include "ep/rows.cuh"

extern "C" __global__ void __launch_bounds__(EP_ROW_THREADS, 1) cumoe_ep_rows(const __grid_constant__ ep_args a)
{
  extern __shared__ uint4 memory[];
  send_rows(a, *reinterpret_cast<rows_smem *>(memory));
}

#define ARRIVES_up(X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                              \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                \
      cumoe_ep_up_##X(const __grid_constant__ gemm_sm90_args args, const __grid_constant__ ep_args a)                  \
  {                                                                                                                    \
    using factors = of_major<product<X, W, Y, SCALE_##SCALE, operation_up_arriving>, MAJOR_##MAJOR>;                   \
    if (threadIdx.x == 0) exchange_of_cta() = &a;                                                                      \
    KERNEL_BODY(SMEM, wgmma, wgmma_shape<factors, CLUSTER, BM, BN, BK, STAGES, WARPS>)                                 \
  }
#define ARRIVES_down(...)

#define ROWS_gemm_sm90
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  ARRIVES_##op(X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)
#include "variants.def"
