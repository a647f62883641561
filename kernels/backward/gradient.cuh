/*
 * gradient: gradients of weights on the warpgroup tensor cores of sm_90a. For each expert
 *   d(p, q) = sum over its rows of P(row, p) * Q(row, q)
 * where q runs along the rows of d in memory: K-major gradients have P = a (whose columns are outputs, of one or two
 * halves) and Q = b, N-major ones the other way round. Both operands are copies in row order, in which each expert
 * begins at a multiple of ROW_STEP and zeros fill up to the next one: so whole boxes are read, and what they bring
 * besides an expert's rows adds nothing. wgmma reads either major of both operands from shared memory: no transposing.
 * Or one of the two has rows of tokens, which two more warps gather by cp.async: no copy is made.
 *
 * A CTA has one warp that loads and two warpgroups that multiply, each half of the tile's p. All rows of an expert are
 * one CTA's, in their order: sums have the same bits each time. CTAs come in clusters of two, with neighbouring tiles
 * of q (or of p) and the same ones of p (or of q), which each loads half of, for both by multicast. What is gathered is
 * nothing that could be shared.
 */
#ifndef CUMOE_GRADIENT_CUH
#define CUMOE_GRADIENT_CUH

#include "backward.h"
#include "device/pipeline.cuh"
#include "device/ptx_gradient_sm90.cuh"

template <class X_, class Y_, int CLUSTER_, int BM_, int BN_, int BK_, int STAGES_, int WARPS,
          int SLOTS_ = sizeof(Y_) == 4 || BK_ == 64 ? 6 : 3>
struct gradient_shape {
  using X = X_;
  using Y = Y_;                                                                            /* of the gradient */
  static constexpr int CLUSTER = CLUSTER_, BM = BM_, BN = BN_, BK = BK_, STAGES = STAGES_; /* BM p, BN q, BK rows */
  static constexpr int CONSUMERS = 2, GROUP = 128, BLOCK = 64, THREADS = WARPS * WARP_SIZE;
  static constexpr int BLOCKS = BM / BLOCK / CONSUMERS, ACCUMULATORS = BN / 2; /* of a consumer; of a block a thread */
  static constexpr int P_BOXES = BM / BLOCK, Q_BOXES = BN / BLOCK, BOX = BLOCK * BK;
  /* From accumulators to memory: slots of a consumer; boxes of its part of a tile, columns of one. What is added to is
   * fetched into as many slots ahead. */
  static constexpr int SLOTS = SLOTS_, WIDTH = 128 / sizeof(Y), BOXES_ACROSS = BN / WIDTH,
                       BOXES = BLOCKS * BOXES_ACROSS;
  static constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56; /* 384 threads start with 168 each */
  static constexpr int GATHERERS = 2;                                     /* warps */
  static_assert(sizeof(X) == 2 && CLUSTER == 2 && THREADS == (CONSUMERS + 1) * GROUP, "see there");
  static_assert(BM % (BLOCK * CONSUMERS) == 0 && BN % BLOCK == 0, "whole boxes");
  static_assert(SLOTS >= 2 && SLOTS <= BOXES, "one is stored while another is filled; what is fetched ahead");
  static constexpr int NARROW = BN - BLOCK; /* columns of a tile whose last box of q is past the last one */
  static_assert(BK % 32 == 0 && ROW_STEP % BK == 0, "whole steps; see there");
  static_assert(CONSUMERS * GROUP * CONSUMER_REGISTERS + GROUP * PRODUCER_REGISTERS <= 168 * THREADS,
                "what a CTA starts with: who asks for more waits for ever");
};

/* ---- units ---- */

/* How the matrix of an expert is dealt to clusters: a unit is two neighbouring tiles, all of them along q, or all along
 * p; of an odd number of tiles those of the last column (or row) are neighbours the other way. */
struct gradient_grid {
  int32_t p, q;             /* elements of a half along p, along q */
  int32_t p_tiles, q_tiles; /* tiles of a half */
  int32_t p_all, q_all;     /* tiles of all halves */
  bool across;              /* q are outputs and p inputs; else the other way round */
  bool gather_p, gather_q;  /* its rows are tokens' */
  bool along_q;             /* the two tiles are neighbours along q, and share p; else the other way round */
  int32_t tall, wide, each; /* units along p, along q; all, with those of the odd column or row */
  int32_t all;              /* experts' */
};

