/*
 * fixed: as mixed (gemm/mixed.cuh), weights of mx4 and of u4, and few rows an expert, where what counts is how few
 * instructions a weight takes. Codes become bytes by three or seven instructions for eight (device/code_bytes.cuh),
 * where 16-bit elements take fifteen and more; so activations are integers, too, in fixed point
 * (device/fixed_point.cuh). Their upper and lower bytes are multiplied apart, in exact sums of 32 bits. Those of a run,
 * 32 k, which have one scale, or 128, are put together and scaled into sums of f32. What zero points take off is as
 * many times the sum of the activations, a product of ones. Up to four rows share the mma's columns.
 *
 * Order of k. Of 32 k lane q of four has the codes of k = 8 q .. 8 q + 7, a word: half of them are multiplied by bytes
 * 4 q .. of a row in shared memory, the others by 16 + 4 q .. A slab of rows is two arrays, of upper bytes and of lower
 * ones.
 *
 * Producers of rows make fixed point of them, unit by unit. Where an expert has several rows they would take longer
 * over that than consumers over products: then a launch ahead has made it (args.a_scale), and they copy.
 */
#ifndef CUMOE_FIXED_CUH
#define CUMOE_FIXED_CUH

#include "device/code_bytes.cuh"
#include "device/fixed_point.cuh"
#include "gemm/mixed.cuh"

template <class S, class W> struct fixed_scales;

template <class PRODUCT, int CLUSTER, int BM, int BN, int BK, int STAGES, int WARPS>
struct fixed_shape : mixed_shape<PRODUCT, CLUSTER, BM, BN, BK, STAGES, WARPS> {
  using W = typename PRODUCT::W;
  using SCALES = fixed_scales<fixed_shape, W>;
  using BYTES = code_bytes<W>;
  /* Of u4 without zero points, a scale for 128 k or more: rows of more tokens are these. */
  static constexpr bool WHOLE = same_type<W, u4> && BM > 16;
  static constexpr int RUN = WHOLE ? 128 : 32, RUNS = 128 / RUN;
  static constexpr bool FIXED = true, ZEROS = same_type<W, u4> && !WHOLE;
  static constexpr bool SCALED = true, SCALES_BY_COPY = false; /* of rows, a scale a slab */
  static constexpr int ZERO_OCTETS = ZEROS ? fixed_shape::COLUMNS / 8 : 1;
  static constexpr int ROW_REGISTERS = 64, CONSUMER_REGISTERS = ZEROS ? 168 : 176,
                       PRODUCER_REGISTERS = ZEROS ? 112 : 96;
  static_assert(BK == 256, "row_scales has room for two slabs a stage");
};

/* ---- producers ---- */

/* A lane's elements of a row and slab; the slab's other lanes are 8 apart. */
template <class S> DEVICE void store_fixed(mixed_smem<S> &smem, int stage, int slab, int row, int word, uint4 (&v)[4])
{
  const uint32_t to = shared_address(smem.rows[stage][slab * 2]) + row * 128 + word * 4;
  const float scale = put_fixed<typename S::X, 8, S::BYTES::IN_ORDER>(v, [&](int plane, int chunk, uint32_t bytes) {
    sts_32(to + plane * S::BM * 128 + (chunk ^ row % 8) * 16, bytes);
  });
  if (word == 0) smem.staging.row_scales[slab][stage][row] = scale;
}

/* Rows that a launch ahead has brought into fixed point. A thread has chunk tid % 8 of every 16th row; one row's scales
 * of a stage, which come behind them. */
