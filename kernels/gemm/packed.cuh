/*
 * The form wgmma where weights have 4 bits and rows 16: all but the products is that of 16-bit weights
 * (gemm/wgmma.cuh); those are in gemm/packed_tile.cuh. A stage is 128 k: two swizzle lines of a row, 64 bytes of a
 * weight row in the 64-byte swizzle.
 */
#ifndef CUMOE_PACKED_CUH
#define CUMOE_PACKED_CUH

#include "gemm/major.cuh"
#include "gemm/wgmma.cuh"

/* Accumulators and epilogue are those of a product of X. */
template <class P, int CLUSTER, int BM, int BN, int BK_, int STAGES, int WARPS>
struct packed_shape
    : wgmma_shape<
          of_major<product<typename P::X, typename P::X, typename P::Y, SCALE_none, typename P::OPERATION>, MAJOR_K>,
          CLUSTER, BM, BN, WGMMA_BK, STAGES, WARPS> {
  using W = uint8_t;
  using CODE = typename P::W;
  static constexpr bool PACKED = true;
  static constexpr int HELPERS = FACTOR_WARPS;
  static constexpr int BK = BK_, LINE = WGMMA_BK, LINES = BK / LINE, WEIGHT_LINE = BK * operand<CODE>::BITS / 8;
  static constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56;

  /* The host sees to it that rows are in order, or copied on the way. */
  DEVICE static bool gathers(const gemm_args &) { return false; }
  static_assert(WEIGHT_LINE == 64 && BK / 32 == 4, "the swizzle that consumers undo; a vector of factors");
};

/* The same for few rows (gemm/woven_tile.cuh). */
template <class P, int CLUSTER, int BM, int BN, int BK, int STAGES, int WARPS>
struct woven_shape : packed_shape<P, CLUSTER, BM, BN, BK, STAGES, WARPS> {
  static constexpr bool WOVEN = true;
  static constexpr int HELPERS = woven_shape::GATHERED ? 2 : 3; /* they weave; up's other warp copies rows ahead */
};

template <bool FIRST, class A, class B> struct either {
  using type = A;
};
template <class A, class B> struct either<false, A, B> {
  using type = B;
};

template <class P, bool PACKED, int CLUSTER, int BM, int BN, int BK, int STAGES, int WARPS> struct wgmma_shape_of {
  using type = wgmma_shape<P, CLUSTER, BM, BN, BK, STAGES, WARPS>;
};
template <class P, int CLUSTER, int BM, int BN, int BK, int STAGES, int WARPS>
struct wgmma_shape_of<P, true, CLUSTER, BM, BN, BK, STAGES, WARPS> {
  using type = typename either<(BM <= 64), woven_shape<P, CLUSTER, BM, BN, BK, STAGES, WARPS>,
                               packed_shape<P, CLUSTER, BM, BN, BK, STAGES, WARPS>>::type;
};
template <class P, int CLUSTER, int BM, int BN, int BK, int STAGES, int WARPS>
using wgmma_or_packed =
    typename wgmma_shape_of<P, !same_type<typename P::X, typename P::W>, CLUSTER, BM, BN, BK, STAGES, WARPS>::type;

#endif
