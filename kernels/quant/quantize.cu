/* Activations become codes, or fixed point: all rows, dealt to the grid. */
#include "device/fixed_point.cuh"
#include "device/twin_codes.cuh"
#include "quant/quantize.cuh"

template <class X, class Q, int WARPS> DEVICE void quantize_codes(const quantize_args &a)
{
  static_assert(GROUP_LANES * EACH == GROUP, "half a warp a group");
  __shared__ float warp_most[WARPS];
  if (!a.early_inputs) wait_for_earlier_grids_alone();
  let_next_grid_start();
  const row_range rows = {0, (int32_t)token_total(a.rows), blockIdx.x, gridDim.x};
  quantize_range<X, Q, WARPS>(a, rows, warp_most);
  if (a.early_inputs) wait_for_earlier_grids_alone();
}

/* Rows into fixed point: four lanes a slab, which has been read before any of it is stored (codes may be x). */
template <class X, class Q, int WARPS> DEVICE void quantize_fixed(const quantize_args &a)
{
  constexpr int LANES = 4, AT_ONCE = WARPS * WARP_SIZE / LANES;
  wait_for_earlier_grids();
  const int slabs = ceil_div(a.cols, (int)FIXED_GROUP), word = threadIdx.x % LANES;
  const int64_t all = token_total(a.rows) * slabs, step = (int64_t)gridDim.x * AT_ONCE;
  for (int64_t first = (int64_t)blockIdx.x * AT_ONCE; first < all; first += step) {
    const int64_t at = first + threadIdx.x / LANES, row = at / slabs;
    const int slab = (int)(at - row * slabs), k = slab * FIXED_GROUP, bytes = min(a.cols - k, (int)FIXED_GROUP);
    const bool there = at < all;
    const X *from = static_cast<const X *>(a.x) + row * a.x_ld + k + word * EACH;
    char *to = static_cast<char *>(a.codes) + (row * a.codes_ld + k) * 2 + word * 4;
    uint4 v[4];
#pragma unroll
    for (int q = 0; q < 4; q++) v[q] = ld_global(from + q * FIXED_RUN, there && q * FIXED_RUN < bytes);
    const auto put = [&](int plane, int chunk, uint32_t four) {
      if (there && chunk * 16 < bytes) *reinterpret_cast<uint32_t *>(to + plane * bytes + chunk * 16) = four;
    };
    float scale;
    if constexpr (same_type<Q, e4m3>)
      scale = put_twins<1>(v, put);
    else
      scale = put_fixed<X, 1>(v, put);
    if (there && word == 0) a.scale[slab * a.scale_ld + row] = scale;
  }
}

#define ROWS_quantize
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ op##_args a)                   \
  {                                                                                                                    \
    static_assert(COLUMNS == GROUP && UNITS * LANES == WARPS * WARP_SIZE, "whole groups");                             \
    op##_##form<X, Y, WARPS>(a);                                                                                       \
  }
#include "variants.def"
