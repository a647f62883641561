/* The router: logits = x w^T + bias, f32. */
#include "route/router_dot.cuh"
#include "route/router_fma.cuh"
#include "route/router_tile.cuh"

template <class A, class B> constexpr bool same_type = false;
template <class A> constexpr bool same_type<A, A> = true;

template <class X, class W, int BM, int BN, int BK, int STAGES, int WARPS> DEVICE void router_tile(const router_args &a)
{
  if constexpr (same_type<X, W> && sizeof(X) == 2)
    router_mma<X, router_tile_shape<BM, BN, BK, STAGES, WARPS>>(a);
  else
    router_fma<X, W, BM, BN, BK>(a);
}

#define ROWS_router
#define VARIANT(op, arch, file, form, in, w, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)                                    \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      VARIANT_NAME(op, arch, form, in, w, BM, BN, BK)(const __grid_constant__ op##_args a)                             \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    fill_with_ones(a);                                                                                                 \
    op##_##form<in, w, BM, BN, BK, STAGES, WARPS>(a);                                                                  \
  }
#include "variants.def"
