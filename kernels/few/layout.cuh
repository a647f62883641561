/* few: its shape, and what a CTA has in shared memory. */
#ifndef CUMOE_FEW_LAYOUT_CUH
#define CUMOE_FEW_LAYOUT_CUH

#include "device/pipeline.cuh"
#include "few/codes.cuh"
#include "gemm/product.cuh"
#include "route/gate.cuh"

/* A place in a ring, as pipeline_state, in one register. */
template <int N> struct few_turn {
  static_assert((N & (N - 1)) == 0, "bits of one number");
  uint32_t turn = 0;
  DEVICE void advance() { turn++; }
};
template <int N> DEVICE uint32_t stage_of(const few_turn<N> &at)
{
  return at.turn % N;
}
template <int N> DEVICE uint32_t phase_of(const few_turn<N> &at)
{
  return at.turn / N & 1;
}
template <int N> DEVICE uint32_t stage_of(const pipeline_state<N> &at)
{
  return at.stage;
}
template <int N> DEVICE uint32_t phase_of(const pipeline_state<N> &at)
{
  return at.phase;
}
template <bool ONE, int N> struct few_ring_type {
  using type = pipeline_state<N>;
};
template <int N> struct few_ring_type<true, N> {
  using type = few_turn<N>;
};

template <bool ONE_COLUMN> struct few_part_type {
  using type = float4;
};
template <> struct few_part_type<true> {
  using type = float2;
};

/* An octet is 8 output channels. A tile, what one mma.sync takes, has 16 weight rows: one octet, gate and up, or two
 * octets. A unit is a tile, or, of weights with scales, two; of N-major weights up to four (n_major.cuh). */
template <class PRODUCT, int TOKENS_, int BK_, int STAGES_, int WARPS, bool WHOLE_, bool ANSWERS_> struct few_layout {
  using layout = few_layout;
  static constexpr bool ANSWERS = ANSWERS_; /* outputs go to other ranks (ep/few_answer.cuh) */
  using X = typename PRODUCT::X;            /* what x and h are multiplied as */
  using W = typename PRODUCT::W;
  using Y = typename PRODUCT::Y; /* of x, h and y in memory */
  static constexpr bool SCALED = PRODUCT::SCALED, N_MAJOR = PRODUCT::N_MAJOR;
  static constexpr int BITS = operand<W>::BITS;
  /* Activations are in fixed point (fixed.cuh); WHOLE: a scale for 128 k or more. */
  static constexpr bool WHOLE = WHOLE_, FIXED = WHOLE || same_type<W, u4> || same_type<W, mx4>;
  static constexpr int NOTHING = WHOLE ? 9 : 4;                   /* vectors of zeros */
  using CODE = typename few_code_of<X, W, Y, FIXED, WHOLE>::type; /* where SCALED */
  static_assert(SCALED ? TOKENS_ == 1 : same_type<X, W> && same_type<X, Y> && BITS == 16,
                "arranged rows are one token's; mma.sync takes both as they are");
  static constexpr int TOKENS = TOKENS_, PAIRS = FEW_PAIRS(TOKENS);                  /* at most */
  static constexpr int BK = BK_, STAGES = STAGES_, TILES = N_MAJOR ? 4 : SCALED + 1; /* at most */
  static constexpr int ROWS = N_MAJOR ? 32 : 16 * TILES, OCTETS = ROWS / 8;          /* of a unit of down */
  static constexpr int WEIGHTS = ROWS * BK;                                          /* elements of a stage */
  static constexpr int COLUMNS = TOKENS == 1 ? 1 : (int)FEW_COLUMNS,
                       COLUMN_K = N_MAJOR ? BK : 2 * BK; /* of a stage, at most */
  /* Roles of warps: consumers, then one epilogue warp, one routing warp, and helpers: for several tokens they have a
   * part in the gate and in the outputs; where SCALED they arrange h. All that are not consumers write outputs. */
  static constexpr int HELPERS = SCALED        ? 2
                                 : TOKENS == 1 ? 0
                                               : 6,
                       CONSUMERS = WARPS - 2 - HELPERS, EPILOGUE = CONSUMERS, ROUTING = EPILOGUE + 1,
                       WRITERS = WARPS - EPILOGUE;
  static constexpr int THREADS = WARPS * WARP_SIZE, BUFFERS = SCALED ? 4 : N_MAJOR ? 2 : 3;
  using RING = typename few_ring_type<SCALED, BUFFERS>::type;       /* of `partial` */
  static constexpr int GROUPS = BK / 32, VECTORS = BK * BITS / 128; /* of a weight row: 32 k, 16 bytes */
  static constexpr int COPY_ROWS = WARP_SIZE / VECTORS, COPIES = ROWS / COPY_ROWS;
  /* Of the sums of a tile, what a lane has, and lanes that have some: of one column two rows. */
  using PART = typename few_part_type<SCALED>::type;
  static constexpr int HOLDERS = SCALED ? 8 : WARP_SIZE;
  static constexpr int NEEDED_BK = N_MAJOR ? 64 : SCALED ? 1024 / BITS : 128;
  static_assert(BK == NEEDED_BK && THREADS >= PAIRS && PAIRS % WARP_SIZE == 0 && PAIRS <= 256, "loads.cuh, few_column");
};

