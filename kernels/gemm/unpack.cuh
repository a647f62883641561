/*
 * unpack: the tile form for weights with scales. Their codes go to shared memory as they are and become X in registers,
 * exactly (gemm/decode.cuh); activations of 8 bits do too, but for s8, which the tensor cores take. Sums run over a
 * stretch of k in which no scale changes, and then join the accumulators, times its scales, in f32.
 *
 * Within 16 elements of k a lane's four are consecutive, in both operands: 4 (l % 4) to + 3. A matrix of ldmatrix is
 * such a block of codes of 8 bits. Every warp has all rows of the tile, so that it unpacks no weight that another does.
 */
#ifndef CUMOE_UNPACK_CUH
#define CUMOE_UNPACK_CUH

#include "gemm/decode.cuh"
#include "gemm/tile.cuh"

/* Of a run of k. Those of s8 start at BEGIN, so that their bits are those of a float, 1.5 * 2^23 too much: a
 * conversion takes a tensor core's time. Runs are of up to 128, so the sums fit 22 bits. */
template <bool INTEGER> struct run_sum {
  using type = f32;
  static constexpr f32 BEGIN = 0.f;
  DEVICE static float value(f32 sum) { return sum; }
};
template <> struct run_sum<true> {
  using type = s32;
  static constexpr s32 BEGIN = 0x4b400000;
  DEVICE static float value(s32 sum) { return __int_as_float(sum) - 0x1.8p23f; }
};

/* What X becomes. */
template <class X> struct multiplied_type {
  using type = X;
};
template <> struct multiplied_type<e4m3> {
  using type = f16;
};
template <> struct multiplied_type<s8> { /* itself, but for what is never called */
  using type = bf16;
};

template <class PRODUCT, int BM_, int BN, int BK_, int STAGES_, int WARPS> struct unpack_shape : PRODUCT {
  using X = typename PRODUCT::X;
  using W = typename PRODUCT::W;
  static constexpr bool N_MAJOR = false, CODES = operand<X>::BITS == 8, INTEGER = same_type<X, s8>;
  static constexpr bool ZEROS = same_type<W, u4>, VALUES = same_type<W, af4>;
  using MULTIPLIED = typename multiplied_type<X>::type;
  static_assert(!CODES || same_type<X, W>, "codes of activations are multiplied by the same codes");
  static constexpr int BM = BM_, BK = BK_, STAGES = STAGES_, THREADS = WARPS * WARP_SIZE;
  static constexpr int COLUMNS = PRODUCT::HALVES * BN;
  static constexpr int WARPS_M = 1, WM = BM, WN = COLUMNS / WARPS; /* of a warp */
  static constexpr int M_BLOCKS = WM / 16, N_BLOCKS = WN / 8, STEPS = BK / 32;
  static constexpr int PARTS = N_BLOCKS + VALUES; /* of a run; the last one: sums of activations, which values take */
  static constexpr int RUNS = BK / 16;            /* at most, of k with one scale in a k tile */
  static constexpr int EARLY = CODES ? 2 : 4; /* of them whose scales are loaded a k tile ahead: all that is usual */
  static constexpr int A_ROW = BK * operand<X>::BITS / 8, B_ROW = BK * operand<W>::BITS / 8; /* bytes */
  static constexpr int A_VECTORS = A_ROW / 16, B_VECTORS = B_ROW / 16;
  static constexpr int ROWS_A_PASS = THREADS / A_VECTORS, A_PASSES = BM / ROWS_A_PASS;
  static constexpr int ROWS_B_PASS = THREADS / B_VECTORS, B_PASSES = COLUMNS / ROWS_B_PASS;
  static_assert(A_ROW % 128 == 0 && BM % ROWS_A_PASS == 0 && COLUMNS % ROWS_B_PASS == 0, "passes are full");
  static_assert(ROWS_B_PASS % 16 == 0, "a thread's B rows belong to one half");
  static_assert(N_BLOCKS % 2 == 0 && COLUMNS == THREADS && BM <= THREADS, "a thread brings the scales of a column");
  static_assert(STAGES >= 3, "a stage's scales are written while the stage before is at work");
  using sum = typename run_sum<INTEGER>::type;
};