template <class S> struct fixed_rows {
  static constexpr int CHUNKS = FIXED_GROUP / 16, STEP = S::GROUP / CHUNKS, EACH = S::BM / STEP;
  static_assert(S::SLABS * S::BM <= S::GROUP, "a thread has one scale of a stage");
  int32_t source[EACH], scaled, octets;

  DEVICE static int thread() { return (int)tid_x() - S::GROUP; }
  DEVICE static int chunk() { return thread() % CHUNKS; }
  DEVICE static int own_slab() { return thread() / S::BM; }

  DEVICE static int32_t find(const gemm_args &args, const tile_unit &unit, int r)
  {
    if (r >= unit.rows) return -1;
    const int32_t source = known_source(args, unit.row + r);
    if (source < 0) report_fault_inline(args.fault, FAULT_ROUTE, 0, args.row_pair[unit.row + r]);
    return source;
  }

  DEVICE void set_unit(const gemm_args &args, const tile_unit &unit)
  {
    octets = ceil_div(unit.rows, 8);
#pragma unroll
    for (int i = 0; i < EACH; i++) source[i] = find(args, unit, thread() / CHUNKS + i * STEP);
    const int r = thread() % S::BM;
    scaled = own_slab() < S::SLABS && r < unit.rows ? known_source(args, unit.row + r) : -1;
  }

  /* Of the stage of k0 and on; where there is no row, and past the end of k, zeros. Octets without a row are left. */
  DEVICE void copy(const gemm_args &args, mixed_smem<S> &smem, int stage, int k0) const
  {
#pragma unroll
    for (int slab = 0; slab < S::SLABS; slab++) {
      const int k = k0 + slab * FIXED_GROUP, bytes = min(args.k - k, (int)FIXED_GROUP); /* of a plane */
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const int r = thread() / CHUNKS + i * STEP;
        if (r >= octets * 8) continue;
        const bool there = source[i] >= 0 && chunk() * 16 < bytes;
        const uint32_t to = shared_address(smem.rows[stage][slab * 2]) + r * 128 + (chunk() ^ r % 8) * 16;
        const char *from =
            static_cast<const char *>(args.a) + (there ? (source[i] * args.a_ld + k) * 2 + chunk() * 16 : 0);
        cp_async_cg_16(to, from, there ? 16 : 0);
        cp_async_cg_16(to + S::BM * 128, from + (there ? bytes : 0), there ? 16 : 0);
      }
    }
    const int own = k0 / FIXED_GROUP + own_slab();
    const bool there = scaled >= 0 && own * FIXED_GROUP < args.k;
    if (own_slab() < S::SLABS)
      cp_async_ca_4(shared_address(&smem.staging.row_scales[own_slab()][stage][thread() % S::BM]),
                    args.a_scale + (there ? own * args.a_scale_ld + scaled : 0), there ? 4 : 0);
  }
};

/* As produce_rows, stage by stage: every thread arrives for what it has copied. */
template <class S> DEVICE void copy_fixed(const gemm_args &args, mixed_smem<S> &smem)
{
  pipeline_state<S::STAGES> at;
  pipeline_state<UNITS_AHEAD> unit;
  if (args.protocol.early_inputs) wait_for_earlier_grids();
  wait_for(&smem.posted[0], 0);
  if (smem.units[0].expert < 0) mbarrier_arrive(&smem.full[0]);
#pragma unroll 1
  while (smem.units[unit.stage].expert >= 0) {
    fixed_rows<S> rows;
    rows.set_unit(args, smem.units[unit.stage]);
    unit.advance();
    wait_for(&smem.posted[unit.stage], unit.phase);
#pragma unroll 1
    for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
      wait_for(&smem.empty[at.stage], at.phase ^ 1);
      rows.copy(args, smem, at.stage, k0);
      cp_async_mbarrier_arrive_noinc(&smem.full[at.stage]);
    }
  }
}

/* Element k of a row of them, in order. */
template <class S> DEVICE float fixed_element(const gemm_args &args, int32_t row, int k)
{
  static_assert(S::BYTES::IN_ORDER, "where scales may be absent");
  const int first = k / FIXED_GROUP * FIXED_GROUP, plane = min(args.k - first, (int)FIXED_GROUP),
            at = k % FIXED_GROUP / 32 * 32 + k % 8 / 4 * 16 + k % 32 / 8 * 4 + k % 4;
  const int8_t *from = static_cast<const int8_t *>(args.a) + (row * args.a_ld + first) * 2;
  return (float)(from[at] * 256 + from[at + plane]) * args.a_scale[k / FIXED_GROUP * args.a_scale_ld + row];
}