/* One of the two products. */
template <class LAYOUT, class OPERATION_> struct few_part : LAYOUT {
  using OPERATION = OPERATION_;
  static constexpr bool UP = same_type<OPERATION, operation_up>; /* which one */
  /* Has slices of 8 rows, too. */
  static constexpr bool WIDE = !LAYOUT::SCALED && !LAYOUT::N_MAJOR && OPERATION::HALVES == 1;
  static constexpr int UNIT = LAYOUT::N_MAJOR && UP ? 8 : LAYOUT::OCTETS; /* octets of weight rows, at most */
  static constexpr int SLICE_K = LAYOUT::N_MAJOR ? LAYOUT::WEIGHTS / 8 / UNIT : LAYOUT::BK;
  static constexpr int TILES = LAYOUT::N_MAJOR ? UNIT / 2 : LAYOUT::TILES;
  static constexpr int SUMS = LAYOUT::N_MAJOR ? TILES : 2; /* of a warp: of tiles, or two of one */
  static constexpr bool GATHERED = OPERATION::SOURCE == SOURCE_gathered;
  static constexpr bool ACTIVATED = OPERATION::EPILOGUE == EPILOGUE_activation;

  DEVICE static bool gated(const gemm_args &args) { return OPERATION::HALVES == 2 && args.gated; }
};

template <class PRODUCT, int TOKENS, int BK, int STAGES, int WARPS, bool WHOLE, bool ANSWERS = false>
using few_shape = few_part<few_layout<PRODUCT, TOKENS, BK, STAGES, WARPS, WHOLE, ANSWERS>, typename PRODUCT::OPERATION>;

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
DEVICE int column_pair(few_column column)
{
  return column & 255;
}
DEVICE int column_token(few_column column)
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
  int16_t id[PAIRS];                                 /* likewise: what the gate chose, -1: nothing */
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
template <class S, bool SCALED = S::SCALED> struct few_stage_of {
  typename S::W weights[S::WEIGHTS];
  typename S::X columns[S::COLUMNS][S::COLUMN_K];
};
template <class S> struct few_stage_of<S, true> {      /* each lane's own vectors */
  uint4 codes[S::TILES][2][S::VECTORS / 4][WARP_SIZE]; /* tile, octet, run of 4 vectors */
};
template <class S> using few_stage = few_stage_of<typename S::layout>;

/* Where SCALED: rows of activations as they are multiplied (arrange.cuh). */
template <class S, bool SCALED = S::SCALED> struct few_scaled_memory {
};
template <class S> struct few_scaled_memory<S, true> {
  uint4 room[FEW_ROOM / 16]; /* x, then h of each active expert */
  uint4 zeros[S::NOTHING];
  /* Of h of an active expert: that it is arranged, and measured; chunks that a warp has taken; its largest size. */
  uint64_t arranged[S::PAIRS], measured[S::PAIRS];
  int32_t taken[S::PAIRS];
  uint32_t largest[S::PAIRS];
};

template <class S> struct few_memory : few_scaled_memory<S> {
  few_stage_of<S> stages[S::CONSUMERS][S::STAGES];
  typename S::PART partial[S::BUFFERS][S::CONSUMERS][S::TILES]
                          [S::HOLDERS]; /* accumulators as they are, of some units in turn */
  typename S::Y y[S::PAIRS][S::ROWS];   /* of the channels at hand */
  uint64_t partial_full[S::BUFFERS], partial_empty[S::BUFFERS];
  uint64_t weights_ready; /* the table's `weight` */
  uint64_t y_full, y_empty;
  uint64_t share_ready; /* share[1] */
  int32_t share[2];     /* of up: the CTA's first; its next (schedule.cuh) */
  few_range own;        /* octets of down */
  few_table<S::PAIRS> table;
};
template <class S> using few_smem = few_memory<typename S::layout>;

#endif
