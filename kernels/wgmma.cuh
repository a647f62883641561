/*
 * FORM_wgmma: grouped GEMM on the warpgroup tensor cores of sm_90a, for K-major weights.
 *
 * Weights are the 64-row operand of wgmma, rows (tokens) the other, whose width is any multiple of 16: an expert's rows
 * are cut evenly, and nothing is computed but the last few columns' padding. A CTA has one warpgroup of producers and
 * two of consumers around a ring of stages of 64 k:
 *   weights  TMA boxes, through a tensor map that alternates 8 gate and the same 8 up rows (host/tmap.c), so a thread
 *            finds both factors of a channel in its own registers;
 *   rows     TMA boxes of 16 rows where they lie one after another (down; up of permuted rows, or of a copy that idle
 *            warps make on the way: ahead.cuh), else gathered by cp.async into the same 128-byte swizzle.
 * Each consumer has half of the weight rows of a tile. Nothing joins the two but the ring.
 *
 * CTAs come in clusters of two, and each loads half of what the two share, for both by multicast: the way from L2, some
 * 31 bytes a clock an SM, is what bounds experts of a few hundred rows (bench/NOTES.md). Where an expert has an even
 * number of row tiles, the two take two of them and share the weights, which then leave L2 half as often; else they take
 * neighbouring channels of one row tile and share its rows.
 */
#ifndef CUMOE_WGMMA_CUH
#define CUMOE_WGMMA_CUH

#include "ahead.cuh"
#include "epilogue.cuh"

template <class T_, bool UP_, int BM_, int BN, int BK_, int STAGES_, int WARPS> struct wgmma_shape {
  using T = T_;
  static constexpr bool UP = UP_;
  static constexpr int CLUSTER = 2, BM = BM_, STEP = WGMMA_STEP, STAGES = STAGES_;
  static constexpr bool COPIED = false; /* by threads, weights and rows */
  static constexpr int COLUMNS =
      UP ? 2 * BN : BN; /* weight rows of a tile: an ungated up tile has twice the channels */
  static constexpr int CONSUMERS = 2, GROUP = 128, BLOCK = 64, THREADS = WARPS * WARP_SIZE;
  static constexpr int BLOCKS = COLUMNS / BLOCK / CONSUMERS,
                       ACCUMULATORS = BM / 2; /* of a consumer; of a block a thread */
  static_assert(BK_ == WGMMA_BK && THREADS == (CONSUMERS + 1) * GROUP, "a swizzle line of k; three warpgroups");
  static_assert(BM % WGMMA_STEP == 0 && BM <= 256 && COLUMNS % (BLOCK * CONSUMERS) == 0, "whole wgmma operands");

  static constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56; /* 384 threads start with 168 each */

  /* Gathering: 8 threads copy the 128 bytes of a row. */
  static constexpr int GATHER_ROWS = GROUP / 8, GATHERS = BM / GATHER_ROWS;
  static constexpr int CHUNK = 32; /* tokens that a consumer finishes at once: what is left of shared memory */
  static constexpr int CHUNK_VALUES = CHUNK / 4; /* of them, of a channel, in a thread */
};

enum { UNITS_AHEAD = 12 }; /* more than stages: a unit has at least one */

/* Between accumulators and memory, a consumer's own. */
template <class S> struct wgmma_staging {
  uint4 staged[S::CONSUMERS][S::CHUNK * 8]; /* 64 channels of each token */
  float row_weights[S::CONSUMERS][S::BM];
};

