/*
 * gradient: gradients of weights on the warpgroup tensor cores of sm_90a. For each expert
 *   d(p, q) = sum over its rows of P(row, p) * Q(row, q)
 * where q runs along the rows of d in memory: K-major gradients have P = a (whose columns are outputs, of one or two
 * halves) and Q = b, N-major ones the other way round. Both operands are copies in row order, in which each expert
 * begins at a multiple of ROW_STEP and zeros fill up to the next one: so whole boxes are read, and what they bring
 * besides an expert's rows adds nothing. wgmma reads either major of both operands from shared memory: no transposing.
 *
 * A CTA has one warp that loads and two warpgroups that multiply, each half of the tile's p. All rows of an expert are
 * one CTA's, in their order: sums have the same bits each time. CTAs come in clusters of two, with neighbouring tiles
 * of q (or of p) and the same ones of p (or of q), which each loads half of, for both by multicast.
 */
#ifndef CUMOE_GRADIENT_CUH
#define CUMOE_GRADIENT_CUH

#include "backward.h"
#include "device/pipeline.cuh"
#include "device/wgmma_n_major.cuh"

struct row_range {
  int32_t begin, count;
};

template <class X_, class Y_, int CLUSTER_, int BM_, int BN_, int BK_, int STAGES_, int WARPS> struct gradient_shape {
  using X = X_;
  using Y = Y_; /* of the gradient */
  static constexpr int CLUSTER = CLUSTER_, BM = BM_, BN = BN_, BK = BK_, STAGES = STAGES_; /* BM p, BN q, BK rows */
  static constexpr int CONSUMERS = 2, GROUP = 128, BLOCK = 64, THREADS = WARPS * WARP_SIZE;
  static constexpr int BLOCKS = BM / BLOCK / CONSUMERS, ACCUMULATORS = BN / 2; /* of a consumer; of a block a thread */
  static constexpr int P_BOXES = BM / BLOCK, Q_BOXES = BN / BLOCK, BOX = BLOCK * BK;
  static constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24; /* 384 threads start with 168 each */
  static_assert(sizeof(X) == 2 && CLUSTER == 2 && THREADS == (CONSUMERS + 1) * GROUP, "see there");
  static_assert(BM % (BLOCK * CONSUMERS) == 0 && BN % BLOCK == 0, "whole boxes");
  static_assert(BK % 16 == 0 && ROW_STEP % BK == 0, "whole steps; see there");
};

/* ---- units ---- */

/* The matrix of an expert: elements along p and q of a half, and tiles of all halves. */
struct gradient_grid {
  int32_t p, q, p_tiles, q_tiles, p_all, q_all;
  bool across;  /* q are outputs, p inputs */
  bool share_p; /* the CTAs of a cluster have neighbours along q */
  int32_t tall, wide; /* units of clusters along p, along q */
};

template <class S> DEVICE gradient_grid gradient_grid_of(const weight_gradient_args &g)
{
  gradient_grid m;
  m.across = g.d.n_stride == 1;
  m.p = m.across ? g.k : g.n;
  m.q = m.across ? g.n : g.k;
  m.p_tiles = ceil_div(m.p, S::BM), m.q_tiles = ceil_div(m.q, S::BN);
  m.p_all = m.p_tiles * (m.across ? 1 : g.halves), m.q_all = m.q_tiles * (m.across ? g.halves : 1);
  m.share_p = m.q_all % 2 == 0 || m.p_all % 2 != 0;
  m.tall = m.share_p ? m.p_all : m.p_all / 2;
  m.wide = m.share_p ? ceil_div(m.q_all, 2) : m.q_all;
  return m;
}

/* A unit as one CTA of its cluster sees it. */
struct gradient_unit {
  int32_t expert; /* -1: past the last one */
  int32_t p, q;   /* tiles of all halves; q of q_all: there is none */
  int32_t row, steps;
  int32_t index, stage, phase;
};

/* Registers of consumers are full, so what is the same for all units and a warp's own one are read from here anew. */
template <class S> struct gradient_smem {
  typename S::X p[S::STAGES][S::P_BOXES * S::BOX], q[S::STAGES][S::Q_BOXES * S::BOX];
  uint64_t full[S::STAGES], empty[S::STAGES];
  gradient_grid grid;
  gradient_unit units[S::THREADS / WARP_SIZE];
};

/* Kept inside [0, rows_cap). */
DEVICE row_range rows_of_expert(const row_map &map, int expert)
{
  const int64_t cap = map.rows_cap, begin = map.counts ? load_relaxed(map.offsets + expert) : 0,
                count = map.counts ? load_relaxed(map.counts + expert) : token_total(map.tokens),
                first = min(max(begin, (int64_t)0), cap);
  return {(int32_t)first, (int32_t)min(max(count, (int64_t)0), cap - first)};
}

