/*
 * fixed: as mixed (gemm/mixed.cuh), weights of u4 without zero points, a scale for 128 k or more, and few rows an
 * expert, where what counts is how few instructions a weight takes. Codes become bytes by three instructions for eight,
 * where 16-bit elements take fifteen and more; so activations are integers, too, in fixed point
 * (device/fixed_point.cuh). Their upper and lower bytes are multiplied apart, in exact sums of 32 bits. Those of 128 k
 * are put together and scaled into sums of f32.
 *
 * Few rows (tokens) are multiplied by mma.sync, whose results are there sooner. For more each weight is unpacked once,
 * for wgmma: while one of a warp's two blocks of weight rows is multiplied, the other is unpacked or scaled.
 *
 * Order of k. Of 32 k lane q of four has the codes of k = 8 q .. 8 q + 7, a word: its lower nibbles, the even ones, are
 * multiplied by bytes 4 q .. of a row in shared memory, the upper ones by 16 + 4 q .. A slab of rows is, octet by
 * octet, their upper bytes and then their lower ones, so that both are columns of one product.
 *
 * Producers of rows make fixed point of them, unit by unit. Where an expert has several rows they would take longer
 * over that than consumers over products: then a launch ahead has made it (args.a_scale), and they copy.
 */
#ifndef CUMOE_FIXED_CUH
#define CUMOE_FIXED_CUH

#include "device/fixed_point.cuh"
#include "gemm/mixed.cuh"

template <class S> struct fixed_scales;

template <class PRODUCT, int CLUSTER, int BM, int BN, int BK, int STAGES, int WARPS>
struct fixed_shape : mixed_shape<PRODUCT, CLUSTER, BM, BN, BK, STAGES, WARPS> {
  using SCALES = fixed_scales<fixed_shape>;
  static constexpr bool FIXED = true, ZEROS = false;
  static constexpr bool SCALED = true, SCALES_BY_COPY = false; /* of rows, a scale a slab */
  static constexpr int ZERO_OCTETS = 1;
  static constexpr int SYNC_ROWS = 8; /* the most that mma.sync multiplies */
  static constexpr int PRODUCER_REGISTERS = BM > 32 ? 96 : 104, ROW_REGISTERS = BM > 32 ? 48 : 56,
                       CONSUMER_REGISTERS = BM > 32 ? 184 : 176;
  static_assert(same_type<typename PRODUCT::W, u4> && BK == 256, "row_scales has room for two slabs a stage");
};

/* Where row r of a slab begins, and its lower bytes behind the upper ones. */
enum { LOWER_BYTES = 1024 };
DEVICE int fixed_row_offset(int r)
{
  return r / 8 * 2 * LOWER_BYTES + r % 8 * 128;
}

/* ---- producers ---- */

/* A lane's elements of a row and slab; the slab's other lanes are 8 apart. */
template <class S>
DEVICE void store_fixed(mixed_smem<S> &smem, int stage, int slab, int row, int word, const uint4 (&v)[4])
{
  const uint32_t to = shared_address(smem.rows[stage][slab * 2]) + fixed_row_offset(row) + word * 4;
  const float scale = put_fixed<typename S::X, 8>(v, [&](int plane, int chunk, uint32_t bytes) {
    sts_32(to + plane * LOWER_BYTES + (chunk ^ row % 8) * 16, bytes);
  });
  if (word == 0) smem.staging.row_scales[slab][stage][row] = scale;
}

/* Rows that a launch ahead has brought into fixed point. A thread has chunk tid % 8 of every 16th row; one row's scales
 * of a stage, which come behind them. */
