/*
 * Scales of form mixed, whose lanes have 32 codes of a row and slab of k (gemm/mixed.cuh): they come with their stage.
 *
 *   scale_stage<S>   the scales of a stage in shared memory
 *   stage_scales<S>  a producer's, which copies them there
 *   S::SCALES        a consumer's: of a lane's four rows
 *
 * Those of u4 are of any block of k that is a power of two from 32 on (of f32: from 64 on), in any place of it: a row
 * has up to 16 bytes of them in a stage.
 */
#ifndef CUMOE_LANE_WEIGHTS_CUH
#define CUMOE_LANE_WEIGHTS_CUH

#include "device/ptx_narrow_sm90.cuh"
#include "gemm/absent.cuh"
#include "gemm/stream.cuh"

template <class S> struct mixed_smem;
template <class S> DEVICE int lane_row();

/* ---- scales in shared memory ---- */

/* Of each weight row the words that hold its scales, as they lie in memory: rows begin at any byte, `skew` bytes into
 * the first word. So many words a row that lanes meet in no bank, and pairs of words may be copied. Zero points: of
 * each octet of rows. */
template <class S> struct __align__(16) scale_stage
{
  uint32_t words[S::COLUMNS][S::SCALE_WORDS];
  uint32_t zeros[S::ZERO_OCTETS][S::BK / 32 + 1];
};

/* Blocks of k between the first of a row and that of element k. */
template <class S> DEVICE int scale_block(const gemm_args &args, int k)
{
  constexpr int RUN = operand<typename S::W>::K_PER_SCALE;
  if constexpr (RUN > 0) {
    return k / RUN; /* origins are multiples of it */
  } else {
    const int shift = 31 - __clz(args.b.scale.block_k);
    return (k + args.b.scale.k_origin >> shift) - (args.b.scale.k_origin >> shift);
  }
}

template <class S> DEVICE int scale_size(const gemm_args &args)
{
  return operand<typename S::W>::K_PER_SCALE > 0 ? 1 : (int)scale_bytes(args.b.scale.dtype);
}

/* Whether a row's scales lie behind one another, or are one. */
template <class S> DEVICE bool scales_in_words(const gemm_args &args)
{
  return args.b.scale.k_stride <= 1;
}

/* Whether rows of scales lie behind one another, each a whole number of stages' scales, so that those of a stage are
 * in 16 bytes that may be read. Copies of 16 bytes pass by L1; one of fewer takes a line there, which has not enough
 * for all rows of two stages: then they wait for each other, for half of the kernel's time. */
template <class S> DEVICE bool scales_in_vectors(const gemm_args &args)
{
  if constexpr (S::SCALE_BYTES > 16 || S::SCALE_WORDS % 4 != 0) return false;
  constexpr int RUN = operand<typename S::W>::K_PER_SCALE;
  const scale_matrix &s = args.b.scale;
  const int64_t run = RUN > 0 ? RUN : s.block_k;
  const uintptr_t places = (uintptr_t)s.base[0] | (S::gated(args) ? (uintptr_t)s.base[1] : 0) | s.expert_stride;
  return !s.table[0] && s.k_stride == 1 && run <= S::BK && s.n_stride * run == args.k && args.k % S::BK == 0 &&
         args.n % (RUN > 0 ? 2 : 8) == 0 && s.block_n == 1 && s.k_origin == 0 && places % 16 == 0;
}

/* Of weight row `row` of a tile; n and on: of none. */
template <class S> DEVICE int channel_of_row(const gemm_args &args, const tile_unit &unit, int row)
{
  return S::gated(args) ? (unit.n + row / 16) * 8 + row % 8 : unit.n * 16 + row;
}

/* Where the scales of weight row `row` of a tile begin; of one that is there, whatever the tile. */
template <class S> DEVICE const uint8_t *scales_of_row(const gemm_args &args, const tile_unit &unit, int row)
{
  const bool gated = S::gated(args);
  const int half = gated ? row / 8 % 2 : 0, channel = channel_of_row<S>(args, unit, row);
  return reinterpret_cast<const uint8_t *>(scale_at(&args.b.scale, half, unit.expert, min(channel, args.n - 1), 0));
}