template <class S>
DEVICE gradient_unit gradient_unit_of(const weight_gradient_args &g, const gradient_grid &m, int32_t index)
{
  enum { BAND = 8 }; /* p advances first, inside bands: what 66 clusters read at a time stays in L2 */
  const int32_t each = m.tall * m.wide, expert = index / each;
  gradient_unit unit = {-1};
  if (expert >= g.map.experts) return unit;
  const int32_t local = index - expert * each, rank = (int32_t)cluster_ctarank();
  const int32_t band = local / (BAND * m.wide) * BAND, height = min(m.tall - band, (int)BAND);
  const int32_t in_band = local - band * m.wide, i = band + in_band % height, j = in_band / height;
  const row_range rows = rows_of_expert(g.map, expert);
  unit.expert = expert;
  unit.p = m.share_p ? i : 2 * i + rank;
  unit.q = m.share_p ? 2 * j + rank : j;
  unit.row = rows.begin;
  unit.steps = ceil_div(rows.count, S::BK);
  return unit;
}

/* ---- producer ---- */

/* First column of a tile in its operand. A tile may reach past its half, into what is not stored then. */
DEVICE int32_t column_of_tile(const weight_gradient_args &g, bool outputs, int32_t tile, int32_t tiles, int32_t width)
{
  return (outputs ? (int32_t)g.a_half[tile / tiles] : 0) + tile % tiles * width;
}

template <class S, int BOXES, bool SHARED>
DEVICE void copy_operand(typename S::X *to, const void *map, int32_t column, int32_t row, uint64_t *full)
{
  constexpr uint16_t BOTH = (1 << S::CLUSTER) - 1;
  const int first = SHARED ? (int)cluster_ctarank() : 0;
#pragma unroll
  for (int box = 0; box < BOXES; box += SHARED ? S::CLUSTER : 1) {
    const int i = box + first;
    if (SHARED && BOXES % S::CLUSTER != 0 && i >= BOXES) break;
    if (SHARED)
      cp_async_bulk_tensor_2d_multicast(to + i * S::BOX, map, column + i * S::BLOCK, row, full, BOTH);
    else
      cp_async_bulk_tensor_2d(to + i * S::BOX, map, column + i * S::BLOCK, row, full);
  }
}

template <class S, bool SHARE_P>
DEVICE void produce_gradient(const weight_gradient_sm90_args &args, gradient_smem<S> &smem)
{
  const gradient_grid &m = smem.grid;
  pipeline_state<S::STAGES> at;
#pragma unroll 1
  for (int32_t index = (int)blockIdx.x / S::CLUSTER;; index += (int)gridDim.x / S::CLUSTER) {
    const gradient_unit unit = gradient_unit_of<S>(args.g, m, index);
    if (unit.expert < 0) return;
    const int32_t p = column_of_tile(args.g, !m.across, unit.p, m.p_tiles, S::BM),
                  q = column_of_tile(args.g, m.across, unit.q, m.q_tiles, S::BN);
#pragma unroll 1
    for (int32_t step = 0; step < unit.steps; step++, at.advance()) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      if (elect_one()) {
        uint64_t *full = &smem.full[at.stage];
        const int32_t row = unit.row + step * S::BK;
        mbarrier_arrive_expect_tx(full, (S::P_BOXES + S::Q_BOXES) * S::BOX * sizeof(typename S::X));
        copy_operand<S, S::P_BOXES, SHARE_P>(smem.p[at.stage], args.p, p, row, full);
        copy_operand<S, S::Q_BOXES, !SHARE_P>(smem.q[at.stage], args.q, q, row, full);
      }
      __syncwarp();
    }
  }
}

/* ---- consumers ---- */

template <class S> DEVICE void release_gradient_stage(gradient_smem<S> &smem, int stage)
{
  if (lane_id() < S::CLUSTER) mbarrier_arrive_cluster(&smem.empty[stage], lane_id());
}