/* Factors of the runs of a k tile. */
template <class S> struct alignas(16) unpack_factors {
  float scale[S::RUNS][S::COLUMNS];
  uint32_t bias[S::ZEROS || S::VALUES ? S::RUNS : 1][S::ZEROS || S::VALUES ? S::COLUMNS : 1]; /* values: as f32 */
  float a_scale[S::CODES ? S::RUNS : 1][S::CODES ? S::BM : 1];
};

template <class S> struct unpack_smem {
  union {
    struct {
      unsigned char a[S::STAGES][S::BM * S::A_ROW];
      unsigned char b[S::STAGES][S::COLUMNS * S::B_ROW];
    };
    float staged[S::BM * STAGED_LD<S::COLUMNS>];
  };
  unpack_factors<S> factors[S::STAGES];
  int32_t source_rows[S::BM]; /* rows of the A operand; -1: zeros */
  tile_unit unit;
  int64_t next;
  columns order;
  tile_table table;
};

/* ---- copies: as the tile form's, in bytes ---- */

/* Vectors of 16 bytes are permuted so that 8 rows of the same vector lie in different banks; of activations of 16 bits,
 * so that 4 rows of the same two do. */
template <int VECTORS> DEVICE int code_swizzle(int row)
{
  return VECTORS >= 8 ? row % 8 : row / (8 / VECTORS) % VECTORS;
}
template <class S> DEVICE int a_swizzle(int row)
{
  return S::CODES ? row % 8 : row % 4 * 2;
}

template <class S> struct unpack_copies {
  const char *source;
  int64_t step, rewind;
  int passes;

  DEVICE unpack_copies(const gemm_args &args, const tile_unit &unit, columns order)
  {
    constexpr int BITS = operand<typename S::W>::BITS;
    const tile_column at(unit, order, S::COLUMNS, threadIdx.x / S::B_VECTORS);
    const int channel_step = order == COLUMNS_plain ? S::ROWS_B_PASS : S::ROWS_B_PASS / 2;
    passes = at.channel >= args.n ? 0 : ceil_div(args.n - at.channel, channel_step);
    source = code_base(args.b, at.half, unit.expert, BITS) + at.channel * (args.b.n_stride * BITS / 8) +
             threadIdx.x % S::B_VECTORS * 16;
    step = channel_step * (args.b.n_stride * BITS / 8);
    rewind = S::B_ROW - S::B_PASSES * step;
  }

  DEVICE void a_pass(const gemm_args &args, const int32_t *source_rows, unsigned char *stage, int k0, int i) const
  {
    constexpr int BYTES = operand<typename S::X>::BITS / 8;
    const int row = threadIdx.x / S::A_VECTORS + i * S::ROWS_A_PASS, vector = threadIdx.x % S::A_VECTORS;
    const int source_row = source_rows[row], k = k0 + vector * (16 / BYTES);
    const bool there = source_row >= 0 && k < args.k;
    cp_async_cg_16(shared_address(stage + row * S::A_ROW + (vector ^ a_swizzle<S>(row)) * 16),
                   static_cast<const char *>(args.a) + (there ? (source_row * args.a_ld + k) * BYTES : 0),
                   there ? 16 : 0);
  }

  DEVICE void b_pass(const gemm_args &args, unsigned char *stage, int k0, int i)
  {
    const int row = threadIdx.x / S::B_VECTORS + i * S::ROWS_B_PASS, vector = threadIdx.x % S::B_VECTORS;
    const bool there = i < passes && k0 + vector * operand<typename S::W>::PER_16 < args.k;
    cp_async_cg_16(shared_address(stage + row * S::B_ROW + (vector ^ code_swizzle<S::B_VECTORS>(row)) * 16),
                   there ? source : args.a, there ? 16 : 0); /* a copy of 0 bytes still needs a valid address */
    source += step;
  }

  DEVICE void copy(const gemm_args &args, unpack_smem<S> &smem, int stage, int k0)
  {
#pragma unroll
    for (int i = 0; i < S::B_PASSES; i++) b_pass(args, smem.b[stage], k0, i);
    source += rewind;
#pragma unroll
    for (int i = 0; i < S::A_PASSES; i++) a_pass(args, smem.source_rows, smem.a[stage], k0, i);
  }
};

