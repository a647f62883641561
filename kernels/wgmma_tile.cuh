/*
 * What the forms wgmma and stream share: a warpgroup of producers and two of consumers around a ring; a tile of weight rows x
 * rows (tokens) from the ring to accumulators, and from there to memory.
 */
#ifndef CUMOE_WGMMA_TILE_CUH
#define CUMOE_WGMMA_TILE_CUH

#include "epilogue.cuh"
#include "ring.cuh"

enum { UNITS_AHEAD = 12 }; /* more than stages: a unit has at least one */

/*
 * Of a shape S made from it, three things are asked besides:
 *   CLUSTER         CTAs that fill each other's stages
 *   gathers(args)   whether stages hold what threads have copied (cp.async), not the copy engine alone
 *   AT_ONCE         a stage is given back as soon as it is used, where memory is what all wait for; else one step later,
 *                   when the next products are under way
 */
template <class T_, bool UP_, int BM_, int BN, int BK, int STAGES_, int WARPS> struct ring_shape {
  using T = T_;
  static constexpr bool UP = UP_;
  static constexpr int BM = BM_, STAGES = STAGES_;
  static constexpr int COLUMNS =
      UP ? 2 * BN : BN; /* weight rows of a tile: an ungated up tile has twice the channels */
  static constexpr int CONSUMERS = 2, GROUP = 128, BLOCK = 64, THREADS = WARPS * WARP_SIZE;
  static constexpr int BLOCKS = COLUMNS / BLOCK / CONSUMERS,
                       ACCUMULATORS = BM / 2; /* of a consumer; of a block a thread */
  static constexpr int CHUNK = 32; /* tokens that a consumer finishes at once: what is left of shared memory */
  static constexpr int CHUNK_VALUES = CHUNK / 4; /* of them, of a channel, in a thread */
  static_assert(BK == WGMMA_BK && THREADS == (CONSUMERS + 1) * GROUP, "a swizzle line of k; three warpgroups");
  static_assert(BM % CHUNK == 0 && BM % WGMMA_STEP == 0 && BM <= 256, "whole chunks, whole wgmma operands");
  static_assert(COLUMNS % (BLOCK * CONSUMERS) == 0 && UNITS_AHEAD > STAGES, "whole blocks; see there");
};

/* Between accumulators and memory, a consumer's own. */
template <class S> struct wgmma_staging {
  uint4 staged[S::CONSUMERS][S::CHUNK * 8]; /* 64 channels of each token */
  float row_weights[S::CONSUMERS][S::BM];
};

template <class S> struct ring_smem {
  typename S::T weights[S::STAGES][S::COLUMNS * WGMMA_BK];
  typename S::T rows[S::STAGES][S::BM * WGMMA_BK];
  wgmma_staging<S> staging;
  uint64_t full[S::STAGES], empty[S::STAGES];
  tile_unit units[UNITS_AHEAD];
  tile_table table;
};

/* Row tile `tile` of an expert's `tiles`: its rows are cut at multiples of WGMMA_STEP into tiles as equal as can be. More than BM
 * rows only if a bad route had its table cut, of few rows none: those past BM are left. */
template <class S> DEVICE row_range rows_of_tile(row_range rows, int tile, int tiles)
{
  const int64_t steps = ceil_div(rows.count, (int)WGMMA_STEP);
  const int32_t begin = (int32_t)(steps * tile / tiles) * WGMMA_STEP,
                end = (int32_t)(steps * (tile + 1) / tiles) * WGMMA_STEP;
  return {rows.begin + begin, min(min(end, rows.count) - begin, S::BM)};
}

/* A unit without expert is the last. */
template <class S>
DEVICE void produce_end(ring_smem<S> &smem, const tile_unit &tile, int slot, bool gathering,
                        const ring_place<S::STAGES> &at)
{
  wait_for(&smem.empty[at.stage], at.phase ^ 1);
  if (threadIdx.x == 0) {
    smem.units[slot] = tile;
    mbarrier_arrive(&smem.full[at.stage]);
  }
  if (gathering) mbarrier_arrive(&smem.full[at.stage]);
}

/* A warp is done with a stage, which both CTAs fill. */
template <class S> DEVICE void release_stage(ring_smem<S> &smem, int stage)
{
  if constexpr (S::CLUSTER == 1) {
    if (lane_id() == 0) mbarrier_arrive(&smem.empty[stage]);
  } else if (lane_id() < S::CLUSTER) {
    mbarrier_arrive_cluster(&smem.empty[stage], lane_id());
  }
}

/* acc = weights x rows of one unit, N tokens wide. A stage is given back one step later, when its wgmmas are over; at once
 * where memory is what all wait for. */
template <class S, int N>
DEVICE void multiply_n(const gemm_args &args, ring_smem<S> &smem, ring_place<S::STAGES> &at, int group,
                       float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const bool gathered = S::gathers(args);
  int before = -1;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += WGMMA_BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    if (gathered) fence_proxy_async_shared(); /* by cp.async */
    const uint64_t a = wgmma_operand(smem.weights[at.stage] + group * S::BLOCKS * S::BLOCK * WGMMA_BK);
    const uint64_t b = wgmma_operand(smem.rows[at.stage]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < WGMMA_BK / 16; k++)
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++)
        wgmma_m64k16<typename S::T, N>::run(acc[i], a + k * 2 + i * 512, b + k * 2, k > 0 || k0 > 0);
    wgmma_commit_group();
    wgmma_wait_group<S::AT_ONCE ? 0 : 1>();
    const int done = S::AT_ONCE ? (int)at.stage : before;
    if (done >= 0) release_stage<S>(smem, done);
    before = at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  if (!S::AT_ONCE) release_stage<S>(smem, before);
}

template <class S, int N>
DEVICE void multiply(const gemm_args &args, ring_smem<S> &smem, ring_place<S::STAGES> &at, int group, int rows,
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
template <class S> DEVICE void skip(const gemm_args &args, ring_smem<S> &smem, ring_place<S::STAGES> &at)
{
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += WGMMA_BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    __syncwarp();
    release_stage<S>(smem, at.stage);
  }
}

#endif