template <class S> DEVICE gradient_grid gradient_grid_of(const weight_gradient_args &g)
{
  gradient_grid m;
  m.across = g.d.n_stride == 1;
  m.p = m.across ? g.k : g.n;
  m.q = m.across ? g.n : g.k;
  m.p_tiles = ceil_div(m.p, S::BM), m.q_tiles = ceil_div(m.q, S::BN);
  m.p_all = m.p_tiles * (m.across ? 1 : g.halves), m.q_all = m.q_tiles * (m.across ? g.halves : 1);
  const bool gather_a = g.a.form == OF_TOKEN, gather_b = g.b.form == OF_TOKEN;
  m.gather_p = m.across ? gather_b : gather_a;
  m.gather_q = m.across ? gather_a : gather_b;
  m.along_q = m.gather_q || (!m.gather_p && (m.q_all % 2 == 0 || m.p_all % 2 != 0));
  m.tall = m.along_q ? m.p_all : m.p_all / 2;
  m.wide = m.along_q ? m.q_all / 2 : m.q_all;
  const int32_t odd = m.along_q ? m.q_all % 2 * ceil_div(m.p_all, 2) : m.p_all % 2 * ceil_div(m.q_all, 2);
  m.each = m.tall * m.wide + odd;
  m.all = m.each * g.map.experts;
  return m;
}

/* An expert's rows, kept inside [0, rows_cap): the first one, and how many halves of BK, which is a step. */
struct row_steps {
  int32_t first, halves;
  DEVICE int32_t steps() const { return (halves + 1) / 2; }
};

template <class S> DEVICE row_steps steps_of_expert(const row_map &map, int expert)
{
  const int64_t cap = map.rows_cap, begin = map.counts ? load_relaxed(map.offsets + expert) : 0,
                count = map.counts ? load_relaxed(map.counts + expert) : token_total(map.tokens),
                first = min(max(begin, (int64_t)0), cap), kept = min(max(count, (int64_t)0), cap - first);
  return {(int32_t)first, (int32_t)ceil_div(kept, (int64_t)(S::BK / 2))};
}

/* The tile of one CTA: number p and q among those of all halves. Past the last one: an odd one out, there is none. */
struct gradient_tile {
  int32_t expert, p, q;
};

/* Units on their way from who draws them to who reads them, each for the one after its own: a place is `ready`, then
 * `taken` by all readers of both CTAs. */
enum { UNITS_DRAWN = 4 };
struct drawn_units {
  int32_t unit[UNITS_DRAWN];
  uint64_t ready[UNITS_DRAWN], taken[UNITS_DRAWN];
};

/* Consumers have no registers left: they read the grid, which is the same for all units, and each warp's tile from
 * here, anew each time. */
template <class S> struct gradient_smem {
  typename S::X p[S::STAGES][S::P_BOXES * S::BOX], q[S::STAGES][S::Q_BOXES * S::BOX];
  unsigned char slots[S::CONSUMERS][S::SLOTS][S::BLOCK * 128];
  uint64_t full[S::STAGES], empty[S::STAGES], there[S::CONSUMERS][S::SLOTS];
  uint64_t alone; /* the grids ahead have ended */
  drawn_units drawn;
  row_steps rows[MAX_EXPERTS];
  gradient_grid grid;
  gradient_tile tiles[S::THREADS / WARP_SIZE];
};

/* Where a warp is in the sequence of its cluster's units: the first one by the cluster's number, all others as they are
 * drawn. So units that are under way at a time follow each other and began in their order, and what neighbours share
 * is read at nearly the same time, and from L2 (see gemm/wgmma.cuh). */
template <class S> struct unit_reader {
  int32_t unit = (int)blockIdx.x / S::CLUSTER;
  pipeline_state<UNITS_DRAWN> at;

  /* By a warp. Of a CTA's warps one arms the barrier (ARMS). */
  template <bool ARMS = false> DEVICE void advance(gradient_smem<S> &smem)
  {
    drawn_units &drawn = smem.drawn;
    if (ARMS && lane_id() == 0) mbarrier_arrive_expect_tx(&drawn.ready[at.stage], sizeof drawn.unit[0]);
    wait_for(&drawn.ready[at.stage], at.phase);
    unit = drawn.unit[at.stage];
    __syncwarp();
    if (lane_id() < S::CLUSTER) mbarrier_arrive_cluster(&drawn.taken[at.stage], lane_id());
    at.advance();
  }

  /* The readers of a CTA: consumers, the warp that copies, those that gather. */
  DEVICE static int warps(const gradient_grid &m)
  {
    return S::CONSUMERS * S::GROUP / WARP_SIZE + 1 + (m.gather_p || m.gather_q ? (int)S::GATHERERS : 0);
  }
};

