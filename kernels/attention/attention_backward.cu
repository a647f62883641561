/* Backward of attention of 16-bit types by tiles. */
#include "attention/backward_tile.cuh"

#define ROWS_attention_backward
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ attention_args a)              \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    tile_##op<X, UNITS, COLUMNS, LANES, (WARPS)*WARP_SIZE, SMEM>(a);                                                 \
  }
#include "variants.def"
