/* Expands a file's rows of variants.def into grouped-GEMM kernels; the file defines ROWS_<file> first. */
#include "gemm/fma.cuh"
#include "gemm/thin.cuh"
#include "gemm/tile.cuh"

constexpr bool IS_up = true, IS_down = false;

#define GEMM_tile(X, up, BM, BN, BK, STAGES, WARPS)  tile, tile_shape<X, up, false, BM, BN, BK, STAGES, WARPS>
#define GEMM_ntile(X, up, BM, BN, BK, STAGES, WARPS) tile, tile_shape<X, up, true, BM, BN, BK, STAGES, WARPS>
#define GEMM_thin(X, up, BM, BN, BK, STAGES, WARPS)  thin, thin_shape<X, up, BM, BN, BK, WARPS>
#define GEMM_fma(X, up, BM, BN, BK, STAGES, WARPS)   fma, fma_shape<up, BM, BN, BK, WARPS>

#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ gemm_args args)          \
          KERNEL_BODY(SMEM, GEMM_##form(X, IS_##op, BM, BN, BK, STAGES, WARPS))
#include "variants.def"
