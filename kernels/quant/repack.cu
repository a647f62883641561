/* Weights moved to where kernels read them (kernels/repack.h): a thread makes 16 bytes of codes of a channel, and its
 * neighbours those of the next channels, which lie side by side in GPTQ's and AWQ's words. */
#include "device/common.cuh"
#include "device/ptx.cuh"
#include "repack.h"

DEVICE void repack_blocks(const repack_args &a)
{
  wait_for_earlier_grids();
  const int64_t unit = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= (int64_t)a.experts * a.out * (a.in / REPACK_CELL(&a))) return;
  const repack_unit u = repack_unit_of(&a, unit);
  const int each = 32 / a.bits;
  uint4 codes;
  codes.x = repack_word(&a, u, u.k);
  codes.y = repack_word(&a, u, u.k + each);
  codes.z = repack_word(&a, u, u.k + 2 * each);
  codes.w = repack_word(&a, u, u.k + 3 * each);
  *reinterpret_cast<uint4 *>(a.to + u.e * a.to_stride + ((int64_t)u.n * a.in + u.k) * a.bits / 8) = codes;
  repack_groups(&a, u);
}

#define ROWS_repack
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ repack_args a)                 \
  {                                                                                                                    \
    static_assert(UNITS == WARPS * WARP_SIZE, "a thread a unit");                                                      \
    op##_##form(a);                                                                                                    \
  }
#include "variants.def"
