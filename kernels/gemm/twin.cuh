/*
 * twin: as mixed (gemm/mixed.cuh), weights of mx4, activations in bf16 and few rows an expert, where what counts is how
 * few instructions a weight takes. A code of e2m1 moved two bits up is a code of e4m3, 2^-6 of it: eight weights become
 * operands by seven instructions, where bf16 takes sixteen. Activations are two codes of e4m3 each
 * (device/twin_codes.cuh), made by a launch ahead (args.a_scale); without one a warp of producers makes them.
 *
 * A CTA has a warpgroup of producers and two of consumers, of 64 weight rows each, and an SM two CTAs: what a wgmma of
 * few columns takes, and the end of a unit, are hidden by other warps' work.
 *
 *   sums    of 32 k, whose weights share a scale: the tensor core adds in 14 bits. Scaled by the weights' scale they
 *           are added up in f32, those of a slab of 128 k scaled by the row's
 *   columns up to 4 rows have their larger parts in columns 0 to 3, their rests in 4 to 7; more have both in the same
 *           sums
 *
 * Order of k. Of 32 k lane q of four has the codes of k = 8 q .. 8 q + 7, a word: its lower nibbles, the even ones, are
 * multiplied by bytes 4 q .. of a row in shared memory, the upper ones by 16 + 4 q ..
 */
#ifndef CUMOE_TWIN_CUH
#define CUMOE_TWIN_CUH

#include "device/ptx_line_sm90.cuh"
#include "device/twin_codes.cuh"
#include "gemm/mixed.cuh"

template <class S> struct twin_scales;

template <class PRODUCT, int CLUSTER, int BM, int BN, int BK, int STAGES, int WARPS>
struct twin_shape : mixed_shape<PRODUCT, CLUSTER, BM, BN, BK, STAGES, WARPS> {
  using SCALES = twin_scales<twin_shape>;
  static constexpr bool TWIN = true, SCALED = true, SCALES_BY_COPY = false; /* of rows, a scale a slab */
  static constexpr int LANES = twin_shape::ROW_BYTES / 16;
  static constexpr int SCALE_WORDS = twin_shape::SCALE_BYTES; /* as f32: slabs by weight rows by four runs */
  static constexpr int REGISTERS = 80, PRODUCER_REGISTERS = 64, CONSUMER_REGISTERS = 88;
  static constexpr int RANGES = MAX_EXPERTS / 4;
  static_assert(same_type<typename PRODUCT::X, bf16> && same_type<typename PRODUCT::W, mx4>, "see above");
  static_assert(BK == 256 && BM == 16 && twin_shape::ROWS == 16, "row_scales has room for two slabs a stage");
};

/* Where row r of a slab begins, and its rests behind the larger parts. */
enum { REST_BYTES = 1024, SHARED_ROWS = 4 /* of an octet, with their rests */ };
DEVICE int twin_row_offset(int r)
{
  return r / 8 * 2 * REST_BYTES + r % 8 * 128;
}

/* Whether a unit's rows share an octet with their rests. Not where their expert has another tile: a row's bits do not
 * depend on which of them it is in. */
template <class S> DEVICE bool rows_share_octet(const mixed_smem<S> &smem, const tile_unit &unit)
{
  return unit.rows <= SHARED_ROWS && smem.table.before[unit.expert + 1] - smem.table.before[unit.expert] == 1;
}

/* Asked for anew each time: registers are few. */
DEVICE int twin_lane()
{
  return (int)(tid_x() % WARP_SIZE);
}

/* Of a weight's scale: the largest that sums of a slab have room for. */
enum { TWIN_LARGEST = 230 };

template <class S> DEVICE bool twin_scale_is_absent(int code)
{
  return code > TWIN_LARGEST;
}

/* ---- producers ---- */

