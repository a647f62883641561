/*
 * The epilogue of a d h of which the backward wants no more than the activation's gradient: z comes from memory, h and
 * d z go there, in vectors of 8 channels. On its own the activation's gradient would read d h again, which this does
 * not even write.
 *
 * It moves four times what its products leave, and took 27,000 clocks a tile, half of what products take. So a warpgroup
 * of its own does it, while the next tile is multiplied: consumers round their sums and hand over eight tokens of them
 * between steps. What is rounded takes half of the registers that sums take, and both are there at a time: so a tile has
 * 128 rows, not 176.
 */
#ifndef CUMOE_ACTIVATED_CUH
#define CUMOE_ACTIVATED_CUH

#include "backward.h"
#include "backward/slope.cuh"
#include "device/wgmma_registers.cuh"
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
 * Two rings of token groups, 8 tokens each: of d h, from consumers to finishers, and of z, by bulk copies: boxes of 64
 * channels, swizzled, those of gate, then those of up, and weights of tokens. Boxes may reach into what is not the
 * tile's, which nobody reads.
 */
enum { GROUP_TOKENS = KEPT_TOKENS, D_H_SLOTS = 2, KEPT_SLOTS = 2 };
template <class S, bool ACTIVATES = S::ACTIVATES> struct kept_boxes {
};
template <class S> struct kept_boxes<S, true> {
  static constexpr int EACH = S::COLUMNS / KEPT_WIDE, BYTES = GROUP_TOKENS * KEPT_WIDE * (int)sizeof(typename S::Y);
  static_assert(BYTES == 1024, "a box is what the swizzle repeats");
  typename S::Y z[KEPT_SLOTS][2][EACH][GROUP_TOKENS * KEPT_WIDE];
};
template <class S, bool ACTIVATES = S::ACTIVATES> struct activated_rings {
};
template <class S> struct activated_rings<S, true> {
  float kept_weights[KEPT_SLOTS][GROUP_TOKENS];
  uint64_t kept_full[KEPT_SLOTS], kept_empty[KEPT_SLOTS], d_h_full[D_H_SLOTS], d_h_empty[D_H_SLOTS];

  DEVICE void init()
  {
    constexpr int CONSUMERS = S::CONSUMERS * S::GROUP / WARP_SIZE, FINISHERS = S::GROUP / WARP_SIZE;
    for (int i = 0; i < KEPT_SLOTS; i++) mbarrier_init(&kept_full[i], 1), mbarrier_init(&kept_empty[i], FINISHERS);
    for (int i = 0; i < D_H_SLOTS; i++) mbarrier_init(&d_h_full[i], CONSUMERS), mbarrier_init(&d_h_empty[i], FINISHERS);
  }
};

/* Of d h in a slot: a token's octet of the tile's channels. Rotated, so that neither stmatrix nor lanes that read meet
 * in a bank. The ring lies where other forms stage outputs. */
template <class S>
DEVICE uint32_t d_h_octet(const wgmma_staging<S> &smem, uint32_t slot, uint32_t token, uint32_t octet)
{
  constexpr uint32_t LINE = S::COLUMNS * sizeof(typename S::Y);
  static_assert(sizeof smem.staged == D_H_SLOTS * GROUP_TOKENS * LINE, "the ring");
  return shared_address(smem.staged) + (slot * GROUP_TOKENS + token) * LINE + (octet ^ token) * 16;
}

/* ---- consumers ---- */

