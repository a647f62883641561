/* few, weights with scales: a consumer warp's way through its slices, and what it asks memory for ahead. */
#ifndef CUMOE_FEW_FEED_CUH
#define CUMOE_FEW_FEED_CUH

#include "few/arrange.cuh"
#include "few/schedule.cuh"

/* n / block, for n below 2^21: a division of integers would be twenty instructions. */
DEVICE int few_quotient(int n, int block)
{
  return (int)(((float)n + .5f) * rcp_approx_ftz((float)block));
}

/* Units of up's share, then, where the grid does both, of down (few_units); slices of each go to the consumers in turn.
 * What can be worked out anew takes no registers. */
template <class L> struct few_walk {
  using U = few_part<L, operation_up>;
  using D = few_part<L, operation_down>;
  int active, octet, left, slice;
  bool down;

  DEVICE void start_up(const few_args &args, int experts, int share)
  {
    const few_units<U> first(args.up, experts, share);
    active = first.active, octet = first.octet, left = first.left, slice = warp_id(), down = false;
  }
  DEVICE void start_down(const few_memory<L> &smem, int experts)
  {
    const few_units<D> first(smem.own, experts);
    active = first.active, octet = first.octet, left = first.left, slice = warp_id(), down = true;
  }

  template <bool DOWN> DEVICE static const gemm_args &gemm(const few_args &args) { return DOWN ? args.down : args.up; }
  template <bool DOWN> DEVICE static bool gated(const few_args &args) { return !DOWN && args.up.gated; }
  template <bool DOWN> DEVICE static int step(const few_args &args)
  {
    return gated<DOWN>(args) ? L::OCTETS / 2 : L::OCTETS;
  }

  /* Of the unit at hand. */
  template <bool DOWN> DEVICE int weight_octets(const few_args &args, const few_memory<L> &smem) const
  {
    const int end = DOWN ? smem.own.first + smem.own.count : args.up.n / 8;
    return min(step<DOWN>(args), end - octet) * (gated<DOWN>(args) ? 2 : 1);
  }

  template <bool DOWN> DEVICE void next_unit(const few_args &args, int experts)
  {
    const int each = step<DOWN>(args);
    if (DOWN) {
      left--, active++;
      if (active == experts) active = 0, octet += each;
    } else {
      const int all = args.up.n / 8 + each - 1 & ~(each - 1);
      left -= gridDim.x, octet += (int)gridDim.x * each;
      while (octet >= all && left > 0) octet -= all, active++;
    }
  }
};

/* Of a slice, as it is stored. BYTES: lane l has the scale of row l; MX4: its eight, of a run of 128 k a word of two,
 * the first as soon as it is used (take_after). Else in the lanes that multiply by it, of which q is l % 4. NV4:
 * groups 2 q and 2 q + 1 of 16 k, as halves of 16 bits, of [tile, octet, run]; U4: vector q of [tile, octet, run],
 * and a nibble each, its zero points. */
template <class W, bool WHOLE = false> struct few_scales {
  static constexpr int COUNT = operand<W>::BITS == 8 ? 1 : operand<W>::K_PER_SCALE == 32 ? 4 : 8;
  uint32_t raw[COUNT];
};
template <> struct few_scales<u4, false> {
  static constexpr int COUNT = 8;
  uint32_t raw[COUNT], zeros;
};
template <> struct few_scales<u4, true> { /* of octets 0 and 1 of tile q / 2, run q % 2 */
  static constexpr int COUNT = 2;
  uint32_t raw[COUNT];
};
template <class L> using few_scales_of = few_scales<typename L::W, L::WHOLE>;

/* Of the lane's group of a run, in row l / 4 of an octet. */
DEVICE float scale_of(const few_scales<mx4> &s, int, int tile, int octet, int run)
{
  const uint32_t word = __shfl_sync(ALL_LANES, s.raw[2 * run], tile * 16 + octet * 8 + lane_id() / 4);
  const float scale = fmaxf(__uint_as_float(__byte_perm(word, 0, lane_id() % 4 << 12 | 0x0444) >> 1), 0x1p-127f);
  return fmaf(scale, 0.f, scale); /* 255 is infinite so far, and to be NaN; 0 is 2^-127 */
}
DEVICE float scale_of(const few_scales<u4> &s, int dtype, int tile, int octet, int run)
{
  return scale_value(s.raw[tile * 4 + octet * 2 + run], dtype);
}
DEVICE int offset_of(const few_scales<u4> &s, const expert_matrix &b, int tile, int octet, int run)
{
  const int stored = (int)(s.zeros >> 4 * (tile * 4 + octet * 2 + run) & 15);
  return b.offset + (b.zero.table[0] || b.zero.base[0] ? stored + b.zero.add : 0);
}