/* ---- consumers: scales ---- */

/* Of a lane's four rows in each run of a slab, or in each GROUPS-th one; row r is of octet r of its warp. more: what
 * codes less 8 are too large by. */
template <class S, int GROUPS, bool ZEROS = S::ZEROS> struct run_factors {
  float by[S::RUNS / GROUPS][4];
  DEVICE static int32_t more(int, int) { return 0; }
};
template <class S, int GROUPS> struct run_factors<S, GROUPS, true> : run_factors<S, GROUPS, false> {
  uint32_t zero[S::RUNS / GROUPS]; /* a byte a row */
  DEVICE int32_t more(int run, int r) const { return (int32_t)(zero[run] << 24 - 8 * r) >> 24; }
};

/* u4: scales of a row's blocks of k. */
template <class S> struct fixed_scales<S, u4> {
  static constexpr bool absent = false;
  static constexpr float REST = 1.f;
  static constexpr int OCTET_BYTES = 8 * 4 * S::SCALE_WORDS, ZERO_WORDS = S::BK / 32 + 1;
  uint32_t row;   /* the first one's shared address in stage 0 */
  uint32_t skews; /* of each a byte: where in what is copied its first scale is */

  DEVICE void set_unit(const gemm_args &, const mixed_smem<S> &smem, int slot, int row0)
  {
    row = shared_address(smem.scales[0].words[row0]);
    skews = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) skews |= (uint32_t)smem.skew[slot % S::UNIT_SLOTS][row0 + r * 8] << r * 8;
  }

  /* Of the slab of k and on; own: which run of GROUPS the lane has. Beyond the end of k the last one's. */
  template <int GROUPS>
  DEVICE void take_slab(const gemm_args &args, const mixed_smem<S> &smem, int stage, int slab, int k, int own,
                        run_factors<S, GROUPS> &f) const
  {
    const int first = scale_block<S>(args, k - slab * S::SLAB), size = scale_size<S>(args);
    const uint32_t round = scales_in_vectors<S>(args) ? 15 : 3, from = row + stage * (uint32_t)sizeof(scale_stage<S>);
    int block[S::RUNS / GROUPS];
    uint32_t at[4];
#pragma unroll
    for (int g = 0; g < S::RUNS / GROUPS; g++)
      block[g] = scale_block<S>(args, min(k + (own + g * GROUPS) * S::RUN, args.k - 32)) - first;
#pragma unroll
    for (int r = 0; r < 4; r++) at[r] = from + r * OCTET_BYTES + ((skews >> r * 8) + first * size & round);
    switch (args.b.scale.dtype) {
    case DT_BF16: load_all(at, block, 2, f.by, [](uint32_t p) { return __uint_as_float(lds_u16(p) << 16); }); break;
    case DT_F16: load_all(at, block, 2, f.by, [](uint32_t p) { return scale_value(lds_u16(p), DT_F16); }); break;
    default: load_all(at, block, 4, f.by, [](uint32_t p) { return __uint_as_float(lds_32(p)); });
    }
    if constexpr (S::ZEROS) load_zeros(args, smem.scales[stage], block, f.zero);
  }

  template <int GROUPS> DEVICE static void finish(const gemm_args &, int, int, const run_factors<S, GROUPS> &) {}

  template <int RUNS, class F>
  DEVICE static void load_all(const uint32_t (&at)[4], const int (&block)[RUNS], int size, float (&by)[RUNS][4],
                              F value)
  {
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int g = 0; g < RUNS; g++) by[g][r] = value(at[r] + block[g] * size);
  }

  /* Over the 8 that bytes are less codes. */
  template <int RUNS>
  DEVICE static void load_zeros(const gemm_args &args, const scale_stage<S> &stage, const int (&block)[RUNS],
                                uint32_t (&zero)[RUNS])
  {
    const bool there = args.b.zero.base[0] || args.b.zero.table[0];
    const int offset = args.b.offset - 8 + (there ? args.b.zero.add : 0);
    const uint32_t *words = stage.zeros[lane_row<S>() / 8];
#pragma unroll
    for (int g = 0; g < RUNS; g++) {
      zero[g] = 0;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const int own = offset + (there ? (int)(words[r * ZERO_WORDS + block[g]] >> lane_row<S>() % 8 * 4 & 15) : 0);
        zero[g] |= (uint32_t)(own & 255) << 8 * r;
      }
    }
  }
};