/* Where the zero points of octet `octet` of a tile begin; NULL: there are none. */
template <class S> DEVICE const uint32_t *zeros_of_octet(const gemm_args &args, const tile_unit &unit, int octet)
{
  const bool gated = S::gated(args);
  const int half = gated ? octet % 2 : 0, eighth = gated ? unit.n + octet / 2 : unit.n * 2 + octet;
  const uint32_t *words = zero_words(&args.b, half, unit.expert);
  const int64_t first = args.b.scale.k_origin / args.b.scale.block_k * args.b.zero.k_stride;
  return words ? words + min(eighth, args.n / 8 - 1) * args.b.zero.n_stride + first : nullptr;
}

/* ---- producers ---- */

/* A thread's weight rows, and its octet. */
template <class S> struct stage_scales {
  static constexpr int ROWS = S::COLUMNS / S::GROUP, OCTET_THREADS = S::ZEROS ? S::GROUP / S::ZERO_OCTETS : 1;
  const uint8_t *row[ROWS];
  uint32_t last; /* a bit a row: its channel is the last one */
  const uint32_t *zeros;
  int vectors, shift; /* scales_in_vectors; of k to its block, where the format does not say */

  DEVICE static int row_of(int i) { return threadIdx.x + i * S::GROUP; }

  /* Consumers see the skews behind the barrier of the unit's first stage. */
  DEVICE void set_unit(const gemm_args &args, mixed_smem<S> &smem, int slot)
  {
    const tile_unit unit = smem.units[slot];
    vectors = scales_in_vectors<S>(args);
    hold(vectors); /* not worked out again for every stage */
    shift = S::U4 ? 31 - __clz(args.b.scale.block_k) : 0;
    if (S::U4) hold(shift);
    last = 0;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      row[i] = scales_of_row<S>(args, unit, row_of(i));
      last |= (uint32_t)(channel_of_row<S>(args, unit, row_of(i)) >= args.n - 1) << i;
      smem.skew[slot % S::UNIT_SLOTS][row_of(i)] = in_words(args, row[i]) ? (uintptr_t)row[i] & (vectors ? 15 : 3) : 0;
    }
    if (S::ZEROS) zeros = zeros_of_octet<S>(args, unit, threadIdx.x / OCTET_THREADS);
  }

  /* Whether copies of words do: with the bytes before the first one, 16 scales of 2 bytes would not fit. */
  DEVICE static bool in_words(const gemm_args &args, const uint8_t *row)
  {
    return scales_in_words<S>(args) && (!S::U4 || ((uintptr_t)row & 3) == 0 || args.b.scale.block_k > 32);
  }

  /* Of k0 and on. No word is read that has no scale of the row. */
  DEVICE void copy(const gemm_args &args, scale_stage<S> &to, int k0) const
  {
    if (!vectors || S::ZEROS) return copy_any(args, to, k0);
    const int at = (S::U4 ? k0 >> shift : scale_block<S>(args, k0)) * scale_size<S>(args);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const uint8_t *from = row[i] + at;
      cp_async_cg_16(shared_address(to.words[row_of(i)]), from - (uintptr_t)from % 16, 16);
    }
  }

  /* However they lie, and zero points. */
  DEVICE void copy_any(const gemm_args &args, scale_stage<S> &to, int k0) const
  {
    const int first = scale_block<S>(args, k0), count = scale_block<S>(args, min(k0 + S::BK, args.k) - 1) - first + 1,
              size = scale_size<S>(args);
    const bool ends = S::U4 ? first + count == scale_block<S>(args, args.k - 1) + 1
                            : k0 + S::BK + 128 >= args.k; /* a word may hold what is beyond the row */
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const uint8_t *from = row[i] + first * size;
      if (vectors)
        cp_async_cg_16(shared_address(to.words[row_of(i)]), from - (uintptr_t)from % 16, 16);
      else if (in_words(args, row[i]))
        copy_words(from, count * size, last >> i & 1 && ends, to.words[row_of(i)]);
      else
        copy_strided(args, row[i], first, count, to.words[row_of(i)]);
    }
    if constexpr (S::ZEROS) {
      const uint32_t *from = zeros + first * args.b.zero.k_stride;
      uint32_t *octet = to.zeros[threadIdx.x / OCTET_THREADS];
      if (zeros)
        for (int i = threadIdx.x % OCTET_THREADS; i < count; i += OCTET_THREADS)
          cp_async_ca_4(shared_address(octet + i), from + i * args.b.zero.k_stride, 4);
    }
  }

  /* Every copy costs a look-up of a line, so there are as few as can be. Words that reach past these scales
   * may be read whole, unless the matrix ends there. */
  DEVICE static void copy_words(const uint8_t *from, int bytes, bool ends, uint32_t *to)
  {
    constexpr int WORDS = S::SCALE_BYTES / 4;
    const int skew = (int)((uintptr_t)from & 3), end = skew + bytes;
    if (((uintptr_t)from | bytes) % 8 == 0) {
#pragma unroll
      for (int w = 0; w < WORDS; w += 2)
        if (w * 4 < bytes) cp_async_ca_8(shared_address(to + w), from + w * 4, 8);
      return;
    }
    from -= skew;
#pragma unroll
    for (int w = 0; w <= WORDS; w++)
      if (w * 4 + (ends ? 4 : 1) <= end) cp_async_ca_4(shared_address(to + w), from + w * 4, 4);
    if (!ends) return;
#pragma unroll 1
    for (int i = end / 4 * 4; i < end; i++) reinterpret_cast<uint8_t *>(to)[i] = from[i];
  }

  DEVICE static void copy_strided(const gemm_args &args, const uint8_t *from, int first, int count, uint32_t *to)
  {
    const int size = scale_size<S>(args);
    uint8_t *bytes = reinterpret_cast<uint8_t *>(to);
#pragma unroll 1
    for (int i = 0; i < count * size; i++)
      bytes[i] = from[(first + i / size) * args.b.scale.k_stride * size + i % size];
  }
};

