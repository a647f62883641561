/* The products of the backward on tensor cores, on every GPU. */
#include "backward/tile.cuh"

#define ROWS_backward_tile
#define BODY_weight_gradient(P, MAJOR) gradient, gradient_shape<P>
#define BODY_rows_product(P, MAJOR)    rows, rows_shape<P, MAJOR>
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ op##_args args)          \
  {                                                                                                                    \
    using tiles = product_shape<X, W, BM, BN, BK, STAGES, WARPS>;                                                      \
    KERNEL_BODY(SMEM, BODY_##op(tiles, MAJOR_##MAJOR))                                                                 \
  }
#include "variants.def"
