/*
 * The epilogue of a d h of which the backward wants no more than the activation's gradient. Consumers leave a tile's sums,
 * rounded, in shared memory, and go on to the next tile; a warpgroup of finishers makes h and d z of them meanwhile, and
 * z comes and results go by whole rows of a tile, 512 bytes at a time. On its own the activation's gradient would read d h
 * again, which this does not even write.
 */
#ifndef CUMOE_ACTIVATED_CUH
#define CUMOE_ACTIVATED_CUH

#include "backward/slope.cuh"
#include "gemm/parked.cuh"

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

/* What a finisher's lane reads and writes of a row: a vector of channels. Rows go to warps in turn. */
template <class S> struct finisher {
  using Y = typename S::Y;
  static constexpr int WARPS = S::GROUP / WARP_SIZE, AHEAD = 4; /* rows whose z is asked for */
  static_assert(S::COLUMNS == WARP_SIZE * 8 && WARPS == 4, "a warp has a row's vectors");
  struct kept_row {
    uint4 gate, up;
    float weight;
  };
  const down_activated_args &a;
  const Y *z;     /* gate of the next row to be asked for */
  const float *w; /* its weight */
  Y *h, *d_z;     /* of the next row to be finished */
  float *along;
  int32_t asked, left; /* rows of the tile from those on */
  bool there, inside, sums;

  DEVICE static char *bytes(void *p) { return static_cast<char *>(p); }
  DEVICE static int64_t between(const void *from, const void *to)
  {
    return static_cast<const char *>(to) - static_cast<const char *>(from);
  }

  DEVICE finisher(const down_activated_args &args, const tile_unit &unit) : a(args)
  {
    const gemm_sm90_args &gemm = args.drawn.gemm;
    const int first = warp_id() % WARPS, channel = unit.n * S::COLUMNS + lane_id() * 8,
              part = unit.n * (S::COLUMNS / ALONG_PART) + lane_id() / 4;
    const int64_t kept = first_kept(args, unit), row = unit.row + first;
    there = kept >= 0;
    inside = channel < gemm.g.n;
    sums = lane_id() % 4 == 0 && part < ALONG_PARTS(gemm.g.n);
    asked = left = unit.rows - first;
    z = static_cast<const Y *>(gemm.z[0]) + (kept + first) * gemm.z_ld + channel;
    w = args.row_weight + row;
    h = static_cast<Y *>(gemm.g.c) + row * gemm.g.c_ld + channel;
    d_z = static_cast<Y *>(args.d_z[0]) + row * gemm.z_ld + channel;
    along = args.along + row * ALONG_PARTS(gemm.g.n) + part;
  }

  DEVICE void ask(kept_row &row)
  {
    const gemm_sm90_args &gemm = a.drawn.gemm;
    const bool reads = there && asked > 0;
    row.gate = ld_global_no_allocate(reinterpret_cast<const uint4 *>(z), reads && inside);
    row.up = ld_global_no_allocate(
        reinterpret_cast<const uint4 *>(reinterpret_cast<const char *>(z) + between(gemm.z[0], gemm.z[1])),
        reads && inside);
    row.weight = reads ? __ldg(w) : 0.f;
    z += WARPS * gemm.z_ld;
    w += WARPS;
    asked -= WARPS;
  }

  template <finish_kind KIND> DEVICE void finish(const uint4 &d_h, const kept_row &row)
  {
    const gemm_args &g = a.drawn.gemm.g;
    const uint4 none = {0, 0, 0, 0};
    uint4 activated, gate = row.gate, up = row.up;
    float sum = activate_vectors<Y, KIND>(g, d_h, row.weight, a.scale, activated, gate, up);
    if (row.weight == 0) activated = gate = up = none; /* whatever z is */
    if (!inside) sum = 0;
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (inside) {
      st_global_16(h, activated, false);
      st_global_16(d_z, gate, false);
      st_global_16(bytes(d_z) + between(a.d_z[0], a.d_z[1]), up, false);
    }
    if (sums) *along = a.scale * sum;
    h += WARPS * g.c_ld;
    d_z += WARPS * a.drawn.gemm.z_ld;
    along += WARPS * ALONG_PARTS(g.n);
    left -= WARPS;
  }
};

template <class S, finish_kind KIND>
DEVICE void finish_tile(const down_activated_args &args, const parked_tile<S> &tile, const tile_unit &unit)
{
  using lane = finisher<S>;
  typename lane::kept_row rows[lane::AHEAD];
  lane of(args, unit);
#pragma unroll
  for (int i = 0; i < lane::AHEAD; i++) of.ask(rows[i]);
#pragma unroll 1
  for (int row = warp_id() % lane::WARPS; row < unit.rows; row += lane::AHEAD * lane::WARPS)
#pragma unroll
    for (int i = 0; i < lane::AHEAD; i++) {
      if (of.left <= 0) break;
      const int at = row + i * lane::WARPS;
      of.template finish<KIND>(parked_vector<S>(tile, at, lane_id()), rows[i]);
      of.ask(rows[i]); /* in place: what is moved is waited for */
    }
}

/* By a warpgroup of its own. */
template <class S>
DEVICE void finish_tiles(const down_activated_args &args, const pipeline_smem<S> &smem, parked_tile<S> &tile)
{
  const gemm_args &g = args.drawn.gemm.g;
  const bool plain = g.act == ACT_SILU && !limits_gated(g);
  uint32_t turn = 0;
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD, turn ^= 1) {
    wait_for(&tile.parked_full, turn);
    const tile_unit unit = smem.units[slot];
    if (unit.expert < 0) return;
    if (plain)
      finish_tile<S, FINISH_silu>(args, tile, unit);
    else
      finish_tile<S, FINISH_swiglu>(args, tile, unit);
    release_parked<S>(tile);
  }
}

#endif