/* Of a unit a consumer's sums, rounded, and how far it has come with handing them over. */
template <class S> struct activated_later {
  static constexpr int GROUPS = S::BM / GROUP_TOKENS;
  uint4 packed[GROUPS]; /* [token group].[octet] */
  int rows = 0, group;  /* 0: nothing is left; its next group */
  pipeline_state<D_H_SLOTS> at;

  DEVICE void set(int unit_rows, const float (&acc)[S::BLOCKS][S::ACCUMULATORS])
  {
    rows = unit_rows, group = 0;
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
#pragma unroll
      for (int g = 0; g < 4; g++)
        (&packed[j].x)[g] = pack_pair<typename S::Y>(accumulator_of<S>(acc, g, j, 0), accumulator_of<S>(acc, g, j, 1));
      hold(packed[j]);
    }
  }

  /* Those of the next group: found by branches, as what moves from register to register in a loop is there twice. */
  template <int FIRST = 0, int COUNT = GROUPS> DEVICE uint4 words() const
  {
    if constexpr (COUNT == 1) {
      return packed[FIRST];
    } else {
      if (group < FIRST + COUNT / 2) return words<FIRST, COUNT / 2>();
      return words<FIRST + COUNT / 2, COUNT - COUNT / 2>();
    }
  }

  template <class SMEM> DEVICE void hand_over(const gemm_args &args, SMEM &smem)
  {
    const uint32_t thread = tid_x() - S::GROUP, lane = thread % WARP_SIZE, warp = thread / WARP_SIZE % 4,
                   consumer = thread / S::GROUP; /* anew: registers are full */
    const uint4 own = words();
    const uint32_t rounded[4] = {own.x, own.y, own.z, own.w};
    const uint32_t octet = (consumer * (S::COLUMNS / S::CONSUMERS) + warp * (S::N_MAJOR ? 16 : 32) +
                            octet_channel<S>(args, (int)(lane / 8))) /
                           8;
    stmatrix_x4_trans(d_h_octet<S>(smem.staging, at.stage, lane % 8, octet), rounded);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&smem.d_h_full[at.stage]);
    at.advance();
    if (++group * GROUP_TOKENS >= rows) rows = 0;
  }

  /* Of what is left the next group, if there is room for it. */
  template <class SMEM> DEVICE void next(const gemm_args &args, SMEM &smem)
  {
    if (rows > 0 && mbarrier_test_wait(&smem.d_h_empty[at.stage], at.phase ^ 1)) hand_over(args, smem);
    __syncwarp();
  }
  template <class SMEM> DEVICE void rest(const gemm_args &args, SMEM &smem)
  {
#pragma unroll 1
    while (rows > 0) {
      wait_for(&smem.d_h_empty[at.stage], at.phase ^ 1);
      hand_over(args, smem);
    }
  }
  /* Behind the last unit: finishers look which unit it is. */
  template <class SMEM> DEVICE void end(SMEM &smem)
  {
    wait_for(&smem.d_h_empty[at.stage], at.phase ^ 1);
    if (tid_x() % WARP_SIZE == 0) mbarrier_arrive(&smem.d_h_full[at.stage]);
  }
};

/* ---- finishers ---- */

/* Of the two halves in a row of z, the columns of gate (0) or up. */
DEVICE int32_t kept_column(const gemm_sm90_args &args, int half)
{
  return args.z[half] > args.z[1 - half] ? (int32_t)(args.z_ld / 2) : 0;
}

/* A token group of z, by one lane. first: the row in z of the tile's first; negative: it has none, as if no row had a
 * pair. */
template <class S, class SMEM>
DEVICE void copy_kept(const down_activated_args &args, SMEM &smem, const tile_unit &unit, int64_t first, int token0,
                      int slot)
{
  const int channel = unit.n * S::COLUMNS,
            boxes = min(ceil_div(args.gemm.g.n - channel, (int)KEPT_WIDE), (int)kept_boxes<S>::EACH);
  uint64_t *full = &smem.kept_full[slot];
  if (first < 0) {
    for (int i = 0; i < GROUP_TOKENS; i++) smem.kept_weights[slot][i] = 0;
    mbarrier_arrive(full);
    return;
  }
  const uint32_t weights = round_up(min(unit.rows - token0, (int)GROUP_TOKENS), 4) * (uint32_t)sizeof(float);
  mbarrier_arrive_expect_tx(full, 2 * boxes * kept_boxes<S>::BYTES + weights);
  cp_async_bulk(smem.kept_weights[slot], args.row_weight + unit.row + token0, weights, full);
#pragma unroll 1
  for (int i = 0; i < 2 * boxes; i++) {
    const int half = i >= boxes, box = i - half * boxes;
    cp_async_bulk_tensor_2d(smem.z[slot][half][box], args.kept,
                            kept_column(args.gemm, half) + channel + box * (int)KEPT_WIDE, (int32_t)first + token0,
                            full);
  }
}

