/*
 * FORM_wgmma and FORM_pair: grouped GEMM on the warpgroup tensor cores of sm_90a, for K-major weights and more than 16 rows
 * an expert.
 *
 * Weights are the 64-row operand of wgmma, rows (tokens) the other, whose width is any multiple of 16: an expert's rows
 * are cut evenly, and nothing is computed but the last few columns' padding. A CTA has one warpgroup of producers and
 * two of consumers around a ring of stages of 64 k:
 *   weights  one TMA box a stage, through a tensor map that alternates 8 gate and the same 8 up rows (host/tmap.c), so
 *            a thread finds both factors of a channel in its own registers;
 *   rows     up: gathered by cp.async into the same 128-byte swizzle; down: TMA boxes of 16 rows.
 * The 64-row blocks of a tile belong to the consumers in turn. Nothing joins the two but the ring.
 *
 * FORM_pair is the same by clusters of two CTAs that work on two row tiles of an expert: each loads half of the weights,
 * for both. It pays where the weights' way from L2 is the limit; where they come from memory, and each is used by two
 * tiles at most, the two CTAs only wait for each other (bench/NOTES.md).
 */
#ifndef CUMOE_WGMMA_CUH
#define CUMOE_WGMMA_CUH

#include "epilogue.cuh"
#include "mma_sm90.cuh"

template <class T_, bool UP_, int CLUSTER_, int BM_, int BN, int BK, int STAGES_, int WARPS> struct wgmma_shape {
  using T = T_;
  static constexpr bool UP = UP_;
  static constexpr int CLUSTER = CLUSTER_, PAIR_BM = CLUSTER * BM_; /* CTAs; rows of them together */
  static constexpr int BM = BM_, STEP = WGMMA_STEP, STAGES = STAGES_, THREADS = WARPS * WARP_SIZE;
  static constexpr int COLUMNS =
      UP ? 2 * BN : BN; /* weight rows of a tile: an ungated up tile has twice the channels */
  static constexpr int CONSUMERS = 2, GROUP = 128, BLOCK = 64;
  static constexpr int BLOCKS = COLUMNS / BLOCK / CONSUMERS,
                       ACCUMULATORS = BM / 2; /* of a consumer; of a block a thread */
  static_assert(BK == WGMMA_BK && WARPS == 12, "a swizzle line of k; three warpgroups");
  static_assert(BM % WGMMA_STEP == 0 && BM <= 256 && COLUMNS % (BLOCK * CONSUMERS) == 0, "whole wgmma operands");

  static constexpr int CONSUMER_REGISTERS = BLOCKS * ACCUMULATORS > 160 ? 232 : 224;
  static constexpr int PRODUCER_REGISTERS = 504 - CONSUMERS * CONSUMER_REGISTERS; /* 384 threads start with 168 each */

  /* Gathering: 8 threads copy the 128 bytes of a row. */
  static constexpr int GATHER_ROWS = GROUP / 8, GATHERS = BM / GATHER_ROWS;
  static constexpr int CHUNK = 32;               /* tokens that a consumer finishes at once, as registers allow */
  static constexpr int CHUNK_VALUES = CHUNK / 4; /* of them, of a channel, in a thread */
};

enum { UNITS_AHEAD = 8 }; /* more than stages: a unit has at least one */

template <class S> struct wgmma_smem {
  typename S::T weights[S::STAGES][S::COLUMNS * WGMMA_BK];
  typename S::T rows[S::STAGES][S::BM * WGMMA_BK];
  uint4 staged[S::CONSUMERS][S::BLOCKS][S::CHUNK * 8]; /* a block: tokens of 128 bytes */
  float row_weights[S::CONSUMERS][S::BM];
  uint64_t full[S::STAGES], empty[S::STAGES];
  tile_unit units[UNITS_AHEAD];
  tile_table table;
};

/* A place in the ring; consumers wait for its phase, producers for the other. */
template <class S> struct ring_place {
  uint32_t stage = 0, phase = 0;
  DEVICE void advance()
  {
    if (++stage == S::STAGES) stage = 0, phase ^= 1;
  }
};

