/* drawn: a warp's units, and what it asks memory for ahead. */
#ifndef CUMOE_DRAWN_FEED_CUH
#define CUMOE_DRAWN_FEED_CUH

#include "device/ptx_hinted_sm90.cuh"
#include "few/drawn_layout.cuh"
#include "few/feed.cuh"

/* Up to BN weight rows of an active expert, which has so many columns. */
struct drawn_unit {
  int active, octet, columns; /* active < 0: none is left */
  int tiles;                  /* that have rows */
  int down, part, number;     /* part: of k; number: of up, of the CTA's */
};

/* On its way to be multiplied. */
template <class L> struct drawn_slice {
  drawn_unit unit;
  int slice, last; /* last: of the unit */
  uint32_t scales[L::TILES]
                 [2]; /* of row l % 16 of a tile and run l / 16, as they lie: one, of mx4 four, of which two may be
                                   apart */
};

/* Where a lane's things lie in a stage, in bytes: what would be worked out anew with every slice is held. */
template <class L> struct drawn_lane {
  uint32_t copied, codes,
      elements; /* the vector of codes that it copies; where ldmatrix reads; its elements of a group */

  DEVICE drawn_lane()
  {
    const uint32_t lane = lane_id(), octet = lane / 8 % 2 * L::LINES * WARP_SIZE, token = lane / 8;
    uint4 all = make_uint4(drawn_vector(lane / 4, lane % 4) * 16, (octet + drawn_vector(lane % 8, lane / 16)) * 16,
                           (token * L::VECTORS + drawn_column_vector(token, lane % 4)) * 16 + lane / 4 % 2 * 8, 0);
    if constexpr (L::BYTES)
      all.z = (token * L::VECTORS + (same_type<typename L::CODE::M, s8> ? token : drawn_column_vector(token, 0))) * 16 +
              lane % 4 * (same_type<typename L::CODE::M, s8> ? 4 : 8);
    hold(all);
    copied = all.x, codes = all.y, elements = all.z;
  }
};

/* Units of up for the CTA, one or two of them. By one thread, when all who wanted the ticket that had the place before
 * have read it: it is known by now, so they wait for nobody. */
template <class L> DEVICE void draw_ticket(const few_args &args, drawn_smem<L> &smem, int draw, bool more)
{
  volatile int2 *known = smem.line.ticket + draw % L::TICKETS;
  const volatile int32_t *read = smem.line.read + draw % L::TICKETS;
  while (*read != draw / L::TICKETS * (smem.line.parts << smem.line.twice)) __nanosleep(FEW_POLL);
  known->y =
      more ? (int)count_up(reinterpret_cast<uint32_t *>(args.protocol.tickets)) + 1 : 0x7fffffff >> smem.line.twice;
  __threadfence_block();
  known->x = draw;
}