template <class S> struct fixed_rows {
  static constexpr int CHUNKS = FIXED_GROUP / 16, STEP = S::GROUP / CHUNKS, EACH = S::BM / STEP;
  static_assert(S::SLABS * S::BM <= S::GROUP, "a thread has one scale of a stage");
  const char *from[EACH]; /* where its chunks of rows begin */
  uint32_t there;         /* a bit a row: else zeros */
  int32_t scaled, octets;

  DEVICE static unsigned thread() { return tid_x() - S::GROUP; }
  DEVICE static int chunk() { return (int)(thread() % CHUNKS); }
  DEVICE static int own_slab() { return (int)(thread() / S::BM); }
  DEVICE static int row(int i) { return (int)(thread() / CHUNKS) + i * STEP; }

  DEVICE void set_unit(const gemm_args &args, const mixed_smem<S> &smem, int slot)
  {
    const tile_unit unit = smem.units[slot];
    octets = ceil_div(unit.rows, 8);
    there = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int32_t source = reported_source(args, unit, row(i));
      from[i] = static_cast<const char *>(args.a) + (source < 0 ? 0 : source * args.a_ld * 2 + chunk() * 16);
      there |= (uint32_t)(source >= 0) << i;
    }
    const int r = (int)(thread() % S::BM);
    scaled = own_slab() < S::SLABS && r < unit.rows ? known_source(args, unit.row + r) : -1;
  }

  /* Of the stage of k0 and on; where there is no row, and past the end of k, zeros. Octets without a row are left. */
  DEVICE void copy(const gemm_args &args, mixed_smem<S> &smem, int stage, int k0) const
  {
    const int first = row(0), end = octets * 8 - first;
    const uint32_t to = shared_address(smem.rows[stage][0]) + fixed_row_offset(first) + (chunk() ^ first % 8) * 16;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      if (i * STEP >= end) break;
      if (k0 + S::BK <= args.k)
        copy_whole(to + fixed_row_offset(i * STEP), from[i] + k0 * 2, there >> i & 1);
      else
        copy_last(args, to + fixed_row_offset(i * STEP), from[i] + k0 * 2, there >> i & 1, k0);
    }
    const int own = k0 / FIXED_GROUP + own_slab();
    const bool known = scaled >= 0 && own * FIXED_GROUP < args.k;
    if (own_slab() < S::SLABS)
      cp_async_ca_4(shared_address(&smem.staging.row_scales[own_slab()][stage][thread() % S::BM]),
                    args.a_scale + (known ? own * args.a_scale_ld + scaled : 0), known ? 4 : 0);
  }

  /* Every thread for what it has copied. */
  DEVICE void arrive(uint64_t *full) const
  {
    cp_async_mbarrier_arrive_noinc(full);
  }

  DEVICE static void copy_whole(uint32_t to, const char *row, bool there)
  {
#pragma unroll
    for (int i = 0; i < 2 * S::SLABS; i++)
      cp_async_cg_16(to + i / 2 * 2 * S::BM * 128 + i % 2 * LOWER_BYTES, row + i * FIXED_GROUP, there ? 16 : 0);
  }

  /* A slab's planes are as long as its k. */
  DEVICE static void copy_last(const gemm_args &args, uint32_t to, const char *row, bool there, int k0)
  {
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS; slab++) {
      const int k = slab * FIXED_GROUP, bytes = min(args.k - k0 - k, (int)FIXED_GROUP);
      const bool known = there && chunk() * 16 < bytes;
      const char *own = known ? row + k * 2 : static_cast<const char *>(args.a);
      cp_async_cg_16(to + slab * 2 * S::BM * 128, own, known ? 16 : 0);
      cp_async_cg_16(to + slab * 2 * S::BM * 128 + LOWER_BYTES, own + (known ? bytes : 0), known ? 16 : 0);
    }
  }
};

/* ---- consumers: scales ---- */