DEVICE void wait_for(uint64_t *barrier, uint32_t parity)
{
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

/* ---- units ---- */

template <class S> DEVICE int wgmma_channels(const gemm_args &args)
{
  return S::UP && args.gated ? S::COLUMNS / 2 : S::COLUMNS;
}

/* What this CTA does of pair `index`; expert -1 past the last. An expert's rows are cut at multiples of WGMMA_STEP into
 * tiles as equal as can be, a multiple of CLUSTER of them: the CTAs of a cluster take row tiles of the same channels. Row
 * tiles advance first, inside bands, then channels. */
template <class S> DEVICE tile_unit wgmma_unit(const gemm_args &args, const tile_table &table, int64_t index)
{
  constexpr int BAND = 2304 / S::PAIR_BM;
  const int n_tiles = ceil_div(args.n, wgmma_channels<S>(args));
  tile_unit unit = {-1, 0, 0, 0};
  if (index >= (int64_t)table.before[args.experts] * n_tiles) return unit;
  unit.expert = expert_of_tile(args, table, (int)(index / n_tiles));
  const row_range rows = expert_rows(args, unit.expert);
  const int first = table.before[unit.expert], pairs = table.before[unit.expert + 1] - first,
            tiles = pairs * S::CLUSTER;
  const int64_t local = index - (int64_t)first * n_tiles;
  const int band = (int)(local / (BAND * n_tiles)) * BAND, height = min(pairs - band, BAND);
  const int in_band = (int)(local - (int64_t)band * n_tiles);
  const int m = (band + in_band % height) * S::CLUSTER + cluster_ctarank();
  unit.n = in_band / height;
  const int64_t steps = ceil_div(rows.count, S::STEP);
  const int32_t begin = (int32_t)(steps * m / tiles) * WGMMA_STEP,
                end = (int32_t)(steps * (m + 1) / tiles) * WGMMA_STEP;
  unit.row = rows.begin + begin;
  unit.rows =
      min(min(end, rows.count) - begin, S::BM); /* more only if a bad route had its table cut; of few rows none */
  return unit;
}

/* ---- producers ---- */

/* What a thread gathers: 16 bytes of k of each of these rows; -1: zeros. */
template <class S> struct gather {
  int32_t source[S::GATHERS];

  DEVICE static int row_of(int i) { return threadIdx.x / 8 + i * S::GATHER_ROWS; }

  DEVICE void aim(const gemm_args &args, const tile_unit &unit)
  {
    const int64_t pairs = args.row_pair ? token_total(args.tokens) * args.top_k : args.rows_cap;
    constexpr int64_t NONE = INT64_MIN; /* -1 is a bad pair too */
    int64_t bad = NONE;
#pragma unroll
    for (int i = 0; i < S::GATHERS; i++) {
      const int r = row_of(i);
      source[i] = -1;
      if (r >= unit.rows) continue;
      const int32_t row = unit.row + r, pair = args.row_pair ? __ldg(args.row_pair + row) : row;
      if (pair < 0 || pair >= pairs)
        bad = pair;
      else
        source[i] = args.row_pair ? (int32_t)((uint32_t)pair / (uint32_t)args.top_k) : pair;
    }
    if (bad != NONE) report_fault_inline(args.fault, FAULT_ROUTE, 0, bad);
  }

  DEVICE void copy(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &unit, int stage, int k0) const
  {
    const int row = threadIdx.x / 8, vector = threadIdx.x % 8, k = k0 + vector * 8;
    const char *from = static_cast<const char *>(args.g.a) + (int64_t)k * sizeof(typename S::T);
    const uint32_t to = shared_address(smem.rows[stage]) + row * 128 + (vector ^ row % 8) * 16;
#pragma unroll
    for (int i = 0; i < S::GATHERS; i++) {
      if (i * S::GATHER_ROWS >= unit.rows) break;
      const bool there = source[i] >= 0 && k < args.g.k;
      cp_async_cg_16(to + i * S::GATHER_ROWS * 128,
                     there ? from + source[i] * args.g.a_ld * (int64_t)sizeof(typename S::T) : args.g.a,
                     there ? 16 : 0);
    }
    cp_async_mbarrier_arrive_noinc(&smem.full[stage]);
  }
};

/* The thread that speaks to the copy engine: a half of the weights of a stage, for both CTAs; down's rows, which lie one
 * after another. */
template <class S>
DEVICE void copy_boxes(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &unit, int stage, int k0)
{
  const int boxes = S::UP ? 0 : ceil_div(unit.rows, S::STEP), part = cluster_ctarank();
  const int eights = wgmma_channels<S>(args.g) / 8; /* of channels */
  uint64_t *full = &smem.full[stage];
  mbarrier_arrive_expect_tx(full, (S::COLUMNS + boxes * WGMMA_STEP) * WGMMA_BK * sizeof(typename S::T));
  if constexpr (S::CLUSTER == 1)
    cp_async_bulk_tensor_5d(smem.weights[stage], &args.weights, k0, 0, 0, unit.n * eights, unit.expert, full);
  else
    cp_async_bulk_tensor_5d_multicast(smem.weights[stage] + part * (S::COLUMNS / S::CLUSTER) * WGMMA_BK, &args.weights,
                                      k0, 0, 0, unit.n * eights + part * (eights / S::CLUSTER), unit.expert, full,
                                      (1 << S::CLUSTER) - 1);
  for (int i = 0; i < boxes; i++)
    cp_async_bulk_tensor_2d(smem.rows[stage] + i * WGMMA_STEP * WGMMA_BK, &args.rows, k0, unit.row + i * WGMMA_STEP,
                            full);
}

/* Units are told to the consumers through the barrier of their first stage; one without expert is the last. */
template <class S> DEVICE void produce(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  if (!S::UP && threadIdx.x != 0) return;
  ring_place<S> at;
  gather<S> rows;
  int slot = 0;
  tile_unit unit;
#pragma unroll 1
  for (int64_t index = blockIdx.x / S::CLUSTER;; index += gridDim.x / S::CLUSTER, slot = (slot + 1) % UNITS_AHEAD) {
    unit = wgmma_unit<S>(args.g, smem.table, index);
    if (S::UP) rows.aim(args.g, unit);
#pragma unroll 1
    for (int k0 = 0; k0 < args.g.k; k0 += WGMMA_BK, at.advance()) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      if (threadIdx.x == 0) {
        if (k0 == 0) smem.units[slot] = unit;
        if (unit.expert >= 0)
          copy_boxes<S>(args, smem, unit, at.stage, k0);
        else
          mbarrier_arrive(&smem.full[at.stage]);
      }
      if (S::UP) {
        __syncwarp();
        rows.copy(args, smem, unit, at.stage, k0);
      }
      if (unit.expert < 0) return;
    }
  }
}