/* By two warps: 16 bytes of every eighth weight row a thread. */
template <class S> struct twin_codes : tile_codes<S> {
  using tile_codes<S>::origin, tile_codes<S>::step, tile_codes<S>::left;

  DEVICE static int lane() { return (int)tid_x() % S::LANES; }
  DEVICE static int row() { return (int)tid_x() / S::LANES; }

  DEVICE void set_unit(const gemm_args &args, mixed_smem<S> &smem, int slot)
  {
    int gated = S::gated(args);
    hold(gated);
    tile_codes<S>::set_unit(args, smem.units[slot], gated, row(), lane());
  }

  /* Of k0 and on; past the end of k zeros. Channels come in octets. */
  DEVICE void copy(const gemm_args &args, mixed_smem<S> &smem, int stage, int k0) const
  {
    const int bytes = k0 + lane() * 32 < args.k ? 16 : 0;
    const char *from[2] = {origin[0] + (bytes ? k0 / 2 : 0), origin[1] + (bytes ? k0 / 2 : 0)};
    uint32_t to = shared_address(smem.codes[stage]) + code_offset<S>(row(), lane());
    int there = left;
    if (there == S::COLUMNS) {
#pragma unroll
      for (int i = 0; i < S::COLUMNS / 8; i++) {
        cp_async_cg_16(to + i * 8 * S::ROW_BYTES, from[i % 2], bytes, EVICT_FIRST);
        from[i % 2] += step;
      }
      return;
    }
#pragma unroll 1
    for (; there > 0; there -= 16, to += 16 * S::ROW_BYTES) {
      cp_async_cg_16(to, from[0], bytes, EVICT_FIRST);
      if (there > 8) cp_async_cg_16(to + 8 * S::ROW_BYTES, from[1], bytes, EVICT_FIRST);
      from[0] += step, from[1] += step;
    }
  }

  DEVICE void arrive(uint64_t *full) const
  {
    cp_async_mbarrier_arrive_noinc(full);
  }
};

/* By a warp: scales of weights, as f32, which a consumer would make of a code for each of four lanes, and they for each
 * other. Codes come by registers, a stage ahead: copies of fewer than 16 bytes each take a line of L1, which has no
 * room. A row's skew (mixed_smem) says whether some of its scales are not in products. */
