/* Counts of what is odd about weights (kernels/scan.h): a warp a channel; what it found, it adds to the report. */
#include "device/common.cuh"
#include "device/ptx.cuh"
#include "scan.h"

DEVICE void scan_blocks(const scan_args &a)
{
  wait_for_earlier_grids();
  const int64_t unit = (int64_t)blockIdx.x * (blockDim.x / WARP_SIZE) + warp_id();
  if (unit >= (int64_t)a.experts * a.halves * a.n) return;
  const scan_place p = scan_unit(&a, unit);
  scan_counts c = {};
  scan_channel(&a, p, lane_id(), WARP_SIZE, &c);
  unsigned long long *report = reinterpret_cast<unsigned long long *>(a.report + p.e * a.report_ld);
#pragma unroll
  for (int i = 0; i < SCAN_FIELDS; i++) {
    const uint32_t found = i == SCAN_LARGEST ? warp_max(c.field[i]) : warp_sum(c.field[i]);
    if (lane_id() != 0 || found == 0) continue;
    if (i == SCAN_LARGEST)
      atomicMax(report + i, (unsigned long long)found);
    else
      atomicAdd(report + i, (unsigned long long)found);
  }
}

#define ROWS_scan
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__(WARPS *WARP_SIZE, CTAS)                                                 \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ scan_args a)                   \
  {                                                                                                                    \
    static_assert(UNITS == WARPS && LANES == WARP_SIZE, "a warp a channel");                                           \
    op##_##form(a);                                                                                                    \
  }
#include "variants.def"