/* ---- consumers ---- */

/* A warp is done with a stage, which both CTAs fill. */
template <class S> DEVICE void release_stage(wgmma_smem<S> &smem, int stage)
{
  if constexpr (S::CLUSTER == 1) {
    if (lane_id() == 0) mbarrier_arrive(&smem.empty[stage]);
  } else if (lane_id() < S::CLUSTER) {
    mbarrier_arrive_cluster(&smem.empty[stage], lane_id());
  }
}

/* acc = weights x rows of one unit, N tokens wide. A stage is given back one step later, when its wgmmas are over. */
template <class S, int N>
DEVICE void multiply_n(const gemm_args &args, wgmma_smem<S> &smem, ring_place<S> &at, int group,
                       float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  int before = -1;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += WGMMA_BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    if (S::UP) fence_proxy_async_shared(); /* gathered rows came by cp.async */
    const uint64_t a = wgmma_operand(smem.weights[at.stage] + group * S::BLOCK * WGMMA_BK);
    const uint64_t b = wgmma_operand(smem.rows[at.stage]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < WGMMA_BK / 16; k++)
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++)
        wgmma_m64k16<typename S::T, N>::run(acc[i], a + k * 2 + i * S::CONSUMERS * 512, b + k * 2, k > 0 || k0 > 0);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (before >= 0) release_stage<S>(smem, before);
    before = at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  release_stage<S>(smem, before);
}

