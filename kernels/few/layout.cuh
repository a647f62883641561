/* few: its shape, and what a CTA has in shared memory. */
#ifndef CUMOE_FEW_LAYOUT_CUH
#define CUMOE_FEW_LAYOUT_CUH

#include "device/pipeline.cuh"
#include "gemm/product.cuh"
#include "route/gate.cuh"

/* An octet is 8 output channels. A unit has 16 weight rows: one octet, gate and up, or two octets. */
template <class PRODUCT, int TOKENS_, int BK_, int STAGES_, int WARPS> struct few_layout {
  using layout = few_layout;
  using X = typename PRODUCT::X; /* x and h */
  using W = typename PRODUCT::W;
  using Y = typename PRODUCT::Y; /* h and y */
  static_assert(same_type<X, W> && same_type<X, Y> && operand<W>::BITS == 16, "mma.sync takes both as they are");
  static constexpr int TOKENS = TOKENS_, PAIRS = FEW_PAIRS(TOKENS);                                   /* at most */
  static constexpr int BK = BK_, STAGES = STAGES_, ROWS = 16, OCTETS = ROWS / 8, WEIGHTS = ROWS * BK; /* elements */
  static constexpr int COLUMNS = TOKENS == 1 ? 1 : (int)FEW_COLUMNS, COLUMN_K = 2 * BK; /* of a stage, at most */
  /* Roles of warps: consumers, then one epilogue warp, one routing warp, and, for several tokens, helpers that have a
   * part in the gate and in the outputs. All that are not consumers write outputs. */
  static constexpr int HELPERS = TOKENS > 1 ? 6 : 0, CONSUMERS = WARPS - 2 - HELPERS, EPILOGUE = CONSUMERS,
                       ROUTING = EPILOGUE + 1, WRITERS = WARPS - EPILOGUE;
  static constexpr int THREADS = WARPS * WARP_SIZE, BUFFERS = 3;
  static constexpr int GROUPS = BK / 32, VECTORS = BK / 8; /* of a weight row: 32 k, 16 bytes */
  static constexpr int COPY_ROWS = WARP_SIZE / VECTORS, COPIES = ROWS / COPY_ROWS;
  static_assert(BK == 128 && THREADS >= PAIRS && PAIRS % WARP_SIZE == 0 && PAIRS <= 256, "loads.cuh, few_column");
};

/* One of the two products. */
template <class LAYOUT, class OPERATION_> struct few_part : LAYOUT {
  using OPERATION = OPERATION_;
  static constexpr bool UP = same_type<OPERATION, operation_up>; /* which one */
  static constexpr bool WIDE = OPERATION::HALVES == 1;           /* has slices of 8 rows, too */
  static constexpr bool GATHERED = OPERATION::SOURCE == SOURCE_gathered;
  static constexpr bool ACTIVATED = OPERATION::EPILOGUE == EPILOGUE_activation;

  DEVICE static bool gated(const gemm_args &args) { return OPERATION::HALVES == 2 && args.gated; }
};

template <class PRODUCT, int TOKENS, int BK, int STAGES, int WARPS>
using few_shape = few_part<few_layout<PRODUCT, TOKENS, BK, STAGES, WARPS>, typename PRODUCT::OPERATION>;

template <class S> DEVICE const gemm_args &gemm_of(const few_args &args)
{
  return S::UP ? args.up : args.down;
}

/* A pair, which is its row of h, and its token; negative: none. A column of the mma's token operand. */
using few_column = int16_t;
DEVICE few_column few_column_of(int pair, int token)
{
  return (few_column)(token << 8 | pair);
}
DEVICE int pair_of(few_column column)
{
  return column & 255;
}
DEVICE int token_of(few_column column)
{
  return column >> 8;
}

/* An active expert's weights: gate and up, or the only half twice. */
struct few_halves {
  const void *low, *high;
};

/* Which pairs are multiplied together (table.cuh). An active expert stands for up to FEW_COLUMNS of its pairs: one with
 * more is there again, and its weights are read again. In the order of their first pairs. */
template <int PAIRS> struct few_table {
  int32_t to[PAIRS];                                 /* of each pair: local expert, ROW_DROPPED or ROW_IDENTITY */
  alignas(16) few_column column[PAIRS][FEW_COLUMNS]; /* of an active expert */
  alignas(16) few_halves weights[PAIRS];             /* of an active expert, up's */
  const void *down[PAIRS];                           /* of an active expert, down's weights */
  int16_t expert[PAIRS];                             /* likewise */
  float weight[PAIRS];                               /* of a pair's y in its token's sum; 0: it has none */
  uint32_t first[PAIRS / WARP_SIZE];                 /* a bit a pair: the first of an active expert */
};

struct few_range {
  int first, count;
};

/* A slice of weights, and the same k of its expert's tokens: zeros where there are fewer. */
template <class S> struct few_stage_of {
  typename S::W weights[S::WEIGHTS];
  typename S::X columns[S::COLUMNS][S::COLUMN_K];
};
template <class S> using few_stage = few_stage_of<typename S::layout>;

template <class S> struct few_memory {
  few_stage_of<S> stages[S::CONSUMERS][S::STAGES];
  float4 partial[S::BUFFERS][S::CONSUMERS][WARP_SIZE]; /* accumulators as they are, of some units in turn */
  typename S::Y y[S::PAIRS][S::ROWS];                  /* of the channels at hand */
  uint64_t partial_full[S::BUFFERS], partial_empty[S::BUFFERS];
  uint64_t weights_ready; /* the table's `weight` */
  uint64_t y_full, y_empty;
  uint64_t share_ready; /* share[1] */
  int32_t share[2];     /* of up: the CTA's first; its next (schedule.cuh) */
  few_range own;        /* octets of down */
  few_table<S::PAIRS> table;
  gate_scratch scratch[2]; /* the routing warp's, the epilogue warp's */
};
template <class S> using few_smem = few_memory<typename S::layout>;

#endif
