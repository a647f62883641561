/* From logits to rows: the gate and the map. */
#include "route/gate_warp.cuh"
#include "route/map_chunk.cuh"

using map_count_args = map_args;

#define ROWS_route
#define VARIANT(op, arch, file, form, in, w, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                                    \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      VARIANT_NAME(op, arch, form, in, w, BM, BN, BK)(const __grid_constant__ op##_args a)                             \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    op##_##form<BM>(a);                                                                                                \
  }
#include "variants.def"