/* ---- consumers ---- */

/* What all formats share: shared addresses of the scales of a lane's rows in stage 0. Row r of four is of octet r of
 * its warp. */
template <class S> struct scale_places {
  static constexpr int ROW_BYTES = 4 * S::SCALE_WORDS;
  /* Of a lane's 32 codes, where their number is the format's. */
  static constexpr int RUN = operand<typename S::W>::K_PER_SCALE, SCALES = RUN > 0 ? 32 / (RUN > 0 ? RUN : 1) : 0;
  uint32_t at[S::OCTETS]; /* of the first slab, skew included */

  DEVICE void set_unit(const gemm_args &args, const mixed_smem<S> &smem, int slot, int row0)
  {
    const uint32_t first = shared_address(smem.scales[0].words) + tid_x() % 4 * SCALES;
#pragma unroll
    for (int r = 0; r < S::OCTETS; r++)
      at[r] = first + (row0 + r * 8) * ROW_BYTES + smem.skew[slot % S::UNIT_SLOTS][row0 + r * 8];
  }

  DEVICE static uint32_t slab_offset(int stage, int slab)
  {
    return stage * (uint32_t)sizeof(scale_stage<S>) + slab * 4 * SCALES;
  }

  /* What changes places where 16 bytes hold two stages. */
  DEVICE static uint32_t flip(const gemm_args &args, int slab, int k)
  {
    return scales_in_vectors<S>(args) ? (k - slab * S::SLAB) / S::BK * S::SCALE_BYTES % 16 : 0;
  }

  /* Whether there are codes of the lane in the slab of k and on. */
  DEVICE static bool inside(const gemm_args &args, int k)
  {
    return k + (int)(tid_x() % 4 * 32) < args.k;
  }
};

template <class S> struct format_scales<S, mx4> : scale_places<S> {
  using factor_type = weight_factors<typename S::X, mx4>;
  bool absent = false; /* some of a tile's scales are not in its products */

  /* Of the lane's codes of a stage's slab, of k and on. */
  DEVICE factor_type factors(const gemm_args &args, const mixed_smem<S> &, int stage, int slab, int k)
  {
    const uint32_t offset = this->slab_offset(stage, slab);
    const uint32_t turn = this->flip(args, slab, k);
    uint32_t e[4], worst = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      e[r] = lds_u8((this->at[r] + offset) ^ turn);
      worst = max(worst, e[r] - factor_type::FIRST);
    }
    if (worst > factor_type::LAST - factor_type::FIRST) {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        if (!scale_is_absent<typename S::X, mx4>(e[r])) continue;
        e[r] = factor_type::ABSENT;
        absent = absent || this->inside(args, k);
      }
    }
    factor_type f;