template <class S> struct wgmma_smem {
  typename S::T weights[S::STAGES][S::COLUMNS * WGMMA_BK];
  typename S::T rows[S::STAGES][S::BM * WGMMA_BK];
  wgmma_staging<S> staging;
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

/* A unit of a cluster as one of its CTAs sees it. */
struct cluster_unit {
  tile_unit tile; /* expert -1: past the last unit */
  bool paired;    /* the CTAs have two row tiles of the same channels; else neighbouring channels of one row tile */
  bool absent;    /* neither has channels: an odd number of channel tiles, paired */
};

/* An expert's rows are cut at multiples of WGMMA_STEP into tiles as equal as can be. Row tiles advance first, inside
 * bands, then channels. */
template <class S> DEVICE cluster_unit wgmma_unit(const gemm_args &args, const tile_table &table, int64_t index)
{
  const int n_tiles = ceil_div(args.n, wgmma_channels<S>(args)), n_pairs = ceil_div(n_tiles, S::CLUSTER);
  const int rank = cluster_ctarank();
  cluster_unit unit = {{-1, 0, 0, 0, 0}, false, false};
  if (index >= (int64_t)table.before[args.experts] * n_pairs) return unit;
  const int expert = expert_of_tile(args, table, (int)(index / n_pairs));
  const row_range rows = expert_rows(args, expert);
  const int first = table.before[expert], tiles = table.before[expert + 1] - first;
  unit.paired = tiles % 2 == 0;
  const int tall = unit.paired ? 2 : 1, wide = S::CLUSTER / tall; /* tiles of the cluster */
  const int heights = tiles / tall, widths = n_pairs * tall, most = 2304 / S::BM / tall;
  const int64_t local = index - (int64_t)first * n_pairs;
  const int band = (int)(local / ((int64_t)most * widths)) * most, height = min(heights - band, most);
  const int in_band = (int)(local - (int64_t)band * widths);
  const int m = (band + in_band % height) * tall + (unit.paired ? rank : 0);
  const int64_t steps = ceil_div(rows.count, S::STEP);
  const int32_t begin = (int32_t)(steps * m / tiles) * WGMMA_STEP,
                end = (int32_t)(steps * (m + 1) / tiles) * WGMMA_STEP;
  unit.tile.expert = expert;
  unit.tile.n = in_band / height * wide + (unit.paired ? 0 : rank);
  unit.tile.row = rows.begin + begin;
  unit.tile.rows =
      min(min(end, rows.count) - begin, S::BM); /* more only if a bad route had its table cut; of few rows none */
  unit.absent = unit.paired && unit.tile.n >= n_tiles;
  return unit;
}

/* Whether rows of A are anywhere, as the route says, or one after another. */
template <class S> DEVICE bool gathers(const gemm_args &args)
{
  return S::UP && args.row_pair && !args.packed && !args.copy;
}

template <class S> DEVICE bool copies(const gemm_args &args)
{
  return S::UP && args.copy;
}

/* ---- producers ---- */

/* What a thread gathers: 16 bytes of k of each of these rows; -1: zeros. */
template <class S> struct gather {
  int32_t source[S::GATHERS];

  DEVICE static int row_of(int i) { return threadIdx.x / 8 + i * S::GATHER_ROWS; }

  DEVICE void aim(const gemm_args &args, const tile_unit &unit)
  {
    const int64_t pairs = token_total(args.tokens) * args.top_k;
    constexpr int64_t NONE = INT64_MIN; /* -1 is a bad pair too */
    int64_t bad = NONE;
#pragma unroll
    for (int i = 0; i < S::GATHERS; i++) {
      const int r = row_of(i);
      source[i] = -1;
      if (r >= unit.rows) continue;
      const int32_t pair = __ldg(args.row_pair + unit.row + r);
      if (pair < 0 || pair >= pairs)
        bad = pair;
      else
        source[i] = (int32_t)((uint32_t)pair / (uint32_t)args.top_k);
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

/* The lane that speaks to the copy engine: this CTA's half of what the cluster shares, for both; the rest for itself. */
template <class S, bool PAIRED>
DEVICE void copy_boxes(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int boxes, int stage,
                       int k0)
{
  constexpr int HALF = S::COLUMNS / 2; /* weight rows of a box */
  constexpr uint16_t BOTH = 3;
  const int eights = wgmma_channels<S>(args.g) / 8, rank = cluster_ctarank(); /* of channels */
  uint64_t *full = &smem.full[stage];
  typename S::T *weights = smem.weights[stage], *rows = smem.rows[stage];
  mbarrier_arrive_expect_tx(full, (S::COLUMNS + boxes * WGMMA_STEP) * WGMMA_BK * sizeof(typename S::T));
  if constexpr (PAIRED) {
    cp_async_bulk_tensor_5d_multicast(weights + rank * HALF * WGMMA_BK, &args.weights, k0, 0, 0,
                                      tile.n * eights + rank * (eights / 2), tile.expert, full, BOTH);
    for (int i = 0; i < boxes; i++)
      cp_async_bulk_tensor_2d(rows + i * WGMMA_STEP * WGMMA_BK, &args.rows, k0, tile.row + i * WGMMA_STEP, full);
  } else {
    cp_async_bulk_tensor_5d(weights, &args.weights, k0, 0, 0, tile.n * eights, tile.expert, full);
    cp_async_bulk_tensor_5d(weights + HALF * WGMMA_BK, &args.weights, k0, 0, 0, tile.n * eights + eights / 2,
                            tile.expert, full);
    for (int i = rank; i < boxes; i += S::CLUSTER) {
      cp_async_bulk_tensor_2d_multicast(rows + i * WGMMA_STEP * WGMMA_BK, &args.rows, k0, tile.row + i * WGMMA_STEP,
                                        full, BOTH);
    }
  }
}

/* All of a unit's stages. It is told to the consumers through the barrier of the first. */
template <class S, bool PAIRED, bool GATHERING>
DEVICE void produce_unit(const gemm_sm90_args &args, wgmma_smem<S> &smem, const tile_unit &tile, int slot,
                         const gather<S> &rows, ring_place<S> &at)
{
  const int boxes = GATHERING ? 0 : ceil_div(tile.rows, S::STEP);
#pragma unroll 1
  for (int k0 = 0; k0 < args.g.k; k0 += WGMMA_BK, at.advance()) {
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (threadIdx.x < WARP_SIZE && elect_one()) {
      if (k0 == 0) smem.units[slot] = tile;
      copy_boxes<S, PAIRED>(args, smem, tile, boxes, at.stage, k0);
    }
    __syncwarp();
    if (!GATHERING) continue;
    rows.copy(args, smem, tile, at.stage, k0);
  }
}

/* A unit without expert is the last. */
template <class S, class Smem>
DEVICE void produce_end(Smem &smem, const tile_unit &tile, int slot, bool gathering, const ring_place<S> &at)
{
  wait_for(&smem.empty[at.stage], at.phase ^ 1);
  if (threadIdx.x == 0) {
    smem.units[slot] = tile;
    mbarrier_arrive(&smem.full[at.stage]);
  }
  if (gathering) mbarrier_arrive(&smem.full[at.stage]);
}

template <class S, bool GATHERING> DEVICE void produce_units(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  const int32_t copied = copies<S>(args.g) ? rows_to_copy(args.g) : 0;
  ring_place<S> at;
  gather<S> rows;
  int slot = 0;
#pragma unroll 1
  for (int64_t index = blockIdx.x / S::CLUSTER;; index += gridDim.x / S::CLUSTER) {
    const cluster_unit unit = wgmma_unit<S>(args.g, smem.table, index);
    if (unit.tile.expert < 0) return produce_end<S>(smem, unit.tile, slot, GATHERING, at);
    if (unit.absent) continue;
    if (GATHERING) rows.aim(args.g, unit.tile);
    if (!GATHERING && copies<S>(args.g)) await_rows(args.g, copied, unit.tile.row, unit.tile.rows);
    if (unit.paired)
      produce_unit<S, true, GATHERING>(args, smem, unit.tile, slot, rows, at);
    else
      produce_unit<S, false, GATHERING>(args, smem, unit.tile, slot, rows, at);
    slot = (slot + 1) % UNITS_AHEAD;
  }
}

template <class S> DEVICE void produce(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  if (S::UP && gathers<S>(args.g)) return produce_units<S, S::UP>(args, smem);
  if (copies<S>(args.g) && warp_id() != 0) return copy_rows(args.g);
  if (warp_id() == 0) produce_units<S, false>(args, smem);
}

/* ---- consumers ---- */

/* A warp is done with a stage, which both CTAs fill. */
template <class S, class Smem> DEVICE void release_stage(Smem &smem, int stage)
{
  if constexpr (S::CLUSTER == 1) {
    if (lane_id() == 0) mbarrier_arrive(&smem.empty[stage]);
  } else if (lane_id() < S::CLUSTER) {
    mbarrier_arrive_cluster(&smem.empty[stage], lane_id());
  }
}

/* acc = weights x rows of one unit, N tokens wide. A stage is given back one step later, when its wgmmas are over; at once
 * where memory is what all wait for. */
template <class S, int N, class Smem>
DEVICE void multiply_n(const gemm_args &args, Smem &smem, ring_place<S> &at, int group,
                       float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const bool copied = S::COPIED || gathers<S>(args);
  int before = -1;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += WGMMA_BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    if (copied) fence_proxy_async_shared(); /* by cp.async */
    const uint64_t a = wgmma_operand(smem.weights[at.stage] + group * S::BLOCKS * S::BLOCK * WGMMA_BK);
    const uint64_t b = wgmma_operand(smem.rows[at.stage]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < WGMMA_BK / 16; k++)
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++)
        wgmma_m64k16<typename S::T, N>::run(acc[i], a + k * 2 + i * 512, b + k * 2, k > 0 || k0 > 0);
    wgmma_commit_group();
    wgmma_wait_group<S::COPIED ? 0 : 1>();
    if (S::COPIED) before = at.stage;
    if (before >= 0) release_stage<S>(smem, before);
    before = at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  if (!S::COPIED) release_stage<S>(smem, before);
}

template <class S, int N, class Smem>
DEVICE void multiply(const gemm_args &args, Smem &smem, ring_place<S> &at, int group, int rows,
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

  DEVICE row_bias(const gemm_args &args, int expert, int channel0)
  {
    const bool gated = S::UP && args.gated;
    const int row = threadIdx.x / WARP_SIZE % 4 * 16 + lane_id() / 4;
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int block = i * S::BLOCK, half = gated ? h : 0;
        const int local = gated ? (block + row - lane_id() / 4) / 2 + lane_id() / 4 : block + row + 8 * h;
        const int64_t channel = channel0 + local;
        of[i][h] = 0.f;
        if (args.b.bias[half] && channel < args.n)
          of[i][h] = load_any(args.b.bias[half], expert * args.b.bias_expert_stride + channel * args.b.bias_n_stride,
                              args.b.bias_dtype);
      }
  }
};

/* A block's accumulators of CHUNK tokens become outputs: one of (first, second) if gated, else both. Whatever the
 * activation. */
template <class S>
DEVICE void finish_block(const gemm_args &args, bool up_first, const float *row_weights, const float (&bias)[2],
                         const float (&acc)[S::ACCUMULATORS], float (&first)[S::CHUNK_VALUES],
                         float (&second)[S::CHUNK_VALUES])
{
#pragma unroll
  for (int j = 0; j < S::CHUNK / 8; j++)
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const float weight = args.pair_weights ? row_weights[j * 8 + lane_id() % 4 * 2 + t] : 1.f;
      const float low = acc[4 * j + t], high = acc[4 * j + 2 + t];
      first[2 * j + t] = (up_first ? high : low) * weight + bias[0];
      second[2 * j + t] = (up_first ? low : high) * weight + bias[1];
    }
  if (!S::UP) return;
  activate<S::CHUNK_VALUES, true>(args, first, second);
  if (!args.gated) activate<S::CHUNK_VALUES, true>(args, second, first);
}

/* The same for what nearly every model wants: in place, a third of the instructions. */
enum finish_kind { FINISH_any, FINISH_silu, FINISH_swiglu /* biased, clamped, scaled */ };

DEVICE finish_kind finish_of(const gemm_args &args)
{
  if (!args.gated || args.pair_weights || (args.act != ACT_SILU && args.act != ACT_SWIGLU_OAI)) return FINISH_any;
  return args.act == ACT_SILU && !args.b.bias[0] && !args.b.bias[1] && !(args.act_limit > 0.f) ? FINISH_silu
                                                                                               : FINISH_swiglu;
}

struct swiglu {
  float limit, alpha, shift; /* limit: infinity if none */
  bool up_first;

  DEVICE swiglu(const gemm_args &args, bool up_lies_first)
      : limit(args.act_limit > 0.f ? args.act_limit : INFINITY), alpha(args.act == ACT_SILU ? 1.f : args.act_alpha),
        shift(args.act == ACT_SILU ? 0.f : 1.f), up_first(up_lies_first)
  {
  }

  template <finish_kind KIND> DEVICE float of(float low, float high, const float (&bias)[2]) const
  {
    float g = up_first ? high : low, u = up_first ? low : high;
    if (KIND == FINISH_silu) return g * sigmoid_of<true>(g, 1.f) * u;
    g = min_or_nan(g + bias[0], limit);
    u = -min_or_nan(-min_or_nan(u + bias[1], limit), limit);
    return g * sigmoid_of<true>(g, alpha) * (u + shift);
  }
};

/* 8 channels of a chunk of tokens, from a warp to the staging rows of the tokens: 16-byte place `vector` of 8. */
template <class S> DEVICE void stage_channels(uint4 *staged, int vector, const uint32_t (&packed)[4])
{
  static_assert(S::CHUNK == 32, "four matrices");
  stmatrix_x4_trans(shared_address(staged + lane_id() * 8 + (vector ^ lane_id() % 8)), packed);
}

template <class S> DEVICE void stage_channels(uint4 *staged, int vector, const float (&value)[S::CHUNK_VALUES])
{
  uint32_t packed[4];
#pragma unroll
  for (int j = 0; j < 4; j++) packed[j] = pack_pair<typename S::T>(value[2 * j], value[2 * j + 1]);
  stage_channels<S>(staged, vector, packed);
}

/* Channels of a consumer's tile, from the first of its accumulators' on. */
struct channel_span {
  int32_t first, end;
};

/* A chunk's staged channels, up to 64, to memory: a thread has the same 8 of every 16th token. */
template <class S>
DEVICE void store_chunk(const gemm_args &args, const tile_unit &unit, const uint4 *staged, channel_span span,
                        int token0)
{
  constexpr int STEP = S::GROUP / 8;
  const int thread = threadIdx.x % S::GROUP, vector = thread % 8, first = thread / 8, channel = span.first + vector * 8;
  const int tokens = channel < span.end ? min(unit.rows - token0, S::CHUNK) : 0;
  typename S::T *to = static_cast<typename S::T *>(args.c) + (int64_t)(unit.row + token0 + first) * args.c_ld + channel;
#pragma unroll
  for (int i = 0; i < S::CHUNK; i += STEP)
    if (first + i < tokens)
      *reinterpret_cast<uint4 *>(to + i * args.c_ld) = staged[(first + i) * 8 + (vector ^ first % 8)];
}

/* A chunk of tokens a turn; the accumulators of the later ones move down, so that the activations are in the program
 * once. */
template <class S>
DEVICE void store_any(const gemm_args &args, bool up_first, wgmma_staging<S> &smem, const tile_unit &unit, int group,
                      channel_span span, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const int warp = warp_id() % 4, barrier = 1 + group;
  const bool gated = S::UP && args.gated;
  uint4 *staged = smem.staged[group];
  if (S::UP && args.pair_weights)
    for (int r = threadIdx.x % S::GROUP; r < unit.rows; r += S::GROUP)
      smem.row_weights[group][r] = row_weight(args, unit.row + r);
#pragma unroll 1
  for (int token0 = 0; token0 < unit.rows; token0 += S::CHUNK) {
    bar_sync(barrier, S::GROUP);                           /* the last chunk is read, the weights are there */
    const row_bias<S> bias(args, unit.expert, span.first); /* again each time: registers are full */
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++) {
      float first[S::CHUNK_VALUES], second[S::CHUNK_VALUES];
      finish_block<S>(args, up_first, smem.row_weights[group] + token0, bias.of[i], acc[i], first, second);
      if (gated) {
        stage_channels<S>(staged, i * 4 + warp, first);
      } else {
        if (i > 0) bar_sync(barrier, S::GROUP);
        stage_channels<S>(staged, warp * 2, first);
        stage_channels<S>(staged, warp * 2 + 1, second);
        bar_sync(barrier, S::GROUP);
        store_chunk<S>(args, unit, staged, {span.first + i * S::BLOCK, span.end}, token0);
      }
#pragma unroll
      for (int j = 0; j < S::ACCUMULATORS - S::CHUNK / 2; j++) acc[i][j] = acc[i][j + S::CHUNK / 2];
    }
    if (!gated) continue;
    bar_sync(barrier, S::GROUP);
    store_chunk<S>(args, unit, staged, span, token0);
  }
}

