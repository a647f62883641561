/*
 * What the forms wgmma and stream share: a warpgroup of producers and two of consumers around a pipeline; a tile of
 * weight rows x rows (tokens) from its stages to accumulators, and from there to memory.
 */
#ifndef CUMOE_WARPGROUP_TILE_CUH
#define CUMOE_WARPGROUP_TILE_CUH

#include "gemm/epilogue.cuh"
#include "device/pipeline.cuh"

enum { UNITS_AHEAD = 12 }; /* more than stages: a unit has at least one */

/* Where registers are full: what follows from the value is worked out behind this point, not kept from unit to unit. */
DEVICE void hold(int &value)
{
  asm volatile("" : "+r"(value));
}

/*
 * Of a shape S made from it, four things are asked besides:
 *   CLUSTER         CTAs that fill each other's stages
 *   gathers(args)   whether stages hold what threads have copied (cp.async), not the copy engine alone
 *   RELEASE_AT_ONCE<N>  a stage is released as soon as it is used, where loads are the limit; else one step later,
 *                   when the next products are under way
 *   SCALES_BY_COPY  scales of rows in row order come by one copy, which begins up to SCALE_VECTOR - 1 before them
 */
template <class PRODUCT, int BM_, int BN, int BK_, int STAGES_, int WARPS> struct pipeline_shape : PRODUCT {
  using SUM = typename operand<typename PRODUCT::X>::accumulator;
  static constexpr int BITS = operand<typename PRODUCT::X>::BITS;
  static_assert(same_type<typename PRODUCT::X, typename PRODUCT::W> && (BITS == 16 || BITS == 8),
                "both operands come from shared memory as they are");
  static_assert(PRODUCT::SCALED == (BITS == 8), "codes have scales");
  static constexpr int BM = BM_, BK = BK_, STAGES = STAGES_;
  static constexpr int COLUMNS = PRODUCT::HALVES * BN; /* weight rows of a tile */
  static constexpr int CONSUMERS = 2, GROUP = 128, BLOCK = 64, THREADS = WARPS * WARP_SIZE;
  static constexpr int BLOCKS = COLUMNS / BLOCK / CONSUMERS,
                       ACCUMULATORS = BM / 2; /* of a consumer; of a block a thread */
  static constexpr int OCTETS = 2 * BLOCKS;   /* of weight rows, of a warp */
  /* What is unpacked on its way to the tensor cores (gemm/packed.cuh) differs in these. LINES: swizzle lines of LINE
   * elements of a row, all rows' first lines first; WEIGHT_LINE: elements of W of a weight row. Both of a stage. */
  static constexpr bool PACKED = false;
  static constexpr int LINES = 1, LINE = BK, WEIGHT_LINE = BK;
  static constexpr int STAGED = 1; /* 512 bytes of outputs that a warp stages */
  static_assert(BK * BITS == WGMMA_BK * 16 && THREADS == (CONSUMERS + 1) * GROUP,
                "a swizzle line of k; three warpgroups");
  static_assert(BM % WGMMA_STEP == 0 && BM <= 256, "whole wgmma operands");
  static_assert(COLUMNS % (BLOCK * CONSUMERS) == 0 && UNITS_AHEAD > STAGES, "whole blocks; see there");
  static_assert(BLOCKS <= 2, "an stmatrix has four octets");
};

/* Of codes: the scales of a stage's rows, two turns of the ring. */
template <class S, bool SCALED> struct row_scale_stages {
};
template <class S> struct row_scale_stages<S, true> {
  float row_scales[2][S::STAGES][S::BM + (S::SCALES_BY_COPY ? SCALE_VECTOR : 0)];
};

/* Between accumulators and memory. */
template <class S> struct wgmma_staging : row_scale_stages<S, S::SCALED> {
  uint4 staged[S::CONSUMERS][S::GROUP / WARP_SIZE][S::STAGED * WARP_SIZE]; /* a warp's own */
  float row_weights[S::CONSUMERS][S::BM];
};