/* A warp has a token of a group: a lane an octet of its channels. */
template <class S, finish_kind KIND, class SMEM>
DEVICE void finish_token(const down_activated_args &args, const SMEM &smem, const tile_unit &unit, int token0,
                         uint32_t token, int d_h_slot, int kept_slot)
{
  using Y = typename S::Y;
  const gemm_args &g = args.gemm.g;
  const uint32_t octet = lane_id(), box = octet / 8;
  const uint32_t from = shared_address(smem.z[kept_slot][0][box]) + token * 128 + (octet % 8 ^ token) * 16;
  const uint4 d_h = lds_128(d_h_octet<S>(smem.staging, d_h_slot, token, octet));
  uint4 gate = lds_128(from), up = lds_128(from + sizeof smem.z[0][0]), h;
  const float w = smem.kept_weights[kept_slot][token];
  float sum = activate_vectors<Y, KIND>(g, d_h, w, args.scale, h, gate, up);
  if (w == 0) h = gate = up = {0, 0, 0, 0}; /* whatever z is */
  const int channel = unit.n * S::COLUMNS + (int)octet * 8;
  if (channel >= g.n) sum = 0; /* `along` has parts without channels, too */
#pragma unroll
  for (int distance = 1; distance < ALONG_PART / 8; distance *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
  if (token0 + (int)token >= unit.rows) return;
  const int64_t row = unit.row + token0 + (int)token;
  if (channel < g.n) {
    st_global_16(static_cast<Y *>(g.c) + row * g.c_ld + channel, h, false);
    st_global_16(static_cast<Y *>(args.d_z[0]) + row * args.gemm.z_ld + channel, gate, false);
    st_global_16(static_cast<Y *>(args.d_z[1]) + row * args.gemm.z_ld + channel, up, false);
  }
  const int part = unit.n * (S::COLUMNS / ALONG_PART) + (int)octet * 8 / ALONG_PART;
  if (octet % (ALONG_PART / 8) == 0) args.along[row * ALONG_PARTS(g.n) + part] = args.scale * sum;
}

/* Zeros in h and d z: rows behind a tile's, which fill up to whole steps. Who counts an expert's rows has these, too. */
template <class S> DEVICE void clear_behind(const down_activated_args &args, const tile_unit &unit)
{
  const gemm_sm90_args &gemm = args.gemm;
  const int channel = unit.n * S::COLUMNS + lane_id() * 8;
#pragma unroll 1
  for (int64_t row = unit.row + unit.rows + warp_id() % 4; row < unit.end && channel < gemm.g.n; row += 4) {
    const uint4 none = {0, 0, 0, 0};
    st_global_16(static_cast<typename S::Y *>(gemm.g.c) + row * gemm.g.c_ld + channel, none, false);
#pragma unroll
    for (int half = 0; half < 2; half++)
      st_global_16(static_cast<typename S::Y *>(args.d_z[half]) + row * gemm.z_ld + channel, none, false);
  }
}

/* Counts a unit as stored, by octets of channels. */
template <class S> DEVICE void tell_activated(const gemm_args &args, const tile_unit &unit)
{
  bar_sync(1, S::GROUP);
  if (threadIdx.x % S::GROUP == 0)
    add_release(args.protocol.progress + D_H_STORED + unit.expert,
                unit.rows * (min(args.n - unit.n * S::COLUMNS, (int)S::COLUMNS) / 8));
}

template <class S, finish_kind KIND, class SMEM>
DEVICE void finish_units_as(const down_activated_args &args, SMEM &smem)
{
  constexpr int WARPS = S::GROUP / WARP_SIZE;
  const gemm_args &g = args.gemm.g;
  const int warp = warp_id() % WARPS;
  const bool copies = warp == 0; /* z */
  pipeline_state<D_H_SLOTS> at;
  pipeline_state<KEPT_SLOTS> kept, next; /* next: to be filled */
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD) {
    wait_for(&smem.d_h_full[at.stage], at.phase);
    const tile_unit unit = smem.units[slot];
    if (unit.expert < 0) return;
    if (unit.n * S::COLUMNS >= g.n) continue; /* nobody hands it over */
    const int64_t first = first_kept(args, unit);
#pragma unroll 1
    for (int token0 = 0; token0 < unit.rows; token0 += GROUP_TOKENS, at.advance(), kept.advance()) {
      if (copies) {
#pragma unroll 1
        for (int ahead = token0 ? token0 + GROUP_TOKENS : 0; ahead <= token0 + GROUP_TOKENS && ahead < unit.rows;
             ahead += GROUP_TOKENS, next.advance()) {
          wait_for(&smem.kept_empty[next.stage], next.phase ^ 1);
          if (elect_one()) copy_kept<S>(args, smem, unit, first, ahead, (int)next.stage);
          __syncwarp();
        }
      }
      wait_for(&smem.d_h_full[at.stage], at.phase);
      wait_for(&smem.kept_full[kept.stage], kept.phase);
#pragma unroll 1
      for (int token = warp; token < GROUP_TOKENS; token += WARPS)
        finish_token<S, KIND>(args, smem, unit, token0, (uint32_t)token, (int)at.stage, (int)kept.stage);
      __syncwarp(); /* all lanes have read it */
      if (lane_id() == 0) {
        mbarrier_arrive(&smem.kept_empty[kept.stage]);
        mbarrier_arrive(&smem.d_h_empty[at.stage]);
      }
    }
    clear_behind<S>(args, unit);
    if (g.protocol.by_expert) tell_activated<S>(g, unit);
  }
}

template <class S, class SMEM> DEVICE void finish_units(const down_activated_args &args, SMEM &smem)
{
  if (args.gemm.g.act == ACT_SILU && !limits_gated(args.gemm.g))
    finish_units_as<S, FINISH_silu>(args, smem);
  else
    finish_units_as<S, FINISH_swiglu>(args, smem);
}

#endif
