/*
 * The epilogue of an up whose gate and up the backward wants: z is stored beside h, which is made of it as it is stored,
 * rounded. On its own z would be read again, and x be multiplied by what has no epilogue in place.
 */
#ifndef CUMOE_KEEP_CUH
#define CUMOE_KEEP_CUH

#include "gemm/handover.cuh"
#include "gemm/parked.cuh"

/* Eight channels of h. */
template <class Y, finish_kind KIND> DEVICE uint4 h_of(const swiglu &act, const uint4 &gate, const uint4 &up)
{
  uint4 h;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 g = unpack_pair<Y>((&gate.x)[i]), u = unpack_pair<Y>((&up.x)[i]);
    (&h.x)[i] = pack_pair<Y>(act.of_biased<KIND>(g.x, u.x), act.of_biased<KIND>(g.y, u.y));
  }
  return h;
}

/* A warp has two rows at a time, a lane 8 channels. */
template <class S, finish_kind KIND>
DEVICE void finish_kept(const gemm_sm90_args &args, const parked_tile<S> &tile, const tile_unit &unit)
{
  using Y = typename S::Y;
  constexpr int CHANNELS = S::COLUMNS / 2, EACH = WARP_SIZE * 8 / CHANNELS, STEP = EACH * (S::GROUP / WARP_SIZE);
  static_assert(EACH == 2, "lanes by halves");
  const int octet = lane_id() % 16, channel = unit.n * CHANNELS + octet * 8;
  const int first = warp_id() % 4 * EACH + lane_id() / 16, rows = channel < args.g.n ? unit.rows : 0;
  const int64_t row = unit.row + first;
  const swiglu act(args.g, args.up_first);
  Y *h = static_cast<Y *>(args.g.c) + row * args.g.c_ld + channel,
    *gates = static_cast<Y *>(args.z[0]) + row * args.z_ld + channel,
    *ups = static_cast<Y *>(args.z[1]) + row * args.z_ld + channel;
#pragma unroll 2
  for (int at = first; at < rows; at += STEP) {
    uint4 gate = parked_vector<S>(tile, at, 2 * octet + act.up_first),
          up = parked_vector<S>(tile, at, 2 * octet + !act.up_first);
    if constexpr (S::N_MAJOR)
      if (in_pairs<S>(args.g)) gate = in_order(gate), up = in_order(up);
    st_global_16(gates, gate, false);
    st_global_16(ups, up, false);
    st_global_16(h, h_of<Y, KIND>(act, gate, up), args.g.protocol.evict_last);
    gates += STEP * args.z_ld;
    ups += STEP * args.z_ld;
    h += STEP * args.g.c_ld;
  }
}

/* By the finishers. */
template <class S>
DEVICE void finish_kept_tiles(const gemm_sm90_args &args, const pipeline_smem<S> &smem, parked_tile<S> &tile)
{
  const bool plain = args.g.act == ACT_SILU && !limits_gated(args.g);
  uint32_t turn = 0;
#pragma unroll 1
  for (int slot = 0;; slot = (slot + 1) % UNITS_AHEAD, turn ^= 1) {
    wait_for(&tile.parked_full, turn);
    const tile_unit unit = smem.units[slot];
    if (unit.expert < 0) return;
    if (plain)
      finish_kept<S, FINISH_silu>(args, tile, unit);
    else
      finish_kept<S, FINISH_swiglu>(args, tile, unit);
    release_parked<S>(tile);
    if (!args.g.protocol.by_expert) continue;
    bar_sync(1 + S::CONSUMERS, S::GROUP);
    if (threadIdx.x % S::GROUP == 0)
      add_h_stored(args.g, unit.expert, min(S::COLUMNS / 2, args.g.n - unit.n * (S::COLUMNS / 2)));
  }
}

#endif
