/*
 * The epilogue of a d h of which the backward wants no more than the activation's gradient: z comes from memory, h and
 * d z go there, in vectors of 8 channels, as a warp's staging has them. On its own the activation's gradient would read
 * d h again, which this does not even write.
 */
#ifndef CUMOE_ACTIVATED_CUH
#define CUMOE_ACTIVATED_CUH

#include "backward.h"
#include "backward/slope.cuh"
#include "gemm/warpgroup_tile.cuh"

template <class S> DEVICE const down_activated_args &activated_of(const gemm_sm90_args &args)
{
  static_assert(S::ACTIVATES && offsetof(down_activated_args, gemm) == 0, "args is its first member");
  return reinterpret_cast<const down_activated_args &>(args);
}

/* The row of z of a tile's first; negative: z does not have all of them. */
DEVICE int64_t first_kept(const down_activated_args &args, const tile_unit &unit)
{
  const int64_t first = (int64_t)args.z_offsets[unit.expert] + (unit.row - args.gemm.g.offsets[unit.expert]);
  return first + unit.rows <= args.z_rows ? first : -1;
}

/* Gate and up of a vector of d h become d z, d h becomes h; w: the token's weight. Returns <d h, h>. */
template <class Y, finish_kind KIND>
DEVICE float activate_vectors(const gemm_args &args, const uint4 &d_h, float w, float scale, uint4 &h, uint4 &gate,
                              uint4 &up)
{
  const bool oai = KIND == FINISH_swiglu && args.act == ACT_SWIGLU_OAI;
  const float alpha = oai ? args.act_alpha : 1.f, of_z = w * scale;
  const gate_bounds bounds = {args.gate_limit, args.act_limit, oai ? 1.f : 0.f};
  float along = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t &gates = (&gate.x)[i], &ups = (&up.x)[i];
    const float2 d = unpack_pair<Y>((&d_h.x)[i]), g2 = unpack_pair<Y>(gates), u2 = unpack_pair<Y>(ups);
    float value[2], d_gate[2], d_up[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const gated_gradient of = gradient_of_gated<KIND != FINISH_silu>(
          t ? g2.y : g2.x, t ? u2.y : u2.x, of_z * (t ? d.y : d.x), bounds,
          [&](float g) { return times_sigmoid<true>(g, KIND == FINISH_silu ? 1.f : alpha); });
      value[t] = of.h, d_gate[t] = of.gate, d_up[t] = of.up;
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
 * up, TOKENS each, and their weights. A stage is boxes of 64 channels x TOKENS, swizzled: those of gate, then those of
 * up, first where weights would be, then where rows would.
 */
template <class S> struct kept_stage {
  using Y = typename S::Y;
  static constexpr int TOKENS = KEPT_TOKENS, COUNT = KEPT_STAGES<S>, GROUPS = TOKENS / 8;
  static constexpr int WIDE = KEPT_WIDE, LINE = WIDE * 2, BOX = TOKENS * LINE; /* channels; bytes */
  static constexpr int BOXES = S::COLUMNS / WIDE;                              /* of each half */
  static constexpr int WITH_WEIGHTS = (S::COLUMNS * S::BK * 2 - TOKENS * 4) / BOX;
  static_assert(sizeof(Y) == 2 && BOX % 1024 == 0 && (2 * BOXES - WITH_WEIGHTS) * BOX <= S::BM * S::BK * 2,
                "what a stage has");

  DEVICE static char *box(pipeline_smem<S> &smem, int stage, int index)
  {
    return index < WITH_WEIGHTS ? reinterpret_cast<char *>(smem.weights[stage]) + index * BOX
                                : reinterpret_cast<char *>(smem.rows[stage]) + (index - WITH_WEIGHTS) * BOX;
  }
  DEVICE static float *weights(pipeline_smem<S> &smem, int stage)
  {
    return reinterpret_cast<float *>(reinterpret_cast<char *>(smem.weights[stage]) + WITH_WEIGHTS * BOX);
  }
};

/* Of the two halves in a row of z, the columns of gate (0) or up. */
template <class S> DEVICE int32_t kept_column(const gemm_sm90_args &args, int half)
{
  return args.z[half] > args.z[1 - half] ? (int32_t)(args.z_ld / 2) : 0;
}

/* A tile's stages of z, by the warp that copies rows, or (GATHERING) all producers: these arrive at them as at those of
 * rows, and the warp that has the least to do with weights copies. Both CTAs of a cluster have as many, whatever they
 * have of rows. Boxes may reach into what is not the tile's, which nobody reads. */
template <class S, bool GATHERING>
DEVICE void produce_kept(const down_activated_args &args, pipeline_smem<S> &smem, const tile_unit &unit,
                         pipeline_state<S::STAGES> &at)
{
  using kept = kept_stage<S>;
  const gemm_sm90_args &gemm = args.gemm;
  const int64_t first = first_kept(args, unit);
  const int channel = unit.n * S::COLUMNS, channels = first < 0 ? 0 : gemm.g.n - channel;
  const int boxes = channels > 0 ? min(ceil_div(channels, (int)kept::WIDE), (int)kept::BOXES) : 0;
#pragma unroll 1
  for (int token0 = 0; token0 < kept::COUNT * kept::TOKENS; token0 += kept::TOKENS, at.advance()) {
    const int tokens = boxes ? min(max(unit.rows - token0, 0), (int)kept::TOKENS) : 0;
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if ((!GATHERING || warp_id() == S::GROUP / WARP_SIZE - 1) && elect_one()) {
      const uint32_t weights = round_up(tokens, 4) * (uint32_t)sizeof(float);
      uint64_t *full = &smem.full[at.stage];
      mbarrier_arrive_expect_tx(full, tokens ? 2 * boxes * kept::BOX + weights : 0);
      if (tokens) cp_async_bulk(kept::weights(smem, at.stage), args.row_weight + unit.row + token0, weights, full);
#pragma unroll 1
      for (int i = 0; i < (tokens ? 2 * boxes : 0); i++) {
        const int half = i >= boxes, box = i - half * boxes;
        cp_async_bulk_tensor_2d(kept::box(smem, at.stage, half * kept::BOXES + box), args.kept,
                                kept_column<S>(gemm, half) + channel + box * kept::WIDE, (int32_t)first + token0, full);
      }
    }
    __syncwarp();
    if (GATHERING) mbarrier_arrive(&smem.full[at.stage]);
  }
}

/* A lane has a token of each group, and an octet of channels: lanes that read or write shared memory at a time have one
 * octet. Places advance from token group to token group: addresses worked out from their numbers take registers. */
template <class S> struct activated_store : warp_store<S, S::OCTETS> {
  using base = warp_store<S, S::OCTETS>;
  using kept = kept_stage<S>;
  using Y = typename S::Y;
  const down_activated_args &a;
  Y *h, *d_z;
  float *along;
  int32_t left,       /* of the tile's tokens that follow, this lane's first */
      box, offset;    /* of gate in a stage; of the lane's vector in it, in bytes */
  bool there, inside; /* z is; this lane has channels; `along` has a part of a warp that has none, too */

  DEVICE static int token() { return lane_id() % 8; }
  DEVICE static int octet() { return lane_id() / 8; }

  DEVICE activated_store(const down_activated_args &args, const tile_unit &unit, uint4 *staging, channel_span span,
                         int32_t part)
      : base(staging), a(args)
  {
    const gemm_args &g = args.gemm.g;
    const int channel = span.first + octet_channel<S>(g, octet()), in_tile = channel - unit.n * S::COLUMNS;
    const int64_t row = unit.row + token();
    left = unit.rows - token();
    box = in_tile / kept::WIDE;
    offset = token() * kept::LINE + ((in_tile % kept::WIDE / 8) ^ token()) * 16;
    there = first_kept(args, unit) >= 0;
    inside = channel < span.end;
    h = static_cast<Y *>(g.c) + row * g.c_ld + channel;
    d_z = static_cast<Y *>(args.d_z[0]) + row * args.gemm.z_ld + channel;
    along = args.along + row * ALONG_PARTS(g.n) + part;
  }

  DEVICE static char *bytes(void *p) { return static_cast<char *>(p); }

  DEVICE uint4 kept_vector(pipeline_smem<S> &smem, int stage, int half, int group) const
  {
    return *reinterpret_cast<const uint4 *>(kept::box(smem, stage, half * kept::BOXES + box) + offset +
                                            group * 8 * kept::LINE);
  }

  /* Token group `group` of a stage. */
  template <finish_kind KIND> DEVICE void finish(pipeline_smem<S> &smem, int stage, int group, const uint4 &packed)
  {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    const float w = there ? kept::weights(smem, stage)[group * 8 + token()] : 0.f;
    uint4 activated, gate, up;
    this->stage(words);
    const uint4 d_h = *this->staged_vector(token(), octet()), none = {0, 0, 0, 0};
    gate = kept_vector(smem, stage, 0, group);
    up = kept_vector(smem, stage, 1, group);
    float sum = activate_vectors<Y, KIND>(a.gemm.g, d_h, w, a.scale, activated, gate, up);
    if (w == 0) activated = gate = up = none; /* whatever z is */
    if (!inside) sum = 0;
#pragma unroll
    for (int distance = 8; distance < WARP_SIZE; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (left > 0 && inside) {
      st_global_16(h, activated, false);
      st_global_16(d_z, gate, false);
      st_global_16(bytes(d_z) + (bytes(a.d_z[1]) - bytes(a.d_z[0])), up, false);
    }
    if (left > 0 && octet() == 0) *along = a.scale * sum;
    h += base::TOKENS * a.gemm.g.c_ld;
    d_z += base::TOKENS * a.gemm.z_ld;
    along += base::TOKENS * ALONG_PARTS(a.gemm.g.n);
    left -= base::TOKENS;
  }
};

/* Zeros in h and d z: a warp's channels of rows behind its tile's, which fill up to whole steps. Who counts an expert's
 * rows has these, too. */
template <class S> DEVICE void clear_behind(const down_activated_args &args, const tile_unit &unit, channel_span span)
{
  const gemm_sm90_args &gemm = args.gemm;
  const int channel = span.first + octet_channel<S>(gemm.g, activated_store<S>::octet());
  for (int64_t row = unit.row + unit.rows + activated_store<S>::token(); row < unit.end && channel < span.end;
       row += 8) {
    const uint4 none = {0, 0, 0, 0};
    st_global_16(static_cast<typename S::Y *>(gemm.g.c) + row * gemm.g.c_ld + channel, none, false);
#pragma unroll
    for (int half = 0; half < 2; half++)
      st_global_16(static_cast<typename S::Y *>(args.d_z[half]) + row * gemm.z_ld + channel, none, false);
  }
}

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
  clear_behind<S>(args, unit, span);
}

/* Counts it as stored, by octets of channels; by one thread, after a barrier behind the stores. */
template <class S> DEVICE void add_activated_stored(const gemm_args &args, const tile_unit &unit, int group)
{
  constexpr int EACH = S::COLUMNS / S::CONSUMERS;
  const int channels = min(args.n - (unit.n * S::CONSUMERS + group) * EACH, EACH);
  add_release(args.protocol.progress + D_H_STORED + unit.expert, unit.rows * (channels / 8));
}

/* A consumer's part of a tile. */
template <class S>
DEVICE void store_activated(const down_activated_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                            const tile_unit &unit, int group, channel_span consumer,
                            const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const gemm_args &g = args.gemm.g;
  const channel_span span = span_of_warp<S>(g, consumer);
  uint4 *staged = smem.staging.staged[group][warp_id() % 4];
  if (g.act == ACT_SILU && !limits_gated(g))
    store_activated_as<S, FINISH_silu>(args, smem, at, staged, unit, span, acc);
  else
    store_activated_as<S, FINISH_swiglu>(args, smem, at, staged, unit, span, acc);
}

#endif