/* Twice the scales, as 2^-127 is no normal number. */
template <class S> struct fixed_scales<S, mx4> : scale_places<S> {
  static constexpr float REST = .5f;
  bool absent = false;                     /* some of a tile's scales are not in its products */
  static constexpr uint32_t ONE = 1 << 23; /* in an exponent */

  DEVICE void set_unit(const gemm_args &args, const mixed_smem<S> &smem, int slot, int row0)
  {
    scale_places<S>::set_unit(args, smem, slot, row0);
#pragma unroll
    for (int r = 0; r < 4; r++) this->at[r] -= tid_x() % 4; /* a lane has all of its rows' */
  }

  template <int GROUPS>
  DEVICE void take_slab(const gemm_args &args, const mixed_smem<S> &, int stage, int slab, int k, int own,
                        run_factors<S, GROUPS> &f) const
  {
    const uint32_t offset = this->slab_offset(stage, slab) + own, turn = this->flip(args, slab, k);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const uint32_t from = (this->at[r] + offset) ^ turn;
      if (GROUPS == 1) { /* a word, which begins at any byte */
        f.by[0][r] = __uint_as_float(lds_32(from & ~3u)), f.by[1][r] = __uint_as_float(lds_32((from & ~3u) + 4));
        f.by[2][r] = __uint_as_float(from << 3);
      } else {
#pragma unroll
        for (int g = 0; g < 4 / GROUPS; g++) f.by[g][r] = __uint_as_float(lds_u8(from + g * GROUPS));
      }
    }
  }

  /* What has been loaded becomes scales, when products are under way. */
  template <int GROUPS> DEVICE void finish(const gemm_args &args, int k, int own, run_factors<S, GROUPS> &f)
  {
    if constexpr (GROUPS == 1) return finish_words(args, k, f);
    uint32_t any = 0;
#pragma unroll
    for (int g = 0; g < 4 / GROUPS; g++)
#pragma unroll
      for (int r = 0; r < 4; r++) any |= __float_as_uint(f.by[g][r]);
    if (any > 127) leave_out<GROUPS>(args, k + own * 32, f.by);
#pragma unroll
    for (int g = 0; g < 4 / GROUPS; g++)
#pragma unroll
      for (int r = 0; r < 4; r++) f.by[g][r] = __uint_as_float(__float_as_uint(f.by[g][r]) * ONE + ONE);
  }

  template <class F> DEVICE void finish_words(const gemm_args &args, int k, F &f)
  {
    uint32_t words[4];
#pragma unroll
    for (int r = 0; r < 4; r++)
      words[r] = __funnelshift_r(__float_as_uint(f.by[0][r]), __float_as_uint(f.by[1][r]), __float_as_uint(f.by[2][r]));
    if (((words[0] | words[1] | words[2] | words[3]) & 0x80808080) != 0) leave_out_words(args, k, words);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      f.by[0][r] = __uint_as_float((words[r] & 0xff) * ONE + ONE);
      f.by[1][r] = __uint_as_float((words[r] & 0xff00) * (ONE >> 8) + ONE);
      f.by[2][r] = __uint_as_float((words[r] & 0xff0000) * (ONE >> 16) + ONE);
      f.by[3][r] = __uint_as_float((words[r] >> 24) * ONE + ONE);
    }
  }

  DEVICE void leave_out_words(const gemm_args &args, int k, uint32_t (&words)[4])
  {
#pragma unroll 1
    for (int g = 0; g < 4; g++)
#pragma unroll
      for (int r = 0; r < 4; r++) {
        if (!scale_is_absent<typename S::X, mx4>(words[r] >> 8 * g & 255)) continue;
        words[r] &= ~(255u << 8 * g);
        absent = absent || k + g * 32 < args.k;
      }
  }

  template <int GROUPS> DEVICE void leave_out(const gemm_args &args, int k, float (&by)[4 / GROUPS][4])
  {
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int g = 0; g < 4 / GROUPS; g++) {
        if (!scale_is_absent<typename S::X, mx4>(__float_as_uint(by[g][r]))) continue;
        by[g][r] = 0.f;
        absent = absent || k + g * GROUPS * 32 < args.k;
      }
  }
};