template <class S> struct twin_weight_scales {
  static constexpr int ROWS = S::COLUMNS / WARP_SIZE;
  static_assert(S::SCALE_BYTES == 8 && S::SLABS == 2, "two words a stage");
  const uint8_t *row[ROWS]; /* from a multiple of four bytes on, where they are read by words */
  uint32_t ahead[ROWS][4];  /* of a stage two words and what is behind them, or of two stages */
  int32_t skews;            /* of each row a byte: by how many bits its first scale is behind its first word */
  int32_t slot, together;   /* so many stages' words may be read at once: 0, 1, 2 */

  DEVICE static int row_of(int i) { return twin_lane() + i * WARP_SIZE; }

  DEVICE void set_unit(const gemm_args &args, mixed_smem<S> &smem, int at)
  {
    const tile_unit unit = smem.units[at];
    uintptr_t places = scales_in_words<S>(args) ? args.k / 32 % 16 : 1;
    slot = at % S::UNIT_SLOTS, skews = 0;
    if (args.b.scale.block_n == 1) {
      find_rows(args, unit);
    } else {
#pragma unroll
      for (int i = 0; i < ROWS; i++) row[i] = scales_of_row<S>(args, unit, row_of(i));
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      places |= (uintptr_t)row[i];
      const int before = scales_in_words<S>(args) ? (int)((uintptr_t)row[i] & 3) : 0;
      row[i] -= before, skews |= before << (i * 8 + 3);
      smem.skew[slot][row_of(i)] = 0; /* no scale is absent yet */
    }
    together = __all_sync(ALL_LANES, (places & 7) == 0);
    if (__all_sync(ALL_LANES, (places & 15) == 0)) together = 2;
    load(args, 0);
  }

  /* As scales_of_row, of a matrix with a scale a row, without divisions: the lane's rows are of one half. */
  DEVICE void find_rows(const gemm_args &args, const tile_unit &unit)
  {
    const scale_matrix &s = args.b.scale;
    const bool gated = S::gated(args);
    const int half = gated ? row_of(0) / 8 % 2 : 0, channel = channel_of_row<S>(args, unit, row_of(0)),
              step = gated ? WARP_SIZE / 2 : WARP_SIZE;
    const uint8_t *base = static_cast<const uint8_t *>(scale_base(s, half, unit.expert)) +
                          s.n_origin[half] * s.n_stride + s.k_origin / 32 * s.k_stride;
#pragma unroll
    for (int i = 0; i < ROWS; i++) row[i] = base + min(channel + i * step, args.n - 1) * s.n_stride;
  }

  /* Of k0 and on. No word is read that has no scale of the row. */
  DEVICE void load(const gemm_args &args, int k0)
  {
    const int first = k0 / 32, bytes = min(args.k - k0, (int)S::BK) / 32;
    if (together == 2 && k0 / S::BK % 2) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) ahead[i][0] = ahead[i][2], ahead[i][1] = ahead[i][3];
    } else if (together == 2) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) ld_line(row[i] + first, ahead[i]);
    } else if (bytes == S::SCALE_BYTES && scales_in_words<S>(args)) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        ahead[i][0] = ld_line(row[i] + first), ahead[i][1] = ld_line(row[i] + first + 4);
        if (skews >> i * 8 & 255) ahead[i][2] = ld_line(row[i] + first + 8);
      }
    } else if (scales_in_words<S>(args)) {
#pragma unroll
      for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int w = 0; w < 3; w++) {
          ahead[i][w] = 0x7f7f7f7f; /* ones */
          if (w * 4 < (skews >> (i * 8 + 3) & 3) + bytes) ahead[i][w] = ld_line(row[i] + first + w * 4);
        }
    } else {
#pragma unroll
      for (int i = 0; i < ROWS; i++) load_bytes(args, row[i], first, bytes, ahead[i]);
    }
  }

  DEVICE static void load_bytes(const gemm_args &args, const uint8_t *row, int first, int bytes, uint32_t (&to)[4])
  {
    to[0] = to[1] = 0x7f7f7f7f;
#pragma unroll 1
    for (int b = 0; b < bytes; b++) {
      const uint32_t flip = (row[(first + b) * args.b.scale.k_stride] ^ 0x7f) << b % 4 * 8;
      to[0] ^= b < 4 ? flip : 0, to[1] ^= b < 4 ? 0 : flip;
    }
  }

  /* Bits 7 of bytes that are 0 or above TWIN_LARGEST. */
  DEVICE static uint32_t rare(uint32_t codes)
  {
    const uint32_t less = codes - 0x01010101;
    return (less & 0x7f7f7f7f) + (256 - TWIN_LARGEST) * 0x01010101u & less;
  }

  DEVICE void copy(const gemm_args &args, mixed_smem<S> &smem, int stage, int k0)
  {
    const uint32_t to = shared_address(smem.scales[stage].words[0]) + row_of(0) * 16;
    uint32_t some_rare = 0;
    hold(skews); /* no four registers from before the loop */
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
      for (int s = 0; s < S::SLABS; s++) {
        const uint32_t codes = __funnelshift_r(ahead[i][s], ahead[i][s + 1], skews >> i * 8);
        some_rare |= rare(codes);
        sts_128(to + s * S::COLUMNS * 16 + i * WARP_SIZE * 16,
                make_uint4(codes << 23 & 0x7f800000, codes << 15 & 0x7f800000, codes << 7 & 0x7f800000,
                           codes >> 1 & 0x7f800000));
      }
    if (some_rare & 0x80808080) mend(args, smem, to, k0);
    if (k0 + S::BK < args.k) load(args, k0 + S::BK);
  }

  /* What of 0 is 2^-127, subnormal; of what products leave out 0. */
  DEVICE void mend(const gemm_args &args, mixed_smem<S> &smem, uint32_t to, int k0)
  {
#pragma unroll 1
    for (int i = 0; i < ROWS * S::SLABS * 4; i++) {
      const int r = i / 4 / S::SLABS, slab = i / 4 % S::SLABS, k = k0 + slab * S::SLAB + i % 4 * 32;
      const uint32_t at = to + slab * S::COLUMNS * 16 + r * WARP_SIZE * 16 + i % 4 * 4, code = lds_32(at) >> 23;
      if (code == 0) sts_32(at, 1u << 22);
      if (!twin_scale_is_absent<S>((int)code)) continue;
      sts_32(at, 0);
      if (k < args.k) smem.skew[slot][row_of(r)] = 1;
    }
  }

  DEVICE void arrive(uint64_t *full) const
  {
    mbarrier_arrive(full);
  }
};

