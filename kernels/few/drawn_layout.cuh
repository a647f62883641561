/* drawn: its shape, and what a CTA has in shared memory. */
#ifndef CUMOE_DRAWN_LAYOUT_CUH
#define CUMOE_DRAWN_LAYOUT_CUH

#include "few/layout.cuh"

/* A slice is 16 weight rows by 256 k: an octet of gate and the same of up, or two octets. */
template <class PRODUCT, int TOKENS_, int BK_, int STAGES_, int WARPS> struct drawn_layout {
  using layout = drawn_layout;
  using X = typename PRODUCT::X;
  using W = typename PRODUCT::W;
  using Y = typename PRODUCT::Y;
  static_assert(same_type<X, Y> && operand<W>::BITS == 4, "codes become what activations are");
  static constexpr bool UP = true; /* the table has both */
  static constexpr bool ANSWERS = false;
  static constexpr int TOKENS = TOKENS_, PAIRS = FEW_PAIRS(TOKENS), COLUMNS = 4;
  static constexpr int BK = BK_, STAGES = STAGES_, RUNS = BK / 128, VECTORS = BK / 8; /* of a column: 16 bytes */
  static constexpr int OCTETS = 8; /* of down that have y at a time */
  static constexpr int THREADS = WARPS * WARP_SIZE, EPILOGUE = 0, WRITERS = WARPS; /* all write outputs */
  static_assert(BK == 256 && STAGES == 3 && THREADS >= PAIRS && TOKENS <= WARPS, "drawn_feed.cuh");
};

template <class L> struct drawn_stage {
  uint4 codes[2][L::RUNS][WARP_SIZE]; /* octet, run of 128 k, vectors of 32 k: drawn_vector */
  uint4 columns[L::COLUMNS][L::VECTORS];
};

template <class PRODUCT, int TOKENS, int BK, int STAGES, int WARPS>
struct few_memory<drawn_layout<PRODUCT, TOKENS, BK, STAGES, WARPS>> {
  using L = drawn_layout<PRODUCT, TOKENS, BK, STAGES, WARPS>;
  drawn_stage<L> stages[WARPS][STAGES];
  typename L::Y y[L::PAIRS][L::OCTETS * 8]; /* of the channels at hand */
  uint64_t weights_ready;                   /* the table's `weight` */
  few_range own;                            /* octets of down */
  int32_t drawn;                            /* units of down that warps have taken */
  few_table<L::PAIRS> table;
  gate_scratch scratch[WARPS];
};
template <class S> using drawn_smem = few_memory<typename S::layout>;

/* A vector of an octet's row: ldmatrix reads the same vector of eight rows. */
DEVICE int drawn_vector(int row, int vector)
{
  return row * 4 + (vector ^ (row / 2 & 3));
}
/* A vector of a column: two columns are read at a time. */
DEVICE int drawn_column_vector(int column, int vector)
{
  return vector ^ (column & 1) << 2;
}

/* One of the two products. */
template <class LAYOUT, bool DOWN_> struct drawn_part : LAYOUT {
  static constexpr bool DOWN = DOWN_, ACTIVATED = !DOWN;
};

#endif
