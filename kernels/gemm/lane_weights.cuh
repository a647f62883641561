/*
 * Scales for form mixed, whose lanes have 32 codes of a row and slab of k (gemm/mixed.cuh): lane_scales<S> fetches
 * those of a lane's four rows a window of k ahead, over the ends of tiles.
 */
#ifndef CUMOE_LANE_WEIGHTS_CUH
#define CUMOE_LANE_WEIGHTS_CUH

#include "gemm/stream.cuh"
#include "gemm/weight_factors.cuh"

/* Codes of an expert's half, in bytes. */
template <int BITS> DEVICE const char *code_base(const expert_matrix &b, int half, int expert)
{
  if (b.table[half]) return static_cast<const char *>(b.table[half][expert]);
  return static_cast<const char *>(b.base[half]) + expert * b.expert_stride * BITS / 8;
}

/* ---- scales ---- */

/* Where the scales of weight row `row` of a tile begin; of one that is there, whatever the tile. Producers work it out,
 * a unit ahead. */
template <class S> DEVICE const uint8_t *scales_of_row(const gemm_args &args, const tile_unit &unit, int row)
{
  const bool gated = S::gated(args);
  const int half = gated ? row / 8 % 2 : 0, channel = gated ? (unit.n + row / 16) * 8 + row % 8 : unit.n * 16 + row;
  const scale_matrix &s = args.b.scale;
  const int64_t first = scale_row(s, half, min(channel, args.n - 1)) + scale_step(s, 0);
  return static_cast<const uint8_t *>(scale_base(s, half, unit.expert)) + first * scale_bytes(s.dtype);
}

/* Where the zero points of octet `octet` of a tile begin. */
template <class S> DEVICE const uint32_t *zeros_of_octet(const gemm_args &args, const tile_unit &unit, int octet)
{
  const bool gated = S::gated(args);
  const int half = gated ? octet % 2 : 0, eighth = gated ? unit.n + octet / 2 : unit.n * 2 + octet;
  const zero_matrix &z = args.b.zero;
  const uint32_t *words = z.table[half] ? z.table[half][unit.expert] : z.base[half] + unit.expert * z.expert_stride;
  return words + min(eighth, args.n / 8 - 1) * z.n_stride + args.b.scale.k_origin / args.b.scale.block_k * z.k_stride;
}

/* Row r of a lane: of octet r of its warp. */
template <class S> DEVICE int row_of_lane(int r)
{
  return (threadIdx.x / WARP_SIZE - S::GROUP / WARP_SIZE) * S::OCTETS * 8 + r * 8 + lane_id() / 4;
}

/* What all formats share: `fetch` asks for a window of a unit, whose rows' scales begin at `rows`; `turn` makes it the
 * one in use. LOADS: of a format. */
template <class S, class LOADS> struct scale_windows : LOADS {
  bool begun = false;

  /* The first unit's first window; those of later units have been asked for. */
  DEVICE void begin(const gemm_args &args, const mixed_smem<S> &smem, int slot)
  {
    if (!begun) fetch_if_there(args, smem, slot, 0);
    begun = true;
  }

  /* Before slab `slab`. */
  DEVICE void step(const gemm_args &args, const mixed_smem<S> &smem, int slot, int slab)
  {
    if (slab % LOADS::WINDOW != 0) return;
    LOADS::turn(args, slab);
    const bool more = (slab + LOADS::WINDOW) * S::SLAB < args.k;
    fetch_if_there(args, smem, more ? slot : slot + 1, more ? slab / LOADS::WINDOW + 1 : 0);
  }

  /* Of a tile without work. */
  DEVICE void skip(const gemm_args &args, const mixed_smem<S> &smem, int slot)
  {
    fetch_if_there(args, smem, slot + 1, 0);
  }

  DEVICE void fetch_if_there(const gemm_args &args, const mixed_smem<S> &smem, int slot, int window)
  {
    slot %= UNITS_AHEAD;
    if (smem.units[slot].expert >= 0) LOADS::fetch(args, smem, slot, window);
  }
};

/* A window of 4 slabs has 16 scales of a row, 4 neighbouring ones a lane: two words, as rows begin at any byte. No word
 * is read that has no scale of the row. */
