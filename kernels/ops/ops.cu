/*
 * Elementwise operations, softmax and norms. All are bound by memory: a thread has four 16-byte loads in flight (add
 * and mul: eight), and a row that fits into the registers of its CTA is read once.
 *
 * Which thread holds which element depends on the shape alone: where 16-byte accesses are not possible, the same
 * elements move one by one, and the bits of the result stay what they are.
 */
#include "ops/flat.cuh"
#include "ops/rows.cuh"

#define ROWS_ops
#define UNTILED(op, arch, file, form, X, Y, UNITS, COLUMNS, LANES, AHEAD, CLUSTER, WARPS, CTAS, SMEM)                  \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      UNTILED_NAME(op, arch, form, X, Y, UNITS, COLUMNS, LANES)(const __grid_constant__ op##_args a)                   \
  {                                                                                                                    \
    wait_for_earlier_grids();                                                                                          \
    form_##form<X, UNITS, COLUMNS, LANES, AHEAD, (WARPS)*WARP_SIZE, SMEM>(a);                                          \
  }
#include "variants.def"