template <class S> struct pipeline_smem {
  typename S::W weights[S::STAGES][S::COLUMNS * S::WEIGHT_LINE];
  typename S::X rows[S::STAGES][S::BM * S::BK];
  wgmma_staging<S> staging;
  uint64_t full[S::STAGES], empty[S::STAGES];
  tile_unit units[UNITS_AHEAD];
  tile_table table;
};

/* Row tile `tile` of an expert's `tiles`: its rows are cut at multiples of WGMMA_STEP into tiles as equal as can be.
 * More than BM rows only if a bad route had its table cut, of few rows none: those past BM are left. */
template <class S> DEVICE row_range rows_of_tile(row_range rows, int tile, int tiles)
{
  const int64_t steps = ceil_div(rows.count, (int)WGMMA_STEP);
  const int32_t begin = (int32_t)(steps * tile / tiles) * WGMMA_STEP,
                end = (int32_t)(steps * (tile + 1) / tiles) * WGMMA_STEP;
  return {rows.begin + begin, min(min(end, rows.count) - begin, S::BM)};
}

/* Of what is activated: stages behind a tile's products (gemm/activated.cuh), KEPT_TOKENS each. */
template <class S> constexpr int KEPT_STAGES = (S::BM + KEPT_TOKENS - 1) / KEPT_TOKENS;

/* A unit without expert is the last. */
template <class S>
DEVICE void produce_end(pipeline_smem<S> &smem, const tile_unit &tile, int slot, bool gathering,
                        const pipeline_state<S::STAGES> &at)
{
  wait_for(&smem.empty[at.stage], at.phase ^ 1);
  if (threadIdx.x == 0) {
    smem.units[slot] = tile;
    mbarrier_arrive(&smem.full[at.stage]);
  }
  if (gathering) mbarrier_arrive(&smem.full[at.stage]);
}

/* A warp has read a stage, which all CTAs of the cluster fill. */
template <class S> DEVICE void release_stage(pipeline_smem<S> &smem, int stage)
{
  if (S::SCALED || S::PACKED) __syncwarp(); /* every lane has read scales or factors */
  if constexpr (S::CLUSTER == 1) {
    if (lane_id() == 0) mbarrier_arrive(&smem.empty[stage]);
  } else if constexpr (S::PACKED || S::ACTIVATES) {
    const int lane = (int)(tid_x() % WARP_SIZE); /* there registers are full */
    if (lane < S::CLUSTER) mbarrier_arrive_cluster(&smem.empty[stage], lane);
  } else if (lane_id() < S::CLUSTER) {
    mbarrier_arrive_cluster(&smem.empty[stage], lane_id());
  }
}

/* Where in row_scales those of a unit's rows begin. */
template <class S> DEVICE int scales_before(const gemm_args &args, const tile_unit &unit)
{
  return S::SCALES_BY_COPY && !S::gathers(args) ? unit.row % SCALE_VECTOR : 0;
}

template <class S> DEVICE float *row_scales_of(pipeline_smem<S> &smem, const pipeline_state<S::STAGES> &at)
{
  return smem.staging.row_scales[at.phase][at.stage];
}

/* 32 bytes of k. */
template <class S, int N, bool CODES = S::BITS == 8> struct wgmma_step : wgmma_m64k16<typename S::X, N, S::N_MAJOR> {
};
template <class S, int N> struct wgmma_step<S, N, true> : wgmma_m64k32<typename S::X, N> {
};

/* What is to be done while the first products of a unit are under way. */
struct nothing_meanwhile {
  DEVICE void operator()() const {}
};

/* acc = weights x rows of one unit, N tokens wide. A stage is released one step later, when its wgmmas are over; at
 * once where loads are the limit. K-major, blocks have octets in turn; N-major, each is an array of BK x 64. */