/* Stages come back one step later, when the next products are under way. */
template <class S>
DEVICE void sum_rows(gradient_smem<S> &smem, pipeline_state<S::STAGES> &at, int group, int steps,
                     float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int K16 = 16 * 128 >> 4, NEXT = S::BOX * 2 >> 4;
  int before = -1;
#pragma unroll 1
  for (int step = 0; step < steps; step++, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    const uint64_t a = wgmma_operand(smem.p[at.stage] + group * S::BLOCKS * S::BOX);
    const uint64_t b = wgmma_operand_n_major(smem.q[at.stage], S::BOX * 2);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < S::BK / 16; k++)
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++)
        wgmma_n_major_m64k16<typename S::X, S::BN>::run(acc[i], a + k * K16 + i * NEXT, b + k * K16,
                                                        k > 0 || step > 0);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (before >= 0) release_gradient_stage<S>(smem, before);
    before = (int)at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  if (before >= 0) release_gradient_stage<S>(smem, before);
}

template <class S> DEVICE void skip_rows(gradient_smem<S> &smem, pipeline_state<S::STAGES> &at, int steps)
{
#pragma unroll 1
  for (int step = 0; step < steps; step++, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    __syncwarp();
    release_gradient_stage<S>(smem, at.stage);
  }
}

/* ---- from accumulators to memory: every quad of lanes for itself ---- */

/* Word i of lane j becomes word j of lane i, of the four lanes of a quad. */
DEVICE void transpose_quad(uint32_t (&w)[4])
{
  const bool odd = lane_id() & 1, upper = lane_id() & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(ALL_LANES, odd ? w[i] : w[i + 1], 1);
    w[i] = odd ? got : w[i], w[i + 1] = odd ? w[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t got = __shfl_xor_sync(ALL_LANES, upper ? w[i] : w[i + 2], 2);
    w[i] = upper ? got : w[i], w[i + 2] = upper ? w[i + 2] : got;
  }
}

/* A lane's 16 bytes of 64 that a quad has of a row, from the accumulators of 64 / sizeof(Y) q. 16-bit: of four octets
 * lane i gets the i-th; f32: of two octets lanes 0, 2 get the first, 1, 3 the second. Begins at element `offset`. */
template <class Y> struct quad_vector {
  static constexpr int WIDTH = 64 / sizeof(Y), OCTETS = WIDTH / 8;
  uint4 bits;

  DEVICE static int offset()
  {
    return sizeof(Y) == 2 ? lane_id() % 4 * 8 : lane_id() % 2 * 8 + lane_id() % 4 / 2 * 4;
  }

  DEVICE quad_vector(const float (&v)[2 * OCTETS])
  {
    uint32_t w[4];
    if constexpr (sizeof(Y) == 2) {
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = pack_pair<Y>(v[2 * i], v[2 * i + 1]);
      transpose_quad(w);
    } else {
      const bool odd = lane_id() & 1;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float own = odd ? v[2 + i] : v[i], got = __shfl_xor_sync(ALL_LANES, odd ? v[i] : v[2 + i], 1);
        w[i] = __float_as_uint(odd ? got : own), w[2 + i] = __float_as_uint(odd ? own : got);
      }
    }
    bits = make_uint4(w[0], w[1], w[2], w[3]);
  }
};

template <class Y> DEVICE uint4 add_vectors(const uint4 &a, const uint4 &b)
{
  constexpr int N = 16 / sizeof(Y);
  float x[N], y[N];
  uint4 sum;
  load_f32<N>(reinterpret_cast<const Y *>(&a), x);
  load_f32<N>(reinterpret_cast<const Y *>(&b), y);
#pragma unroll
  for (int i = 0; i < N; i++) x[i] += y[i];
  store_f32<N>(reinterpret_cast<Y *>(&sum), x);
  return sum;
}

/* A consumer's tile: where it lies, and how far it is there. */
template <class Y> struct gradient_target {
  Y *to; /* of the thread's first row and vector */
  int64_t ld;
  int32_t rows, columns; /* from there on */

  template <class S>
  DEVICE static gradient_target of(const weight_gradient_args &g, const gradient_grid &m, const gradient_unit &unit,
                                   int group)
  {
    const int half = m.across ? unit.q / m.q_tiles : unit.p / m.p_tiles;
    const int32_t p = unit.p % m.p_tiles * S::BM + group * S::BLOCKS * S::BLOCK + warp_id() % 4 * 16 + lane_id() / 4,
                  q = unit.q % m.q_tiles * S::BN + quad_vector<Y>::offset();
    gradient_target t;
    t.ld = m.across ? g.d.k_stride : g.d.n_stride;
    const void *base = g.d.table[half] ? g.d.table[half][unit.expert] : g.d.base[half];
    const int64_t first = g.d.table[half] ? 0 : unit.expert * g.d.expert_stride;
    t.to = static_cast<Y *>(const_cast<void *>(base)) + first + p * t.ld + q;
    t.rows = m.p - p;
    t.columns = m.q - q;
    return t;
  }
};