/* By a warp: chunk lane % 8 of every fourth row a lane; of a row and slab the scale. A stage takes few instructions
 * besides its copies: a warp that works each address out anew is slower than memory. */
template <class S> struct twin_rows {
  static constexpr int CHUNKS = FIXED_GROUP / 16, STEP = WARP_SIZE / CHUNKS, EACH = S::BM / STEP;
  static_assert(S::SLABS * S::BM <= WARP_SIZE && STEP == SHARED_ROWS, "a scale a lane");
  const char *from[EACH];  /* where its chunks of rows begin */
  const float *scale_from; /* of the next stage */
  int64_t scale_step;      /* floats from a stage's to the next one's */
  uint32_t there;          /* a bit a row: else zeros */
  int32_t to, scale_to;    /* of row 0 of stage 0 its chunk; its scale */
  int32_t rest;            /* bytes from a row's chunk to that of its rest */
  int32_t octets;          /* of rows; 0: half of one, with their rests */
  bool scaled;

  DEVICE static int chunk() { return twin_lane() % CHUNKS; }
  DEVICE static int row(int i) { return twin_lane() / CHUNKS + i * STEP; }
  DEVICE static int own_slab() { return twin_lane() / S::BM; }

  DEVICE void set_unit(const gemm_args &args, mixed_smem<S> &smem, int slot)
  {
    const tile_unit unit = smem.units[slot];
    const bool shared = rows_share_octet(smem, unit);
    octets = shared ? 0 : ceil_div(unit.rows, 8);
    const int r = twin_lane() % S::BM;
    const int32_t source = reported_source(args, unit, r); /* of each row by a lane: they wait for memory once */
    there = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int32_t own = __shfl_sync(ALL_LANES, source, row(i));
      from[i] = static_cast<const char *>(args.a) + (own < 0 ? 0 : own * args.a_ld * 2 + chunk() * 16);
      there |= (uint32_t)(own >= 0) << i;
    }
    to = (int32_t)shared_address(smem.rows[0][0]) + twin_row_offset(row(0)) + (chunk() ^ row(0)) * 16;
    rest = shared ? (to ^ 64) + SHARED_ROWS * 128 - to : (int32_t)REST_BYTES;
    scaled = own_slab() < S::SLABS && source >= 0;
    scale_from = args.a_scale + (scaled ? own_slab() * args.a_scale_ld + source : 0);
    scale_step = args.a_scale_ld * S::SLABS;
    scale_to = (int32_t)shared_address(&smem.staging.row_scales[own_slab() % S::SLABS][0][r]);
    hold(scale_to), hold(rest), hold(to); /* not worked out again for every stage */
  }

  /* Of the stage of k0 and on, one after the other; where there is no row, and past the end of k, zeros. A slab's
   * planes are as long as its k. Octets without a row are left. */
  DEVICE void copy(const gemm_args &args, mixed_smem<S> &smem, int stage, int k0)
  {
    const uint32_t first = to + stage * (uint32_t)sizeof(smem.rows[0]);
    if (k0 + S::BK <= args.k)
      copy_whole(first, k0);
    else
      copy_last(args, first, k0);
    const bool known = scaled && k0 + own_slab() * FIXED_GROUP < args.k;
    if (own_slab() < S::SLABS)
      cp_async_ca_4(scale_to + stage * (uint32_t)sizeof(smem.staging.row_scales[0][0]),
                    known ? scale_from : args.a_scale, known ? 4 : 0);
    scale_from += scale_step;
  }

  /* Whether row i of the lane is in an octet of the unit's. */
  DEVICE bool inside(int i) const
  {
    return i == 0 || octets > i / 2;
  }

  /* From row 0 to row i; its chunk is elsewhere in every other one. */
  DEVICE static uint32_t place(uint32_t first, int i)
  {
    return (first ^ i % 2 * 64) + twin_row_offset(i * STEP);
  }

  DEVICE void copy_whole(uint32_t first, int k0) const
  {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (!inside(i)) break;
      const char *own = from[i] + k0 * 2;
      const uint32_t at = place(first, i);
      const int bytes = there >> i & 1 ? 16 : 0;
#pragma unroll
      for (int slab = 0; slab < S::SLABS; slab++) {
        cp_async_cg_16(at + slab * 2 * S::BM * 128, own + slab * 2 * FIXED_GROUP, bytes);
        cp_async_cg_16(at + rest + slab * 2 * S::BM * 128, own + (slab * 2 + 1) * FIXED_GROUP, bytes);
      }
    }
  }

  DEVICE void copy_last(const gemm_args &args, uint32_t first, int k0) const
  {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (!inside(i)) break;
#pragma unroll 1
      for (int slab = 0; slab < S::SLABS; slab++) {
        const int k = k0 + slab * FIXED_GROUP, bytes = min(args.k - k, (int)FIXED_GROUP);
        const bool known = there >> i & 1 && chunk() * 16 < bytes;
        const char *own = known ? from[i] + k * 2 : static_cast<const char *>(args.a);
        const uint32_t at = place(first, i) + slab * 2 * S::BM * 128;
        cp_async_cg_16(at, own, known ? 16 : 0);
        cp_async_cg_16(at + rest, own + (known ? bytes : 0), known ? 16 : 0);
      }
    }
  }

  DEVICE void arrive(uint64_t *full) const
  {
    cp_async_mbarrier_arrive_noinc(full);
  }
};