template <class S, int N, class F>
DEVICE void multiply_n(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group,
                       typename S::SUM (&acc)[S::BLOCKS][S::ACCUMULATORS], const F &meanwhile)
{
  constexpr int K16 = S::N_MAJOR ? 16 * 128 >> 4 : 2, NEXT = S::N_MAJOR ? S::BK * 128 >> 4 : 64; /* see wgmma_operand */
  constexpr bool AT_ONCE = S::template RELEASE_AT_ONCE<N>;
  const bool gathered = S::gathers(args);
  int before = -1;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    if (gathered) fence_proxy_async_shared(); /* by cp.async */
    const uint64_t a =
        wgmma_operand(smem.weights[at.stage] + group * S::BLOCKS * S::BLOCK * S::BK, S::N_MAJOR ? 1 : S::BLOCKS);
    const uint64_t b = wgmma_operand(smem.rows[at.stage]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < S::BK * S::BITS / 256; k++)
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++)
        wgmma_step<S, N>::run(acc[i], a + k * K16 + i * NEXT, b + k * 2, k > 0 || k0 > 0);
    wgmma_commit_group();
    if (k0 == 0) meanwhile();
    wgmma_wait_group<AT_ONCE ? 0 : 1>();
    const int done = AT_ONCE ? (int)at.stage : before;
    if (done >= 0) release_stage<S>(smem, done);
    before = at.stage;
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int i = 0; i < S::BLOCKS; i++) hold(acc[i]);
  if (!AT_ONCE) release_stage<S>(smem, before);
}

template <class S, int N, class F = nothing_meanwhile>
DEVICE void multiply(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at, int group, int rows,
                     typename S::SUM (&acc)[S::BLOCKS][S::ACCUMULATORS], const F &meanwhile = {})
{
  if constexpr (N > WGMMA_STEP) {
    if (rows <= N - WGMMA_STEP) {
      multiply<S, N - WGMMA_STEP>(args, smem, at, group, rows, acc, meanwhile);
      return;
    }
  }
  multiply_n<S, N>(args, smem, at, group, acc, meanwhile);
}

/* ---- from accumulators to memory: every warp for itself ---- */

/*
 * The weight rows of a warp, 16 * BLOCKS, are octets; octet g is in block g % BLOCKS. Of a thread's values in token
 * group j: row lane / 4 of the octet, token 8 j + lane % 4 * 2 + t. In a gated up tile even octets are of the half that
 * lies first and odd ones the same channels of the other.
 *
 * K-major, a warp's octets are neighbours. So they are N-major in a gated tile whose halves lie apart; but
 *   not gated   block i has the channels 64 i .. of a consumer, and a warp 16 of each
 *   in pairs    (gate and up element by element) block i has the pairs 32 i .. of a consumer, and a warp 8 of each, of
 *               which part_pairs makes two octets
 */
template <class S> DEVICE bool in_pairs(const gemm_args &args)
{
  return S::N_MAJOR && S::gated(args) && args.b.n_stride == 2;
}

/* Of outputs: the channel of a warp's octet `g`, from its first one on. */
template <class S> DEVICE int octet_channel(const gemm_args &args, int g)
{
  if constexpr (S::N_MAJOR) {
    if (!S::gated(args)) return g % S::BLOCKS * S::BLOCK + g / S::BLOCKS * 8;
    if (in_pairs<S>(args)) return g * 32;
  }
  return g * 8;
}

/* The same of a thread's row in an octet: part_pairs leaves channels of one in the order 0 4 1 5 2 6 3 7. */
template <class S> DEVICE int row_channel(const gemm_args &args)
{
  if constexpr (S::N_MAJOR)
    if (in_pairs<S>(args)) return lane_id() / 4 % 2 * 4 + lane_id() / 8;
  return lane_id() / 4;
}
DEVICE uint4 in_order(const uint4 &v)
{
  return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                    __byte_perm(v.z, v.w, 0x7632));
}

template <class S> DEVICE float accumulator_of(const float (&acc)[S::BLOCKS][S::ACCUMULATORS], int g, int j, int t)
{
  return acc[g % S::BLOCKS][4 * j + g / S::BLOCKS * 2 + t];
}

