/* gemv: how the weights of one token are dealt out, evenly to the octet, and who has added up what. */
#ifndef CUMOE_GEMV_LINE_CUH
#define CUMOE_GEMV_LINE_CUH

#include "few/layout.cuh"

/* ---- shape ---- */

constexpr int GEMV_WARPS = 15, GEMV_LANES = GEMV_WARPS * WARP_SIZE; /* that stream */
constexpr int GEMV_ROOM = 8192;                                     /* elements of x or h that lie in shared memory */
constexpr int GEMV_LEAST = 32;                                      /* whole rows of a unit: the least share */

/* Up: gate and up of 16 octets, or 32 octets of the one half. Down: 16, of all experts' k. */
template <bool DOWN> DEVICE constexpr int gemv_places()
{
  return DOWN ? 16 : 32;
}
template <bool DOWN> DEVICE int gemv_octets(const few_args &args)
{
  return !DOWN && args.up.gated ? gemv_places<DOWN>() / 2 : gemv_places<DOWN>();
}

/* ---- the line ---- */

/* Of units, which are a matrix' columns of some octets, row after row. */
struct gemv_place {
  int matrix, block, row;
  DEVICE bool operator==(const gemv_place &o) const { return matrix == o.matrix && block == o.block && row == o.row; }
};

/* All weights of a product: matrix after matrix, unit after unit. It is cut into shares, each of as many octets as the
 * next; a row is of the share that its first octet is of. */
struct gemv_line {
  int rows, octets, step, blocks; /* of a matrix; octets of a row, of a unit's; units side by side */
  int shares;
  uint32_t each, total; /* octets of a matrix, of all */

  DEVICE void set(int matrices, int rows_of_matrix, int octets_of_row, int octets_of_unit)
  {
    rows = rows_of_matrix, octets = octets_of_row, step = octets_of_unit, blocks = ceil_div(octets, step);
    each = rows * octets, total = matrices * each;
    const uint32_t most = max(total / (GEMV_LEAST * step), 1u);
    shares = (int)min(gridDim.x, most);
  }

  DEVICE int width(int block) const { return min(step, octets - block * step); }

  DEVICE gemv_place first_of(int share) const
  {
    if (total == 0) return {0, 0, 0};
    uint32_t at = (uint32_t)((uint64_t)total * min(share, shares) / shares);
    gemv_place p;
    p.matrix = (int)(at / each), at -= p.matrix * each;
    p.block = (int)(at / (rows * step)), at -= p.block * rows * step;
    p.row = ceil_div((int)at, width(p.block));
    if (p.row == rows) p.row = 0, p.block++;
    if (p.block == blocks) p.block = 0, p.matrix++;
    return p;
  }

  DEVICE int share_of(uint32_t octet) const { return (int)(((octet + 1ull) * shares - 1) / total); }
};

/* Whoever has a part of a unit has a slot for its sums: that of unit + share. From `first` on there are `count` of a
 * unit: every share between those of its first and its last row has some of its rows. */
struct gemv_parts {
  int first, count;
};

DEVICE gemv_parts parts_of(const gemv_line &line, int matrix, int block)
{
  if (line.total == 0) return {0, 0};
  const uint32_t first = matrix * line.each + block * line.rows * line.step,
                 last = first + (line.rows - 1) * line.width(block);
  const int share = line.share_of(first);
  return {matrix * line.blocks + block + share, line.share_of(last) - share + 1};
}

/* ---- what a CTA has in shared memory ---- */

template <class PRODUCT, int STAGES_> struct gemv_layout {
  using layout = gemv_layout;
  using X = typename PRODUCT::X;
  using W = typename PRODUCT::W;
  using Y = typename PRODUCT::Y;
  static_assert(same_type<X, W> && same_type<X, Y> && operand<W>::BITS == 16, "multiplied as they are");
  static constexpr bool UP = true; /* the table has both */
  static constexpr int TOKENS = 1, COLUMNS = 1, PAIRS = FEW_PAIRS(1), STAGES = STAGES_;
  static constexpr int ROUTING = GEMV_WARPS, THREADS = GEMV_LANES + WARP_SIZE; /* the last warp routes */
};

template <class PRODUCT, int STAGES> struct few_memory<gemv_layout<PRODUCT, STAGES>> {
  static constexpr int PAIRS = FEW_PAIRS(1);
  uint4 stages[STAGES][GEMV_LANES];  /* a thread's own place in each */
  float4 sums[2][GEMV_LANES];        /* of four of a thread's channels, and of the others */
  float row[GEMV_ROOM + GEMV_LANES]; /* x, or h times its expert's weight */
  gemv_line line[2];                 /* of up, of down */
  gemv_parts parts[GEMV_ROOM / 128 + 2]; /* of units that `row` comes from */
  uint64_t weights_ready;            /* the table's `weight` */
  int32_t share[2], next[2];         /* the CTA's first shares of up and of down; those it has next */
  volatile int32_t drawn[2];         /* all shares have been */
  uint32_t done[FEW_SHARES / 32]; /* a bit a share of down */
  few_table<PAIRS> table;
  gate_scratch scratch[1];
};

/* ---- a walk ---- */

/* Rows of one unit that lie side by side, and a thread's part of them: every `each`th from `first` on, of the octet at
 * `place`. */
struct gemv_run {
  int rows, width, places, each, first, place;
  bool there;
};

template <bool DOWN> struct gemv_walk {
  gemv_place now, end;

  DEVICE gemv_walk(gemv_place first, gemv_place last) : now(first), end(last) {}
  DEVICE gemv_walk(const gemv_line &line, int share) : now(line.first_of(share)), end(line.first_of(share + 1)) {}
  DEVICE bool over() const { return now == end; }

  /* Down: of one expert. */
  DEVICE gemv_run run(const few_args &args, const gemv_line &line) const
  {
    const bool last = now.matrix == end.matrix && now.block == end.block;
    gemv_run r;
    r.rows = min((last ? end.row : line.rows) - now.row, GEMV_ROOM);
    if (DOWN) r.rows = min(r.rows, args.down.k - now.row % args.down.k);
    r.width = line.width(now.block), r.places = !DOWN && args.up.gated ? 2 * r.width : r.width;
    r.each = GEMV_LANES / r.places, r.first = threadIdx.x / r.places, r.place = threadIdx.x - r.first * r.places;
    r.there = r.first < r.each;
    if (!r.there) r.first = 0;
    return r;
  }

  /* True: that was the last of the unit, or of the share. */
  DEVICE bool advance(const gemv_line &line, int rows)
  {
    now.row += rows;
    if (now.row < line.rows) return over();
    now.row = 0;
    if (++now.block == line.blocks) now.block = 0, now.matrix++;
    return true;
  }
};

#endif
