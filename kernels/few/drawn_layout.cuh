/* drawn: its shape, and what a CTA has in shared memory. */
#ifndef CUMOE_DRAWN_LAYOUT_CUH
#define CUMOE_DRAWN_LAYOUT_CUH

#include "few/layout.cuh"

template <class PRODUCT, bool BYTES> struct drawn_code_of {
  using type = few_fixed_code<typename PRODUCT::W, same_type<typename PRODUCT::W, u4>>;
};
template <class PRODUCT> struct drawn_code_of<PRODUCT, true> {
  using type = few_code<typename PRODUCT::X, typename PRODUCT::W, typename PRODUCT::Y>;
};

/* A slice is BN weight rows by 256 k. A tile of 16 rows is an octet of gate and the same of up, or two octets. */
template <class PRODUCT, int TOKENS_, int BN, int BK_, int STAGES_, int WARPS> struct drawn_layout {
  using layout = drawn_layout;
  using X = typename PRODUCT::X; /* what x and h are multiplied as */
  using W = typename PRODUCT::W;
  using Y = typename PRODUCT::Y; /* of x, h and y in memory */
  static constexpr int BITS = operand<W>::BITS;
  static constexpr bool BYTES = BITS == 8;
  using CODE = typename drawn_code_of<PRODUCT, BYTES>::type;
  static_assert(BYTES || same_type<X, Y>, "activations as codes, or in fixed point");
  static constexpr bool UP = true; /* the table has both */
  static constexpr bool ANSWERS = false;
  static constexpr int TOKENS = TOKENS_, PAIRS = FEW_PAIRS(TOKENS);
  static constexpr int COLUMNS = 4; /* of the mma's eight: upper and lower bytes of each, or each twice */
  static constexpr int TILES = BN / 16, BK = BK_, STAGES = STAGES_, RUNS = BK / 128, VECTORS = BK / 8;
  static constexpr int LINES = BK * BITS / 512;    /* 64 bytes of a row */
  static constexpr int SUMS = BYTES ? 2048 : 4096; /* of down at a time */
  /* Of up: parts of k of a unit; draws that a CTA knows; units whose parts are awaited. */
  static constexpr int PARTS = 4, TICKETS = 16, AWAITED = BYTES ? 5 : 12;
  static constexpr int LEAST = BYTES ? 3 : 1; /* slices of a part: what comes with a part is as long as one or two */
  static constexpr int THREADS = WARPS * WARP_SIZE, EPILOGUE = 0, WRITERS = WARPS; /* all write outputs */
  static_assert(WARPS <= TICKETS - 2, "of up's end each takes one item that nobody reads again");
  static_assert(BK == 256 && THREADS >= PAIRS && TOKENS <= 32 && SUMS >= PAIRS * 16, "drawn_feed.cuh");
};

template <class L> struct alignas(128) drawn_stage {
  uint4 codes[L::TILES][2][L::LINES][WARP_SIZE]; /* tile, octet, 64 bytes of a row, vectors: drawn_vector */
  uint4 columns[L::COLUMNS][L::VECTORS]; /* eight elements: as they are in memory, then as they are multiplied */
};

/* y of the channels at hand, in sums of parts of k. */
template <class L> struct drawn_y {
  using Y = typename L::Y;
  float sums[L::SUMS];
  int32_t octets, each, parts; /* channels of a pair; slices of a part; parts of a unit */
  int32_t part;                /* sums of a part of all units */

  struct of_pair {
    const drawn_y &y;
    const float *first;
    DEVICE Y operator[](int local) const
    {
      float sum = first[local];
      for (int p = 1; p < y.parts; p++) sum += first[p * y.part + local];
      return from_f32<Y>(sum);
    }
  };
  DEVICE of_pair operator[](int pair) const { return {*this, sums + pair * octets * 8}; }

  /* So that each warp has two units, parts of at least three slices, of one token of any: there a warp has few, and
   * the longest way through them is what counts. They do not depend on which experts are active. */
  DEVICE void cut(int k, int own, int pairs, int experts, bool one)
  {
    octets = pairs * 64 <= (int)L::SUMS ? 8 : pairs * 32 <= (int)L::SUMS ? 4 : 2, part = pairs * octets * 8;
    const int slices = ceil_div(k, (int)L::BK),
              units = min(pairs, experts) * ceil_div(max(min(own, octets), 1), 2 * L::TILES),
              most = max(min(one ? slices : slices / 3, (int)L::SUMS / part), 1);
    each = ceil_div(slices, min(ceil_div(2 * L::THREADS / WARP_SIZE, units), most));
    parts = ceil_div(slices, each);
  }
};

/* Units of up that the CTA has, one after the other, and of those at hand what warps have of their parts. */
template <class L> struct drawn_line {
  int32_t items, parts, each;                  /* taken by warps; parts of a unit, slices of a part */
  int32_t twice;                               /* 1: the CTA draws two units at once. Of one token it has three or so */
  int2 ticket[L::TICKETS];                     /* which draw, and what was drawn */
  int32_t read[L::TICKETS];                    /* by how many items, of all draws that had the place */
  int32_t count[L::AWAITED], turn[L::AWAITED]; /* parts that are there; units that had the place before */
  float2 sums[L::AWAITED][L::PARTS][L::TILES][WARP_SIZE];

  DEVICE void cut(int k, bool one)
  {
    const int slices = ceil_div(k, (int)L::BK);
    each = slices >= L::PARTS ? max(ceil_div(slices, (int)L::PARTS), (int)L::LEAST) : slices;
    parts = ceil_div(slices, each), items = 0, twice = !one;
  }
};

/* Where a row of x or h may have one scale: its largest size, of x by token, of h by pair; of an active expert's h,
 * chunks that a warp has taken, and those of which the largest is known (drawn_bytes.cuh). */
template <class L, bool QUANTISES = L::CODE::QUANTISES> struct drawn_rows {
};
template <class L> struct drawn_rows<L, true> {
  uint32_t of_x[L::TOKENS], of_h[L::PAIRS];
  int32_t taken[L::PAIRS], measured[L::PAIRS];
};

template <class PRODUCT, int TOKENS, int BN, int BK, int STAGES, int WARPS>
struct few_memory<drawn_layout<PRODUCT, TOKENS, BN, BK, STAGES, WARPS>> {
  using L = drawn_layout<PRODUCT, TOKENS, BN, BK, STAGES, WARPS>;
  drawn_stage<L> stages[WARPS][STAGES];
  float worth[WARPS][L::COLUMNS][L::RUNS]; /* of a multiple, in the slice at hand */
  drawn_y<L> y;
  drawn_line<L> line;
  drawn_rows<L> rows;
  uint64_t weights_ready; /* the table's `weight` */
  few_range own;          /* octets of down */
  int32_t drawn;          /* units of down that warps have taken */
  few_table<L::PAIRS> table;
  uint4 zeros[1];
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