/* By one lane of the first CTA. What a ticket says is looked at when the unit's stages have been asked for. */
template <class S> DEVICE void send_unit(gradient_smem<S> &smem, const pipeline_state<UNITS_DRAWN> &at, int32_t unit)
{
  wait_for(&smem.drawn.taken[at.stage], at.phase ^ 1);
  for (int rank = 0; rank < S::CLUSTER; rank++)
    st_async_cluster(&smem.drawn.unit[at.stage], rank, unit, &smem.drawn.ready[at.stage]);
}

/* A unit of an expert. Those of one are counted from another one than those of the expert before: else a cluster that
 * has them in turn might get the same unit of all, one with less to do. */
struct gradient_cursor {
  int32_t expert, unit; /* unit: among the expert's */

  DEVICE gradient_cursor(const gradient_grid &m, int32_t index)
      : expert((int32_t)((uint32_t)index / (uint32_t)m.each)), unit(index - expert * m.each)
  {
  }

  /* The unit's number, of which those of the odd column or row are the last. */
  DEVICE int32_t number(const gradient_grid &m) const
  {
    const int32_t own = unit + (int32_t)((uint32_t)expert % (uint32_t)m.each);
    return own < m.each ? own : own - m.each;
  }

  /* Whether the two tiles are neighbours along q. */
  DEVICE bool along_q(const gradient_grid &m) const { return m.along_q == (number(m) < m.tall * m.wide); }

  /* p advances first, inside bands: what 66 clusters read at a time stays in L2. */
  DEVICE gradient_tile tile(const gradient_grid &m) const
  {
    constexpr uint32_t BAND = 8;
    const int32_t own = number(m), odd = own - m.tall * m.wide, rank = (int32_t)cluster_ctarank();
    if (odd >= 0) return {expert, m.along_q ? 2 * odd + rank : m.p_all - 1, m.along_q ? m.q_all - 1 : 2 * odd + rank};
    const uint32_t band = (uint32_t)own / (BAND * m.wide) * BAND, height = min(m.tall - band, BAND);
    const uint32_t in_band = own - band * m.wide, j = height == BAND ? in_band / BAND : in_band / height;
    const int32_t i = (int32_t)(band + in_band - j * height);
    return {expert, m.along_q ? i : 2 * i + rank, m.along_q ? 2 * (int32_t)j + rank : (int32_t)j};
  }
};

/* Of a tile among those of both halves (`tiles` each): its half, and its first element there. */
struct place_in_half {
  int32_t half, first;
  DEVICE place_in_half(int32_t tile, int32_t tiles, int32_t width)
      : half(tile >= tiles), first((tile - (tile >= tiles ? tiles : 0)) * width)
  {
  }
};

/* ---- producer ---- */

/* First column of a tile in its operand. A tile may reach past its half, into what is not stored then. */
DEVICE int32_t column_of_tile(const weight_gradient_args &g, bool outputs, int32_t tile, int32_t tiles, int32_t width)
{
  const place_in_half at(tile, tiles, width);
  return at.first + (outputs ? (int32_t)g.a_half[at.half] : 0);
}

/* boxes: of BOXES, those that have columns. */
template <class S, int BOXES, bool SHARED>
DEVICE void copy_operand(typename S::X *to, const void *map, int32_t column, int32_t row, uint64_t *full, int boxes)
{
  constexpr uint16_t BOTH = (1 << S::CLUSTER) - 1;
  const int first = SHARED ? (int)cluster_ctarank() : 0;
#pragma unroll
  for (int box = 0; box < BOXES; box += SHARED ? S::CLUSTER : 1) {
    const int i = box + first;
    if (i >= boxes) break;
    if (SHARED)
      cp_async_bulk_tensor_2d_multicast(to + i * S::BOX, map, column + i * S::BLOCK, row, full, BOTH);
    else
      cp_async_bulk_tensor_2d(to + i * S::BOX, map, column + i * S::BLOCK, row, full);
  }
}