/* Of a pair, even lanes / 4 have one factor and odd ones the other. So a lane gives away what it has of the one row,
 * and gets what it lacks of the other: then both lie where a tile has them whose halves lie apart. TOKENS at once,
 * right before they are used: registers are full. */
template <class S, int TOKENS>
DEVICE void part_pairs(const gemm_args &args, int token0, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if (!in_pairs<S>(args)) return;
  const bool odd = lane_id() / 4 % 2;
#pragma unroll
  for (int j = token0 / 8; j < (token0 + TOKENS) / 8; j++) {
#pragma unroll
    for (int t = 0; t < 2; t++) {
      float even_row[S::BLOCKS], odd_row[S::BLOCKS];
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++) {
        const float a = acc[i][4 * j + t], b = acc[i][4 * j + 2 + t];
        const float other = __shfl_xor_sync(ALL_LANES, odd ? a : b, 4);
        even_row[i] = odd ? other : a, odd_row[i] = odd ? b : other;
      }
#pragma unroll
      for (int i = 0; i < S::BLOCKS; i++) {
        const int first = 2 * i, second = 2 * i + 1;
        acc[first % S::BLOCKS][4 * j + first / S::BLOCKS * 2 + t] = even_row[i];
        acc[second % S::BLOCKS][4 * j + second / S::BLOCKS * 2 + t] = odd_row[i];
      }
    }
  }
}

/* Channels of a warp: where they begin, and where those of the matrix end. */
struct channel_span {
  int32_t first, end;
};

template <class S> DEVICE channel_span span_of_warp(const gemm_args &args, channel_span consumer)
{
  if constexpr (S::N_MAJOR) {
    if (!S::gated(args)) return {consumer.first + warp_id() % 4 * 16, consumer.end};
    if (in_pairs<S>(args)) return {consumer.first + warp_id() % 4 * 8, consumer.end};
  }
  const int octets = S::gated(args) ? S::OCTETS / 2 : S::OCTETS;
  return {consumer.first + warp_id() % 4 * octets * 8, consumer.end};
}

/* Biases of a thread's row in each octet: of a gated tile gate, up, gate, ... */
template <class S> struct row_bias {
  float of[S::OCTETS];

  DEVICE row_bias(const gemm_args &args, int expert, channel_span span)
  {
    const bool gated = S::gated(args);
#pragma unroll
    for (int g = 0; g < S::OCTETS; g++) {
      const int half = gated ? g % 2 : 0;
      int64_t channel = span.first + (gated ? g / 2 : g) * 8 + lane_id() / 4;
      if constexpr (S::N_MAJOR) channel = span.first + octet_channel<S>(args, gated ? g / 2 : g) + row_channel<S>(args);
      float bias[1] = {};
      if (channel < span.end) load_bias(args.b, half, expert, channel, bias);
      of[g] = bias[0];
    }
  }
};

/* OCTETS * 8 channels of TOKENS tokens, transposed in a warp's 512 bytes, so that a token's channels are stored
 * together. */