/* Gated up of at most two blocks a consumer, which are 64 channels. Every accumulator stays where it is. */
template <class S, finish_kind KIND>
DEVICE void store_swiglu(const gemm_args &args, bool up_first, wgmma_staging<S> &smem, const tile_unit &unit, int group,
                         channel_span span, const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  static_assert(S::BLOCKS <= 2 && S::ACCUMULATORS % (S::CHUNK / 2) == 0, "up to 64 channels; whole chunks");
  const row_bias<S> bias(args, unit.expert, span.first);
  const swiglu act(args, up_first);
  uint4 *staged = smem.staged[group];
#pragma unroll
  for (int token0 = 0; token0 < S::BM; token0 += S::CHUNK) {
    if (token0 >= unit.rows) break;
    bar_sync(1 + group, S::GROUP);
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float *v = &acc[i][token0 / 2 + j * 4];
        packed[j] =
            pack_pair<typename S::T>(act.of<KIND>(v[0], v[2], bias.of[i]), act.of<KIND>(v[1], v[3], bias.of[i]));
      }
      stage_channels<S>(staged, i * 4 + warp_id() % 4, packed);
    }
    bar_sync(1 + group, S::GROUP);
    store_chunk<S>(args, unit, staged, span, token0);
  }
}

template <class S>
DEVICE void store_down(const gemm_args &args, bool up_first, wgmma_staging<S> &smem, const tile_unit &unit, int group,
                       channel_span span, const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const row_bias<S> bias(args, unit.expert, span.first);
  uint4 *staged = smem.staged[group];
#pragma unroll
  for (int token0 = 0; token0 < S::BM; token0 += S::CHUNK) {
    if (token0 >= unit.rows) break;
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++) {
      bar_sync(1 + group, S::GROUP);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float *v = &acc[i][token0 / 2 + j * 4 + 2 * h];
          packed[j] = pack_pair<typename S::T>(v[0] + bias.of[i][h], v[1] + bias.of[i][h]);
        }
        stage_channels<S>(staged, warp_id() % 4 * 2 + h, packed);
      }
      bar_sync(1 + group, S::GROUP);
      store_chunk<S>(args, unit, staged, {span.first + i * S::BLOCK, span.end}, token0);
    }
  }
}