/* ---- consumers: products ---- */

/* A warp's 32 weight rows x 32 k. Octet r of weight rows is half r / 2 of block r % 2. */
template <class S> struct fixed_operand {
  uint32_t a[S::BYTES::PARTS][S::BLOCKS][4];

  DEVICE fixed_operand(uint32_t address, const typename S::BYTES &table)
  {
    uint32_t codes[4];
    ldmatrix_x4(codes, address);
#pragma unroll
    for (int r = 0; r < 4; r++) {
      uint32_t bytes[S::BYTES::PARTS][2];
      table.make(codes[r], bytes);
#pragma unroll
      for (int p = 0; p < S::BYTES::PARTS; p++) a[p][r % 2][r / 2] = bytes[p][0], a[p][r % 2][2 + r / 2] = bytes[p][1];
    }
  }

  DEVICE void multiply(int block, uint32_t first, uint32_t second, int32_t (&sum)[4]) const
  {
    const uint32_t b[2] = {first, second};
#pragma unroll
    for (int p = 0; p < S::BYTES::PARTS; p++) mma_m16n8k32_s8(sum, a[p][block], b);
  }

  /* sum = from + the same. */
  DEVICE void start(int block, uint32_t first, uint32_t second, const int32_t (&from)[4], int32_t (&sum)[4]) const
  {
    const uint32_t b[2] = {first, second};
    mma_m16n8k32_s8_from(sum, from, a[0][block], b);
#pragma unroll
    for (int p = 1; p < S::BYTES::PARTS; p++) mma_m16n8k32_s8(sum, a[p][block], b);
  }
};

/* Exact sums of a run; and of a token's elements, where zero points need them. */
template <class S, int COUNT> struct element_sums {
  int32_t of[S::ZEROS ? COUNT : 1][4] = {};

  DEVICE void add(int i, uint32_t first, uint32_t second)
  {
    constexpr uint32_t ONES = 0x01010101;
    const uint32_t a[4] = {ONES, ONES, ONES, ONES}, b[2] = {first, second};
    if constexpr (S::ZEROS) mma_m16n8k32_s8(of[i], a, b);
  }
  /* What value v of a lane's four has too much: bytes are 16 times codes. */
  DEVICE int32_t more(int i, int v, int32_t times) const { return S::ZEROS ? of[S::ZEROS ? i : 0][v] * 16 * times : 0; }
};

/* Of upper and of lower bytes. */
template <class S, int N> struct fixed_sums {
  int32_t of[2][S::BLOCKS][N / 8][4] = {};
  element_sums<S, N / 4> elements;
};
template <class S, int N> using slab_sums = float[S::BLOCKS][N / 8][4];
/* A warp's outputs, of rows and tokens. */
template <class S> using all_sums = float[S::BLOCKS][S::ACCUMULATORS];

/* Where a lane reads a slab, by ldmatrix: its weight row of the first 32 k, and its row of tokens. */
template <class S> struct fixed_places {
  uint32_t codes, rows;

  DEVICE fixed_places(const mixed_smem<S> &smem, int plane, int row, int chunk)
  {
    codes = shared_address(smem.codes[0]) + code_offset<S>(consumer_warp<S>() * S::ROWS + tid_x() % WARP_SIZE, 0);
    rows = shared_address(smem.rows[0]) + plane * S::BM * 128 + row * 128 + (chunk ^ row % 8) * 16;
  }
};