template <class S, int OCTETS> struct warp_store {
  static constexpr int TOKENS = WARP_SIZE / OCTETS;
  typename S::Y *to;
  uint4 *staged;
  int tokens; /* this lane's, and every TOKENS-th on, are there up to here */

  explicit DEVICE warp_store(uint4 *staging) : staged(staging) {} /* to stage alone */

  DEVICE warp_store(const gemm_args &args, const tile_unit &unit, uint4 *staging, channel_span span) : staged(staging)
  {
    const int token = lane_id() / OCTETS, channel = span.first + octet_channel<S>(args, lane_id() % OCTETS);
    tokens = channel < span.end ? unit.rows - token : 0;
    to = static_cast<typename S::Y *>(args.c) + (int64_t)(unit.row + token) * args.c_ld + channel;
  }

  /* Rotated, so that neither stmatrix nor the lanes that read meet in a bank. */
  DEVICE uint4 *staged_vector(int token, int octet) const
  {
    const int rotated = OCTETS == 4 ? token / 2 % 4 : OCTETS == 2 ? token / 4 % 2 : 0;
    return staged + token * OCTETS + (octet ^ rotated);
  }

  /* packed[i]: octet i % OCTETS of token group i / OCTETS. */
  DEVICE void stage(const uint32_t (&packed)[4]) const
  {
    const int matrix = lane_id() / 8;
    __syncwarp(); /* what was there is read */
    stmatrix_x4_trans(shared_address(staged_vector(matrix / OCTETS * 8 + lane_id() % 8, matrix % OCTETS)), packed);
    __syncwarp();
  }

  DEVICE void transpose(const gemm_args &args, int token0, const uint32_t (&packed)[4]) const
  {
    stage(packed);
    if constexpr (S::N_MAJOR)
      if (token0 < tokens && in_pairs<S>(args)) {
        st_global_16(to + token0 * args.c_ld, in_order(*staged_vector(lane_id() / OCTETS, lane_id() % OCTETS)),
                     args.protocol.evict_last);
        return;
      }
    if (token0 < tokens)
      st_global_16(to + token0 * args.c_ld, *staged_vector(lane_id() / OCTETS, lane_id() % OCTETS),
                   args.protocol.evict_last);
  }
};

/* What nearly every model wants is done in place, with a third of the instructions. */
enum finish_kind { FINISH_any, FINISH_silu, FINISH_swiglu /* biased, clamped, scaled */ };

DEVICE finish_kind finish_kind_of(const gemm_args &args)
{
  int act = args.act;
  hold(act);
  if (!args.gated || args.pair_weights || (act != ACT_SILU && act != ACT_SWIGLU_OAI)) return FINISH_any;
  return act == ACT_SILU && !args.b.bias[0] && !args.b.bias[1] && !limits_gated(args) ? FINISH_silu : FINISH_swiglu;
}

/* g times its sigmoid, flushed to 0: half of the instructions, where an epilogue is bound by them. */
DEVICE float flushed_gate(float alpha, float g)
{
  return g * rcp_approx_ftz(1.f + ex2_approx_ftz(-alpha * g * 1.44269504f));
}

struct swiglu {
  float gate_limit, limit, alpha, shift;
  bool up_first;

  DEVICE swiglu(const gemm_args &args, bool up_lies_first)
      : gate_limit(args.gate_limit), limit(args.act_limit), alpha(args.act == ACT_SILU ? 1.f : args.act_alpha),
        shift(args.act == ACT_SILU ? 0.f : 1.f), up_first(up_lies_first)
  {
  }

  /* Of what biases are in. FLUSHED: a sigmoid below 2^-126 is 0. */
  template <finish_kind KIND, bool FLUSHED = false> DEVICE float of_biased(float g, float u) const
  {
    if (KIND == FINISH_silu) return (FLUSHED ? flushed_gate(1.f, g) : activation<ACT_SILU, true>(1.f, g)) * u;
    clamp_gated(gate_limit, limit, g, u);
    return (FLUSHED ? flushed_gate(alpha, g) : activation<ACT_SWIGLU_OAI, true>(alpha, g)) * (u + shift);
  }

  /* bias: gate's, up's */
  template <finish_kind KIND> DEVICE float of(float low, float high, const float *bias) const
  {
    const float g = up_first ? high : low, u = up_first ? low : high;
    if (KIND == FINISH_silu) return of_biased<KIND>(g, u);
    return of_biased<KIND>(weighted(g, 1.f, 1.f, bias[0]), weighted(u, 1.f, 1.f, bias[1]));
  }
};

/* Weights of a tile's rows, for a consumer's warps. */
template <class S>
DEVICE void load_row_weights(const gemm_args &args, wgmma_staging<S> &smem, const tile_unit &unit, int group)
{
  bar_sync(1 + group, S::GROUP); /* those of the last tile are read */
  for (int r = threadIdx.x % S::GROUP; r < unit.rows; r += S::GROUP)
    smem.row_weights[group][r] = row_weight(args, unit.row + r);
  bar_sync(1 + group, S::GROUP);
}