/* ---- scales and zero points ---- */

/* Elements of k, a power of two from 16 on, of which an aligned run has one scale. */
template <class S> DEVICE int scale_run(const gemm_args &args)
{
  const scale_matrix &s = args.b.scale;
  const int weights = s.k_stride ? s.block_k | s.k_origin : 0;
  const int rows = args.rows.mode == ROWS_GROUP ? args.rows.group | args.rows.origin : 0;
  const int all = S::BK | weights | rows;
  return all & -all;
}

/* The block of k that a run lies in. */
struct run_walk {
  int index, rest;
  DEVICE void advance(int run, int block)
  {
    rest += run;
    if (rest >= block) {
      rest -= block;
      index++;
    }
  }
};

/* Of a run, as they lie in memory. */
struct raw_factor {
  uint32_t bits, zeros;
  float a_scale;
};

/*
 * What a thread brings of the factors: of a column of the tile, and of a row. Loaded as they are a k tile before they
 * are written, so that nothing waits for them.
 */
template <class S> struct factor_source {
  using decode = decoder<typename S::W, typename S::MULTIPLIED>;
  const char *scale;    /* of the column at its first block; NULL: there is no such channel */
  const uint32_t *zero; /* or NULL; values: of the scales' type */
  const float *a_scale; /* of the row at the first group; NULL: no such row */
  float global;
  int run, k, zero_shift;
  run_walk weights, rows;
  raw_factor early[S::EARLY];

  DEVICE factor_source(const gemm_args &args, const unpack_smem<S> &smem)
  {
    const expert_matrix &b = args.b;
    const tile_unit &unit = smem.unit;
    const tile_column at(unit, smem.order, S::COLUMNS, threadIdx.x);
    const bool there = at.channel < args.n;
    k = 0;
    run = scale_run<S>(args);
    weights = {b.scale.k_origin / b.scale.block_k, b.scale.k_origin % b.scale.block_k};
    rows = {0, args.rows.origin % args.rows.group};
    scale = nullptr;
    zero = nullptr;
    a_scale = nullptr;
    global = 1.f;
    zero_shift = at.channel % 8 * 4;
    if (there) {
      scale = static_cast<const char *>(scale_base(b.scale, at.half, unit.expert)) +
              scale_row(b.scale, at.half, at.channel) * scale_bytes(b.scale.dtype);
      global = global_scale(b, at.half, unit.expert);
      if (S::ZEROS) zero = zero_words(&b, at.half, unit.expert);
      if (zero) zero += at.channel / 8 * b.zero.n_stride;
      if (S::VALUES)
        zero = reinterpret_cast<const uint32_t *>(value_base(&b, at.half, unit.expert) +
                                                  value_row(&b, at.half, at.channel) * scale_bytes(b.scale.dtype));
    }
    if (S::CODES && threadIdx.x < S::BM && smem.source_rows[threadIdx.x] >= 0)
      a_scale = args.a_scale + smem.source_rows[threadIdx.x];
  }

  DEVICE raw_factor load_run(const gemm_args &args)
  {
    const bool there = k < args.k; /* no more is read than there is */
    raw_factor f = {};
    if (scale && there) f.bits = load_scale_bits(scale, weights.index * args.b.scale.k_stride, args.b.scale.dtype);
    if (S::ZEROS && zero && there) f.zeros = zero[weights.index * args.b.zero.k_stride];
    if (S::VALUES && zero && there)
      f.zeros = load_scale_bits(zero, weights.index * args.b.zero.k_stride, args.b.scale.dtype);
    if (S::CODES && a_scale && there) f.a_scale = a_scale[rows.index * args.a_scale_ld];
    weights.advance(run, args.b.scale.block_k);
    rows.advance(run, args.rows.group);
    k += run;
    return f;
  }

  DEVICE void store_run(const gemm_args &args, const raw_factor &f, unpack_factors<S> &to, int r) const
  {
    to.scale[r][threadIdx.x] = scale_value(f.bits, args.b.scale.dtype) * global;
    if constexpr (S::ZEROS) {
      const int point = zero ? (int)(f.zeros >> zero_shift & 15) + args.b.zero.add : 0;
      to.bias[r][threadIdx.x] = decode::bias(args.b.offset + point);
    }
    if constexpr (S::VALUES) to.bias[r][threadIdx.x] = __float_as_uint(scale_value(f.zeros, args.b.scale.dtype));
    if constexpr (S::CODES)
      if (threadIdx.x < S::BM) to.a_scale[r][threadIdx.x] = f.a_scale;
  }

  /* A k tile's: all loads, then all stores. */
  DEVICE void load(const gemm_args &args)
  {
#pragma unroll
    for (int r = 0; r < S::EARLY; r++)
      if (r == 0 || r * run < S::BK) early[r] = load_run(args);
  }
  DEVICE void store(const gemm_args &args, unpack_factors<S> &to)
  {
#pragma unroll
    for (int r = 0; r < S::EARLY; r++)
      if (r == 0 || r * run < S::BK) store_run(args, early[r], to, r);
#pragma unroll 1
    for (int r = S::EARLY; r * run < S::BK; r++) store_run(args, load_run(args), to, r);
  }
};