/* ---- tokens that have a column each ---- */

/* sums += 32 k, at `codes` and `rows`. */
template <class S, int N>
DEVICE void multiply_32(uint32_t codes, uint32_t rows, const typename S::BYTES &table, fixed_sums<S, N> &sums)
{
  const fixed_operand<S> a(codes, table);
#pragma unroll
  for (int octet = 0; octet < N / 8; octet++) {
    uint32_t b[4];
    ldmatrix_x4(b, rows + octet * 1024);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++) {
      a.multiply(block, b[0], b[1], sums.of[0][block][octet]);
      a.multiply(block, b[2], b[3], sums.of[1][block][octet]);
    }
    sums.elements.add(octet * 2, b[0], b[1]);
    sums.elements.add(octet * 2 + 1, b[2], b[3]);
  }
}

/* slab += a run. */
template <class S, int N>
DEVICE void add_run(const fixed_sums<S, N> &sums, const run_factors<S, 1> &f, int run, slab_sums<S, N> &slab)
{
#pragma unroll
  for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
    for (int octet = 0; octet < N / 8; octet++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = block + i / 2 * 2;
        const int32_t upper = sums.of[0][block][octet][i] - sums.elements.more(octet * 2, i, f.more(run, r)),
                      lower = sums.of[1][block][octet][i] - sums.elements.more(octet * 2 + 1, i, f.more(run, r));
        slab[block][octet][i] = fmaf((float)(upper * 256 + lower), f.by[run][r], slab[block][octet][i]);
      }
}

/* sums of octets FIRST and on += those of a slab, whose rows' scales are there from `scales` on. */
template <class S, int FIRST, int N>
DEVICE void add_slab(const slab_sums<S, N> &slab, const float *scales, all_sums<S> &sums)
{
#pragma unroll
  for (int octet = 0; octet < N / 8; octet++) {
    const float2 own = *reinterpret_cast<const float2 *>(scales + (FIRST + octet) * 8 + (int)(tid_x() % 4) * 2);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float &to = sums[block][(FIRST + octet) * 4 + i];
        to = fmaf(slab[block][octet][i], i % 2 ? own.y : own.x, to);
      }
  }
}

/* sums += a slab: one or two octets of rows at once, for which codes are read and unpacked again; registers are few.
 * finish: of factors, called once, when products are under way. */
template <class S, int N, int FIRST = 0, class F>
DEVICE void multiply_slab(uint32_t codes, uint32_t rows, const typename S::BYTES &table, const run_factors<S, 1> &f,
                          F finish, const float *scales, all_sums<S> &sums)
{
  constexpr int MOST = S::ZEROS ? 8 : 16, WIDTH = N - FIRST * 8 < MOST ? N - FIRST * 8 : MOST;
  slab_sums<S, WIDTH> slab = {};
#pragma unroll
  for (int run = 0; run < S::RUNS; run++) {
    fixed_sums<S, WIDTH> part;
#pragma unroll
    for (int b = run * S::RUN / 32; b < (run + 1) * S::RUN / 32; b++)
      multiply_32<S, WIDTH>(codes ^ b * 16, (rows ^ b * 32) + FIRST * 1024, table, part);
    if (FIRST == 0 && run == 0) finish();
    add_run<S, WIDTH>(part, f, run, slab);
  }
  add_slab<S, FIRST, WIDTH>(slab, scales, sums);
  if constexpr (FIRST * 8 + WIDTH < N)
    multiply_slab<S, N, FIRST + WIDTH / 8>(codes, rows, table, f, finish, scales, sums);
}

template <class S, int N> struct own_columns {
  static constexpr int GROUPS = 1;
  DEVICE static int plane() { return tid_x() % WARP_SIZE / 16; }
  DEVICE static int row() { return tid_x() % 8; }
  DEVICE static int chunk() { return tid_x() / 8 % 2; }
  DEVICE static int own() { return 0; }

  template <class F>
  DEVICE void multiply(uint32_t codes, uint32_t rows, const typename S::BYTES &table, const run_factors<S, 1> &f,
                       F finish, const float *scales, all_sums<S> &sums) const
  {
    multiply_slab<S, N>(codes, rows, table, f, finish, scales, sums);
  }
  DEVICE static void join(all_sums<S> &) {}
};

