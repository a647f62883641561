/* The router: logits = x w^T + bias, f32. */
#include "route/router_dot.cuh"
#include "route/router_fma.cuh"
#include "route/router_tile.cuh"

template <class X, class W, int BM, int BN, int BK, int STAGES, int WARPS, int SMEM>
DEVICE void router_tile(const router_args &a)
{
  if constexpr (same_type<X, W> && sizeof(X) == 2) {
    using shape = router_tile_shape<BM, BN, BK, STAGES, WARPS>;
    static_assert(exact_smem<STAGES * shape::STAGE_BYTES, SMEM>::OK);
    router_mma<X, shape>(a);
  } else {
    static_assert(SMEM == 0, "nothing in dynamic shared memory");
    router_fma<X, W, BM, BN, BK>(a);
  }
}

#define ROWS_router
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ op##_args a)             \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    fill_with_ones(a);                                                                                                 \
    op##_##form<X, W, BM, BN, BK, STAGES, WARPS, SMEM>(a);                                                             \
  }
#include "variants.def"
