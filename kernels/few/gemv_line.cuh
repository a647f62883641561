/* gemv: how the weights of one token are dealt out, evenly to 16 bytes, and who has added up what. */
#ifndef CUMOE_GEMV_LINE_CUH
#define CUMOE_GEMV_LINE_CUH

#include "few/layout.cuh"

/* ---- shape ---- */

constexpr int GEMV_WARPS = 15, GEMV_LANES = GEMV_WARPS * WARP_SIZE; /* that stream */
constexpr int GEMV_PLACES = GEMV_SLOT / 8;                          /* octets that a unit has of each k, at most */
/* Elements of x, and of h, that lie in shared memory at once. Of h few: while they are waited for nothing is multiplied,
 * and the ring has to last. */
constexpr int GEMV_ROOM_X = 8 * GEMV_LANES, GEMV_ROOM_H = 2 * GEMV_LANES;
constexpr int GEMV_LEAST = 32;                          /* rows of a whole unit: the least share */
constexpr int GEMV_HALF = (GEMV_LANES + WARP_SIZE) / 2; /* threads that deal out one of the products */
static_assert(GEMV_HALF > FEW_SHARES && GEMV_LANES >= 4 * GEMV_PLACES, "set_lines, store_sums");

/* n / d, for n below 2^21 and n / d below 2^10: a division of integers would be twenty instructions. */
DEVICE int gemv_quotient(int n, int d)
{
  return (int)(((float)n + .5f) * rcp_approx_ftz((float)d));
}

/* ---- the line ---- */

/* Row `row` of unit `block` of an active expert's matrix. */
struct gemv_place {
  int active, block, row;
  DEVICE bool operator==(const gemv_place &o) const { return active == o.active && block == o.block && row == o.row; }
};

/*
 * All weights of a product, up or down: expert after expert, of each unit after unit, which is some octets of channels,
 * of a unit row (k) after row. It is cut into shares, each of as many octets as the next; a row belongs to the share
 * that its first octet is in. What follows from that is worked out once, by a thread a share: divisions of 64 bits take
 * half a microsecond, one after the other.
 */
struct gemv_line {
  int rows, octets, step, blocks; /* of a matrix; octets of a row, of a unit's row at most; units side by side */
  int halves;                     /* of weights: 2 where the unit's row has as many octets of up behind those of gate */
  bool pairs;                     /* gate and up element by element */
  int most;                       /* rows of a run */
  int shares;
  uint32_t each, total;             /* octets of a matrix, of all */
  float per_octet;                  /* shares */
  uint32_t at[FEW_SHARES + 1];      /* where a share begins: in octets, */
  gemv_place first[FEW_SHARES + 1]; /* and at which row */

  DEVICE int width(int block) const { return min(step, octets - block * step); }

  /* By one thread. */
  DEVICE void set(const gemm_args &g, bool gated, int rows_of_run, int experts)
  {
    halves = gated ? 2 : 1, pairs = gated && g.b.n_stride == 2;
    most = rows_of_run, rows = g.k, octets = g.n / 8, step = GEMV_PLACES / halves, blocks = ceil_div(octets, step);
    each = rows * octets, total = experts * each;
    shares = (int)min(gridDim.x, max(total / (GEMV_LEAST * step), 1u));
    per_octet = (float)shares / (float)max(total, 1u);
  }

  /* By a thread for each share, and the end. */
  DEVICE void set_share(int share)
  {
    gemv_place p = {0, 0, 0};
    uint32_t octet = (uint32_t)((uint64_t)total * min(share, shares) / shares);
    at[share] = octet;
    if (total > 0) {
      p.active = (int)(octet / each), octet -= p.active * each;
      p.block = (int)(octet / (rows * step)), octet -= p.block * rows * step;
      p.row = ceil_div((int)octet, width(p.block));
      if (p.row == rows) p.row = 0, p.block++;
      if (p.block == blocks) p.block = 0, p.active++;
    }
    first[share] = p;
  }

  /* The share that has a row which begins at `octet`. */
  DEVICE int share_of(uint32_t octet) const
  {
    int share = min((int)((float)octet * per_octet), shares - 1);
    while (share > 0 && at[share] > octet) share--;
    while (share < shares - 1 && at[share + 1] <= octet) share++;
    return share;
  }
};

/* Whoever has some of a unit has a slot for its sums: that of unit + share. From `slot` on there are `count` of a unit:
 * every share between those of its first and its last row has some of its rows. */
struct gemv_parts {
  int slot, count;
};

DEVICE gemv_parts parts_of(const gemv_line &line, int active, int block)
{
  const uint32_t begin = active * line.each + block * line.rows * line.step,
                 last = begin + (line.rows - 1) * line.width(block);
  const int share = line.share_of(begin);
  return {active * line.blocks + block + share, line.share_of(last) - share + 1};
}

/* ---- a walk along a share ---- */

/* Rows of one unit that lie side by side, and a thread's part of them: every `each`th from `first` on, of the octet at
 * `place`. */
struct gemv_run {
  int rows, width, places, each, first, place;
  bool there;
};

struct gemv_walk {
  gemv_place now, end;

  DEVICE void begin(const gemv_line &line, int share)
  {
    const int last = min(share + 1, line.shares);
    now = line.first[min(share, last)], end = line.first[last];
  }
  DEVICE bool over() const { return now == end; }

  DEVICE gemv_run run(const gemv_line &line) const
  {
    gemv_run r;
    r.rows = now.active == end.active && now.block == end.block ? end.row : line.rows;
    r.rows = min(r.rows - now.row, line.most);
    r.width = line.width(now.block), r.places = line.halves * r.width;
    r.each = gemv_quotient(GEMV_LANES, r.places), r.first = gemv_quotient(threadIdx.x, r.places);
    r.place = threadIdx.x - r.first * r.places, r.there = r.first < r.each;
    if (!r.there) r.first = 0;
    return r;
  }

  /* True: that was the last of the unit, or of the share. */
  DEVICE bool advance(const gemv_line &line, int rows)
  {
    now.row += rows;
    if (now.row < line.rows) return over();
    now.row = 0;
    if (++now.block == line.blocks) now.block = 0, now.active++;
    return true;
  }
};

#endif