/* ---- up to four tokens: what a mma's columns are ---- */

/*
 * Four tokens' upper bytes, then their lower ones. Of two tokens these eight, of even runs and of odd ones, of one
 * token the two of each of four runs: then a run has zeros in the columns of others, a lane has the scales of one run
 * alone, and sums of several runs become floats at once.
 */
template <class S, int TOKENS> struct shared_columns {
  static constexpr int GROUPS = 4 / TOKENS;
  /* Integers short of 2^22 on top of this are floats' bits: to take it off is quicker than a conversion. */
  static constexpr bool ON_TOP = TOKENS > 1 && !S::WHOLE;
  static constexpr uint32_t TOP = ON_TOP ? 0x4b400000 : 0; /* 1.5 2^23 */
  uint32_t mask[GROUPS];                                   /* of a lane's column in run g of GROUPS */
  int32_t top[4];

  DEVICE static int column_group(int column) { return column / TOKENS / 2; }
  DEVICE static int column_plane(int column) { return column / TOKENS % 2; }
  DEVICE static int plane() { return column_plane(tid_x() % 8); }
  DEVICE static int row() { return tid_x() % TOKENS; }
  DEVICE static int chunk() { return tid_x() % WARP_SIZE / 8; }
  DEVICE static int own() { return column_group(tid_x() % 4 * 2); }

  DEVICE shared_columns()
  {
#pragma unroll
    for (int g = 0; g < GROUPS; g++) mask[g] = column_group(tid_x() % WARP_SIZE / 4) == g ? ~0u : 0u;
#pragma unroll
    for (int i = 0; i < 4; i++) top[i] = ON_TOP ? (int32_t)kept_in_register(TOP) : 0;
  }

  DEVICE uint32_t of_group(uint32_t x, int g) const
  {
    return GROUPS > 1 ? x & mask[g % GROUPS] : x;
  }

  /* slab += GROUPS runs. */
  DEVICE static void add(const int32_t (&part)[S::BLOCKS][4], const element_sums<S, 1> &elements,
                         const run_factors<S, GROUPS> &f, int run, slab_sums<S, 8> &slab)
  {
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
      for (int i = 0; i < 4; i += TOKENS == 1 ? 2 : 1) {
        const int r = block + i / 2 * 2;
        int32_t sum = part[block][i] - elements.more(0, i, f.more(run, r));
        if constexpr (TOKENS == 1) sum = sum * 256 + part[block][i + 1] - elements.more(0, i + 1, f.more(run, r));
        const float value = ON_TOP ? __uint_as_float((uint32_t)sum) - __uint_as_float(TOP) : (float)sum;
        slab[block][0][i] = fmaf(value, f.by[run][r], slab[block][0][i]);
      }
  }

  template <class F>
  DEVICE void multiply(uint32_t codes, uint32_t rows, const typename S::BYTES &table, const run_factors<S, GROUPS> &f,
                       F finish, const float *scales, all_sums<S> &sums) const
  {
    constexpr int EACH = S::RUN / 32 * GROUPS; /* 32 k that become floats at once */
    slab_sums<S, 8> slab = {};
    int32_t part[4 / EACH][S::BLOCKS][4];
    element_sums<S, 1> elements[4 / EACH];
    uint32_t x[4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
      if (b % 2 == 0) ldmatrix_x4(x, rows ^ b * 32);
      const fixed_operand<S> a(codes ^ b * 16, table);
      const uint32_t one = of_group(x[b % 2 * 2], b), other = of_group(x[b % 2 * 2 + 1], b);
#pragma unroll
      for (int block = 0; block < S::BLOCKS; block++)
        if (b % EACH == 0)
          a.start(block, one, other, top, part[b / EACH][block]);
        else
          a.multiply(block, one, other, part[b / EACH][block]);
      elements[b / EACH].add(0, one, other);
    }
    finish();
#pragma unroll
    for (int i = 0; i < 4 / EACH; i++) add(part[i], elements[i], f, i, slab);
    add_rows(slab, scales, sums);
  }

  DEVICE static void add_rows(const slab_sums<S, 8> &slab, const float *scales, all_sums<S> &sums)
  {
    const float *from = scales + (TOKENS == 4 ? (int)(tid_x() % 2) * 2 : 0);
    const float2 own = TOKENS > 1 ? *reinterpret_cast<const float2 *>(from) : make_float2(*from, 0.f);
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
      for (int i = 0; i < 4; i += TOKENS == 1 ? 2 : 1)
        sums[block][i] = fmaf(slab[block][0][i], i % 2 ? own.y : own.x, sums[block][i]);
  }

  /* Sums of planes and runs into those of tokens, which the first lanes have. */
  DEVICE static void join(all_sums<S> &sums)
  {
    const float upper = TOKENS > 1 && column_plane(tid_x() % 4 * 2) == 0 ? 256.f : 1.f;
#pragma unroll
    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float own = sums[block][i] * upper;
        if (TOKENS < 4) own += __shfl_xor_sync(ALL_LANES, own, 1);
        sums[block][i] = own + __shfl_xor_sync(ALL_LANES, own, 2);
      }
  }
};

