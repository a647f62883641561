/*
 * The epilogue of a d h that the backward wants no more than the activation's gradient of: z comes from memory, h and
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

/* What a lane needs of a token besides d h: 8 channels of z, gate and up, and the weight. */
struct kept_vectors {
  uint4 gate, up;
  float weight;
};

/* The row of z of a tile's first; negative: z does not have all of them. */
DEVICE int64_t first_kept(const down_activated_args &args, const tile_unit &unit)
{
  const int64_t first =
      (int64_t)args.z_offsets[unit.expert] + (unit.row - args.drawn.gemm.g.offsets[unit.expert]);
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

/* Gate and up of a tile into L2, by a whole warp, before they are wanted. */
template <class S> DEVICE void prefetch_kept(const down_activated_args &args, const tile_unit &unit)
{
  const gemm_sm90_args &gemm = args.drawn.gemm;
  const int64_t first = first_kept(args, unit);
  const int channel = unit.n * S::COLUMNS, channels = min((int)S::COLUMNS, gemm.g.n - channel);
  if (first < 0 || channels <= 0) return;
#pragma unroll 1
  for (int r = lane_id(); r < unit.rows; r += WARP_SIZE)
#pragma unroll 1
    for (int half = 0; half < 2; half++)
      prefetch_l2(static_cast<const typename S::Y *>(gemm.z[half]) + (first + r) * gemm.z_ld + channel,
                  channels * (int)sizeof(typename S::Y));
}

/* Places advance from token group to token group: addresses worked out from their numbers took more registers. */
template <class S> struct activated_store : warp_store<S, S::OCTETS> {
  using base = warp_store<S, S::OCTETS>;
  using Y = typename S::Y;
  const down_activated_args &a;
  const Y *z;          /* gate of the tokens to be fetched next */
  const float *weight; /* the same */
  Y *d_z;              /* of the tokens to be finished next */
  float *along;
  int32_t fetched, left; /* how many of the tile's tokens follow, this lane's first, for either */
  bool inside;           /* this lane has channels; `along` has a part of a warp that has none, too */

  DEVICE activated_store(const down_activated_args &args, const tile_unit &unit, uint4 *staging, channel_span span,
                         int32_t part)
      : base(args.drawn.gemm.g, unit, staging, span), a(args)
  {
    const gemm_args &g = args.drawn.gemm.g;
    const int64_t first = first_kept(args, unit);
    const int token = lane_id() / S::OCTETS, channel = span.first + octet_channel<S>(g, lane_id() % S::OCTETS);
    const int64_t row = unit.row + token;
    left = unit.rows - token;
    inside = channel < span.end;
    fetched = inside && first >= 0 ? left : 0;
    z = static_cast<const Y *>(args.drawn.gemm.z[0]) + (first + token) * args.drawn.gemm.z_ld + channel;
    d_z = static_cast<Y *>(args.d_z[0]) + row * args.drawn.gemm.z_ld + channel;
    weight = args.row_weight + row;
    along = args.along + row * ALONG_PARTS(g.n) + part;
  }

  DEVICE static const char *bytes(const void *p) { return static_cast<const char *>(p); }

  /* Zeros of a token that is none. */
  DEVICE kept_vectors fetch()
  {
    const bool there = fetched > 0;
    const int64_t up = bytes(a.drawn.gemm.z[1]) - bytes(a.drawn.gemm.z[0]);
    const kept_vectors v = {ld_global_no_allocate(z, there), ld_global_no_allocate(bytes(z) + up, there),
                            there ? __ldg(weight) : 0.f};
    z += base::TOKENS * a.drawn.gemm.z_ld;
    weight += base::TOKENS;
    fetched -= base::TOKENS;
    return v;
  }

  template <finish_kind KIND> DEVICE void finish(const uint4 &packed, kept_vectors v)
  {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    this->stage(words);
    const uint4 d_h = *this->staged_vector(lane_id() / S::OCTETS, lane_id() % S::OCTETS), none = {0, 0, 0, 0};
    uint4 h;
    float sum = activate_vectors<Y, KIND>(a.drawn.gemm.g, d_h, v.weight, a.scale, h, v.gate, v.up);
    if (v.weight == 0) h = v.gate = v.up = none; /* whatever z is */
#pragma unroll
    for (int distance = 1; distance < S::OCTETS; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (left > 0 && inside) {
      const int64_t up = bytes(a.d_z[1]) - bytes(a.d_z[0]);
      st_global_16(this->to, h, false);
      st_global_16(d_z, v.gate, false);
      st_global_16(reinterpret_cast<char *>(d_z) + up, v.up, false);
    }
    if (left > 0 && lane_id() % S::OCTETS == 0) *along = a.scale * sum;
    this->to += base::TOKENS * a.drawn.gemm.g.c_ld;
    d_z += base::TOKENS * a.drawn.gemm.z_ld;
    along += base::TOKENS * ALONG_PARTS(a.drawn.gemm.g.n);
    left -= base::TOKENS;
  }
};

/* Sums are rounded first: that leaves registers for z of the next token group (of two groups more, ptxas spills). The program has half of a tile's steps, twice
 * that of all would not stay where instructions are kept. */
template <class S, finish_kind KIND>
DEVICE void store_activated_as(const down_activated_args &args, uint4 *staged, const tile_unit &unit, channel_span span,
                               const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int TOKENS = activated_store<S>::TOKENS, STEPS = S::BM / TOKENS, HALF = STEPS / 2;
  static_assert(S::OCTETS == 4 && TOKENS == 8 && STEPS % 2 == 0, "a step is a token group");
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
  kept_vectors next = store.fetch();
#pragma unroll 1
  for (int token0 = 0; token0 < S::BM; token0 += HALF * TOKENS) {
#pragma unroll
    for (int j = 0; j < HALF; j++) {
      if (token0 + j * TOKENS >= unit.rows) return;
      const kept_vectors own = next;
      next = store.fetch();
      store.template finish<KIND>(packed[j], own);
    }
#pragma unroll
    for (int j = 0; j < HALF; j++) packed[j] = packed[j + HALF];
  }
}

/* A consumer's part of a tile. */
template <class S>
DEVICE void store_activated(const down_activated_args &args, wgmma_staging<S> &smem, const tile_unit &unit, int group,
                            channel_span consumer, const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
{
  const gemm_args &g = args.drawn.gemm.g;
  const channel_span span = span_of_warp<S>(g, consumer);
  uint4 *staged = smem.staged[group][warp_id() % 4];
  if (g.act == ACT_SILU && !limits_gated(g))
    store_activated_as<S, FINISH_silu>(args, staged, unit, span, acc);
  else
    store_activated_as<S, FINISH_swiglu>(args, staged, unit, span, acc);
}

#endif
