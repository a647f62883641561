/* even: its shape, how weights are dealt out, and what a CTA has in shared memory. */
#ifndef CUMOE_EVEN_LINE_CUH
#define CUMOE_EVEN_LINE_CUH

#include "device/pipeline.cuh"
#include "even.h"
#include "few/layout.cuh"

/* ---- shape ---- */

/* k is dealt out in granules, of as much as one mma takes. A unit has BN channels of h, of a gated layer gate and up
 * beside each other, or 2 BN channels: so many octets has a stage of each k. */
constexpr int EVEN_LEAST = 4; /* granules of a share, at least */

template <class PRODUCT, int TOKENS_, int BN, int BK_, int STAGES_, int WARPS> struct even_layout {
  using layout = even_layout;
  using X = typename PRODUCT::X;
  using W = typename PRODUCT::W;
  using Y = typename PRODUCT::Y;
  static_assert(same_type<X, W> && same_type<X, Y> && operand<W>::BITS == 16, "multiplied as they are");
  static constexpr bool UP = true; /* the table has both */
  static constexpr int TOKENS = TOKENS_, PAIRS = FEW_PAIRS(TOKENS), COLUMNS = TOKENS == 1 ? 1 : (int)FEW_COLUMNS;
  static constexpr int BK = BK_, STAGES = STAGES_, GRANULES = BK / EVEN_GRANULE, OCTETS = BN / 4, BOXES = OCTETS / 8;
  /* Warps: consumers; producers, of which the first copies weights; one that routes; the rest have a part in the gate
   * alone. */
  static constexpr int CONSUMERS = 8, PRODUCERS = 5, ROUTING = CONSUMERS + PRODUCERS, THREADS = WARPS * WARP_SIZE;
  static constexpr int CONSUMER_THREADS = CONSUMERS * WARP_SIZE, PRODUCER_THREADS = PRODUCERS * WARP_SIZE;
  static constexpr int WRITERS = CONSUMER_THREADS + PRODUCER_THREADS; /* threads */
  static constexpr int TILES = OCTETS / 2 / CONSUMERS;      /* of a consumer: two octets each, OCTETS / 2 apart */
  static constexpr int VECTORS = BK / 8, COLUMN = BK + 8;   /* of a stage's column: 16 bytes; elements, with a gap */
  static_assert(WARPS > ROUTING && THREADS >= PAIRS && TILES * 2 * CONSUMERS == OCTETS && BOXES % 2 == 0);
  static_assert(COLUMNS * VECTORS <= WARP_SIZE || COLUMNS * VECTORS % WARP_SIZE == 0);
};

/* ---- the line ---- */

/* Granule `row` of unit `block` of an active expert's matrix. */
struct even_place {
  int active, block, row;
  DEVICE bool operator==(const even_place &o) const { return active == o.active && block == o.block && row == o.row; }
};

/* n / d, n below 2^31 and the quotient below 2^20: a division of integers would be twenty instructions, and these follow
 * one another. */
struct even_divisor {
  int d;
  float inverse;
  DEVICE void set(int divisor) { d = max(divisor, 1), inverse = rcp_approx_ftz((float)d); }
  DEVICE int quotient(int n) const
  {
    int q = (int)((float)n * inverse);
    const int rest = n - q * d;
    if (rest < 0) q--;
    if (rest >= d) q++;
    return q;
  }
};

/*
 * All weights of a product, up or down: expert after expert, of each unit after unit, of a unit row (k) after row. It is
 * cut into shares of equal size, counted in octets of a granule; a granule belongs to the share that its first octet is
 * in.
 */
struct even_line {
  int granules, octets, step, blocks, halves; /* of a matrix; octets of h or y of a row, of a unit; 2: gate and up */
  bool pairs;                                 /* gate and up element by element */
  even_divisor each, whole, wide, narrow, grid; /* a matrix; a whole unit; octets of a unit, and of the last one */

  DEVICE void set(const gemm_args &g, bool gated, int places)
  {
    halves = gated ? 2 : 1, pairs = gated && g.b.n_stride == 2;
    granules = ceil_div(g.k, (int)EVEN_GRANULE), octets = g.n / 8, step = places / halves;
    blocks = ceil_div(octets, step);
    each.set(granules * octets), whole.set(granules * step), wide.set(step), narrow.set(octets - (blocks - 1) * step);
    grid.set(gridDim.x);
  }
  DEVICE int width(int block) const { return block == blocks - 1 ? narrow.d : step; }

