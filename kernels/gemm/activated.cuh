/*
 * The epilogue of a d h of which the backward wants no more than the activation's gradient: z comes from memory, h and
 * d z go there, in vectors of 8 channels, as a warp's staging has them. On its own the activation's gradient would read
 * d h again, which this does not even write.
 */
#ifndef CUMOE_ACTIVATED_CUH
#define CUMOE_ACTIVATED_CUH

#include "backward/slope.cuh"
#include "gemm/warpgroup_tile.cuh"

template <class S> DEVICE const down_activated_args &activated_of(const gemm_sm90_args &args)
{
  static_assert(S::ACTIVATES && offsetof(down_activated_args, drawn.gemm) == 0, "args is the first of them");
  return reinterpret_cast<const down_activated_args &>(args);
}

/* The row of z of a tile's first; negative: z does not have all of them. */
DEVICE int64_t first_kept(const down_activated_args &args, const tile_unit &unit)
{
  const int64_t first = (int64_t)args.z_offsets[unit.expert] + (unit.row - args.drawn.gemm.g.offsets[unit.expert]);
  return first + unit.rows <= args.z_rows ? first : -1;
}

/* Gate and up of a vector of d h become d z, d h becomes h; w: the token's weight. Returns <d h, h>. */
template <class Y, finish_kind KIND>
DEVICE float activate_vectors(const gemm_args &args, const uint4 &d_h, float w, float scale, uint4 &h, uint4 &gate,
                              uint4 &up)
{
  const bool oai = KIND == FINISH_swiglu && args.act == ACT_SWIGLU_OAI;
  const float alpha = oai ? args.act_alpha : 1.f, plus = oai ? 1.f : 0.f, limit = args.act_limit, of_z = w * scale;
  float along = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t &gates = (&gate.x)[i], &ups = (&up.x)[i];
    const float2 d = unpack_pair<Y>((&d_h.x)[i]), g2 = unpack_pair<Y>(gates), u2 = unpack_pair<Y>(ups);
    float value[2], d_gate[2], d_up[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const float g = t ? g2.y : g2.x, u = t ? u2.y : u2.x, given = of_z * (t ? d.y : d.x);
      if (KIND == FINISH_silu) {
        const activated v = times_sigmoid<true>(g, 1.f);
        value[t] = v.value * u;
        d_gate[t] = given * u * v.slope;
        d_up[t] = given * v.value;
      } else {
        const float shifted = bounded(u, -limit, limit) + plus;
        const activated v = times_sigmoid<true>(bounded(g, -INFINITY, args.gate_limit), alpha);
        value[t] = v.value * shifted;
        d_gate[t] = given * shifted * v.slope * slope_within(g, -INFINITY, args.gate_limit);
        d_up[t] = given * v.value * slope_within(u, -limit, limit);
      }
    }
    const float2 rounded = unpack_pair<Y>(pack_pair<Y>(value[0], value[1]));
    along = fmaf(d.x, rounded.x, along);
    along = fmaf(d.y, rounded.y, along);
    (&h.x)[i] = pack_pair<Y>(w * value[0], w * value[1]);
    gates = pack_pair<Y>(d_gate[0], d_gate[1]);
    ups = pack_pair<Y>(d_up[0], d_up[1]);
  }
  return along;
}

/*
 * z comes the way that operands come: behind a tile's products the pipeline has COUNT stages of its tokens' gate and
 * up, TOKENS each, and their weights. Gate lies where weights would, and up where rows would, but for the last OTHERS.
 */
