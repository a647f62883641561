/* The router on sm_90a. */
#include "route/router_wgmma.cuh"

#define ROWS_router_sm90
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ router_sm90_args args)   \
          KERNEL_BODY(SMEM, router, router_shape<X, CLUSTER, BM, BN, BK, STAGES, WARPS>)
#include "variants.def"
