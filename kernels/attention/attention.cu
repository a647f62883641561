/* Attention of 16-bit types by tiles. */
#include "attention/tile.cuh"

#define ROWS_attention
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ attention_args a)              \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    form_##form<X, UNITS, COLUMNS, LANES, (WARPS)*WARP_SIZE, CLUSTER, SMEM>(a);                                        \
  }
#include "variants.def"