template <class S> DEVICE float &accumulator_of(float (&acc)[S::BLOCKS][S::ACCUMULATORS], int g, int j, int t)
{
  return acc[g % S::BLOCKS][4 * j + g / S::BLOCKS * 2 + t];
}

/* A thread's accumulators of octets g and g + 1 and the first two token groups become outputs in place: one of each two
 * if gated, else both. Whatever the activation, which the loops have in the program once. */
template <class S>
DEVICE void finish_octets(const gemm_args &args, int gated, bool up_first, const float *row_weights, const float *bias,
                          int g, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
#pragma unroll 1
  for (int j = 0; j < 2; j++) {
    float first[2], second[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const float weight = args.pair_weights ? row_weights[j * 8 + (int)tid_x() % 4 * 2 + t] : 1.f;
      float &a = accumulator_of<S>(acc, g, 0, t), &b = accumulator_of<S>(acc, g + 1, 0, t);
      first[t] = weighted(up_first ? b : a, weight, 1.f, bias[0]);
      second[t] = weighted(up_first ? a : b, weight, 1.f, bias[1]);
      a = accumulator_of<S>(acc, g, 1, t), b = accumulator_of<S>(acc, g + 1, 1, t);
    }
#pragma unroll 1
    for (int left = gated ? 1 : 2; left > 0; left--) {
      activate<2, true>(args, first, second);
      if (gated) break;
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const float other = first[t];
        first[t] = second[t], second[t] = other;
      }
    }
#pragma unroll
    for (int t = 0; t < 2; t++)
      accumulator_of<S>(acc, g, 1, t) = first[t], accumulator_of<S>(acc, g + 1, 1, t) = second[t];
  }
}

/* Of two tokens of a thread's row in an octet. */
template <class S> DEVICE uint32_t packed_of(float (&acc)[S::BLOCKS][S::ACCUMULATORS], int g, int j)
{
  return pack_pair<typename S::Y>(accumulator_of<S>(acc, g, j, 0), accumulator_of<S>(acc, g, j, 1));
}

/* All channels of a warp, of the first 16 tokens in the accumulators; token0 of the tile. */
template <class S>
DEVICE void store_group(const gemm_args &args, bool up_first, const float *row_weights, uint4 *staged,
                        const tile_unit &unit, channel_span span, int token0, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  if constexpr (S::N_MAJOR) part_pairs<S, warp_store<S, 2>::TOKENS>(args, 0, acc);
  int gated = S::gated(args);
  hold(gated);
  const row_bias<S> bias(args, unit.expert, span); /* loaded again each time: registers are full */
  uint32_t packed[4] = {};
#pragma unroll
  for (int g = 0; g < S::OCTETS; g += 2) {
    finish_octets<S>(args, gated, up_first, row_weights, bias.of + g, g, acc);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (gated)
        packed[g / 2 + 2 * j] = packed_of<S>(acc, g, j);
      else
        packed[2 * j] = packed_of<S>(acc, g, j), packed[2 * j + 1] = packed_of<S>(acc, g + 1, j);
    }
    if (gated && g + 2 < S::OCTETS) continue;
    int wide = gated ? S::OCTETS / 2 * 8 : 16;
    if constexpr (S::N_MAJOR) wide = octet_channel<S>(args, gated ? S::OCTETS / 2 - 1 : 1) + 8;
    const int begin = span.first + (gated ? 0 : octet_channel<S>(args, g));
    warp_store<S, 2>(args, unit, staged, {begin, min(span.end, begin + wide)}).transpose(args, token0, packed);
  }
}