/* By a warp, where no launch ahead has made them, which would be quicker: four lanes have a slab of a row; of four rows
 * two slabs at once. */
template <class S> struct twin_rows_here {
  static constexpr int LANES = 4;
  static_assert(WARP_SIZE / LANES == SHARED_ROWS * S::SLABS, "four rows at once");
  int32_t rows, slot;
  bool shared;

  DEVICE static int word() { return twin_lane() % LANES; }
  DEVICE static int row() { return twin_lane() / LANES % SHARED_ROWS; }
  DEVICE static int slab() { return twin_lane() / (LANES * SHARED_ROWS); }

  DEVICE void set_unit(const gemm_args &args, mixed_smem<S> &smem, int at)
  {
    const tile_unit unit = smem.units[at];
    rows = unit.rows;
    shared = rows_share_octet(smem, unit);
    slot = at;
    __syncwarp();
    if (twin_lane() < S::BM) smem.sources[slot % 2][twin_lane()] = reported_source(args, unit, twin_lane());
    __syncwarp();
  }

  DEVICE void load(const gemm_args &args, const mixed_smem<S> &smem, int pass, int k0, uint4 (&v)[4]) const
  {
    const int32_t source = smem.sources[slot % 2][pass * SHARED_ROWS + row()]; /* -1: none */
    const int k = k0 + slab() * FIXED_GROUP;
    const bf16 *from = static_cast<const bf16 *>(args.a) + source * args.a_ld + k + word() * 8;
#pragma unroll
    for (int q = 0; q < 4; q++) v[q] = ld_global(from + q * 32, source >= 0 && k + q * 32 < args.k);
  }

  DEVICE void store(mixed_smem<S> &smem, int stage, int pass, const uint4 (&v)[4]) const
  {
    const int r = pass * SHARED_ROWS + row();
    int to[2]; /* of chunk 0 of either plane */
    to[0] = (int)(shared_address(smem.rows[stage][slab() * 2]) + twin_row_offset(r) + r % 8 * 16 + word() * 4);
    to[1] = shared ? (to[0] ^ 64) + SHARED_ROWS * 128 : to[0] + REST_BYTES;
    hold(to[0]), hold(to[1]); /* no sixteen registers from before the loop */
    const float scale =
        put_twins<1>(v, [&](int plane, int chunk, uint32_t four) { sts_32((uint32_t)to[plane] ^ chunk * 16, four); });
    if (word() == 0) smem.staging.row_scales[slab()][stage][r] = scale;
  }

  DEVICE void copy(const gemm_args &args, mixed_smem<S> &smem, int stage, int k0)
  {
#pragma unroll 1
    for (int pass = 0; pass * SHARED_ROWS < rows; pass++) {
      uint4 v[4];
      load(args, smem, pass, k0, v);
      store(smem, stage, pass, v);
    }
  }

  DEVICE void arrive(uint64_t *full) const
  {
    mbarrier_arrive(full);
  }
};