template <class S, int N>
DEVICE void multiply(const gemm_args &args, wgmma_smem<S> &smem, ring_place<S> &at, int group, int rows,
                     float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (N > WGMMA_STEP) {
    if (rows <= N - WGMMA_STEP) {
      multiply<S, N - WGMMA_STEP>(args, smem, at, group, rows, acc);
      return;
    }
  }
  multiply_n<S, N>(args, smem, at, group, acc);
}

/* Bias of a thread's two accumulator rows in each block: gate and up of one channel, or two channels. */
template <class S> struct row_bias {
  float of[S::BLOCKS][2];

  DEVICE row_bias(const gemm_args &args, const tile_unit &unit, int group)
  {
    const bool gated = S::UP && args.gated;
    const int row = threadIdx.x / WARP_SIZE % 4 * 16 + lane_id() / 4;
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int block = (i * S::CONSUMERS + group) * S::BLOCK, half = gated ? h : 0;
        const int local = gated ? (block + row - lane_id() / 4) / 2 + lane_id() / 4 : block + row + 8 * h;
        const int64_t channel = unit.n * wgmma_channels<S>(args) + local;
        of[i][h] = 0.f;
        if (args.b.bias[half] && channel < args.n)
          of[i][h] =
              load_any(args.b.bias[half], unit.expert * args.b.bias_expert_stride + channel * args.b.bias_n_stride,
                       args.b.bias_dtype);
      }
  }
};

/* A block's accumulators of CHUNK tokens become outputs: one of (first, second) if gated, else both. */
template <class S>
DEVICE void finish_block(const gemm_sm90_args &args, const float *row_weights, const float (&bias)[2],
                         const float (&acc)[S::ACCUMULATORS], float (&first)[S::CHUNK_VALUES],
                         float (&second)[S::CHUNK_VALUES])
{
#pragma unroll
  for (int j = 0; j < S::CHUNK / 8; j++)
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const float weight = args.g.pair_weights ? row_weights[j * 8 + lane_id() % 4 * 2 + t] : 1.f;
      const float low = acc[4 * j + t], high = acc[4 * j + 2 + t];
      first[2 * j + t] = (args.up_first ? high : low) * weight + bias[0];
      second[2 * j + t] = (args.up_first ? low : high) * weight + bias[1];
    }
  if (!S::UP) return;
  activate<S::CHUNK_VALUES, true>(args.g, first, second);
  if (!args.g.gated) activate<S::CHUNK_VALUES, true>(args.g, second, first);
}

/* 8 channels of a chunk of tokens, from a warp to the staging rows of the tokens: 16-byte place `vector` of 8. */
template <class S> DEVICE void stage_channels(uint4 *staged, int vector, const float (&value)[S::CHUNK_VALUES])
{
#pragma unroll
  for (int i = 0; i < S::CHUNK / 32; i++) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; j++) packed[j] = pack_pair<typename S::T>(value[8 * i + 2 * j], value[8 * i + 2 * j + 1]);
    stmatrix_x4_trans(shared_address(staged + (i * 32 + lane_id()) * 8 + (vector ^ lane_id() % 8)), packed);
  }
}