template <class S> struct kept_stage {
  static constexpr int TOKENS = KEPT_TOKENS, COUNT = KEPT_STAGES<S>, GROUPS = TOKENS / 8;
  static constexpr int LD = S::COLUMNS * 2 + 32; /* bytes: two tokens of a quarter of a warp lie in different banks */
  static constexpr int OTHERS = TOKENS - S::BM * S::BK * 2 / LD / 8 * 8, WEIGHTS = (TOKENS + OTHERS) * LD;
  static_assert(sizeof(typename S::Y) == 2 && WEIGHTS + TOKENS * 4 <= S::COLUMNS * S::BK * 2, "what a stage has");

  DEVICE static char *gate(pipeline_smem<S> &smem, int stage) { return reinterpret_cast<char *>(smem.weights[stage]); }
  DEVICE static char *up(pipeline_smem<S> &smem, int stage, int token)
  {
    return token < TOKENS - OTHERS ? reinterpret_cast<char *>(smem.rows[stage]) + token * LD
                                   : gate(smem, stage) + (token + OTHERS) * LD;
  }
  DEVICE static float *weights(pipeline_smem<S> &smem, int stage)
  {
    return reinterpret_cast<float *>(gate(smem, stage) + WEIGHTS);
  }
};

/* A tile's stages of z, by a whole warp. Both CTAs of a cluster have as many, whatever they have of rows. */
template <class S>
DEVICE void produce_kept(const down_activated_args &args, pipeline_smem<S> &smem, const tile_unit &unit,
                         pipeline_state<S::STAGES> &at)
{
  using kept = kept_stage<S>;
  using Y = typename S::Y;
  const gemm_sm90_args &gemm = args.drawn.gemm;
  const int64_t first = first_kept(args, unit);
  const int channel = unit.n * S::COLUMNS, channels = first < 0 ? 0 : min((int)S::COLUMNS, gemm.g.n - channel);
#pragma unroll 1
  for (int token0 = 0; token0 < kept::COUNT * kept::TOKENS; token0 += kept::TOKENS, at.advance()) {
    const int tokens = channels > 0 ? min(max(unit.rows - token0, 0), (int)kept::TOKENS) : 0;
    const uint32_t each = channels * (uint32_t)sizeof(Y), weights = round_up(tokens, 4) * (uint32_t)sizeof(float);
    uint64_t *full = &smem.full[at.stage];
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    __syncwarp(); /* what lanes copy may be used, and the stage be released, while others still wait */
    if (lane_id() == 0) {
      mbarrier_arrive_expect_tx(full, 2 * tokens * each + weights);
      if (tokens) cp_async_bulk(kept::weights(smem, at.stage), args.row_weight + unit.row + token0, weights, full);
    }
    __syncwarp();
#pragma unroll 1
    for (int t = lane_id(); t < tokens; t += WARP_SIZE) {
      const int64_t from = (first + token0 + t) * gemm.z_ld + channel;
      cp_async_bulk(kept::gate(smem, at.stage) + t * kept::LD, static_cast<const Y *>(gemm.z[0]) + from, each, full);
      cp_async_bulk(kept::up(smem, at.stage, t), static_cast<const Y *>(gemm.z[1]) + from, each, full);
    }
    __syncwarp();
  }
}