/* The run's next unit, for producers; consumers see it behind the barrier of a later stage. */
template <class S> DEVICE void post_unit(const gemm_args &args, mixed_smem<S> &smem, int slot)
{
  slot %= UNITS_AHEAD;
  if (tid_x() == 0) {
    smem.units[slot] = smem.run.next(args, smem);
    mbarrier_arrive(&smem.posted[slot]);
  }
  __syncwarp();
}

/* A part of what stages hold. The first warp finds the units. */
template <class S, class PART> DEVICE void produce_twin_part(const gemm_args &args, mixed_smem<S> &smem)
{
  produce_part<S, PART>(args, smem, [&](int k0, int next) {
    if (same_type<PART, twin_codes<S>> && k0 == 0 && (int)(tid_x() / WARP_SIZE) == 0) post_unit<S>(args, smem, next);
  });
}

/* With early inputs rows alone wait for the grid ahead, which makes them. */
template <class S> DEVICE void produce_twins(const gemm_args &args, mixed_smem<S> &smem)
{
  if ((int)(tid_x() / WARP_SIZE) < 2) {
    if (tid_x() == 0) smem.run = stream_run<S>(args, smem.table.before[args.experts]);
    if ((int)(tid_x() / WARP_SIZE) == 0) post_unit<S>(args, smem, 0);
    produce_twin_part<S, twin_codes<S>>(args, smem);
  } else if ((int)(tid_x() / WARP_SIZE) == 2) {
    if (args.protocol.early_inputs) wait_for_earlier_grids();
    if (args.a_scale)
      produce_twin_part<S, twin_rows<S>>(args, smem);
    else
      produce_twin_part<S, twin_rows_here<S>>(args, smem);
  } else {
    produce_twin_part<S, twin_weight_scales<S>>(args, smem);
  }
}

/* ---- consumers: scales ---- */

/* Element k of a row that a launch ahead has made ready. */
template <class S> DEVICE float twin_element(const gemm_args &args, int32_t source, int k)
{
  const int slab = k / FIXED_GROUP, first = slab * FIXED_GROUP, bytes = min(args.k - first, (int)FIXED_GROUP);
  const uint8_t *code = static_cast<const uint8_t *>(args.a) + (source * args.a_ld + first) * 2 +
                        (k - first) / 32 * 32 + k % 2 * 16 + k % 32 / 2;
  return (e4m3_to_f32(code[0]) + e4m3_to_f32(code[bytes])) * args.a_scale[slab * args.a_scale_ld + source];
}