#pragma unroll
    for (int r = 0; r < 4; r++) f.set(r, e[r]);
    return f;
  }
};

template <class S> struct format_scales<S, nv4> : scale_places<S> {
  using factor_type = weight_factors<typename S::X, nv4>;
  bool absent = false;

  DEVICE factor_type factors(const gemm_args &args, const mixed_smem<S> &, int stage, int slab, int k)
  {
    const uint32_t offset = this->slab_offset(stage, slab);
    const uint32_t turn = this->flip(args, slab, k);
    factor_type f;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint32_t at = (this->at[r] + offset) ^ turn;
      uint32_t both = lds_u8(at) | lds_u8(at + 1) << 8;
      if (((both & 0x7f7f) + 0x0101 & 0x8080) != 0) { /* a NaN, or what lies past the end */
        absent = absent || this->inside(args, k);
        if (scale_is_absent<typename S::X, nv4>(both & 255)) both &= 0xff00;
        if (scale_is_absent<typename S::X, nv4>(both >> 8)) both &= 0x00ff;
      }
      f.set(r, both);
    }
    return f;
  }
};

/* FACTORS: what they become, by the scales' type. */
template <class S, class FACTORS> struct u4_scales {
  using X = typename S::X;
  static constexpr bool absent = false;
  static constexpr int OCTET_BYTES = 8 * 4 * S::SCALE_WORDS;
  uint32_t row, skews; /* the first one's shared address in stage 0; a byte a row */

  DEVICE void set_unit(const gemm_args &, const mixed_smem<S> &smem, int slot, int row0)
  {
    row = shared_address(smem.scales[0].words[row0]);
    skews = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) skews |= (uint32_t)smem.skew[slot % S::UNIT_SLOTS][row0 + r * 8] << r * 8;
  }

  /* Beyond the end of k: what the last codes have. A row's first scale of a stage is as far from its first of all as
   * its place goes round in what is copied at once. */
  DEVICE FACTORS factors(const gemm_args &args, const mixed_smem<S> &smem, int stage, int slab, int k) const
  {
    const int first = scale_block<S>(args, k - slab * S::SLAB), size = scale_size<S>(args),
              block = scale_block<S>(args, min(k + (int)(tid_x() % 4 * 32), args.k - 32)) - first;
    const uint32_t round = scales_in_vectors<S>(args) ? 15 : 3,
                   from = row + stage * (uint32_t)sizeof(scale_stage<S>) + block * size;
    FACTORS f;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint32_t at = from + r * OCTET_BYTES + ((skews >> r * 8) + first * size & round);
      set(f, r, args.b.scale.dtype, size == 4 ? lds_32(at) : lds_u16(at), bias(args, smem.scales[stage], r, block));
    }
    return f;
  }

  DEVICE static void set(weight_factors<X, u4> &f, int r, int, uint32_t bits, uint32_t bias)
  {
    f.set(r, bits * 0x10001, bias);
  }
  DEVICE static void set(wide_factors<X> &f, int r, int dtype, uint32_t bits, uint32_t bias)
  {
    f.by[r] = scale_value(bits, dtype), f.zero[r] = bias;
  }

  /* A lane's rows are one of each of its warp's octets. */
  DEVICE static uint32_t bias(const gemm_args &args, const scale_stage<S> &stage, int r, int block)
  {
    int zero = args.b.offset;
    if (args.b.zero.base[0] || args.b.zero.table[0])
      zero += (int)(stage.zeros[lane_row<S>() / 8 + r][block] >> lane_row<S>() % 8 * 4 & 15) + args.b.zero.add;
    return decoder<u4, X>::bias(zero);
  }
};
template <class S> struct format_scales<S, u4> : u4_scales<S, weight_factors<typename S::X, u4>> {
};

template <class S> using wide_scales = u4_scales<S, wide_factors<typename S::X>>;

#endif