template <class L> struct drawn_feed {
  using W = typename L::W;
  static constexpr bool MX4 = same_type<W, mx4>;
  static constexpr int BYTES_K = L::BK * L::BITS / 8; /* of a row, in a slice */

  const few_args &args;
  drawn_smem<L> &smem;
  const drawn_lane<L> &lane;
  const int experts, first; /* the first octet of down whose y is made */
  drawn_slice<L> ahead[L::STAGES - 1];
  drawn_unit at;
  int slice, slices, k, to;               /* of the unit: the next; all of them; all of its k. The next stage */
  int shift, step_of_scales;              /* of k to its block, of 2^shift; bytes from one to the next */
  const char *codes[2], *scale[L::TILES]; /* of row l / 4 of octets 0 and 1 of a slice; of row l % 16 of a tile */
  const typename L::Y *row;               /* of the first column */
  int octets, behind;                     /* weight octets that are there; bytes from a tile's rows to the next one's */
  bool four, even;                        /* so many scales may be read at once */
  uint32_t routes;                        /* tokens whose routing the warp has to write, a bit each */

  DEVICE drawn_feed(const few_args &a, drawn_smem<L> &s, const drawn_lane<L> &l, int e, int octet)
      : args(a), smem(s), lane(l), experts(e), first(octet), at{0, 0, 0, 0, octet > s.own.first, 0, 0}, slice(0),
        slices(0), to(0), routes(0)
  {
  }

  /* ---- units ---- */

  DEVICE int octets_of_down() const { return min(smem.own.first + smem.own.count - first, smem.y.octets); }

  /* Octets of an expert's channels that a unit has. */
  DEVICE static int step(bool gated) { return gated ? L::TILES : 2 * L::TILES; }

  DEVICE void draw_down()
  {
    const int tiles = ceil_div(octets_of_down(), step(false)), parts = smem.y.parts;
    const int item = __shfl_sync(ALL_LANES, lane_id() == 0 ? atomicAdd(&smem.drawn, 1) : 0, 0);
    at.down = 1, at.active = -1;
    if (item >= experts * tiles * parts) return;
    const int unit = item / parts;
    at.part = item % parts, at.active = unit / tiles, at.octet = first + unit % tiles * step(false);
  }

  /* The number of a draw, as soon as it is known: whoever takes the first item of one draws the next, or knows that
   * there are none. */
  DEVICE int take_ticket(int draw, bool first)
  {
    int value = 0;
    if (lane_id() == 0) {
      volatile int2 *known = smem.line.ticket + draw % L::TICKETS;
      while (known->x != draw) __nanosleep(FEW_POLL);
      __threadfence_block();
      value = known->y;
      __threadfence_block();
      atomicAdd(&smem.line.read[draw % L::TICKETS], 1);
      if (first) draw_ticket<L>(args, smem, draw + 1, value < units());
    }
    return __shfl_sync(ALL_LANES, value, 0);
  }

  /* Draws that have units of up. */
  DEVICE int units() const
  {
    const int tiles = ceil_div(args.up.n / 8, step(args.up.gated));
    return experts * tiles + smem.line.twice >> smem.line.twice;
  }

  /* Of up as long as there are any. */
  DEVICE void draw()
  {
    if (at.down) return draw_down();
    const int each = step(args.up.gated), tiles = ceil_div(args.up.n / 8, each), parts = smem.line.parts;
    while (true) { /* the last draw may have a unit less */
      const int item = __shfl_sync(ALL_LANES, lane_id() == 0 ? atomicAdd(&smem.line.items, 1) : 0, 0);
      at.number = item / parts, at.part = item - at.number * parts;
      const int twice = smem.line.twice, draw = at.number >> twice, in_draw = at.number & twice;
      const bool first = at.part == 0 && in_draw == 0;
      const int ticket = take_ticket(draw, first), unit = (ticket << twice) + in_draw;
      if (first && ticket < L::TOKENS && ticket < (int)gridDim.x) routes |= 1u << ticket;
      if (ticket >= units()) return draw_down();
      if (unit >= experts * tiles) continue;
      at.active = unit / tiles, at.octet = unit % tiles * each;
      return;
    }
  }

  DEVICE const gemm_args &gemm() const { return at.down ? args.down : args.up; }

  DEVICE void locate()
  {
    const gemm_args &g = gemm();
    const bool gated = !at.down && g.gated;
    const few_halves of = at.down ? few_halves{smem.table.down[at.active], nullptr} : smem.table.weights[at.active];
    const int stride = (int)(g.b.n_stride * L::BITS / 8), l = lane_id(),
              end = at.down ? first + octets_of_down() : g.n / 8;
    const int64_t first_code = (int64_t)(at.octet * 8 + l / 4) * stride + l % 4 * 16;
    octets = min(end - at.octet, step(gated)) * (gated ? 2 : 1), at.tiles = ceil_div(octets, 2);
    codes[0] = static_cast<const char *>(of.low) + first_code;
    codes[1] = gated ? static_cast<const char *>(of.high) + first_code : codes[0] + (int64_t)8 * stride;
    behind = (gated ? 8 : 16) * stride;
    slice = 0, slices = ceil_div(g.k, L::BK), k = g.k;
    const int part_slices = at.down ? smem.y.each : smem.line.each;
    slice = at.part * part_slices, slices = min(slices, slice + part_slices);
    const uint2 columns = *reinterpret_cast<const uint2 *>(smem.table.column[at.active]);
    at.columns = 1 + ((int)columns.x >= 0) + ((columns.y & 0x8000) == 0) + ((int)columns.y >= 0);
    codes[0] += slice * BYTES_K, codes[1] += slice * BYTES_K;
    row = column(g, smem.table.column[at.active][0]) + slice * L::BK + l * 8;
    locate_scales(g, gated);
  }

  DEVICE void locate_scales(const gemm_args &g, bool gated)
  {
    const scale_matrix &s = g.b.scale;
    const int o = lane_id() / 8 % 2, half = gated ? o : 0, bytes = (int)s.n_stride * (int)scale_bytes(s.dtype);
    const char *base = static_cast<const char *>(scale_base(s, half, smem.table.expert[at.active]));
    shift = MX4 ? 5 : 31 - __clz(s.block_k), step_of_scales = (int)s.k_stride * (int)scale_bytes(s.dtype);
    uint32_t all = s.k_origin / 32 | g.k / 32;
#pragma unroll
    for (int t = 0; t < L::TILES; t++) {
      const int octet = at.octet + (gated ? t : 2 * t + o), n = octet * 8 + lane_id() % 8 + s.n_origin[half];
      scale[t] = base + (int64_t)(s.block_n == 1 ? n : few_quotient(n, s.block_n)) * bytes;
      all |= (uint32_t) reinterpret_cast<uintptr_t>(scale[t]);
    }
    if constexpr (MX4) {
      const bool dense = s.k_stride == 1;
      even = dense && !__any_sync(ALL_LANES, all & 1), four = dense && !__any_sync(ALL_LANES, all & 3);
    }
  }

  /* ---- slices ---- */

  /* Past the end of a row its last vector again: there columns are 0. */
  DEVICE void copy()
  {
    drawn_stage<L> &stage = smem.stages[warp_id()][to];
    const uint64_t policy = evict_first_policy();
    const uint32_t codes_to = shared_address(&stage) + lane.copied, columns_to = shared_address(stage.columns);
    const int l = lane_id(), left = k - slice * L::BK, last = left * L::BITS / 8 - 16 - l % 4 * 16;
#pragma unroll
    for (int i = 0; i < L::TILES * 2 * L::LINES; i++) {
      const int line = i % L::LINES, o = i / L::LINES % 2, t = i / L::LINES / 2;
      if (L::BYTES && t >= at.tiles) continue; /* nor is it multiplied */
      cp_async_cg_16(codes_to + i * (int)(WARP_SIZE * sizeof(uint4)), codes[o] + (t * behind + min(line * 64, last)),
                     2 * t + o < octets ? 16 : 0, policy);
    }
    codes[0] += BYTES_K, codes[1] += BYTES_K;
    const int bytes = l * 8 < left ? 16 : 0;
    cp_async_cg_16(columns_to + l * 16, row, bytes);
#pragma unroll 1
    for (int c = 1; c < at.columns; c++)
      cp_async_cg_16(columns_to + (c * L::VECTORS + drawn_column_vector(c, l)) * 16,
                     column(gemm(), smem.table.column[at.active][c]) + slice * L::BK + l * 8, bytes);
    row += L::BK;
  }

  /* A column's row of x or h. */
  DEVICE const typename L::Y *column(const gemm_args &g, few_column of) const
  {
    const int row = at.down ? column_pair(of) : column_token(of);
    return static_cast<const typename L::Y *>(g.a) + row * g.a_ld;
  }

  /* Rows have the scale where their codes are, or none. */
  DEVICE bool has_scale(int tile) const
  {
    return 2 * tile + lane_id() / 8 % 2 < octets;
  }

  template <int SIZE> DEVICE void load_blocks(int64_t step, bool there, uint32_t (&to)[L::TILES][2]) const
  {
#pragma unroll
    for (int t = 0; t < L::TILES; t++) to[t][0] = load_bits<SIZE>(scale[t] + step, there && has_scale(t));
  }

  /* MX4: a run's scales of a byte, or as many of them as there are. */
  DEVICE void load_four(const char *from, int count, uint32_t (&to)[2]) const
  {
    to[1] = 0;
    if (four) {
      to[0] = load_bits<4>(from, count > 0);
    } else if (even) {
      to[0] = load_bits<2>(from, count > 0), to[1] = load_bits<2>(from + 2, count > 2);
    } else {
      to[0] = 0;
#pragma unroll 1
      for (int i = 0; i < 4; i++) to[0] |= load_bits<1>(from + i * step_of_scales, i < count) << i * 8;
    }
  }

  DEVICE void load_scales(uint32_t (&to)[L::TILES][2])
  {
    const scale_matrix &s = gemm().b.scale;
    const int first_k = slice * L::BK + lane_id() / 16 * 128, left = k - first_k,
              block = L::BYTES ? few_quotient(first_k + s.k_origin, s.block_k) : first_k + s.k_origin >> shift;
    const int64_t at_block = (int64_t)block * step_of_scales;
    if constexpr (!MX4) { /* of u4 blocks of a power of two, or one of all k */
      if (s.dtype == DT_F32)
        load_blocks<4>(at_block, left > 0, to);
      else if (s.dtype == DT_E8M0 || s.dtype == DT_E4M3)
        load_blocks<1>(at_block, left > 0, to);
      else
        load_blocks<2>(at_block, left > 0, to);
    } else {
#pragma unroll
      for (int t = 0; t < L::TILES; t++) load_four(scale[t] + at_block, has_scale(t) ? min(left / 32, 4) : 0, to[t]);
    }
  }

  /* The oldest slice that is on its way, and one more is: a cp.async group, also for none. */
  DEVICE drawn_slice<L> next()
  {
    const drawn_slice<L> oldest = ahead[0];
#pragma unroll
    for (int i = 1; i < L::STAGES - 1; i++) ahead[i - 1] = ahead[i];
    drawn_slice<L> &newest = ahead[L::STAGES - 2];
    if (at.active >= 0 && slice == slices) {
      draw();
      if (at.active >= 0) locate();
    }
    newest.unit = at, newest.slice = slice, newest.last = slice == slices - 1;
    if (at.active >= 0) {
      copy(), load_scales(newest.scales);
      slice++;
    }
    cp_async_commit_group();
    to = to == L::STAGES - 1 ? 0 : to + 1;
    return oldest;
  }
};

#endif