/* Of a lane's rows. */
template <class S> struct twin_scales {
  using slab_factors = float[S::OCTETS][4];
  uint32_t from;       /* the first one's shared address in stage 0 */
  bool absent = false; /* some of a tile's scales are not in its products */

  DEVICE void set_unit(const gemm_args &, const mixed_smem<S> &smem, int, int row0)
  {
    from = shared_address(smem.scales[0].words[0]) + row0 * 16;
  }

  DEVICE void load(int stage, int slab, slab_factors &by) const
  {
#pragma unroll
    for (int r = 0; r < S::OCTETS; r++) {
      const uint4 v = lds_128(from + stage * (uint32_t)sizeof(scale_stage<S>) + slab * S::COLUMNS * 16 + r * 8 * 16);
      by[r][0] = __uint_as_float(v.x), by[r][1] = __uint_as_float(v.y);
      by[r][2] = __uint_as_float(v.z), by[r][3] = __uint_as_float(v.w);
    }
  }

  /* When the unit's stages were there. */
  DEVICE void end_unit(const mixed_smem<S> &smem, int slot, int row0)
  {
#pragma unroll
    for (int r = 0; r < S::OCTETS; r++) absent = absent || smem.skew[slot % S::UNIT_SLOTS][row0 + r * 8];
  }
};

/* ---- consumers: products ---- */

/* A word of codes as two registers of four codes of e4m3. */
DEVICE void e4m3_words(uint32_t codes, uint32_t &even, uint32_t &odd)
{
  even = (codes << 4 & 0x80808080) | (codes << 2 & 0x1c1c1c1c);
  odd = (codes & 0x80808080) | (codes >> 2 & 0x1c1c1c1c);
}

/* Rows of a unit, at most; which columns they have. */
template <int ROWS> struct twin_columns {
  static constexpr bool SHARED = ROWS <= SHARED_ROWS; /* else both codes go into the same sums */
  static constexpr int N = SHARED ? 8 : ROWS, SUMS = N / 2;
  static constexpr int AHEAD = N > 8 ? 0 : 1; /* pairs of runs under way while one is scaled: as registers are there */
};

/* 64 k under way: two runs of 32 k, of `words` and at `rows`. */
template <class S, class C>
DEVICE void multiply_pair(const uint32_t (&words)[4], uint32_t rows, uint32_t (&a)[2][4], float (&parts)[2][C::SUMS])
{
#pragma unroll
  for (int b = 0; b < 2; b++)
#pragma unroll
    for (int r = 0; r < 2; r++) e4m3_words(words[b * 2 + r], a[b][r], a[b][2 + r]);
  using product = wgmma_registers_m64k32_e4m3<C::N>;
  wgmma_fence();
#pragma unroll
  for (int b = 0; b < 2; b++) product::template run<2 * REST_BYTES>(parts[b], a[b], rows + b * 2, false);
  if constexpr (!C::SHARED)
#pragma unroll
    for (int b = 0; b < 2; b++)
      product::template run<2 * REST_BYTES>(parts[b], a[b], rows + b * 2 + (REST_BYTES >> 4), true);
  wgmma_commit_group();
}

/* total += parts of the pair of runs `pair` of a slab, whose scales are `by`, a run each. */
template <class S, class C>
DEVICE void add_scaled(const float (&by)[S::OCTETS][4], int pair, float (&parts)[2][C::SUMS], float (&total)[C::SUMS])
{
#pragma unroll
  for (int b = 0; b < 2; b++) {
    hold(parts[b]);
#pragma unroll
    for (int i = 0; i < C::SUMS; i++) {
      const float own = by[i / 2 % 2][pair * 2 + b];
      total[i] = pair == 0 && b == 0 ? parts[b][i] * own : fmaf(parts[b][i], own, total[i]);
    }
  }
}

