/* Expands a file's rows of variants.def into grouped-GEMM kernels; the file defines ROWS_<file> first. */
#include "gemm/fma.cuh"
#include "gemm/thin.cuh"
#include "gemm/tile.cuh"
#include "gemm/unpack.cuh"

#define GEMM_tile(P, MAJOR, BM, BN, BK, STAGES, WARPS)   tile, tile_shape<P, MAJOR, BM, BN, BK, STAGES, WARPS>
#define GEMM_ntile(P, MAJOR, BM, BN, BK, STAGES, WARPS)  tile, tile_shape<P, MAJOR, BM, BN, BK, STAGES, WARPS>
#define GEMM_unpack(P, MAJOR, BM, BN, BK, STAGES, WARPS) unpack, unpack_shape<P, BM, BN, BK, STAGES, WARPS>
#define GEMM_thin(P, MAJOR, BM, BN, BK, STAGES, WARPS)   thin, thin_shape<P, BM, BN, BK, WARPS>
#define GEMM_fma(P, MAJOR, BM, BN, BK, STAGES, WARPS)    fma, fma_shape<P, BM, BN, BK, WARPS>

using x = void; /* a type at run time */
#define VARIANT(op, arch, file, form, X, W, Y, SCALE, MAJOR, CLUSTER, BM, BN, BK, STAGES, WARPS, CTAS, SMEM)           \
  extern "C" __global__ void __launch_bounds__((WARPS)*WARP_SIZE, CTAS)                                                \
      VARIANT_NAME(op, arch, form, X, W, Y, SCALE, MAJOR, BM, BN, BK)(const __grid_constant__ gemm_args args)          \
  {                                                                                                                    \
    using factors = product<X, W, Y, SCALE_##SCALE, operation_##op>;                                                   \
    KERNEL_BODY(SMEM, GEMM_##form(factors, MAJOR_##MAJOR, BM, BN, BK, STAGES, WARPS))                                  \
  }
#include "variants.def"