/* Any activation. The next tokens' accumulators move down, so that store_group is in the program once. */
template <class S>
DEVICE void store_generic(const gemm_args &args, bool up_first, wgmma_staging<S> &smem, const tile_unit &unit,
                          int group, channel_span span, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int TOKENS = warp_store<S, 2>::TOKENS;
  if (args.pair_weights) load_row_weights<S>(args, smem, unit, group);
#pragma unroll 1
  for (int token0 = 0; token0 < unit.rows; token0 += TOKENS) {
    store_group<S>(args, up_first, smem.row_weights[group] + token0, smem.staged[group][warp_id() % 4], unit, span,
                   token0, acc);
#pragma unroll
    for (int i = 0; i < S::BLOCKS; i++)
#pragma unroll
      for (int j = 0; j < S::ACCUMULATORS - TOKENS / 2; j++) acc[i][j] = acc[i][j + TOKENS / 2];
  }
}

/* Gated up. No accumulator moves; the same in down. */
template <class S, finish_kind KIND>
DEVICE void store_swiglu(const gemm_args &args, bool up_first, uint4 *staged, const tile_unit &unit, channel_span span,
                         float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int OCTETS = S::OCTETS / 2;
  const row_bias<S> bias(args, unit.expert, span);
  const swiglu act(args, up_first);
  const warp_store<S, OCTETS> store(args, unit, staged, span);
#pragma unroll
  for (int token0 = 0; token0 < S::BM; token0 += store.TOKENS) {
    if (token0 >= unit.rows) break;
    if constexpr (S::N_MAJOR) part_pairs<S, warp_store<S, OCTETS>::TOKENS>(args, token0, acc);
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = token0 / 8 + i / OCTETS, g = i % OCTETS * 2;
      packed[i] = pack_pair<typename S::Y>(
          act.of<KIND>(accumulator_of<S>(acc, g, j, 0), accumulator_of<S>(acc, g + 1, j, 0), bias.of + g),
          act.of<KIND>(accumulator_of<S>(acc, g, j, 1), accumulator_of<S>(acc, g + 1, j, 1), bias.of + g));
    }
    store.transpose(args, token0, packed);
  }
}

template <class S>
DEVICE void store_down(const gemm_args &args, uint4 *staged, const tile_unit &unit, channel_span span,
                       const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const row_bias<S> bias(args, unit.expert, span);
  const warp_store<S, S::OCTETS> store(args, unit, staged, span);
#pragma unroll
  for (int token0 = 0; token0 < S::BM; token0 += store.TOKENS) {
    if (token0 >= unit.rows) break;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int j = token0 / 8 + i / S::OCTETS, g = i % S::OCTETS;
      packed[i] = pack_pair<typename S::Y>(weighted(accumulator_of<S>(acc, g, j, 0), 1.f, 1.f, bias.of[g]),
                                           weighted(accumulator_of<S>(acc, g, j, 1), 1.f, 1.f, bias.of[g]));
    }
    store.transpose(args, token0, packed);
  }
}

/* A consumer's part of a tile. */
template <class S>
DEVICE void store_tile(const gemm_args &args, bool up_first, wgmma_staging<S> &smem, const tile_unit &unit, int group,
                       channel_span consumer, float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const channel_span span = span_of_warp<S>(args, consumer);
  uint4 *staged = smem.staged[group][warp_id() % 4];
  if constexpr (S::EPILOGUE == EPILOGUE_plain) {
    store_down<S>(args, staged, unit, span, acc);
  } else {
    switch (finish_kind_of(args)) {
    case FINISH_silu: store_swiglu<S, FINISH_silu>(args, up_first, staged, unit, span, acc); break;
    case FINISH_swiglu: store_swiglu<S, FINISH_swiglu>(args, up_first, staged, unit, span, acc); break;
    default: store_generic<S>(args, up_first, smem, unit, group, span, acc);
    }
  }
}

/* A consumer whose channels are all past the last one keeps releasing stages. */
template <class S> DEVICE void skip(const gemm_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at)
{
  const int end = S::ACTIVATES ? round_up(args.k, (int)S::BK) + KEPT_STAGES<S> * S::BK : args.k;
#pragma unroll 1
  for (int k0 = 0; k0 < end; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
    __syncwarp();
    release_stage<S>(smem, at.stage);
  }
}

#endif
