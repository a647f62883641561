/* Backward of attention by clusters. */
#include "attention/backward_split.cuh"

#define ROWS_attention_backward_sm90
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ attention_args a)              \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    form##_##op<X, UNITS, COLUMNS, LANES, (WARPS)*WARP_SIZE, CLUSTER, SMEM>(a);                                        \
  }
#include "variants.def"
