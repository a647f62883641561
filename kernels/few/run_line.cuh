/* run: its shape, how weights are dealt out, and what a CTA has in shared memory. */
#ifndef CUMOE_RUN_LINE_CUH
#define CUMOE_RUN_LINE_CUH

#include "device/pipeline.cuh"
#include "few/layout.cuh"
#include "gemm/schedule.cuh"

/* ---- shape ---- */

/* Up to BN channels are multiplied together; a stage has up to BK rows of them. */
template <class PRODUCT, int TOKENS_, int BN, int BK, int STAGES_, int WARPS> struct run_layout {
  using layout = run_layout;
  using X = typename PRODUCT::X;
  using W = typename PRODUCT::W;
  using Y = typename PRODUCT::Y;
  static_assert(same_type<X, W> && same_type<X, Y> && operand<W>::BITS == 16, "multiplied as they are");
  static constexpr bool UP = true; /* the table has both */
  static constexpr int TOKENS = TOKENS_, PAIRS = FEW_PAIRS(TOKENS), COLUMNS = TOKENS == 1 ? 1 : (int)FEW_COLUMNS;
  static constexpr int VECTORS = BN / 8, ROWS = BK, STAGES = STAGES_, STAGE_VECTORS = 1024;
  /* Warps: consumers; one that copies weights; those that bring columns; one that routes. */
  static constexpr int CONSUMERS = 8, FEEDERS = 4, COPIER = CONSUMERS, ROUTING = COPIER + 1 + FEEDERS;
  static constexpr int THREADS = WARPS * WARP_SIZE, CONSUMER_THREADS = CONSUMERS * WARP_SIZE,
                       PRODUCER_THREADS = (1 + FEEDERS) * WARP_SIZE;
  /* Lanes that share the parts of an output: of one token they are many. Octets of outputs at a time. */
  static constexpr int SHARERS = TOKENS == 1 ? 8 : 1, OUT_OCTETS = 8;
  static_assert(WARPS == ROUTING + 1 && THREADS >= PAIRS && VECTORS <= CONSUMER_THREADS && VECTORS <= STAGE_VECTORS);
};

/* ---- the line ---- */

/* Row `row` of unit `unit` of an active expert. */
struct run_place {
  int active, unit, row;
  DEVICE bool operator==(const run_place &o) const { return active == o.active && unit == o.unit && row == o.row; }
};

/*
 * All weights of a product, up or down, as they lie in memory: expert after expert, of each its matrices (gate and up,
 * unless they lie in one another's rows), of each its units of channels, and of a unit row (k) after row. It is cut
 * into shares of equal size, counted in vectors of 8 elements; a row belongs to the share that its first vector is in.
 */
struct run_line {
  int k, vectors, matrices, wide, blocks; /* rows; vectors of a row, matrices; vectors of a unit, units of a matrix */
  int apart;                              /* gate and up: columns from one to the other; 0: matrices */
  bool pairs, up_first;                   /* gate and up element by element; up lies first */

  template <class S> DEVICE void set(const gemm_args &g, bool gated)
  {
    const char *low = expert_base<char>(g.b, 0, 0), *high = gated ? expert_base<char>(g.b, 1, 0) : low;
    const int64_t bytes = (up_first = high < low) ? low - high : high - low;
    pairs = gated && g.b.n_stride == 2;
    const bool joined = gated && !pairs && !g.b.table[0] && !g.b.table[1] && bytes == (int64_t)g.n * 2;
    apart = joined ? g.n : 0;
    matrices = gated && !pairs && !joined ? 2 : 1;
    k = g.k, vectors = g.n / 8 * (pairs || joined ? 2 : 1);
    wide = min(round_up(ceil_div(vectors, ceil_div(vectors, S::VECTORS)), 8), vectors);
    blocks = ceil_div(vectors, max(wide, 1));
  }

  DEVICE int units() const { return matrices * blocks; }
  DEVICE int all() const { return matrices * k * vectors; } /* of an expert */
  DEVICE int matrix_of(int unit) const { return unit >= blocks; }
  DEVICE int block_of(int unit) const { return unit >= blocks ? unit - blocks : unit; }
  DEVICE int width(int unit) const { return min(wide, vectors - block_of(unit) * wide); }
  /* Vectors of a row ahead of the unit, counted over the matrices. */
  DEVICE int ahead(int unit) const { return matrix_of(unit) * vectors + block_of(unit) * wide; }
  DEVICE int begin(int active, int unit) const { return active * all() + ahead(unit) * k; }
  DEVICE int last_row(int active, int unit) const { return begin(active, unit) + (k - 1) * width(unit); }

  DEVICE run_place at(int vector) const
  {
    run_place p;
    p.active = vector / all(), vector -= p.active * all();
    const int matrix = vector >= k * vectors;
    vector -= matrix * k * vectors;
    const int block = min(vector / (k * wide), blocks - 1);
    vector -= block * k * wide;
    p.unit = matrix * blocks + block;
    p.row = ceil_div(vector, width(p.unit));
    if (p.row == k) p.row = 0, p.unit++;
    if (p.unit == units()) p.unit = 0, p.active++;
    return p;
  }

  /* Where channel n of a half is. */
  struct channel {
    int unit, in_unit;
  };
  DEVICE channel find(int half, int n) const
  {
    const int second = half ^ (int)up_first,
              column = pairs ? 2 * n + second : n + (matrices == 1 && second ? apart : 0), block = column / (8 * wide);
    return {(matrices == 2 ? half * blocks : 0) + block, column - block * 8 * wide};
  }
};