/* The thread's part of one row of accumulators: BN / WIDTH vectors. */
template <class S, bool ADD>
DEVICE void store_row(typename S::Y *to, int32_t columns, float scale, const float (&acc)[S::ACCUMULATORS], int h)
{
  using vector = quad_vector<typename S::Y>;
  constexpr int COUNT = S::BN / vector::WIDTH, AT_ONCE = COUNT % 4 == 0 ? 4 : COUNT % 6 == 0 ? 6 : COUNT;
  static_assert(COUNT % AT_ONCE == 0, "whole turns");
#pragma unroll
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    uint4 there[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int at = (first + j) * vector::WIDTH;
      if (ADD && at < columns) there[j] = load_relaxed_vector(to + at);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int m = first + j, at = m * vector::WIDTH;
      float v[2 * vector::OCTETS];
#pragma unroll
      for (int i = 0; i < 2 * vector::OCTETS; i++) v[i] = scale * acc[4 * (m * vector::OCTETS + i / 2) + 2 * h + i % 2];
      const vector own(v);
      if (at < columns)
        *reinterpret_cast<uint4 *>(to + at) = ADD ? add_vectors<typename S::Y>(there[j], own.bits) : own.bits;
    }
  }
}

template <class S, bool ADD>
DEVICE void store_gradient(const gradient_target<typename S::Y> &t, float scale,
                           const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = i * S::BLOCK + h * 8;
      store_row<S, ADD>(t.to + row * t.ld, row < t.rows ? t.columns : 0, scale, acc[i], h);
    }
}

template <class S>
DEVICE void consume_gradient(const weight_gradient_sm90_args &args, gradient_smem<S> &smem)
{
  const gradient_grid &m = smem.grid;
  gradient_unit &own = smem.units[warp_id()];
  const int group = threadIdx.x / S::GROUP - 1;
  pipeline_state<S::STAGES> at;
#pragma unroll 1
  for (int32_t index = (int)blockIdx.x / S::CLUSTER;; index += (int)gridDim.x / S::CLUSTER) {
    const gradient_unit unit = gradient_unit_of<S>(args.g, m, index);
    if (unit.expert < 0) return;
    const int32_t p = unit.p % m.p_tiles * S::BM + group * S::BLOCKS * S::BLOCK;
    if (p >= m.p || unit.p >= m.p_all || unit.q >= m.q_all) {
      skip_rows<S>(smem, at, unit.steps);
      continue;
    }
    float acc[S::BLOCKS][S::ACCUMULATORS] = {}; /* anew: kept from tile to tile, ptxas would move them amid wgmmas */
    if (lane_id() == 0) own = unit, own.index = index;
    sum_rows<S>(smem, at, group, unit.steps, acc);
    if (lane_id() == 0) own.stage = at.stage, own.phase = at.phase;
    __syncwarp();
    const auto target = gradient_target<typename S::Y>::template of<S>(args.g, m, own, group);
    if (!args.g.accumulates)
      store_gradient<S, false>(target, args.g.scale, acc);
    else if (own.steps > 0)
      store_gradient<S, true>(target, args.g.scale, acc);
    __syncwarp();
    index = own.index, at.stage = own.stage, at.phase = own.phase;
    __syncwarp(); /* read before the next one's is written */
  }
}

template <class S> DEVICE void gradient_gemm(const weight_gradient_sm90_args &args, gradient_smem<S> &smem)
{
  if (threadIdx.x == 0) {
    smem.grid = gradient_grid_of<S>(args.g);
    prefetch_tensormap(args.p);
    prefetch_tensormap(args.q);
    for (int s = 0; s < S::STAGES; s++) {
      mbarrier_init(&smem.full[s], 1);
      mbarrier_init(&smem.empty[s], S::CLUSTER * S::CONSUMERS * S::GROUP / WARP_SIZE);
    }
    fence_mbarrier_init();
  }
  wait_for_earlier_grids();
  fence_proxy_async_global(); /* they wrote the rows that the boxes bring */
  barrier_cluster();          /* the other CTA's barriers are initialised */
  if (threadIdx.x < S::GROUP) {
    setmaxnreg_dec<S::PRODUCER_REGISTERS>();
    if (warp_id() == 0) {
      if (smem.grid.share_p)
        produce_gradient<S, true>(args, smem);
      else
        produce_gradient<S, false>(args, smem);
    }
  } else {
    setmaxnreg_inc<S::CONSUMER_REGISTERS>();
    consume_gradient<S>(args, smem);
  }
  __syncwarp();
  barrier_cluster(); /* nobody writes to a CTA that has left */
}

#endif