/* Boxes of q that a tile has columns in: all but of the last tile of a half. */
template <class S> DEVICE int32_t boxes_of_q(const gradient_grid &m, const gradient_tile &tile)
{
  const place_in_half q(tile.q, m.q_tiles, S::BN);
  return tile.q < m.q_all ? min(ceil_div(m.q - q.first, (int)S::BLOCK), (int)S::Q_BOXES) : 0;
}

/* First columns of a tile in its operands. */
template <class S>
DEVICE int32_t first_p(const weight_gradient_args &g, const gradient_grid &m, const gradient_tile &tile)
{
  return column_of_tile(g, !m.across, tile.p, m.p_tiles, S::BM);
}
template <class S>
DEVICE int32_t first_q(const weight_gradient_args &g, const gradient_grid &m, const gradient_tile &tile)
{
  return column_of_tile(g, m.across, tile.q, m.q_tiles, S::BN);
}

/* Of a d h that may still run: until an expert's rows of h and d z are there. d h goes from expert to expert, so most
 * of them are long there. */
DEVICE void wait_for_expert(const weight_gradient_args &g, int expert)
{
  const uint32_t octets = (uint32_t)max(load_relaxed(g.map.counts + expert), 0) * (uint32_t)g.d_h_octets;
  while ((uint32_t)load_acquire(g.d_h + D_H_STORED + expert) != octets) {
  }
}

/* A unit's stages, but for what is gathered. */
template <class S, bool SHARE_P>
DEVICE void copy_unit(const weight_gradient_sm90_args &args, gradient_smem<S> &smem, const gradient_tile &tile,
                      const row_steps &rows, pipeline_state<S::STAGES> &at)
{
  const gradient_grid &m = smem.grid;
  const int32_t p = first_p<S>(args.g, m, tile), q = first_q<S>(args.g, m, tile);
  const int p_boxes = m.gather_p ? 0 : (int)S::P_BOXES, q_boxes = m.gather_q ? 0 : boxes_of_q<S>(m, tile);
#pragma unroll 1
  for (int32_t step = 0; step < rows.steps(); step++, at.advance()) {
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (elect_one()) {
      uint64_t *full = &smem.full[at.stage];
      const int32_t row = rows.first + step * S::BK;
      mbarrier_arrive_expect_tx(full, (p_boxes + q_boxes) * S::BOX * (int)sizeof(typename S::X));
      copy_operand<S, S::P_BOXES, SHARE_P>(smem.p[at.stage], args.p, p, row, full, p_boxes);
      copy_operand<S, S::Q_BOXES, !SHARE_P>(smem.q[at.stage], args.q, q, row, full, q_boxes);
    }
    __syncwarp();
  }
}

/* Units from the reader's on; WAITS: until the grids ahead have ended. */
template <class S, bool WAITS>
DEVICE void produce_units(const weight_gradient_sm90_args &args, gradient_smem<S> &smem, unit_reader<S> &reader,
                          pipeline_state<S::STAGES> &at)
{
  const gradient_grid &m = smem.grid;
  const int32_t clusters = (int)gridDim.x / S::CLUSTER;
  const bool draws = cluster_ctarank() == 0 && lane_id() == 0;
#pragma unroll 1
  for (; reader.unit < m.all; reader.template advance<true>(smem)) {
    if (WAITS && mbarrier_test_wait(&smem.alone, 0)) break;
    int32_t next = reader.unit;
    if (draws && args.g.tickets) next = atomicAdd(args.g.tickets, 1);
    const gradient_cursor cursor(m, reader.unit);
    const gradient_tile tile = cursor.tile(m);
    const row_steps rows = smem.rows[cursor.expert];
    if (WAITS && rows.halves) {
      wait_for_expert(args.g, cursor.expert);
      fence_proxy_async_global();
    }
    if (cursor.along_q(m))
      copy_unit<S, true>(args, smem, tile, rows, at);
    else
      copy_unit<S, false>(args, smem, tile, rows, at);
    if (draws) send_unit<S>(smem, reader.at, clusters + next);
    __syncwarp();
  }
}