/* Places advance from token group to token group: addresses worked out from their numbers took more registers. */
template <class S> struct activated_store : warp_store<S, S::OCTETS> {
  using base = warp_store<S, S::OCTETS>;
  using kept = kept_stage<S>;
  using Y = typename S::Y;
  const down_activated_args &a;
  Y *d_z;
  float *along;
  int32_t left,
      offset;         /* of the tile's tokens that follow, this lane's first; of its vector in a token's z, in bytes */
  bool there, inside; /* z is; this lane has channels; `along` has a part of a warp that has none, too */

  DEVICE activated_store(const down_activated_args &args, const tile_unit &unit, uint4 *staging, channel_span span,
                         int32_t part)
      : base(args.drawn.gemm.g, unit, staging, span), a(args)
  {
    const gemm_args &g = args.drawn.gemm.g;
    const int token = lane_id() / S::OCTETS, channel = span.first + octet_channel<S>(g, lane_id() % S::OCTETS);
    const int64_t row = unit.row + token;
    left = unit.rows - token;
    offset = (channel - unit.n * S::COLUMNS) * (int)sizeof(Y);
    there = first_kept(args, unit) >= 0;
    inside = channel < span.end;
    d_z = static_cast<Y *>(args.d_z[0]) + row * args.drawn.gemm.z_ld + channel;
    along = args.along + row * ALONG_PARTS(g.n) + part;
  }

  DEVICE static char *bytes(void *p) { return static_cast<char *>(p); }

  /* Token group `group` of a stage. */
  template <finish_kind KIND> DEVICE void finish(pipeline_smem<S> &smem, int stage, int group, const uint4 &packed)
  {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    const int token = lane_id() / S::OCTETS;
    const float w = there ? kept::weights(smem, stage)[group * 8 + token] : 0.f;
    uint4 h, gate, up;
    this->stage(words);
    const uint4 d_h = *this->staged_vector(token, lane_id() % S::OCTETS), none = {0, 0, 0, 0};
    gate = *reinterpret_cast<const uint4 *>(kept::gate(smem, stage) + (group * 8 + token) * kept::LD + offset);
    up = *reinterpret_cast<const uint4 *>(kept::up(smem, stage, group * 8) + token * kept::LD + offset);
    float sum = activate_vectors<Y, KIND>(a.drawn.gemm.g, d_h, w, a.scale, h, gate, up);
    if (w == 0) h = gate = up = none; /* whatever z is */
    if (!inside) sum = 0;
#pragma unroll
    for (int distance = 1; distance < S::OCTETS; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (left > 0 && inside) {
      st_global_16(this->to, h, false);
      st_global_16(d_z, gate, false);
      st_global_16(bytes(d_z) + (bytes(a.d_z[1]) - bytes(a.d_z[0])), up, false);
    }
    if (left > 0 && lane_id() % S::OCTETS == 0) *along = a.scale * sum;
    this->to += base::TOKENS * a.drawn.gemm.g.c_ld;
    d_z += base::TOKENS * a.drawn.gemm.z_ld;
    along += base::TOKENS * ALONG_PARTS(a.drawn.gemm.g.n);
    left -= base::TOKENS;
  }
};

/* Sums are rounded first, so that they can move down in half as many registers: the program has one stage of z. */
template <class S, finish_kind KIND>
DEVICE void store_activated_as(const down_activated_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                               uint4 *staged, const tile_unit &unit, channel_span span,
                               const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  using kept = kept_stage<S>;
  constexpr int TOKENS = activated_store<S>::TOKENS, STEPS = S::BM / TOKENS, GROUPS = kept::GROUPS;
  static_assert(S::OCTETS == 4 && TOKENS == 8, "a step is a token group");
  uint4 packed[STEPS];
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
#pragma unroll
    for (int g = 0; g < 4; g++)
      (&packed[j].x)[g] = pack_pair<typename S::Y>(accumulator_of<S>(acc, g, j, 0), accumulator_of<S>(acc, g, j, 1));
    hold(packed[j]);
  }
  const int32_t part = (unit.n * S::CONSUMERS + (int)threadIdx.x / S::GROUP - 1) * 4 + warp_id() % 4;
  activated_store<S> store(args, unit, staged, span, part);
#pragma unroll 1
  for (int token0 = 0; token0 < kept::COUNT * kept::TOKENS; token0 += kept::TOKENS, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
      if (token0 + j * TOKENS < unit.rows) store.template finish<KIND>(smem, at.stage, j, packed[j]);
    __syncwarp(); /* all lanes have read it */
    release_stage<S>(smem, at.stage);
#pragma unroll
    for (int j = 0; j + GROUPS < STEPS; j++) packed[j] = packed[j + GROUPS];
  }
}

/* A consumer's part of a tile. */
template <class S>
DEVICE void store_activated(const down_activated_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                            const tile_unit &unit, int group, channel_span consumer,
                            const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const gemm_args &g = args.drawn.gemm.g;
  const channel_span span = span_of_warp<S>(g, consumer);
  uint4 *staged = smem.staging.staged[group][warp_id() % 4];
  if (g.act == ACT_SILU && !limits_gated(g))
    store_activated_as<S, FINISH_silu>(args, smem, at, staged, unit, span, acc);
  else
    store_activated_as<S, FINISH_swiglu>(args, smem, at, staged, unit, span, acc);
}

#endif