  DEVICE even_place at(int octet) const
  {
    even_place p;
    p.active = each.quotient(octet), octet -= p.active * each.d;
    p.block = min(whole.quotient(octet), blocks - 1), octet -= p.block * whole.d;
    const int w = width(p.block);
    p.row = (w == step ? wide : narrow).quotient(octet + w - 1);
    if (p.row == granules) p.row = 0, p.block++;
    if (p.block == blocks) p.block = 0, p.active++;
    return p;
  }
};

/* Shares of so many experts. */
struct even_shares {
  int count, part, more; /* the first `more` have one octet more than `part` */

  DEVICE even_shares(const even_line &line, int experts)
  {
    const int total = experts * line.each.d;
    count = gridDim.x;
    if (total < count * EVEN_LEAST * line.step) {
      count = max(total / (EVEN_LEAST * line.step), 1);
      part = total / count;
    } else {
      part = line.grid.quotient(total);
    }
    more = total - part * count;
  }
  DEVICE int begin(int share) const { return share * part + min(share, more); }
};

/* ---- shared memory ---- */

/* What a stage has, and what is to be done when it is multiplied. */
struct alignas(16) even_run {
  int32_t granules; /* 0: nothing, and nothing more comes */
  int32_t active, octet, width, row;
  int16_t down, last; /* last: the share's part of the unit ends here */
  int16_t share, follows; /* last: this share; others that have a part behind this one; -1: one before has the first */
  int32_t unused;
};

template <class S> struct even_stage {
  typename S::W boxes[S::GRANULES][S::BOXES][EVEN_GRANULE][64]; /* in the 128-byte swizzle */
};

template <class PRODUCT, int TOKENS, int BN, int BK, int STAGES, int WARPS>
struct few_memory<even_layout<PRODUCT, TOKENS, BN, BK, STAGES, WARPS>> {
  using S = even_layout<PRODUCT, TOKENS, BN, BK, STAGES, WARPS>;
  even_stage<S> stages[STAGES];
  typename S::X columns[STAGES][S::COLUMNS][S::COLUMN];
  even_run run[STAGES];
  uint64_t full[STAGES], empty[STAGES];
  uint64_t weights_ready; /* the table's `weight` */
  even_line line[2];      /* of up, of down */
  int32_t share[2];       /* the CTA's first of up and of down */
  int32_t next;           /* its next */
  volatile int32_t drawn[2]; /* none is left */
  few_table<S::PAIRS> table;
  gate_scratch scratch[2]; /* the routing warp's, a producer's */
};
template <class S> using even_smem = few_memory<typename S::layout>;

/* ---- parts ---- */

/* Who has the middle or the end of a unit, which is at most the first of a share, leaves its sums in the share's slot,
 * all ones until then: accumulators as they are, of a tile [tokens in twos][lane / 4]. No sum is all ones: a NaN that is
 * computed has a sign of 0. */
template <class S> struct even_slot {
  uint64_t *at;
  int twos; /* columns two by two; the mma's lanes l % 4 < twos have some */

  DEVICE even_slot(const few_args &args, bool down)
  {
    const int most = (int)min((int64_t)args.map.tokens.count, (int64_t)S::COLUMNS);
    twos = S::COLUMNS == 1 ? 1 : ceil_div(most, 2);
    at = args.protocol.parts + (down ? (int64_t)FEW_SHARES * words() : 0);
  }
  DEVICE static constexpr int each() { return S::COLUMNS == 1 ? 1 : 2; } /* words of a lane */
  DEVICE int words() const { return S::OCTETS / 2 * twos * 8 * each(); }
  DEVICE bool mine() const { return lane_id() % 4 < twos; }
  DEVICE uint64_t *of(int share, int tile) const
  {
    return at + (int64_t)share * words() + ((tile * twos + lane_id() % 4) * 8 + lane_id() / 4) * each();
  }
};

/* ---- lab ---- */
#ifdef EVEN_TRACE
template <class S> DEVICE void stamp(const few_args &args, int i)
{
  const even_slot<S> slot(args, false);
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  slot.at[(int64_t)gridDim.x * slot.words() + blockIdx.x * 13 + i] = t;
}
#define STAMP_FLAG(name) bool name = false;
#define STAMP_ONCE(flag, when, i) if (!flag && (when)) flag = true, stamp<S>(args, i)
#define STAMP(when, i) if (when) stamp<S>(args, i)
#else
#define STAMP(when, i)
#define STAMP_FLAG(name)
#define STAMP_ONCE(flag, when, i)
#endif

#endif