template <class S> struct byte_scales {
  static constexpr int WINDOW = 4;
  uint32_t next[4][2], now[4], shift; /* shift: a row's in a byte */

  DEVICE void fetch(const gemm_args &args, const mixed_smem<S> &smem, int slot, int window)
  {
    const uint8_t *const(&rows)[S::COLUMNS] = smem.scales[slot % S::SCALE_SLOTS];
    const int first = window * 16 + lane_id() % 4 * 4, left = args.k / 32 - first;
    const int64_t step = args.b.scale.k_stride;
    shift = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint8_t *from = rows[row_of_lane<S>(r)] + first * step;
      if (step == 1) {
        const int before = (int)((uintptr_t)from & 3);
        const uint32_t *words = reinterpret_cast<const uint32_t *>(from - before);
#pragma unroll
        for (int i = 0; i < 2; i++) next[r][i] = i * 4 - before < min(left, 4) ? __ldg(words + i) : 0;
        shift |= before * 8 << r * 8;
      } else {
        next[r][0] = next[r][1] = 0;
#pragma unroll 1
        for (int i = 0; i < min(left, 4); i++) next[r][0] |= (uint32_t)from[i * step] << i * 8;
      }
    }
  }

  /* Slab `slab` begins the window. Past the last scale, where codes are 0, there is any. */
  DEVICE void turn(const gemm_args &args, int slab)
  {
    const int left = args.k / 32 - (slab + lane_id() % 4) * 4;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      now[r] = __funnelshift_r(next[r][0], next[r][1], shift >> r * 8);
      const uint32_t there = left >= 4 ? ~0u : left > 0 ? (1u << left * 8) - 1 : 0;
      now[r] = (now[r] & there) | (0x71717171 & ~there);
    }
  }

  /* The byte of this lane's 32 codes of a slab. */
  DEVICE uint32_t byte_of(int r, int slab) const
  {
    const int lane = lane_id();
    const uint32_t four = __shfl_sync(ALL_LANES, now[r], (lane & ~3) + slab % 4);
    return __byte_perm(four, 0, 0x4440 + lane % 4);
  }
};

template <class S> struct mx4_scales : byte_scales<S> {
  using factor_type = weight_factors<typename S::X, mx4>;
  bool absent = false; /* some of a tile's scales are not in its products */

  /* In the warp; what comes is of the next tile. */
  DEVICE bool any_absent()
  {
    const bool any = __any_sync(ALL_LANES, absent);
    absent = false;
    return any;
  }

  DEVICE void turn(const gemm_args &args, int slab)
  {
    byte_scales<S>::turn(args, slab);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint32_t codes = this->now[r];
      const bool large = codes & 0x80808080 & ((codes & 0x7f7f7f7f) + 0x7f7f7f7f);
      if (large || !factor_type::WIDE) this->now[r] = without_absent(codes);
    }
  }

  DEVICE uint32_t without_absent(uint32_t codes)
  {
    uint32_t rest = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      const uint32_t e = codes >> i & 255;
      const bool none = scale_is_absent<typename S::X, mx4>(e);
      absent = absent || none;
      rest |= (none ? factor_type::ABSENT : e) << i;
    }
    return rest;
  }

  DEVICE factor_type factors(int slab) const
  {
    factor_type f;
#pragma unroll
    for (int r = 0; r < 4; r++) f.set(r, this->byte_of(r, slab));
    return f;
  }
};

/* A window of two slabs: for every slab and row what the lane's 32 codes need. Beyond the end of k that of the last. */
template <class S> struct block_scales {
  static constexpr int WINDOW = 2;

  /* Of the lane's first code of a slab: the block, counted from the row's first. */
  DEVICE static int block_of(const gemm_args &args, int slab)
  {
    const scale_matrix &s = args.b.scale;
    const int k = min((slab * 4 + lane_id() % 4) * 32, args.k - 32) + s.k_origin, shift = 31 - __clz(s.block_k);
    return s.block_k == 1 << shift ? (k >> shift) - (s.k_origin >> shift) : k / s.block_k - s.k_origin / s.block_k;
  }
};