constexpr int RUN_LEAST = 16; /* rows of a share, at least */

/* Shares of so many experts. */
struct run_shares {
  int count, part, more; /* the first `more` have one vector more than `part` */

  DEVICE run_shares(const run_line &line, int experts)
  {
    const int total = experts * line.all();
    count = min((int)gridDim.x, max(total / (RUN_LEAST * max(line.wide, 1)), 1));
    if (total == 0) count = 0;
    part = count > 0 ? total / count : 0;
    more = total - part * count;
  }
  DEVICE int begin(int share) const { return share * part + min(share, more); }
  DEVICE int of(int vector) const
  {
    const int large = more * (part + 1);
    return vector < large ? vector / (part + 1) : more + (vector - large) / part;
  }
};

/* ---- shared memory ---- */

/* What a stage has, and what is to be done when it is multiplied. */
struct alignas(16) run_stage {
  int32_t rows; /* 0: nothing, and nothing more comes */
  int16_t width, columns;
  int16_t active, unit, share, down;
  int32_t row;
  int32_t last; /* RUN_UNIT: the share's part of the unit ends here; RUN_SHARE: the share, too */
  int32_t unused[2];
};
enum { RUN_UNIT = 1, RUN_SHARE };

template <class PRODUCT, int TOKENS, int BN, int BK, int STAGES, int WARPS>
struct few_memory<run_layout<PRODUCT, TOKENS, BN, BK, STAGES, WARPS>> {
  using S = run_layout<PRODUCT, TOKENS, BN, BK, STAGES, WARPS>;
  uint4 stages[STAGES][S::STAGE_VECTORS];     /* rows one behind the other */
  float columns[STAGES][S::ROWS][S::COLUMNS]; /* x or h of those rows */
  float4 fold[S::CONSUMER_THREADS][2];        /* where warps share channels: sums */
  run_stage stage[STAGES];
  uint64_t full[STAGES], empty[STAGES];
  uint64_t weights_ready;   /* the table's `weight` */
  run_line line[2];         /* of up, of down */
  int32_t share[2];         /* the CTA's first of up and of down */
  int32_t next;             /* its next */
  int16_t before[S::PAIRS]; /* pairs of the active experts ahead */
  int16_t count[S::PAIRS];  /* pairs of an active expert */
  int16_t place[S::PAIRS];  /* of a pair: active expert * COLUMNS + column */
  few_table<S::PAIRS> table;
  gate_scratch scratch[2]; /* the routing warp's, the copier's */
};
template <class S> using run_smem = few_memory<typename S::layout>;

/* ---- parts of sums, in memory ---- */

/*
 * A share leaves sums of each unit that it has a part of: [column of the expert][channel]. Share s and unit u of active
 * expert a: behind s times what a unit may have, and behind all units ahead of u.
 */
template <class S> struct run_parts {
  const run_line &line;
  float *base;
  int32_t *flags; /* of shares: its last unit that is done, counted over all experts; RUN_DONE: all are */
  int most;       /* channels of a unit, times columns of an expert */

  DEVICE run_parts(const few_args &args, const run_smem<S> &smem, bool down) : line(smem.line[down])
  {
    base = args.protocol.parts[down];
    flags = args.protocol.tickets + 2 + (down ? (int)FEW_SHARES : 0);
    most = line.wide * 8 * (S::COLUMNS == 1 ? 1 : (int)min((int64_t)args.map.tokens.count, (int64_t)S::COLUMNS));
  }
  /* Column `column`; the next share is `most` floats on. */
  DEVICE float *of(const run_smem<S> &smem, int share, int active, int unit, int column) const
  {
    const int count = S::COLUMNS == 1 ? 1 : smem.count[active], before = S::COLUMNS == 1 ? active : smem.before[active];
    return base + share * most + before * line.matrices * line.vectors * 8 + line.ahead(unit) * 8 * count +
           column * line.width(unit) * 8;
  }
  DEVICE int number(int active, int unit) const { return active * line.units() + unit; }
};
enum { RUN_DONE = 1 << 30 };

/* After the table is built; all threads. */
template <class S> DEVICE void count_pairs(run_smem<S> &smem, int experts)
{
  for (int i = threadIdx.x; i < experts * S::COLUMNS; i += S::THREADS) {
    const few_column column = smem.table.column[i / S::COLUMNS][i % S::COLUMNS];
    if (column >= 0) smem.place[column_pair(column)] = (int16_t)i;
  }
  if (S::COLUMNS > 1 && warp_id() == S::ROUTING) {
    constexpr int EACH = S::PAIRS / WARP_SIZE;
    int count[EACH], own = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int active = lane_id() * EACH + i;
      count[i] = 0;
      for (int c = 0; c < S::COLUMNS && active < experts; c++) count[i] += smem.table.column[active][c] >= 0;
      own += count[i];
    }
    int before = warp_scan(own) - own;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      smem.before[lane_id() * EACH + i] = (int16_t)before, smem.count[lane_id() * EACH + i] = (int16_t)count[i];
      before += count[i];
    }
  }
  __syncthreads();
}

/* ---- lab ---- */
#ifdef RUN_TRACE
template <class S> DEVICE void stamp(const few_args &args, int i)
{
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  reinterpret_cast<uint64_t *>(args.protocol.parts[0])[(6 << 20) + blockIdx.x * 16 + i] = t; /* 48 MiB on */
}
#define STAMP(when, i)                                                                                                 \
  if (when) stamp<S>(args, i)
#else
#define STAMP(when, i)
#endif

#endif
