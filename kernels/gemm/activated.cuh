/*
 * The epilogue of a d h of which the backward wants no more than the activation's gradient: z comes from memory, h and
 * d z go there, in vectors of 8 channels, as a warp's staging has them. On its own the activation's gradient would read
 * d h again, which this does not even write.
 */
#ifndef CUMOE_ACTIVATED_CUH
#define CUMOE_ACTIVATED_CUH

#include "backward/slope.cuh"
#include "gemm/boxed.cuh"

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

/* A tile's stages of z, by a whole warp. Both CTAs of a cluster have as many, whatever they have of rows. Boxes may
 * reach into what is not the tile's, which nobody reads. */
template <class S>
DEVICE void produce_kept(const down_activated_args &args, pipeline_smem<S> &smem, const tile_unit &unit,
                         pipeline_state<S::STAGES> &at)
{
  using kept = kept_stage<S>;
  const gemm_sm90_args &gemm = args.drawn.gemm;
  const int64_t first = first_kept(args, unit);
  const int channel = unit.n * S::COLUMNS, channels = first < 0 ? 0 : gemm.g.n - channel;
  const int boxes = channels > 0 ? min(ceil_div(channels, (int)kept::WIDE), (int)kept::BOXES) : 0;
#pragma unroll 1
  for (int token0 = 0; token0 < kept::COUNT * kept::TOKENS; token0 += kept::TOKENS, at.advance()) {
    const int tokens = boxes ? min(max(unit.rows - token0, 0), (int)kept::TOKENS) : 0;
    wait_for(&smem.empty[at.stage], at.phase ^ 1);
    if (elect_one()) {
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
  }
}

/* A lane has a token of each group, and an octet of channels: lanes that read or write shared memory at a time have one
 * octet. Places advance from token group to token group: addresses worked out from their numbers take registers. */
template <class S> struct activated_store {
  using kept = kept_stage<S>;
  using Y = typename S::Y;
  static constexpr int TOKENS = WARP_SIZE / S::OCTETS; /* of a group */
  const down_activated_args &a;
  float *along;
  int32_t left,       /* of the tile's tokens that follow, this lane's first */
      box, offset;    /* of gate in a stage; of the lane's vector in it, in bytes */
  bool there, inside; /* z is; this lane has channels; `along` has a part of a warp that has none, too */

  DEVICE static int token() { return lane_id() % 8; }
  DEVICE static int octet() { return lane_id() / 8; }

  DEVICE activated_store(const down_activated_args &args, const tile_unit &unit, channel_span span, int32_t part)
      : a(args)
  {
    const gemm_args &g = args.drawn.gemm.g;
    const int channel = span.first + octet_channel<S>(g, octet()), in_tile = channel - unit.n * S::COLUMNS;
    left = unit.rows - token();
    box = in_tile / kept::WIDE;
    offset = token() * kept::LINE + ((in_tile % kept::WIDE / 8) ^ token()) * 16;
    there = first_kept(args, unit) >= 0;
    inside = channel < span.end;
    along = args.along + (int64_t)(unit.row + token()) * ALONG_PARTS(g.n) + part;
  }

  /* This lane's vector of gate (0) or up in the first token group of a stage. */
  DEVICE char *kept_vector(pipeline_smem<S> &smem, int stage, int half) const
  {
    return kept::box(smem, stage, half * kept::BOXES + box) + offset;
  }

  /* <d h, h> of a token group to memory, and on to the next one. */
  DEVICE void store(float sum)
  {
#pragma unroll
    for (int distance = 8; distance < WARP_SIZE; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (left > 0 && octet() == 0) *along = a.scale * sum;
    along += TOKENS * ALONG_PARTS(a.drawn.gemm.g.n);
    left -= TOKENS;
  }

  /* Token groups from `first` of a stage on, all at once: one alone waits for each of its steps. What the products gave
   * is transposed where gate was, which each warp has read of its own; d z comes to lie where z was. `packed`, what the
   * products gave, becomes this lane's vectors of h. */
  template <finish_kind KIND, int GROUPS>
  DEVICE void finish(pipeline_smem<S> &smem, int stage, int first, uint4 *packed)
  {
    constexpr int NEXT = TOKENS * kept::LINE;
    char *gates = kept_vector(smem, stage, 0) + first * NEXT, *ups = kept_vector(smem, stage, 1) + first * NEXT;
    const float *weights = kept::weights(smem, stage) + first * TOKENS + token();
    uint4 gate[GROUPS], up[GROUPS], d_h[GROUPS];
    float w[GROUPS], sum[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      gate[i] = *reinterpret_cast<const uint4 *>(gates + i * NEXT);
      up[i] = *reinterpret_cast<const uint4 *>(ups + i * NEXT);
      w[i] = there ? weights[i * TOKENS] : 0.f;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      const uint32_t words[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
      stmatrix_x4_trans(shared_address(gates) + i * NEXT, words);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < GROUPS; i++) d_h[i] = *reinterpret_cast<const uint4 *>(gates + i * NEXT);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
      const uint4 none = {0, 0, 0, 0};
      sum[i] = activate_vectors<Y, KIND>(a.drawn.gemm.g, d_h[i], w[i], a.scale, packed[i], gate[i], up[i]);
      if (w[i] == 0 || left <= i * TOKENS) packed[i] = gate[i] = up[i] = none; /* whatever z is */
      *reinterpret_cast<uint4 *>(gates + i * NEXT) = gate[i];
      *reinterpret_cast<uint4 *>(ups + i * NEXT) = up[i];
      if (!inside) sum[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++) store(sum[i]);
  }
};

/* d z of a stage to memory, each warp a box of a consumer's, by one lane. Rows are whole steps, as those of z. */
template <class S>
DEVICE void store_d_z(const down_activated_args &args, pipeline_smem<S> &smem, int stage, const tile_unit &unit,
                      int token0, int group)
{
  using kept = kept_stage<S>;
  constexpr int STEPS = kept::TOKENS / WGMMA_STEP;
  const int half = warp_id() % 4 / 2, box = group * (kept::BOXES / S::CONSUMERS) + warp_id() % 2;
  const int channel = unit.n * S::COLUMNS + box * kept::WIDE, which = args.d_z[half] > args.d_z[1 - half];
  const char *from = kept::box(smem, stage, half * kept::BOXES + box);
#pragma unroll 1
  for (int i = 0; i < STEPS && token0 + i * (int)WGMMA_STEP < unit.rows; i++)
    if (channel < args.drawn.gemm.g.n)
      cp_async_bulk_tensor_4d_store(args.drawn.out, channel, unit.row + token0 + i * (int)WGMMA_STEP, which, 0,
                                    from + i * (int)WGMMA_STEP * kept::LINE);
  cp_async_bulk_commit_group();
}

/* Token group j + BY becomes the j-th. */
template <int BY, int COUNT> DEVICE void rotate(uint4 (&vectors)[COUNT])
{
  uint4 first[BY];
#pragma unroll
  for (int j = 0; j < BY; j++) first[j] = vectors[j];
#pragma unroll
  for (int j = 0; j < COUNT; j++) vectors[j] = j + BY < COUNT ? vectors[(j + BY) % COUNT] : first[(j + BY) % COUNT];
}

/* h to memory, a stage for each consumer (boxed.cuh); of group j it has the vectors in h[(j - FIRST) % COUNT]. `before`: a
 * stage of d z that is not released yet. */
template <class S, int FIRST, int COUNT>
DEVICE void store_h(const down_activated_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                    const tile_unit &unit, int group, channel_span span, const uint4 (&h)[COUNT], int before)
{
  using boxed = boxed_stage<S>;
  const int octet = lane_id() / 8, token = lane_id() % 8,
            channel = span.first + octet_channel<S>(args.drawn.gemm.g, octet) - unit.n * S::COLUMNS;
  if (lane_id() == 0) cp_async_bulk_wait_group_read<0>();
  __syncwarp();
  release_stage<S>(smem, before);
  if (group != 0) pass_boxed<S>(smem, at);
  wait_for(&smem.full[at.stage], at.phase);
  char *to = boxed::box(smem, at.stage, channel / boxed::WIDE % 2) + token * boxed::LINE +
             ((channel % boxed::WIDE / 8) ^ token) * 16;
#pragma unroll
  for (int j = 0; j < COUNT; j++)
    *reinterpret_cast<uint4 *>(to + j * 8 * boxed::LINE) = h[(j - FIRST + COUNT) % COUNT];
  fence_proxy_async_shared();
  bar_sync(1 + group, S::GROUP);
  store_boxes<S>(args.h, args.drawn.gemm.g.n, smem, at.stage, unit, unit.n * S::COLUMNS + group * (S::COLUMNS / S::CONSUMERS));
  __syncwarp();
  release_stage<S>(smem, at.stage);
  at.advance();
  if (group == 0) pass_boxed<S>(smem, at);
}

/* Sums are rounded first, so that they can move down in half as many registers: the program has one stage of z. */
template <class S, finish_kind KIND>
DEVICE void store_activated_as(const down_activated_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                               const tile_unit &unit, int group, channel_span span,
                               const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  using kept = kept_stage<S>;
  constexpr int TOKENS = activated_store<S>::TOKENS, STEPS = S::BM / TOKENS, GROUPS = kept::GROUPS;
  constexpr int AT_ONCE = 2;
  static_assert(S::OCTETS == 4 && TOKENS == 8 && GROUPS % AT_ONCE == 0 && STEPS % AT_ONCE == 0, "whole steps");
  uint4 packed[STEPS];
#pragma unroll
  for (int j = 0; j < STEPS; j++) {
#pragma unroll
    for (int g = 0; g < 4; g++)
      (&packed[j].x)[g] = pack_pair<typename S::Y>(accumulator_of<S>(acc, g, j, 0), accumulator_of<S>(acc, g, j, 1));
    hold(packed[j]);
  }
  const int32_t part = (unit.n * S::CONSUMERS + group) * 4 + warp_id() % 4;
  activated_store<S> store(args, unit, span, part);
  int before = -1;
#pragma unroll 1
  for (int token0 = 0; token0 < kept::COUNT * kept::TOKENS; token0 += kept::TOKENS, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
#pragma unroll
    for (int j = 0; j < GROUPS; j += AT_ONCE)
      if (token0 + j * TOKENS < unit.rows) store.template finish<KIND, AT_ONCE>(smem, at.stage, j, packed + j);
    fence_proxy_async_shared();
    bar_sync(1 + group, S::GROUP);
    if (lane_id() == 0) {
      store_d_z<S>(args, smem, at.stage, unit, token0, group);
      cp_async_bulk_wait_group_read<1>();
    }
    __syncwarp();
    if (before >= 0) release_stage<S>(smem, before); /* one stage later, when it is read */
    before = (int)at.stage;
    rotate<GROUPS>(packed);
  }
  store_h<S, (GROUPS * kept::COUNT) % STEPS>(args, smem, at, unit, group, span, packed, before);
}

/* A consumer's part of a tile. */
template <class S>
DEVICE void store_activated(const down_activated_args &args, pipeline_smem<S> &smem, pipeline_state<S::STAGES> &at,
                            const tile_unit &unit, int group, channel_span consumer,
                            const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const gemm_args &g = args.drawn.gemm.g;
  const channel_span span = span_of_warp<S>(g, consumer);
  if (g.act == ACT_SILU && !limits_gated(g))
    store_activated_as<S, FINISH_silu>(args, smem, at, unit, group, span, acc);
  else
    store_activated_as<S, FINISH_swiglu>(args, smem, at, unit, group, span, acc);
}

#endif