/* ---- operands ---- */

/* Of 32 k of a warp tile, as they lie in memory. */
template <class S> struct unpack_fragments {
  uint32_t a[S::M_BLOCKS][S::CODES ? 4 : 8]; /* codes: as of an mma of s8; else 16 k: rows l/4, l/4 + 8, two of each */
  uint32_t b[S::N_BLOCKS][2];                /* of each 16 k a lane's four codes */
  uint32_t bias[S::ZEROS ? S::N_BLOCKS : 1];

  /* Where a lane's part lies in a stage. */
  struct offsets {
    uint32_t a, a_flip, b, b_flip; /* bytes; what is flipped of the bytes between rows' begins and k */

    DEVICE offsets()
    {
      const int lane = lane_id(), column = warp_id() * S::WN;
      const int a_row = S::CODES ? lane % 16 : lane / 4;
      a = a_row * S::A_ROW + (S::CODES ? 0 : lane % 4 * 8);
      a_flip = (a_swizzle<S>(a_row) ^ (S::CODES ? lane / 16 : 0)) * 16;
      const bool bytes = S::B_ROW == S::BK;
      const int b_row = column + (bytes ? lane / 16 * 8 + lane % 8 : lane / 4);
      b = b_row * S::B_ROW + (bytes ? 0 : lane % 4 * 2);
      b_flip = (code_swizzle<S::B_VECTORS>(b_row) ^ (bytes ? lane / 8 % 2 : 0)) * 16;
    }
  };

  DEVICE void load_a(const unsigned char *stage, const offsets &at, int step)
  {
#pragma unroll
    for (int i = 0; i < S::M_BLOCKS; i++) {
      const unsigned char *block = stage + at.a + i * 16 * S::A_ROW;
      if constexpr (S::CODES) {
        ldmatrix_x4(a[i], shared_address(block) + (step * 32 ^ at.a_flip));
      } else {
#pragma unroll
        for (int part = 0; part < 4; part++) { /* rows l/4 and l/4 + 8 of the first 16 k, then of the others */
          const uint2 four = *reinterpret_cast<const uint2 *>(block + part % 2 * 8 * S::A_ROW +
                                                              (step * 64 + part / 2 * 32 ^ at.a_flip));
          a[i][part / 2 * 4 + part % 2] = four.x;
          a[i][part / 2 * 4 + part % 2 + 2] = four.y;
        }
      }
    }
  }

  DEVICE void load_b(const unsigned char *stage, const offsets &at, int step)
  {
    if constexpr (S::B_ROW == S::BK) {
#pragma unroll
      for (int j = 0; j < S::N_BLOCKS; j += 2) {
        uint32_t both[4];
        ldmatrix_x4(both, shared_address(stage + at.b + j * 8 * S::B_ROW) + (step * 32 ^ at.b_flip));
        b[j][0] = both[0], b[j][1] = both[1], b[j + 1][0] = both[2], b[j + 1][1] = both[3];
      }
    } else {
#pragma unroll
      for (int j = 0; j < S::N_BLOCKS; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          b[j][half] =
              *reinterpret_cast<const uint16_t *>(stage + at.b + j * 8 * S::B_ROW + half * 8 + (step * 16 ^ at.b_flip));
    }
  }

  DEVICE void load(const unpack_smem<S> &smem, int stage, const offsets &at, int step)
  {
    load_a(smem.a[stage], at, step);
    load_b(smem.b[stage], at, step);
  }

  DEVICE void load_bias(const unpack_factors<S> &factors, int run)
  {
#pragma unroll
    for (int j = 0; j < (S::ZEROS ? S::N_BLOCKS : 0); j++)
      bias[j] = factors.bias[run][warp_id() * S::WN + j * 8 + lane_id() / 4];
  }

  /* Of the first 16 k, the others, or all. */
  DEVICE void multiply(typename S::sum (&part)[S::M_BLOCKS][S::PARTS][4], uint32_t flip, int first, int last) const
  {
    if constexpr (S::INTEGER) {
      const bool low = first == 0, high = last == 1;
#pragma unroll
      for (int j = 0; j < S::N_BLOCKS; j++)
#pragma unroll
        for (int i = 0; i < S::M_BLOCKS; i++)
          mma_m16n8k32_s8(part[i][j], {low ? a[i][0] : 0, low ? a[i][1] : 0, high ? a[i][2] : 0, high ? a[i][3] : 0},
                          {b[j][0] ^ flip, b[j][1] ^ flip});
    } else {
#pragma unroll
      for (int half = first; half <= last; half++) multiply_half(part, flip, half);
    }
  }

  DEVICE void multiply_half(float (&part)[S::M_BLOCKS][S::PARTS][4], uint32_t flip, int half) const
  {
    using T = typename S::MULTIPLIED;
    uint32_t rows[S::M_BLOCKS][4];
#pragma unroll
    for (int i = 0; i < S::M_BLOCKS; i++)
      if constexpr (S::CODES) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const uint2 four = decoder<typename S::X, T>::decode(a[i][half * 2 + r], 0);
          rows[i][r] = four.x, rows[i][r + 2] = four.y;
        }
      } else {
#pragma unroll
        for (int r = 0; r < 4; r++) rows[i][r] = a[i][half * 4 + r];
      }
#pragma unroll
    for (int j = 0; j < S::N_BLOCKS; j++) {
      const uint2 four = decoder<typename S::W, T>::decode(b[j][half], S::ZEROS ? bias[S::ZEROS ? j : 0] : flip);
#pragma unroll
      for (int i = 0; i < S::M_BLOCKS; i++) mma_m16n8k16<T>(part[i][j], rows[i], {four.x, four.y});
    }
    const uint32_t ones = pack_pair<T>(1.f, 1.f);
#pragma unroll
    for (int i = 0; i < (S::VALUES ? S::M_BLOCKS : 0); i++)
      mma_m16n8k16<T>(part[i][S::PARTS - 1], rows[i], {ones, ones});
  }
};

