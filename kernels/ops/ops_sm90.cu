/* Rows of softmax and norms that a cluster of CTAS holds. */
#include "ops/rows.cuh"

#define ROWS_ops_sm90
#define VARIANT(op, arch, file, form, in, w, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                                    \
  extern "C" __global__ void __cluster_dims__((BK) / ((WARPS)*WARP_SIZE), 1, 1)                                        \
      __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                                       \
          VARIANT_NAME(op, arch, form, in, w, BM, BN, BK)(const __grid_constant__ op##_args a)                         \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    form_##form<in, BM, BN, BK, STAGES, (WARPS)*WARP_SIZE, SMEM>(a);                                                   \
  }
#include "variants.def"