template <class S> DEVICE void produce_gradient(const weight_gradient_sm90_args &args, gradient_smem<S> &smem)
{
  unit_reader<S> reader;
  pipeline_state<S::STAGES> at;
  if (args.g.d_h) {
    produce_units<S, true>(args, smem, reader, at);
    fence_proxy_async_global();
  }
  produce_units<S, false>(args, smem, reader, at);
}

/* ---- who gathers ---- */

/* Eight lanes have a row, and each of them the same 16 bytes of all its boxes. */
template <class S, int BOXES> struct gather_lane {
  static constexpr int EACH = 4, ROWS = EACH * WARP_SIZE / 8; /* that follow each other; of a warp, at once */

  DEVICE static int first() { return lane_id() / 8 * EACH; }
  DEVICE static int vector() { return lane_id() % 8; }

  /* The token of this lane's row of 32 from `row` on; negative: zeros. */
  DEVICE static int32_t token(const weight_gradient_args &g, int64_t row)
  {
    row += lane_id();
    return row < g.map.rows_cap ? load_relaxed(g.row_token + row) : -1;
  }

  /* A stage's rows from `row` on, of those whose tokens the lanes have. WHOLE: all boxes have columns; else `left` are
   * there from this lane's first one on. */
  template <bool WHOLE>
  DEVICE static void copy(uint32_t stage, const typename S::X *from, int32_t ld, int32_t tokens, int row, int32_t left)
  {
    const uint32_t to = stage + (row + first()) * 128 + (vector() ^ first() % 8) * 16;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int32_t token = __shfl_sync(ALL_LANES, tokens, row + first() + i), bytes = token < 0 ? 0 : 16;
      const typename S::X *source = from + (int64_t)max(token, 0) * ld;
#pragma unroll
      for (int box = 0; box < BOXES; box++)
        if (WHOLE || box * S::BLOCK < left)
          cp_async_cg_16((to ^ i * 16) + i * 128 + box * (S::BOX * 2), source + box * S::BLOCK, bytes);
    }
  }
};

/* The operand's part in all units, by two warps, which have stages in turn: half of each stage for both of them takes a
 * tenth longer. It is there before d h is, and so are the rows' tokens. */
template <class S, bool OF_P> DEVICE void gather_operand(const weight_gradient_sm90_args &args, gradient_smem<S> &smem)
{
  using lane = gather_lane<S, OF_P ? S::P_BOXES : S::Q_BOXES>;
  const gradient_grid &m = smem.grid;
  const weight_gradient_args &g = args.g;
  const bool outputs = OF_P != m.across;
  const row_matrix &from = outputs ? g.a : g.b;
  const int own = warp_id() % S::GATHERERS;
  int32_t before = 0; /* stages of the units before */
  pipeline_state<S::STAGES> at;
  if (own) at.advance();
#pragma unroll 1
  for (unit_reader<S> reader; reader.unit < m.all; reader.advance(smem)) {
    const gradient_cursor cursor(m, reader.unit);
    const gradient_tile tile = cursor.tile(m);
    const int32_t begin = OF_P ? first_p<S>(g, m, tile) : first_q<S>(g, m, tile), end = outputs ? g.n : g.k,
                  column = begin + lane::vector() * 8;
    const bool whole = end - begin >= (OF_P ? S::BM : S::BN);
    const typename S::X *base = static_cast<const typename S::X *>(from.base) + min(column, end - 8);
    const row_steps rows = smem.rows[cursor.expert];
    int32_t step = (before + own) % S::GATHERERS, next = lane::token(g, rows.first + step * S::BK);
    before += rows.steps();
#pragma unroll 1
    for (; step < rows.steps(); step += S::GATHERERS) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      const uint32_t stage = shared_address(OF_P ? smem.p[at.stage] : smem.q[at.stage]);
#pragma unroll 1
      for (int row = 0; row < S::BK; row += lane::ROWS) {
        const int32_t tokens = next;
        if (row % WARP_SIZE + lane::ROWS == WARP_SIZE) /* asked for long before they are wanted */
          next = lane::token(g, rows.first + (row + lane::ROWS < S::BK ? step * S::BK + row + lane::ROWS
                                                                       : (step + S::GATHERERS) * S::BK));
        if (whole)
          lane::template copy<true>(stage, base, (int32_t)from.ld, tokens, row, 0);
        else
          lane::template copy<false>(stage, base, (int32_t)from.ld, tokens, row, end - column);
      }
      cp_async_mbarrier_arrive_noinc(&smem.full[at.stage]);
#pragma unroll
      for (int i = 0; i < S::GATHERERS; i++) at.advance();
    }
  }
}