/* ---- stages ---- */

template <class S, int N, class COLUMNS, class SCALES>
DEVICE void multiply_fixed_n(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, SCALES &scales,
                             all_sums<S> &sums)
{
  const fixed_places<S> first(smem, COLUMNS::plane(), COLUMNS::row(), COLUMNS::chunk());
  const typename S::BYTES table;
  const COLUMNS columns;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK, at.advance()) {
    wait_for(&smem.full[at.stage], at.phase);
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS && k0 + slab * S::SLAB < args.k; slab++) {
      const uint32_t codes = (first.codes + at.stage * (uint32_t)sizeof(smem.codes[0])) ^ slab * 64,
                     rows = first.rows + at.stage * (uint32_t)sizeof(smem.rows[0]) + slab * 2 * S::BM * 128;
      run_factors<S, COLUMNS::GROUPS> f;
      scales.template take_slab<COLUMNS::GROUPS>(args, smem, at.stage, slab, k0 + slab * S::SLAB, COLUMNS::own(), f);
      const auto finish = [&] {
        scales.template finish<COLUMNS::GROUPS>(args, k0 + slab * S::SLAB, COLUMNS::own(), f);
      };
      columns.multiply(codes, rows, table, f, finish, smem.staging.row_scales[slab][at.stage], sums);
    }
    release<S>(smem, at.stage);
  }
  COLUMNS::join(sums);
#pragma unroll
  for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
    for (int i = 0; i < N / 2; i++) sums[block][i] *= SCALES::REST / S::BYTES::UNIT;
}

/* In widths of whole octets. */
template <class S, int N, class SCALES>
DEVICE void multiply_fixed(const gemm_args &args, mixed_smem<S> &smem, pipeline_state<S::STAGES> &at, int rows,
                           SCALES &scales, all_sums<S> &sums)
{
  if constexpr (N > 8) {
    if (rows <= N - 8) return multiply_fixed<S, N - 8>(args, smem, at, rows, scales, sums);
  } else {
    if constexpr (S::RUNS == 4) {
      if (rows == 1) return multiply_fixed_n<S, N, shared_columns<S, 1>>(args, smem, at, scales, sums);
      if (rows == 2) return multiply_fixed_n<S, N, shared_columns<S, 2>>(args, smem, at, scales, sums);
    }
    if (rows <= 4) return multiply_fixed_n<S, N, shared_columns<S, 4>>(args, smem, at, scales, sums);
  }
  multiply_fixed_n<S, N, own_columns<S, N>>(args, smem, at, scales, sums);
}

#endif