template <class S> struct nv4_scales : block_scales<S> {
  using factor_type = weight_factors<typename S::X, nv4>;
  uint32_t next[2][4], now[2][4];
  bool absent = false;

  DEVICE void fetch(const gemm_args &args, const mixed_smem<S> &smem, int slot, int window)
  {
    const int64_t step = args.b.scale.k_stride;
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const uint8_t *from =
            smem.scales[slot % S::SCALE_SLOTS][row_of_lane<S>(r)] + this->block_of(args, window * 2 + s) * step;
        next[s][r] = step == 1 && (uintptr_t)from % 2 == 0 ? __ldg(reinterpret_cast<const uint16_t *>(from))
                                                           : __ldg(from) | __ldg(from + step) << 8;
      }
  }

  DEVICE void turn(const gemm_args &, int)
  {
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        now[s][r] = next[s][r];
        if (((now[s][r] & 0x7f7f) + 0x0101 & 0x8080) == 0) continue; /* no NaN */
        absent = true;
        if (scale_is_absent<typename S::X, nv4>(now[s][r] & 255)) now[s][r] &= 0xff00;
        if (scale_is_absent<typename S::X, nv4>(now[s][r] >> 8)) now[s][r] &= 0x00ff;
      }
  }

  /* In the warp; what comes is of the next tile. */
  DEVICE bool any_absent()
  {
    const bool any = __any_sync(ALL_LANES, absent);
    absent = false;
    return any;
  }

  DEVICE factor_type factors(int slab) const
  {
    factor_type f;
#pragma unroll
    for (int r = 0; r < 4; r++) f.set(r, slab % 2 ? now[1][r] : now[0][r]);
    return f;
  }
};

template <class S> struct u4_scales : block_scales<S> {
  using factor_type = weight_factors<typename S::X, u4>;
  uint32_t next[2][4], zeros[2][4], now[2][4];

  DEVICE bool any_absent() { return false; }

  DEVICE void fetch(const gemm_args &args, const mixed_smem<S> &smem, int slot, int window)
  {
    const bool wide = args.b.scale.dtype == DT_F32, has_zeros = args.b.zero.base[0] || args.b.zero.table[0];
    slot %= S::SCALE_SLOTS;
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const int64_t block = this->block_of(args, window * 2 + s);
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const uint8_t *from = smem.scales[slot][row_of_lane<S>(r)] + block * args.b.scale.k_stride * (wide ? 4 : 2);
        next[s][r] =
            wide ? __ldg(reinterpret_cast<const uint32_t *>(from)) : __ldg(reinterpret_cast<const uint16_t *>(from));
        if (has_zeros) zeros[s][r] = __ldg(smem.zeros[slot][row_of_lane<S>(r) / 8] + block * args.b.zero.k_stride);
      }
    }
  }

  DEVICE void turn(const gemm_args &args, int)
  {
    using X = typename S::X;
    const bool has_zeros = args.b.zero.base[0] || args.b.zero.table[0];
    const int dtype = args.b.scale.dtype;
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const uint32_t raw = next[s][r];
        const float scale = dtype == DT_F32    ? __uint_as_float(raw)
                            : dtype == DT_BF16 ? __uint_as_float(raw << 16)
                                               : __half2float(__ushort_as_half((uint16_t)raw));
        const int zero =
            args.b.offset + (has_zeros ? (int)(zeros[s][r] >> lane_id() / 4 * 4 & 15) + args.b.zero.add : 0);
        now[s][r] = pack_pair<X>(scale, factor_type::BASE + (float)zero);
      }
  }

  DEVICE factor_type factors(int slab) const
  {
    factor_type f;
#pragma unroll
    for (int r = 0; r < 4; r++) f.set(r, slab % 2 ? now[1][r] : now[0][r]);
    return f;
  }
};

template <class S, class W> struct scales_of_format;
template <class S> struct scales_of_format<S, mx4> {
  using type = mx4_scales<S>;
};
template <class S> struct scales_of_format<S, nv4> {
  using type = nv4_scales<S>;
};
template <class S> struct scales_of_format<S, u4> {
  using type = u4_scales<S>;
};
template <class S> using lane_scales = scale_windows<S, typename scales_of_format<S, typename S::W>::type>;

#endif
