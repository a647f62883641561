/* From logits to rows: the gate and the map. */
#include "route/gate_warp.cuh"
#include "route/map_chunk.cuh"

using map_count_args = map_args;

#define ROWS_route
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ op##_args a)                   \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    op##_##form<UNITS>(a);                                                                                             \
  }
#include "variants.def"