/* Of a lane's four rows; row r is of octet r of its warp. */
template <class S> struct fixed_scales {
  using slab_scales = float[S::SLABS][4];
  static constexpr bool absent = false;
  static constexpr int OCTET_BYTES = 8 * 4 * S::SCALE_WORDS;
  uint32_t row;     /* the first one's shared address in stage 0 */
  uint32_t skews;   /* of each a byte: where in what is copied its first scale is */
  int round, shift; /* that is at most this; of k to its block */

  DEVICE void set_unit(const gemm_args &args, const mixed_smem<S> &smem, int slot, int row0)
  {
    round = scales_in_vectors<S>(args) ? 15 : 3;
    shift = 31 - __clz(args.b.scale.block_k);
    if (S::BM <= 32) hold(round), hold(shift); /* not worked out again for every stage */
    row = shared_address(smem.scales[0].words[row0]);
    skews = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) skews |= (uint32_t)smem.skew[slot % S::UNIT_SLOTS][row0 + r * 8] << r * 8;
  }

  /* Of the stage of k0 and on; beyond the end of k the last one's. */
  DEVICE void load(const gemm_args &args, int stage, int k0, slab_scales &by) const
  {
    const int origin = args.b.scale.k_origin, size = scale_size<S>(args),
              first = (k0 + origin >> shift) - (origin >> shift),
              next = (min(k0 + S::SLAB, args.k - 32) + origin >> shift) - (origin >> shift) - first;
    const uint32_t from = row + stage * (uint32_t)sizeof(scale_stage<S>);
    uint32_t at[4];
#pragma unroll
    for (int r = 0; r < 4; r++) at[r] = from + r * OCTET_BYTES + ((skews >> r * 8) + first * size & round);
    switch (args.b.scale.dtype) {
    case DT_BF16: return load_all(at, next * size, by, [](uint32_t p) { return __uint_as_float(lds_u16(p) << 16); });
    case DT_F16: return load_all(at, next * size, by, [](uint32_t p) { return scale_value(lds_u16(p), DT_F16); });
    default: return load_all(at, next * size, by, [](uint32_t p) { return __uint_as_float(lds_32(p)); });
    }
  }

  template <class F> DEVICE static void load_all(const uint32_t (&at)[4], int next, slab_scales &by, F value)
  {
#pragma unroll
    for (int r = 0; r < 4; r++) by[0][r] = value(at[r]), by[1][r] = value(at[r] + next);
  }
};

/* ---- consumers: products ---- */

/* A word of codes less 8, times 16: as two registers of four bytes. signs: 0x80808080. */
DEVICE void s8_words(uint32_t codes, uint32_t signs, uint32_t &even, uint32_t &odd)
{
  even = (codes << 4 ^ signs) & 0xf0f0f0f0;
  odd = (codes ^ signs) & 0xf0f0f0f0;
}

/* 0x80808080 of the codes' offset, which is 8: no constant, as an instruction has one. */
DEVICE uint32_t signs_of_codes(const gemm_args &args)
{
  return multiply_anew(args.b.offset, 0x10101010);
}

/* Exact sums of a slab: of upper and of lower bytes. */
template <class S, int N> using fixed_sums = int32_t[2][S::BLOCKS][N / 8][4];

/* Where a lane reads a slab: of codes and of rows its row of ldmatrix. An 8 x 16 bytes' lanes get four bytes each of
 * the row that they have in an operand. */
template <class S> struct fixed_places {
  uint32_t codes, rows;

  DEVICE fixed_places(const mixed_smem<S> &smem)
  {
    const int lane = tid_x() % WARP_SIZE, r = lane % 8;
    codes = shared_address(smem.codes[0]) + code_offset<S>(consumer_warp<S>() * S::ROWS + lane, 0);
    rows = shared_address(smem.rows[0]) + lane / 16 * LOWER_BYTES + r * 128 + (lane / 8 % 2 ^ r) * 16;
  }
};

/* sums += 32 k, at `codes` and `rows`. Octet r of weight rows is half r / 2 of block r % 2. */
template <class S, int N>
DEVICE void multiply_bytes(uint32_t codes, uint32_t rows, uint32_t signs, fixed_sums<S, N> &sums)
{
  uint32_t words[4], a[S::BLOCKS][4];
  ldmatrix_x4(words, codes);
#pragma unroll
  for (int r = 0; r < 4; r++) s8_words(words[r], signs, a[r % 2][r / 2], a[r % 2][2 + r / 2]);
#pragma unroll
  for (int octet = 0; octet < N / 8; octet++) {
    uint32_t b[4];
    ldmatrix_x4(b, rows + octet * 2 * LOWER_BYTES);
    const uint32_t high[2] = {b[0], b[1]}, low[2] = {b[2], b[3]};
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++) {
      mma_m16n8k32_s8(sums[0][block][octet], a[block], high);
      mma_m16n8k32_s8(sums[1][block][octet], a[block], low);
    }
  }
}