/*
 * What a consumer warp asks memory for, two slices ahead: codes into stages, of which each lane fills and reads its own
 * part, so nobody waits for another lane; scales into registers. Past the end of a row lanes read its last vector
 * again: there activations are 0.
 */
template <class L> struct few_feed {
  using W = typename L::W;
  static constexpr bool BYTES = L::BITS == 8, MX4 = same_type<W, mx4>, ZEROS = same_type<W, u4> && !L::WHOLE;
  static constexpr int GROUP = operand<W>::K_PER_SCALE;

  const few_args &args;
  few_memory<L> &smem;
  const int experts;
  few_walk<L> at; /* the slice to ask for next */
  pipeline_state<L::STAGES> to;
  const char *codes[2], *scale[2], *zero[2]; /* of row l / 4 of octets 0 and 1; BYTES, MX4: scale[0] of row l */
  int rows;                                  /* weight octets of the unit */
  bool even, eight;                          /* GROUP: so many scales may be read at once */
  few_scales_of<L> scales, after;            /* of the next slice, and of the one behind it */
  uint32_t zero_word[ZEROS ? 8 : 1];         /* of `after` */

  DEVICE few_feed(const few_args &a, few_memory<L> &s, int e) : args(a), smem(s), experts(e) {}

  DEVICE void start_up(int share)
  {
    at.start_up(args, experts, share);
    if (at.left > 0) locate<false>();
  }
  DEVICE void start_down()
  {
    at.start_down(smem, experts);
    if (at.left > 0) locate<true>();
  }

  /* ---- a unit ---- */

  template <bool DOWN> DEVICE void locate()
  {
    const gemm_args &g = at.template gemm<DOWN>(args);
    const bool gated = at.template gated<DOWN>(args);
    const few_halves of = DOWN ? few_halves{smem.table.down[at.active], nullptr} : smem.table.weights[at.active];
    const int stride = (int)(g.b.n_stride * L::BITS / 8), lane = lane_id();
    const int64_t first = (int64_t)(at.octet * 8 + lane / 4) * stride + lane % 4 * 16;
    rows = at.template weight_octets<DOWN>(args, smem);
    codes[0] = static_cast<const char *>(of.low) + first;
    codes[1] = gated ? static_cast<const char *>(of.high) + first : codes[0] + (int64_t)8 * stride;
    locate_scales(g, gated);
  }

  DEVICE bool is_wide() const { return rows <= 2; }

  DEVICE static int block_row(const scale_matrix &s, int half, int channel)
  {
    const int n = channel + s.n_origin[half];
    return s.block_n == 1 ? n : few_quotient(n, s.block_n);
  }

  DEVICE void locate_scales(const gemm_args &g, bool gated)
  {
    const scale_matrix &s = g.b.scale;
    const int expert = smem.table.expert[at.active], bytes = (int)s.n_stride * (int)scale_bytes(s.dtype);
    if constexpr (BYTES || MX4) {
      const int o = lane_octet(), half = gated ? o % 2 : 0,
                channel = (at.octet + (gated ? o / 2 : o)) * 8 + lane_id() % 8;
      scale[0] = static_cast<const char *>(scale_base(s, half, expert)) + (int64_t)block_row(s, half, channel) * bytes;
      if constexpr (MX4) look_at_scales(g, (uint32_t) reinterpret_cast<uintptr_t>(scale[0]));
      return;
    }
    uint32_t all = 0;
#pragma unroll
    for (int o = 0; o < 2; o++) {
      const int half = gated ? o : 0, octet = at.octet + (gated ? 0 : o) + octets_to_mine(gated),
                channel = octet * 8 + lane_id() / 4;
      scale[o] = static_cast<const char *>(scale_base(s, half, expert)) + (int64_t)block_row(s, half, channel) * bytes;
      all |= (uint32_t) reinterpret_cast<uintptr_t>(scale[o]);
      if constexpr (ZEROS) {
        const uint32_t *words = zero_words(&g.b, half, expert);
        zero[o] = reinterpret_cast<const char *>(words ? words + (int64_t)octet * (int)g.b.zero.n_stride : nullptr);
      }
    }
    if constexpr (GROUP > 0) look_at_scales(g, all);
  }

  /* How they lie; `places`: the bits of the rows' addresses. */
  DEVICE void look_at_scales(const gemm_args &g, uint32_t places)
  {
    const scale_matrix &s = g.b.scale;
    const uint32_t all = places | (uint32_t)s.n_stride | s.k_origin / max(GROUP, 1) | g.k / max(GROUP, 1);
    const bool dense = s.k_stride == 1 && s.block_n == 1;
    even = dense && (all & 1) == 0, eight = dense && !__any_sync(ALL_LANES, (all & 7) != 0);
  }

  /* WHOLE: from octets 0 and 1 to those of the lane's tile. */
  DEVICE int octets_to_mine(bool gated) const
  {
    return L::WHOLE && !is_wide() ? lane_id() % 4 / 2 * (gated ? 1 : 2) : 0;
  }

  /* BYTES, MX4: of row l of a slice. */
  DEVICE int lane_octet() const
  {
    return is_wide() ? lane_id() / 8 % 2 : lane_id() / 8;
  }

  /* Whether there is one more slice of the product. */
  template <bool DOWN> DEVICE bool find()
  {
    bool moved = false;
    while (at.left > 0) {
      const int weight_octets = moved ? at.template weight_octets<DOWN>(args, smem) : rows,
                slices = few_slices<L>(at.template gemm<DOWN>(args), weight_octets <= 2);
      if (at.slice < slices) {
        if (moved) locate<DOWN>();
        return true;
      }
      at.slice -= slices, at.template next_unit<DOWN>(args, experts), moved = true;
    }
    return false;
  }

  /* ---- a slice ---- */

  DEVICE bool is_there(int tile, int octet) const
  {
    return (is_wide() ? octet : 2 * tile + octet) < rows;
  }

  template <bool DOWN> DEVICE void copy_codes(const gemm_args &g)
  {
    few_stage_of<L> &stage = smem.stages[warp_id()][to.stage];
    const bool wide = is_wide();
    const int first = at.slice * (wide ? 256 : 128), last = g.k * L::BITS / 8 - 16 - lane_id() % 4 * 16,
              behind = octets_behind<DOWN>() * 8 * (int)(g.b.n_stride * L::BITS / 8);
    const uint64_t policy = evict_first_policy();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int t = i / 4, o = i / 2 % 2, run = i % 2, in_row = min(first + (wide ? t * 128 : 0) + run * 64, last);
      cp_async_cg_16(shared_address(&stage.codes[t][o][run][lane_id()]), codes[o] + (t > 0 ? behind : 0) + in_row,
                     is_there(t, o) ? 16 : 0, policy);
    }
  }

  /* From octets 0 and 1 of what a `stride` steps over to 2 and 3. */
  template <bool DOWN> DEVICE int octets_behind() const
  {
    return is_wide() ? 0 : at.template gated<DOWN>(args) ? 1 : 2;
  }
  /* Bytes from the scales of octet o to those of o + 2. */
  template <bool DOWN> DEVICE int scales_behind(const scale_matrix &s, int o) const
  {
    const bool gated = at.template gated<DOWN>(args);
    const int bytes = (int)s.n_stride * (int)scale_bytes(s.dtype), rows = octets_behind<DOWN>() * 8;
    if (s.block_n == 1) return rows * bytes;
    const int half = gated ? o : 0, channel = (at.octet + (gated ? 0 : o)) * 8 + lane_id() / 4;
    return (block_row(s, half, channel + rows) - block_row(s, half, channel)) * bytes;
  }

  DEVICE int tile_k(int tile) const
  {
    return (is_wide() ? 2 * at.slice + tile : at.slice) * L::BK;
  }

  template <bool DOWN> DEVICE void load_scales(const gemm_args &g)
  {
    const int dtype = g.b.scale.dtype;
    if constexpr (MX4)
      load_words(g);
    else if constexpr (GROUP > 0)
      load_groups<DOWN>(g);
    else if (dtype == DT_F32)
      load_blocks<DOWN, 4>(g);
    else if (dtype == DT_E8M0 || dtype == DT_E4M3)
      load_blocks<DOWN, 1>(g);
    else
      load_blocks<DOWN, 2>(g);
    if constexpr (ZEROS)
      if (zero[0]) load_zeros<DOWN>(g);
  }

  template <bool DOWN, int SIZE> DEVICE void load_blocks(const gemm_args &g)
  {
    const scale_matrix &s = g.b.scale;
    const int bytes = (int)s.k_stride * (int)scale_bytes(s.dtype);
    if constexpr (BYTES) {
      const int k = tile_k(lane_id() / 16);
      after.raw[0] = load_bits<SIZE>(scale[0] + (int64_t)few_quotient(k + s.k_origin, s.block_k) * bytes,
                                     lane_octet() < rows && k < g.k);
    } else if constexpr (L::WHOLE) {
      const int t = lane_id() % 4 / 2, k = tile_k(t) + lane_id() % 2 * 128;
      const int64_t step = (int64_t)few_quotient(k + s.k_origin, s.block_k) * bytes;
#pragma unroll
      for (int o = 0; o < 2; o++) after.raw[o] = load_bits<SIZE>(scale[o] + step, is_there(t, o) && k < g.k);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int t = i / 4, o = i / 2 % 2, k = tile_k(t) + (i % 2 * 4 + lane_id() % 4) * 32;
        const int64_t block = few_quotient(k + s.k_origin, s.block_k);
        after.raw[i] = load_bits<SIZE>(scale[o] + (t > 0 ? scales_behind<DOWN>(s, o) : 0) + block * bytes,
                                       is_there(t, o) && k < g.k);
      }
    }
  }

  /* MX4: a row's eight scales of a byte, or as many of them as there are. */
  DEVICE void load_words(const gemm_args &g)
  {
    const scale_matrix &s = g.b.scale;
    const int k = tile_k(lane_id() / 16), step = (int)s.k_stride;
    const char *from = scale[0] + (int64_t)((k + s.k_origin) / max(GROUP, 1)) * step;
    const int count = lane_octet() < rows ? min(g.k - k, (int)L::BK) / max(GROUP, 1) : 0;
    if (eight) {
      after.raw[0] = load_bits<4>(from, count > 0), after.raw[2] = load_bits<4>(from + 4, count > 0);
      after.raw[1] = after.raw[3] = 0;
    } else if (even) {
#pragma unroll
      for (int i = 0; i < 4; i++) after.raw[i] = load_bits<2>(from + i * 2, i * 2 < count);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) after.raw[i] = 0;
#pragma unroll 1
      for (int i = 0; i < 8; i++) {
        const uint32_t one = load_bits<1>(from + i * step, i < count) << i % 4 * 8;
        after.raw[0] |= i < 4 ? one : 0, after.raw[2] |= i < 4 ? 0 : one;
      }
    }
  }

  /* Scales of a byte, two by two. */
  template <bool DOWN> DEVICE void load_groups(const gemm_args &g)
  {
    constexpr int COUNT = few_scales_of<L>::COUNT, RUNS = COUNT / 4;
    const scale_matrix &s = g.b.scale;
    const int step = (int)s.k_stride;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int t = i / 2 / RUNS, o = i / RUNS % 2, k = tile_k(t) + (i % RUNS * 8 + lane_id() % 4 * 2) * GROUP;
      const char *from =
          scale[o] + (t > 0 ? scales_behind<DOWN>(s, o) : 0) + (int64_t)((k + s.k_origin) / max(GROUP, 1)) * step;
      const bool there = is_there(t, o);
      after.raw[i] = even ? load_bits<2>(from, there && k < g.k)
                          : load_bits<1>(from, there && k < g.k) | load_bits<1>(from + step, there && k + GROUP < g.k)
                                                                       << 8;
    }
  }

  template <bool DOWN> DEVICE void load_zeros(const gemm_args &g)
  {
    const scale_matrix &s = g.b.scale;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int t = i / 4, o = i / 2 % 2, k = tile_k(t) + (i % 2 * 4 + lane_id() % 4) * 32;
      const int64_t block = few_quotient(k + s.k_origin, s.block_k);
      zero_word[i] = load_bits<4>(zero[o] + t * octets_behind<DOWN>() * (int)g.b.zero.n_stride * 4 +
                                      block * (int)g.b.zero.k_stride * 4,
                                  is_there(t, o) && k < g.k);
    }
  }

  template <bool DOWN> DEVICE void ask()
  {
    const gemm_args &g = at.template gemm<DOWN>(args);
    copy_codes<DOWN>(g);
    load_scales<DOWN>(g);
    at.slice += L::CONSUMERS;
  }

  DEVICE void take_after()
  {
    scales = after;
    if constexpr (MX4) scales.raw[0] |= scales.raw[1] << 16, scales.raw[2] |= scales.raw[3] << 16;
    if constexpr (ZEROS) {
      scales.zeros = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) scales.zeros |= (zero_word[i] >> lane_id() / 4 * 4 & 15) << 4 * i;
    }
  }

  /* One slice more: a cp.async group, also for none. DOWN: of down, else of up, and then of down where the grid does
   * both. */
  template <bool DOWN> DEVICE void next()
  {
    take_after();
    if (!DOWN && !at.down && !find<false>() && args.protocol.tickets) start_down();
    if (DOWN || at.down) {
      if (find<true>()) ask<true>();
    } else if (at.left > 0) {
      ask<false>();
    }
    cp_async_commit_group();
    to.advance();
  }

  /* Fewer than STAGES - 1 slices are on their way: none is to be multiplied yet. */
  DEVICE bool begins(const pipeline_state<L::STAGES> &stage) const
  {
    static_assert(L::STAGES == 3, "a set of scales for each slice that is on its way");
    return to.stage != (stage.stage == 0 ? 2 : stage.stage - 1);
  }
};

#endif