/* ---- consumers ---- */

template <class S> DEVICE void release_gradient_stage(gradient_smem<S> &smem, int stage)
{
  if (lane_id() < S::CLUSTER) mbarrier_arrive_cluster(&smem.empty[stage], lane_id());
}

/* Adds a stage's first SIXTEENS * 16 rows to a tile's first N columns of q; `before` is the stage before, or -1, which
 * is released when these products are under way and its own have ended. */
template <class S, int N, int SIXTEENS>
DEVICE void sum_stage(const weight_gradient_args &g, gradient_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                      int &before, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int K16 = 16 * 128 >> 4, NEXT = S::BOX * 2 >> 4;
  wait_for(&smem.full[at.stage], at.phase);
  if (g.row_token) fence_proxy_async_shared(); /* by cp.async */
  const uint64_t a = wgmma_operand(smem.p[at.stage] + group * S::BLOCKS * S::BOX);
  const uint64_t b = wgmma_operand_n_major(smem.q[at.stage], S::BOX * 2);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < SIXTEENS; k++)
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++)
      wgmma_n_major_m64k16<typename S::X, N>::run(acc[i], a + k * K16 + i * NEXT, b + k * K16, k > 0 || before >= 0);
  wgmma_commit_group();
  wgmma_wait_group<1>();
  if (before >= 0) release_gradient_stage<S>(smem, before);
  before = (int)at.stage;
  at.advance();
}

/* acc = the sum over the expert's rows. The last stage may have half of its rows, or less. */
template <class S, int N>
DEVICE void sum_rows(const weight_gradient_args &g, gradient_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                     int halves, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  int before = -1;
#pragma unroll 1
  for (; halves > 1; halves -= 2) sum_stage<S, N, S::BK / 16>(g, smem, at, group, before, acc);
  if (halves) sum_stage<S, N, S::BK / 32>(g, smem, at, group, before, acc);
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  if (before >= 0) release_gradient_stage<S>(smem, before);
}

/* Nothing of the tile is this consumer's, but its CTA's loads come all the same. */
template <class S> DEVICE void skip_rows(gradient_smem<S> &smem, pipeline_state<S::STAGES> &at, int steps)
{
#pragma unroll 1
  for (int step = 0; step < steps; step++, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    __syncwarp();
    release_gradient_stage<S>(smem, at.stage);
  }
}

/* ---- from accumulators to memory: through slots of 64 rows x 128 bytes, a box each ---- */

/* Address of a thread's elements in a slot: of row `row`, from byte `byte` on. */
DEVICE uint32_t swizzled(uint32_t slot, int row, int byte)
{
  return slot + row * 128 + (byte ^ row % 8 * 16);
}

/* A consumer's accumulators of WIDTH columns from octet `octet` on, into a slot. ADD: onto what is there. */
template <class S, bool ADD> DEVICE void stage_slot(uint32_t slot, int octet, const float (&acc)[S::ACCUMULATORS])
{
  using Y = typename S::Y;
  const int warp = warp_id() % 4, lane = lane_id();
#pragma unroll
  for (int j = 0; j < S::WIDTH / 8; j += 2) {
    if constexpr (sizeof(Y) == 2 && !ADD) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        packed[i] = pack_pair<Y>(acc[4 * (octet + j) + 2 * i], acc[4 * (octet + j) + 2 * i + 1]);
      stmatrix_x4(swizzled(slot, warp * 16 + lane % 16, (j + lane / 16) * 16), packed);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t at = swizzled(slot, warp * 16 + lane / 4 + i % 2 * 8,
                                     (j + i / 2) * 8 * (int)sizeof(Y) + lane % 4 * 2 * (int)sizeof(Y));
        const float a = acc[4 * (octet + j) + 2 * i], b = acc[4 * (octet + j) + 2 * i + 1];
        if constexpr (sizeof(Y) == 2) {
          const float2 there = unpack_pair<Y>(lds_32(at));
          sts_32(at, pack_pair<Y>(there.x + a, there.y + b));
        } else {
          const float2 there = ADD ? lds_64(at) : make_float2(0.f, 0.f);
          sts_64(at, ADD ? there.x + a : a, ADD ? there.y + b : b);
        }
      }
    }
  }
}