/* ---- sums ---- */

/* acc += sums of activations * values, of a run. */
template <class S>
DEVICE void promote_values(float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4], typename S::sum (&part)[S::M_BLOCKS][S::PARTS][4],
                           const unpack_factors<S> &factors, int run)
{
  const int column = warp_id() * S::WN + lane_id() % 4 * 2;
#pragma unroll
  for (int j = 0; j < S::N_BLOCKS; j++) {
    const uint2 value = *reinterpret_cast<const uint2 *>(&factors.bias[run][column + j * 8]);
#pragma unroll
    for (int i = 0; i < S::M_BLOCKS * 4; i++)
      acc[i / 4][j][i % 4] =
          fmaf(part[i / 4][S::PARTS - 1][i % 4], __uint_as_float(i % 2 ? value.y : value.x), acc[i / 4][j][i % 4]);
  }
#pragma unroll
  for (int i = 0; i < S::M_BLOCKS * 4; i++) part[i / 4][S::PARTS - 1][i % 4] = 0.f;
}

/* acc += part * scales, of a run. */
template <class S>
DEVICE void promote(float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4], typename S::sum (&part)[S::M_BLOCKS][S::PARTS][4],
                    const unpack_factors<S> &factors, int run)
{
  using sum = run_sum<S::INTEGER>;
  const int row = lane_id() / 4, column = warp_id() * S::WN + lane_id() % 4 * 2;
#pragma unroll
  for (int j = 0; j < S::N_BLOCKS; j++) {
    const float2 scale = *reinterpret_cast<const float2 *>(&factors.scale[run][column + j * 8]);
#pragma unroll
    for (int i = 0; i < S::M_BLOCKS; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float of_row =
            S::CODES ? factors.a_scale[S::CODES ? run : 0][S::CODES ? row + i * 16 + c / 2 * 8 : 0] : 1.f;
        acc[i][j][c] = fmaf(of_row * (c % 2 ? scale.y : scale.x), sum::value(part[i][j][c]), acc[i][j][c]);
        part[i][j][c] = sum::BEGIN;
      }
  }
  if constexpr (S::VALUES) promote_values<S>(acc, part, factors, run);
}