/* What codes times 16 have made too large. */
template <class S, int N> DEVICE void take_sixteenth(float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
#pragma unroll
  for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[block][i] *= 0x1p-4f;
}

/* sums += those of a slab, whose rows' scales are there from `scales` on. */
template <class S, int N>
DEVICE void add_slab(const fixed_sums<S, N> &slab, const float (&by)[4], const float *scales,
                     float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
#pragma unroll
  for (int octet = 0; octet < N / 8; octet++) {
    const float2 own = *reinterpret_cast<const float2 *>(scales + octet * 8 + (int)(tid_x() % 4) * 2);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float sum = (float)(slab[0][block][octet][i] * 256 + slab[1][block][octet][i]);
        float &to = sums[block][octet * 4 + i];
        to = fmaf(sum * by[block + i / 2 * 2], i % 2 ? own.y : own.x, to);
      }
  }
}

/* sums += a slab. */
template <class S, int N>
DEVICE void multiply_slab(uint32_t codes, uint32_t rows, uint32_t signs, const float (&by)[4], const float *scales,
                          float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
  fixed_sums<S, N> slab = {};
#pragma unroll
  for (int b = 0; b < 4; b++) multiply_bytes<S, N>(codes ^ b * 16, rows ^ b * 32, signs, slab);
  add_slab<S, N>(slab, by, scales, sums);
}

template <class S, int N, class SCALES>
DEVICE void multiply_fixed_n(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, SCALES &scales,
                             float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
  const fixed_places<S> first(smem);
  const uint32_t signs = signs_of_codes(args);
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    float by[S::SLABS][4];
    wait_for(&smem.full[at.stage], at.phase);
    scales.load(args, at.stage, k0, by);
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS && k0 + slab * S::SLAB < args.k; slab++) {
      const uint32_t codes = (first.codes + at.stage * (uint32_t)sizeof(smem.codes[0])) ^ slab * 64,
                     rows = first.rows + at.stage * (uint32_t)sizeof(smem.rows[0]) + slab * 2 * S::BM * 128;
      float own[4];
#pragma unroll
      for (int r = 0; r < 4; r++) own[r] = slab ? by[1][r] : by[0][r];
      multiply_slab<S, N>(codes, rows, signs, own, smem.staging.row_scales[slab][at.stage], sums);
    }
    release<S>(smem, at.stage);
  }
  take_sixteenth<S, N>(sums);
}

/* ---- the same by wgmma ---- */

/* A slab's 128 k of a block, as operands of 32 k each. */
template <class S> DEVICE void unpack_block(uint32_t codes, uint32_t signs, uint32_t (&a)[4][4])
{
#pragma unroll
  for (int b = 0; b < 4; b += 2) {
    uint32_t words[4];
    ldmatrix_x4(words, codes ^ b * 16);
#pragma unroll
    for (int i = 0; i < 4; i++) s8_words(words[i], signs, a[b + i / 2][i % 2], a[b + i / 2][2 + i % 2]);
  }
}

/* Exact sums of a slab and of octets of rows, a lane's upper and then its lower bytes of each: under way. */
template <int OCTETS> DEVICE void multiply_octets(const uint32_t (&a)[4][4], uint32_t rows, int32_t (&sums)[32])
{
  wgmma_fence();
#pragma unroll
  for (int b = 0; b < 4; b++) wgmma_registers_m64k32_s8<OCTETS * 16>::run(sums, a[b], rows + b * 2, b > 0);
  wgmma_commit_group();
}

/* sums of a block and of octets FIRST and on += those of a slab, when at most PENDING groups are under way. */
template <class S, int FIRST, int OCTETS, int PENDING>
DEVICE void add_octets(int32_t (&slab)[32], float even, float odd, const float *scales, float (&sums)[S::ACCUMULATORS])
{
  wgmma_wait_group<PENDING>();
  hold(slab);
#pragma unroll
  for (int octet = 0; octet < OCTETS; octet++) {
    const float2 own = *reinterpret_cast<const float2 *>(scales + (FIRST + octet) * 8 + (int)(tid_x() % 4) * 2);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float sum = (float)(slab[octet * 8 + i] * 256 + slab[octet * 8 + 4 + i]);
      float &to = sums[(FIRST + octet) * 4 + i];
      to = fmaf(sum * (i < 2 ? even : odd), i % 2 ? own.y : own.x, to);
    }
  }
  hold(sums); /* before the next products, for which registers would not do */
}