/* sums += total, of a slab, whose rows' scales are there from `scales` on. */
template <class C> DEVICE void add_total(const float *scales, const float (&total)[C::SUMS], float (&sums)[C::SUMS])
{
#pragma unroll
  for (int octet = 0; octet < C::SUMS / 4; octet++) {
    const int first = (int)(tid_x() % 4) * 2;
    const float2 own = *reinterpret_cast<const float2 *>(scales + octet * 8 + (C::SHARED ? first % 4 : first));
#pragma unroll
    for (int i = octet * 4; i < octet * 4 + 4; i++) sums[i] = fmaf(total[i], i % 2 ? own.y : own.x, sums[i]);
  }
}

/* Where a lane reads its matrix of codes of the first 64 k of stage 0: rows by octet, then the runs of 32 k. */
template <class S> DEVICE uint32_t place_of_matrices(const mixed_smem<S> &smem)
{
  const int lane = tid_x() % WARP_SIZE;
  return shared_address(smem.codes[0]) + code_offset<S>(consumer_warp<S>() * S::ROWS + lane % 16, lane / 16);
}

template <class S, class C, class SCALES>
DEVICE void multiply_twins_n(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, SCALES &scales,
                             float (&sums)[C::SUMS])
{
  constexpr int PAIRS = S::BK / 64, KEPT = 1 + C::AHEAD;
  const uint32_t place = place_of_matrices<S>(smem);
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    const uint32_t codes = place + at.stage * (uint32_t)sizeof(smem.codes[0]),
                   rows = __shfl_sync(ALL_LANES, (uint32_t)wgmma_operand(smem.rows[at.stage]), 0);
    float by[S::OCTETS][4], parts[KEPT][2][C::SUMS], total[C::SUMS];
    uint32_t a[KEPT][2][4], words[2][4];
    wait_for(&smem.full[at.stage], at.phase);
    ldmatrix_x4(words[0], codes);
    fence_proxy_async_shared(); /* rows come by cp.async */
#pragma unroll
    for (int i = 0; i < PAIRS + C::AHEAD; i++) {
      const int done = i - C::AHEAD;
      if (i + 1 < PAIRS) ldmatrix_x4(words[(i + 1) % 2], codes ^ (i + 1) * 32);
      if (i < PAIRS)
        multiply_pair<S, C>(words[i % 2], rows + i / 2 * (2 * S::BM * 128 >> 4) + i % 2 * 4, a[i % KEPT],
                            parts[i % KEPT]);
      if (done < 0) continue;
      if (done % 2 == 0) scales.load(at.stage, done / 2, by);
      if (i < PAIRS)
        wgmma_wait_group<C::AHEAD>();
      else
        wgmma_wait_group<0>();
      add_scaled<S, C>(by, done % 2, parts[done % KEPT], total);
      if (done % 2) add_total<C>(smem.staging.row_scales[done / 2][at.stage], total, sums);
    }
    release<S>(smem, at.stage);
  }
}

template <class S, int ROWS, class SCALES>
DEVICE void multiply_twin_rows(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at,
                               SCALES &scales, float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
  using columns = twin_columns<ROWS>;
  float own[columns::SUMS] = {};
  multiply_twins_n<S, columns>(args, smem, at, scales, own);
#pragma unroll
  for (int i = 0; i < columns::SUMS; i++) {
    if (columns::SHARED) own[i] += __shfl_xor_sync(ALL_LANES, own[i], 2);
    sums[0][i] = own[i] * 0x1p6f;
  }
}

template <class S, class SCALES>
DEVICE void multiply_twins(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int slot,
                           SCALES &scales, float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
  if (rows_share_octet(smem, smem.units[slot]))
    multiply_twin_rows<S, SHARED_ROWS>(args, smem, at, scales, sums);
  else if (smem.units[slot].rows > 8)
    multiply_twin_rows<S, S::BM>(args, smem, at, scales, sums);
  else
    multiply_twin_rows<S, 8>(args, smem, at, scales, sums);
  scales.end_unit(smem, slot, lane_row<S>());
}

#endif