template <class S>
DEVICE void store_tile(const gemm_args &args, bool up_first, wgmma_staging<S> &smem, const tile_unit &unit, int group,
                       channel_span span, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (!S::UP) {
    store_down<S>(args, up_first, smem, unit, group, span, acc);
  } else {
    switch (finish_of(args)) {
    case FINISH_silu: store_swiglu<S, FINISH_silu>(args, up_first, smem, unit, group, span, acc); break;
    case FINISH_swiglu: store_swiglu<S, FINISH_swiglu>(args, up_first, smem, unit, group, span, acc); break;
    default: store_any<S>(args, up_first, smem, unit, group, span, acc);
    }
  }
}

/* A consumer whose channels are all past the last one keeps the ring going. */
template <class S, class Smem> DEVICE void skip(const gemm_args &args, Smem &smem, ring_place<S> &at)
{
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += WGMMA_BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    __syncwarp();
    release_stage<S>(smem, at.stage);
  }
}

template <class S> DEVICE void consume(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  const int group = threadIdx.x / S::GROUP - 1, channels = wgmma_channels<S>(args.g);
  ring_place<S> at;
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD) {
    wait_for(&smem.full[at.stage], at.phase);
    const tile_unit unit = smem.units[slot];
    if (unit.expert < 0) break;
    const int channel0 = unit.n * channels + group * (channels / S::CONSUMERS);
    if (channel0 >= args.g.n) {
      skip<S>(args.g, smem, at);
      continue;
    }
    float acc[S::BLOCKS][S::ACCUMULATORS] = {}; /* anew: kept from tile to tile, ptxas would move them amid wgmmas */
    multiply<S, S::BM>(args.g, smem, at, group, unit.rows, acc);
    store_tile<S>(args.g, args.up_first, smem.staging, unit, group, {channel0, args.g.n}, acc);
  }
}

template <class S> DEVICE void wgmma_gemm(const gemm_sm90_args &args, wgmma_smem<S> &smem)
{
  if (threadIdx.x == 0) {
    prefetch_tensormap(&args.weights);
    if (!gathers<S>(args.g)) prefetch_tensormap(&args.rows);
    for (int s = 0; s < S::STAGES; s++) {
      mbarrier_init(&smem.full[s], gathers<S>(args.g) ? 1 + S::GROUP : 1);
      mbarrier_init(&smem.empty[s], S::CLUSTER * S::CONSUMERS * S::GROUP / WARP_SIZE);
    }
    fence_mbarrier_init();
  }
  wait_for_earlier_grids();
  fence_proxy_async_global(); /* they wrote the rows that the boxes bring */
  build_tile_table<S::BM, S::THREADS>(args.g, smem.table);
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