/* Where a lane reads its codes of stage 0: of both octets of block 0 the first 32 k, then the next. */
template <class S> DEVICE uint32_t place_of_codes(const mixed_smem<S> &smem)
{
  const int lane = (int)(tid_x() % WARP_SIZE), row = consumer_warp<S>() * S::ROWS + lane % 8 + lane / 8 % 2 * 16;
  return shared_address(smem.codes[0]) + code_offset<S>(row, lane / 16);
}

/* FIRST octets of rows and REST more, one after the other: registers are few. */
template <class S, int FIRST, int REST, class SCALES>
DEVICE void multiply_wide_n(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, SCALES &scales,
                            float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
  const uint32_t place = REST > 0 ? 0 : place_of_codes<S>(smem); /* else registers are too few */
  int32_t slab_sums[2][32] = {};
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    float by[S::SLABS][4];
    wait_for(&smem.full[at.stage], at.phase);
    fence_proxy_async_shared();                 /* rows come by cp.async */
    int32_t skews[1] = {(int32_t)scales.skews}; /* not four registers from before the loop */
    hold(skews);
    scales.skews = skews[0];
    scales.load(args, at.stage, k0, by);
    const uint32_t first_codes =
        (REST > 0 ? place_of_codes<S>(smem) : place) + at.stage * (uint32_t)sizeof(smem.codes[0]);
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS && k0 + slab * S::SLAB < args.k; slab++) {
      const uint32_t codes = first_codes ^ slab * 64, rows = (uint32_t)wgmma_operand(smem.rows[at.stage][slab * 2]),
                     rest = rows + FIRST * (2 * LOWER_BYTES >> 4), signs = signs_of_codes(args);
      const float *row_scales = smem.staging.row_scales[slab][at.stage];
      float own[4];
#pragma unroll
      for (int r = 0; r < 4; r++) own[r] = slab ? by[1][r] : by[0][r];
      uint32_t a[2][4][4];
      unpack_block<S>(codes, signs, a[0]);
      multiply_octets<FIRST>(a[0], rows, slab_sums[0]);
      unpack_block<S>(codes + 8 * S::ROW_BYTES, signs, a[1]);
      multiply_octets<FIRST>(a[1], rows, slab_sums[1]);
      add_octets<S, 0, FIRST, 1>(slab_sums[0], own[0], own[2], row_scales, sums[0]);
      if constexpr (REST > 0) {
        multiply_octets<REST>(a[0], rest, slab_sums[0]);
        add_octets<S, 0, FIRST, 1>(slab_sums[1], own[1], own[3], row_scales, sums[1]);
        multiply_octets<REST>(a[1], rest, slab_sums[1]);
        add_octets<S, FIRST, REST, 1>(slab_sums[0], own[0], own[2], row_scales, sums[0]);
      }
      add_octets<S, REST ? FIRST : 0, REST ? REST : FIRST, 0>(slab_sums[1], own[1], own[3], row_scales, sums[1]);
    }
    release<S>(smem, at.stage);
  }
  take_sixteenth<S, (FIRST + REST) * 8>(sums);
}

/* In widths of whole octets, from 32 rows on of pairs of them. */
template <class S, int N, class SCALES>
DEVICE void multiply_fixed(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int rows,
                           SCALES &scales, float (&sums)[S::BLOCKS][S::ACCUMULATORS])
{
  constexpr int LESS = N > 32 ? N - 16 : N - 8, REST = N > 32 ? N / 16 : 0;
  if constexpr (LESS > 0) {
    if (rows <= LESS) return multiply_fixed<S, LESS>(args, smem, at, rows, scales, sums);
  }
  if constexpr (N <= S::SYNC_ROWS)
    multiply_fixed_n<S, N>(args, smem, at, scales, sums);
  else
    multiply_wide_n<S, N / 8 - REST, REST>(args, smem, at, scales, sums);
}

#endif