/* A k tile's products. */
template <class S>
DEVICE void multiply_tile(float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4], typename S::sum (&part)[S::M_BLOCKS][S::PARTS][4],
                          const unpack_smem<S> &smem, int stage, const typename unpack_fragments<S>::offsets &at,
                          int run, uint32_t flip)
{
  const unpack_factors<S> &factors = smem.factors[stage];
  unpack_fragments<S> f;
  if (run == 16) {
#pragma unroll 1
    for (int step = 0; step < S::STEPS; step++) {
      f.load(smem, stage, at, step);
      f.load_bias(factors, step * 2);
      f.multiply(part, flip, 0, 0);
      promote<S>(acc, part, factors, step * 2);
      f.load_bias(factors, step * 2 + 1);
      f.multiply(part, flip, 1, 1);
      promote<S>(acc, part, factors, step * 2 + 1);
    }
    return;
  }
  int done = 0;
#pragma unroll 1
  for (int step = 0, upto = 0; step < S::STEPS; step++) {
    f.load(smem, stage, at, step);
    f.load_bias(factors, done);
    f.multiply(part, flip, 0, 1);
    upto += 32;
    if (upto < run) continue;
    promote<S>(acc, part, factors, done++);
    upto = 0;
  }
}

/* acc = A B of a unit. */
template <class S>
DEVICE void accumulate(const gemm_args &args, unpack_smem<S> &smem, float (&acc)[S::M_BLOCKS][S::N_BLOCKS][4])
{
  unpack_copies<S> copies(args, smem.unit, smem.order);
  factor_source<S> source(args, smem);
#pragma unroll
  for (int s = 0; s < S::STAGES - 1; s++) {
    source.load(args);
    copies.copy(args, smem, s, s * S::BK);
    cp_async_commit_group();
    source.store(args, smem.factors[s]);
  }
  const typename unpack_fragments<S>::offsets at;
  const uint32_t flip =
      S::INTEGER ? decoder<s8, bf16>::bias(args.b.offset) : factor_source<S>::decode::bias(args.b.offset);
  typename S::sum part[S::M_BLOCKS][S::PARTS][4];
#pragma unroll
  for (int i = 0; i < S::M_BLOCKS * S::PARTS * 4; i++)
    part[i / 4 / S::PARTS][i / 4 % S::PARTS][i % 4] = run_sum<S::INTEGER>::BEGIN;
  int stage = 0;
#pragma unroll 1
  for (int k0 = 0; k0 < args.k; k0 += S::BK) {
    const int refill = stage == 0 ? S::STAGES - 1 : stage - 1;
    cp_async_wait_group<S::STAGES - 2>();
    __syncthreads(); /* this k tile is there; the one before has been read */
    source.load(args);
    copies.copy(args, smem, refill, k0 + (S::STAGES - 1) * S::BK);
    cp_async_commit_group();
    multiply_tile<S>(acc, part, smem, stage, at, source.run, flip);
    source.store(args, smem.factors[refill]);
    stage = stage + 1 == S::STAGES ? 0 : stage + 1;
  }
  cp_async_wait_group<0>();
  __syncthreads();
}

template <class S> DEVICE void unpack_gemm(const gemm_args &args, unpack_smem<S> &smem)
{
  multiply_units<S>(args, smem);
}

#endif