/* Where a consumer's part of a tile lies in d. */
struct gradient_place {
  int32_t column, row, half, expert;

  template <class S>
  DEVICE static gradient_place of(const weight_gradient_sm90_args &args, const gradient_grid &m,
                                  const gradient_tile &tile, int group)
  {
    const place_in_half p(tile.p, m.p_tiles, S::BM), q(tile.q, m.q_tiles, S::BN);
    return {q.first, p.first + group * S::BLOCKS * S::BLOCK, (m.across ? q.half : p.half) ^ args.up_first, tile.expert};
  }

  /* Of its box `box`. */
  template <class S> DEVICE int32_t row_of(int box) const { return row + box / S::BOXES_ACROSS * S::BLOCK; }
  template <class S> DEVICE int32_t column_of(int box) const { return column + box % S::BOXES_ACROSS * S::WIDTH; }
};

/* Brings what box `box` will be added to into a slot; by one thread. */
template <class S>
DEVICE void fetch_slot(const weight_gradient_sm90_args &args, gradient_smem<S> &smem, int group, uint32_t slot,
                       const gradient_place &place, int box)
{
  uint64_t *there = &smem.there[group][slot];
  mbarrier_arrive_expect_tx(there, sizeof smem.slots[0][0]);
  cp_async_bulk_tensor_4d(smem.slots[group][slot], args.d, place.column_of<S>(box), place.row_of<S>(box), place.half,
                          place.expert, there);
}

/* Box by box through the slots, one barrier a box. Before it the first thread waits until the slot after this one is
 * free; behind it that thread stores the box and, if ADD, fetches into the free slot what the next box is added to. */
template <class S, bool ADD>
DEVICE void store_gradient(const weight_gradient_sm90_args &args, gradient_smem<S> &smem, int group,
                           pipeline_state<S::SLOTS> &at, const gradient_place &place,
                           const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const bool first = threadIdx.x % S::GROUP == 0;
#pragma unroll
  for (int box = 0; box < S::BOXES; box++, at.advance()) {
    if (ADD) wait_for(&smem.there[group][at.stage], at.phase);
    stage_slot<S, ADD>(shared_address(smem.slots[group][at.stage]), box % S::BOXES_ACROSS * S::WIDTH / 8,
                       acc[box / S::BOXES_ACROSS]);
    fence_proxy_async_shared();
    if (first) cp_async_bulk_wait_group_read<S::SLOTS - 2>();
    bar_sync(1 + group, S::GROUP);
    if (!first) continue;
    cp_async_bulk_tensor_4d_store(args.d, place.column_of<S>(box), place.row_of<S>(box), place.half, place.expert,
                                  smem.slots[group][at.stage]);
    cp_async_bulk_commit_group();
    if (ADD && box + 1 >= S::SLOTS && box + 1 < S::BOXES)
      fetch_slot<S>(args, smem, group, (at.stage + 1) % S::SLOTS, place, box + 1);
  }
}

/* What the first boxes of a tile will be added to; by one thread, before the tile's products. */
template <class S>
DEVICE void fetch_slots(const weight_gradient_sm90_args &args, gradient_smem<S> &smem, int group, uint32_t slot,
                        const gradient_place &place)
{
  cp_async_bulk_wait_group_read<0>();
#pragma unroll 1
  for (int box = 0; box < S::SLOTS; box++) fetch_slot<S>(args, smem, group, (slot + box) % S::SLOTS, place, box);
}

template <class S>
DEVICE void finish_gradient(const weight_gradient_sm90_args &args, gradient_smem<S> &smem, int group,
                            pipeline_state<S::SLOTS> &slot, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if (args.g.scale != 1.f)
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
      for (int j = 0; j < S::ACCUMULATORS; j++) acc[i][j] *= args.g.scale;
  const gradient_place place = gradient_place::of<S>(args, smem.grid, smem.tiles[warp_id()], group);
  if (args.g.accumulates)
    store_gradient<S, true>(args, smem, group, slot, place, acc);
  else
    store_gradient<S, false>(args, smem, group, slot, place, acc);
}

