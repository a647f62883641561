/* Rows of softmax and norms that a cluster of CTAS holds. */
#include "ops/rows.cuh"

#define ROWS_ops_sm90
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ op##_args a)                   \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    static_assert(LANES == CLUSTER * (WARPS)*WARP_SIZE, "a row has the cluster's threads");                            \
    form_##form<X, UNITS, COLUMNS, LANES, AHEAD, (WARPS)*WARP_SIZE, SMEM>(a);                                          \
  }
#include "variants.def"