/* Staged tokens to memory: a thread has the same 8 channels of every few tokens. */
template <class S>
DEVICE void store_chunk(const gemm_args &args, const tile_unit &unit, uint4 (*staged)[S::CHUNK * 8], int group,
                        int token0)
{
  const int shift = S::UP && args.gated ? 2 : 3, vectors = 1 << shift; /* of a block of a token */
  const int thread = threadIdx.x % S::GROUP, vector = thread & (vectors - 1), block = (thread >> shift) % S::BLOCKS;
  const int first = (thread >> shift) / S::BLOCKS, step = S::GROUP / S::BLOCKS >> shift;
  const int channel = (unit.n * S::BLOCKS * S::CONSUMERS + block * S::CONSUMERS + group) * vectors * 8 + vector * 8;
  const int tokens = channel < args.n ? min(unit.rows - token0, S::CHUNK) : 0;
  typename S::T *to = static_cast<typename S::T *>(args.c) + (int64_t)(unit.row + token0 + first) * args.c_ld + channel;
#pragma unroll 4
  for (int token = first; token < tokens; token += step, to += step * args.c_ld)
    *reinterpret_cast<uint4 *>(to) = staged[block][token * 8 + (vector ^ token % 8)];
}

/* A chunk of tokens a turn; the accumulators of the later ones move down, so that the activations are in the program
 * once. */
template <class S>
DEVICE void store_tile(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &unit, int group,
                       float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const int warp = warp_id() % 4, barrier = 1 + group;
  const bool gated = S::UP && args.g.gated;
  if (S::UP && args.g.pair_weights)
    for (int r = threadIdx.x % S::GROUP; r < unit.rows; r += S::GROUP)
      smem.row_weights[group][r] = row_weight(args.g, unit.row + r);
#pragma unroll 1
  for (int token0 = 0; token0 < unit.rows; token0 += S::CHUNK) {
    bar_sync(barrier, S::GROUP);                 /* the last chunk is read, the weights are there */
    const row_bias<S> bias(args.g, unit, group); /* again each time: registers are full */
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++) {
      float first[S::CHUNK_VALUES], second[S::CHUNK_VALUES];
      finish_block<S>(args, smem.row_weights[group] + token0, bias.of[i], acc[i], first, second);
      uint4 *staged = smem.staged[group][i];
      stage_channels<S>(staged, gated ? warp : warp * 2, first);
      if (!gated) stage_channels<S>(staged, warp * 2 + 1, second);
#pragma unroll
      for (int j = 0; j < S::ACCUMULATORS - S::CHUNK / 2; j++) acc[i][j] = acc[i][j + S::CHUNK / 2];
    }
    bar_sync(barrier, S::GROUP);
    store_chunk<S>(args.g, unit, smem.staged[group], group, token0);
  }
}

template <class S> DEVICE void consume(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  const int group = threadIdx.x / S::GROUP - 1;
  ring_place<S> at;
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD) {
    wait_for(&smem.full[at.stage], at.phase);
    const tile_unit unit = smem.units[slot];
    if (unit.expert < 0) break;
    float acc[S::BLOCKS][S::ACCUMULATORS] = {}; /* anew: kept from tile to tile, ptxas would move them amid wgmmas */
    multiply<S, S::BM>(args.g, smem, at, group, unit.rows, acc);
    store_tile<S>(args, smem, unit, group, acc);
  }
}

template <class S> DEVICE void wgmma_gemm(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  if (threadIdx.x == 0) {
    prefetch_tensormap(&args.weights);
    if (!S::UP) prefetch_tensormap(&args.rows);
    for (int s = 0; s < S::STAGES; s++) {
      mbarrier_init(&smem.full[s], S::UP ? 1 + S::GROUP : 1);
      mbarrier_init(&smem.empty[s], S::CLUSTER * S::CONSUMERS * S::GROUP / WARP_SIZE);
    }
    fence_mbarrier_init();
  }
  wait_for_earlier_grids();
  fence_proxy_async_global(); /* they wrote the rows that down copies */
  build_tile_table<S::PAIR_BM, S::THREADS>(args.g, smem.table);
  barrier_cluster(); /* the other CTA's barriers are there */
  if (threadIdx.x < S::GROUP) {
    setmaxnreg_dec<S::PRODUCER_REGISTERS>();
    produce<S>(args, smem);
  } else {
    setmaxnreg_inc<S::CONSUMER_REGISTERS>();
    consume<S>(args, smem);
  }
  __syncwarp();
  barrier_cluster(); /* nobody writes to a CTA that has left */
}

#endif