template <class S> DEVICE void consume_gradient(const weight_gradient_sm90_args &args, gradient_smem<S> &smem)
{
  const gradient_grid &m = smem.grid;
  const int group = threadIdx.x / S::GROUP - 1;
  pipeline_state<S::STAGES> at;
  pipeline_state<S::SLOTS> slot;
#pragma unroll 1
  for (unit_reader<S> reader; reader.unit < m.all; reader.advance(smem)) {
    const gradient_cursor cursor(m, reader.unit);
    const gradient_tile tile = cursor.tile(m);
    const row_steps rows = smem.rows[cursor.expert];
    const gradient_place place = gradient_place::of<S>(args, m, tile, group);
    if (tile.p >= m.p_all || place.row >= m.p || tile.q >= m.q_all) {
      skip_rows<S>(smem, at, rows.steps());
      continue;
    }
    if (args.g.accumulates && rows.halves == 0) continue;
    if (lane_id() == 0) smem.tiles[warp_id()] = tile;
    if (args.g.accumulates && threadIdx.x % S::GROUP == 0) fetch_slots<S>(args, smem, group, slot.stage, place);
    __syncwarp();
    float acc[S::BLOCKS][S::ACCUMULATORS] = {}; /* anew: kept from tile to tile, ptxas would move them amid wgmmas */
    if (m.q - place.column <= S::NARROW)
      sum_rows<S, S::NARROW>(args.g, smem, at, group, rows.halves, acc);
    else
      sum_rows<S, S::BN>(args.g, smem, at, group, rows.halves, acc);
    finish_gradient<S>(args, smem, group, slot, acc);
    __syncwarp(); /* the tile is read before the next one is written */
  }
  if (threadIdx.x % S::GROUP == 0) cp_async_bulk_wait_group_read<0>();
}

template <class S> DEVICE void gradient_gemm(const weight_gradient_sm90_args &args, gradient_smem<S> &smem)
{
  if (threadIdx.x == 0) {
    smem.grid = gradient_grid_of<S>(args.g);
    prefetch_tensormap(args.p);
    prefetch_tensormap(args.q);
    prefetch_tensormap(args.d);
    mbarrier_init(&smem.alone, 1);
    for (int i = 0; i < UNITS_DRAWN; i++) {
      mbarrier_init(&smem.drawn.ready[i], 1);
      mbarrier_init(&smem.drawn.taken[i], S::CLUSTER * unit_reader<S>::warps(smem.grid));
    }
    for (int s = 0; s < S::SLOTS; s++)
      for (int group = 0; group < S::CONSUMERS; group++) mbarrier_init(&smem.there[group][s], 1);
    for (int s = 0; s < S::STAGES; s++) {
      mbarrier_init(&smem.full[s], args.g.row_token ? 1 + WARP_SIZE : 1);
      mbarrier_init(&smem.empty[s], S::CLUSTER * S::CONSUMERS * S::GROUP / WARP_SIZE);
    }
    fence_mbarrier_init();
  }
  if (!args.g.beside) wait_for_earlier_grids();
  fence_proxy_async_global(); /* they wrote the rows that the boxes bring */
  for (int e = threadIdx.x; e < args.g.map.experts; e += S::THREADS) smem.rows[e] = steps_of_expert<S>(args.g.map, e);
  barrier_cluster(); /* the other CTA's barriers are initialised */
  if (threadIdx.x < S::GROUP) {
    setmaxnreg_dec<S::PRODUCER_REGISTERS>();
    if (warp_id() == 0) {
      produce_gradient<S>(args, smem);
    } else if (warp_id() == 1) {
      wait_for_earlier_grids(); /* if not yet: whoever waits for this grid, or starts beside it, counts on that */
      if (elect_one()) mbarrier_arrive(&smem.alone);
    } else if (smem.grid.gather_p) {
      gather_operand<S, true>(args, smem);
    } else if (smem.grid.gather_q) {
      gather_operand<S, false>(args, smem);
    }
  } else {
    setmaxnreg_inc<S::CONSUMER_REGISTERS>();
    consume_gradient<S>(args, smem);
  }
  __syncwarp();
  barrier_cluster(); /* nobody writes to a CTA that has left */
}

#endif
